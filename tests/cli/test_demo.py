"""The demo on a tiny random pair: what it prints and writes, and what it refuses."""

import json

import pytest

PHASES = "1:easy:60,4:hard:80,2:easy:60"


@pytest.fixture(scope="module")
def demo_run(pair_dir, tmp_path_factory):
    from typer.testing import CliRunner

    from adaptive_spec.cli import main

    folder = tmp_path_factory.mktemp("demo")
    arguments = ["demo", "--model", pair_dir, "--phases", PHASES, "--max-new-tokens", 24]
    arguments += ["--modes", "none,2,adaptive,built-in", "--threads", 1]
    arguments += ["--out", folder / "run.png", "--json", folder / "run.json"]
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    return result, folder


def test_demo_succeeds_and_writes_what_it_says(demo_run):
    result, folder = demo_run
    assert result.exit_code == 0, result.output
    assert (folder / "run.png").read_bytes().startswith(b"\x89PNG")
    for words in ("tokens per second", "What S did", "identical", "B=4 hard"):
        assert words in result.stdout


def test_every_mode_keeps_the_batch_size_and_decodes_the_planned_tokens(demo_run):
    data = json.loads((demo_run[1] / "run.json").read_text())
    assert [mode["name"] for mode in data["modes"]] == ["none", "S=2", "adaptive", "built-in"]
    for mode in data["modes"]:
        for phase, run in zip(data["phases"], mode["phases"], strict=True):
            most = phase["num_tokens"] + phase["batch_size"] * (max(run["steps"]) + 1)
            assert phase["num_tokens"] <= run["num_tokens"] < most
            assert len(run["steps"]) == run["rounds"]
    adaptive = data["modes"][2]
    batch_sizes = [phase["batch_size"] for phase in data["phases"]]
    assert all(r["batch_size"] == batch_sizes[r["phase"]] for r in adaptive["rounds"])
    assert len(adaptive["rounds"]) == sum(run["rounds"] for run in adaptive["phases"])
    assert all(s == 0 for run in data["modes"][0]["phases"] for s in run["steps"])


def test_outputs_of_all_modes_are_compared(demo_run):
    comparison = json.loads((demo_run[1] / "run.json").read_text())["comparison"]
    assert comparison["lossless"]
    # Three modes against the first, at least a batch of outputs in each phase.
    assert comparison["num_outputs"] >= 3 * (1 + 4 + 2)
    assert comparison["num_tokens"] >= 3 * 100


def test_sampled_outputs_are_the_same_in_every_mode(pair_dir, tmp_path, run):
    """Drafting, batches and S must not show in what a request's seed draws."""
    result = run(
        *("demo", "--model", pair_dir, "--phases", "1:easy:60,4:hard:120", "--max-new-tokens", 24),
        *("--modes", "none,1,3,adaptive", "--temperature", 0.8, "--top-p", 0.9, "--seed", 5),
        *("--threads", 1, "--out", tmp_path / "x.png", "--json", tmp_path / "x.json"),
    )
    assert result.exit_code == 0, result.output
    assert "sampling at temperature 0.8, top-p 0.9" in result.stdout
    data = json.loads((tmp_path / "x.json").read_text())
    assert (data["setup"]["temperature"], data["setup"]["top_p"]) == (0.8, 0.9)
    comparison = data["comparison"]
    assert comparison["lossless"]
    assert comparison["num_outputs"] >= 3 * (1 + 4)
    # A near tie may part two modes; by far most go the same way.
    assert comparison["identical_share"] > 0.8
    # Drafts are accepted, so that there was something to verify.
    assert data["modes"][2]["phases"][1]["mean_accepted_drafts"] > 0.1


@pytest.mark.parametrize("rule", [[], ["--temperature", 0.8]])
def test_a_wrong_token_is_the_demos_failure(pair_dir, tmp_path, run, monkeypatch, rule):
    """An engine that loses a token's worth of truth must not exit with 0."""
    from adaptive_spec.engine.request import Request

    take = Request.take

    def spoiled(request, tokens):
        if request.num_proposed_drafts and len(request.output_ids) == 5:
            tokens = [(tokens[0] + 1) % 256, *tokens[1:]]
        return take(request, tokens)

    monkeypatch.setattr(Request, "take", spoiled)
    result = run(
        *("demo", "--model", pair_dir, "--phases", "1:easy:40", "--max-new-tokens", 16),
        *("--modes", "none,1", "--out", tmp_path / "x.png"),
        *rule,
    )
    assert result.exit_code == 1
    assert "wrong token" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--temperature", -1], "temperature: expected a finite number of at least 0, got -1"),
        (["--top-p", 0], "top_p: expected a number above 0"),
        (["--model", "/no/such/dir"], "/no/such/dir: expected a directory"),
        (["--config", "/no/such.json"], "/no/such.json: no such file"),
        (["--out", "/no/such/dir/x.png"], "--out: there is no directory"),
        (["--json", "/"], "--json: / is a directory"),
        (["--modes", "fast"], "--modes: expected"),
        (["--modes", "65"], "--modes: expected"),
        (["--phases", "1:easy"], "--phases: expected"),
        (["--phases", "0:easy:5"], "--phases: expected"),
        (["--phases", "1:soft:5"], "--phases: expected"),
    ],
)
def test_what_is_wrong_is_one_line(run, arguments, words):
    result = run("demo", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_config_that_is_wrong_names_its_key(run, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text('{"1": {"candidate_steps": []}}')
    result = run("demo", "--config", path)
    assert result.exit_code == 2
    assert f"error: {path}: BS 1: candidate_steps" in result.stderr


def test_output_longer_than_the_context_is_refused(run, pair_dir, tmp_path):
    result = run("demo", "--model", pair_dir, "--max-new-tokens", 600, "--out", tmp_path / "x.png")
    assert result.exit_code == 2
    assert "--max-new-tokens: expected fewer than the context of 512" in result.stderr
