"""Slow reference of csrc/core/row_choice.h: the token that a row of logits chooses.

A row is sorted for its filters, and one argmax over all kept tokens ends the race. Float32 results
are those of the ops bit for bit; sums are exact.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from . import noise_ref
from .noise_ref import Kind

_FLOAT32 = np.finfo(np.float32)
_LOG2_E = np.float32(math.log2(math.e))


def unit_bits(vocab_size: int) -> int:
    """A weight of 1 is 2 to this many units; see csrc/core/draw.h."""
    return 61 - (vocab_size - 1).bit_length()


@dataclasses.dataclass(frozen=True)
class RowRule:
    """How a request is sampled: its seed, its filters, and the stream of its noise."""

    seed: int
    stream: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def is_greedy(self) -> bool:
        """NaN is greedy as a temperature, and off as anything else."""
        is_hot = self.temperature > 0
        return not is_hot or self.top_k == 1 or self.top_p <= 0 or self.min_p >= 1

    @property
    def scale(self) -> np.float32:
        """Of a logit, in units of ln 2."""
        with np.errstate(over="ignore"):
            return min(_LOG2_E / np.float32(self.temperature), _FLOAT32.max)


@dataclasses.dataclass(frozen=True)
class Draft:
    """A draft and the probabilities, float32 [V], that it was sampled from."""

    token: int
    probs: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Row:
    """A row of float32 logits with at least one finite entry and no NaN or +inf."""

    logits: np.ndarray
    rule: RowRule

    @property
    def scores(self) -> np.ndarray:
        """Below the best, in units of ln 2."""
        with np.errstate(over="ignore", invalid="ignore"):
            return (self.logits - self.logits.max()) * self.rule.scale

    @property
    def weights(self) -> np.ndarray:
        return noise_ref.exp2(self.scores)

    @property
    def units(self) -> np.ndarray:
        bits = unit_bits(len(self.logits))
        return np.floor(np.ldexp(self.weights.astype(np.float64), bits)).astype(np.int64)

    @property
    def is_kept(self) -> np.ndarray:
        """What all filters leave; each looks at the whole row."""
        return (self.logits > -np.inf) & self._pass_ranked_filters & self._pass_min_p

    @property
    def _pass_ranked_filters(self) -> np.ndarray:
        """Top-k and top-p: by how many tokens, and how many units, lie above an entry."""
        order = np.argsort(-self.logits, kind="stable")
        ranked = -self.logits[order]
        num_above = np.searchsorted(ranked, ranked, side="left")
        units_up_to = np.concatenate([[0], np.cumsum(self.units[order])])
        fits = np.ones(len(order), dtype=bool)
        if self.rule.top_k > 0:
            fits &= num_above < self.rule.top_k
        if self.rule.top_p < 1:
            total = int(units_up_to[-1])
            share = math.ceil(float(np.float32(self.rule.top_p)) * float(total))
            fits &= units_up_to[num_above] < min(max(share, 1), total)
        passes = np.empty_like(fits)
        passes[order] = fits
        return passes

    @property
    def _pass_min_p(self) -> np.ndarray:
        min_p = np.float32(self.rule.min_p)
        if not min_p >= _FLOAT32.smallest_normal:
            return np.ones(len(self.logits), dtype=bool)
        return self.scores >= noise_ref.log2(min_p)

    def words(self, position: int, kind: Kind) -> np.ndarray:
        return noise_ref.noise_words(
            self.rule.seed, position, self.rule.stream, kind, len(self.logits)
        )

    def race(self, position: int) -> int:
        """Gumbel-max."""
        gumbel = noise_ref.gumbel(self.words(position, Kind.CHOICE)).astype(np.float64)
        with np.errstate(invalid="ignore"):
            noisy = self.logits.astype(np.float64) * np.float64(self.rule.scale) + gumbel
        return int(np.argmax(np.where(self.is_kept, noisy, -np.inf)))

    def accept_or_draw(self, position: int, draft: Draft) -> int:
        """The draft with probability min(1, p / q), or else a token of max(p - q, 0)."""
        is_kept, units = self.is_kept, self.units
        kept_units = int(units[is_kept].sum())
        q = np.where(np.isnan(draft.probs), np.float32(0), draft.probs)
        if 0 <= draft.token < len(q) and is_kept[draft.token]:
            coin = noise_ref.uniform(self.words(position, Kind.COIN)[:1])[0]
            if float(coin) * float(q[draft.token]) * float(kept_units) < units[draft.token]:
                return draft.token
        share = np.float32(2.0 ** unit_bits(len(q)) / kept_units)
        left = np.where(is_kept, self.weights * share - q, np.float32(0))
        time = noise_ref.exponential(self.words(position, Kind.RESIDUAL))
        speed = np.where(left > 0, left.astype(np.float64) / time.astype(np.float64), 0)
        return int(np.argmax(speed if speed.any() else self.logits))


def choose(
    logits: np.ndarray, rule: RowRule, position: int, draft: Draft | None = None
) -> tuple[int | None, bool]:
    """What a row of logits [V], float32 or float64, chooses (None if it has no finite entry), and
    whether it is sound: has such an entry, and no NaN or +inf."""
    if not rule.is_greedy:
        with np.errstate(over="ignore"):
            logits = logits.astype(np.float32)
    is_sound = bool((logits < np.inf).all())
    finite = np.where(logits < np.inf, logits, -np.inf)
    best = int(np.argmax(finite))
    if finite[best] == -np.inf:
        return None, False
    if rule.is_greedy or not is_sound:
        return best, is_sound
    row = _Row(finite, rule)
    return (row.race(position) if draft is None else row.accept_or_draw(position, draft)), True
