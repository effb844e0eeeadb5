"""The `ema` step policy: twin of csrc/core/ema_policy.h, which says why each rule is there.

All of it runs in one program, on scalars; binary64 operations in the core's order, launched without
contraction.
"""

import triton
import triton.language as tl
from adaptive_spec_ext import _C

from adaptive_spec.step_policy import DecisionReason

from . import layout
from .tensors import float64_at, int32_at

MAX_PROBE_WAIT = tl.constexpr(_C.MAX_PROBE_WAIT)

EMPTY = tl.constexpr(int(DecisionReason.EMPTY))
STALE = tl.constexpr(int(DecisionReason.STALE))
WARMUP = tl.constexpr(int(DecisionReason.WARMUP))
INTERVAL = tl.constexpr(int(DecisionReason.INTERVAL))
DWELL = tl.constexpr(int(DecisionReason.DWELL))
HOLD = tl.constexpr(int(DecisionReason.HOLD))
UP = tl.constexpr(int(DecisionReason.UP))
DOWN = tl.constexpr(int(DecisionReason.DOWN))
CEILING = tl.constexpr(int(DecisionReason.CEILING))
PROBE = tl.constexpr(int(DecisionReason.PROBE))
BACKOFF = tl.constexpr(int(DecisionReason.BACKOFF))


@triton.jit
def steps_at(config, index):
    return tl.load(int32_at(config, layout.CANDIDATE_STEPS + index))


@triton.jit
def _steps_below(config, index):
    """Of the candidate before; the first has none and gives its own, which no loop then uses."""
    return steps_at(config, tl.maximum(index - 1, 0))


@triton.jit
def _initial_ema(steps):
    return steps.to(tl.float64) - 1.0


@triton.jit
def _down_threshold(config, lower):
    midpoint = tl.where(lower == 0, tl.full([], 0.5, tl.float64), lower.to(tl.float64) - 0.5)
    return midpoint + tl.load(float64_at(config, layout.DOWN_HYSTERESIS))


@triton.jit
def _up_threshold(config, steps):
    return steps.to(tl.float64) - 0.5 + tl.load(float64_at(config, layout.UP_HYSTERESIS))


@triton.jit
def _decide_at_zero(config, slot, old_index):
    """The new index and why; writes the slot's probe counters."""
    index = old_index
    reason = tl.full([], HOLD, tl.int32)
    if tl.load(int32_at(config, layout.NUM_CANDIDATES)) > 1:
        left = tl.load(int32_at(slot, layout.PROBE_LEFT))
        if left > 0:
            tl.store(int32_at(slot, layout.PROBE_LEFT), left - 1)
            reason = tl.full([], BACKOFF, tl.int32)
        else:
            index = old_index + 1
            reason = tl.full([], PROBE, tl.int32)
            tl.store(int32_at(slot, layout.PROBING), 1)
    return index, reason


@triton.jit
def _decide_by_ema(config, ema, old_index):
    index = old_index
    reason = tl.full([], HOLD, tl.int32)
    while (index > 0) & (ema <= _down_threshold(config, _steps_below(config, index))):
        index -= 1
        reason = tl.full([], DOWN, tl.int32)
    if index == old_index:
        last = tl.load(int32_at(config, layout.NUM_CANDIDATES)) - 1
        while (index < last) & (ema > _up_threshold(config, steps_at(config, index))):
            index += 1
            reason = tl.full([], UP, tl.int32)
    coeff = tl.load(float64_at(config, layout.CEILING_COEFF))
    if (coeff > 0.0) & (index <= old_index):
        ceiling = tl.ceil(ema * coeff)
        ceiling = tl.where(ceiling > 1.0, ceiling, tl.full([], 1.0, tl.float64))
        while (index > 0) & (steps_at(config, index).to(tl.float64) > ceiling):
            index -= 1
            reason = tl.full([], CEILING, tl.int32)
    return index, reason


@triton.jit
def _track_probe(config, slot, new_steps):
    if new_steps > 0:
        tl.store(int32_at(slot, layout.PROBE_WAIT), 1)
    elif tl.load(int32_at(slot, layout.PROBING)) != 0:
        wait = tl.load(int32_at(slot, layout.PROBE_WAIT)).to(tl.int64)
        wait = tl.minimum(wait * tl.load(config + layout.PROBE_BACKOFF), MAX_PROBE_WAIT)
        tl.store(int32_at(slot, layout.PROBE_WAIT), wait.to(tl.int32))
        tl.store(int32_at(slot, layout.PROBE_LEFT), wait.to(tl.int32) - 1)
    tl.store(int32_at(slot, layout.PROBING), 0)


@triton.jit
def _decide(config, slot, old_index, ema, batch_count):
    """The new index, the new EMA and why."""
    index = old_index
    reason = tl.full([], WARMUP, tl.int32)
    past_warmup = batch_count - tl.load(config + layout.WARMUP_BATCHES)
    if past_warmup > 0:
        num_switches = tl.load(slot + layout.NUM_SWITCHES)
        since_switch = batch_count - tl.load(slot + layout.LAST_SWITCH)
        if past_warmup % tl.load(config + layout.UPDATE_INTERVAL) != 0:
            reason = tl.full([], INTERVAL, tl.int32)
        elif (num_switches > 0) & (since_switch < tl.load(config + layout.MIN_DWELL)):
            reason = tl.full([], DWELL, tl.int32)
        else:
            if steps_at(config, old_index) == 0:
                index, reason = _decide_at_zero(config, slot, old_index)
                if (index != old_index) & (ema < 0.0):
                    ema = _initial_ema(steps_at(config, index))
            else:
                index, reason = _decide_by_ema(config, ema, old_index)
                _track_probe(config, slot, steps_at(config, index))
            if index != old_index:
                tl.store(slot + layout.LAST_SWITCH, batch_count)
                tl.store(slot + layout.NUM_SWITCHES, num_switches + 1)
                start = _initial_ema(steps_at(config, index))
                resets = tl.load(int32_at(config, layout.RESET_EMA_ON_SWITCH)) != 0
                if resets & (ema > start):
                    ema = start
    return index, ema, reason


@triton.jit
def observe(config, slot, executed_steps, accepted, num_reqs):
    """Takes one batch's observation into a slot.

    config, slot: the slot's records, int64 pointers. executed_steps: int32, what the batch ran
    with. accepted, num_reqs: int64, drafts accepted by how many requests. Returns the slot's steps
    and reason, int32.
    """
    old_index = tl.load(int32_at(slot, layout.INDEX))
    steps = steps_at(config, old_index)
    index = old_index
    reason = tl.full([], EMPTY, tl.int32)
    if num_reqs > 0:
        if executed_steps != steps:
            tl.store(slot + layout.NUM_STALE, tl.load(slot + layout.NUM_STALE) + 1)
            reason = tl.full([], STALE, tl.int32)
        else:
            ema = tl.load(float64_at(slot, layout.EMA))
            if steps > 0:
                alpha = tl.load(float64_at(config, layout.EMA_ALPHA))
                mean = accepted.to(tl.float64) / num_reqs.to(tl.float64)
                kept = (1.0 - alpha) * ema
                added = alpha * mean
                ema = kept + added
            batch_count = tl.load(slot + layout.BATCH_COUNT) + 1
            index, ema, reason = _decide(config, slot, old_index, ema, batch_count)
            tl.store(slot + layout.BATCH_COUNT, batch_count)
            tl.store(float64_at(slot, layout.EMA), ema)
            tl.store(int32_at(slot, layout.INDEX), index)
    tl.store(int32_at(slot, layout.REASON), reason)
    return steps_at(config, index), reason
