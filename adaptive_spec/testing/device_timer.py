"""Time that rounds of device work take, without what it costs to launch them.

On CUDA the rounds are captured in one graph, and events around a series of replays are read. On the
CPU the rounds are simply called, by the wall clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch


def round_sampler(
    rounds: Sequence[Callable[[], object]],
    device: torch.device,
    sample_s: float = 2e-3,
) -> Callable[[], float]:
    """A function that runs `rounds` in order, for about `sample_s`, and returns seconds per round.

    Every round must have run once before, so that its kernels are loaded.
    """
    run = _captured(rounds) if device.type == "cuda" else _in_turn(rounds)
    elapsed = _elapsed_cuda if device.type == "cuda" else _elapsed_cpu
    elapsed(run, 1)
    repetitions = max(1, min(1_000, round(sample_s / max(elapsed(run, 1), 1e-9))))

    def sample() -> float:
        return elapsed(run, repetitions) / (repetitions * len(rounds))

    return sample


def _in_turn(rounds: Sequence[Callable[[], object]]) -> Callable[[], None]:
    def run() -> None:
        for launch in rounds:
            launch()

    return run


def _captured(rounds: Sequence[Callable[[], object]]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _in_turn(rounds)()
    return graph.replay


def _elapsed_cuda(run: Callable[[], None], repetitions: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repetitions):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _elapsed_cpu(run: Callable[[], None], repetitions: int) -> float:
    start = time.perf_counter()
    for _ in range(repetitions):
        run()
    return time.perf_counter() - start
