"""Which slot a batch belongs to, which slot's steps a round uses, and which graphs that can need.

Run-time routing and the pruning of graph sizes go through the same two functions, so a graph that
routing can ask for is never pruned.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from adaptive_spec.config import AdaptiveConfig


def pad_to_cuda_graph_bs(batch_size: int, cuda_graph_bs: Sequence[int] | None) -> int:
    """The smallest captured size that holds the batch, or the batch itself where none does.

    `cuda_graph_bs` ascends; None or empty means that no graphs are used.
    """
    if not cuda_graph_bs:
        return batch_size
    index = bisect_left(cuda_graph_bs, batch_size)
    return cuda_graph_bs[index] if index < len(cuda_graph_bs) else batch_size


def slot_index_for_batch(padded_batch_size: int, slot_batch_sizes: Sequence[int]) -> int:
    """Index of the last slot whose lower bound is not above the batch; 0 where all are.

    `slot_batch_sizes` ascends.
    """
    return max(0, bisect_right(slot_batch_sizes, padded_batch_size) - 1)


class Debounce:
    """Follows the routed slot only when the same other one came `rounds` times in a row.

    Keeps a batch size that hovers at a slot boundary from swapping runtime states every round.
    `rounds` of 0 or 1 follows at once.
    """

    def __init__(self, rounds: int):
        self.rounds = rounds
        self.reset()

    def reset(self) -> None:
        """Forget the active slot: the next one is followed at once."""
        self.active: int | None = None
        self._pending: int | None = None
        self._seen = 0

    def follow(self, routed: int) -> int:
        """One round was routed to slot `routed`; the slot whose steps it is to use."""
        if self.active is None or routed == self.active:
            self.active = routed
            self._seen = 0
            return routed
        self._seen = self._seen + 1 if routed == self._pending else 1
        self._pending = routed
        if self._seen >= self.rounds:
            self.active = routed
            self._seen = 0
        return self.active


class BatchRouter:
    """Routing for one config, with the graph sizes of one worker.

    Attributes:
        cuda_graph_bs: the captured batch sizes, ascending; None where no graphs are used.
    """

    def __init__(self, config: AdaptiveConfig):
        self.slot_batch_sizes = [slot.batch_size for slot in config.slots]
        self.cuda_graph_bs: list[int] | None = None
        self._candidates = [slot.candidate_steps for slot in config.slots]
        self._debounce = Debounce(config.slot_debounce)

    def set_cuda_graph_bs(self, cuda_graph_bs: Sequence[int] | None) -> None:
        """Set the captured batch sizes; None or empty = no graphs. Forgets the debounced slot.

        Raises:
            ValueError: a size is not a positive integer. Nothing is changed then.
        """
        sizes = None if cuda_graph_bs is None else list(cuda_graph_bs)
        for size in sizes or ():
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"`cuda_graph_bs` must hold positive integers, got {size!r}")
        self.cuda_graph_bs = sorted(set(sizes)) if sizes else None
        self._debounce.reset()

    def slot_index(self, batch_size: int) -> int:
        """The slot that a batch belongs to, and whose state learns from it."""
        padded = pad_to_cuda_graph_bs(batch_size, self.cuda_graph_bs)
        return slot_index_for_batch(padded, self.slot_batch_sizes)

    def active_slot_index(self, batch_size: int) -> int:
        """The slot whose steps the starting round uses. Call it once a round: it counts rounds."""
        return self._debounce.follow(self.slot_index(batch_size))

    def candidate_steps_for_batch(self, batch_size: int) -> list[int]:
        """Every S that a round of this size can be asked to run, ascending.

        With debouncing a batch can run with the steps of any slot.
        """
        if self._debounce.rounds > 1:
            return sorted({step for steps in self._candidates for step in steps})
        return list(self._candidates[self.slot_index(batch_size)])

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """Captured sizes that can be asked to run `step`; None where no graphs are used."""
        sizes = self.cuda_graph_bs
        if sizes is None:
            return None
        return [size for size in sizes if step in self.candidate_steps_for_batch(size)]
