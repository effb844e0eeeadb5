"""The adaptive step alone, in one program."""

import triton
import triton.language as tl

from .finish import close_round, num_live_rows
from .tensors import at

BLOCK = 128
# One: then no thread of the program runs ahead of the one that writes the state.
NUM_WARPS = 1


@triton.jit(do_not_specialize=["batch_size", "num_steps"])
def update_and_select(
    accept_token_num, num_reqs, adaptive, batch_size, num_steps, BLOCK: tl.constexpr
):
    """accept_token_num: int32 [B], a `Vector`; num_reqs: int32 [1] or None."""
    num_live = num_live_rows(num_reqs, batch_size)
    accepted = tl.zeros([BLOCK], tl.int64)
    anomalies = tl.zeros([BLOCK], tl.int64)
    for first in range(0, num_live, BLOCK):
        b = first + tl.arange(0, BLOCK)
        is_live = b < num_live
        count = tl.load(at(accept_token_num, b), mask=is_live, other=0)
        in_range = tl.minimum(tl.maximum(count, 0), num_steps.to(tl.int32))
        accepted += in_range
        anomalies += (in_range != count).to(tl.int64)
    close_round(adaptive, num_steps, tl.sum(accepted), tl.sum(anomalies), num_live)
