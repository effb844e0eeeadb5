"""`adaptive-spec config`: what it prints, where, and its exit codes."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from adaptive_spec.cli import main
from adaptive_spec.config import load_adaptive_config

OLD = {"candidate_steps": [1, 3], "ema_alpha": 0.3}


def run(*args):
    return CliRunner().invoke(main, list(map(str, args)))


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "adaptive.json"

    def write(raw):
        path.write_text(json.dumps(raw))
        return path

    return write


def test_check_shows_the_resolved_table(config_file):
    path = config_file(
        {
            "ema_alpha": 0.35,
            "slot_debounce": 4,
            "1": {"candidate_steps": [7, 1]},
            "8": {"candidate_steps": [2], "min_dwell": 17},
        }
    )
    result = run("config", "check", path)
    assert result.exit_code == 0
    assert result.stderr == ""
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["1-7", "1,", "7", "0.0", "-0.25", "0.35", "5", "10", "0"] in rows
    assert ["8+", "2", "0.0", "-0.25", "0.35", "5", "10", "17"] in rows
    assert "candidate steps of all slots: 1, 2, 7" in result.stdout
    assert "slot_debounce: 4 rounds" in result.stdout
    assert "probe" not in result.stdout, "knobs at their default everywhere are not shown"


def test_check_prints_warnings_on_stderr_and_succeeds(config_file):
    path = config_file({"1": {"candidate_steps": [1], "warmup": 3}})
    result = run("config", "check", path)
    assert result.exit_code == 0
    assert result.stderr == (
        f"warning: {path}: BS 1: unknown key 'warmup' is ignored; did you mean 'warmup_batches'?\n"
    )


@pytest.mark.parametrize("command", ["check", "migrate"])
def test_a_bad_config_is_one_line_on_stderr_and_exit_code_2(config_file, command):
    path = config_file({"1": {"candidate_steps": "x"}})
    result = run("config", command, path)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: {path}: BS 1: candidate_steps must be a list of")


@pytest.mark.parametrize("command", ["check", "migrate"])
def test_a_missing_file(tmp_path, command):
    result = run("config", command, tmp_path / "none.json")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {tmp_path / 'none.json'}: no such file")


def test_check_of_the_older_format_points_to_migrate(config_file):
    result = run("config", "check", config_file(OLD))
    assert result.exit_code == 2
    assert '{"1": {"candidate_steps": [1, 3], "ema_alpha": 0.3}}' in result.stderr
    assert "`adaptive-spec config migrate FILE`" in result.stderr


def test_migrate_prints_the_converted_config(config_file):
    path = config_file(OLD)
    result = run("config", "migrate", path)
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == {"1": OLD}
    assert json.loads(path.read_text()) == OLD


def test_migrate_writes_in_place_or_elsewhere(config_file, tmp_path):
    path, other = config_file(OLD), tmp_path / "new.json"
    assert run("config", "migrate", path, "-o", other).exit_code == 0
    assert json.loads(path.read_text()) == OLD
    assert run("config", "migrate", path, "--write").exit_code == 0
    assert path.read_text() == other.read_text()
    assert load_adaptive_config(path).slots[0].ema_alpha == 0.3


def test_migrate_leaves_a_current_config_alone(config_file):
    path = config_file({"1": OLD})
    before = path.read_text()
    result = run("config", "migrate", path, "--write")
    assert result.exit_code == 0
    assert "nothing to convert" in result.stderr
    assert path.read_text() == before


def test_migrate_refuses_two_targets_and_an_impossible_one(config_file, tmp_path):
    path = config_file(OLD)
    result = run("config", "migrate", path, "--write", "-o", tmp_path / "x")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "exclude each other" in result.stderr
    result = run("config", "migrate", path, "-o", tmp_path / "no" / "x.json")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert json.loads(path.read_text()) == OLD


def test_help_lists_the_subcommands():
    result = run("--help")
    assert result.exit_code == 0
    assert "config" in result.stdout


def test_an_unknown_subcommand_is_an_error():
    assert run("confg").exit_code == 2


def test_checking_a_config_needs_neither_torch_nor_the_extension(config_file):
    """In a process of its own: the test's has torch loaded already."""
    path = config_file({"1": {"candidate_steps": [1]}})
    script = (
        "import sys; from typer.testing import CliRunner; from adaptive_spec.cli import main\n"
        f"assert CliRunner().invoke(main, ['config', 'check', {str(path)!r}]).exit_code == 0\n"
        "assert 'torch' not in sys.modules and 'adaptive_spec_ext' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
