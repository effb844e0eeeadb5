"""Acceptance statistics that stay right while the step count changes.

Everything is derived from one table of integers, hist[S][L]: how many requests ran with S draft
steps and had L of them accepted. A request that ran with S steps says nothing about positions
beyond S, so each position's rate counts only the requests that could have reached it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

from adaptive_spec.step_policy import sum_accepted


class AcceptanceStats:
    """Accepted drafts (bonus token excluded) by the steps that the round really ran with.

    Attributes:
        hist: ``hist[S][L]`` = requests that ran with S draft steps of which L were accepted; only
            the S that occurred are present.
    """

    def __init__(self) -> None:
        self.hist: dict[int, list[int]] = {}

    def observe(self, num_correct_drafts_per_req: Sequence[int], executed_steps: int) -> None:
        """Count one round.

        Args:
            num_correct_drafts_per_req: accepted drafts of each live request.
            executed_steps: draft steps of that round, not the ones in force by now.

        Raises:
            TypeError, ValueError: as `AdaptiveStepSlot.update`. Nothing is counted then.
        """
        if executed_steps is None:
            raise TypeError("`executed_steps` must be an integer, got None")
        if hasattr(num_correct_drafts_per_req, "tolist"):
            num_correct_drafts_per_req = num_correct_drafts_per_req.tolist()
        if sum_accepted(num_correct_drafts_per_req, executed_steps)[1] == 0:
            return
        row = self.hist.setdefault(int(executed_steps), [0] * (int(executed_steps) + 1))
        for count in num_correct_drafts_per_req:
            row[count] += 1

    @property
    def num_requests(self) -> int:
        """Requests counted, once per round each, rounds of step 0 included."""
        return sum(map(sum, self.hist.values()))

    @property
    def num_proposed(self) -> int:
        """Draft tokens proposed: S for each request, so not the width of the verify block."""
        return sum(steps * sum(row) for steps, row in self.hist.items())

    @property
    def num_accepted(self) -> int:
        """Draft tokens accepted."""
        return sum(
            accepted * count for row in self.hist.values() for accepted, count in enumerate(row)
        )

    @property
    def mean_accepted(self) -> float:
        """Accepted drafts per request and round; 0 where there were none."""
        return _ratio(self.num_accepted, self.num_requests)

    @property
    def accept_rate(self) -> float:
        """Accepted share of the proposed drafts; 0 where nothing was proposed."""
        return _ratio(self.num_accepted, self.num_proposed)

    @property
    def wasted_share(self) -> float:
        """Rejected share of the proposed drafts; 0 where nothing was proposed."""
        return _ratio(self.num_proposed - self.num_accepted, self.num_proposed)

    def position_rates(self) -> list[float]:
        """Share of requests that had at least k drafts accepted, of those that ran with S >= k.

        Entry k - 1 is position k, up to the largest S that occurred.
        """
        return [
            self._reached(k, ran_at_least=k) / self._reached(0, ran_at_least=k)
            for k in range(1, max(self.hist, default=0) + 1)
        ]

    def conditional_rates(self) -> list[float]:
        """Probability that position k is accepted given that all before it were.

        Entry k - 1 is position k. The list ends before the first position that no request got to.
        """
        rates = []
        for k in range(1, max(self.hist, default=0) + 1):
            tried = self._reached(k - 1, ran_at_least=k)
            if tried == 0:
                break
            rates.append(self._reached(k, ran_at_least=k) / tried)
        return rates

    def quantiles(self, shares: Iterable[float] = (0.1, 0.5, 0.9)) -> list[int]:
        """Accepted drafts that the given shares of requests do not exceed (nearest rank).

        A batch of easy and hard requests has the mean of one of middling ones, but other quantiles.
        With nothing counted every quantile is 0.

        Raises:
            ValueError: a share outside 0..1.
        """
        totals = [0] * (max(self.hist, default=0) + 1)
        for row in self.hist.values():
            for accepted, count in enumerate(row):
                totals[accepted] += count
        return [_nearest_rank(totals, share) for share in shares]

    def _reached(self, accepted: int, *, ran_at_least: int) -> int:
        return sum(sum(row[accepted:]) for steps, row in self.hist.items() if steps >= ran_at_least)


def _nearest_rank(totals: list[int], share: float) -> int:
    if not 0 <= share <= 1:
        raise ValueError(f"`shares` must lie in 0..1, got {share!r}")
    rank = max(1, ceil(share * sum(totals)))
    seen = 0
    for accepted, count in enumerate(totals):
        seen += count
        if seen >= rank:
            return accepted
    return 0


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
