"""The Python reference reproduces every recorded value: steps, return values, EMA bits, graphs."""

import pytest

from adaptive_spec.step_policy import AdaptiveSpeculativeParams
from tests.vectors import load_vectors, replay

CASES = load_vectors()


def read_slot(params, batch_size):
    slot = params._route(batch_size)
    return slot.ema_accept_len, slot.current_steps


@pytest.mark.parametrize("index", range(len(CASES)))
def test_reference_reproduces_the_recorded_run(index):
    assert replay(AdaptiveSpeculativeParams, read_slot, CASES[index]) > 0


def test_all_runs_are_there():
    assert len(CASES) == 90
    assert sum(len(case["rounds"]) for case in CASES) == 7040


def test_the_replay_notices_a_wrong_last_bit():
    """Guards the guard: one unit in the last place of one EMA must fail."""
    import copy
    import math

    case = copy.deepcopy(CASES[0])
    last = case["rounds"][-1]
    last["ema_after"] = math.nextafter(float.fromhex(last["ema_after"]), math.inf).hex()
    with pytest.raises(AssertionError, match=f"round {len(case['rounds']) - 1}"):
        replay(AdaptiveSpeculativeParams, read_slot, case)
