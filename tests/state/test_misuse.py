"""Damaged checkpoints, live controllers whose state is set back, waits that must end."""

import os
import signal
import threading
import time

import numpy as np
import pytest
import torch

from adaptive_spec import ops
from adaptive_spec.extension import _C
from adaptive_spec.ring import DecisionRing
from adaptive_spec.state import AdaptiveState, _views

CONFIG = {
    "1": {"candidate_steps": [1, 3]},
    "8": {"candidate_steps": [0, 2]},
    "warmup_batches": 0,
    "update_interval": 1,
}


def run_round(state: AdaptiveState, count: int = 3) -> None:
    counts = torch.tensor([count], dtype=torch.int32)
    ops.update_and_select(counts, state, slot=0, speculative_num_steps=3)


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("slots", "index", 10**8),
        ("slots", "index", -1),
        ("slots", "index", 2),
        ("slots", "reason", 99),
        ("slots", "ema", np.nan),
        ("slots", "batch_count", -1),
        ("slots", "probing", 7),
        ("header", "next_round", -1),
        ("header", "num_slots", 1),
        ("header", "num_words", 1),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(part, name, value):
    """An index from outside would be looked up in foreign memory."""
    state = AdaptiveState(CONFIG, 3)
    run_round(state)
    saved = state.state_dict()
    header, _, slots = _views(saved["state"].numpy(), 2)
    if part == "slots":
        slots[name][1] = value
    else:
        header[name] = value
    before = state.tensor.clone()
    with pytest.raises(ValueError, match="`state_dict` is damaged: .*" + name):
        state.load_state_dict(saved)
    assert torch.equal(state.tensor, before)
    run_round(state)
    assert state.next_round == 2


def test_an_op_refuses_a_state_whose_index_was_overwritten():
    state = AdaptiveState(CONFIG, 3)
    _views(state.tensor.numpy(), 2)[2]["index"][1] = 10**6
    before = state.tensor.clone()
    with pytest.raises(ValueError, match="not one of its candidates"):
        run_round(state)
    assert torch.equal(state.tensor, before)


@pytest.mark.parametrize("how", ["reset", "older", "newer"])
def test_a_reader_follows_when_its_state_is_set_to_another_round(how):
    """It would wait for rounds that will not come, or ask for some that are long gone."""
    state = AdaptiveState(CONFIG, 3)
    reader = state.step_reader(lag=2, timeout_s=0.2)
    older = state.state_dict()
    for _ in range(200):
        assert reader.next_steps(1) in (1, 3)
        run_round(state)
    newer = state.state_dict()
    if how == "newer":
        state.reset()
        state.load_state_dict(newer)
    else:
        state.load_state_dict(older) if how == "older" else state.reset()
    assert reader.next_round == (200 if how == "newer" else 0)
    for _ in range(5):
        reader.next_steps(1)
        run_round(state)


@pytest.mark.parametrize("timeout_s", [float("nan"), -1.0, float("inf")])
def test_a_time_that_is_none_is_refused(timeout_s):
    with pytest.raises(ValueError, match="`timeout_s` must be from 0"):
        DecisionRing(8, 1).wait(0, 0, timeout_s)
    with pytest.raises(ValueError, match="`timeout_s` must be from 0"):
        AdaptiveState(CONFIG, 3).step_reader(lag=1, timeout_s=timeout_s)


@pytest.fixture
def interruptible():
    """A process that was started in the background may have been told to ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_wait_can_be_interrupted(interruptible):
    """Ctrl-C must not have to wait for the timeout."""
    state = AdaptiveState(CONFIG, 3)
    reader = state.step_reader(lag=1, timeout_s=60.0)
    reader.next_steps(1)
    for wait in (lambda: state.ring.wait(0, 0, 60.0), lambda: reader.next_steps(1)):
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            wait()
        assert time.monotonic() - start < 30
        timer.join()


def test_enormous_captured_sizes_route_like_any_others():
    state = AdaptiveState(CONFIG, 3)
    state.set_cuda_graph_bs([4, 2**33])
    reader = state.step_reader(lag=1, timeout_s=1.0)
    assert [reader.slot_for_batch(n) for n in (1, 4, 5, 2**20, 2**34)] == [0, 0, 1, 1, 1]


@pytest.mark.parametrize("steps", ["3", None, 3.0, True])
def test_initial_steps_must_be_an_integer(steps):
    with pytest.raises(TypeError, match="`initial_steps` must be an integer, got"):
        AdaptiveState(CONFIG, steps)


def test_readers_are_not_kept_alive():
    state = AdaptiveState(CONFIG, 3)
    reader = state.step_reader(lag=1, timeout_s=1.0)
    assert isinstance(reader, _C.StepReader)
    assert len(state._readers) == 1
    del reader
    assert len(state._readers) == 0
