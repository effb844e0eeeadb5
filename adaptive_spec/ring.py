"""The decision ring: how the step count that a verify op chose reaches the host without a sync.

The op writes one 64-bit word per slot and round; the host reads it with a plain load, wherever the
op runs: for a CUDA device the words lie in pinned host memory that the device writes directly.
Round numbers start at 0 and rise by one with every op that was given the state. Reading round -1
(or any earlier one) gives the steps to start with.
"""

from __future__ import annotations

import dataclasses

import torch

from adaptive_spec.devices import resolve_device
from adaptive_spec.extension import _C
from adaptive_spec.step_policy import DecisionReason

RingOverrunError = _C.RingOverrunError
RingTimeoutError = _C.RingTimeoutError


@dataclasses.dataclass(frozen=True)
class Decision:
    """The draft steps a slot is to run with, as of one round, and the rule that said so."""

    round: int
    speculative_num_steps: int
    reason: DecisionReason


@dataclasses.dataclass(frozen=True)
class RoundRecord:
    """What one round observed: accepted drafts (bonus excluded) summed over `num_reqs` requests."""

    round: int
    slot: int
    speculative_num_steps: int
    num_correct_drafts: int
    num_reqs: int


class DecisionRing:
    """Decisions of the last `depth` rounds for `num_slots` slots.

    Args:
        depth: rounds held; a power of two, at least 8.
        num_slots: slots, 1 to 16.
        device: where the ops that publish to it run: "cpu", "cuda" (the current device) or
            "cuda:<index>".

    Attributes:
        tensor: the words as int64 on `device`, to be passed to the verify ops as `ring`. Shares the
            ring's memory and keeps it alive, as a captured CUDA graph does not.

    Raises:
        ValueError: bad depth, number of slots or device.
        RuntimeError: CUDA did not give the memory.
    """

    def __init__(self, depth: int, num_slots: int, *, device: torch.device | str = "cpu"):
        self.device = resolve_device(device)
        device_index = -1 if self.device.index is None else self.device.index
        self.native = _C.DecisionRing(depth, num_slots, device_index)
        self.tensor = torch.from_dlpack(self.native)

    @property
    def depth(self) -> int:
        return self.native.depth

    @property
    def num_slots(self) -> int:
        return self.native.num_slots

    @property
    def stalls(self) -> int:
        """How often a reader had to wait for a decision that was due."""
        return self.native.stalls

    def read(self, round: int, slot: int) -> Decision | None:
        """The decision that exactly `round` left for `slot`, or None if it has not finished yet.

        Raises:
            RingOverrunError: the ring no longer holds that round.
            ValueError: no such slot.
        """
        word = self.native.read(round, slot)
        return None if word is None else _decision(round, word)

    def latest(self, slot: int) -> Decision:
        """The newest decision for `slot`, for display: which round it is depends on timing."""
        word = self.native.latest(slot)
        return _decision(word.round, word)

    def wait(self, round: int, slot: int, timeout_s: float = 10.0) -> Decision:
        """As `read`, but waits up to `timeout_s` seconds for the round to finish.

        Raises:
            RingTimeoutError: (a TimeoutError) it did not.
        """
        return _decision(round, self.native.wait(round, slot, timeout_s))

    def record(self, round: int) -> RoundRecord | None:
        """What `round` observed, or None if it has not finished yet. Raises RingOverrunError."""
        record = self.native.record(round)
        if record is None:
            return None
        return RoundRecord(round, record.slot, record.steps, record.sum, record.num_reqs)


def _decision(round: int, word: _C.Decision) -> Decision:
    return Decision(round, word.steps, DecisionReason(word.reason))
