"""Triton's kernels run here through its interpreter, on the CPU."""

import os

# Read when a kernel is defined, so before any is imported.
os.environ["TRITON_INTERPRET"] = "1"
