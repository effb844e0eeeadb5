"""Arrival traces: when requests come, how long their prompts are, and how many tokens they want."""

from __future__ import annotations

import csv
import dataclasses
import os
from datetime import datetime

import numpy as np

# Column names of known public traces; the first that a file has is taken.
_TIME = ("timestamp", "arrived_at", "arrival_time", "time")
_PROMPT = ("contexttokens", "num_prefill_tokens", "input_tokens", "input_length", "prompt_tokens")
_OUTPUT = ("generatedtokens", "num_decode_tokens", "output_tokens", "output_length")


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order of their arrival.

    Args:
        arrival_ms: float64 [num_requests], milliseconds since the trace began; does not fall.
        prompt_tokens, output_tokens: int64 [num_requests]; at least 0 and at least 1.

    Raises:
        ValueError: naming the array and what is wrong in it.
    """

    arrival_ms: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray

    def __post_init__(self):
        arrivals = np.asarray(self.arrival_ms, dtype=np.float64)
        prompts = np.asarray(self.prompt_tokens, dtype=np.int64)
        outputs = np.asarray(self.output_tokens, dtype=np.int64)
        if not len(arrivals) == len(prompts) == len(outputs) or not len(arrivals):
            raise ValueError(
                "`arrival_ms`, `prompt_tokens` and `output_tokens` must have one value for each of "
                f"one or more requests, got {len(arrivals)}, {len(prompts)} and {len(outputs)}"
            )
        if not np.isfinite(arrivals).all() or arrivals[0] < 0 or (np.diff(arrivals) < 0).any():
            raise ValueError("`arrival_ms` must be finite, at least 0, and must not fall")
        if prompts.min() < 0:
            raise ValueError(f"`prompt_tokens` must be at least 0, got {prompts.min()}")
        if outputs.min() < 1:
            raise ValueError(f"`output_tokens` must be at least 1, got {outputs.min()}")
        for name, array in (
            ("arrival_ms", arrivals),
            ("prompt_tokens", prompts),
            ("output_tokens", outputs),
        ):
            object.__setattr__(self, name, array)

    def __len__(self) -> int:
        return len(self.arrival_ms)

    def faster(self, factor: float) -> Trace:
        """The same requests, arriving `factor` times as fast."""
        return dataclasses.replace(self, arrival_ms=self.arrival_ms / _positive("factor", factor))


def constant(
    rng: np.random.Generator,
    num_requests: int,
    requests_per_s: float,
    mean_prompt: float = 1000.0,
    mean_output: float = 200.0,
) -> Trace:
    """Poisson arrivals at one rate; prompt and output lengths geometric with these means."""
    gaps = rng.exponential(1.0, num_requests)
    arrivals = 1000.0 * np.cumsum(gaps) / _positive("requests_per_s", requests_per_s)
    return _with_lengths(rng, arrivals, mean_prompt, mean_output)


def bursty(
    rng: np.random.Generator,
    num_requests: int,
    calm_per_s: float,
    burst_per_s: float,
    mean_seconds: float = 10.0,
    **lengths: float,
) -> Trace:
    """Poisson arrivals whose rate jumps between two values, after exponential times of this mean.

    `lengths`: as for `constant`.
    """
    rates = (_positive("calm_per_s", calm_per_s), _positive("burst_per_s", burst_per_s))
    # Enough stretches for all requests: a stretch brings mean_seconds * rate of them on average.
    count = 8 + int(4 * num_requests / (mean_seconds * sum(rates)))
    while True:
        seconds = rng.exponential(mean_seconds, count)
        expected = np.cumsum(seconds * np.resize(rates, count))
        if expected[-1] > 2 * num_requests + 16:
            break
        count *= 2
    return _inhomogeneous(rng, num_requests, np.cumsum(seconds), expected, lengths)


def diurnal(
    rng: np.random.Generator,
    num_requests: int,
    night_per_s: float,
    day_per_s: float,
    day_seconds: float = 600.0,
    **lengths: float,
) -> Trace:
    """Poisson arrivals whose rate swings like a sine between night and day, beginning at night.

    `lengths`: as for `constant`.
    """
    low, high = _positive("night_per_s", night_per_s), _positive("day_per_s", day_per_s)
    days = 2 + int(4 * num_requests / ((low + high) * day_seconds))
    seconds = np.linspace(0.0, days * day_seconds, 256 * days + 1)[1:]
    turn = 2 * np.pi / day_seconds
    expected = (low + high) / 2 * seconds - (high - low) / 2 * np.sin(turn * seconds) / turn
    return _inhomogeneous(rng, num_requests, seconds, expected, lengths)


def read_csv(path: str | os.PathLike) -> Trace:
    """A trace from a CSV file with a header: arrival, prompt tokens and output tokens.

    Known are the columns of the Azure LLM inference traces (TIMESTAMP as a date with time,
    ContextTokens, GeneratedTokens) and other usual names; arrivals may be dates or seconds.
    Requests without output are left out.

    Raises:
        OSError: the file cannot be read.
        ValueError: a column is missing, or a value is wrong; names the file and line.
    """
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        columns = {name.strip().lower(): name for name in reader.fieldnames or ()}
        found = [_column(path, columns, names) for names in (_TIME, _PROMPT, _OUTPUT)]
        rows = []
        for line in reader:
            try:
                time, prompt, output = (line[name] for name in found)
                rows.append((_seconds(time), int(prompt), int(output)))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{os.fspath(path)}: line {reader.line_num}: {error}") from None
    rows = sorted(row for row in rows if row[2] > 0)
    if not rows:
        raise ValueError(f"{os.fspath(path)}: must have requests with output tokens, got none")
    times, prompts, outputs = zip(*rows, strict=True)
    return Trace(1000.0 * (np.array(times) - times[0]), np.array(prompts), np.array(outputs))


def _with_lengths(
    rng: np.random.Generator,
    arrival_ms: np.ndarray,
    mean_prompt: float = 1000.0,
    mean_output: float = 200.0,
) -> Trace:
    lengths = [rng.geometric(1.0 / mean, len(arrival_ms)) for mean in (mean_prompt, mean_output)]
    return Trace(arrival_ms, *lengths)


def _inhomogeneous(
    rng: np.random.Generator,
    num_requests: int,
    seconds: np.ndarray,
    expected: np.ndarray,
    lengths: dict[str, float],
) -> Trace:
    """Arrivals of a Poisson process with `expected[i]` arrivals by `seconds[i]`."""
    unit = np.cumsum(rng.exponential(1.0, num_requests))
    arrivals = np.interp(unit, np.concatenate([[0], expected]), np.concatenate([[0], seconds]))
    return _with_lengths(rng, 1000.0 * arrivals, **lengths)


def _positive(name: str, value: float) -> float:
    if not 0 < value < np.inf:
        raise ValueError(f"`{name}` must be a finite number above 0, got {value!r}")
    return float(value)


def _column(path: str | os.PathLike, columns: dict[str, str], names: tuple[str, ...]) -> str:
    for name in names:
        if name in columns:
            return columns[name]
    raise ValueError(
        f"{os.fspath(path)}: must have a column {' or '.join(names)}, "
        f"got {', '.join(columns.values()) or 'none'}"
    )


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        # Microseconds are the finest that datetime reads; some traces write ten millionths.
        whole, _, fraction = text.strip().partition(".")
        return datetime.fromisoformat(f"{whole}+00:00").timestamp() + float(f"0.{fraction or 0}")
