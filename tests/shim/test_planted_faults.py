"""The kernel tests fail when they should: each fault here is planted in a copy of the headers."""

import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CXX = os.environ.get("CXX", "c++")

pytestmark = pytest.mark.skipif(shutil.which(CXX) is None, reason=f"needs the compiler {CXX}")

WRONG = r"outputs differ|states differ|counters are not back at zero"
RACE = "ThreadSanitizer: data race"


@dataclass(frozen=True)
class Fault:
    """In `file`, the only occurrence of `text` becomes `planted`; the run then says `report`."""

    file: str
    text: str
    planted: str
    report: str = WRONG
    threads: bool = False


FAULTS = {
    "a barrier removed": Fault(
        "cuda/finish.cuh",
        "  __syncthreads();\n  RoundSums all;",
        "  RoundSums all;",
    ),
    "the barrier between two batches of packed tokens removed": Fault(
        "cuda/finish.cuh",
        "overwrites the warps' counts.\n    __syncthreads();\n",
        "overwrites the warps' counts.\n",
    ),
    "release and acquire removed from the tickets": Fault(
        "cuda/memory.cuh", "__ATOMIC_ACQ_REL", "__ATOMIC_RELAXED", report=RACE, threads=True
    ),
    "acquire removed from the tickets": Fault(
        "cuda/memory.cuh", "__ATOMIC_ACQ_REL", "__ATOMIC_RELEASE", report=RACE, threads=True
    ),
    "a ticket that does not go back to zero": Fault(
        "cuda/memory.cuh", "before == count - 1 ? 0 : before + 1", "before + 1"
    ),
    "sums that are not cleared": Fault("cuda/finish.cuh", "  totals->accepted = 0;\n", ""),
    "a mismatch mark that is not cleared": Fault(
        "cuda/verify_logits.cuh", "        if (lane == 0) progress->stop = 0;\n", ""
    ),
    "a 32-bit offset": Fault(
        "cuda/verify_logits.cuh",
        "b * params.request_stride",
        "static_cast<int32_t>(b * params.request_stride)",
        report="failed: tokens|SEGV",
    ),
    "padding rows counted": Fault(
        "cuda/update.cuh",
        "num_live_rows(params.num_reqs, params.batch_size);\n  RoundSums sums;",
        "params.batch_size;\n  RoundSums sums;",
    ),
    "ties to the later index when pieces are merged": Fault(
        "core/argmax.h", "b.index < a.index", "b.index > a.index"
    ),
    "rows passed over too early": Fault(
        "cuda/verify_logits.cuh",
        "max_relaxed(&progress->stop, static_cast<uint32_t>(num_positions - position))",
        "max_relaxed(&progress->stop, static_cast<uint32_t>(num_positions - position + 2))",
    ),
    "the last partial run of a row forgotten": Fault(
        "cuda/verify_logits.cuh", "if (rest < end) take_one(rest);", "(void)rest;"
    ),
    "only the first 64 nodes of a large tree looked at": Fault(
        "cuda/warp.cuh",
        "    return row_[i];",
        "    return high_;",
        report=f"{WRONG}|divergent warp",
    ),
}


def build_and_run(folder: Path, *, threads: bool) -> subprocess.CompletedProcess:
    """The kernel tests compiled from the headers in `folder`/csrc, and run."""
    csrc, program = folder / "csrc", folder / "test_kernels"
    command = [CXX, "-std=c++20", "-g", "-ffp-contract=off", "-o", str(program)]
    command += ["-O1", "-fsanitize=thread"] if threads else ["-O1"]
    command += [f"-I{csrc / name}" for name in ("core", "cuda", "cpu")]
    command += [str(ROOT / "tests/shim/test_kernels.cpp")]
    command += [str(csrc / "cpu" / name) for name in ("verify.cpp", "chain_tree.cpp")]
    subprocess.run([*command, "-pthread"], check=True)
    return subprocess.run(
        [program, *(["100", "threads"] if threads else ["5000"])],
        capture_output=True,
        text=True,
        timeout=240,
        env=os.environ | {"TSAN_OPTIONS": "halt_on_error=1"},
        check=False,
    )


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught(name, tmp_path):
    fault = FAULTS[name]
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc", ignore=shutil.ignore_patterns("*.so"))
    path = tmp_path / "csrc" / fault.file
    source = path.read_text()
    assert source.count(fault.text) == 1, f"{fault.file} has changed; plant it anew"
    path.write_text(source.replace(fault.text, fault.planted))
    done = build_and_run(tmp_path, threads=fault.threads)
    output = done.stdout + done.stderr
    assert done.returncode != 0, f"not caught:\n{output[-2000:]}"
    if done.returncode == -signal.SIGSEGV:
        output += "SEGV"
    assert re.search(fault.report, output), output[-2000:]
