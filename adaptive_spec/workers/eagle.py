"""`EagleWorker`: speculative decoding whose verify result is awaited each round (spec v1)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from adaptive_spec.config import validate_adaptive_initial_steps
from adaptive_spec.controller import AdaptiveController, AdaptiveSpecPolicy
from adaptive_spec.graphs import (
    CaptureReport,
    DecodeBuffers,
    GraphTable,
    RoundFrame,
    SpecRuntimeState,
    check_states_cover_routing,
)
from adaptive_spec.routing import pad_to_cuda_graph_bs
from adaptive_spec.workers.base import (
    BaseSpecWorker,
    SpecOptions,
    num_new_kv_slots,
    resolve_adaptive_support,
)
from adaptive_spec.workers.stages import EagleStages

if TYPE_CHECKING:
    from adaptive_spec.engine.draft import EagleDraft
    from adaptive_spec.engine.llama import LlamaForCausalLM

__all__ = ["DecodeResult", "EagleWorker"]

# Reservations grow by this many slots, so that the bound on the keys moves rarely.
KV_BLOCK = 64


@dataclass(frozen=True)
class DecodeResult:
    """What one round did, by row."""

    speculative_num_steps: int
    batch_size: int
    padded_batch_size: int
    num_correct_drafts: list[int]  # accepted drafts, bonus excluded
    tokens: list[list[int]]  # accepted drafts and the bonus token


class EagleWorker(BaseSpecWorker):
    """Target and draft with their caches, decoding a batch of requests round by round.

    Requests join and leave between rounds; the live ones occupy rows 0..n-1. Decoding is greedy and
    the output is the target's own.

    Args:
        target, draft: the models; no draft for plain decoding.
        max_batch_size: most requests at a time.
        max_len: most tokens of a request, prompt and output.
        policy: chooses S each round: an `AdaptiveState` (updated inside the verify op) or a host
            policy (`AdaptiveSpeculativeParams`), fed after each round. None: S is fixed.
        speculative_num_steps: the fixed S; with a policy, the S it was told to start with, checked
            against its candidates.
        cuda_graph_bs: batch sizes to capture rounds for. None: every round runs eagerly.
        skip_draft_at_zero: do not extend the draft in rounds at S = 0. Off by default: it saves the
            draft's pass, but the draft resumes with a gap in its cache and accepts less until the
            gap is out of reach.
        options: serving options; where they rule out adapting, S stays fixed (one warning, and the
            reason in `status`), or, with ``strict``, the constructor raises.

    Raises ValueError for a bad argument, before anything is built.
    """

    def __init__(
        self,
        target: LlamaForCausalLM,
        draft: EagleDraft | None,
        *,
        max_batch_size: int,
        max_len: int,
        policy: AdaptiveSpecPolicy | None = None,
        speculative_num_steps: int | None = None,
        cuda_graph_bs: Sequence[int] | None = None,
        skip_draft_at_zero: bool = False,
        options: SpecOptions | None = None,
        strict: bool = False,
    ) -> None:
        for name, value in (("max_batch_size", max_batch_size), ("max_len", max_len)):
            check_int(name, value, 1)
        if max_len > target.config.max_position_embeddings:
            raise ValueError(
                f"max_len: expected at most {target.config.max_position_embeddings} (the target's "
                f"max_position_embeddings), got {max_len}"
            )
        if speculative_num_steps is not None:
            check_int("speculative_num_steps", speculative_num_steps, 0)
        sizes = check_batch_sizes(cuda_graph_bs)
        self.unsupported_reason = None
        if policy is not None:
            if speculative_num_steps is not None:
                validate_adaptive_initial_steps(speculative_num_steps, policy.config)
            self.unsupported_reason = resolve_adaptive_support(
                options or SpecOptions(), strict=strict
            )
        steps = speculative_num_steps
        if steps is None:
            steps = 0 if policy is None else policy.get_steps_for_batch(1)
        if self.unsupported_reason is not None:
            policy = None
        all_steps = [steps] if policy is None else policy.candidate_steps
        if draft is None and max(all_steps) > 0:
            raise ValueError(
                f"draft: S = {max(all_steps)} needs a draft model, got None "
                "(without one only S = 0 can run)"
            )

        self.target, self.draft = target, draft
        self.policy = policy
        self.max_batch_size, self.max_len = max_batch_size, max_len
        self.max_steps = max(all_steps)
        self.skip_draft_at_zero = skip_draft_at_zero and draft is not None
        self.num_skipped_draft_rounds = 0
        # A batch is padded to a captured size: the rows must reach what the largest is padded to.
        num_rows = pad_to_cuda_graph_bs(max_batch_size, sizes)
        self.cuda_graph_bs = None if sizes is None else [s for s in sizes if s <= num_rows]
        self.row_capacity = max_len + self.kv_tokens_per_round
        target_cache = target.make_cache(num_rows, self.row_capacity)
        draft_cache = None if draft is None else draft.make_cache(num_rows, self.row_capacity)
        self.caches = [cache for cache in (target_cache, draft_cache) if cache is not None]
        weight = target.head_weight
        self.buffers = DecodeBuffers.allocate(
            num_rows,
            self.max_steps,
            target.config.hidden_size,
            target.config.vocab_size,
            dtype=weight.dtype,
            device=weight.device,
            keep_target_hidden=self.skip_draft_at_zero,
        )
        # Only a policy that lives beside the op can be updated inside it.
        self._learns_in_op = hasattr(policy, "step_reader")
        self.stages = EagleStages(
            target, target_cache, draft, draft_cache, policy if self._learns_in_op else None
        )
        self._row_lens: list[int] = []  # tokens in the target's cache
        self._row_reserved: list[int] = []  # cache slots reserved
        self._draft_behind = False

        self.controller: AdaptiveController | None = None
        self.speculative_num_steps = steps
        self.runtime_state: SpecRuntimeState | None = None
        self._init_states()

    def _init_states(self) -> None:
        with torch.inference_mode():
            if self.policy is None:
                steps = self.speculative_num_steps
                state = self.build_adaptive_runtime_state(steps, steps + 1)
                self.apply_runtime_state(state)
                states = {steps: state}
            else:
                self.controller = AdaptiveController(self, self.policy)
                self.controller.init_states(self.cuda_graph_bs)
                states = self.controller.states
                check_states_cover_routing(
                    states, self.policy.candidate_steps, self.policy.cuda_graph_bs_for_step
                )
        self.capture_report = CaptureReport.of(
            states.values(), self.cuda_graph_bs, self.buffers.frame_bytes
        )

    # Runtime states.

    def build_adaptive_runtime_state(
        self,
        speculative_num_steps: int,
        speculative_num_draft_tokens: int,
        cuda_graph_bs: list[int] | None = None,
    ) -> SpecRuntimeState:
        """The stages of a round at S, captured for ``cuda_graph_bs``, the largest first.

        None captures all of the worker's own sizes, an empty list none. The worker's active state,
        its rows and the adaptive state are as before afterwards, also if a capture fails.
        """
        steps = speculative_num_steps
        if speculative_num_draft_tokens != steps + 1:
            raise ValueError(
                f"speculative_num_draft_tokens: expected {steps + 1} (a chain of {steps} steps), "
                f"got {speculative_num_draft_tokens}"
            )
        stages = self.stages
        extends = self.draft is not None and not (steps == 0 and self.skip_draft_at_zero)
        state = SpecRuntimeState(
            speculative_num_steps=steps,
            speculative_num_draft_tokens=speculative_num_draft_tokens,
            draft_graphs=GraphTable(stages.draft) if steps > 0 else None,
            verify_graphs=GraphTable(stages.verify if extends else stages.verify_only),
            draft_extend_graphs=GraphTable(stages.extend) if extends else None,
        )
        sizes = self.cuda_graph_bs if cuda_graph_bs is None else cuda_graph_bs
        with self._override_worker_state(state):
            for size in sorted(sizes or (), reverse=True):
                frame = self._frame(state, size)
                num_bytes = self.buffers.frame_bytes(steps, size)
                for table in state.stages:
                    table.capture(frame, self._kv_bound(), num_bytes)
        return state

    def apply_runtime_state(self, state: SpecRuntimeState) -> None:
        self.runtime_state = state
        self.speculative_num_steps = state.speculative_num_steps

    @contextlib.contextmanager
    def _override_worker_state(self, state: SpecRuntimeState) -> Iterator[None]:
        """Make ``state`` the active one for the block, with no live rows, and put everything back.

        What the block writes to the caches lies at or behind the end of the live rows' sequences,
        where their next round overwrites it.
        """
        active = (self.runtime_state, self.speculative_num_steps)
        saved = [(t, t.clone()) for t in (self.buffers.num_reqs, *self.buffers.row_state())]
        self.apply_runtime_state(state)
        self.buffers.num_reqs.zero_()
        try:
            yield
        finally:
            self.runtime_state, self.speculative_num_steps = active
            for tensor, value in saved:
                tensor.copy_(value)

    def _frame(self, state: SpecRuntimeState, batch_size: int) -> RoundFrame:
        frame = state.frames.get(batch_size)
        if frame is None:
            slot = self.policy.slot_for_batch(batch_size) if self._learns_in_op else 0
            frame = RoundFrame.of(self.buffers, state.speculative_num_steps, batch_size, slot)
            state.frames[batch_size] = frame
        return frame

    # Rows.

    @property
    def num_reqs(self) -> int:
        return len(self._row_lens)

    @property
    def kv_tokens_per_round(self) -> int:
        """Cache slots that a round may fill per request: by the largest S, whatever S is active."""
        return self.max_steps + 1

    def add_row(self, token_ids: Sequence[int]) -> int:
        """Run a request's tokens through both models in a new, last row; returns its next token.

        Raises ValueError when there is no free row, or no tokens, or more than fit.
        """
        row, length = self.num_reqs, len(token_ids)
        if row >= self.max_batch_size:
            raise ValueError(f"add_row: all {self.max_batch_size} rows are taken")
        if not 1 <= length <= self.max_len:
            raise ValueError(f"token_ids: expected 1 to {self.max_len} tokens, got {length}")
        buffers = self.buffers
        device = buffers.input_ids.device
        with torch.inference_mode():
            ids = torch.tensor([token_ids], device=device)
            positions = torch.arange(length, device=device).unsqueeze(0)
            caches = [cache.rows(row, row + 1) for cache in self.caches]
            hidden = self.target(ids, positions, caches[0], length)
            token = self.target.logits(hidden[:, -1]).argmax(-1)
            if self.draft is not None:
                shifted = torch.cat([ids[:, 1:], token.unsqueeze(0)], dim=1)
                drafted = self.draft(shifted, hidden, positions, caches[1], length)
                buffers.draft_hidden[row] = drafted[0, -1]
            if buffers.target_hidden is not None:
                buffers.target_hidden[row] = hidden[0, -1]
            buffers.input_ids[row, 0] = token[0]
            buffers.seq_lens[row] = length
            buffers.new_seq_lens[row] = length
            buffers.num_reqs.fill_(row + 1)
        self._row_lens.append(length)
        self._row_reserved.append(self._round_up(length))
        return int(token)

    def remove_row(self, row: int) -> None:
        """Free ``row``; the last live row moves into it."""
        last = self.num_reqs - 1
        if not 0 <= row <= last:
            raise ValueError(f"row: expected 0 to {last}, got {row}")
        with torch.inference_mode():
            for cache in self.caches:
                # Zeroed, since a NaN left behind by a sequence that overflowed would reach the next
                # one in this row even with weight 0.
                cache.data[:, row, : self._row_reserved[row]].zero_()
                if row != last:
                    cache.copy_row(last, row, self._row_lens[last])
                    cache.data[:, last, : self._row_reserved[last]].zero_()
            if row != last:
                self.buffers.move_row(last, row)
            self.buffers.clear_row(last)
            self.buffers.num_reqs.fill_(last)
        self._row_lens[row] = self._row_lens[last]
        self._row_reserved[row] = self._row_reserved[last]
        del self._row_lens[last], self._row_reserved[last]

    def _round_up(self, length: int) -> int:
        return min(-(-length // KV_BLOCK) * KV_BLOCK, self.row_capacity)

    def _reserve(self) -> None:
        """Reserve every live row's slots for the coming round."""
        reserved, per_round = self._row_reserved, self.kv_tokens_per_round
        for row, length in enumerate(self._row_lens):
            if new := num_new_kv_slots(length, reserved[row], per_round):
                reserved[row] = self._round_up(reserved[row] + new)

    def _kv_bound(self) -> int:
        """How far any row's keys reach: known to the host, and constant over many rounds."""
        return max(self._row_reserved, default=self._round_up(KV_BLOCK))

    # Decoding.

    def activate_step_by_batch(self, batch_size: int) -> None:
        if self.controller is not None:
            self.controller.activate_step_by_batch(batch_size)

    def on_verify_complete_cpu(
        self,
        num_correct_drafts_per_req: Sequence[int],
        batch_size: int,
        executed_steps: int | None = None,
    ) -> None:
        # Where the op has learned from the round, counting it again would be wrong.
        if self.controller is not None and not self._learns_in_op:
            self.controller.on_verify_complete(
                num_correct_drafts_per_req, batch_size, executed_steps=executed_steps
            )

    @torch.inference_mode()
    def decode(self) -> DecodeResult:
        """One round for all live rows, which each gain 1 to S + 1 tokens.

        Raises ValueError without live rows. If a model fails, the rows are as before the round.
        """
        batch_size = self.num_reqs
        if batch_size == 0:
            raise ValueError("decode: there is no live row")
        self.activate_step_by_batch(batch_size)
        state = self.runtime_state
        steps = state.speculative_num_steps
        padded = pad_to_cuda_graph_bs(batch_size, self.cuda_graph_bs)
        learned_before = self.policy.next_round if self._learns_in_op else 0
        try:
            self._reserve()
            kv_len = self._kv_bound()
            frame = self._frame(state, padded)
            if self._draft_behind and steps > 0:
                self.stages.catch_up(frame, kv_len)
                self._draft_behind = False
            for table in state.stages:
                table.run(frame, kv_len)
        except BaseException:
            if self._learns_in_op and self.policy.next_round == learned_before:
                self.controller.cancel_round()
            raise
        if steps == 0 and self.skip_draft_at_zero:
            self._draft_behind = True
            self.num_skipped_draft_rounds += 1
        # The round's only wait for the device.
        counts = frame.accept_token_num[:batch_size].tolist()
        emitted = frame.output_token_ids[:batch_size].tolist()
        self.on_verify_complete_cpu(counts, batch_size, executed_steps=steps)
        tokens = []
        for row, count in enumerate(counts):
            tokens.append(emitted[row][: count + 1])
            self._row_lens[row] += count + 1
        return DecodeResult(steps, batch_size, padded, counts, tokens)

    def status(self) -> dict[str, Any]:
        """What runs, and why: for operators."""
        report = self.capture_report
        return {
            "speculative_num_steps": self.speculative_num_steps,
            "adaptive": self.controller is not None,
            "adaptive_unsupported_reason": self.unsupported_reason,
            "skip_draft_at_zero": self.skip_draft_at_zero,
            "num_skipped_draft_rounds": self.num_skipped_draft_rounds,
            "captured_batch_sizes": dict(report.batch_sizes),
            "captured_bytes": report.captured_bytes,
            "unpruned_bytes": report.full_bytes,
            "controller": None if self.controller is None else self.controller.status(),
        }


def check_int(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if value < minimum:
        raise ValueError(f"{name}: expected at least {minimum}, got {value}")


def check_batch_sizes(cuda_graph_bs: Sequence[int] | None) -> list[int] | None:
    if cuda_graph_bs is None:
        return None
    sizes = list(cuda_graph_bs)
    for size in sizes:
        check_int("cuda_graph_bs", size, 1)
    return sorted(set(sizes))
