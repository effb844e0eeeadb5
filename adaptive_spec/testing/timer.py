"""Timing of alternatives against each other in one process, since machines are noisy."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call over the repetitions: median, 10th and 90th percentile, and how many."""

    median: float
    p10: float
    p90: float
    repetitions: int


def time_interleaved(
    functions: Mapping[str, Callable[[], int]], repetitions: int = 15
) -> dict[str, Timing]:
    """Time each function `repetitions` times, taking turns, after one untimed turn.

    Each function does its work and returns how many calls that was. Taking turns lets slow phases
    of the machine hit all alternatives alike, so that their ratios mean something.
    """
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for repetition in range(repetitions + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            calls = function()
            elapsed = time.perf_counter() - start
            if repetition > 0:
                samples[name].append(elapsed / calls)
    timings = {}
    for name, values in samples.items():
        deciles = statistics.quantiles(values, n=10)
        timings[name] = Timing(statistics.median(values), deciles[0], deciles[-1], repetitions)
    return timings
