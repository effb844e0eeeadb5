"""The ring on a GPU: decisions reach the host by themselves, and are the CPU's bit for bit."""

import contextlib
import time

import numpy as np
import pytest
import torch

from adaptive_spec import ops
from adaptive_spec.state import AdaptiveState

pytestmark = pytest.mark.gpu

CONFIG = {
    "1": {"candidate_steps": [0, 1, 3, 7], "min_dwell": 2},
    "8": {"candidate_steps": [1, 3], "probe_backoff": 2},
    "32": {"candidate_steps": [0, 2], "ceiling_coeff": 1.5},
    "ema_alpha": 0.3,
    "update_interval": 2,
    "warmup_batches": 1,
}
BATCH_SIZES = (1, 5, 8, 31, 32, 200)
DEADLINE_S = 10.0


@contextlib.contextmanager
def no_syncs():
    """torch raises on whatever makes the host wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def poll(read):
    """What `read` returns once it is not None; only host loads in between."""
    deadline = time.monotonic() + DEADLINE_S
    while (found := read()) is None:
        assert time.monotonic() < deadline, "the device did not publish in time"
    return found


def make_rounds(num_rounds, seed):
    """(batch size, counts on the CPU) of each round; some counts are above S, an anomaly."""
    rng = np.random.default_rng(seed)
    rounds = []
    for _ in range(num_rounds):
        batch_size = int(rng.choice(BATCH_SIZES))
        counts = rng.integers(0, rng.integers(1, 9), batch_size)
        rounds.append((batch_size, torch.tensor(counts, dtype=torch.int32)))
    return rounds


def on_gpu(rounds):
    return [(batch_size, counts.cuda()) for batch_size, counts in rounds]


def test_decisions_arrive_without_a_synchronising_call():
    """The stream is never waited for: a plain load sees the word while the device runs on."""
    state = AdaptiveState(CONFIG, 3, device="cuda")
    expected = AdaptiveState(CONFIG, 3)
    rounds = make_rounds(50, seed=1)
    gpu_rounds = on_gpu(rounds)
    stream = torch.cuda.Stream()
    num_slots = state.ring.num_slots
    with no_syncs(), torch.cuda.stream(stream):
        for number, (batch_size, counts) in enumerate(rounds):
            slot = state.slot_for_batch(batch_size)
            steps = state.ring.latest(slot).speculative_num_steps
            for target, accepted in ((expected, counts), (state, gpu_rounds[number][1])):
                ops.update_and_select(accepted, target, slot=slot, speculative_num_steps=steps)
            for slot in range(num_slots):
                decision = poll(lambda: state.ring.read(number, slot))  # noqa: B023
                assert decision == expected.ring.read(number, slot)
            record = poll(lambda: state.ring.record(number))  # noqa: B023
            assert record == expected.ring.record(number)


def test_a_step_reader_follows_the_device_without_a_synchronising_call():
    """Rounds overlap: with a lag of 2 the host is one round ahead of the device."""
    state = AdaptiveState(CONFIG, 3, device="cuda")
    expected = AdaptiveState(CONFIG, 3)
    reader, expected_reader = (
        s.step_reader(lag=2, timeout_s=DEADLINE_S) for s in (state, expected)
    )
    rounds = make_rounds(200, seed=2)
    gpu_rounds = on_gpu(rounds)
    with no_syncs():
        for number, (batch_size, counts) in enumerate(rounds):
            slot = state.slot_for_batch(batch_size)
            steps = reader.next_steps(batch_size)
            assert steps == expected_reader.next_steps(batch_size)
            for target, accepted in ((expected, counts), (state, gpu_rounds[number][1])):
                ops.update_and_select(accepted, target, slot=slot, speculative_num_steps=steps)


def test_a_thousand_updates_equal_the_cpu_bit_for_bit():
    state = AdaptiveState(CONFIG, 3, device="cuda")
    expected = AdaptiveState(CONFIG, 3)
    rounds = make_rounds(1000, seed=3)
    for (batch_size, counts), gpu_round in zip(rounds, on_gpu(rounds), strict=True):
        slot = state.slot_for_batch(batch_size)
        steps = expected.ring.latest(slot).speculative_num_steps
        ops.update_and_select(counts, expected, slot=slot, speculative_num_steps=steps)
        ops.update_and_select(gpu_round[1], state, slot=slot, speculative_num_steps=steps)
    assert torch.equal(state.state_dict()["state"], expected.state_dict()["state"])
    assert torch.equal(state.ring.tensor.cpu(), expected.ring.tensor)
    assert state.slots == expected.slots
    assert sum(slot.num_switches for slot in state.slots) > 10, "too quiet to show anything"


def test_two_streams_with_a_state_each_do_not_disturb_each_other():
    """No scratch memory is shared: each state's tickets and pending sums are its own."""
    seeds = (4, 5)
    states = [AdaptiveState(CONFIG, 3, device="cuda") for _ in seeds]
    expected = [AdaptiveState(CONFIG, 3) for _ in seeds]
    rounds = [make_rounds(300, seed) for seed in seeds]
    gpu_rounds = [on_gpu(each) for each in rounds]
    streams = [torch.cuda.Stream() for _ in seeds]
    torch.cuda.synchronize()
    for number in range(300):
        for i, stream in enumerate(streams):
            batch_size, counts = rounds[i][number]
            slot = states[i].slot_for_batch(batch_size)
            steps = expected[i].ring.latest(slot).speculative_num_steps
            ops.update_and_select(counts, expected[i], slot=slot, speculative_num_steps=steps)
            with torch.cuda.stream(stream):
                ops.update_and_select(
                    gpu_rounds[i][number][1], states[i], slot=slot, speculative_num_steps=steps
                )
    for state, reference in zip(states, expected, strict=True):
        assert torch.equal(state.state_dict()["state"], reference.state_dict()["state"])
        assert torch.equal(state.ring.tensor.cpu(), reference.ring.tensor)


def test_the_ring_lies_in_host_memory_that_the_device_writes():
    """What the device writes through the tensor is there for the host, and survives the ring."""
    state = AdaptiveState(CONFIG, 3, device="cuda")
    tensor = state.ring.tensor
    assert tensor.is_cuda
    tensor.zero_()
    torch.cuda.synchronize()
    assert state.ring.latest(0).round == 0
    del state
    tensor.fill_(3)
    assert tensor.sum().item() == 3 * tensor.numel()


def test_reset_and_loading_wait_for_the_rounds_that_were_launched():
    """Otherwise a late round would overwrite the freshly seeded ring."""
    state = AdaptiveState(CONFIG, 3, device="cuda")
    fresh = state.state_dict()
    words = state.ring.tensor.cpu()
    counts = torch.zeros(4096, dtype=torch.int32, device="cuda")
    for restart in (state.reset, lambda: state.load_state_dict(fresh)):
        for _ in range(20):
            torch.cuda._sleep(1_000_000)
            ops.update_and_select(counts, state, slot=2, speculative_num_steps=2)
        restart()
        torch.cuda.synchronize()
        assert state.next_round == 0
        assert torch.equal(state.ring.tensor.cpu(), words)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_ring_on_another_device_leaves_the_current_one_current():
    state = AdaptiveState(CONFIG, 3, device="cuda:1")
    assert torch.cuda.current_device() == 0
    counts = torch.zeros(4, dtype=torch.int32, device="cuda:1")
    ops.update_and_select(counts, state, slot=0, speculative_num_steps=3)
    assert poll(lambda: state.ring.read(0, 0)) is not None
    assert state.next_round == 1
