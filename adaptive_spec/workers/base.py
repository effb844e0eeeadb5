"""What a speculative worker owes the engine that drives it, and rules that all workers share."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from adaptive_spec.graphs import SpecRuntimeState

__all__ = [
    "BaseSpecWorker",
    "SpecOptions",
    "adaptive_unsupported_reason",
    "num_new_kv_slots",
    "resolve_adaptive_support",
]


class BaseSpecWorker:
    """Base of the workers. A worker that adapts overrides the first two methods; the hooks do
    nothing, so that an engine may call them on any worker.
    """

    speculative_num_steps: int = 0

    def build_adaptive_runtime_state(
        self,
        speculative_num_steps: int,
        speculative_num_draft_tokens: int,
        cuda_graph_bs: list[int] | None = None,
    ) -> SpecRuntimeState:
        """Everything whose shape depends on S; must leave the worker as it was, also on failure."""
        raise NotImplementedError(f"{type(self).__name__} has no adaptive runtime states")

    def apply_runtime_state(self, state: SpecRuntimeState) -> None:
        """Swap in a state built before."""
        raise NotImplementedError(f"{type(self).__name__} has no adaptive runtime states")

    def activate_step_by_batch(self, batch_size: int) -> None:
        """First thing in a decode round."""

    def on_verify_complete_cpu(
        self,
        num_correct_drafts_per_req: Sequence[int],
        batch_size: int,
        executed_steps: int | None = None,
    ) -> None:
        """A round's accepted drafts (bonus excluded), once they are on the host."""


@dataclass(frozen=True)
class SpecOptions:
    """Serving options that decide whether the draft length can adapt."""

    topk: int = 1
    attention_dp: bool = False
    multi_layer_draft: bool = False
    two_batch_overlap: bool = False
    pdmux: bool = False


def adaptive_unsupported_reason(options: SpecOptions) -> str | None:
    """Why the draft length cannot adapt under ``options``, or None when it can."""
    if options.topk != 1:
        return f"topk = {options.topk}: runtime states are built for chains (topk = 1)"
    if options.attention_dp:
        return "attention_dp: ranks with different batches would choose different steps"
    if options.multi_layer_draft:
        return "multi_layer_draft: its draft layers are bound to fixed positions of the chain"
    if options.two_batch_overlap:
        return "two_batch_overlap: both halves of a batch would have to swap states together"
    if options.pdmux:
        return "pdmux: the decode streams hold states of their own, which a swap does not reach"
    return None


def resolve_adaptive_support(options: SpecOptions, *, strict: bool) -> str | None:
    """The reason why adaptivity is off, after one warning; None when it can be on.

    Raises ValueError with the reason instead when ``strict``.
    """
    reason = adaptive_unsupported_reason(options)
    if reason is None:
        return None
    if strict:
        raise ValueError(f"options: adaptive speculative decoding is not available: {reason}")
    warnings.warn(
        f"adaptive speculative decoding is off, the draft length stays fixed: {reason}",
        RuntimeWarning,
        stacklevel=3,
    )
    return reason


def num_new_kv_slots(
    committed: int, allocated: int, tokens_per_round: int, rounds_in_flight: int = 1
) -> int:
    """Cache slots that a request still lacks for the rounds in flight.

    ``tokens_per_round`` is that of the largest S that can be chosen, so a switch never changes what
    is reserved. A request that already holds more than it needs (it ran with more rounds in flight,
    or accepted less than it might have) gets none; a negative number would hand out its slots
    twice.
    """
    return max(0, committed + rounds_in_flight * tokens_per_round - allocated)
