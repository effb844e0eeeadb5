"""bench_verify.py on the CPU: that it runs, and that it refuses to time what is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from adaptive_spec.testing.timer import sample_interleaved

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def benches():
    """The benchmark's two modules; as scripts they import each other by bare name."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import bench_verify
        import verify_alternatives
    finally:
        sys.path.pop(0)
    return bench_verify, verify_alternatives


def test_it_runs_and_reports_every_alternative(tmp_path):
    command = ["benchmarks/bench_verify.py", "--device", "cpu", "--samples", "2"]
    done = subprocess.run(
        [sys.executable, *command, "--output", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "csrc")))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "bench_verify.json").read_text())
    seen = {(row["op"], row["cache"], row["alternative"]) for row in report["rows"]}
    fused = ("fused, with state", "fused, no state", "fused, policy on the host")
    expected = {
        (op, c, f) for op in ("tree", "chain", "logits") for c in ("warm", "cold") for f in fused
    }
    assert expected < seen
    assert {name for op, _, name in seen if op == "logits"} == set(report["stands_for"])
    # Times of a CPU say nothing about the targets, so they must not look like a verdict.
    assert [target["passed"] for target in report["targets"]] == [None] * 5
    markdown = (tmp_path / "bench_verify.md").read_text(encoding="utf-8")
    assert "measures no GPU" in markdown
    assert "not judged" in markdown
    assert "pass |" not in markdown


@pytest.mark.parametrize("op", ["tree", "chain", "logits"])
def test_a_wrong_alternative_is_not_timed(benches, op):
    """A kernel that is fast because it is wrong would win."""
    bench, parts = benches
    shape = parts.Shape(op, 3, 64, torch.device("cpu"))
    batches = [parts.make_batch(shape, seed) for seed in range(2)]
    fused = parts.Fused(shape)
    ways = parts.alternatives(shape, fused)
    wrong = parts.Alternative("lazy", "", lambda batch: None)
    with pytest.raises(SystemExit, match="lazy: wrong `accept_token_num`"):
        bench.check(fused, [wrong], batches)
    bench.check(fused, ways, batches)


def test_a_state_that_went_astray_is_not_timed(benches):
    bench, parts = benches
    shape = parts.Shape("chain", 3, 64, torch.device("cpu"))
    batches = [parts.make_batch(shape, seed=0)]
    fused = parts.Fused(shape)
    twice = parts.Alternative("twice", "", lambda b: (fused.launch(b), fused.launch(b)))
    with pytest.raises(SystemExit, match="state and the Python policy disagree"):
        bench.check(fused, [twice], batches)


@pytest.mark.parametrize("batch_size", [1, 2, 8, 64, 256])
def test_two_drafts_are_accepted_on_average(benches, batch_size):
    """The targets are stated for that; at other means the op reads more or less."""
    parts = benches[1]
    batch = parts.make_batch(parts.Shape("chain", batch_size, 64, torch.device("cpu")), seed=1)
    assert abs(batch.accepted.float().mean().item() - 2) <= 0.5 / batch_size + 0.1


def test_needed_bytes_are_those_of_rows_up_to_the_first_mismatch(benches):
    parts = benches[1]
    batch = parts.make_batch(parts.Shape("logits", 5, 64, torch.device("cpu")), seed=1)
    logits = batch.inputs["target_logits"]
    others = batch.num_bytes - logits.nbytes
    rows = sum(min(n, 7) + 1 for n in batch.accepted.tolist())
    assert batch.num_needed_bytes == others + rows * 64 * 2
    assert batch.num_bytes == others + 5 * 8 * 64 * 2


def passing_rows() -> list[dict]:
    """What targets() looks at, as if measured on a GPU."""
    common = {"op": "logits", "batch_size": 64, "cache": "cold", "us": 10.0, "floor_needed_us": 8.0}
    fused = {"alternative": "fused, with state", "relative_to_fused": 1.0, "launches": 1}
    fused |= {"state_cost_us": 0.4, "state_cost_share": 0.04}
    argmax = {"alternative": "argmax + verify", "relative_to_fused": 2.0, "launches": 3}
    return [common | fused, common | argmax]


@pytest.mark.parametrize(
    ("changed", "no_syncs", "fails"),
    [
        ({}, True, None),
        ({"state_cost_us": 0.6}, True, 0),
        ({"us": 12.0}, True, 2),
        ({"launches": 2}, True, 3),
        ({}, False, 4),
    ],
)
def test_targets_are_judged(benches, changed, no_syncs, fails):
    rows = passing_rows()
    rows[0] |= changed
    judged = benches[0].targets(rows, no_syncs, on_gpu=True)
    assert [t["passed"] for t in judged] == [i != fails for i in range(5)]


def test_samples_are_taken_in_turns():
    """Differences of samples with the same index are taken as if measured at the same time."""
    order = []
    samplers = {name: lambda name=name: order.append(name) or 1.0 for name in "ab"}
    assert sample_interleaved(samplers, 2) == {"a": [1.0, 1.0], "b": [1.0, 1.0]}
    assert order == ["a", "b"] * 3
