"""The decision ring: a read gives exactly the round asked for, or says why it cannot."""

import threading

import pytest
import torch

from adaptive_spec import ops
from adaptive_spec.ring import DecisionRing, RingOverrunError, RingTimeoutError
from adaptive_spec.state import AdaptiveState
from adaptive_spec.step_policy import DecisionReason

CONFIG = {
    "1": {"candidate_steps": [1, 3]},
    "8": {"candidate_steps": [0, 2]},
    "ema_alpha": 1.0,
    "warmup_batches": 0,
    "update_interval": 1,
}


def make_state(depth: int = 8) -> AdaptiveState:
    return AdaptiveState(CONFIG, initial_steps=3, ring_depth=depth)


def run_round(state: AdaptiveState, counts: list[int], slot: int, steps: int) -> None:
    ops.update_and_select(
        torch.tensor(counts, dtype=torch.int32), state, slot=slot, speculative_num_steps=steps
    )


def test_rounds_before_the_first_hold_the_starting_steps():
    state = make_state()
    for round_ in (-8, -2, -1):
        assert state.ring.read(round_, 0).speculative_num_steps == 3
        assert state.ring.read(round_, 1).speculative_num_steps == 2
    assert state.ring.read(0, 0) is None


def test_each_round_publishes_every_slot():
    state = make_state()
    run_round(state, [0, 0], slot=0, steps=3)
    run_round(state, [0], slot=1, steps=2)
    assert state.ring.read(0, 0).speculative_num_steps == 1
    assert state.ring.read(0, 0).reason == DecisionReason.DOWN
    assert state.ring.read(0, 1).speculative_num_steps == 2
    assert state.ring.read(1, 0).speculative_num_steps == 1
    assert state.ring.read(1, 1).speculative_num_steps == 0
    assert state.ring.latest(1).round == 1


def test_record_tells_what_the_round_observed():
    state = make_state()
    run_round(state, [3, 1, 2], slot=0, steps=3)
    record = state.ring.record(0)
    assert (record.slot, record.speculative_num_steps) == (0, 3)
    assert (record.num_correct_drafts, record.num_reqs) == (6, 3)
    assert state.ring.record(1) is None


def test_overrun_is_an_error_and_never_an_old_answer():
    state = make_state(depth=8)
    for _ in range(10):
        run_round(state, [1], slot=0, steps=1)
    assert state.ring.read(2, 0) is not None
    for round_ in (1, 0, -1):
        with pytest.raises(RingOverrunError, match=f"round {round_} was overwritten"):
            state.ring.read(round_, 0)
        with pytest.raises(RingOverrunError):
            state.ring.record(round_)


def test_round_numbers_wrap_at_32_bits():
    state = make_state(depth=8)
    saved = state.state_dict()
    saved["state"][3] = 2**32 - 2  # next_round, two rounds before the wrap
    state.load_state_dict(saved)
    assert state.next_round == 2**32 - 2
    for round_ in range(2**32 - 2, 2**32 + 2):
        assert state.ring.read(round_, 0) is None
        run_round(state, [1], slot=0, steps=3)
        assert state.ring.read(round_, 0) is not None
    assert state.ring.read(2**32 - 3, 1).speculative_num_steps == 2


def test_wait_is_bounded_names_the_round_and_counts_the_stall():
    ring = make_state().ring
    with pytest.raises(RingTimeoutError, match="round 5 for slot 1"):
        ring.wait(5, 1, timeout_s=0.01)
    assert ring.stalls == 1
    assert isinstance(RingTimeoutError("x"), TimeoutError)


def test_wait_sees_a_decision_that_another_thread_publishes():
    state = make_state()
    late = threading.Timer(0.05, run_round, (state, [0], 0, 3))
    late.start()
    assert state.ring.wait(0, 0, timeout_s=5).speculative_num_steps == 1
    late.join()


def test_a_racing_reader_never_sees_a_torn_or_wrong_decision():
    """The writer's decision alternates, so a round's parity gives the only right answer."""
    state = make_state(depth=8)
    num_rounds, wrong, seen = 5_000, [], 0
    done = threading.Event()

    def write():
        for round_ in range(num_rounds):
            down = round_ % 2 == 0
            run_round(state, [0 if down else 1], slot=0, steps=3 if down else 1)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        for round_ in range(max(0, state.next_round - 4), state.next_round + 2):
            try:
                decision = state.ring.read(round_, 0)
                record = state.ring.record(round_)
            except RingOverrunError:
                continue
            if decision is None or record is None:
                continue
            seen += 1
            down = round_ % 2 == 0
            if decision.speculative_num_steps != (1 if down else 3) or (
                record.num_correct_drafts,
                record.speculative_num_steps,
            ) != ((0, 3) if down else (1, 1)):
                wrong.append((round_, decision, record))
    writer.join()
    assert not wrong
    assert seen > 0


@pytest.mark.parametrize("depth", [0, 4, 7, 12, -8])
def test_bad_depth_is_refused(depth):
    with pytest.raises(ValueError, match="`depth` must be a power of two"):
        DecisionRing(depth, 1)


@pytest.mark.parametrize("num_slots", [0, 17, -1])
def test_bad_slot_count_is_refused(num_slots):
    with pytest.raises(ValueError, match="`num_slots` must be from 1 to 16"):
        DecisionRing(8, num_slots)


@pytest.mark.parametrize("slot", [-1, 2, 10**6])
def test_reads_outside_the_slots_are_refused(slot):
    ring = make_state().ring
    for read in (lambda: ring.read(0, slot), lambda: ring.latest(slot), lambda: ring.wait(0, slot)):
        with pytest.raises(ValueError, match="`slot` must be from 0 to 1"):
            read()


def test_the_tensor_keeps_the_memory_alive():
    tensor = make_state().ring.tensor
    assert tensor.dtype == torch.int64
    tensor.add_(1)
