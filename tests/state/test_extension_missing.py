"""Without the compiled extension every part that needs it says how to build it."""

import subprocess
import sys

import pytest

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "adaptive_spec_ext":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
"""


@pytest.mark.parametrize("module", ["ops", "ring", "state"])
def test_a_missing_extension_is_one_sentence_that_says_how_to_build_it(module):
    code = BLOCK + f"import adaptive_spec.{module}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = result.stderr.strip().splitlines()[-1]
    assert "adaptive_spec_ext is not installed; build it with `pip install -e .`" in last
