"""The kernels compile to machine code, for GPUs that are not here."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.triton.processes import run_compiling

pytest.importorskip("triton", reason="no Triton installed")
import triton  # noqa: E402

SCRIPT = Path(__file__).with_name("compile_kernels.py")
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def compile_for(arch: str, folder: Path) -> None:
    done = run_compiling(str(SCRIPT), arch, str(folder))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arch", ["80", "90", "100"])
def test_nvidia_code_keeps_the_core_s_rounding_and_stays_in_registers(arch, tmp_path):
    """A fused multiply-add rounds once where the core rounds twice: the EMA would differ."""
    compile_for(arch, tmp_path)
    for name in ("plain", "padded"):
        ptx = (tmp_path / f"{name}.ptx").read_text()
        assert "mul.rn.f64" in ptx or "mul.f64" in ptx
        assert not re.search(r"\bfma\.rn\.f64|\.ftz", ptx)
        # One release for all words of the ring, in the round's own, written last.
        exchanges = re.findall(r"atom\.global\.sys\.(\w+)\.exch", ptx)
        assert exchanges[-1] == "release"
        assert set(exchanges[:-1]) == {"relaxed"}
        usage = subprocess.run(
            [str(CUOBJDUMP), "-res-usage", str(tmp_path / f"{name}.cubin")],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert re.findall(r"(?:STACK|LOCAL):(\d+)", usage) == ["0", "0"], usage


def test_amd_code_does_not_spill(tmp_path):
    compile_for("gfx942", tmp_path)
    for name in ("plain", "padded"):
        assert (tmp_path / f"{name}.hsaco").stat().st_size > 0
        text = (tmp_path / f"{name}.amdgcn").read_text()
        assert re.findall(r"\.[sv]gpr_spill_count:\s+(\d+)", text) == ["0", "0"]
