"""`adaptive-spec simulate`: what it prints and writes, and its one-line errors."""

import json
import sys

import pytest
from typer.testing import CliRunner

from adaptive_spec import CostTable
from adaptive_spec.cli import main


def run(*args):
    return CliRunner().invoke(main, ["simulate", *map(str, args)])


@pytest.fixture
def costs(tmp_path):
    path = tmp_path / "costs.json"
    CostTable.from_function(
        lambda b, s: 4.0 + 0.3 * s, [1, 8], range(8), machine="H200", model="tiny"
    ).save(path)
    return path


def test_every_policy_is_in_the_table_and_in_the_file(costs, tmp_path):
    out = tmp_path / "numbers.json"
    result = run(costs, "--phases", "1:0.9:200,8:0.3/0.5:200", "--json", out)
    assert result.exit_code == 0, result.output
    assert "H200, tiny" in result.stdout
    numbers = json.loads(out.read_text())
    names = [row["name"] for row in numbers]
    assert {"none", *(f"S={s}" for s in range(1, 8)), "ema", "ema+0", "oracle"} <= set(names)
    for name in names:
        assert name in result.stdout
    assert numbers[-1]["share"] == pytest.approx(1.0)


def test_the_same_seed_prints_the_same(costs):
    first, again, other = (
        run(costs, "--phases", "1:0.7:100", "--seed", seed).stdout for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_trace_is_served(costs, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("time,input_tokens,output_tokens\n0,100,50\n0.01,100,20\n9,1,1\n")
    result = run(costs, "--trace", trace, "--rate", "0.3+0.9/0.5")
    assert result.exit_code == 0, result.output
    assert "B=2-3" in result.stdout or "B=1-1" in result.stdout


def test_recorded_rounds_can_drive_all_phases(costs, tmp_path):
    rounds = tmp_path / "rounds.json"
    rounds.write_text('{"request": [0, 0], "steps": [2, 2], "accepted": [2, 0]}')
    result = run(costs, "--phases", "1:0:50", "--recorded", rounds)
    assert result.exit_code == 0, result.output


def test_the_picture_is_a_png(costs, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    assert run(costs, "--phases", "1:0.7:50,8:0.2:50", "--plot", picture).exit_code == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_a_picture_without_matplotlib_is_one_line_and_nothing_is_run(costs, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "adaptive_spec.sim.plot", raising=False)
    result = run(costs, "--plot", tmp_path / "out.png")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --plot needs matplotlib: `pip install matplotlib`")
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--phases", "8:0.5"], "must be B:RATE:ROUNDS, such as 8:0.7:500, got '8:0.5'"),
        (["--phases", "x:0.5:3"], "positive integers"),
        (["--phases", "8:x:3"], "RATE must be numbers such as"),
        (["--phases", "8:1.5:3"], "got 1.5"),
        (["--phases", "9:0.5:3"], "at most 8, the largest of the cost table"),
        (["--trace", "/nowhere.csv"], "No such file"),
        (["--json", "/nowhere/out.json"], "no directory"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(costs, arguments, text):
    result = run(costs, *arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert text in line


def test_a_table_with_gaps_is_refused(tmp_path):
    path = tmp_path / "costs.json"
    CostTable({(1, 0): 4.0, (8, 3): 5.0}, machine="H200", model="tiny").save(path)
    result = run(path)
    assert result.exit_code == 2
    assert "missing: (batch size 1, S 3), (batch size 8, S 0)" in result.stderr
