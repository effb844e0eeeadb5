"""The order in which a worker's work reaches the device, and how the host waits for part of it.

Everything that touches device tensors between rounds goes through one queue: prefill, stages, row
moves, copies to the host. On a GPU the queue is the current stream. On the CPU work is deferred
until somebody waits for it, as late as can be, so that code which counts on results of a round in
flight fails here and not only on a GPU.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

__all__ = ["CudaQueue", "DeferredQueue", "DeviceQueue", "Job", "make_queue"]

Work = Callable[[], None]


class Job(Protocol):
    """Work that was submitted."""

    def wait(self) -> None:
        """Wait until it is done, and all that was queued before it. Raises what it raised."""


class DeviceQueue(Protocol):
    def run(self, work: Work) -> None:
        """Queue work that nobody waits for."""

    def submit(self, work: Work) -> Job:
        """Queue work to wait for later."""

    def drain(self) -> None:
        """Wait for everything queued so far."""

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Host memory that queued work may copy results to without blocking."""

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """For queued work: a copy of a `host_buffer` on the device."""


class CudaQueue:
    """Issues work on the current stream at once. It must be the same stream every time.

    No call waits for the device except `wait` and `drain`, which wait for an event.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @torch.inference_mode()
    def run(self, work: Work) -> None:
        work()

    def submit(self, work: Work) -> CudaJob:
        self.run(work)
        return CudaJob(torch.cuda.current_stream(self.device))

    def drain(self) -> None:
        CudaJob(torch.cuda.current_stream(self.device)).wait()

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        # Torch's pinned memory is not handed out again before the copies to and from it are done.
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self.device, non_blocking=True)


class CudaJob:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()


class DeferredQueue:
    """Runs work in order, each piece only when it or something behind it is waited for.

    Args:
        early: also run some of it earlier, at random, as a device that is ahead would. May be set
            at any time.
    """

    def __init__(self, early: random.Random | None = None) -> None:
        self.early = early
        self._pending: deque[DeferredJob] = deque()

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def run(self, work: Work) -> None:
        self._add(DeferredJob(self, work, awaited=False))

    def submit(self, work: Work) -> DeferredJob:
        return self._add(DeferredJob(self, work, awaited=True))

    def drain(self) -> None:
        while self._pending:
            self.run_next()

    def host_buffer(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        return host

    @torch.inference_mode()
    def run_next(self) -> None:
        """Run the oldest pending work. Its error is kept for whoever waits for it, else raised."""
        job = self._pending.popleft()
        work, job.work = job.work, None
        try:
            work()
        except Exception as error:
            job.error = error
            if not job.awaited:
                raise
        except BaseException:
            job.error = RuntimeError("the work was interrupted")
            raise

    def _add(self, job: DeferredJob) -> DeferredJob:
        self._pending.append(job)
        while self.early is not None and self._pending and self.early.random() < 0.5:
            self.run_next()
        return job


class DeferredJob:
    def __init__(self, queue: DeferredQueue, work: Work, *, awaited: bool) -> None:
        self.queue = queue
        self.work: Work | None = work  # None once it has run
        self.awaited = awaited
        self.error: Exception | None = None

    def wait(self) -> None:
        while self.work is not None:
            self.queue.run_next()
        if self.error is not None:
            raise self.error


def make_queue(device: torch.device) -> DeviceQueue:
    """The queue for ``device``: its stream, or on the CPU a deferred stand-in for one."""
    return CudaQueue(device) if device.type == "cuda" else DeferredQueue()
