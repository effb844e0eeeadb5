"""The rows of a worker: requests join and leave while rounds are in flight.

What the host knows of a row lags behind the device. So all that it does to one on the device goes
through the queue, in its place between the rounds, and covers whatever the rounds in flight may
have added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from adaptive_spec.engine.sampling import SamplingParams
from adaptive_spec.workers.base import num_new_kv_slots

if TYPE_CHECKING:
    from adaptive_spec.engine.kv_cache import KVCache
    from adaptive_spec.graphs import DecodeBuffers
    from adaptive_spec.workers.queue import DeviceQueue, Job
    from adaptive_spec.workers.stages import EagleStages

__all__ = ["Row", "RowTable", "take_first_tokens"]

# Reservations grow by this many slots, so that the bound on the keys moves rarely.
KV_BLOCK = 64


class FirstToken:
    """The token that a prompt led to, on its way to the host."""

    def __init__(self, job: Job, host: torch.Tensor, error_on_host: torch.Tensor) -> None:
        self._job = job
        self._host = host  # int64 [1]
        self._error_on_host = error_on_host  # bool [1]
        self.failed = False  # as far as somebody has waited

    def wait(self) -> int:
        try:
            self._job.wait()
        except Exception:
            self.failed = True
            raise
        return int(self._host[0])

    @property
    def had_bad_logits(self) -> bool:
        """Whether it was chosen from logits that were bad; known once `wait` has returned."""
        return bool(self._error_on_host[0])


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
    had_bad_logits: bool = False  # in its prompt or a collected round

    @property
    def prompt_failed(self) -> bool:
        return self.first_token is not None and self.first_token.failed


def take_first_tokens(rows: Sequence[Row]) -> list[int | None]:
    """Each row's first token, where it was not handed out before; waits for the prompts.

    If the pass of one failed, raises what that raised, each time, and hands out none.
    """
    tokens = [None if row.first_token is None else row.first_token.wait() for row in rows]
    for row in rows:
        if row.first_token is not None:
            row.had_bad_logits |= row.first_token.had_bad_logits
            row.first_token = None
    return tokens


class RowTable:
    """The live rows 0..n-1, and their share of buffers and caches.

    Args:
        tokens_per_round: cache slots that a round may fill per row, by the largest S.
        rounds_in_flight: rounds that a row must have room for.
    """

    def __init__(
        self,
        queue: DeviceQueue,
        stages: EagleStages,
        buffers: DecodeBuffers,
        caches: Sequence[KVCache],
        *,
        max_batch_size: int,
        max_len: int,
        tokens_per_round: int,
        rounds_in_flight: int,
    ) -> None:
        self.queue = queue
        self.stages = stages
        self.buffers = buffers
        self.caches = caches
        self.max_batch_size = max_batch_size
        self.max_len = max_len
        self.tokens_per_round = tokens_per_round
        self.rounds_in_flight = rounds_in_flight
        self.rows: list[Row] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        """Raises ValueError for an index that is not live."""
        if not 0 <= index < len(self.rows):
            raise ValueError(f"row: expected 0 to {len(self.rows) - 1}, got {index}")
        return self.rows[index]

    def add(self, token_ids: Sequence[int], sampling: SamplingParams) -> Row:
        """Queue a prompt's pass, in a new last row."""
        index, length = len(self.rows), len(token_ids)
        if index >= self.max_batch_size:
            raise ValueError(f"add_row: all {self.max_batch_size} rows are taken")
        if not 1 <= length <= self.max_len:
            raise ValueError(f"token_ids: expected 1 to {self.max_len} tokens, got {length}")
        ids = torch.tensor(token_ids)
        if ids.dtype != torch.int64:
            raise TypeError(f"token_ids: expected integers, got {token_ids!r}")
        vocab_size = self.stages.target.config.vocab_size
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
            raise ValueError(f"token_ids: expected token ids 0 to {vocab_size - 1}, got {wrong}")
        if not isinstance(sampling, SamplingParams):
            raise TypeError(f"sampling: expected SamplingParams, got {sampling!r}")
        sampling = sampling.with_seed()
        prompt = self.queue.host_buffer(1, length, dtype=torch.int64)
        prompt[0] = ids
        token = self.queue.host_buffer(1, dtype=torch.int64)
        error = self.queue.host_buffer(1, dtype=torch.bool)
        job = self.queue.submit(lambda: self._prefill(index, prompt, sampling, token, error))
        row = Row(index, length, self._round_up(length), FirstToken(job, token, error))
        self.rows.append(row)
        return row

    def _prefill(
        self,
        row: int,
        prompt: torch.Tensor,
        sampling: SamplingParams,
        token_on_host: torch.Tensor,
        error_on_host: torch.Tensor,
    ) -> None:
        try:
            ids = self.queue.to_device(prompt)
            self.buffers.sampling.write(row, sampling)
            token = self.stages.prefill(self.buffers, row, ids)
            self.buffers.num_reqs.fill_(row + 1)
            token_on_host.copy_(token, non_blocking=True)
            errors = self.buffers.sampling.error_mask[row : row + 1]
            error_on_host.copy_(errors, non_blocking=True)
        except Exception as error:
            error.add_note(f"while running a prompt of {prompt.size(1)} tokens in row {row}")
            raise

    def remove(self, index: int) -> None:
        """Free a row; the last one moves into it."""
        removed, last = self[index], self.rows.pop()
        if removed is not last:
            self.rows[index] = last
            last.index = index
        removed.index, removed.first_token = None, None
        last_index = len(self.rows)
        # All that is reserved: the host does not know yet what rounds in flight have added.
        lengths = removed.reserved, last.reserved
        self.queue.run(lambda: self._move(last_index, index, *lengths))

    def _move(self, last: int, row: int, row_length: int, last_length: int) -> None:
        """Row ``last`` takes the place of ``row``, if that is another, and becomes padding."""
        for cache in self.caches:
            # Zeroed, since a NaN left behind by a sequence that overflowed would reach the next one
            # in this row even with weight 0.
            cache.clear_row(row, row_length)
            if row != last:
                cache.copy_row(last, row, last_length)
                cache.clear_row(last, last_length)
        if row != last:
            self.buffers.move_row(last, row)
        self.buffers.clear_row(last)
        self.buffers.num_reqs.fill_(last)

    def check_room(self) -> None:
        """Raises ValueError where a row is known to have outgrown ``max_len``."""
        longest = max(self.rows, key=lambda row: row.length)
        if longest.length > self.max_len:
            raise ValueError(
                f"launch: row {longest.index} has {longest.length} tokens, expected at most "
                f"{self.max_len} (max_len)"
            )

    def reserve(self) -> int:
        """Reserve every row's slots for the rounds in flight, the coming one included.

        Returns how far any row's keys reach: known to the host, and constant over many rounds.
        """
        for row in self.rows:
            new = num_new_kv_slots(
                row.length, row.reserved, self.tokens_per_round, self.rounds_in_flight
            )
            if new:
                row.reserved = self._round_up(row.reserved + new)
        return max(row.reserved for row in self.rows)

    def _round_up(self, length: int) -> int:
        return min(-(-length // KV_BLOCK) * KV_BLOCK, self.caches[0].max_len)
