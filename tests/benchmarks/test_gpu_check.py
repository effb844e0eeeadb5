"""gpu_check.sh without a GPU: it says so, and where parts fail it goes on and reports them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

NVIDIA_SMI = """
case "$1" in
  *compute_cap) echo 9.0 ;;
  *name) echo "NVIDIA Test 200" ;;
  *) echo 1 ;;
esac
"""
# Stands for Python: each of the parts ends as the case says.
PYTHON = """
case "$*" in
  *gpu_report.py*) exec {python} "$@" ;;
  *setup.py*) [ "$TORCH_CUDA_ARCH_LIST" = 9.0 ] && echo built ;;
  *"-m pytest"*) echo "1 failed | 2 passed"; exit 1 ;;
  *bench_verify.py*)
    echo '{report}' > "${{!#}}/bench_verify.json"
    echo "# times" > "${{!#}}/bench_verify.md"
    ;;
esac
"""
SANITIZER = """
[ "$2" = racecheck ] && kill -9 $$
echo "========= ERROR SUMMARY: 0 errors"
"""
BENCH_REPORT = {"targets": [{"target": "fast", "measured": "slow", "passed": False}]}


def run_check(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(ROOT / "benchmarks/gpu_check.sh"), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_gpu_is_said_and_leaves_nothing_behind(tmp_path):
    done = run_check(str(tmp_path / "out"), PYTHON=sys.executable)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("gpu_check: no CUDA device")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def pretended_gpu(tmp_path):
    """Tools that answer as on a machine with a GPU; returns the environment with them."""
    tools = tmp_path / "tools"
    tools.mkdir()
    python = PYTHON.format(python=sys.executable, report=json.dumps(BENCH_REPORT))
    for name, script in {
        "nvidia-smi": NVIDIA_SMI,
        "python-stub": python,
        "compute-sanitizer": SANITIZER,
    }.items():
        (tools / name).write_text("#!/usr/bin/env bash\n" + script)
        (tools / name).chmod(0o755)
    return {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHON": str(tools / "python-stub"),
    }


def test_a_part_that_fails_does_not_stop_the_others(pretended_gpu, tmp_path):
    out = tmp_path / "out"
    done = run_check(str(out), **pretended_gpu)
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads((out / "report.json").read_text())
    assert [(part["name"], part["outcome"]) for part in report["parts"]] == [
        ("build", "passed"),
        ("tests", "FAILED"),
        ("bench_verify", "passed"),
        ("memcheck", "passed"),
        ("racecheck", "TIMED OUT"),
        ("synccheck", "passed"),
    ]
    assert report["benchmarks"]["bench_verify"] == BENCH_REPORT
    assert "NVIDIA Test 200, compute capability 9.0" in report["versions"][0]
    markdown = (out / "report.md").read_text()
    assert "| tests | FAILED | 1 |" in markdown
    assert "## The end of tests\n\n```\n1 failed | 2 passed\n```" in markdown
    assert "bench_verify: fast: slow: **FAIL**" in markdown
    assert "# times" in markdown
    assert sorted(path.name for path in out.iterdir()) == [
        "bench_verify.json",
        "bench_verify.md",
        "check.log",
        "report.json",
        "report.md",
    ]


def test_an_earlier_report_is_not_mixed_in(pretended_gpu, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "bench_old.json").write_text("{}")
    run_check(**pretended_gpu, OUT=str(out))
    assert set(json.loads((out / "report.json").read_text())["benchmarks"]) == {"bench_verify"}
