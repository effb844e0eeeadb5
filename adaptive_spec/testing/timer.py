"""Timing of alternatives against each other in one process, since machines are noisy."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call over the repetitions: median, 10th and 90th percentile, and how many."""

    median: float
    p10: float
    p90: float
    repetitions: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        deciles = statistics.quantiles(seconds, n=10)
        return cls(statistics.median(seconds), deciles[0], deciles[-1], len(seconds))


def sample_interleaved(
    samplers: Mapping[str, Callable[[], float]], repetitions: int = 15
) -> dict[str, list[float]]:
    """What each sampler returns, `repetitions` times in turns, after one turn that is left out.

    Taking turns lets slow phases of the machine hit all alternatives alike, so that their ratios,
    and the differences between their samples of one turn, mean something.
    """
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    for repetition in range(repetitions + 1):
        for name, sampler in samplers.items():
            seconds = sampler()
            if repetition > 0:
                samples[name].append(seconds)
    return samples


def time_interleaved(
    functions: Mapping[str, Callable[[], int]], repetitions: int = 15
) -> dict[str, Timing]:
    """Seconds per call of each function, which does its work and returns how many calls that was.

    They take turns, as in `sample_interleaved`.
    """

    def sampler(function: Callable[[], int]) -> Callable[[], float]:
        def sample() -> float:
            start = time.perf_counter()
            calls = function()
            return (time.perf_counter() - start) / calls

        return sample

    samples = sample_interleaved(
        {name: sampler(function) for name, function in functions.items()}, repetitions
    )
    return {name: Timing.of(seconds) for name, seconds in samples.items()}
