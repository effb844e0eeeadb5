"""The decision ring: a read gives exactly the round asked for, or says why it cannot."""

import gc
import os
import resource
import sys
import threading

import pytest
import torch

from adaptive_spec import ops
from adaptive_spec.extension import _C
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


def make_state(device: str, depth: int = 8) -> AdaptiveState:
    return AdaptiveState(CONFIG, initial_steps=3, device=device, ring_depth=depth)


def run_round(state: AdaptiveState, counts: list[int], slot: int, steps: int) -> None:
    """A round whose decision has arrived when this returns."""
    ops.update_and_select(
        torch.tensor(counts, dtype=torch.int32, device=state.device),
        state,
        slot=slot,
        speculative_num_steps=steps,
    )
    if state.device.type == "cuda":
        torch.cuda.synchronize(state.device)


def test_rounds_before_the_first_hold_the_starting_steps(device):
    state = make_state(device)
    for round_ in (-8, -2, -1):
        assert state.ring.read(round_, 0).speculative_num_steps == 3
        assert state.ring.read(round_, 1).speculative_num_steps == 2
    assert state.ring.read(0, 0) is None


def test_each_round_publishes_every_slot(device):
    state = make_state(device)
    run_round(state, [0, 0], slot=0, steps=3)
    run_round(state, [0], slot=1, steps=2)
    assert state.ring.read(0, 0).speculative_num_steps == 1
    assert state.ring.read(0, 0).reason == DecisionReason.DOWN
    assert state.ring.read(0, 1).speculative_num_steps == 2
    assert state.ring.read(1, 0).speculative_num_steps == 1
    assert state.ring.read(1, 1).speculative_num_steps == 0
    assert state.ring.latest(1).round == 1


def test_record_tells_what_the_round_observed(device):
    state = make_state(device)
    run_round(state, [3, 1, 2], slot=0, steps=3)
    record = state.ring.record(0)
    assert (record.slot, record.speculative_num_steps) == (0, 3)
    assert (record.num_correct_drafts, record.num_reqs) == (6, 3)
    assert state.ring.record(1) is None


def test_overrun_is_an_error_and_never_an_old_answer(device):
    state = make_state(device, depth=8)
    for _ in range(10):
        run_round(state, [1], slot=0, steps=1)
    assert state.ring.read(2, 0) is not None
    for round_ in (1, 0, -1):
        with pytest.raises(RingOverrunError, match=f"round {round_} was overwritten"):
            state.ring.read(round_, 0)
        with pytest.raises(RingOverrunError):
            state.ring.record(round_)


def test_round_numbers_wrap_at_32_bits(device):
    state = make_state(device, depth=8)
    saved = state.state_dict()
    saved["state"][3] = 2**32 - 2  # next_round, two rounds before the wrap
    state.load_state_dict(saved)
    assert state.next_round == 2**32 - 2
    for round_ in range(2**32 - 2, 2**32 + 2):
        assert state.ring.read(round_, 0) is None
        run_round(state, [1], slot=0, steps=3)
        assert state.ring.read(round_, 0) is not None
    assert state.ring.read(2**32 - 3, 1).speculative_num_steps == 2


def test_wait_is_bounded_names_the_round_and_counts_the_stall(device):
    ring = make_state(device).ring
    with pytest.raises(RingTimeoutError, match="round 5 for slot 1"):
        ring.wait(5, 1, timeout_s=0.01)
    assert ring.stalls == 1
    assert isinstance(RingTimeoutError("x"), TimeoutError)


def test_wait_sees_a_decision_that_another_thread_publishes(device):
    state = make_state(device)
    late = threading.Timer(0.05, run_round, (state, [0], 0, 3))
    late.start()
    assert state.ring.wait(0, 0, timeout_s=5).speculative_num_steps == 1
    late.join()


@pytest.fixture
def quick_switches():
    """Python threads that take turns after 20 µs instead of 5 ms."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(20e-6)
    yield
    sys.setswitchinterval(usual)


def test_a_racing_reader_never_sees_a_torn_or_wrong_decision(quick_switches):
    """The writer's decision alternates, so a round's parity gives the only right answer."""
    state = make_state("cpu", depth=8)
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
def test_reads_outside_the_slots_are_refused(device, slot):
    ring = make_state(device).ring
    for read in (lambda: ring.read(0, slot), lambda: ring.latest(slot), lambda: ring.wait(0, slot)):
        with pytest.raises(ValueError, match="`slot` must be from 0 to 1"):
            read()


def test_the_tensor_is_the_ring_itself(device):
    """Not a copy, and aligned to a cache line: the ops publish into what the host reads."""
    state = make_state(device)
    ring = state.ring
    assert ring.tensor.dtype == torch.int64 and ring.tensor.is_contiguous()
    assert ring.tensor.device == state.device == ring.device
    assert ring.tensor.shape == (8 * (2 + 3),)
    assert ring.tensor.data_ptr() % 64 == 0
    before = ring.latest(0).round
    ring.tensor.zero_()
    if ring.tensor.is_cuda:
        torch.cuda.synchronize()
    assert before == 2**32 - 1 and ring.latest(0).round == 0
    again = torch.from_dlpack(ring.native)
    assert again.data_ptr() == ring.tensor.data_ptr()


def test_the_tensor_keeps_the_memory_alive(device):
    tensor = make_state(device).ring.tensor
    gc.collect()
    tensor.fill_(7)
    assert tensor.sum().item() == 7 * tensor.numel()


def test_the_ring_outlives_its_tensor_and_a_capsule_is_good_for_one_tensor():
    ring = DecisionRing(8, 1)
    capsule = ring.native.__dlpack__()
    tensor = torch.from_dlpack(capsule)
    tensor.fill_(5)
    with pytest.raises(RuntimeError, match="consumed at most once|already consumed|only once"):
        torch.from_dlpack(capsule)
    del tensor, capsule
    gc.collect()
    assert ring.tensor.tolist() == [5] * ring.tensor.numel()


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads /proc")
@pytest.mark.parametrize("use", ["tensor", "capsule"])
def test_memory_is_freed_with_the_last_that_uses_it(use):
    """32 MiB a ring: 40 leaked ones would show, whether made into a tensor or left as a capsule."""
    start = resident_bytes()
    for _ in range(40):
        native = DecisionRing(2**20, 1).native
        last = torch.from_dlpack(native) if use == "tensor" else native.__dlpack__()
        del native, last
    gc.collect()
    assert resident_bytes() - start < 10 * 2**25


def test_the_dlpack_protocol_refuses_what_would_not_be_the_ring():
    native = DecisionRing(8, 1).native
    assert native.__dlpack_device__() == (1, 0)
    for fine in (
        {},
        {"stream": None, "max_version": (1, 1), "dl_device": None, "copy": None},
        {"dl_device": (1, 0), "copy": False},
    ):
        assert torch.from_dlpack(native.__dlpack__(**fine)).numel() == 32
    with pytest.raises(BufferError, match="`copy`"):
        torch.from_dlpack(native, copy=True)
    with pytest.raises(BufferError, match="`dl_device`"):
        native.__dlpack__(dl_device=(2, 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what is said where there is no GPU")
def test_a_ring_on_a_device_that_is_not_there_says_what_failed():
    with pytest.raises(RuntimeError, match=r"^DecisionRing: .*(CUDA|cuda:0)"):
        _C.DecisionRing(8, 1, device_index=0)


@pytest.mark.parametrize("device", ["xpu", "meta", "nonsense", "cuda:-2"])
def test_other_devices_are_refused(device):
    with pytest.raises(ValueError, match=r"`device` must be 'cpu' or 'cuda\[:index\]'"):
        DecisionRing(8, 1, device=device)
