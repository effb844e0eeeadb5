"""Runs all modes over the workload, interleaved: every mode gets its turn many times in each phase.

A slow second of the machine then hits all modes alike. Each mode keeps one engine, and with it one
adaptive state, for the whole workload. Only decode rounds are timed: prefill costs every mode the
same forward passes and would only dilute the ratios, so it is reported apart.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from adaptive_spec.demo.origins import OriginTracker
from adaptive_spec.demo.workload import Job, Phase, Workload
from adaptive_spec.engine.engine import Engine, RoundReport

if TYPE_CHECKING:
    from adaptive_spec.config import AdaptiveConfig
    from adaptive_spec.controller import AdaptiveSpecPolicy
    from adaptive_spec.engine.loading import ModelPair
    from adaptive_spec.engine.request import Request


@dataclass(frozen=True)
class Mode:
    """A way to choose S: fixed ``steps`` (0 = no speculation, no draft work), or a ``config``."""

    name: str
    steps: int | None = None
    config: AdaptiveConfig | None = None


@dataclass(frozen=True)
class Round:
    """One decode round of an adaptive mode. ``ema`` is that of the round's slot, after it."""

    phase: int
    batch_size: int
    speculative_num_steps: int
    ema: float


@dataclass
class PhaseRun:
    """What one mode did in one phase."""

    num_tokens: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    num_accepted: int = 0
    num_row_rounds: int = 0
    steps: list[int] = field(default_factory=list)  # S of each round
    requests: list[Request] = field(default_factory=list)  # in the order of the phase's jobs
    sample: OriginTracker | None = None  # of the first of them

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    @property
    def mean_accepted(self) -> float:
        """Accepted drafts per request and round, bonus excluded."""
        return self.num_accepted / self.num_row_rounds if self.num_row_rounds else 0.0

    @property
    def num_switches(self) -> int:
        return sum(a != b for a, b in zip(self.steps, self.steps[1:], strict=False))

    @property
    def main_steps(self) -> int:
        """The S of most rounds."""
        return max(set(self.steps), key=self.steps.count)

    @property
    def rounds_to_settle(self) -> int:
        """Rounds before the first one at `main_steps`: what a change of phase costs the policy."""
        return self.steps.index(self.main_steps)


class Lane:
    """A mode with its engine, and all it has done."""

    def __init__(
        self,
        mode: Mode,
        pair: ModelPair,
        workload: Workload,
        make_policy: Callable[[AdaptiveConfig], AdaptiveSpecPolicy],
    ) -> None:
        self.mode = mode
        self.policy = None if mode.config is None else make_policy(mode.config)
        self.engine = Engine(
            pair,
            max_batch_size=workload.max_batch_size,
            max_len=workload.max_len,
            policy=self.policy,
            speculative_num_steps=mode.steps,
            cuda_graph_bs=sorted({phase.batch_size for phase in workload.phases}),
        )
        self.phases: list[PhaseRun] = []
        self.rounds: list[Round] = []
        self._jobs: Iterator[Job] = iter(())

    @property
    def num_tokens(self) -> int:
        return sum(phase.num_tokens for phase in self.phases)

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds if self.seconds else 0.0

    def begin(self, jobs: Iterator[Job]) -> None:
        """Start a phase with an empty engine."""
        self.phases.append(PhaseRun())
        self._jobs = jobs

    def run_until(self, num_tokens: int, batch_size: int) -> None:
        """Decode until the phase has ``num_tokens``, always with ``batch_size`` requests."""
        run, engine = self.phases[-1], self.engine
        while run.num_tokens < num_tokens:
            while len(engine.running) + len(engine.waiting) < batch_size:
                self._submit(run)
            start = time.perf_counter()
            report = engine.step()
            seconds = time.perf_counter() - start - report.join_seconds
            run.prefill_seconds += report.join_seconds
            run.sample.update()
            # A request whose first token is its last leaves without a round.
            if report.batch_size:
                run.seconds += seconds
                self._record(run, report)

    def end(self) -> None:
        """End what is still running; the tokens so far are kept."""
        for request in self.engine.running + self.engine.waiting:
            self.engine.abort(request)

    def _submit(self, run: PhaseRun) -> None:
        job = next(self._jobs)
        request = self.engine.submit(job.prompt_ids, job.max_new_tokens, sampling=job.sampling)
        if run.sample is None:
            run.sample = OriginTracker(request)
        run.requests.append(request)

    def _record(self, run: PhaseRun, report: RoundReport) -> None:
        run.num_tokens += report.emitted
        run.num_accepted += sum(report.accepted)
        run.num_row_rounds += report.batch_size
        run.steps.append(report.speculative_num_steps)
        if self.policy is not None:
            self.rounds.append(
                Round(
                    phase=len(self.phases) - 1,
                    batch_size=report.batch_size,
                    speculative_num_steps=report.speculative_num_steps,
                    ema=self._slot_ema(report.padded_batch_size),
                )
            )

    def _slot_ema(self, batch_size: int) -> float:
        slots = self.policy.status()
        fitting = [slot for slot in slots if slot["batch_size"] <= batch_size]
        return (fitting[-1] if fitting else slots[0])["ema_accept_len"]


def run_workload(
    lanes: Sequence[Lane],
    workload: Workload,
    *,
    num_slices: int,
    max_seconds: float,
    on_progress: Callable[[Phase, float], None],
) -> None:
    """Run every lane through every phase.

    Args:
        num_slices: turns that each lane gets per phase; the order changes from turn to turn.
        max_seconds: a phase that has used up its share ends after the slice it is in, so all lanes
            have decoded the same number of tokens then too.
        on_progress: called with the phase and the share of the whole workload that is done.
    """
    start = time.perf_counter()
    num_phases = len(workload.phases)
    # A collection in the middle of one lane's turn would be charged to it.
    gc.collect()
    gc.disable()
    try:
        for index, phase in enumerate(workload.phases):
            for lane in lanes:
                lane.begin(workload.jobs(index))
            for turn in range(num_slices):
                num_tokens = -(-phase.num_tokens * (turn + 1) // num_slices)
                for lane in turn_order(lanes, turn):
                    lane.run_until(num_tokens, phase.batch_size)
                on_progress(phase, (index + (turn + 1) / num_slices) / num_phases)
                if time.perf_counter() - start > max_seconds * (index + 1) / num_phases:
                    break
            for lane in lanes:
                lane.end()
    finally:
        gc.enable()


def turn_order(lanes: Sequence[Lane], turn: int) -> list[Lane]:
    """Rotated from turn to turn, and every second time backwards: no lane has fixed neighbours."""
    shift = turn // 2 % len(lanes)
    order = [*lanes[shift:], *lanes[:shift]]
    return order[::-1] if turn % 2 else order
