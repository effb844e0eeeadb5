"""The package's front door: quick to import, and everything public can be had from it."""

import subprocess
import sys

import pytest

import adaptive_spec
from adaptive_spec import config, metrics, step_policy


def test_public_names_come_from_their_modules():
    assert adaptive_spec.load_adaptive_config is config.load_adaptive_config
    assert adaptive_spec.AdaptiveStepSlot is step_policy.AdaptiveStepSlot
    assert adaptive_spec.AcceptanceStats is metrics.AcceptanceStats
    assert set(adaptive_spec.__all__) <= set(dir(adaptive_spec))


def test_unknown_names_are_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'adaptive_spec' has no attribute 'Nothing'"):
        adaptive_spec.Nothing  # noqa: B018


def test_the_pure_python_parts_load_neither_torch_nor_the_extension():
    script = (
        "import sys, adaptive_spec\n"
        "adaptive_spec.AdaptiveSpeculativeParams(3).on_verify_complete([1, 2], 2)\n"
        "adaptive_spec.AcceptanceStats().observe([1], 3)\n"
        "assert not {'torch', 'numpy', 'adaptive_spec_ext'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_public_name_can_be_had():
    pytest.importorskip("adaptive_spec_ext._C", reason="the extension is not built")
    for name in adaptive_spec.__all__:
        assert getattr(adaptive_spec, name) is not None
