"""What a decode round costs: milliseconds by (batch size, draft steps S).

Rows are the batch sizes that graphs are captured for. A batch in between runs padded to the next
captured size, so it costs what that size costs; nothing is interpolated or smoothed, because the
jumps between neighbouring entries (tiles of a matrix product) are real and decide which S is best.

The file is JSON; a null is an entry that was not measured:

    {"machine": "H200", "model": "Llama-3.1-8B", "unit": "ms", "context_tokens": 1000,
     "steps": [0, 1, 2], "times": {"1": [4.5, 4.9, 5.1], "8": [4.6, null, 5.3]},
     "context_slopes": {"1": 0.01, "8": 0.08}, "estimated": {"8": [2]}, "source": "adaptive-spec"}
"""

from __future__ import annotations

import itertools
import json
import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from adaptive_spec.config import MAX_STEPS, is_batch_size_key, is_int
from adaptive_spec.config_file import show_value, unique_keys

UNIT = "ms"
_KEYS = {
    "machine",
    "model",
    "unit",
    "steps",
    "times",
    "context_tokens",
    "context_slopes",
    "estimated",
    "source",
}


class CostTable:
    """Milliseconds of a decode round (draft, verify, extend) by (batch size, draft steps).

    Immutable. Entries may be missing; looking one up is an error, `completed` estimates it.

    Args:
        times: milliseconds by (batch size, steps): finite and above 0.
        machine, model: what was measured; needed to `save`, compared by `check_machine`.
        context_tokens: mean context length per request that `times` hold for.
        context_slopes: by batch size, the milliseconds that 1000 more tokens of mean context per
            request add to a round of any S. Batch sizes without one: 0.
        estimated: the (batch size, steps) whose times were not measured.
        source: how the times came about, for the reader of the file.

    Attributes:
        batch_sizes, steps: ascending tuples, the rows and columns of `times`.
        times: read-only float64 [len(batch_sizes), len(steps)]; NaN where an entry is missing.

    Raises:
        ValueError: naming the entry, what was expected and what came.
    """

    def __init__(
        self,
        times: Mapping[tuple[int, int], float],
        *,
        machine: str = "",
        model: str = "",
        context_tokens: float = 0.0,
        context_slopes: Mapping[int, float] | None = None,
        estimated: Iterable[tuple[int, int]] = (),
        source: str = "",
    ):
        if not times:
            raise ValueError("`times` must have at least one entry, got none")
        self.machine = _text("machine", machine)
        self.model = _text("model", model)
        self.source = _text("source", source)
        entries = {_entry_key(key): _milliseconds(key, value) for key, value in times.items()}
        self.batch_sizes = tuple(sorted({batch for batch, _ in entries}))
        self.steps = tuple(sorted({steps for _, steps in entries}))
        self.times = np.array(
            [[entries.get((b, s), math.nan) for s in self.steps] for b in self.batch_sizes]
        )
        self.times.flags.writeable = False
        self._column = {steps: index for index, steps in enumerate(self.steps)}
        self.estimated = frozenset(map(_entry_key, estimated))
        for batch, steps in sorted(self.estimated - entries.keys()):
            raise ValueError(f"`estimated` names batch size {batch}, S {steps}, which has no time")
        self.context_tokens = _at_least_zero("context_tokens", context_tokens)
        self.context_slopes = {
            batch: _at_least_zero(f"context_slopes of batch size {show_value(batch)}", slope)
            for batch, slope in sorted((context_slopes or {}).items())
        }
        self._check_slopes()

    @classmethod
    def from_function(
        cls,
        fn: Callable[[int, int], float],
        batch_sizes: Iterable[int],
        steps: Iterable[int],
        **names: Any,
    ) -> CostTable:
        """A table with the entry ``fn(batch_size, steps)``, in milliseconds, for every pair.

        `names`: the keyword arguments of the class.
        """
        pairs = itertools.product(batch_sizes, list(steps))
        return cls({(batch, s): fn(batch, s) for batch, s in pairs}, **names)

    @classmethod
    def load(cls, path: str | os.PathLike) -> CostTable:
        """Read a file that `save` wrote, or one like it.

        Raises:
            OSError: it cannot be read.
            ValueError: it is no such table; the message begins with the path.
        """
        with open(path, encoding="utf-8-sig") as file:
            text = file.read()
        try:
            return cls(**_from_json(json.loads(text, object_pairs_hook=unique_keys)))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None

    def save(self, path: str | os.PathLike) -> None:
        """Write the table as JSON, one batch size a line.

        Raises:
            ValueError: `machine` or `model` is empty: times without them are worth nothing.
            OSError: the file cannot be written.
        """
        for name in ("machine", "model"):
            if not getattr(self, name):
                raise ValueError(f"`{name}` must say what the times were measured on, got ''")
        head = {
            "machine": self.machine,
            "model": self.model,
            "unit": UNIT,
            "source": self.source,
            "context_tokens": self.context_tokens,
            "context_slopes": {str(batch): slope for batch, slope in self.context_slopes.items()},
            "estimated": {
                str(batch): [s for s in self.steps if (batch, s) in self.estimated]
                for batch in sorted({batch for batch, _ in self.estimated})
            },
            "steps": self.steps,
        }
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        rows = [
            f'    "{batch}": {json.dumps([None if math.isnan(t) else t for t in row])}'
            for batch, row in zip(self.batch_sizes, self.times.tolist(), strict=True)
        ]
        text = "\n".join(["{", *lines, '  "times": {', ",\n".join(rows), "  }", "}"])
        with open(path, "w", encoding="utf-8") as file:
            file.write(text + "\n")

    def padded_batch_size(self, batch_size: int) -> int:
        """The captured size that a batch runs as: the next one of at least its size.

        A batch above the largest gets the largest, whose costs then stand in for it.
        """
        index = bisect_left(self.batch_sizes, batch_size)
        return self.batch_sizes[min(index, len(self.batch_sizes) - 1)]

    def row(self, batch_size: int, context_tokens: float | None = None) -> np.ndarray:
        """Milliseconds of a round of `batch_size` requests for each of `steps`, float64 [steps].

        A missing entry is NaN here. `context_tokens`: mean context length per request; None: the
        one that the table holds for.
        """
        padded = self.padded_batch_size(batch_size)
        row = self.times[self.batch_sizes.index(padded)]
        if context_tokens is None:
            return row
        extra = context_tokens - self.context_tokens
        return row + self.context_slopes.get(padded, 0.0) * extra / 1000.0

    def cost(self, batch_size: int, steps: int, context_tokens: float | None = None) -> float:
        """Milliseconds of one round.

        Raises:
            ValueError: the table has no such entry.
        """
        column = self._column.get(steps)
        cost = math.nan if column is None else float(self.row(batch_size, context_tokens)[column])
        if math.isnan(cost):
            raise ValueError(
                f"the cost table has no time for batch size {self.padded_batch_size(batch_size)}, "
                f"S {steps}; it knows batch sizes {_listed(self.batch_sizes)} and S "
                f"{_listed(self.steps)}"
            )
        return cost

    def missing(
        self, batch_sizes: Iterable[int] | None = None, steps: Iterable[int] | None = None
    ) -> list[tuple[int, int]]:
        """The (captured batch size, steps) without a time among those given; None: the table's."""
        wanted = self.batch_sizes if batch_sizes is None else batch_sizes
        columns = self.steps if steps is None else list(steps)
        pairs = itertools.product(sorted(set(map(self.padded_batch_size, wanted))), columns)
        return [(batch, s) for batch, s in pairs if not self._has(batch, s)]

    def check_complete(
        self, batch_sizes: Iterable[int] | None = None, steps: Iterable[int] | None = None
    ) -> None:
        """Raise a ValueError that names the entries which `missing` finds."""
        gaps = self.missing(batch_sizes, steps)
        if gaps:
            named = ", ".join(f"(batch size {batch}, S {s})" for batch, s in gaps[:8])
            more = f" and {len(gaps) - 8} more" if len(gaps) > 8 else ""
            raise ValueError(
                f"the cost table must have a time for every entry, missing: {named}{more}; "
                "measure them, or estimate them with `completed`"
            )

    def check_machine(self, machine: str, model: str) -> None:
        """Raise a ValueError if the times were measured on another machine or model."""
        for name, own, here in (("machine", self.machine, machine), ("model", self.model, model)):
            if own != here:
                raise ValueError(
                    f"the cost table's `{name}` must be {here!r}, which runs here, got {own!r}; "
                    "its times say nothing about this one: measure again"
                )

    def completed(self, batch_sizes: Iterable[int], steps: Iterable[int]) -> CostTable:
        """This table with every missing (batch size, steps) filled in by a roofline estimate.

        The estimate is ``fixed + max(weights, per_token * B * (S + 1)) + per_draft_step * S``:
        reading the weights once, the arithmetic of each verified token where that takes longer,
        each draft step, and the rest. The four are at least 0 and minimise the relative squared
        error over the entries present. Present entries stay as they are; new ones are listed in
        `estimated`.

        Raises:
            ValueError: fewer than two batch sizes or two step counts have times, so that cost could
                not be told apart by them.
        """
        present = {pair: time for pair, time in self._entries() if pair not in self.estimated}
        for what, seen in (
            ("batch sizes", {batch for batch, _ in present}),
            ("step counts S", {s for _, s in present}),
        ):
            if len(seen) < 2:
                raise ValueError(
                    f"an estimate needs measured times at two or more {what}, got {_listed(seen)}"
                )
        wanted = set(map(_entry_key, itertools.product(batch_sizes, list(steps))))
        gaps = sorted(wanted - dict(self._entries()).keys())
        estimates = _fit_roofline(present)
        return CostTable(
            dict(self._entries()) | {pair: estimates(*pair) for pair in gaps},
            machine=self.machine,
            model=self.model,
            context_tokens=self.context_tokens,
            context_slopes=self.context_slopes,
            estimated=self.estimated | set(gaps),
            source=self.source,
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CostTable):
            return NotImplemented
        names = ("machine", "model", "source", "context_tokens", "context_slopes", "estimated")
        return dict(self._entries()) == dict(other._entries()) and all(
            getattr(self, name) == getattr(other, name) for name in names
        )

    __hash__ = None

    def __repr__(self) -> str:
        return (
            f"CostTable(machine={self.machine!r}, model={self.model!r}, "
            f"batch_sizes={list(self.batch_sizes)}, steps={list(self.steps)})"
        )

    def _has(self, batch_size: int, steps: int) -> bool:
        column = self._column.get(steps)
        return column is not None and not math.isnan(self.row(batch_size)[column])

    def _entries(self) -> list[tuple[tuple[int, int], float]]:
        return [
            ((batch, s), time)
            for batch, row in zip(self.batch_sizes, self.times.tolist(), strict=True)
            for s, time in zip(self.steps, row, strict=True)
            if not math.isnan(time)
        ]

    def _check_slopes(self) -> None:
        for batch, slope in self.context_slopes.items():
            if batch not in self.batch_sizes:
                raise ValueError(
                    f"`context_slopes` must be of batch sizes {_listed(self.batch_sizes)}, "
                    f"got {show_value(batch)}"
                )
            least = np.nanmin(self.times[self.batch_sizes.index(batch)])
            if slope * self.context_tokens / 1000.0 >= least:
                raise ValueError(
                    f"`context_slopes` of batch size {batch} must leave a time above 0 at no "
                    f"context, got {slope} ms per 1000 tokens with {least} ms at "
                    f"{self.context_tokens:g} tokens"
                )


def _fit_roofline(present: Mapping[tuple[int, int], float]) -> Callable[[int, int], float]:
    """The best nonnegative roofline through some entries, as a function of (batch size, steps).

    For a given knee, the tokens at which arithmetic takes as long as reading the weights, the model
    is linear; every knee that can make a difference is a token count among the entries.
    """
    batch, steps = np.array(list(present), dtype=float).T
    times = np.array(list(present.values()))
    tokens = batch * (steps + 1)
    best = None
    for knee in np.unique(tokens):
        design = np.stack([np.ones_like(tokens), np.maximum(tokens, knee), steps], axis=1)
        weights, error = _nonnegative_least_squares(design / times[:, None], np.ones_like(times))
        if best is None or error < best[0]:
            best = (error, knee, *map(float, weights))
    _, knee, fixed, per_token, per_draft_step = best

    def estimate(batch_size: int, num_steps: int) -> float:
        verified = max(knee, batch_size * (num_steps + 1))
        return float(fixed + per_token * verified + per_draft_step * num_steps)

    return estimate


def _nonnegative_least_squares(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, float]:
    """Minimise |a x - b|^2 over x >= 0, for a handful of columns; also the minimum.

    The minimum is an unconstrained one over some subset of the columns, so all are tried.
    """
    best, least = np.zeros(a.shape[1]), float(b @ b)
    for size in range(1, a.shape[1] + 1):
        for subset in itertools.combinations(range(a.shape[1]), size):
            columns = list(subset)
            solution = np.linalg.lstsq(a[:, columns], b, rcond=None)[0]
            error = float(np.sum((a[:, columns] @ solution - b) ** 2))
            if solution.min() >= 0 and error < least:
                best, least = np.zeros(a.shape[1]), error
                best[columns] = solution
    return best, least


def _from_json(raw: Any) -> dict[str, Any]:
    """The arguments of the class from a file's content."""
    if not isinstance(raw, Mapping):
        raise ValueError(f"a cost table must be an object, got {show_value(raw)}")
    for key in raw.keys() - _KEYS:
        raise ValueError(f"unknown key {show_value(key)}; known: {', '.join(sorted(_KEYS))}")
    for key in ("machine", "model", "unit", "steps", "times"):
        if not raw.get(key):
            raise ValueError(f"`{key}` must be given, got {show_value(raw.get(key))}")
    if raw["unit"] != UNIT:
        raise ValueError(f"`unit` must be {UNIT!r}, got {show_value(raw['unit'])}")
    steps, rows = raw["steps"], _by_batch_size("times", raw["times"])
    if not isinstance(steps, list) or len(set(map(repr, steps))) != len(steps):
        raise ValueError(f"`steps` must be a list of different integers, got {show_value(steps)}")
    times = {}
    for batch, row in rows.items():
        if not isinstance(row, list) or len(row) != len(steps):
            raise ValueError(
                f"`times` of batch size {batch} must be a list of {len(steps)} values, one for "
                f"each of `steps`, got {show_value(row)}"
            )
        times |= {(batch, s): t for s, t in zip(steps, row, strict=True) if t is not None}
    return {
        "times": times,
        "machine": raw["machine"],
        "model": raw["model"],
        "source": raw.get("source", ""),
        "context_tokens": raw.get("context_tokens", 0.0),
        "context_slopes": _by_batch_size("context_slopes", raw.get("context_slopes", {})),
        "estimated": [
            (batch, s)
            for batch, row in _by_batch_size("estimated", raw.get("estimated", {})).items()
            for s in row
        ],
    }


def _by_batch_size(name: str, raw: Any) -> dict[int, Any]:
    if not isinstance(raw, Mapping):
        raise ValueError(f"`{name}` must be an object keyed by batch size, got {show_value(raw)}")
    for key in raw:
        if not is_batch_size_key(key):
            raise ValueError(f"`{name}` must be keyed by batch sizes of at least 1, got {key!r}")
    return {int(key): value for key, value in raw.items()}


def _entry_key(key: Any) -> tuple[int, int]:
    batch, steps = key
    if not is_int(batch) or batch < 1:
        raise ValueError(f"a batch size must be an integer of at least 1, got {show_value(batch)}")
    if not is_int(steps) or not 0 <= steps <= MAX_STEPS:
        raise ValueError(
            f"steps S must be an integer from 0 to {MAX_STEPS}, got {show_value(steps)}"
        )
    return batch, steps


def _milliseconds(key: tuple[int, int], value: Any) -> float:
    if _is_number(value) and math.isfinite(value) and value > 0:
        return float(value)
    raise ValueError(
        f"the time of batch size {key[0]}, S {key[1]} must be a finite number of milliseconds "
        f"above 0, got {show_value(value)}"
    )


def _at_least_zero(name: str, value: Any) -> float:
    if _is_number(value) and math.isfinite(value) and value >= 0:
        return float(value)
    raise ValueError(f"`{name}` must be a finite number of at least 0, got {show_value(value)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.floating) and not isinstance(value, bool)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"`{name}` must be a string, got {show_value(value)}")
    return value


def _listed(values: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(values)))
