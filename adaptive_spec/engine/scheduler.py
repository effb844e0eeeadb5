"""Who runs: a queue of waiting requests and the rows of the running ones."""

from __future__ import annotations

from collections import deque

from adaptive_spec.engine.request import Request


class Scheduler:
    """First come, first served, up to ``max_batch_size`` running requests.

    ``running[row]`` is the request in the worker's row; rows stay without gaps because the last one
    moves into a row that becomes free.
    """

    def __init__(self, max_batch_size: int) -> None:
        self.max_batch_size = max_batch_size
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def next_to_join(self) -> Request | None:
        """The request to start next, if a row is free for it."""
        if self.waiting and len(self.running) < self.max_batch_size:
            return self.waiting[0]
        return None

    def join(self) -> None:
        """The first waiting request runs now, in the next row."""
        self.running.append(self.waiting.popleft())

    def leave(self, row: int) -> None:
        """The request in ``row`` is gone; the last one has moved there."""
        self.running[row] = self.running[-1]
        self.running.pop()
