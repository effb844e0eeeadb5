"""The ops `torch.ops.adaptive_spec_triton.*`: schemas and checks of `torch.ops.adaptive_spec.*`.

On CPU tensors they run where Triton's interpreter does (TRITON_INTERPRET=1), which is how they are
tested without a GPU.
"""

import torch
import triton
from torch import Tensor

from . import update
from .finish import Adaptive
from .tensors import Vector

_library = torch.library.Library("adaptive_spec_triton", "DEF")
_checks = torch.ops.adaptive_spec_checks


def _define(name: str, launch) -> None:
    """Registers `launch`, whose parameters are those of the schema, behind the op's checks."""
    schema = getattr(torch.ops.adaptive_spec, name).default._schema
    check = getattr(_checks, name).default

    def run(*given, **keywords) -> None:
        check(*given, **keywords)
        launch(*given, **keywords)

    def run_interpreted(*given, **keywords) -> None:
        if not triton.knobs.runtime.interpret:
            raise ValueError(
                f"{name}: the Triton ops run on GPU tensors, and on CPU tensors only under "
                "TRITON_INTERPRET=1; got CPU tensors"
            )
        run(*given, **keywords)

    _library.define(name + str(schema).removeprefix(schema.name))
    _library.impl(name, run, "CUDA")
    _library.impl(name, run_interpreted, "CPU")
    _library.impl(name, getattr(torch.ops.adaptive_spec, name).default, "Meta")


def _update_and_select(
    accept_token_num: Tensor,
    state: Tensor,
    ring: Tensor,
    *,
    slot: int,
    speculative_num_steps: int,
    num_reqs: Tensor | None = None,
) -> None:
    update.update_and_select[(1,)](
        Vector(accept_token_num, accept_token_num.stride(0)),
        num_reqs,
        Adaptive(state, ring, state.numel(), ring.numel(), slot),
        accept_token_num.size(0),
        speculative_num_steps,
        BLOCK=update.BLOCK,
        num_warps=update.NUM_WARPS,
        # No multiply-add: decisions have the core's bits.
        enable_fp_fusion=False,
    )


_define("update_and_select", _update_and_select)
