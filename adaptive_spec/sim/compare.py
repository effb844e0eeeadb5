"""Several policies on the same drawn traffic, each against the oracle.

The measure is the time for equal work: what the oracle did in each phase (in a trace: at each range
of batch sizes, since a slower policy meets larger batches), at the rate of tokens that the policy
had there. Total tokens over total time would not do: phases last a number of rounds, so each policy
would be measured on another mix of work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from adaptive_spec.sim.policies import is_static
from adaptive_spec.sim.simulate import Run

MIN_WORST_ROUNDS = 400


@dataclasses.dataclass(frozen=True)
class Result:
    """One policy's numbers. Shares are of the oracle's throughput, 1 = as good; `tokens_per_s` is
    that of the oracle's work."""

    name: str
    tokens_per_s: float
    mean_tpot_ms: float
    p99_tpot_ms: float
    share: float
    worst_share: float
    worst_group: str
    switches_per_1000: float


def ideal_tokens(run: Run, oracle: Run) -> np.ndarray:
    """Tokens that the oracle makes in the time of each round of `run`; float64 [num_rounds].

    A batch-size range that the oracle never met has no rate, and NaN here.
    """
    return run.ms * _oracle_rates(run, oracle)[run.group]


def share_of_oracle(run: Run, oracle: Run) -> float:
    """The oracle's time over the run's for the oracle's work, where both met the same groups."""
    count = min(len(run.groups), len(oracle.groups))
    work = np.bincount(oracle.group, oracle.tokens, len(oracle.groups))[:count]
    known = (work > 0) & ~np.isnan(run.group_rates()[:count])
    time, oracle_time = (work / r.group_rates()[:count] for r in (run, oracle))
    return float(oracle_time[known].sum() / time[known].sum())


def group_shares(run: Run, oracle: Run) -> np.ndarray:
    """The run's throughput over the oracle's in each group; NaN where either had no round in it."""
    return run.group_rates() / _oracle_rates(run, oracle)


def _oracle_rates(run: Run, oracle: Run) -> np.ndarray:
    """The oracle's tokens per millisecond in each of the run's groups; NaN where it had none."""
    rates = np.full(len(run.groups), np.nan)
    known = oracle.group_rates()[: len(rates)]
    rates[: len(known)] = known
    return rates


def regret(run: Run, oracle: Run) -> np.ndarray:
    """Tokens lost to the oracle up to each round; float64 [num_rounds]."""
    return np.cumsum(np.nan_to_num(ideal_tokens(run, oracle) - run.tokens))


def judge(name: str, run: Run, oracle: Run, min_rounds: int = MIN_WORST_ROUNDS) -> Result:
    """The numbers of one run. Its worst group is among those of at least `min_rounds` rounds, or
    among all where none is that long."""
    shares = group_shares(run, oracle)
    long_enough = np.bincount(run.group, minlength=len(run.groups)) >= min_rounds
    if (long_enough & ~np.isnan(shares)).any():
        shares = np.where(long_enough, shares, np.nan)
    worst = int(np.nanargmin(shares))
    share = share_of_oracle(run, oracle)
    return Result(
        name=name,
        tokens_per_s=oracle.tokens_per_s * share,
        mean_tpot_ms=run.mean_tpot_ms,
        p99_tpot_ms=run.p99_tpot_ms,
        share=share,
        worst_share=float(shares[worst]),
        worst_group=run.groups[worst],
        switches_per_1000=run.switches_per_1000,
    )


def best_static(runs: Mapping[str, Run]) -> np.ndarray:
    """The highest throughput in each group of any run with fixed steps, tokens per ms."""
    return np.max([run.group_rates() for name, run in runs.items() if is_static(name)], axis=0)
