"""The kernel tests fail when they should: each fault here is planted in a copy of the sources."""

import concurrent.futures
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CXX = os.environ.get("CXX", "c++")

pytestmark = pytest.mark.skipif(shutil.which(CXX) is None, reason=f"needs the compiler {CXX}")

WRONG = "differs from the CPU op's|not back at zero"
FAULT = "fault"
RACE = "ThreadSanitizer: data race"
DIVERGENCE = r"block \d+: thread \d+ is at .*, but thread"


@dataclass(frozen=True)
class Fault:
    """In `file`, the only occurrence of `text` becomes `planted`; tests of `op` then say `report`.

    A race is looked for with real threads, the rest with fibers.
    """

    op: str
    file: str
    text: str
    planted: str
    report: str = WRONG


FAULTS = {
    # Barriers.
    "no barrier before the warps' sums are read": Fault(
        "update", "cuda/finish.cuh", "  __syncthreads();\n  RoundSums all;", "  RoundSums all;"
    ),
    "no barrier before the warps' sums are read, a race": Fault(
        "update",
        "cuda/finish.cuh",
        "  __syncthreads();\n  RoundSums all;",
        "  RoundSums all;",
        RACE,
    ),
    "no barrier before the next requests' counts are written": Fault(
        "chain",
        "cuda/finish.cuh",
        "overwrites the warps' counts.\n    __syncthreads();\n",
        "overwrites the warps' counts.\n",
    ),
    "no barrier before the block learns that it is the last": Fault(
        "chain",
        "cuda/verify.cuh",
        "    __syncthreads();\n    if (!shared.is_last)",
        "    if (!shared.is_last)",
        f"{WRONG}|{DIVERGENCE}",
    ),
    "no barrier before the warps' best entries are read": Fault(
        "logits",
        "cuda/warp.cuh",
        "  __syncthreads();\n  if (threadIdx.x >= kWarpSize) return partial;",
        "  if (threadIdx.x >= kWarpSize) return partial;",
    ),
    "no warp barrier behind an arrival": Fault(
        "logits", "cuda/finish.cuh", "0) != 0;\n  __syncwarp();\n", "0) != 0;\n", RACE
    ),
    "a lane that skips a shuffle": Fault(
        "logits",
        "cuda/warp.cuh",
        "  return warp_merge(lane < num_warps ?",
        "  if (lane >= num_warps) return partial;\n  return warp_merge(lane < num_warps ?",
        DIVERGENCE,
    ),
    "threads that end before a barrier": Fault(
        "update",
        "cuda/update.cuh",
        "  sums = block_sums({",
        "  if (threadIdx.x / kWarpSize > num_live) return;\n  sums = block_sums({",
        DIVERGENCE,
    ),
    # Memory ordering.
    "arrivals that order nothing": Fault(
        "chain", "cuda/memory.cuh", "__ATOMIC_ACQ_REL", "__ATOMIC_RELAXED", RACE
    ),
    "arrivals that do not acquire": Fault(
        "logits", "cuda/memory.cuh", "__ATOMIC_ACQ_REL", "__ATOMIC_RELEASE", RACE
    ),
    "arrivals that do not release": Fault(
        "logits", "cuda/memory.cuh", "__ATOMIC_ACQ_REL", "__ATOMIC_ACQUIRE", RACE
    ),
    # The second load is where others come in between.
    "a sum added to in two steps": Fault(
        "tree",
        "cuda/memory.cuh",
        "  __atomic_fetch_add(sum, value, __ATOMIC_RELAXED);\n",
        "  const int64_t before = __atomic_load_n(sum, __ATOMIC_RELAXED);\n"
        "  (void)__atomic_load_n(sum, __ATOMIC_RELAXED);\n"
        "  *sum = before + value;\n",
    ),
    # Replays.
    "a ticket that does not go back to zero": Fault(
        "tree", "cuda/memory.cuh", "before == count - 1 ? 0 : before + 1", "before + 1"
    ),
    "sums that are not cleared": Fault("tree", "cuda/finish.cuh", "  totals->anomalies = 0;\n", ""),
    "a mismatch mark that is not cleared": Fault(
        "logits", "cuda/logits_rows.cuh", "        if (lane == 0) progress()->stop = 0;\n", ""
    ),
    # Offsets of 32 bits.
    "a request's offset in 32 bits": Fault(
        "logits",
        "core/params.h",
        "b * request_stride",
        "static_cast<int32_t>(b * request_stride)",
        f"{WRONG}|{FAULT}",
    ),
    "a position's offset in 32 bits": Fault(
        "logits",
        "core/params.h",
        "i * position_stride",
        "static_cast<int32_t>(i * position_stride)",
        f"{WRONG}|{FAULT}",
    ),
    # Padding rows.
    "padding rows counted": Fault(
        "update",
        "cuda/update.cuh",
        "num_live_rows(params.num_reqs, params.batch_size);\n  RoundSums sums;",
        "params.batch_size;\n  RoundSums sums;",
        f"{WRONG}|{FAULT}",
    ),
    "padding rows verified": Fault(
        "chain",
        "cuda/verify.cuh",
        "num_live_rows(round.num_reqs, round.batch_size)",
        "round.batch_size",
        f"{WRONG}|{FAULT}",
    ),
    "padding rows read, though not used": Fault(
        "chain",
        "cuda/finish.cuh",
        "    const int64_t prefix = warp_prefix_sum(length);\n",
        "    if (b < params.round.batch_size) {\n"
        "      (void)*static_cast<const volatile int32_t*>(&outputs.accept_token_num[b]);\n"
        "    }\n"
        "    const int64_t prefix = warp_prefix_sum(length);\n",
        FAULT,
    ),
    # Rows of logits.
    "ties to the later index when pieces are merged": Fault(
        "logits", "core/argmax.h", "b.index < a.index", "b.index > a.index"
    ),
    "rows passed over too early": Fault(
        "logits",
        "cuda/logits_rows.cuh",
        "max_relaxed(&progress()->stop, stop_mark())",
        "max_relaxed(&progress()->stop, stop_mark() + 2)",
    ),
    "a row's last entries forgotten": Fault(
        "logits", "cuda/logits_rows.cuh", "(end - base + kRun - 1) / kRun", "(end - base) / kRun"
    ),
    # Rows that are sampled.
    "no barrier before the block learns that its row is done": Fault(
        "sampled_chain_logits",
        "cuda/sample_logits.cuh",
        "  __syncthreads();\n  if (!shared.is_done) return;",
        "  if (!shared.is_done) return;",
        f"{WRONG}|{DIVERGENCE}|{FAULT}",
    ),
    "no barrier before all read the sums of a row": Fault(
        "sampled_chain_logits",
        "cuda/sample_logits.cuh",
        "shared_.row_sums = all;\n    __syncthreads();\n",
        "shared_.row_sums = all;\n",
        f"{WRONG}|{DIVERGENCE}|{FAULT}",
    ),
    "no barrier before all read the sums of a row, a race": Fault(
        "sampled_chain_logits",
        "cuda/sample_logits.cuh",
        "shared_.row_sums = all;\n    __syncthreads();\n",
        "shared_.row_sums = all;\n",
        RACE,
    ),
    "only the first piece's scores": Fault(
        "sampled_tree_logits", "cuda/sample_logits.cuh", "merge(a.score, b.score)", "a.score"
    ),
    "noise by the place in a piece": Fault(
        "sampled_tree_logits",
        "cuda/sample_logits.cuh",
        "take_run(max, logits, first, -kInfinity)",
        "take_run(max, logits, first - block.begin(), -kInfinity)",
    ),
    "runs of noise that begin with a block": Fault(
        "sampled_chain_logits", "core/noise.h", "shift == j ? all[k + j]", "shift < 0 ? all[k + j]"
    ),
    "a residual without the draft's share": Fault(
        "sampled_chain_logits", "core/row_choice.h", " * share - taken", " * share - 0 * taken"
    ),
    # Drawing.
    "no barrier before the warps' units are read": Fault(
        "sampled_chain",
        "cuda/sample.cuh",
        "shared.units[warp] = prefix;\n    __syncthreads();\n",
        "shared.units[warp] = prefix;\n",
        f"{WRONG}|{DIVERGENCE}",
    ),
    "rejected drafts marked in the wrong pieces": Fault(
        "sampled_tree", "cuda/sample.cuh", "token >= begin && token < end", "token < begin"
    ),
    "the place in the chosen piece not relative to it": Fault(
        "sampled_chain",
        "cuda/sample.cuh",
        "shared.left = left - (prefix - units);",
        "shared.left = left;",
    ),
    "a request's ticket that counts all pieces of the batch": Fault(
        "sampled_chain",
        "cuda/sample.cuh",
        "request(b)->ticket, num_pieces)",
        "request(0)->ticket, num_pieces)",
    ),
    # Trees.
    "only the first 64 nodes of a large tree seen": Fault(
        "tree", "cuda/warp.cuh", "    return row_[i];", "    return high_;", f"{WRONG}|{DIVERGENCE}"
    ),
}


class Harness:
    """Compiles test_kernels.cpp with a copy of the kernels, faulty or not, and runs it."""

    def __init__(self, folder: Path):
        self.folder = folder
        # Not from the copy: what is compared with stays right.
        self.launchers = [
            folder / f"{name}.o" for name in ("verify", "sample", "sample_logits", "chain_tree")
        ]
        for launcher in self.launchers:
            source = ROOT / f"csrc/cpu/{launcher.stem}.cpp"
            self.compile("-O2", f"-I{ROOT / 'csrc/core'}", "-c", source, "-o", launcher)

    def compile(self, *options: str | Path) -> None:
        command = [CXX, "-std=c++20", "-ffp-contract=off", "-fno-strict-aliasing", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]

    def copy(self, name: str) -> Path:
        csrc = self.folder / re.sub(r"\W+", "_", name) / "csrc"
        for part in ("core", "cuda", "cpu"):
            shutil.copytree(ROOT / "csrc" / part, csrc / part)
        return csrc

    def run(self, csrc: Path, *arguments: str) -> subprocess.CompletedProcess:
        program = csrc.parent / "test_kernels"
        include = [f"-I{csrc / part}" for part in ("core", "cuda", "cpu")]
        sanitizer = ["-fsanitize=thread"] if arguments[0] == "threads" else []
        source = ROOT / "tests/shim/test_kernels.cpp"
        self.compile(
            "-O1", *sanitizer, "-pthread", *include, source, *self.launchers, "-o", program
        )
        return subprocess.run(
            [program, *arguments],
            capture_output=True,
            text=True,
            timeout=240,
            env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1"},
            check=False,
        )

    def run_with(self, name: str) -> subprocess.CompletedProcess:
        fault = FAULTS[name]
        csrc = self.copy(name)
        path = csrc / fault.file
        source = path.read_text()
        assert source.count(fault.text) == 1, f"{fault.file} has changed; plant it anew"
        path.write_text(source.replace(fault.text, fault.planted))
        if fault.report == RACE:
            return self.run(csrc, "threads", "1", "60", fault.op)
        return self.run(csrc, "fibers", "1", "3000", fault.op)


class Runs:
    """The faults' runs, of which the next one is always under way too."""

    def __init__(self, harness: Harness, pool: concurrent.futures.Executor):
        self.harness = harness
        self.pool = pool
        self.futures: dict[str, concurrent.futures.Future] = {}

    def __getitem__(self, name: str) -> subprocess.CompletedProcess:
        names = list(FAULTS)
        at = names.index(name)
        for each in names[at : at + 2]:
            if each not in self.futures:
                self.futures[each] = self.pool.submit(self.harness.run_with, each)
        return self.futures[name].result()


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    return Harness(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def runs(harness):
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield Runs(harness, pool)


@pytest.mark.parametrize("engine, num_cases", [("fibers", 300), ("threads", 12)])
def test_without_a_fault_the_harness_reports_none(engine, num_cases, harness):
    """Else a failure would say nothing about a fault."""
    done = harness.run(harness.copy(engine), engine, "1", str(num_cases))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{num_cases} cases equal\n"


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught(name, runs):
    done = runs[name]
    output = done.stdout + done.stderr
    assert done.returncode != 0, f"not caught: {output[-2000:]}"
    assert re.search(FAULTS[name].report, output), output[-4000:]
