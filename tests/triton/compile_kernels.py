"""Compiles the Triton kernels for one target, without a GPU: `compile_kernels.py ARCH FOLDER`.

Writes what came out into the folder. Run by test_compile.py, in a process of its own since the
target is a global of Triton.
"""

import sys
from pathlib import Path

import torch
import triton
from adaptive_spec_triton import update
from adaptive_spec_triton.finish import Adaptive
from adaptive_spec_triton.tensors import Vector
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver


class _Target:
    """The part of a driver that compiling needs."""

    def __init__(self, arch: str):
        is_amd = arch.startswith("gfx")
        self.target = GPUTarget("hip", arch, 64) if is_amd else GPUTarget("cuda", int(arch), 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def main(arch: str, folder: Path) -> None:
    driver.set_active(_Target(arch))
    words, counts = triton.MockTensor(torch.int64), triton.MockTensor(torch.int32)
    for name, num_reqs in {"plain": None, "padded": counts}.items():
        kernel = update.update_and_select.warmup(
            Vector(counts, 1),
            num_reqs,
            Adaptive(words, words, 50, 400, 0),
            8,
            3,
            BLOCK=update.BLOCK,
            num_warps=update.NUM_WARPS,
            enable_fp_fusion=False,
            grid=(1,),
        )
        for kind in ("ptx", "cubin", "amdgcn", "hsaco"):
            if kind in kernel.asm:
                text = kernel.asm[kind]
                content = text.encode() if isinstance(text, str) else text
                (folder / f"{name}.{kind}").write_bytes(content)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
