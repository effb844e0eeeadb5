"""How a request's tokens are chosen."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["GREEDY", "SamplingParams"]


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of one request: softmax at a temperature, cut down by top-k, top-p and min-p.

    Args:
        temperature: 0 (the default) takes the likeliest token each time.
        top_k: only tokens with fewer than this many more likely ones; 0 is off.
        top_p: only tokens with less than this probability above them; above 0, 1 is off.
        min_p: only tokens at least this share as likely as the likeliest; 0 is off.
        seed: of the request's random numbers, -2^63 to 2^63 - 1. The same seed and prompt give the
            same tokens. None: drawn anew for each request (`Request.sampling` says which it got).

    The filters all look at the unfiltered distribution, and tokens that are equally likely stay or
    go together. Raises TypeError or ValueError naming a bad argument.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_real("temperature", self.temperature, "a finite number of at least 0")
        _check_integer("top_k", self.top_k, 0, 2**31)
        _check_real("top_p", self.top_p, "a number above 0 and at most 1", most=1)
        if self.top_p == 0:
            raise ValueError("top_p: expected a number above 0 and at most 1, got 0")
        _check_real("min_p", self.min_p, "a number from 0 to 1", most=1)
        if self.seed is not None:
            _check_integer("seed", self.seed, -(2**63), 2**63)

    @property
    def is_greedy(self) -> bool:
        """Whether it says so; filters that leave one token have the same effect."""
        return self.temperature == 0

    def with_seed(self) -> SamplingParams:
        """The same with a seed: its own, or a drawn one."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))


def _check_real(name: str, value: Any, expected: str, most: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected {expected}, got {value!r}")
    if not 0 <= value <= most or value == math.inf:
        raise ValueError(f"{name}: expected {expected}, got {value}")


def _check_integer(name: str, value: Any, least: int, end: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if not least <= value < end:
        raise ValueError(f"{name}: expected {least} to {end - 1}, got {value}")


GREEDY = SamplingParams(seed=0)
