"""The fixes of the plain EMA policy's known weaknesses, each off by default."""

import pytest

from adaptive_spec.config import SlotConfig, crossing_thresholds
from adaptive_spec.step_policy import AdaptiveStepSlot, DecisionReason

EAGER = {"ema_alpha": 1.0, "warmup_batches": 0, "update_interval": 1}


def make(initial_steps, candidate_steps, **knobs):
    return AdaptiveStepSlot(initial_steps, {"candidate_steps": candidate_steps, **EAGER, **knobs})


def switches_with_late_feedback(*, tagged):
    """Everything is accepted; each round's counts arrive after the next one was launched."""
    slot = make(0, [0, 3])
    switches, in_flight = 0, None
    for _ in range(200):
        ran = slot.current_steps
        if in_flight is not None:
            switches += slot.update([in_flight], in_flight if tagged else None)
        in_flight = ran
    return switches


def test_late_feedback_oscillates_only_when_it_is_not_tagged():
    assert switches_with_late_feedback(tagged=False) == 199
    assert switches_with_late_feedback(tagged=True) == 1


def test_a_stale_sample_moves_neither_ema_nor_count():
    slot = make(3, [1, 3])
    assert slot.update([0], executed_steps=3)
    before = (slot.current_steps, slot.ema_accept_len, slot._batch_count)
    assert slot.update([3], executed_steps=3) is False
    assert (slot.current_steps, slot.ema_accept_len, slot._batch_count) == before == (1, 0.0, 1)
    assert (slot.reason, slot.num_stale) == (DecisionReason.STALE, 1)


def test_min_dwell_bounds_the_switches_of_alternating_samples():
    """Samples that alternate between all and nothing: 200 switches without, at most 5 with."""

    def switches(**knobs):
        slot = make(3, [1, 3], down_hysteresis=0.0, **knobs)
        return sum(slot.update([0 if i % 2 == 0 else 2]) for i in range(200))

    assert switches() == 200
    assert switches(min_dwell=50) <= 5


def test_min_dwell_skips_decisions_until_enough_batches_have_passed():
    slot = make(3, [1, 3], down_hysteresis=0.0, min_dwell=3)
    assert slot.update([0]), "the first switch has nothing to wait for"
    reasons = []
    while not slot.update([1]):
        reasons.append(slot.reason)
    assert reasons == [DecisionReason.DWELL] * 2
    assert slot._batch_count == 4


def test_crossing_thresholds_ping_pong_and_are_reported():
    knobs = {"up_hysteresis": -0.1, "down_hysteresis": 0.25}
    slot = make(3, [1, 3], **{**knobs, "ema_alpha": 0.5})
    assert sum(slot.update([1, 0, 1]) for _ in range(200)) == 197
    (message,) = crossing_thresholds(SlotConfig(1, (1, 3), **knobs))
    assert message.startswith("BS 1: up_hysteresis -0.1 lies below down_hysteresis 0.25")
    assert "above 0.4 and up to 0.75 switches between 1 and 3 steps" in message


@pytest.mark.parametrize("steps", [(1, 3), (1, 2, 3), (0, 1, 3), (0, 2, 5), (2, 4), (0, 3), (5,)])
@pytest.mark.parametrize("up", [-1.5, -0.5, -0.1, 0.0, 0.5])
@pytest.mark.parametrize("down", [-1.5, -0.25, 0.0, 0.25, 1.5])
def test_the_crossing_report_is_exact(steps, up, down):
    """A pair is reported just when some reachable, unmoving EMA switches back and forth over it."""
    config = SlotConfig(1, steps, up, down, ema_alpha=1e-300, update_interval=1, warmup_batches=0)
    found = set()
    for eighth in range(8 * steps[-1] + 1):
        slot = AdaptiveStepSlot(steps[-1], config)
        slot.ema_accept_len = eighth / 8 + 1 / 16
        seen = []
        for _ in range(12):
            slot.update([0])
            seen.append(slot.current_steps)
        cycle = set(seen[-4:])
        if len(cycle) > 1 and 0 not in cycle:
            found.add((min(cycle), max(cycle)))
    reported = crossing_thresholds(config)
    neighbours = list(zip(steps, steps[1:], strict=False))
    claimed = {
        pair
        for pair in neighbours
        if any(f"between {pair[0]} and {pair[1]} steps" in m for m in reported)
    }
    assert bool(found) == bool(claimed)
    assert found & set(neighbours) <= claimed


def test_probe_backoff_spaces_failed_probes_geometrically():
    def probes(**knobs):
        slot = make(3, [0, 3], down_hysteresis=0.0, **knobs)
        rounds = []
        for number in range(200):
            slot.update([0])
            if slot.reason is DecisionReason.PROBE:
                rounds.append(number)
        return rounds

    assert len(probes()) == 100, "without it half of all rounds are failed probes"
    backed_off = probes(probe_backoff=2)
    gaps = [late - early for early, late in zip(backed_off, backed_off[1:], strict=False)]
    assert gaps == [3, 5, 9, 17, 33, 65]


def test_a_confirmed_probe_ends_the_back_off():
    slot = make(3, [0, 3], down_hysteresis=0.0, probe_backoff=4)

    def rounds_at_zero():
        count = 0
        while slot.current_steps == 0:
            slot.update([0])
            count += 1
        return count

    slot.update([0])
    assert rounds_at_zero() == 1
    slot.update([0])
    assert rounds_at_zero() == 4
    slot.update([3])
    assert slot.current_steps == 3
    slot.update([0])
    assert rounds_at_zero() == 1, "a fresh fall to 0 is not a failed probe"


def test_the_wait_for_a_probe_is_bounded():
    slot = make(0, [0, 1], probe_backoff=2**31 - 1)
    longest = waited = 0
    for _ in range(9000):
        slot.update([0])
        waited = waited + 1 if slot.current_steps == 0 else 0
        longest = max(longest, waited)
    assert longest == 4096


def test_reset_ema_on_switch_keeps_the_ema_on_the_new_scale():
    """Without it, an EMA near 6 that the ceiling sends from 15 to 3 steps bounces straight back."""

    def run(**knobs):
        slot = make(15, [1, 3, 15], ema_alpha=0.2, ceiling_coeff=2.0, **knobs)
        slot.ema_accept_len = 5.9
        steps = [slot.current_steps]
        for accepted in (6, 2, 2):
            slot.update([accepted])
            steps.append(slot.current_steps)
        return steps

    assert run() == [15, 3, 15, 3]
    assert run(reset_ema_on_switch=True) == [15, 3, 3, 3]


def test_reset_ema_on_switch_never_raises_the_ema():
    slot = make(1, [1, 3, 7], reset_ema_on_switch=True)
    slot.update([1])
    assert (slot.current_steps, slot.ema_accept_len) == (3, 1.0)
