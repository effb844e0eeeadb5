"""Prepared rounds: everything of a decode round whose shape depends on the draft steps S.

A round is a fixed sequence of stages (draft, verify, draft extend). For a pair (S, padded batch
size) a stage can be captured once and replayed every round: it then reads and writes only static
buffers, never waits for the device, and learns what the host knows anew each round (how far the
keys reach) from an explicit argument. On the CPU a replay calls the stage on views that were made
at capture; on a GPU it would launch a CUDA graph. The buffers are allocated once, for the largest S
and batch, and every pair works on views of them: the row stride belongs to the buffer, never to the
current S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

__all__ = [
    "CaptureReport",
    "DecodeBuffers",
    "GraphTable",
    "PreparedCallable",
    "RoundFrame",
    "SpecRuntimeState",
    "Stage",
    "check_states_cover_routing",
]


@dataclass(frozen=True)
class DecodeBuffers:
    """The tensors of a decode round, sized for the largest batch P and the largest S (D = S + 1).

    Rows are batch rows. Carried from round to round: ``num_reqs``, ``seq_lens`` (tokens whose keys
    the target's cache holds), column 0 of ``input_ids`` (the last token, not in the cache yet),
    ``draft_hidden`` (the draft's state the next first draft token is read from) and, only where
    rounds at S = 0 may skip the draft, ``target_hidden``. All else lives for one round.
    """

    num_reqs: torch.Tensor  # int32 [1]; rows beyond it are padding
    seq_lens: torch.Tensor  # int64 [P]
    input_ids: torch.Tensor  # int64 [P, D]; the last token, then the drafts
    draft_hidden: torch.Tensor  # [P, hidden size]
    target_hidden: torch.Tensor | None  # [P, hidden size]
    positions: torch.Tensor  # int64 [P, D]
    output_token_ids: torch.Tensor  # int32 [P, D]; accepted drafts and the bonus token, then -1
    extend_ids: torch.Tensor  # int64 [P, D]
    accept_token_num: torch.Tensor  # int32 [P]; bonus excluded
    new_seq_lens: torch.Tensor  # int64 [P]
    bonus_tokens: torch.Tensor  # int64 [P]
    select_index: torch.Tensor  # int64 [P]
    hidden: torch.Tensor  # [P * D, hidden size]; flat, so that any S gets dense rows
    logits: torch.Tensor  # [P * D, vocabulary]

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
    ) -> DecodeBuffers:
        """Zeroed buffers for ``max_batch_size`` rows and up to ``max_steps`` drafts each."""
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
            positions=ids(rows, width),
            output_token_ids=ids(rows, width, dtype=torch.int32),
            extend_ids=ids(rows, width),
            accept_token_num=ids(rows, dtype=torch.int32),
            new_seq_lens=ids(rows),
            bonus_tokens=ids(rows),
            select_index=ids(rows),
            hidden=real(rows * width, hidden_size),
            logits=real(rows * width, vocab_size),
        )

    @property
    def max_batch_size(self) -> int:
        return self.input_ids.size(0)

    @property
    def max_steps(self) -> int:
        return self.input_ids.size(1) - 1

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in vars(self).values() if t is not None)

    def row_state(self) -> tuple[torch.Tensor, ...]:
        """The per-row tensors carried from round to round, as views."""
        carried = (self.seq_lens, self.new_seq_lens, self.input_ids[:, 0], self.draft_hidden)
        return carried if self.target_hidden is None else (*carried, self.target_hidden)

    def move_row(self, source: int, target: int) -> None:
        """Copy what request row ``source`` carries into row ``target``."""
        for tensor in self.row_state():
            tensor[target] = tensor[source]

    def clear_row(self, row: int) -> None:
        """Make ``row`` a padding row: token 0 at position 0.

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
    positions: torch.Tensor
    position_columns: tuple[torch.Tensor, ...]
    draft_hidden: torch.Tensor
    target_hidden: torch.Tensor | None
    output_token_ids: torch.Tensor
    extend_ids: torch.Tensor
    accept_token_num: torch.Tensor
    new_seq_lens: torch.Tensor
    bonus_tokens: torch.Tensor
    select_index: torch.Tensor
    hidden: torch.Tensor  # [P, D, hidden size]
    flat_hidden: torch.Tensor  # [P * D, hidden size]
    logits: torch.Tensor  # [P, D, vocabulary]

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
            positions=positions,
            position_columns=positions.split(1, dim=1),
            draft_hidden=buffers.draft_hidden[:batch_size],
            target_hidden=None if target_hidden is None else target_hidden[:batch_size],
            output_token_ids=buffers.output_token_ids[:batch_size, :width],
            extend_ids=buffers.extend_ids[:batch_size, :width],
            accept_token_num=buffers.accept_token_num[:batch_size],
            new_seq_lens=buffers.new_seq_lens[:batch_size],
            bonus_tokens=buffers.bonus_tokens[:batch_size],
            select_index=buffers.select_index[:batch_size],
            hidden=hidden.unflatten(0, (batch_size, width)),
            flat_hidden=hidden,
            logits=logits.unflatten(0, (batch_size, width)),
        )


class Stage(Protocol):
    """One step of a round. Reads and writes only the frame's tensors and the caches."""

    def __call__(self, frame: RoundFrame, kv_len: int, *, learn: bool) -> None:
        """kv_len: bound on the keys any row reads. learn: False while warming up for a capture,
        when the adaptive state must not see the round."""


class PreparedCallable:
    """A stage captured for one (S, padded batch size)."""

    def __init__(self, stage: Stage, frame: RoundFrame, num_bytes: int) -> None:
        self.stage = stage
        self.frame = frame
        self.num_bytes = num_bytes

    @classmethod
    def capture(
        cls, stage: Stage, frame: RoundFrame, kv_len: int, num_bytes: int
    ) -> PreparedCallable:
        """Run the stage once without learning, as a CUDA capture must, and keep what to replay."""
        stage(frame, kv_len, learn=False)
        return cls(stage, frame, num_bytes)

    def replay(self, kv_len: int) -> None:
        self.stage(self.frame, kv_len, learn=True)


class GraphTable:
    """A stage's captured callables at one S, by padded batch size."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.graphs: dict[int, PreparedCallable] = {}

    def capture(self, frame: RoundFrame, kv_len: int, num_bytes: int) -> None:
        self.graphs[frame.batch_size] = PreparedCallable.capture(
            self.stage, frame, kv_len, num_bytes
        )

    def run(self, frame: RoundFrame, kv_len: int) -> None:
        """Replay the graph of the frame's batch size; without one, run the stage eagerly."""
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

    @property
    def stages(self) -> tuple[GraphTable, ...]:
        """The tables that a round runs, in order."""
        tables = (self.draft_graphs, self.verify_graphs, self.draft_extend_graphs)
        return tuple(table for table in tables if table is not None)

    @property
    def captured_batch_sizes(self) -> list[int]:
        """The padded batch sizes that are replayed; all others run eagerly."""
        return sorted(self.verify_graphs.graphs)

    @property
    def num_bytes(self) -> int:
        return sum(graph.num_bytes for graph in self.verify_graphs.graphs.values())


@dataclass(frozen=True)
class CaptureReport:
    """What was captured, against what capturing every size at every S would have taken.

    Bytes are those of the buffer views that the callables work on.
    """

    batch_sizes: Mapping[int, list[int]]  # by S
    num_bytes: Mapping[int, int]  # by S
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
        return cls(
            batch_sizes={s.speculative_num_steps: s.captured_batch_sizes for s in states},
            num_bytes={s.speculative_num_steps: s.num_bytes for s in states},
            full_pairs=len(states) * len(sizes),
            full_bytes=sum(
                frame_bytes(s.speculative_num_steps, size) for s in states for size in sizes
            ),
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
    cuda_graph_bs_for_step: Callable[[int], list[int] | None],
) -> None:
    """Check that every (padded batch size, S) that routing can return can run.

    Raises RuntimeError at start-up, naming the pairs, where a candidate S has no state or where a
    batch size whose slot can choose S was not captured for it; and where a state exists that no
    slot can choose (it would be held for the life of the process).
    """
    candidates = set(candidate_steps)
    problems = [f"S = {steps}: no runtime state" for steps in sorted(candidates - states.keys())]
    problems += [f"S = {steps}: in no slot" for steps in sorted(states.keys() - candidates)]
    for steps in sorted(candidates & states.keys()):
        needed = set(cuda_graph_bs_for_step(steps) or ())
        missing = sorted(needed.difference(states[steps].captured_batch_sizes))
        if missing:
            problems.append(f"S = {steps}: batch sizes {missing} are not captured")
    if problems:
        raise RuntimeError("runtime states do not match the policy: " + "; ".join(problems))
