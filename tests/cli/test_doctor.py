"""`adaptive-spec doctor`, also where parts are missing."""

import json
import subprocess
import sys

import pytest
import torch

from adaptive_spec.cli import self_check

HIDE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
from adaptive_spec.cli import main
main({arguments!r})
"""


def without(names, *arguments):
    """`adaptive-spec` in a new process in which `names` cannot be imported."""
    code = HIDE.format(names=set(names), arguments=list(arguments))
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )


def by_name(stdout):
    return {finding["name"]: finding for finding in json.loads(stdout)["findings"]}


def test_all_is_well_here(run):
    result = run("doctor", "--json")
    assert result.exit_code == 0, result.output
    findings = by_name(result.stdout)
    for name in ("torch", "extension", "ops", "self-check"):
        assert findings[name]["state"] == "ok", findings[name]
    assert "CPU" in findings["ops"]["text"]
    assert json.loads(result.stdout)["ok"]


def test_it_reads_as_plain_lines(run):
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "all that is needed works" in result.stdout


def test_without_the_built_extension_it_says_how_to_build_it():
    result = without(["adaptive_spec_ext._C"], "doctor", "--json")
    assert result.returncode == 1, result.stderr
    extension = by_name(result.stdout)["extension"]
    assert extension["state"] == "broken"
    assert "make build" in extension["cure"]
    assert "Traceback" not in result.stderr


def test_without_torch_it_still_answers():
    result = without(["torch"], "doctor", "--json")
    assert result.returncode == 1, result.stderr
    findings = by_name(result.stdout)
    assert findings["torch"]["state"] == "broken"
    assert "pip install" in findings["torch"]["cure"]


@pytest.mark.parametrize("command", [["generate", "x"], ["demo"]])
def test_commands_without_the_extension_say_how_to_build_it(command, pair_dir):
    result = without(["adaptive_spec_ext._C"], *command, "--model", str(pair_dir))
    assert result.returncode == 2
    assert "make build" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_commands_without_an_optional_package_name_the_extra(pair_dir):
    result = without(["tokenizers"], "generate", "x", "--model", str(pair_dir))
    assert result.returncode == 2
    assert "pip install 'adaptive-spec[demo]'" in result.stderr


def test_an_op_that_computes_something_else_is_broken(run, monkeypatch):
    """A self-check that cannot fail would say nothing."""
    import adaptive_spec_ext

    monkeypatch.setattr(adaptive_spec_ext, "verify_chain_greedy", lambda *args, **kwargs: None)
    with pytest.raises(AssertionError, match="verify_chain_greedy"):
        self_check.check_ops(torch.device("cpu"))
    result = run("doctor", "--json")
    assert result.exit_code == 1
    assert by_name(result.stdout)["self-check"]["state"] == "broken"
