"""What holds for every config and every traffic."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_spec.config import SlotConfig
from adaptive_spec.metrics import AcceptanceStats
from adaptive_spec.step_policy import AdaptiveStepSlot, DecisionReason

HYSTERESIS = st.integers(-8, 8).map(lambda eighths: eighths / 8)
STEPS = st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True).map(
    lambda steps: tuple(sorted(steps))
)
SLOTS = st.builds(
    SlotConfig,
    batch_size=st.just(1),
    candidate_steps=STEPS,
    up_hysteresis=HYSTERESIS,
    down_hysteresis=HYSTERESIS,
    ceiling_coeff=st.sampled_from([0, 0.5, 1.5, 4]),
    ema_alpha=st.sampled_from([0.05, 0.2, 0.5, 1.0]),
    update_interval=st.integers(1, 4),
    warmup_batches=st.integers(0, 4),
    min_dwell=st.integers(0, 8),
    probe_backoff=st.integers(1, 4),
    reset_ema_on_switch=st.booleans(),
)
BATCHES = st.lists(st.lists(st.integers(0, 12), max_size=5), max_size=80)


def state_of(slot):
    return {name: value for name, value in vars(slot).items() if name != "reason"}


@settings(deadline=None)
@given(SLOTS, st.integers(0, 12), BATCHES)
def test_any_traffic_keeps_the_slot_in_range(config, initial_steps, batches):
    slot = AdaptiveStepSlot(initial_steps, config)
    for counts in batches:
        before, count = slot.current_steps, slot._batch_count
        counts = [min(c, before) for c in counts]
        changed = slot.update(counts, before)
        assert slot.current_steps in config.candidate_steps
        assert changed is (slot.current_steps != before)
        assert slot._batch_count == count + bool(counts)
        assert -1.0 <= slot.ema_accept_len <= max(config.candidate_steps)
        assert 0 <= slot._probe_left < slot._probe_wait <= 4096
        switching = {
            DecisionReason.UP: slot.current_steps > before,
            DecisionReason.DOWN: slot.current_steps < before,
            DecisionReason.CEILING: slot.current_steps < before,
            DecisionReason.PROBE: before == 0 < slot.current_steps,
        }
        assert switching.get(slot.reason, not changed)


@settings(deadline=None)
@given(SLOTS, st.integers(0, 12), BATCHES, st.integers(0, 12))
def test_empty_and_stale_batches_leave_no_trace(config, initial_steps, batches, other):
    plain = AdaptiveStepSlot(initial_steps, config)
    disturbed = AdaptiveStepSlot(initial_steps, config)
    for counts in batches:
        disturbed.update([])
        if other != disturbed.current_steps:
            disturbed.update([other, 0], executed_steps=other)
        plain.update(counts)
        disturbed.update(counts)
        assert {**state_of(disturbed), "num_stale": 0} == state_of(plain)


@settings(deadline=None)
@given(SLOTS, st.integers(0, 12), BATCHES, st.randoms(use_true_random=False))
def test_the_order_of_requests_does_not_matter(config, initial_steps, batches, random):
    one, other = AdaptiveStepSlot(initial_steps, config), AdaptiveStepSlot(initial_steps, config)
    for counts in batches:
        shuffled = random.sample(counts, len(counts))
        assert one.update(counts) == other.update(shuffled)
        assert one.ema_accept_len.hex() == other.ema_accept_len.hex()


@settings(deadline=None)
@given(
    steps=st.lists(st.integers(1, 12), min_size=1, max_size=6, unique=True),
    hysteresis=st.tuples(HYSTERESIS, HYSTERESIS).map(sorted),
    alpha=st.sampled_from([0.5, 1.0]),
    initial_steps=st.integers(0, 12),
    mean=st.integers(0, 12),
)
def test_constant_traffic_turns_around_at_most_once(steps, hysteresis, alpha, initial_steps, mean):
    """With sound thresholds a steady stream must not ping-pong.

    Step 0 (probes) and the ceiling switch back and forth by design, so they are left out; an alpha
    that is a power of two keeps the EMA's approach exactly monotone.
    """
    down, up = hysteresis
    config = SlotConfig(1, steps, up, down, ema_alpha=alpha, update_interval=1, warmup_batches=0)
    slot = AdaptiveStepSlot(initial_steps, config)
    directions = []
    for _ in range(60):
        before = slot.current_steps
        if slot.update([mean]):
            directions.append(slot.current_steps > before)
    assert sum(a != b for a, b in pairwise(directions)) <= 1


ROUNDS = st.lists(
    st.integers(0, 7).flatmap(
        lambda steps: st.tuples(st.just(steps), st.lists(st.integers(0, steps), max_size=6))
    ),
    max_size=30,
)


@settings(deadline=None)
@given(ROUNDS)
def test_acceptance_statistics_equal_a_count_by_hand(rounds):
    stats = AcceptanceStats()
    for steps, counts in rounds:
        stats.observe(counts, steps)
    flat = [(steps, count) for steps, counts in rounds for count in counts]
    assert stats.num_requests == len(flat)
    assert stats.num_proposed == sum(steps for steps, _ in flat)
    assert stats.num_accepted == sum(count for _, count in flat)
    assert 0 <= stats.accept_rate <= 1 and 0 <= stats.wasted_share <= 1
    for k, rate in enumerate(stats.position_rates(), start=1):
        able = [count for steps, count in flat if steps >= k]
        assert rate == sum(count >= k for count in able) / len(able)
    product = 1.0
    rates = stats.conditional_rates()
    for k, rate in enumerate(rates, start=1):
        reached = [count for steps, count in flat if steps >= k and count >= k - 1]
        assert rate == sum(count >= k for count in reached) / len(reached)
        product *= rate
    if flat and len({steps for steps, _ in flat}) == 1 and len(rates) == flat[0][0] > 0:
        assert product == pytest.approx(stats.position_rates()[-1])
