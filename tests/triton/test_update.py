"""The adaptive step in Triton, interpreted on the CPU: the bits of the C++ op's, state and ring."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_spec.config import AdaptiveConfigWarning
from adaptive_spec.state import AdaptiveState
from tests.triton.processes import run_compiling
from tests.vectors import load_vectors, read_state_slot, replay

ops = pytest.importorskip("adaptive_spec_triton.ops", reason="no Triton installed")
cpp_update = torch.ops.adaptive_spec.update_and_select
triton_update = torch.ops.adaptive_spec_triton.update_and_select
CASES = load_vectors()


class TritonState(AdaptiveState):
    """An adaptive state that takes its feedback through Triton."""

    def on_verify_complete(self, num_correct_drafts_per_req, batch_size, executed_steps):
        slot = self.slot_for_batch(batch_size)
        before = self.ring.latest(slot).speculative_num_steps
        counts = torch.tensor(num_correct_drafts_per_req, dtype=torch.int32)
        triton_update(
            counts,
            self.tensor,
            self.ring.tensor,
            slot=slot,
            speculative_num_steps=executed_steps,
        )
        after = self.ring.latest(slot).speculative_num_steps
        return after if after != before else None


@pytest.mark.parametrize("index", range(0, len(CASES), 9))
def test_recorded_runs(index):
    assert (
        replay(lambda steps, config: TritonState(config, steps), read_state_slot, CASES[index]) > 0
    )


@st.composite
def configs(draw):
    steps = st.lists(st.integers(0, 12), min_size=1, max_size=5, unique=True).map(sorted)
    optional = {
        "min_dwell": st.integers(0, 5),
        "probe_backoff": st.integers(1, 8),
        "ceiling_coeff": st.floats(0.0, 2.0),
        "reset_ema_on_switch": st.booleans(),
    }
    return {
        "1": {"candidate_steps": draw(steps)},
        "6": {"candidate_steps": draw(steps)},
        "ema_alpha": draw(st.floats(0.05, 1.0)),
        "warmup_batches": draw(st.integers(0, 3)),
        "update_interval": draw(st.integers(1, 3)),
        **{name: draw(values) for name, values in optional.items() if draw(st.booleans())},
    }


@settings(max_examples=40, deadline=None)
@given(config=configs(), seed=st.integers(0, 2**32 - 1))
def test_every_word_is_the_cpp_op_s(config, seed):
    """Over all rules, stale samples, counts out of range, padding and empty batches."""
    rng = np.random.default_rng(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AdaptiveConfigWarning)
        own, other = (AdaptiveState(config, 3, ring_depth=8) for _ in range(2))
    for _ in range(30):
        batch_size = int(rng.integers(0, 12))
        slot = own.slot_for_batch(max(batch_size, 1))
        steps = own.get_steps_for_batch(max(batch_size, 1))
        if rng.random() < 0.1:
            steps = int(rng.integers(0, 13))
        lowest, highest = (-2, steps + 3) if rng.random() < 0.1 else (0, steps + 1)
        top = int(rng.integers(lowest + 1, highest + 1))
        # Every second element: the counts are strided.
        counts = torch.from_numpy(rng.integers(lowest, top, (batch_size, 2)).astype(np.int32))[:, 1]
        num_reqs = None
        if rng.random() < 0.3:
            num_reqs = torch.tensor([int(rng.integers(-1, batch_size + 3))], dtype=torch.int32)
        for update, state in ((triton_update, own), (cpp_update, other)):
            update(
                counts,
                state.tensor,
                state.ring.tensor,
                slot=slot,
                speculative_num_steps=steps,
                num_reqs=num_reqs,
            )
        assert torch.equal(own.tensor, other.tensor)
        assert torch.equal(own.ring.tensor, other.ring.tensor)


def test_batches_of_more_than_a_block():
    """The sum over blocks of requests, the last one not full."""
    own, other = (AdaptiveState({"1": {"candidate_steps": [1, 3]}}, 3) for _ in range(2))
    counts = torch.arange(1000, dtype=torch.int32) % 4
    for update, state in ((triton_update, own), (cpp_update, other)):
        update(counts, state.tensor, state.ring.tensor, slot=0, speculative_num_steps=3)
    assert own.ring.record(0).num_correct_drafts == int(counts.sum())
    assert torch.equal(own.tensor, other.tensor)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("slot", 1, "`slot` is not a slot of `state`"),
        (
            "speculative_num_steps",
            65,
            "argument `speculative_num_steps`: expected an integer from 0 to 64",
        ),
        ("state", torch.zeros(200, dtype=torch.int64), "`state` is not an adaptive state"),
        ("accept_token_num", torch.zeros(2), "argument `accept_token_num`: expected dtype int32"),
    ],
)
def test_wrong_arguments_raise_the_cpp_op_s_errors_and_change_nothing(name, value, message):
    state = AdaptiveState({"1": {"candidate_steps": [1, 3]}}, 3)
    arguments = {
        "accept_token_num": torch.zeros(2, dtype=torch.int32),
        "state": state.tensor,
        "ring": state.ring.tensor,
        "slot": 0,
        "speculative_num_steps": 3,
    } | {name: value}
    before, ring = state.tensor.clone(), state.ring.tensor.clone()
    with pytest.raises(ValueError, match=f"^update_and_select: {message}"):
        triton_update(**arguments)
    assert torch.equal(state.tensor, before)
    assert torch.equal(state.ring.tensor, ring)


def test_cpu_tensors_without_the_interpreter_are_refused():
    """They would otherwise end in a crash inside Triton's launcher."""
    program = (
        "import torch, adaptive_spec_ext, adaptive_spec_triton.ops\n"
        "from adaptive_spec.state import AdaptiveState\n"
        "state = AdaptiveState({'1': {'candidate_steps': [1, 3]}}, 3)\n"
        "torch.ops.adaptive_spec_triton.update_and_select(torch.zeros(1, dtype=torch.int32),\n"
        "    state.tensor, state.ring.tensor, slot=0, speculative_num_steps=3)\n"
    )
    done = run_compiling("-c", program)
    assert "ValueError: update_and_select: the Triton ops run on GPU tensors" in done.stderr
