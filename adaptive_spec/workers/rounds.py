"""What a worker keeps of its rows and of the rounds in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from adaptive_spec.graphs import DecodeBuffers, RoundFrame, SpecRuntimeState

if TYPE_CHECKING:
    from adaptive_spec.workers.queue import DeviceQueue, Job

__all__ = ["DecodeResult", "FirstToken", "HostResults", "LaunchedRound", "Row", "take_first_tokens"]


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


class FirstToken:
    """The token that a prompt led to, on its way to the host."""

    def __init__(self, job: Job, host: torch.Tensor) -> None:
        self._job = job
        self._host = host  # int64 [1]

    def wait(self) -> int:
        self._job.wait()
        return int(self._host[0])


@dataclass(eq=False)
class Row:
    """One request's row. Its index changes as others leave; rounds in flight hold the row itself.

    ``length`` is that of the last collected round. What the device holds may be longer, by as much
    as the rounds in flight can add, but never longer than ``reserved``.
    """

    index: int | None  # None once it was removed
    length: int  # tokens in the target's cache
    reserved: int  # cache slots
    first_token: FirstToken | None  # until it was handed out


def take_first_tokens(rows: Sequence[Row]) -> list[int | None]:
    """Each row's first token, where it was not handed out before; waits for the prompts.

    If the pass of one failed, raises what that raised, each time, and hands out none.
    """
    tokens = [None if row.first_token is None else row.first_token.wait() for row in rows]
    for row in rows:
        row.first_token = None
    return tokens


class HostResults:
    """Where a round's results arrive on the host. Allocated once for each round in flight."""

    def __init__(self, queue: DeviceQueue, buffers: DecodeBuffers) -> None:
        self._pairs = [
            (source, queue.host_buffer(*source.shape, dtype=source.dtype))
            for source in (buffers.accept_token_num, buffers.output_token_ids)
        ]

    def copy(self, batch_size: int) -> None:
        """For queued work: start the copies of the first ``batch_size`` rows."""
        # Whole rows, at their full width: only a dense block is copied without blocking.
        for source, host in self._pairs:
            host[:batch_size].copy_(source[:batch_size], non_blocking=True)

    def read(self, batch_size: int) -> tuple[list[int], list[list[int]]]:
        """Accepted drafts and output tokens by row, once the copies have arrived."""
        counts, tokens = (host[:batch_size].tolist() for _, host in self._pairs)
        return counts, [row[: n + 1] for row, n in zip(tokens, counts, strict=True)]


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
