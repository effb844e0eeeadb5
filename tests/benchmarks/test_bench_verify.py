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
    """The benchmark's modules; as scripts they import each other by bare name."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import bench_verify
        import sampling_alternatives
        import verify_alternatives
    finally:
        sys.path.pop(0)
    return bench_verify, verify_alternatives, sampling_alternatives


def run_bench(output: Path) -> subprocess.CompletedProcess:
    command = ["benchmarks/bench_verify.py", "--device", "cpu", "--samples", "2"]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "csrc")))
    return subprocess.run(
        [sys.executable, *command, "--output", str(output)],
        cwd=ROOT,
        # Threads that wait for a core beside other tests take ten times as long.
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_runs_and_reports_every_alternative(tmp_path):
    done = run_bench(tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "bench_verify.json").read_text())
    seen = {(row["op"], row["cache"], row["alternative"]) for row in report["rows"]}
    fused = ("fused, with state", "fused, no state", "fused, policy on the host")
    expected = {
        (op, c, f) for op in ("tree", "chain", "logits") for c in ("warm", "cold") for f in fused
    }
    assert expected < seen
    sampled = {
        "sampled tree": {"torch rejection"},
        "sampled chain": {"torch rejection"},
        "sampled chain, block": {"torch rejection"},
        "logits, sampled": {"softmax + draw + match"},
        "logits, sampled, draft": {"softmax + torch rejection", "softmax + sampled chain"},
        "tree logits, sampled": {"softmax + draw + match"},
    }
    for op in ("logits, sampled", "logits, sampled, draft", "tree logits, sampled"):
        sampled[f"{op}, filters"] = sampled[op]
    for op, others in sampled.items():
        assert {name for o, _, name in seen if o == op} == {*fused[:2], *others}
    assert {name for _, _, name in seen} == set(report["stands_for"])
    # Times of a CPU say nothing about the targets, so they must not look like a verdict.
    assert [target["passed"] for target in report["targets"]] == [None] * 5
    markdown = (tmp_path / "bench_verify.md").read_text(encoding="utf-8")
    assert "measures no GPU" in markdown
    assert "not judged" in markdown
    assert "pass |" not in markdown
    # The terminal's tables, in a pipe, are as wide as their longest cells.
    assert "split argmax + finalize + verify" in done.stdout
    assert "…" not in done.stdout


def test_an_output_that_cannot_be_written_is_refused_before_anything_runs(tmp_path):
    (tmp_path / "file").touch()
    done = run_bench(tmp_path / "file" / "folder")
    assert done.returncode == 2
    assert "--output" in done.stderr and "cannot write" in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("op", ["tree", "chain", "logits"])
def test_a_wrong_alternative_is_not_timed(benches, op):
    """A kernel that is fast because it is wrong would win."""
    bench, parts, _ = benches
    shape = parts.Shape(op, 3, 64, torch.device("cpu"))
    batches = [parts.make_batch(shape, seed) for seed in range(2)]
    fused = parts.Fused(shape)
    ways = parts.alternatives(shape, fused)
    wrong = parts.Alternative("lazy", "", lambda batch: None)
    with pytest.raises(SystemExit, match="lazy: wrong `accept_token_num`"):
        bench.check(fused, [wrong], batches)
    bench.check(fused, ways, batches)


SAMPLED_OPS = [
    "sampled tree",
    "sampled chain",
    "sampled chain, block",
    "logits, sampled",
    "logits, sampled, filters",
    "logits, sampled, draft",
    "logits, sampled, draft, filters",
    "tree logits, sampled",
    "tree logits, sampled, filters",
]


@pytest.mark.parametrize("op", SAMPLED_OPS)
def test_a_wrong_way_to_sample_is_not_timed(benches, op):
    bench, parts, sampling = benches
    shape = sampling.SampledShape(op, 3, 64, torch.device("cpu"), **sampling.SAMPLED_OPS[op])
    batches = [sampling.make_sampled_batch(shape, seed) for seed in range(2)]
    fused = sampling.SampledFused(shape)

    def bonus_behind_the_vocabulary(batch):
        fused.verify(batch)
        batch.outputs["bonus_tokens"][-1] = 64

    def one_more_accepted(batch):
        fused.verify(batch)
        batch.outputs["accept_token_num"][0] += 1

    for name, launch, problem in [
        ("lazy", lambda batch: None, "`accept_token_num`"),
        ("wild", bonus_behind_the_vocabulary, "`bonus_tokens` out of range"),
        ("fused, wrong", one_more_accepted, "wrong `accept_token_num`"),
    ]:
        with pytest.raises(SystemExit, match=f"{name}: .*{problem}|{name}: {problem}"):
            bench.check(fused, [parts.Alternative(name, "", launch)], batches)
    bench.check(fused, sampling.sampled_alternatives(shape, fused), batches)


@pytest.mark.parametrize("op", ["logits, sampled", "logits, sampled, filters"])
def test_the_compared_softmax_leaves_what_the_filters_leave(benches, op):
    """A baseline that filtered less would be compared with for less work."""
    sampling = benches[2]
    shape = sampling.SampledShape(op, 2, 200, torch.device("cpu"), **sampling.SAMPLED_OPS[op])
    inputs = sampling.make_sampled_batch(shape, seed=0).inputs
    probs = sampling.target_probs(inputs)
    plain = (inputs["target_logits"].float() / sampling.TEMPERATURE).softmax(-1)
    torch.testing.assert_close(probs.sum(-1), torch.ones(2, 8))
    kept = probs > 0
    if "filters" not in op:
        torch.testing.assert_close(probs, plain)
        return
    assert (kept.sum(-1) <= sampling.TOP_K).all()
    # The likeliest ones, and no more than it takes to reach top-p.
    least = torch.where(kept, plain, 1.0).amin(-1, keepdim=True)
    assert (torch.where(kept, 0.0, plain) <= least).all()
    before_last = plain.where(kept, 0.0).sum(-1, keepdim=True) - least
    assert (before_last <= sampling.TOP_P).all()


def test_a_state_that_went_astray_is_not_timed(benches):
    bench, parts, _ = benches
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
