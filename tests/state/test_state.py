"""The C++ state: the same bits as the recorded runs, and saved states that continue bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_spec import ops
from adaptive_spec.state import AdaptiveState
from adaptive_spec.step_policy import AdaptiveSpeculativeParams, DecisionReason

CONFIG = {
    "1": {"candidate_steps": [0, 1, 3, 7], "min_dwell": 3},
    "8": {"candidate_steps": [1, 3], "probe_backoff": 2},
    "update_interval": 2,
    "warmup_batches": 1,
}


def observe(state, counts, slot=0, steps=None):
    steps = state.slots[slot].speculative_num_steps if steps is None else steps
    ops.update_and_select(
        torch.tensor(counts, dtype=torch.int32, device=state.device),
        state,
        slot=slot,
        speculative_num_steps=steps,
    )


def as_words(state):
    return state.tensor.clone()


def test_a_new_state_starts_at_the_initial_step_or_the_middle(device):
    state = AdaptiveState(
        {"1": {"candidate_steps": [1, 3]}, "8": {"candidate_steps": [2, 4, 6]}},
        3,
        device=device,
    )
    first, second = state.slots
    assert (first.speculative_num_steps, first.ema_accept_len) == (3, 2.0)
    assert (second.speculative_num_steps, second.ema_accept_len) == (4, 3.0)
    assert first.reason == DecisionReason.NONE
    assert state.candidate_steps == [1, 2, 3, 4, 6]


def test_reset_gives_back_a_new_state(device):
    state = AdaptiveState(CONFIG, 3, device=device)
    fresh = as_words(state)
    for _ in range(20):
        observe(state, [0, 1])
    assert not torch.equal(state.tensor, fresh)
    state.reset()
    assert torch.equal(state.tensor, fresh)
    assert state.ring.read(-1, 0).speculative_num_steps == 3


def test_a_saved_state_continues_bit_for_bit_even_with_another_ring_depth(device):
    rng = np.random.default_rng(3)
    original = AdaptiveState(CONFIG, 3, device=device)
    for _ in range(50):
        observe(original, rng.integers(0, 2, 4).tolist())
    copy = AdaptiveState(CONFIG, 1, device=device, ring_depth=16)
    copy.load_state_dict(original.state_dict())
    assert copy.next_round == original.next_round
    assert copy.ring.read(copy.next_round - 1, 0) == original.ring.read(copy.next_round - 1, 0)
    for _ in range(50):
        counts = rng.integers(0, 4, 3).tolist()
        observe(original, counts)
        observe(copy, counts)
    assert copy.slots == original.slots


def test_loading_under_another_config_names_the_difference_and_changes_nothing(device):
    saved = AdaptiveState(CONFIG, 3, device=device).state_dict()
    other = AdaptiveState({**CONFIG, "ema_alpha": 0.5}, 3, device=device)
    before = as_words(other)
    with pytest.raises(
        ValueError, match=r"slot 0 \(batch size 1\) has ema_alpha 0.2 there and 0.5 here"
    ):
        other.load_state_dict(saved)
    with pytest.raises(ValueError, match="another number of slots"):
        AdaptiveState({"1": {"candidate_steps": [1]}}, 1, device=device).load_state_dict(saved)
    with pytest.raises(ValueError, match="`state`, a 1-D int64 tensor"):
        other.load_state_dict({})
    saved["state"][0] += 1
    with pytest.raises(ValueError, match="another state layout"):
        AdaptiveState(CONFIG, 3, device=device).load_state_dict(saved)
    assert torch.equal(other.tensor, before)


@pytest.mark.parametrize("ring_depth", [0, -8, 4, 12])
def test_an_op_refuses_a_state_whose_header_would_send_it_outside_the_ring(ring_depth):
    state = AdaptiveState(CONFIG, 3)
    state._header["ring_depth"] = ring_depth
    before, ring = as_words(state), state.ring.tensor.clone()
    with pytest.raises(ValueError, match="ring depth that is not a power of two"):
        observe(state, [1])
    assert torch.equal(state.tensor, before)
    assert torch.equal(state.ring.tensor, ring)


def test_state_dict_is_a_copy(device):
    state = AdaptiveState(CONFIG, 3, device=device)
    saved = state.state_dict()
    observe(state, [3])
    assert not torch.equal(saved["state"], state.tensor)


def test_a_state_saved_on_one_device_continues_on_another(device):
    """A checkpoint is on the CPU, and one that was moved to a device loads all the same."""
    original = AdaptiveState(CONFIG, 3, device=device)
    for counts in ([1, 0], [3], [0, 0, 1]):
        observe(original, counts)
    saved = original.state_dict()
    assert saved["state"].device.type == "cpu"
    copy = AdaptiveState(CONFIG, 3)
    copy.load_state_dict({"state": saved["state"].to(original.device)})
    assert copy.slots == original.slots
    assert copy.next_round == original.next_round == 3
    back = AdaptiveState(CONFIG, 3, device=device)
    back.load_state_dict(copy.state_dict())
    assert torch.equal(back.tensor, original.tensor)
    assert back.ring.read(2, 0) == original.ring.read(2, 0)


@pytest.mark.parametrize("word", range(3), ids=["accepted", "anomalies", "ticket"])
def test_a_copy_made_in_the_middle_of_a_round_is_not_loaded_and_reset_cures_it(device, word):
    """Half-added sums would be credited to the first round after loading."""
    broken = AdaptiveState(CONFIG, 3, device=device)
    fresh = as_words(broken)
    broken._header["pending"][word] = 2
    broken._upload()
    state = AdaptiveState(CONFIG, 3, device=device)
    observe(state, [3])
    before = as_words(state)
    with pytest.raises(ValueError, match="while a round was in flight: .*must be 0, got .*2"):
        state.load_state_dict(broken.state_dict())
    assert torch.equal(state.tensor, before)
    broken.reset()
    assert torch.equal(broken.tensor, fresh)


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built with CUDA here")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_cuda_without_a_cuda_torch_says_so(device):
    with pytest.raises(ValueError, match=f"`device` is '{device}', but torch .* without CUDA"):
        AdaptiveState(CONFIG, 3, device=device)


@pytest.mark.gpu
def test_a_cuda_device_that_is_not_there_says_so():
    with pytest.raises(ValueError, match="but there are [0-9]+ CUDA devices"):
        AdaptiveState(CONFIG, 3, device="cuda:99")


def test_on_verify_complete_returns_the_new_step_only_on_change(device):
    state = AdaptiveState(
        {
            "1": {"candidate_steps": [1, 3]},
            "ema_alpha": 1,
            "warmup_batches": 0,
            "update_interval": 1,
        },
        3,
        device=device,
    )
    assert state.on_verify_complete([0], batch_size=1, executed_steps=3) == 1
    assert state.on_verify_complete([3], batch_size=1, executed_steps=3) is None
    assert state.slots[0].num_stale == 1
    assert state.slots[0].batch_count == 1
    assert state.on_verify_complete([1], batch_size=1) == 3


STEPS = st.lists(st.integers(0, 12), min_size=1, max_size=5, unique=True)
HYSTERESIS = st.floats(-1, 1).filter(lambda x: abs(x) > 1e-9 or x == 0)
SLOT = st.fixed_dictionaries(
    {"candidate_steps": STEPS},
    optional={
        "ema_alpha": st.floats(0.01, 1.0),
        "up_hysteresis": HYSTERESIS,
        "down_hysteresis": HYSTERESIS,
        "ceiling_coeff": st.sampled_from([0, 0.5, 1, 1.5, 1e300]),
        "update_interval": st.integers(1, 4),
        "warmup_batches": st.integers(0, 3),
        "min_dwell": st.integers(0, 6),
        "probe_backoff": st.integers(1, 9),
        "reset_ema_on_switch": st.booleans(),
    },
)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_state_equals_the_python_reference_bit_for_bit(device, data):
    """Any config and counts, stale and empty rounds: S, EMA bits, count, reason, return value."""
    keys = sorted(data.draw(st.sets(st.sampled_from([1, 2, 5, 8, 32]), min_size=1, max_size=3)))
    config = {str(key): data.draw(SLOT) for key in keys}
    initial = data.draw(st.integers(0, 12))
    graphs = data.draw(st.sampled_from([None, [1, 2, 4, 8], [8, 64]]))
    state = AdaptiveState(config, initial, device=device)
    reference = AdaptiveSpeculativeParams(initial, config)
    state.set_cuda_graph_bs(graphs)
    reference.set_cuda_graph_bs(graphs)
    assert state.candidate_steps == reference.candidate_steps
    for step in state.candidate_steps:
        assert state.cuda_graph_bs_for_step(step) == reference.cuda_graph_bs_for_step(step)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    bias = data.draw(st.sampled_from([0.0, 0.3, 0.7, 1.0]))
    for _ in range(data.draw(st.integers(1, 60))):
        batch_size = int(rng.integers(1, 40))
        steps = reference.get_steps_for_batch(batch_size)
        assert state.get_steps_for_batch(batch_size) == steps
        executed = steps if rng.random() < 0.9 else int(rng.choice(reference.candidate_steps))
        num_reqs = 0 if rng.random() < 0.05 else batch_size
        counts = rng.binomial(executed, bias, num_reqs).tolist()
        assert state.on_verify_complete(
            counts, batch_size, executed
        ) == reference.on_verify_complete(counts, batch_size, executed)
        slot = reference._route(batch_size)
        snapshot = state.slots[state.slot_for_batch(batch_size)]
        assert snapshot.ema_accept_len.hex() == slot.ema_accept_len.hex()
        assert snapshot.batch_count == slot._batch_count
        assert snapshot.reason == slot.reason
