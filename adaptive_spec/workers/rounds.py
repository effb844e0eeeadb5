"""Rounds: what one did, and what a worker keeps of those in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from adaptive_spec.graphs import DecodeBuffers, RoundFrame, SpecRuntimeState

if TYPE_CHECKING:
    from adaptive_spec.workers.queue import DeviceQueue, Job
    from adaptive_spec.workers.rows import Row

__all__ = ["DecodeResult", "HostResults", "LaunchedRound"]


@dataclass(frozen=True)
class DecodeResult:
    """What one round did. Lists have one entry for each row that the round ran with."""

    speculative_num_steps: int
    batch_size: int
    padded_batch_size: int
    num_correct_drafts: list[int]  # accepted drafts, bonus excluded
    tokens: list[list[int]]  # accepted drafts and the bonus token
    # Where the row is now; None where it was removed while the round was in flight.
    rows: list[int | None]
    # The token that the prompt led to, which comes before ``tokens``; None where it was known.
    first_tokens: list[int | None]


class HostResults:
    """Where a round's results arrive on the host. Allocated once for each round in flight."""

    def __init__(self, queue: DeviceQueue, buffers: DecodeBuffers) -> None:
        self._pairs = [
            (source, queue.host_buffer(*source.shape, dtype=source.dtype))
            for source in (
                buffers.accept_token_num,
                buffers.output_token_ids,
                buffers.sampling.error_mask,
            )
        ]

    def copy(self, batch_size: int) -> None:
        """For queued work: start the copies of the first ``batch_size`` rows."""
        # Whole rows, at their full width: only a dense block is copied without blocking.
        for source, host in self._pairs:
            host[:batch_size].copy_(source[:batch_size], non_blocking=True)

    def read(self, batch_size: int) -> tuple[list[int], list[list[int]], list[bool]]:
        """Accepted drafts, output tokens and whether a row has met bad logits, by row, once the
        copies have arrived."""
        counts, tokens, errors = (host[:batch_size].tolist() for _, host in self._pairs)
        return counts, [row[: n + 1] for row, n in zip(tokens, counts, strict=True)], errors


@dataclass(eq=False)
class LaunchedRound:
    """A round in flight."""

    state: SpecRuntimeState
    frame: RoundFrame
    kv_len: int
    rows: list[Row]
    results: HostResults
    job: Job | None = None
    verified: bool = False  # its verify op was issued, so the adaptive state counts it
