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
NUM_AT_ONCE = min(os.cpu_count() or 2, 4)

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


# By engine.
CASES_WITHOUT_FAULT = {"fibers": 300, "threads": 12}


class Harness:
    """Compiles test_kernels.cpp with a copy of the kernels, faulty or not, and runs it."""

    # Most of the time goes into compiling: -O2 would take more there than it saves in the runs, and
    # so would -O0 the other way round.
    options_of_engine = {
        "fibers": ("-O1", "-pthread"),
        "threads": ("-O1", "-pthread", "-fsanitize=thread"),
    }

    def __init__(self, folder: Path):
        self.folder = folder
        # Not from the copy: what is compared with stays right.
        self.launchers = [
            folder / f"{name}.o" for name in ("verify", "sample", "sample_logits", "chain_tree")
        ]
        for launcher in self.launchers:
            source = ROOT / f"csrc/cpu/{launcher.stem}.cpp"
            self.compile("-O2", f"-I{ROOT / 'csrc/core'}", "-c", source, "-o", launcher)
        self.std_headers = {
            engine: self.precompile_std_headers(engine) for engine in self.options_of_engine
        }

    def compile(self, *options: str | Path, source: str | None = None) -> None:
        command = [CXX, "-std=c++20", "-ffp-contract=off", "-fno-strict-aliasing", *options]
        done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]

    def precompile_std_headers(self, engine: str) -> Path:
        """A header that includes what the shim does; compilers take the .gch beside it instead."""
        sources = [path.read_text() for path in (ROOT / "tests/shim").glob("*.h")]
        names = sorted({name for text in sources for name in re.findall(r"#include (<\w+>)", text)})
        header = self.folder / engine / "std_headers.h"
        header.parent.mkdir()
        header.write_text("".join(f"#include {name}\n" for name in names))
        self.compile(
            *self.options_of_engine[engine], "-x", "c++-header", header, "-o", f"{header}.gch"
        )
        return header

    def copy(self, name: str) -> Path:
        csrc = self.folder / re.sub(r"\W+", "_", name) / "csrc"
        for part in ("core", "cuda", "cpu"):
            shutil.copytree(ROOT / "csrc" / part, csrc / part)
        return csrc

    def run(
        self, csrc: Path, engine: str, num_cases: int, op: str | None = None
    ) -> subprocess.CompletedProcess:
        program = csrc.parent / "test_kernels"
        shim = ROOT / "tests/shim"
        source = (shim / "test_kernels.cpp").read_text()
        self.compile(
            *self.options_of_engine[engine],
            *("-include", self.std_headers[engine]),
            *(f"-I{folder}" for folder in (csrc / "core", csrc / "cuda", csrc / "cpu", shim)),
            *("-x", "c++", "-", "-x", "none", *self.launchers, "-o", program),
            source=source if op is None else only(op, source),
        )
        return subprocess.run(
            [program, engine, "1", str(num_cases), *([op] if op else [])],
            capture_output=True,
            text=True,
            timeout=240,
            env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1"},
            check=False,
        )

    def run_with(self, name: str) -> subprocess.CompletedProcess:
        if name in CASES_WITHOUT_FAULT:
            return self.run(self.copy(name), name, CASES_WITHOUT_FAULT[name])
        fault = FAULTS[name]
        csrc = self.copy(name)
        path = csrc / fault.file
        source = path.read_text()
        assert source.count(fault.text) == 1, f"{fault.file} has changed; plant it anew"
        path.write_text(source.replace(fault.text, fault.planted))
        if fault.report == RACE:
            return self.run(csrc, "threads", 60, fault.op)
        return self.run(csrc, "fibers", 3000, fault.op)


def only(op: str, source: str) -> str:
    """test_kernels.cpp without the code of other ops, which halves the time to compile it.

    Their places in its table stay, so that a seed means the same case.
    """
    entry = re.compile(r'\{"(\w+)",\s*\[\]\(Case& test\) \{.*?\}\}', re.DOTALL)
    assert op in entry.findall(source), f"kOps has changed: no entry for {op}"
    return entry.sub(lambda e: e[0] if e[1] == op else f'{{"{e[1]}", nullptr}}', source)


class Runs:
    """All runs, of which the next ones are always under way too."""

    def __init__(self, harness: Harness, pool: concurrent.futures.Executor):
        self.harness = harness
        self.pool = pool
        self.futures: dict[str, concurrent.futures.Future] = {}

    def __getitem__(self, name: str) -> subprocess.CompletedProcess:
        names = [*CASES_WITHOUT_FAULT, *FAULTS]
        at = names.index(name)
        # One more than run at a time: then no place is empty until the next test asks.
        for each in names[at : at + NUM_AT_ONCE + 1]:
            if each not in self.futures:
                self.futures[each] = self.pool.submit(self.harness.run_with, each)
        return self.futures[name].result()


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    return Harness(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="module")
def runs(harness):
    with concurrent.futures.ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        yield Runs(harness, pool)
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("engine", CASES_WITHOUT_FAULT)
def test_without_a_fault_the_harness_reports_none(engine, runs):
    """Else a failure would say nothing about a fault."""
    done = runs[engine]
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{CASES_WITHOUT_FAULT[engine]} cases equal\n"


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught(name, runs):
    done = runs[name]
    output = done.stdout + done.stderr
    assert done.returncode != 0, f"not caught: {output[-2000:]}"
    assert re.search(FAULTS[name].report, output), output[-4000:]
