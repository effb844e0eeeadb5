"""Tensors as the kernels see them: a pointer and a stride in elements; offsets are 64-bit.

A tensor that was not given is None in place of a `Vector`, and what a kernel would do
with it is then not compiled.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Vector(NamedTuple):
    data: tl.tensor
    stride: tl.tensor


@triton.jit
def at(vector, i):
    """Where element i lies."""
    return vector.data + i.to(tl.int64) * vector.stride


@triton.jit
def float64_at(words, i):
    """Where float64 i of a record in int64 words lies."""
    return words.to(tl.pointer_type(tl.float64)) + i


@triton.jit
def int32_at(words, i):
    """Where int32 i of a record in int64 words lies."""
    return words.to(tl.pointer_type(tl.int32)) + i
