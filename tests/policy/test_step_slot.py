"""One slot: thresholds, warm-up, interval, probes, ceiling, and what it refuses."""

import numpy as np
import pytest
import torch

from adaptive_spec.config import AdaptiveConfigWarning
from adaptive_spec.step_policy import AdaptiveStepSlot, DecisionReason


def make(initial_steps=3, candidate_steps=(1, 3, 7), **knobs):
    """A slot that follows the newest batch and decides on every one, unless told otherwise."""
    cfg = {"ema_alpha": 1.0, "warmup_batches": 0, "update_interval": 1, **knobs}
    return AdaptiveStepSlot(initial_steps, {"candidate_steps": list(candidate_steps), **cfg})


def snapshot(slot):
    return {name: value for name, value in vars(slot).items() if name != "reason"}


def test_defaults_are_the_documented_ones():
    slot = AdaptiveStepSlot(initial_steps=3, cfg={"candidate_steps": [7, 3, 1, 3]})
    assert slot.candidate_steps == [1, 3, 7]
    assert (slot.ema_alpha, slot.update_interval, slot.warmup_batches) == (0.2, 5, 10)
    assert (slot.up_hysteresis, slot.down_hysteresis, slot.ceiling_coeff) == (0.0, -0.25, 0)
    assert (slot.current_steps, slot.ema_accept_len) == (3, 2.0)
    assert (slot._batch_count, slot.reason) == (0, DecisionReason.NONE)


@pytest.mark.parametrize(
    ("candidates", "start"), [([1, 3, 7], 3), ([1, 3], 3), ([2, 4, 6, 8], 6), ([5], 5), ([0], 0)]
)
def test_a_slot_without_the_initial_steps_starts_in_its_middle(candidates, start):
    slot = make(12, candidates)
    assert (slot.current_steps, slot.ema_accept_len) == (start, start - 1.0)


def test_ema_is_evaluated_in_the_documented_order():
    slot = make(ema_alpha=0.3, update_interval=100)
    ema = 2.0
    for counts in ([3, 1, 0], [2], [3, 3, 1, 0, 0, 1, 2]):
        slot.update(counts)
        ema = (1.0 - 0.3) * ema + 0.3 * (sum(counts) / len(counts))
        assert slot.ema_accept_len.hex() == ema.hex()


def test_decisions_fall_on_the_interval_after_the_warm_up_only():
    slot = make(7, warmup_batches=3, update_interval=4)
    reasons = []
    while not slot.update([0]):
        reasons.append(slot.reason)
    assert reasons == [DecisionReason.WARMUP] * 3 + [DecisionReason.INTERVAL] * 3
    assert (slot._batch_count, slot.current_steps, slot.reason) == (7, 1, DecisionReason.DOWN)


def test_an_empty_batch_counts_for_nothing():
    slot = make()
    before = snapshot(slot)
    for empty in ([], (), torch.empty(0, dtype=torch.int32), np.empty(0, dtype=np.int64)):
        assert slot.update(empty) is False
        assert snapshot(slot) == before
        assert slot.reason is DecisionReason.EMPTY


@pytest.mark.parametrize(
    ("start", "ema", "after", "reason"),
    [
        # down at or below 2.25 and 0.25; up above 0.5 and 2.5
        (7, 2.25, 3, "DOWN"),
        (7, 2.2500000000000004, 7, "HOLD"),
        (7, 0.25, 1, "DOWN"),
        (3, 0.25, 1, "DOWN"),
        (3, 0.25000000000000006, 3, "HOLD"),
        (3, 2.5, 3, "HOLD"),
        (3, 2.5000000000000004, 7, "UP"),
        (1, 0.5, 1, "HOLD"),
        (1, 0.5000000000000001, 3, "UP"),
        (1, 2.6, 7, "UP"),
        (7, 100.0, 7, "HOLD"),
        (1, -1.0, 1, "HOLD"),
    ],
)
def test_thresholds_are_exact(start, ema, after, reason):
    # An alpha this small leaves the EMA where it was put.
    slot = make(start, ema_alpha=1e-300)
    slot.ema_accept_len = ema
    assert slot.update([0]) is (after != start)
    assert slot.current_steps == after
    assert slot.reason is DecisionReason[reason]


def test_a_batch_that_moved_down_does_not_move_up_in_the_same_decision():
    slot = make(7, [1, 3, 7], up_hysteresis=-3.0, down_hysteresis=0.0, ema_alpha=1e-300)
    slot.ema_accept_len = 0.2
    slot.update([0])
    assert (slot.current_steps, slot.reason) == (1, DecisionReason.DOWN)


def test_zero_is_left_by_a_probe_and_reached_when_nothing_is_accepted():
    slot = make(3, [0, 3], down_hysteresis=0.0)
    assert slot.update([0, 0])
    assert (slot.current_steps, slot.reason) == (0, DecisionReason.DOWN)
    assert slot.update([0, 0])
    assert (slot.current_steps, slot.reason) == (3, DecisionReason.PROBE)
    assert slot.ema_accept_len == 0.0
    assert slot.update([1, 0])
    assert slot.current_steps == 0, "0.5 accepted is at the threshold next to 0"


def test_a_slot_that_starts_at_zero_probes_with_a_neutral_ema():
    slot = make(0, [0, 3, 5])
    assert slot.ema_accept_len == -1.0
    assert slot.update([0])
    assert (slot.current_steps, slot.ema_accept_len) == (3, 2.0)


def test_a_slot_that_can_only_be_zero_stays_there():
    slot = make(0, [0])
    assert not any(slot.update([0]) for _ in range(20))
    assert (slot.current_steps, slot.ema_accept_len, slot.reason) == (0, -1.0, DecisionReason.HOLD)
    assert slot._batch_count == 20


def test_rounds_without_drafts_teach_nothing():
    slot = make(3, [0, 3], down_hysteresis=0.0, update_interval=2)
    slot.update([0])
    slot.update([0])
    assert slot.current_steps == 0
    slot.update([0] * 5, executed_steps=0)
    assert (slot.ema_accept_len, slot._batch_count) == (0.0, 3)


def test_the_ceiling_caps_but_never_blocks_a_rise():
    slot = make(7, ceiling_coeff=1.0, down_hysteresis=-5.0)
    assert slot.update([2])
    assert (slot.current_steps, slot.reason) == (1, DecisionReason.CEILING)
    assert slot.update([1])
    assert (slot.current_steps, slot.reason) == (3, DecisionReason.UP)


def test_the_ceiling_is_never_below_one_step():
    slot = make(3, [0, 1, 3], ceiling_coeff=0.1, down_hysteresis=-5.0)
    assert slot.update([0])
    assert slot.current_steps == 1


def test_a_huge_ceiling_coefficient_is_no_ceiling():
    slot = make(7, ceiling_coeff=1.7e308)
    slot.ema_accept_len = 6.0
    assert not slot.update([7])


@pytest.mark.parametrize(
    "counts",
    [
        (3, 1),
        torch.tensor([3, 1], dtype=torch.int32),
        np.array([3, 1]),
        [np.int64(3), np.int32(1)],
        [torch.tensor(3), torch.tensor(1)],
    ],
    ids=["tuple", "tensor", "array", "numpy scalars", "tensor scalars"],
)
def test_counts_may_come_in_any_container_of_integers(counts):
    slot = make()
    slot.update(counts, executed_steps=3)
    assert slot.ema_accept_len == 2.0


@pytest.mark.parametrize(
    ("counts", "executed", "error", "words"),
    [
        ([1, -1], 3, ValueError, "from 0 to `executed_steps` = 3.* got -1 at index 1"),
        ([4], 3, ValueError, "got 4 at index 0"),
        ([1], 0, ValueError, "from 0 to `executed_steps` = 0"),
        ([65], None, ValueError, "from 0 to 64"),
        ([10**400], None, ValueError, "from 0 to 64"),
        ([True, 1], 3, TypeError, "must be an integer or hold integers, got True"),
        ([1.0], 3, TypeError, "got 1.0"),
        ([float("nan")], 3, TypeError, "got nan"),
        (["1"], 3, TypeError, "got '1'"),
        ([None], 3, TypeError, "got None"),
        (torch.tensor([1.0]), 3, TypeError, "got 1.0"),
        (torch.tensor([True]), 3, TypeError, "got True"),
        ([1], -1, ValueError, "`executed_steps` must be at least 0, got -1"),
        ([1], 3.0, TypeError, "`executed_steps` must be an integer"),
        ([1], True, TypeError, "`executed_steps` must be an integer"),
        ([], "3", TypeError, "`executed_steps` must be an integer"),
    ],
)
def test_bad_counts_are_refused_before_anything_changes(counts, executed, error, words):
    slot = make()
    slot.update([3, 2])
    before, reason = snapshot(slot), slot.reason
    with pytest.raises(error, match=words):
        slot.update(counts, executed)
    assert (snapshot(slot), slot.reason) == (before, reason)


@pytest.mark.parametrize("initial_steps", [True, 1.0, "3", None, -1])
def test_initial_steps_must_be_a_step_count(initial_steps):
    with pytest.raises(ValueError, match="`initial_steps` must be an integer of at least 0"):
        AdaptiveStepSlot(initial_steps, {"candidate_steps": [1, 3]})


def test_reasons_have_the_numbers_that_the_device_writes():
    names = "NONE EMPTY STALE WARMUP INTERVAL DWELL HOLD UP DOWN CEILING PROBE BACKOFF"
    assert " ".join(reason.name for reason in DecisionReason) == names
    assert [int(reason) for reason in DecisionReason] == list(range(12))


def test_unknown_knobs_of_a_slot_warn_at_the_caller():
    with pytest.warns(AdaptiveConfigWarning, match="did you mean 'ema_alpha'") as caught:
        AdaptiveStepSlot(3, {"candidate_steps": [1, 3], "ema_alfa": 0.3})
    assert caught[0].filename == __file__
