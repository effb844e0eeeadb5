"""Capturing a stage of a decode round, so that running it again costs the host next to nothing.

On a GPU a capture is a CUDA graph; on the CPU it is the stage with the views it was captured on.
Both are run with ``replay`` and obey the same rules: a stage reads and writes static buffers, never
waits for the device, and no row reads keys behind the length that the capture was made for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from adaptive_spec.graphs import RoundFrame

__all__ = ["Capture", "CapturePool", "CudaGraph", "PreparedCallable", "Stage"]


class Stage(Protocol):
    """One step of a round. Reads and writes only the frame's tensors and the caches."""

    def __call__(self, frame: RoundFrame, kv_len: int, *, learn: bool) -> None:
        """kv_len: bound on the keys any row reads. learn: False while warming up for a capture,
        when the adaptive state must not see the round."""


class Capture(Protocol):
    """A stage captured for one (S, padded batch size)."""

    kv_len: int

    def replay(self, kv_len: int) -> None:
        """Run the stage, learning. Raises ValueError for more keys than were captured."""


class PreparedCallable:
    """A capture on the CPU: the stage itself, called on views made beforehand."""

    def __init__(self, stage: Stage, frame: RoundFrame, kv_len: int) -> None:
        self.stage = stage
        self.frame = frame
        self.kv_len = kv_len

    @classmethod
    def capture(cls, stage: Stage, frame: RoundFrame, kv_len: int) -> PreparedCallable:
        """Run the stage once without learning, as on a GPU, and keep what to replay."""
        stage(frame, kv_len, learn=False)
        return cls(stage, frame, kv_len)

    def replay(self, kv_len: int) -> None:
        check_kv_len(kv_len, self.kv_len)
        # A graph would read as far as at capture; here the unused part can be left out.
        self.stage(self.frame, kv_len, learn=True)


class CudaGraph:
    """A capture on a GPU. Its launches are frozen: they read keys up to ``kv_len``, masked."""

    def __init__(self, graph: torch.cuda.CUDAGraph, kv_len: int) -> None:
        self.graph = graph
        self.kv_len = kv_len

    @classmethod
    def capture(
        cls,
        stage: Stage,
        frame: RoundFrame,
        kv_len: int,
        pool: tuple[int, int],
        stream: torch.cuda.Stream,
    ) -> CudaGraph:
        """Record the stage on ``stream``, with what it allocates in ``pool``."""
        current = torch.cuda.current_stream(stream.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # Libraries set themselves up and lazy tables are built now: a capture could not contain
            # that, and what it kept in the pool would be overwritten.
            stage(frame, kv_len, learn=False)
        graph = torch.cuda.CUDAGraph()
        # "thread_local": what other threads of the server do with the GPU meanwhile is no business
        # of this capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            # Recording launches nothing, so the adaptive state does not change here; every replay
            # must learn, so the op is recorded with its state.
            stage(frame, kv_len, learn=True)
        current.wait_stream(stream)
        return cls(graph, kv_len)

    def replay(self, kv_len: int) -> None:
        check_kv_len(kv_len, self.kv_len)
        self.graph.replay()


class CapturePool:
    """Makes one worker's captures; on a GPU all of them share one memory pool.

    Sharing is safe because replays follow each other on one stream and whatever outlives a stage
    lies in the static buffers, outside the pool: what one graph leaves in it is dead when the next
    begins.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

    def capture(self, stage: Stage, frame: RoundFrame, kv_len: int) -> Capture:
        if not self._is_cuda:
            return PreparedCallable.capture(stage, frame, kv_len)
        with torch.cuda.device(self.device):
            return CudaGraph.capture(stage, frame, kv_len, self._pool, self._stream)

    def used_bytes(self) -> int | None:
        """Device memory in use, graphs of the driver's own included, but nothing that torch only
        keeps for later. None on the CPU, where a capture allocates nothing. Waits for the device.
        """
        if not self._is_cuda:
            return None
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free


def check_kv_len(kv_len: int, captured: int) -> None:
    if kv_len > captured:
        raise ValueError(f"kv_len: the capture reads at most {captured} keys, got {kv_len}")
