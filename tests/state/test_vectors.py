"""The C++ state reproduces every recorded value, read back through the ring."""

import pytest
import torch

from adaptive_spec import ops
from adaptive_spec.controller import AdaptiveController
from adaptive_spec.state import AdaptiveState
from tests.state.test_controller import FakeWorker
from tests.vectors import load_vectors, read_state_slot, replay

CASES = load_vectors()


@pytest.mark.parametrize("index", range(len(CASES)))
def test_state_reproduces_the_recorded_run(device, index):
    def make_state(initial_steps, config):
        return AdaptiveState(config, initial_steps, device=device)

    assert replay(make_state, read_state_slot, CASES[index]) > 0


@pytest.mark.filterwarnings("ignore:.*:adaptive_spec.config.AdaptiveConfigWarning")
@pytest.mark.parametrize("index", range(0, len(CASES), 5))
def test_controller_runs_the_recorded_steps_from_the_ring_alone(device, index):
    """The path of a serving engine: steps come from the reader, counts go to the op."""
    case = CASES[index]
    state = AdaptiveState(case["config"], case["initial_steps"], device=device)
    worker = FakeWorker()
    controller = AdaptiveController(worker, state)
    controller.init_states(case["cuda_graph_bs"])
    for expected in case["rounds"]:
        controller.activate_step_by_batch(expected["batch_size"])
        assert worker.speculative_num_steps == expected["steps"]
        ops.update_and_select(
            torch.tensor(expected["accepted"], dtype=torch.int32, device=device),
            state,
            slot=state.slot_for_batch(expected["batch_size"]),
            speculative_num_steps=worker.speculative_num_steps,
        )
