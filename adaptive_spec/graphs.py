"""Prepared rounds: everything of a decode round whose shape depends on the draft steps S.

A round is a fixed sequence of stages (draft, verify, draft extend). For a pair (S, padded batch
size) a stage can be captured once (`adaptive_spec.capture`) and replayed every round. The buffers
are allocated once, for the largest S and batch, and every pair works on views of them: the row
stride belongs to the buffer, never to the current S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from adaptive_spec.capture import Capture, CapturePool, Stage
from adaptive_spec.routing import pad_to_cuda_graph_bs
from adaptive_spec.row_sampling import RowSampling

__all__ = [
    "CaptureReport",
    "DecodeBuffers",
    "GraphTable",
    "RoundFrame",
    "SpecRuntimeState",
    "check_states_cover_routing",
]


@dataclass(frozen=True)
class DecodeBuffers:
    """The tensors of a decode round, sized for the largest batch P and the largest S (D = S + 1).

    Rows are batch rows. Carried from round to round: ``num_reqs``, ``seq_lens`` (tokens whose keys
    the target's cache holds), column 0 of ``input_ids`` (the last token, not in the cache yet),
    ``draft_hidden`` (the draft's state the next first draft token is read from), ``sampling`` and,
    only where rounds at S = 0 may skip the draft, ``target_hidden``. All else lives for one round.
    """

    num_reqs: torch.Tensor  # int32 [1]; rows beyond it are padding
    seq_lens: torch.Tensor  # int64 [P]
    input_ids: torch.Tensor  # int64 [P, D]; the last token, then the drafts
    draft_hidden: torch.Tensor  # [P, hidden size]
    target_hidden: torch.Tensor | None  # [P, hidden size]
    sampling: RowSampling  # [P] each
    positions: torch.Tensor  # int64 [P, D]
    output_token_ids: torch.Tensor  # int32 [P, D]; accepted drafts and the bonus token, then -1
    extend_ids: torch.Tensor  # int64 [P, D]
    accept_token_num: torch.Tensor  # int32 [P]; bonus excluded
    new_seq_lens: torch.Tensor  # int64 [P]
    bonus_tokens: torch.Tensor  # int64 [P]
    select_index: torch.Tensor  # int64 [P]
    hidden: torch.Tensor  # [P * D, hidden size]; flat, so that any S gets dense rows
    logits: torch.Tensor  # [P * D, vocabulary]
    workspace: torch.Tensor | None  # int64; the verify op's scratch memory

    @classmethod
    def allocate(
        cls,
        max_batch_size: int,
        max_steps: int,
        hidden_size: int,
        vocab_size: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        keep_target_hidden: bool = False,
        workspace: torch.Tensor | None = None,
    ) -> DecodeBuffers:
        """Zeroed buffers for ``max_batch_size`` rows and up to ``max_steps`` drafts each.

        ``workspace``: from `ops.verify_workspace` for that size; without one the op makes its own.
        """
        rows, width = max_batch_size, max_steps + 1

        def ids(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def real(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            num_reqs=ids(1, dtype=torch.int32),
            seq_lens=ids(rows),
            input_ids=ids(rows, width),
            draft_hidden=real(rows, hidden_size),
            target_hidden=real(rows, hidden_size) if keep_target_hidden else None,
            sampling=RowSampling.allocate(rows, device),
            positions=ids(rows, width),
            output_token_ids=ids(rows, width, dtype=torch.int32),
            extend_ids=ids(rows, width),
            accept_token_num=ids(rows, dtype=torch.int32),
            new_seq_lens=ids(rows),
            bonus_tokens=ids(rows),
            select_index=ids(rows),
            hidden=real(rows * width, hidden_size),
            logits=real(rows * width, vocab_size),
            workspace=workspace,
        )

    @property
    def max_batch_size(self) -> int:
        return self.input_ids.size(0)

    @property
    def max_steps(self) -> int:
        return self.input_ids.size(1) - 1

    @property
    def num_bytes(self) -> int:
        own = [t for t in vars(self).values() if isinstance(t, torch.Tensor)]
        return sum(t.nbytes for t in (*own, *self.sampling.tensors))

    def row_state(self) -> tuple[torch.Tensor, ...]:
        """The per-row tensors carried from round to round, as views."""
        return tuple(
            tensor
            for tensor in (
                self.seq_lens,
                self.new_seq_lens,
                self.input_ids[:, 0],
                self.draft_hidden,
                self.target_hidden,
                *self.sampling.tensors,
            )
            if tensor is not None
        )

    def move_row(self, source: int, target: int) -> None:
        """Copy what request row ``source`` carries into row ``target``."""
        for tensor in self.row_state():
            tensor[target] = tensor[source]

    def clear_row(self, row: int) -> None:
        """Make ``row`` a padding row: token 0 at position 0, greedy.

        A padded round still computes it, so it must not keep positions that only the departed
        request's share of the cache could hold.
        """
        for tensor in self.row_state():
            tensor[row] = 0

    def frame_bytes(self, speculative_num_steps: int, batch_size: int) -> int:
        """Bytes of buffer that a round of ``batch_size`` rows at S touches."""
        share = batch_size * (speculative_num_steps + 1)
        total = self.max_batch_size * (self.max_steps + 1)
        return self.num_bytes * share // total


@dataclass(frozen=True)
class RoundFrame:
    """One round's view of the buffers at (S, batch size), and the metadata that it alone owns."""

    speculative_num_steps: int
    batch_size: int  # rows computed; the live ones are counted by num_reqs
    slot: int  # the adaptive slot that learns from the round
    num_reqs: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_column: torch.Tensor  # [P, 1]
    offsets: torch.Tensor  # int64 [D]; 0, 1, ... S; owned
    input_ids: torch.Tensor
    last_tokens: torch.Tensor  # column 0 of input_ids
    draft_tokens: torch.Tensor  # the other columns
    token_columns: tuple[torch.Tensor, ...]  # [P, 1] each
    tokens_by_step: tuple[torch.Tensor, ...]  # the same as [P]
    positions: torch.Tensor
    position_columns: tuple[torch.Tensor, ...]
    positions_by_step: tuple[torch.Tensor, ...]
    draft_hidden: torch.Tensor
    target_hidden: torch.Tensor | None
    sampling: RowSampling
    output_token_ids: torch.Tensor
    extend_ids: torch.Tensor
    accept_token_num: torch.Tensor
    new_seq_lens: torch.Tensor
    bonus_tokens: torch.Tensor
    select_index: torch.Tensor
    hidden: torch.Tensor  # [P, D, hidden size]
    flat_hidden: torch.Tensor  # [P * D, hidden size]
    logits: torch.Tensor  # [P, D, vocabulary]
    workspace: torch.Tensor | None

    @classmethod
    def of(
        cls, buffers: DecodeBuffers, speculative_num_steps: int, batch_size: int, slot: int = 0
    ) -> RoundFrame:
        """Views of ``buffers``; no memory but the offsets is allocated.

        Raises ValueError when the buffers hold fewer steps or rows.
        """
        if not 0 <= speculative_num_steps <= buffers.max_steps:
            raise ValueError(
                f"speculative_num_steps: the buffers hold 0 to {buffers.max_steps} steps, "
                f"got {speculative_num_steps}"
            )
        if not 1 <= batch_size <= buffers.max_batch_size:
            raise ValueError(
                f"batch_size: the buffers hold 1 to {buffers.max_batch_size} rows, got {batch_size}"
            )
        width = speculative_num_steps + 1
        num_rows = batch_size * width
        input_ids = buffers.input_ids[:batch_size, :width]
        positions = buffers.positions[:batch_size, :width]
        seq_lens = buffers.seq_lens[:batch_size]
        hidden, logits = buffers.hidden[:num_rows], buffers.logits[:num_rows]
        target_hidden = buffers.target_hidden
        return cls(
            speculative_num_steps=speculative_num_steps,
            batch_size=batch_size,
            slot=slot,
            num_reqs=buffers.num_reqs,
            seq_lens=seq_lens,
            seq_lens_column=seq_lens.unsqueeze(1),
            offsets=torch.arange(width, device=input_ids.device),
            input_ids=input_ids,
            last_tokens=input_ids[:, 0],
            draft_tokens=input_ids[:, 1:],
            token_columns=input_ids.split(1, dim=1),
            tokens_by_step=input_ids.unbind(1),
            positions=positions,
            position_columns=positions.split(1, dim=1),
            positions_by_step=positions.unbind(1),
            draft_hidden=buffers.draft_hidden[:batch_size],
            target_hidden=None if target_hidden is None else target_hidden[:batch_size],
            sampling=buffers.sampling.rows(0, batch_size),
            output_token_ids=buffers.output_token_ids[:batch_size, :width],
            extend_ids=buffers.extend_ids[:batch_size, :width],
            accept_token_num=buffers.accept_token_num[:batch_size],
            new_seq_lens=buffers.new_seq_lens[:batch_size],
            bonus_tokens=buffers.bonus_tokens[:batch_size],
            select_index=buffers.select_index[:batch_size],
            hidden=hidden.unflatten(0, (batch_size, width)),
            flat_hidden=hidden,
            logits=logits.unflatten(0, (batch_size, width)),
            workspace=buffers.workspace,
        )


class GraphTable:
    """A stage's captures at one S, by padded batch size."""

    def __init__(self, stage: Stage, pool: CapturePool) -> None:
        self.stage = stage
        self.pool = pool
        self.graphs: dict[int, Capture] = {}

    def capture(self, frame: RoundFrame, kv_len: int) -> None:
        self.graphs[frame.batch_size] = self.pool.capture(self.stage, frame, kv_len)

    def run(self, frame: RoundFrame, kv_len: int) -> None:
        """Replay the capture of the frame's batch size; without one, run the stage eagerly."""
        graph = self.graphs.get(frame.batch_size)
        if graph is None:
            self.stage(frame, kv_len, learn=True)
        else:
            graph.replay(kv_len)


@dataclass(frozen=True)
class SpecRuntimeState:
    """What a worker swaps, whole, when the draft steps change.

    A stage that this S has no use for is None. ``frames`` holds the views for every batch size that
    was captured or has run; they are cheap, but not to be made anew each round.
    """

    speculative_num_steps: int
    speculative_num_draft_tokens: int
    draft_graphs: GraphTable | None
    verify_graphs: GraphTable
    draft_extend_graphs: GraphTable | None
    frames: dict[int, RoundFrame] = field(default_factory=dict)
    num_bytes: int = 0  # that the captures took
    capture_seconds: float = 0.0

    @property
    def stages(self) -> tuple[GraphTable, ...]:
        """The tables that a round runs, in order."""
        tables = (self.draft_graphs, self.verify_graphs, self.draft_extend_graphs)
        return tuple(table for table in tables if table is not None)

    @property
    def captured_batch_sizes(self) -> list[int]:
        """The padded batch sizes that are replayed; all others run eagerly."""
        return sorted(self.verify_graphs.graphs)


@dataclass(frozen=True)
class CaptureReport:
    """What was captured, against what capturing every size at every S would have taken.

    On a GPU bytes are measured: what the device had less after an S was captured. The memory pool
    is shared and the largest S comes first, so that one pays for the pool and the others for what
    they add. What was not captured is estimated from what was, by the share of the buffers. On the
    CPU bytes are those of the buffers that the captures work on.
    """

    batch_sizes: Mapping[int, list[int]]  # by S
    num_bytes: Mapping[int, int]  # by S
    seconds: Mapping[int, float]  # by S
    full_pairs: int
    full_bytes: int

    @classmethod
    def of(
        cls,
        states: Iterable[SpecRuntimeState],
        cuda_graph_bs: list[int] | None,
        frame_bytes: Callable[[int, int], int],
    ) -> CaptureReport:
        states = list(states)
        sizes = cuda_graph_bs or []
        num_bytes = share = full_share = 0
        for state in states:
            steps = state.speculative_num_steps
            num_bytes += state.num_bytes
            share += sum(frame_bytes(steps, size) for size in state.captured_batch_sizes)
            full_share += sum(frame_bytes(steps, size) for size in sizes)
        return cls(
            batch_sizes={s.speculative_num_steps: s.captured_batch_sizes for s in states},
            num_bytes={s.speculative_num_steps: s.num_bytes for s in states},
            seconds={s.speculative_num_steps: s.capture_seconds for s in states},
            full_pairs=len(states) * len(sizes),
            full_bytes=num_bytes * full_share // max(share, 1),
        )

    @property
    def captured_pairs(self) -> int:
        return sum(map(len, self.batch_sizes.values()))

    @property
    def captured_bytes(self) -> int:
        return sum(self.num_bytes.values())


def check_states_cover_routing(
    states: Mapping[int, SpecRuntimeState],
    candidate_steps: Iterable[int],
    candidate_steps_for_batch: Callable[[int], Iterable[int]],
    cuda_graph_bs: Sequence[int] | None,
    max_batch_size: int,
) -> None:
    """Check that every (padded batch size, S) that routing can return can run.

    All batch sizes up to the largest are routed, as at run time. Raises RuntimeError at start-up,
    naming the pairs, where a candidate S has no state or where a batch would be padded to a size
    that was not captured for an S it can be asked to run; and where a state exists that no slot can
    choose (it would be held for the life of the process).
    """
    candidates = set(candidate_steps)
    problems = [f"S = {steps}: no runtime state" for steps in sorted(candidates - states.keys())]
    problems += [f"S = {steps}: in no slot" for steps in sorted(states.keys() - candidates)]
    missing: dict[int, set[int]] = {}
    for batch_size in range(1, max_batch_size + 1):
        padded = pad_to_cuda_graph_bs(batch_size, cuda_graph_bs)
        if padded not in (cuda_graph_bs or ()):
            continue  # above every captured size: eager by design
        for steps in candidate_steps_for_batch(batch_size):
            if steps in states and padded not in states[steps].verify_graphs.graphs:
                missing.setdefault(steps, set()).add(padded)
    problems += [
        f"S = {steps}: batch sizes {sorted(sizes)} are not captured"
        for steps, sizes in sorted(missing.items())
    ]
    if problems:
        raise RuntimeError("runtime states do not match the policy: " + "; ".join(problems))
