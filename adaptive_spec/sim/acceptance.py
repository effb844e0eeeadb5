"""Acceptance processes: how deep into an endless chain of drafts a request's round would accept.

The depth of a round does not depend on the steps S that a policy chooses: with S drafts
``min(depth, S)`` of them are accepted. So depths are drawn ahead, in batches, and every policy is
judged on the same ones.

A process draws for whole requests at once: `lengths` [num_requests] are their rounds, and the
depths come back as one int8 array [sum(lengths)], request after request, capped at `MAX_DEPTH`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from adaptive_spec.config import MAX_STEPS

MAX_DEPTH = MAX_STEPS


class AcceptanceProcess(Protocol):
    def depths(self, rng: np.random.Generator, lengths: np.ndarray) -> np.ndarray:
        """Depths of requests with these numbers of rounds, int8 [sum(lengths)]."""

    def survival(self) -> np.ndarray:
        """Long-run share of rounds whose depth is at least k, for k = 0..MAX_DEPTH; float64."""


def expected_tokens(process: AcceptanceProcess) -> np.ndarray:
    """Mean tokens of a round and request, bonus included, for S = 0..MAX_DEPTH; float64."""
    return np.cumsum(process.survival())


class Positional:
    """Rounds independent of each other; draft k is accepted with probability ``rates[k - 1]`` given
    that all before it were. Positions beyond the last rate have the last one.

    Raises:
        ValueError: `rates` is empty, too long, or has one outside [0, 1].
    """

    def __init__(self, rates: Sequence[float]):
        if not 1 <= len(rates) <= MAX_DEPTH:
            raise ValueError(f"`rates` must have 1 to {MAX_DEPTH} values, got {len(rates)}")
        for rate in rates:
            if not 0 <= rate <= 1:
                raise ValueError(f"`rates` must lie in [0, 1], got {rate!r}")
        padded = np.full(MAX_DEPTH, float(rates[-1]))
        padded[: len(rates)] = rates
        self._survival = np.concatenate([[1.0], np.cumprod(padded)])

    def survival(self) -> np.ndarray:
        return self._survival

    def depths(self, rng: np.random.Generator, lengths: np.ndarray) -> np.ndarray:
        return _depths_of(self._survival, rng.random(int(np.sum(lengths))))


def geometric(rate: float) -> Positional:
    """Every draft is accepted with the same probability."""
    return Positional([rate])


def drifting(first: float, last: float, depth: int) -> Positional:
    """Acceptance that falls, or rises, evenly from the first position to position `depth`."""
    return Positional(np.linspace(first, last, depth).tolist())


class Mixture:
    """Each request follows one of several processes for all its life.

    Args:
        processes: what requests can follow.
        weights: how often each is chosen; they are divided by their sum.
    """

    def __init__(self, processes: Sequence[AcceptanceProcess], weights: Sequence[float]):
        self.processes = list(processes)
        self.weights = _shares("weights", weights, len(self.processes))

    def survival(self) -> np.ndarray:
        # Of requests; the share of rounds is the same, as lengths do not depend on the process.
        return self.weights @ np.stack([process.survival() for process in self.processes])

    def depths(self, rng: np.random.Generator, lengths: np.ndarray) -> np.ndarray:
        chosen = rng.choice(len(self.processes), size=len(lengths), p=self.weights)
        return _scatter(rng, self.processes, chosen, np.asarray(lengths))


class RegimeSwitching:
    """Within a request, stretches of rounds follow one process after another, in random order.

    Text that is now boilerplate, now prose. A stretch lasts `mean_rounds` of its regime on average
    (geometrically distributed); the next regime is any of the others.
    """

    def __init__(self, processes: Sequence[AcceptanceProcess], mean_rounds: Sequence[float]):
        if len(processes) < 2 or len(processes) != len(mean_rounds):
            raise ValueError(
                "`processes` and `mean_rounds` must be two or more pairs, got "
                f"{len(processes)} and {len(mean_rounds)}"
            )
        if min(mean_rounds) < 1:
            raise ValueError(f"`mean_rounds` must be at least 1, got {min(mean_rounds)!r}")
        self.processes = list(processes)
        self.mean_rounds = np.asarray(mean_rounds, dtype=float)
        # Every regime is as frequent among stretches, so a round's share goes by their length.
        self._share = self.mean_rounds / self.mean_rounds.sum()

    def survival(self) -> np.ndarray:
        return self._share @ np.stack([process.survival() for process in self.processes])

    def depths(self, rng: np.random.Generator, lengths: np.ndarray) -> np.ndarray:
        stretches, regimes = [], []
        for length in np.asarray(lengths).tolist():
            left, regime = length, int(rng.choice(len(self.processes), p=self._share))
            while left > 0:
                # Geometric stretches have no memory, so a request may begin amidst one.
                stretch = min(left, int(rng.geometric(1 / self.mean_rounds[regime])))
                stretches.append(stretch)
                regimes.append(regime)
                left -= stretch
                regime = (regime + int(rng.integers(1, len(self.processes)))) % len(self.processes)
        regimes, stretches = (np.array(each, dtype=np.int64) for each in (regimes, stretches))
        return _scatter(rng, self.processes, regimes, stretches)


class Correlated:
    """Acceptance that wanders slowly within a request: neighbouring rounds are alike.

    All drafts of a round have the probability ``sigmoid(logit(rate) + spread * x)``, where x is a
    stationary Gaussian autoregression with standard deviation 1 and correlation
    ``exp(-1 / memory)`` from round to round.
    """

    def __init__(self, rate: float, spread: float, memory: float):
        if not 0 < rate < 1:
            raise ValueError(f"`rate` must lie in (0, 1), got {rate!r}")
        if not (spread >= 0 and memory > 0):
            raise ValueError(
                f"`spread` must be at least 0 and `memory` above 0, got {spread!r} and {memory!r}"
            )
        self._logit = float(np.log(rate / (1 - rate)))
        self._spread = spread
        self._rho = float(np.exp(-1.0 / memory))

    def survival(self) -> np.ndarray:
        points, weights = np.polynomial.hermite_e.hermegauss(64)
        rates = self._rate(points)
        return (weights / weights.sum()) @ rates[:, None] ** np.arange(MAX_DEPTH + 1)

    def depths(self, rng: np.random.Generator, lengths: np.ndarray) -> np.ndarray:
        lengths = np.asarray(lengths)
        starts = np.cumsum(lengths) - lengths
        noise = rng.standard_normal(int(lengths.sum()))
        # Round t of all requests that are as long, together: the recursion runs over t only.
        order = np.argsort(-lengths, kind="stable")
        alive = np.searchsorted(-lengths[order], -np.arange(1, lengths.max(initial=0) + 1), "right")
        starts = starts[order]
        innovation = float(np.sqrt(1 - self._rho**2))
        for t, count in enumerate(alive.tolist()[1:], start=1):
            at = starts[:count] + t
            noise[at] = self._rho * noise[at - 1] + innovation * noise[at]
        rates = self._rate(noise)
        # Inverse of the geometric distribution; a uniform of 0 would have no logarithm.
        with np.errstate(divide="ignore"):
            depths = np.log(1.0 - rng.random(len(rates))) / np.log(rates)
        return np.minimum(depths, MAX_DEPTH).astype(np.int8)

    def _rate(self, x: np.ndarray) -> np.ndarray:
        return 1.0 / (1.0 + np.exp(-(self._logit + self._spread * x)))


class Recorded:
    """Replays recorded rounds: the accepted drafts of each round and request, and the S that ran.

    Rounds stay in order within a request; each simulated request replays a random recorded one from
    a random round on, beginning again at its end.

    A round that accepted all S drafts only says that its depth was at least S (it is censored).
    Beyond S its depth is drawn with the conditional acceptance that the other rounds show: position
    k is accepted with #(accepted >= k) / #(accepted >= k - 1 and S >= k), the Kaplan-Meier
    estimate. A position that no round reached has the rate of the one before it.

    Args:
        request, steps, accepted: integers [num_rounds], in the order of the rounds.

    Raises:
        ValueError: they differ in length, hold no drafted round, or accepted lies outside
            [0, steps].
    """

    def __init__(self, request: np.ndarray, steps: np.ndarray, accepted: np.ndarray):
        request, steps, accepted = (
            _integers(name, values)
            for name, values in (("request", request), ("steps", steps), ("accepted", accepted))
        )
        if not len(request) == len(steps) == len(accepted):
            raise ValueError(
                "`request`, `steps` and `accepted` must have one value per round, got "
                f"{len(request)}, {len(steps)} and {len(accepted)}"
            )
        wrong = np.flatnonzero((accepted < 0) | (accepted > steps) | (steps > MAX_DEPTH))
        if len(wrong):
            at = int(wrong[0])
            raise ValueError(
                f"round {at} must have 0 <= accepted <= steps <= {MAX_DEPTH}, got accepted "
                f"{accepted[at]} of {steps[at]} steps"
            )
        if not steps.any():
            raise ValueError("`steps` must be above 0 in some round: without drafts no acceptance")
        order = np.argsort(request, kind="stable")
        self._steps, self._accepted = steps[order], accepted[order]
        _, self._starts, self._counts = np.unique(
            request[order], return_index=True, return_counts=True
        )
        self._survival = kaplan_meier(steps, accepted)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Recorded:
        """From a .npz or .json file with the arrays `request`, `steps` and `accepted`.

        Raises:
            OSError: it cannot be read.
            ValueError: it does not hold these; the message begins with the path.
        """
        path = Path(path)
        try:
            if path.suffix == ".npz":
                with np.load(path, allow_pickle=False) as data:
                    columns = {name: data[name] for name in data.files}
            else:
                columns = json.loads(path.read_text("utf-8"))
            return cls(*(columns[name] for name in ("request", "steps", "accepted")))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: must have request, steps and accepted ({error})") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def survival(self) -> np.ndarray:
        return self._survival

    def depths(self, rng: np.random.Generator, lengths: np.ndarray) -> np.ndarray:
        lengths = np.asarray(lengths)
        total = int(lengths.sum())
        which = rng.integers(len(self._starts), size=len(lengths))
        begin = np.repeat(rng.integers(self._counts[which]), lengths)
        within = np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        count = np.repeat(self._counts[which], lengths)
        at = np.repeat(self._starts[which], lengths) + (begin + within) % count
        accepted, steps = self._accepted[at], self._steps[at]
        # Given depth >= accepted, a uniform below survival[accepted] is the right conditional draw.
        beyond = _depths_of(self._survival, rng.random(total) * self._survival[accepted])
        return np.where(accepted < steps, accepted, np.maximum(beyond, accepted)).astype(np.int8)


def kaplan_meier(steps: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """Share of rounds with a depth of at least k, for k = 0..MAX_DEPTH, from rounds censored at
    their `steps`. A position that none reached has the conditional rate of the one before it."""
    survival = np.ones(MAX_DEPTH + 1)
    rate = 0.0
    for k in range(1, MAX_DEPTH + 1):
        at_risk = np.count_nonzero((accepted >= k - 1) & (steps >= k))
        if at_risk:
            rate = np.count_nonzero(accepted >= k) / at_risk
        survival[k] = survival[k - 1] * rate
    return survival


def _depths_of(survival: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Inverse transform: the largest k with u < survival[k]; int8."""
    # Ascending copy for the search; a depth of k needs u below the survival of 1..k.
    rising = survival[:0:-1]
    return (len(rising) - np.searchsorted(rising, uniforms, side="right")).astype(np.int8)


def _scatter(
    rng: np.random.Generator,
    processes: Sequence[AcceptanceProcess],
    chosen: np.ndarray,
    lengths: np.ndarray,
) -> np.ndarray:
    """Stretches of rounds in a row, stretch i of `lengths[i]` rounds by `processes[chosen[i]]`."""
    of_round = np.repeat(chosen, lengths)
    depths = np.empty(len(of_round), dtype=np.int8)
    for index, process in enumerate(processes):
        depths[of_round == index] = process.depths(rng, lengths[chosen == index])
    return depths


def _shares(name: str, weights: Sequence[float], count: int) -> np.ndarray:
    values = np.asarray(weights, dtype=float)
    if values.shape != (count,) or not (values >= 0).all() or not 0 < values.sum() < np.inf:
        raise ValueError(f"`{name}` must be {count} values of at least 0, not all 0, got {weights}")
    return values / values.sum()


def _integers(name: str, values: np.ndarray) -> np.ndarray:
    array = np.asarray(values)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"`{name}` must be a list of integers, got {array.dtype} {array.shape}")
    return array
