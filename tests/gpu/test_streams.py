"""Launches that run at the same time, and launches that nobody waits for."""

import adaptive_spec_ext
import numpy as np
import pytest
import torch

from adaptive_spec import ops
from adaptive_spec.controller import AdaptiveController
from adaptive_spec.state import AdaptiveState
from adaptive_spec.testing.launches import device_launches
from adaptive_spec.testing.op_cases import CaseOptions, OpCall, chain_tree_call
from tests.gpu.rounds import (
    CONFIG,
    VERIFY_OPS,
    Gate,
    Lane,
    assert_counters_at_zero,
    assert_same_state,
    state_arguments,
    warm_up,
)
from tests.state.test_controller import FakeWorker

pytestmark = pytest.mark.gpu

NUM_ROUNDS = 1_000


@pytest.mark.parametrize("kind", VERIFY_OPS)
def test_two_streams(device, kind):
    """Two states and two workspaces share nothing: rounds of one must not show in the other."""
    num_rounds = 300
    rng = np.random.default_rng(2)
    case = CaseOptions(
        64, 3, num_nodes=16, vocab_size=9_001 if kind == "logits" else 5, malformed=True
    )
    inputs = [[VERIFY_OPS[kind](rng, case) for _ in range(3)] for _ in range(2)]
    expected_states = [AdaptiveState(CONFIG, 3) for _ in inputs]
    states = [AdaptiveState(CONFIG, 3, device=device) for _ in inputs]
    workspaces = [adaptive_spec_ext.verify_workspace(64, 4, device=device) for _ in inputs]
    expected = [
        Lane(calls[0], "cpu", slot=2, **state_arguments(state))
        for calls, state in zip(inputs, expected_states, strict=True)
    ]
    lanes = [
        Lane(calls[0], device, slot=2, workspace=workspace, **state_arguments(state))
        for calls, state, workspace in zip(inputs, states, workspaces, strict=True)
    ]
    on_device = [[call.to(device) for call in calls] for calls in inputs]
    streams = [torch.cuda.Stream() for _ in lanes]
    warm_up(inputs[0][0], device)
    torch.cuda.synchronize()
    for begin in range(0, num_rounds, 50):
        # A batch of launches piles up on both streams before either may start.
        gate = Gate(milliseconds=20)
        for stream in streams:
            gate.hold(stream)
        for round_ in range(begin, begin + 50):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    lanes[i].load(on_device[i][round_ % 3])
                    lanes[i].launch()
                    lanes[i].record()
        torch.cuda.synchronize()
    for i in range(2):
        for round_ in range(num_rounds):
            expected[i].load(inputs[i][round_ % 3])
            expected[i].launch()
            expected[i].record()
        lanes[i].assert_same_rounds(expected[i])
        assert_same_state(states[i], expected_states[i])
        assert_counters_at_zero(workspaces[i])


def decode(kind: str | None, device: torch.device | str, num_rounds: int):
    """The adaptive part of a decode loop: what it chose in each round, what the ops left, and its
    state. `kind` None: the adaptive step alone, after a verify op of somebody else's."""
    rng = np.random.default_rng(3)
    state = AdaptiveState(CONFIG, 3, device=device)
    controller = AdaptiveController(FakeWorker(), state, lag=2)
    controller.init_states()
    workspace = adaptive_spec_ext.verify_workspace(12, 8, device=device)
    calls: dict[tuple[int, int], list[OpCall]] = {}
    for batch_size in (1, 5, 12):
        for steps in state.candidate_steps:
            # Drafts are liked by turns, for as long as it takes to switch.
            for limit in (steps, 0):
                call = VERIFY_OPS[kind or "chain"](
                    rng, CaseOptions(batch_size, steps, num_nodes=8, max_accept=True)
                )
                call.tensors["max_accept"].view.fill_(limit)
                call.tensors["accept_token_num"].view.fill_(limit)
                calls.setdefault((batch_size, steps), []).append(call.to(device))
    chosen, results = [], []
    if kind is not None:
        warm_up(calls[1, 1][0], device)

    def run(num_rounds: int) -> None:
        for round_ in range(num_rounds):
            batch_size = (1, 5, 12, 5)[round_ // 5 % 4]
            controller.activate_step_by_batch(batch_size)
            steps = controller.worker.speculative_num_steps
            call = calls[batch_size, steps][round_ // 40 % 2]
            counts = call.tensors["accept_token_num"].view
            slot = state.slot_for_batch(batch_size)
            if kind is None:
                ops.update_and_select(counts, state, slot=slot, speculative_num_steps=steps)
            else:
                call.run(getattr(ops, call.op), state=state, slot=slot, workspace=workspace)
            chosen.append(steps)
            results.append(counts.clone())

    if torch.device(device).type == "cpu":
        run(num_rounds)
    else:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(num_rounds)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return chosen, torch.cat(results).tolist(), state


@pytest.mark.parametrize("kind", [*VERIFY_OPS, None])
def test_a_thousand_rounds_without_a_synchronising_call(device, kind):
    """Ops and controller under torch's sync detector; with lag 2 the steps are the CPU's."""
    expected_chosen, expected_results, expected_state = decode(kind, "cpu", NUM_ROUNDS)
    assert len(set(expected_chosen)) > 2, "the traffic made nothing switch"
    chosen, results, state = decode(kind, device, NUM_ROUNDS)
    assert chosen == expected_chosen
    assert results == expected_results
    assert_same_state(state, expected_state)


def every_op(device: torch.device, batch_size: int) -> dict:
    """A launch of each op, with everything that it can be given."""
    rng = np.random.default_rng(5)
    state = AdaptiveState(CONFIG, 3, device=device)
    workspace = adaptive_spec_ext.verify_workspace(batch_size, 4, device=device)
    lanes = {}
    for kind, make in VERIFY_OPS.items():
        case = CaseOptions(
            batch_size, 3, num_nodes=8, vocab_size=20_011, num_reqs=batch_size, max_accept=True
        )
        call = make(rng, case)
        lanes[kind] = Lane(call, device, workspace=workspace)
        lanes[f"{kind} with state"] = Lane(
            call, device, workspace=workspace, slot=0, **state_arguments(state)
        )
    lanes["chain tree"] = Lane(
        chain_tree_call(rng, CaseOptions(batch_size, 3, num_nodes=8, num_reqs=batch_size)), device
    )
    counts = torch.zeros(batch_size, dtype=torch.int32, device=device)
    launches = {name: lane.launch for name, lane in lanes.items()}
    launches["update"] = lambda: ops.update_and_select(
        counts, state, slot=0, speculative_num_steps=3
    )
    for launch in launches.values():
        launch()
    torch.cuda.synchronize()
    return launches


@pytest.mark.parametrize("batch_size", [4, 64])
def test_one_launch(device, batch_size):
    """A second kernel, a copy or a memset would cost more than the op itself."""
    for name, launch in every_op(device, batch_size).items():
        launches = device_launches(launch)
        assert len(launches) == 1, f"{name}: {launches}"
        assert "adaptive_spec" in launches[0], f"{name}: {launches}"


@pytest.mark.parametrize("batch_size", [4, 64])
def test_nothing_is_waited_for_or_allocated(device, batch_size):
    """Called behind a stream that is busy for long, an op returns before any of it is done."""
    for name, launch in every_op(device, batch_size).items():
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
        gate = Gate(milliseconds=100)
        gate.hold(torch.cuda.current_stream())
        launch()
        assert not gate.is_open, f"{name}: returned only when the stream had run dry"
        torch.cuda.synchronize()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated, name
