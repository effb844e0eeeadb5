"""The ops of `adaptive_spec_ext`, taking an `AdaptiveState` where those take its two tensors.

Arguments, shapes, dtypes and errors are those of the functions of the same names there; slow
references are in `adaptive_spec.ops_ref`. Importing this module needs the built extension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor

from adaptive_spec.extension import ext as _ext

if TYPE_CHECKING:
    from adaptive_spec.state import AdaptiveState

__all__ = [
    "build_chain_tree",
    "update_and_select",
    "verify_chain_greedy",
    "verify_chain_greedy_from_logits",
    "verify_tree_greedy",
    "verify_workspace",
]

build_chain_tree = _ext.build_chain_tree
verify_workspace = _ext.verify_workspace


def _with_state(keywords: dict[str, Any], state: AdaptiveState | None) -> dict[str, Any]:
    if state is not None:
        keywords["state"] = state.tensor
        keywords["ring"] = state.ring.tensor
    return keywords


def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
    *,
    state: AdaptiveState | None = None,
    **keywords: Unpack[_ext.VerifyOptions],
) -> None:
    """`adaptive_spec_ext.verify_tree_greedy`, crediting slot `slot` of `state`."""
    _ext.verify_tree_greedy(
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        target_predict,
        **_with_state(keywords, state),
    )


def verify_chain_greedy(
    draft_tokens: Tensor,
    target_predict: Tensor,
    output_token_ids: Tensor,
    accept_token_num: Tensor,
    *,
    state: AdaptiveState | None = None,
    **keywords: Unpack[_ext.VerifyOptions],
) -> None:
    """`adaptive_spec_ext.verify_chain_greedy`, crediting slot `slot` of `state`."""
    _ext.verify_chain_greedy(
        draft_tokens,
        target_predict,
        output_token_ids,
        accept_token_num,
        **_with_state(keywords, state),
    )


def verify_chain_greedy_from_logits(
    draft_tokens: Tensor,
    target_logits: Tensor,
    output_token_ids: Tensor,
    accept_token_num: Tensor,
    *,
    state: AdaptiveState | None = None,
    **keywords: Unpack[_ext.VerifyOptions],
) -> None:
    """`adaptive_spec_ext.verify_chain_greedy_from_logits`, crediting slot `slot` of `state`."""
    _ext.verify_chain_greedy_from_logits(
        draft_tokens,
        target_logits,
        output_token_ids,
        accept_token_num,
        **_with_state(keywords, state),
    )


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
