"""The `ema` step policy in plain Python: the reference that every other backend must equal bit for
bit.

A slot keeps an exponential moving average of the accepted drafts per request (bonus token excluded)
and compares it with thresholds between its candidate steps. Python floats are binary64 and never
fused, so the expressions below are exact as written; csrc/core/ema_policy.h evaluates the same
ones.
"""

from __future__ import annotations

import enum
import math
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from adaptive_spec.config import (
    MAX_STEPS,
    AdaptiveConfig,
    SlotConfig,
    load_adaptive_config,
    read_raw_config,
    resolve_candidate_steps,
    slot_config,
)
from adaptive_spec.routing import BatchRouter

_MAX_PROBE_WAIT = 4096


class StepPolicy(Protocol):
    """What any policy does: choose the steps of a round, and learn from it."""

    def get_steps_for_batch(self, batch_size: int) -> int: ...

    def on_verify_complete(
        self,
        num_correct_drafts_per_req: Sequence[int],
        batch_size: int,
        executed_steps: int | None = None,
    ) -> int | None: ...


class DecisionReason(enum.IntEnum):
    """Why a slot's step count is what it is: the last rule that looked at it."""

    NONE = 0
    EMPTY = 1
    STALE = 2
    WARMUP = 3
    INTERVAL = 4
    DWELL = 5
    HOLD = 6
    UP = 7
    DOWN = 8
    CEILING = 9
    PROBE = 10
    BACKOFF = 11


class AdaptiveStepSlot:
    """Chooses the draft steps for one range of batch sizes.

    Args:
        initial_steps: where to begin; a slot that lacks it begins at its middle candidate.
        cfg: the slot's knobs, as in a config file's entry, or a `SlotConfig`.

    Attributes:
        candidate_steps: ascending list of the steps to choose from.
        current_steps: the steps in force.
        ema_accept_len: moving average of accepted drafts per request, bonus excluded.
        reason: the rule that decided last.
        num_switches, num_stale: switches so far, and samples dropped because they ran with other
            steps.

    Raises:
        ValueError: bad `initial_steps` or `cfg`.
    """

    def __init__(self, initial_steps: int, cfg: SlotConfig | Mapping[str, Any]):
        config = cfg if isinstance(cfg, SlotConfig) else slot_config(cfg)
        if (
            isinstance(initial_steps, bool)
            or not isinstance(initial_steps, int)
            or initial_steps < 0
        ):
            raise ValueError(
                f"`initial_steps` must be an integer of at least 0, got {initial_steps!r}"
            )
        self.candidate_steps = list(config.candidate_steps)
        self.up_hysteresis = config.up_hysteresis
        self.down_hysteresis = config.down_hysteresis
        self.ceiling_coeff = config.ceiling_coeff
        self.ema_alpha = config.ema_alpha
        self.update_interval = config.update_interval
        self.warmup_batches = config.warmup_batches
        self.min_dwell = config.min_dwell
        self.probe_backoff = config.probe_backoff
        self.reset_ema_on_switch = config.reset_ema_on_switch

        steps = self.candidate_steps
        self.current_steps = initial_steps if initial_steps in steps else steps[len(steps) // 2]
        self.ema_accept_len = float(self.current_steps - 1)
        self.reason = DecisionReason.NONE
        self.num_switches = 0
        self.num_stale = 0
        self._batch_count = 0
        self._last_switch = 0
        # Decision points between two probes of step 0, how many of them are left to sit out, and
        # whether the steps in force are a probe that no later decision has confirmed yet.
        self._probe_wait = 1
        self._probe_left = 0
        self._probing = False

    def update(
        self, num_correct_drafts_per_req: Sequence[int], executed_steps: int | None = None
    ) -> bool:
        """Take in the counts of one batch; True if that changed `current_steps`.

        Args:
            num_correct_drafts_per_req: accepted drafts of each live request, bonus excluded: a
                list, a tuple, or a CPU tensor or array of integers. Empty: nothing happens.
            executed_steps: the steps that the batch ran with, where known. A sample of other steps
                than the current ones is dropped: it says nothing about these, and crediting it
                makes late feedback oscillate.

        Raises:
            TypeError: a count, or `executed_steps`, is not an integer.
            ValueError: a count is negative or above `executed_steps`. Nothing is changed then.
        """
        total, num_reqs = sum_accepted(num_correct_drafts_per_req, executed_steps)
        if num_reqs == 0:
            self.reason = DecisionReason.EMPTY
            return False
        if executed_steps is not None and executed_steps != self.current_steps:
            self.num_stale += 1
            self.reason = DecisionReason.STALE
            return False
        if self.current_steps > 0:
            alpha = self.ema_alpha
            self.ema_accept_len = (1.0 - alpha) * self.ema_accept_len + alpha * (total / num_reqs)
        self._batch_count += 1
        waiting = self._why_not_now()
        if waiting is not None:
            self.reason = waiting
            return False
        return self._decide()

    def status(self) -> dict[str, Any]:
        """What an operator wants to see of this slot."""
        return {
            "speculative_num_steps": self.current_steps,
            "ema_accept_len": self.ema_accept_len,
            "batch_count": self._batch_count,
            "num_switches": self.num_switches,
            "num_stale": self.num_stale,
            "reason": self.reason.name.lower(),
        }

    def _why_not_now(self) -> DecisionReason | None:
        past_warmup = self._batch_count - self.warmup_batches
        if past_warmup <= 0:
            return DecisionReason.WARMUP
        if past_warmup % self.update_interval:
            return DecisionReason.INTERVAL
        if self.num_switches and self._batch_count - self._last_switch < self.min_dwell:
            return DecisionReason.DWELL
        return None

    def _decide(self) -> bool:
        old_index = self.candidate_steps.index(self.current_steps)
        at_zero = self.current_steps == 0
        index, self.reason = self._from_zero(old_index) if at_zero else self._from_ema(old_index)
        new_steps = self.candidate_steps[index]
        if not at_zero:
            self._track_probe(new_steps)
        if index == old_index:
            return False
        self.current_steps = new_steps
        self.num_switches += 1
        self._last_switch = self._batch_count
        if self.reset_ema_on_switch:
            # Acceptance seen at more steps is on a scale that the new ones cannot reach.
            self.ema_accept_len = min(self.ema_accept_len, float(new_steps - 1))
        return True

    def _from_zero(self, index: int) -> tuple[int, DecisionReason]:
        """Without drafts nothing is learnt, so the only way to find out is to draft again."""
        if len(self.candidate_steps) == 1:
            return index, DecisionReason.HOLD
        if self._probe_left > 0:
            self._probe_left -= 1
            return index, DecisionReason.BACKOFF
        self._probing = True
        if self.ema_accept_len < 0:
            # The slot began at 0 and has no history: a neutral start for the steps probed.
            self.ema_accept_len = float(self.candidate_steps[index + 1] - 1)
        return index + 1, DecisionReason.PROBE

    def _from_ema(self, old_index: int) -> tuple[int, DecisionReason]:
        steps = self.candidate_steps
        ema = self.ema_accept_len
        index, reason = old_index, DecisionReason.HOLD
        while index > 0 and ema <= self._fall_at(steps[index - 1]):
            index -= 1
            reason = DecisionReason.DOWN
        if index == old_index:
            while index < len(steps) - 1 and ema > steps[index] - 0.5 + self.up_hysteresis:
                index += 1
                reason = DecisionReason.UP
        if self.ceiling_coeff > 0 and index <= old_index:
            # Bounded first: no candidate is larger, and an overflown product has no ceiling.
            ceiling = math.ceil(min(max(ema * self.ceiling_coeff, 1.0), float(MAX_STEPS)))
            while index > 0 and steps[index] > ceiling:
                index -= 1
                reason = DecisionReason.CEILING
        return index, reason

    def _fall_at(self, lower: int) -> float:
        return (0.5 if lower == 0 else lower - 0.5) + self.down_hysteresis

    def _track_probe(self, new_steps: int) -> None:
        """A probe that falls back to 0 at once makes the next one wait longer; staying ends it."""
        if new_steps > 0:
            self._probe_wait = 1
        elif self._probing:
            self._probe_wait = min(self._probe_wait * self.probe_backoff, _MAX_PROBE_WAIT)
            self._probe_left = self._probe_wait - 1
        self._probing = False


class AdaptiveSpeculativeParams:
    """A slot for each range of batch sizes; a policy for `AdaptiveController`.

    Args:
        initial_steps: where slots begin that have it among their candidates; others begin at their
            middle candidate.
        cfg_path: path of a JSON config, a mapping in its shape, an `AdaptiveConfig`, or None for
            the built-in table.

    Raises:
        ValueError: bad `initial_steps` or config.
    """

    def __init__(
        self,
        initial_steps: int,
        cfg_path: AdaptiveConfig | Mapping[str, Any] | str | os.PathLike | None = None,
    ):
        self.config = load_adaptive_config(cfg_path)
        self.router = BatchRouter(self.config)
        self._bs_list = [slot.batch_size for slot in self.config.slots]
        self._slots = {
            slot.batch_size: AdaptiveStepSlot(initial_steps, slot) for slot in self.config.slots
        }

    @property
    def candidate_steps(self) -> list[int]:
        """Every step count that some slot can choose, ascending."""
        return list(self.config.candidate_steps)

    def set_cuda_graph_bs(self, cuda_graph_bs: Sequence[int] | None) -> None:
        """Set the batch sizes that graphs are captured for; batches are padded up to them first.

        Raises:
            ValueError: a size is not a positive integer. Nothing is changed then.
        """
        self.router.set_cuda_graph_bs(cuda_graph_bs)

    def get_steps_for_batch(self, batch_size: int) -> int:
        """The steps that a round of this batch size uses.

        Changes nothing, unless the config has `slot_debounce`: then each call stands for one round.
        """
        slot = self._bs_list[self.router.active_slot_index(batch_size)]
        return self._slots[slot].current_steps

    def on_verify_complete(
        self,
        num_correct_drafts_per_req: Sequence[int],
        batch_size: int,
        executed_steps: int | None = None,
    ) -> int | None:
        """Feed a round's counts to the slot of its batch size.

        Args and errors as for `AdaptiveStepSlot.update`.

        Returns:
            The slot's new steps if they changed, else None. They are not put to use here: the next
            batch may belong to another slot.
        """
        slot = self._route(batch_size)
        changed = slot.update(num_correct_drafts_per_req, executed_steps)
        return slot.current_steps if changed else None

    def candidate_steps_for_batch(self, batch_size: int) -> list[int]:
        """Every step count that a round of this size can be asked to run, ascending."""
        return self.router.candidate_steps_for_batch(batch_size)

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """The captured batch sizes whose slot can choose `step`; None where no graphs are used."""
        return self.router.cuda_graph_bs_for_step(step)

    def status(self) -> list[dict[str, Any]]:
        """What an operator wants to see of each slot, ascending by batch size."""
        return [{"batch_size": size, **slot.status()} for size, slot in self._slots.items()]

    def _route(self, batch_size: int) -> AdaptiveStepSlot:
        return self._slots[self._bs_list[self.router.slot_index(batch_size)]]


def sum_accepted(counts: Sequence[int], executed_steps: int | None = None) -> tuple[int, int]:
    """Sum and number of one batch's accepted-draft counts, checked.

    Raises:
        TypeError: `executed_steps` or a count is not an integer (a bool is not).
        ValueError: a count is negative, or above `executed_steps` (above 64 where that is None).
    """
    if hasattr(counts, "tolist"):
        counts = counts.tolist()
    if executed_steps is None:
        most = MAX_STEPS
    elif type(executed_steps) is int and executed_steps >= 0:
        most = executed_steps
    else:
        most = _as_int("executed_steps", executed_steps)
        if most < 0:
            raise ValueError(f"`executed_steps` must be at least 0, got {most}")
    if not counts:
        return 0, 0
    if set(map(type, counts)) != {int}:
        counts = [_as_int("num_correct_drafts_per_req", count) for count in counts]
    if min(counts) < 0 or max(counts) > most:
        index, count = next((i, c) for i, c in enumerate(counts) if not 0 <= c <= most)
        limit = f"`executed_steps` = {most}" if executed_steps is not None else str(most)
        raise ValueError(
            f"`num_correct_drafts_per_req` must hold accepted drafts from 0 to {limit} "
            f"(bonus token excluded), got {count} at index {index}"
        )
    return sum(counts), len(counts)


def _as_int(name: str, value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError(f"`{name}` must be an integer or hold integers, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"`{name}` must be an integer or hold integers, got {value!r}") from None


def _load_adaptive_config(
    cfg_path: Mapping[str, Any] | str | os.PathLike | None = None,
) -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """The checked config as written: the whole table, and its entries by batch size.

    The shape that unit tests of SGLang's adaptive speculation use; `load_adaptive_config` returns
    the resolved config.
    """
    load_adaptive_config(cfg_path)
    raw, _ = read_raw_config(cfg_path)
    return dict(raw), {int(key): entry for key, entry in raw.items() if key.isdigit()}


def resolve_candidate_steps_from_config(
    cfg_path: Mapping[str, Any] | str | os.PathLike | None = None,
) -> list[int]:
    """`resolve_candidate_steps` under the name and parameter that SGLang uses."""
    return resolve_candidate_steps(cfg_path)
