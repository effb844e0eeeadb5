"""Replays one policy over a cost table and traffic, round by round, and measures it.

Two kinds of traffic. `Phase`s fix the batch size and the acceptance process for a number of
rounds: requests that end are replaced at once. A `Trace` of arrivals is served in continuous
batching: the batch is whatever has arrived and is not complete. Only decode rounds are simulated,
prefill is free.

Depths are drawn before the run, from the seed alone, so all policies see the same ones and their
differences are not noise.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

import numpy as np

from adaptive_spec.cost_table import CostTable
from adaptive_spec.sim.acceptance import AcceptanceProcess, expected_tokens
from adaptive_spec.sim.arrivals import Trace
from adaptive_spec.step_policy import StepPolicy

# Rounds whose counts are turned into Python lists at once, for each S that the policy uses.
_CHUNK = 128


class _NoFeedback:
    """A policy that learns nothing."""

    def on_verify_complete(
        self,
        num_correct_drafts_per_req: Sequence[int],
        batch_size: int,
        executed_steps: int | None = None,
    ) -> None:
        pass


class StaticPolicy(_NoFeedback):
    """Always the same steps; 0 is no speculation. Simulated without a loop over rounds."""

    def __init__(self, steps: int):
        self.steps = steps

    def get_steps_for_batch(self, batch_size: int) -> int:
        return self.steps


@dataclasses.dataclass(frozen=True)
class Phase:
    """A stretch of rounds with one batch size and one acceptance process.

    Args:
        batch_size, num_rounds: at least 1.
        process: of all requests, or of the first request where `others` is given.
        others: the process of all requests but the first.
        request_rounds: mean rounds of a request (geometric); with `others` each request lasts the
            whole phase.
        name: for tables. Phases of the same name are one group of the results; one without a name
            is a group of its own.
    """

    batch_size: int
    num_rounds: int
    process: AcceptanceProcess
    others: AcceptanceProcess | None = None
    request_rounds: float = 100.0
    name: str = ""

    def __post_init__(self):
        for field, least in (("batch_size", 1), ("num_rounds", 1), ("request_rounds", 1)):
            if not getattr(self, field) >= least:
                raise ValueError(
                    f"`{field}` of a phase must be at least {least}, got {getattr(self, field)!r}"
                )

    def expected_tokens(self) -> np.ndarray:
        """Mean tokens of a round, all requests together, for S = 0..MAX_DEPTH."""
        if self.others is None:
            return self.batch_size * expected_tokens(self.process)
        rest = (self.batch_size - 1) * expected_tokens(self.others)
        return expected_tokens(self.process) + rest


@dataclasses.dataclass(frozen=True, eq=False)
class DrawnPhase:
    """A phase with its depths.

    Attributes:
        depths: int8 [num_rounds, batch_size].
        starts: bool [num_rounds, batch_size], where a request has its first round.
    """

    phase: Phase
    depths: np.ndarray
    starts: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """What happened, round by round, and per request.

    Attributes:
        steps, batch_size, tokens: int64 [num_rounds]; tokens of all requests together.
        ms: float64 [num_rounds].
        group: int64 [num_rounds], index into `groups`: phases by name, or ranges of B.
        request_tpot_ms: float64 [num_requests], time per output token of each request.
    """

    steps: np.ndarray
    batch_size: np.ndarray
    tokens: np.ndarray
    ms: np.ndarray
    group: np.ndarray
    groups: Sequence[str]
    request_tpot_ms: np.ndarray

    @property
    def tokens_per_s(self) -> float:
        """Of the time with requests; idle time is not counted."""
        return 1000.0 * float(self.tokens.sum() / self.ms.sum())

    @property
    def mean_tpot_ms(self) -> float:
        """Over all tokens."""
        return float((self.ms * self.batch_size).sum() / self.tokens.sum())

    @property
    def p99_tpot_ms(self) -> float:
        """Over requests."""
        return float(np.quantile(self.request_tpot_ms, 0.99))

    @property
    def num_switches(self) -> int:
        """Rounds whose S is not that of the round before."""
        return int(np.count_nonzero(self.steps[1:] != self.steps[:-1]))

    @property
    def switches_per_1000(self) -> float:
        return 1000.0 * self.num_switches / len(self.steps)

    def group_rates(self) -> np.ndarray:
        """Tokens per millisecond in each group, float64 [len(groups)]; NaN where none ran."""
        count = len(self.groups)
        ms = np.bincount(self.group, self.ms, count)
        tokens = np.bincount(self.group, self.tokens, count)
        return np.divide(tokens, ms, out=np.full(count, np.nan), where=ms > 0)


def draw_phases(phases: Sequence[Phase], seed: int) -> list[DrawnPhase]:
    """The depths of every phase. Each has a random stream of its own."""
    streams = np.random.SeedSequence(seed).spawn(len(phases))
    return [
        _draw_phase(phase, np.random.Generator(np.random.PCG64(stream)))
        for phase, stream in zip(phases, streams, strict=True)
    ]


def _draw_phase(phase: Phase, rng: np.random.Generator) -> DrawnPhase:
    rounds, batch = phase.num_rounds, phase.batch_size
    if phase.others is None:
        lengths = _lifetimes(rng, phase.request_rounds, rounds, batch)
        flat = phase.process.depths(rng, lengths)
    else:
        lengths = np.full(batch, rounds)
        first = phase.process.depths(rng, lengths[:1])
        flat = np.concatenate([first, phase.others.depths(rng, lengths[1:])])
    # One lane of the batch after another: lane-major until here, rounds first from here on.
    starts = np.zeros(rounds * batch, dtype=bool)
    starts[np.cumsum(lengths) - lengths] = True
    return DrawnPhase(
        phase,
        np.ascontiguousarray(flat.reshape(batch, rounds).T),
        np.ascontiguousarray(starts.reshape(batch, rounds).T),
    )


def _lifetimes(rng: np.random.Generator, mean: float, rounds: int, batch: int) -> np.ndarray:
    """Rounds of each request, lane after lane; those of a lane add up to `rounds`."""
    # Where a request ends in a lane is a coin flip each round, since lifetimes are geometric.
    ends = rng.random((batch, rounds)) < 1.0 / mean
    ends[:, -1] = True
    return np.diff(np.flatnonzero(ends.ravel()), prepend=-1)


def replay_phases(
    policy: StepPolicy,
    drawn: Sequence[DrawnPhase],
    table: CostTable,
    *,
    lag: int = 1,
    switch_ms: float = 0.0,
) -> Run:
    """Run a policy through phases.

    Args:
        table: what rounds really cost; the policy may have been told something else.
        lag: 1 where a round's counts are known before the next begins, 2 where rounds overlap.
        switch_ms: added to a round whose S is not that of the round before.

    Raises:
        ValueError: the table lacks an entry that the policy chose, or a phase's batch is larger
            than its largest batch size.
    """
    _check_lag(lag)
    pending: deque = deque()
    steps, counts = [], []
    for each in drawn:
        _check_batch(each.phase.batch_size, table)
        if isinstance(policy, StaticPolicy):
            chosen = np.full(each.phase.num_rounds, policy.steps)
        else:
            chosen = _replay_phase(policy, each, lag, pending)
        steps.append(chosen)
        counts.append(np.minimum(each.depths, chosen[:, None].astype(np.int8)))
    return _phase_run(drawn, steps, counts, table, switch_ms)


def replay_oracle(drawn: Sequence[DrawnPhase], table: CostTable) -> Run:
    """As `replay_phases`, with the S that is best in expectation in each phase, free switches."""
    steps, counts = [], []
    for each in drawn:
        _check_batch(each.phase.batch_size, table)
        best = best_steps(each.phase, table)
        steps.append(np.full(each.phase.num_rounds, best))
        counts.append(np.minimum(each.depths, np.int8(best)))
    return _phase_run(drawn, steps, counts, table, 0.0)


def expected_rates(phase: Phase, table: CostTable) -> np.ndarray:
    """Expected tokens per millisecond for each of the table's steps, float64 [len(table.steps)]."""
    return phase.expected_tokens()[list(table.steps)] / table.row(phase.batch_size)


def best_steps(phase: Phase, table: CostTable) -> int:
    """The steps with the highest expected throughput in a phase; entries without a time lose."""
    return table.steps[int(np.nanargmax(expected_rates(phase, table)))]


def _replay_phase(policy: StepPolicy, drawn: DrawnPhase, lag: int, pending: deque) -> np.ndarray:
    batch = drawn.phase.batch_size
    choose, feed = policy.get_steps_for_batch, policy.on_verify_complete
    chosen = []
    for begin in range(0, len(drawn.depths), _CHUNK):
        chunk = drawn.depths[begin : begin + _CHUNK]
        lists: dict[int, list[list[int]]] = {}
        for index in range(len(chunk)):
            steps = choose(batch)
            rows = lists.get(steps)
            if rows is None:
                rows = lists[steps] = np.minimum(chunk, np.int8(steps)).tolist()
            chosen.append(steps)
            if lag == 1:
                feed(rows[index], batch, steps)
            else:
                pending.append((rows[index], batch, steps))
                if len(pending) == lag:
                    feed(*pending.popleft())
    return np.array(chosen)


def _phase_run(
    drawn: Sequence[DrawnPhase],
    steps: Sequence[np.ndarray],
    counts: Sequence[np.ndarray],
    table: CostTable,
    switch_ms: float,
) -> Run:
    ms, tokens, tpot = [], [], []
    last = None
    for each, chosen, accepted in zip(drawn, steps, counts, strict=True):
        cost = _costs(table, each.phase.batch_size, chosen)
        if switch_ms:
            before = np.concatenate([[chosen[0] if last is None else last], chosen[:-1]])
            cost = cost + switch_ms * (chosen != before)
            last = chosen[-1]
        ms.append(cost)
        tokens.append(accepted.sum(axis=1, dtype=np.int64) + each.phase.batch_size)
        tpot.append(_request_tpot(each.starts, accepted, cost))
    lengths = [len(chosen) for chosen in steps]
    names = [
        each.phase.name or f"phase {index}, B={each.phase.batch_size}"
        for index, each in enumerate(drawn)
    ]
    groups = list(dict.fromkeys(names))
    index_of = {name: index for index, name in enumerate(groups)}
    return Run(
        steps=np.concatenate(steps),
        batch_size=np.repeat([each.phase.batch_size for each in drawn], lengths),
        tokens=np.concatenate(tokens),
        ms=np.concatenate(ms),
        group=np.repeat([index_of[name] for name in names], lengths),
        groups=groups,
        request_tpot_ms=np.concatenate(tpot),
    )


def _request_tpot(starts: np.ndarray, accepted: np.ndarray, ms: np.ndarray) -> np.ndarray:
    """Of the requests of a phase, from [num_rounds, batch_size] arrays; a request is a stretch of
    its lane."""
    begin = np.flatnonzero(starts.T.ravel())
    rounds = np.diff(begin, append=starts.size)
    tokens = np.add.reduceat(accepted.T.ravel(), begin, dtype=np.int64) + rounds
    elapsed = np.concatenate([[0.0], np.cumsum(ms)])
    first = begin % len(ms)
    return (elapsed[first + rounds] - elapsed[first]) / tokens


def _costs(table: CostTable, batch_size: int, steps: np.ndarray) -> np.ndarray:
    by_steps = np.full(int(max(steps.max(), *table.steps)) + 1, np.nan)
    by_steps[list(table.steps)] = table.row(batch_size)
    costs = by_steps[steps]
    if np.isnan(costs).any():
        table.cost(batch_size, int(steps[np.isnan(costs)][0]))
    return costs


def _check_batch(batch_size: int, table: CostTable) -> None:
    if batch_size > table.batch_sizes[-1]:
        raise ValueError(
            f"a batch must be at most {table.batch_sizes[-1]}, the largest of the cost table, "
            f"got {batch_size}"
        )


def _check_lag(lag: int) -> None:
    if not isinstance(lag, int) or lag < 1:
        raise ValueError(f"`lag` must be an integer of at least 1, got {lag!r}")


def replay_trace(
    policy: StepPolicy,
    trace: Trace,
    process: AcceptanceProcess,
    table: CostTable,
    *,
    seed: int,
    max_batch: int | None = None,
    switch_ms: float = 0.0,
) -> Run:
    """Serve a trace in continuous batching: decode all that have arrived, first come, first served.

    Each request has its own sequence of depths, the same for every policy. The mean context of the
    batch, prompt and output so far, enters the cost where the table has a slope for it.

    Args:
        max_batch: most requests at once; default: the table's largest batch size.
        switch_ms: as in `replay_phases`.

    Raises:
        ValueError: the table lacks an entry that the policy chose, or is smaller than `max_batch`.
    """
    most = table.batch_sizes[-1] if max_batch is None else max_batch
    _check_batch(most, table)
    rng = np.random.Generator(np.random.PCG64(seed))
    # A request of n tokens has at most n rounds.
    flat = process.depths(rng, trace.output_tokens)
    first = np.cumsum(trace.output_tokens) - trace.output_tokens
    costs = [_BatchCost(table, batch) for batch in range(1, most + 1)]

    arrivals = trace.arrival_ms.tolist()
    arrivals.append(np.inf)
    position = np.zeros(most, dtype=np.int64)
    remaining = np.zeros(most, dtype=np.int64)
    context = np.zeros(most, dtype=np.int64)
    request = np.zeros(most, dtype=np.int64)
    finished_ms = np.zeros(len(trace))
    started_ms = np.zeros(len(trace))
    choose, feed = policy.get_steps_for_batch, policy.on_verify_complete
    rounds: list[tuple[int, int, int, float]] = []
    now, upcoming, size, last = 0.0, 0, 0, None
    while size or upcoming < len(trace):
        if not size:
            now = max(now, arrivals[upcoming])
        while size < most and arrivals[upcoming] <= now:
            request[size] = upcoming
            position[size] = first[upcoming]
            remaining[size] = trace.output_tokens[upcoming]
            context[size] = trace.prompt_tokens[upcoming]
            started_ms[upcoming] = now
            upcoming += 1
            size += 1
        if isinstance(policy, TraceOracle):
            policy.remaining = remaining[:size]
        steps = choose(size)
        cost = costs[size - 1]
        ms = cost(steps, context[:size])
        if last is not None and steps != last:
            ms += switch_ms
        last = steps
        accepted = np.minimum(flat[position[:size]], steps)
        emitted = np.minimum(accepted + 1, remaining[:size])
        position[:size] += 1
        remaining[:size] -= emitted
        context[:size] += emitted
        feed(accepted.tolist(), size, steps)
        now += ms
        rounds.append((steps, size, int(emitted.sum()), ms))
        if not remaining[:size].all():
            keep = np.flatnonzero(remaining[:size])
            done = request[:size][remaining[:size] == 0]
            finished_ms[done] = now
            for lane in (position, remaining, context, request):
                lane[: len(keep)] = lane[keep]
            size = len(keep)
    steps, batch, tokens, ms = (np.array(column) for column in zip(*rounds, strict=True))
    group = np.log2(batch).astype(np.int64)
    return Run(
        steps=steps,
        batch_size=batch,
        tokens=tokens,
        ms=ms,
        group=group,
        groups=[f"B={2**i}-{2 ** (i + 1) - 1}" for i in range(int(group.max()) + 1)],
        request_tpot_ms=(finished_ms - started_ms) / trace.output_tokens,
    )


class TraceOracle(_NoFeedback):
    """Knows the acceptance process, the costs, and how many tokens each request still lacks: the S
    with the most expected tokens per millisecond of the next round. For `replay_trace` only.

    Attributes:
        remaining: int64 [batch_size], set by `replay_trace` before each round.
    """

    def __init__(self, process: AcceptanceProcess, table: CostTable):
        self._tokens = expected_tokens(process)
        self._steps = np.array(table.steps)
        self._table = table
        self.remaining = np.zeros(0, dtype=np.int64)

    def get_steps_for_batch(self, batch_size: int) -> int:
        useful = np.minimum(self.remaining[:, None] - 1, self._steps)
        tokens = self._tokens[useful].sum(axis=0)
        return int(self._steps[np.nanargmax(tokens / self._table.row(batch_size))])


class _BatchCost:
    """Cost of a round of one batch size: a plain look-up where context does not matter."""

    def __init__(self, table: CostTable, batch_size: int):
        padded = table.padded_batch_size(batch_size)
        self._table, self._batch_size = table, batch_size
        self._slope = table.context_slopes.get(padded, 0.0) / 1000.0
        self._costs = dict(zip(table.steps, table.row(batch_size).tolist(), strict=True))

    def __call__(self, steps: int, context: np.ndarray) -> float:
        cost = self._costs.get(steps, np.nan)
        if cost != cost:
            return self._table.cost(self._batch_size, steps)
        if self._slope:
            cost += self._slope * (float(context.mean()) - self._table.context_tokens)
        return cost
