"""Shared test settings: GPU tests, reproducible random cases, and a line on which backends ran."""

import os

import hypothesis
import pytest
import torch

HAS_GPU = torch.cuda.is_available()
REQUIRE_GPU = os.environ.get("ADAPTIVE_SPEC_REQUIRE_GPU") == "1"

# CI runs the same cases every time; elsewhere each run looks at new ones.
hypothesis.settings.register_profile("ci", derandomize=True, print_blob=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")


def pytest_collection_modifyitems(items):
    if HAS_GPU or REQUIRE_GPU:
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        # Not `item.keywords`, which has the names of the folders above, too.
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_terminal_summary(terminalreporter):
    try:
        import adaptive_spec_ext

        built = "CPU and CUDA ops" if adaptive_spec_ext.build_info["cuda_ops"] else "CPU ops"
    except ImportError:
        built = "no compiled ops"
    device = torch.cuda.get_device_name() if HAS_GPU else "no GPU"
    terminalreporter.write_line(f"backends: {built}; torch {torch.__version__}; {device}")
