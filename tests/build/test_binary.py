"""The built module: what it may refer to, and what is said where it is missing."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import adaptive_spec_ext
import pytest
from adaptive_spec_ext import _C

ROOT = Path(__file__).parents[2]


def run_tool(*command: str) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}")
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=False,
    )


def test_only_stable_symbols_are_taken_from_torch():
    """One at:: or c10:: symbol would tie the binary to the torch version it was built with."""
    symbols = run_tool("nm", "-DC", "--undefined-only", _C.__file__)
    assert "aoti_torch_" in symbols
    unstable = [
        line
        for line in symbols.splitlines()
        if any(name in line for name in ("at::", "c10::", "torch::", "THP", "caffe2"))
    ]
    assert unstable == []


def test_it_looks_for_libraries_only_where_the_process_already_has_them():
    dynamic = run_tool("readelf", "-d", _C.__file__)
    assert "libtorch_cpu.so" in dynamic
    for unwanted in ("RPATH", "RUNPATH", "libtorch_cuda", "libc10_cuda", "libtorch_python"):
        assert unwanted not in dynamic


def test_it_exports_its_entry_and_none_of_its_own_names():
    """Two copies of a library's symbols in one process may be mixed up by the loader."""
    exported = run_tool("nm", "-DC", "--defined-only", _C.__file__)
    assert "PyInit__C" in exported
    own = [line for line in exported.splitlines() if re.match(r"\S+ \S adaptive_spec::", line)]
    assert own == []


@pytest.mark.parametrize(
    "code",
    [
        "import adaptive_spec_ext",
        "import adaptive_spec; import adaptive_spec_ext",
        "import adaptive_spec_ext; import adaptive_spec",
        "import adaptive_spec_ext; from adaptive_spec import ops",
    ],
)
def test_import_in_any_order(code):
    code += "; import torch; torch.ops.adaptive_spec.verify_tree_greedy.default"
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def copy_without_binary(tmp_path: Path) -> Path:
    for source in ("adaptive_spec", "csrc/adaptive_spec_ext"):
        shutil.copytree(
            ROOT / source,
            tmp_path / Path(source).name,
            ignore=shutil.ignore_patterns("*.so", "__pycache__", "tiny_pair"),
        )
    return tmp_path


def test_missing_binary_says_how_to_build_it_and_leaves_the_rest_usable(tmp_path):
    where = str(copy_without_binary(tmp_path))
    for module in ("adaptive_spec_ext", "adaptive_spec.state"):
        result = run_python(f"import sys; sys.path.insert(0, {where!r}); import {module}")
        last = result.stderr.strip().splitlines()[-1]
        assert last.startswith("ImportError: adaptive_spec_ext is not built"), last
        assert "make build" in last
    usable = run_python(
        f"import sys; sys.path.insert(0, {where!r}); import adaptive_spec\n"
        "from adaptive_spec import AdaptiveSpeculativeParams, ops_ref\n"
        "assert AdaptiveSpeculativeParams(3).candidate_steps == [1, 3, 7]"
    )
    assert usable.returncode == 0, usable.stderr


def test_build_info_tells_what_it_was_built_with():
    info = adaptive_spec_ext.build_info
    assert tuple(map(int, info["torch_version"].split(".")[:2])) >= (2, 11)
    assert info["compiler"]
    assert isinstance(info["cuda_ops"], bool)
