"""What nvcc made of the kernels; needs no GPU, only the build's own compiler and flags."""

import json
import re
import shlex
import struct
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import adaptive_spec_ext
import pytest
from adaptive_spec_ext import _C

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / f"module-{sysconfig.get_config_var('SOABI')}"

pytestmark = pytest.mark.skipif(
    not adaptive_spec_ext.build_info["cuda_ops"], reason="built without nvcc"
)


def compile_again(source: str, output: Path, arch: int, *options: str) -> str:
    """Compiles a kernel file as the build did, but for one architecture; returns what nvcc said."""
    entries = json.loads((BUILD / "compile_commands.json").read_text())
    [entry] = [entry for entry in entries if entry["file"].endswith(f"csrc/cuda/{source}")]
    words = [
        word
        for word in shlex.split(entry["command"])
        if not word.startswith(("--generate-code", "-gencode"))
    ]
    # Without what the build makes of it: `-x cu -rdc=... -c file -o file`.
    words = words[: words.index("-c")]
    target = [f"-gencode=arch=compute_{arch},code=sm_{arch}", *options]
    command = [*words, *target, entry["file"], "-o", str(output)]
    done = subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def device_code(binary: Path) -> Iterator[tuple[str, int]]:
    """("ptx" or "cubin", architecture) of every piece of device code in a host binary.

    Walks the fat binaries: a header of magic, version, header size and payload size, then entries
    of kind, version, header size, payload size and, 28 bytes in, the architecture.
    """
    data = binary.read_bytes()
    at = -1
    while (at := data.find(struct.pack("<I", 0xBA55ED50), at + 1)) != -1:
        _, _, header_size, size = struct.unpack_from("<IHHQ", data, at)
        entry = at + header_size
        while entry < at + header_size + size:
            kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, entry)
            yield {1: "ptx", 2: "cubin"}[kind], struct.unpack_from("<I", data, entry + 28)[0]
            entry += entry_header + payload


def test_every_promised_architecture_is_in_the_binary():
    found = sorted(device_code(Path(_C.__file__)))
    promised = []
    for name in adaptive_spec_ext.build_info["cuda_architectures"].split():
        number, _, kind = name.partition("-")
        arch = int(re.match(r"\d+", number)[0])
        promised += [("cubin", arch)] if kind != "virtual" else []
        promised += [("ptx", arch)] if kind != "real" else []
    # One entry for each of the kernel files.
    assert found == sorted(promised * len(KERNELS))


# Kernel files, and how many kernels each holds.
KERNELS = {
    "verify.cu": 2,
    "verify_logits.cu": 3,
    "sample.cu": 2,
    "sample_logits.cu": 6,
    "update.cu": 2,
}
# Registers of a thread that still let as many blocks run on a multiprocessor (64 Ki registers) as
# the launch shapes count on: 4 of 256 threads, 2 where a row is drawn from, or one of 512.
MAX_REGISTERS = {
    "verify_logits_kernel": 64,
    "verify_kernel": 96,
    "sample_kernel": 128,
    "sample_logits_kernel": 128,
    "update_kernel": 64,
}
MAX_SHARED_BYTES = 4096


@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("source", KERNELS)
def test_kernels_stay_in_registers(source, arch, tmp_path):
    """A spill or a local array would send every lane's data through memory."""
    report = compile_again(source, tmp_path / "k.cubin", arch, "-cubin", "-Xptxas=-v")
    kernels = re.findall(
        r"Compiling entry function '(\w+)'.*?"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
        r"Used (\d+) registers(?:[^\n]*?(\d+) bytes smem)?",
        report,
        re.DOTALL,
    )
    assert len(kernels) == KERNELS[source], report
    for name, *numbers in kernels:
        stack, stores, loads, registers, shared = (int(number or 0) for number in numbers)
        assert (stack, stores, loads) == (0, 0, 0), name
        limit = next((n for key, n in MAX_REGISTERS.items() if key in name), 64)
        assert registers <= limit, f"{name}: {registers} registers"
        assert shared <= MAX_SHARED_BYTES, f"{name}: {shared} bytes of shared memory"


def test_the_policy_is_compiled_without_fused_multiply_add(tmp_path):
    """Fused, the EMA would differ from the host's in its last bits, and so would decisions."""
    output = tmp_path / "update.ptx"
    compile_again("update.cu", output, 90, "-ptx")
    ptx = output.read_text()
    assert "mul.f64" in ptx or "mul.rn.f64" in ptx
    assert "fma.rn.f64" not in ptx
    # The flag is what does it: without, the same source is fused.
    fused = tmp_path / "fused.ptx"
    compile_again("update.cu", fused, 90, "-ptx", "-fmad=true")
    assert "fma.rn.f64" in fused.read_text()
