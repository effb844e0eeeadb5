"""Turns a policy's decisions into prepared runtime states, at the start of each decode round.

With an `AdaptiveState` the decision was made inside the verify op and the controller only reads it
from the ring; with a host policy (`AdaptiveSpeculativeParams`) it asks the policy. Names follow
SGLang's adaptive controller. Two things differ on purpose: feedback never activates anything, since
the next batch may belong to another slot, and a missing state is an error at start-up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from adaptive_spec.graphs import SpecRuntimeState
from adaptive_spec.step_policy import StepPolicy


@runtime_checkable
class AdaptiveSpecPolicy(StepPolicy, Protocol):
    """A policy that states can be prepared for: `AdaptiveState` (decides in the op) or
    `AdaptiveSpeculativeParams` (on the host)."""

    @property
    def candidate_steps(self) -> list[int]: ...

    def set_cuda_graph_bs(self, cuda_graph_bs: Sequence[int] | None) -> None: ...

    def candidate_steps_for_batch(self, batch_size: int) -> list[int]: ...

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None: ...


class AdaptiveSpecWorker(Protocol):
    """What the controller drives: builds the runtime state of a step count, and swaps it in."""

    speculative_num_steps: int

    def build_adaptive_runtime_state(
        self,
        speculative_num_steps: int,
        speculative_num_draft_tokens: int,
        cuda_graph_bs: list[int] | None = None,
    ) -> SpecRuntimeState: ...

    def apply_runtime_state(self, state: SpecRuntimeState) -> None: ...


class AdaptiveController:
    """Selects among prepared runtime states, one per candidate step count.

    Args:
        worker: builds and applies runtime states.
        policy: chooses the steps.
        lag: with an `AdaptiveState`, round r runs with the decision of round r - lag, exactly. 1
            where a round's results are awaited before the next is launched, 2 where rounds overlap.
        timeout_s: how long to wait for a decision that is late before raising `RingTimeoutError`.
    """

    def __init__(
        self,
        worker: AdaptiveSpecWorker,
        policy: AdaptiveSpecPolicy,
        *,
        lag: int = 1,
        timeout_s: float = 10.0,
    ):
        self.worker = worker
        self.policy = policy
        self.lag = lag
        self.timeout_s = timeout_s
        self.states: dict[int, SpecRuntimeState] = {}
        self.active_steps: int | None = None
        self.num_switches = 0
        self._reader: Any = None
        self._next_steps: Callable[[int], int] = _not_initialised

    @property
    def candidate_steps(self) -> list[int]:
        return self.policy.candidate_steps

    def register(self, state: SpecRuntimeState, steps: int | None = None) -> None:
        """Add a state that was built elsewhere.

        Raises:
            ValueError: no slot can ever choose it, or its step count already has a state.
        """
        steps = state.speculative_num_steps if steps is None else steps
        if steps not in self.candidate_steps:
            raise ValueError(
                f"`state` is for {steps} steps, which no slot can choose: candidates are "
                f"{self.candidate_steps}"
            )
        if steps in self.states:
            raise ValueError(f"`state` for {steps} steps is already registered")
        self.states[steps] = state

    def init_states(self, cuda_graph_bs: Sequence[int] | None = None) -> None:
        """Build the state of every candidate that has none yet, and activate one of them.

        Each step count gets only the captured batch sizes whose slot can choose it. If a build
        fails, the states built here are dropped and the error goes on to the caller.
        """
        # Asked before set_cuda_graph_bs, which starts the routing afresh: this is no round.
        first_steps = self.policy.get_steps_for_batch(1)
        self.policy.set_cuda_graph_bs(cuda_graph_bs)
        built: dict[int, SpecRuntimeState] = {}
        # The largest first, so that smaller captures reuse its memory.
        for steps in sorted(self.candidate_steps, reverse=True):
            if steps not in self.states:
                built[steps] = self.worker.build_adaptive_runtime_state(
                    speculative_num_steps=steps,
                    speculative_num_draft_tokens=steps + 1,
                    cuda_graph_bs=self.policy.cuda_graph_bs_for_step(steps),
                )
        self.states.update(built)
        make_reader = getattr(self.policy, "step_reader", None)
        if make_reader is None:
            self._next_steps = self.policy.get_steps_for_batch
        else:
            self._reader = make_reader(lag=self.lag, timeout_s=self.timeout_s)
            self._next_steps = self._reader.next_steps
        self._activate(first_steps)
        self.num_switches = 0

    def activate_step_by_batch(self, batch_size: int) -> None:
        """First thing in a decode round: activate the state that a batch of this size needs.

        With an `AdaptiveState` each call stands for one round, which must then pass the state to
        exactly one verify op (or be taken back with `cancel_round`).

        Raises:
            ValueError: negative `batch_size`.
            RingTimeoutError: the decision of `lag` rounds ago did not arrive in time.
        """
        steps = self._next_steps(batch_size)
        if steps != self.active_steps:
            self._activate(steps)

    def cancel_round(self) -> None:
        """Take back an activation: its round failed before its verify op ran."""
        if self._reader is not None:
            self._reader.cancel_round()

    def on_verify_complete(
        self,
        num_correct_drafts_per_req: Sequence[int],
        batch_size: int,
        executed_steps: int | None = None,
    ) -> None:
        """Feed a round's counts to a host policy; an op that was given the state has done it."""
        self.policy.on_verify_complete(
            num_correct_drafts_per_req, batch_size, executed_steps=executed_steps
        )

    def status(self) -> dict[str, Any]:
        """What an operator wants to see: the active step and why each slot is where it is."""
        return {
            "active_steps": self.active_steps,
            "num_switches": self.num_switches,
            "states": sorted(self.states),
            "ring_stalls": self.policy.ring.stalls if self._reader is not None else 0,
            "slots": self.policy.status(),
        }

    def _activate(self, steps: int) -> None:
        self.worker.apply_runtime_state(self.states[steps])
        self.active_steps = steps
        self.num_switches += 1


def _not_initialised(batch_size: int) -> int:
    raise RuntimeError("AdaptiveController: call init_states() before the first decode round")
