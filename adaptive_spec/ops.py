"""The ops of `adaptive_spec_ext`, taking an `AdaptiveState` where those take its two tensors.

Arguments, shapes, dtypes and errors are those of the functions of the same names there, except that
`state` is an `AdaptiveState`, which brings its ring; slow references are in
`adaptive_spec.ops_ref`. Importing this module needs the built extension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from adaptive_spec.extension import ext as _ext

if TYPE_CHECKING:
    from adaptive_spec.state import AdaptiveState

__all__ = [
    "build_chain_tree",
    "chain_speculative_sampling",
    "tree_speculative_sampling_target_only",
    "update_and_select",
    "verify_chain_greedy",
    "verify_chain_greedy_from_logits",
    "verify_chain_sampling",
    "verify_chain_sampling_from_logits",
    "verify_tree_greedy",
    "verify_tree_sampling_from_logits",
    "verify_workspace",
]


def _with_state(op: Callable[..., Any]) -> Callable[..., Any]:
    """`op`, crediting slot `slot` of an `AdaptiveState` that is passed as `state`."""

    @functools.wraps(op)
    def verify(*arguments: Any, state: AdaptiveState | None = None, **keywords: Any) -> Any:
        if state is None:
            return op(*arguments, **keywords)
        return op(*arguments, state=state.tensor, ring=state.ring.tensor, **keywords)

    return verify


build_chain_tree = _ext.build_chain_tree
chain_speculative_sampling = _with_state(_ext.chain_speculative_sampling)
tree_speculative_sampling_target_only = _with_state(_ext.tree_speculative_sampling_target_only)
verify_chain_greedy = _with_state(_ext.verify_chain_greedy)
verify_chain_greedy_from_logits = _with_state(_ext.verify_chain_greedy_from_logits)
verify_chain_sampling = _with_state(_ext.verify_chain_sampling)
verify_chain_sampling_from_logits = _with_state(_ext.verify_chain_sampling_from_logits)
verify_tree_greedy = _with_state(_ext.verify_tree_greedy)
verify_tree_sampling_from_logits = _with_state(_ext.verify_tree_sampling_from_logits)
verify_workspace = _ext.verify_workspace


def update_and_select(
    accept_token_num: Tensor,
    state: AdaptiveState,
    *,
    slot: int,
    speculative_num_steps: int,
    num_reqs: Tensor | None = None,
) -> None:
    """`adaptive_spec_ext.update_and_select` for `state`."""
    _ext.update_and_select(
        accept_token_num,
        state.tensor,
        state.ring.tensor,
        slot=slot,
        speculative_num_steps=speculative_num_steps,
        num_reqs=num_reqs,
    )
