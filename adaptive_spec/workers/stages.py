"""The stages of an EAGLE decode round, as functions of a frame, and the prefill before it.

They see the models, the caches and the frame, and nothing of the worker that is running: a stage
that is captured for one S while another S is active cannot pick up the active one's tensors.

Before a round a request has L tokens in the target's cache and one more, its last token, outside.
The draft's cache holds positions 0..L-1, where position p was given token p+1 and the target's
hidden state of p; ``draft_hidden`` is the draft's output at L-1. Entries behind a request's
position may be left over from rejected drafts: they are overwritten before anything can read them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from adaptive_spec import ops
from adaptive_spec.graphs import DecodeBuffers, RoundFrame

if TYPE_CHECKING:
    from adaptive_spec.engine.draft import EagleDraft
    from adaptive_spec.engine.kv_cache import KVCache
    from adaptive_spec.engine.llama import LlamaForCausalLM
    from adaptive_spec.row_sampling import RowSampling
    from adaptive_spec.state import AdaptiveState


class EagleStages:
    """Prefill, draft, verify and draft extend for one pair of models and their caches.

    Args:
        draft: None for plain decoding; every frame must then have S = 0.
        policy: an `AdaptiveState` for the verify op to update, or None.
    """

    def __init__(
        self,
        target: LlamaForCausalLM,
        target_cache: KVCache,
        draft: EagleDraft | None,
        draft_cache: KVCache | None,
        policy: AdaptiveState | None,
    ) -> None:
        self.target = target
        self.target_cache = target_cache
        self.draft_model = draft
        self.draft_cache = draft_cache
        self.policy = policy

    def prefill(self, buffers: DecodeBuffers, row: int, ids: torch.Tensor) -> torch.Tensor:
        """Runs a prompt, ``ids`` [1, length], in ``row``; returns the token it leads to, [1].

        Not part of a round: it writes what the row carries into its first one.
        """
        length, end = ids.size(1), row + 1
        positions = torch.arange(length, device=ids.device).unsqueeze(0)
        hidden = self.target(ids, positions, self.target_cache.rows(row, end), length)
        token = buffers.input_ids[row:end, 0]
        sampling = buffers.sampling.rows(row, end)
        choose_tokens(
            self.target.logits(hidden[:, -1:]),
            positions[:, -1],
            token,
            sampling,
            scratch=(buffers.output_token_ids[row:end], buffers.accept_token_num[row:end]),
            error_mask=sampling.error_mask,
            workspace=buffers.workspace,
        )
        if self.draft_model is not None:
            shifted = torch.cat([ids[:, 1:], token.unsqueeze(0)], dim=1)
            cache = self.draft_cache.rows(row, end)
            drafted = self.draft_model(shifted, hidden, positions, cache, length)
            buffers.draft_hidden[row] = drafted[0, -1]
        if buffers.target_hidden is not None:
            buffers.target_hidden[row] = hidden[0, -1]
        buffers.seq_lens[row] = length
        buffers.new_seq_lens[row] = length
        return token

    def draft(self, frame: RoundFrame, kv_len: int, *, learn: bool) -> None:
        """Writes S draft tokens to the frame. Only for S > 0."""
        place(frame)
        hidden = frame.draft_hidden.unsqueeze(1)
        for step in range(frame.speculative_num_steps):
            if step > 0:
                hidden = self.draft_model(
                    frame.token_columns[step],
                    hidden,
                    frame.position_columns[step - 1],
                    self.draft_cache,
                    kv_len,
                )
            self.choose_draft(frame, step, self.draft_model.logits(hidden))

    def choose_draft(self, frame: RoundFrame, step: int, logits: torch.Tensor) -> None:
        """Writes draft number ``step``, given the draft's ``logits`` [P, 1, V] for it.

        As the target would choose from these logits, so that it agrees as often as it can
        (Daliri et al. 2024, arXiv 2408.07978).
        """
        choose_tokens(
            logits,
            frame.positions_by_step[step],
            frame.tokens_by_step[step + 1],
            frame.sampling,
            scratch=(frame.output_token_ids, frame.accept_token_num),
            num_reqs=frame.num_reqs,
            workspace=frame.workspace,
        )

    def verify(self, frame: RoundFrame, kv_len: int, *, learn: bool) -> None:
        """Runs the target on the last token and the drafts and accepts a prefix of the drafts.

        With a policy and ``learn``, the same op updates the adaptive state and publishes the
        decision. A draft extend must follow, or `commit`.
        """
        if frame.speculative_num_steps == 0:
            place(frame)
        hidden = self.target(frame.input_ids, frame.positions, self.target_cache, kv_len)
        frame.hidden.copy_(hidden)
        self.target.logits(hidden, out=frame.logits)
        # The op leaves padding rows alone, and what an earlier round at another S left there may
        # be out of this frame's range.
        frame.select_index.zero_()
        ops.verify_chain_sampling_from_logits(
            frame.draft_tokens,
            frame.logits,
            positions=frame.seq_lens,
            output_token_ids=frame.output_token_ids,
            accept_token_num=frame.accept_token_num,
            **frame.sampling.choice,
            error_mask=frame.sampling.error_mask,
            state=self.policy if learn else None,
            slot=frame.slot,
            speculative_num_steps=frame.speculative_num_steps,
            num_reqs=frame.num_reqs,
            seq_lens=frame.seq_lens,
            new_seq_lens=frame.new_seq_lens,
            bonus_tokens=frame.bonus_tokens,
            select_index=frame.select_index,
            workspace=frame.workspace,
        )

    def extend(self, frame: RoundFrame, kv_len: int, *, learn: bool) -> None:
        """Gives the draft the tokens that were emitted, with the target's hidden states.

        All S + 1 positions are run, whatever was accepted, so that the shape is fixed.
        """
        # Behind the bonus token the ids are -1, which the embedding does not have.
        frame.extend_ids.copy_(frame.output_token_ids).clamp_(min=0)
        hidden = self.draft_model(
            frame.extend_ids, frame.hidden, frame.positions, self.draft_cache, kv_len
        )
        torch.index_select(hidden.flatten(0, 1), 0, frame.select_index, out=frame.draft_hidden)
        commit(frame)

    def verify_only(self, frame: RoundFrame, kv_len: int, *, learn: bool) -> None:
        """A round at S = 0 whose draft is not extended: for decoding without a draft, or where the
        draft catches up later from ``target_hidden``."""
        self.verify(frame, kv_len, learn=learn)
        if frame.target_hidden is not None:
            frame.target_hidden.copy_(frame.flat_hidden)
        commit(frame)

    def catch_up(self, frame: RoundFrame, kv_len: int) -> None:
        """Brings ``draft_hidden`` up to date after rounds that did not extend the draft.

        Only the newest position is run; the ones skipped before it stay missing in the draft's
        cache, so proposals are worse until they are out of reach.
        """
        hidden = self.draft_model(
            frame.last_tokens.unsqueeze(1),
            frame.target_hidden.unsqueeze(1),
            # Padding rows are at length 0.
            (frame.seq_lens_column - 1).clamp_(min=0),
            self.draft_cache,
            kv_len,
        )
        frame.draft_hidden.copy_(hidden.squeeze(1))


def choose_tokens(
    logits: torch.Tensor,
    positions: torch.Tensor,
    tokens: torch.Tensor,
    sampling: RowSampling,
    *,
    scratch: tuple[torch.Tensor, torch.Tensor],
    **keywords: torch.Tensor | None,
) -> None:
    """Writes to ``tokens`` int64 [P] what rows of ``logits`` [P, 1, V], which lie at ``positions``
    int64 [P], choose.

    ``scratch``: int32 [P, >= 1] and [P] for the op to write what nobody reads.
    """
    output_token_ids, accept_token_num = scratch
    ops.verify_chain_sampling_from_logits(
        # Drafts, of which S = 0 reads none.
        tokens.unsqueeze(1),
        logits,
        positions=positions,
        output_token_ids=output_token_ids,
        accept_token_num=accept_token_num,
        **sampling.choice,
        bonus_tokens=tokens,
        speculative_num_steps=0,
        **keywords,
    )


def place(frame: RoundFrame) -> None:
    """Writes the positions of the last token and the drafts."""
    torch.add(frame.seq_lens_column, frame.offsets, out=frame.positions)


def commit(frame: RoundFrame) -> None:
    """Makes the round's result the start of the next. Last, so that a round which fails before it
    can be run again."""
    frame.last_tokens.copy_(frame.bonus_tokens)
    frame.seq_lens.copy_(frame.new_seq_lens)
