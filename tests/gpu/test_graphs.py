"""Captured ops: replays with other inputs and other counts of live rows, and padding rows."""

import functools

import adaptive_spec_ext
import numpy as np
import pytest
import torch

from adaptive_spec.state import AdaptiveState
from adaptive_spec.testing.op_cases import SENTINEL, CaseOptions, Guarded, OpCall
from tests.gpu.rounds import (
    CONFIG,
    VERIFY_OPS,
    Lane,
    assert_counters_at_zero,
    assert_same_state,
    capture,
    state_arguments,
    warm_up,
)

pytestmark = pytest.mark.gpu

NUM_REPLAYS = 1_000
SLOT = 1
#: What the slot can choose: a graph for each, as in a decode loop.
STEPS = (1, 3)


def make_inputs(kind: str, batch_size: int, steps: int) -> list[OpCall]:
    """Batches of one shape: live rows -1 to B + 1; drafts liked and disliked by turns, so that the
    state moves between its step counts."""
    rng = np.random.default_rng(steps)
    calls = []
    for i in range(14):
        case = CaseOptions(
            batch_size,
            steps,
            num_nodes=8,
            # Of two pieces.
            vocab_size=9_001 if kind == "logits" else 5,
            num_reqs=int(rng.integers(-1, batch_size + 2)),
            max_accept=True,
            malformed=i >= 7,
        )
        call = VERIFY_OPS[kind](rng, case)
        call.tensors["max_accept"].view.fill_(steps if i < 7 else 0)
        calls.append(call)
    return calls


@functools.cache
def run_on_cpu(kind: str, batch_size: int):
    """The rounds that graphs are compared with: inputs, S of each round, lanes and state."""
    inputs = {steps: make_inputs(kind, batch_size, steps) for steps in STEPS}
    state = AdaptiveState(CONFIG, 3)
    lanes = {
        steps: Lane(inputs[steps][0], "cpu", slot=SLOT, **state_arguments(state)) for steps in STEPS
    }
    steps_used = []
    for round_ in range(NUM_REPLAYS):
        steps = state.ring.read(round_ - 1, SLOT).speculative_num_steps
        lanes[steps].load(inputs[steps][round_ % len(inputs[steps])])
        lanes[steps].launch()
        lanes[steps].record()
        steps_used.append(steps)
    assert state.slots[SLOT].num_switches > NUM_REPLAYS / 50
    return inputs, steps_used, lanes, state


@pytest.mark.parametrize("kind", VERIFY_OPS)
@pytest.mark.parametrize("batch_size", [8, 24], ids=["one block", "blocks"])
@pytest.mark.parametrize("give_workspace", [True, False], ids=["given", "own"])
def test_a_thousand_replays(device, kind, batch_size, give_workspace):
    """A counter left behind by one replay, or a count read at capture, spoils a later one.

    With a workspace of its own, a graph holds the launch that zeroes it.
    """
    inputs, steps_used, expected, expected_state = run_on_cpu(kind, batch_size)
    state = AdaptiveState(CONFIG, 3, device=device)
    workspace = adaptive_spec_ext.verify_workspace(batch_size, max(STEPS) + 1, device=device)
    extra = {"workspace": workspace} if give_workspace else {}
    lanes, replays, on_device = {}, {}, {}
    for steps in STEPS:
        warm_up(inputs[steps][0], device)
        lanes[steps] = Lane(inputs[steps][0], device, slot=SLOT, **state_arguments(state), **extra)
        replays[steps] = capture(lanes[steps].launch)
        on_device[steps] = [call.to(device) for call in inputs[steps]]
    for round_, steps in enumerate(steps_used):
        lanes[steps].load(on_device[steps][round_ % len(on_device[steps])])
        replays[steps]()
        lanes[steps].record()
    for steps in STEPS:
        lanes[steps].assert_same_rounds(expected[steps])
    assert_same_state(state, expected_state)
    assert_counters_at_zero(workspace)


def spoil(call: OpCall, first: int, steps: int) -> None:
    """Make rows from `first` on such that a look at any of them is an anomaly."""
    for name, tensor in call.tensors.items():
        if name == "max_accept":
            tensor.view[first:] = steps
        elif name not in call.mutated and name != "num_reqs":
            tensor.view[first:] = float("nan") if tensor.view.is_floating_point() else SENTINEL


@pytest.mark.parametrize("padding", ["stale", "poisoned"])
@pytest.mark.parametrize("kind", VERIFY_OPS)
def test_three_live_rows_of_a_graph_for_eight(device, kind, padding):
    """Padding holds the last batch's data or worse: it must not count, nor be written to."""
    rng = np.random.default_rng(8)
    full = VERIFY_OPS[kind](rng, CaseOptions(8, 3, num_nodes=9, num_reqs=8))
    padded = full.clone()
    padded.tensors["num_reqs"].view.fill_(3)
    if padding == "poisoned":
        spoil(padded, 3, steps=3)
    untouched = padded.clone()
    expected = padded.clone()
    expected_state = AdaptiveState(CONFIG, 3)
    expected.run(getattr(adaptive_spec_ext, full.op), slot=SLOT, **state_arguments(expected_state))
    assert expected_state.ring.record(0).num_reqs == 3

    state = AdaptiveState(CONFIG, 3, device=device)
    warm_up(full, device)
    workspace = adaptive_spec_ext.verify_workspace(8, 4, device=device)
    lane = Lane(full, device, slot=SLOT, workspace=workspace, **state_arguments(state))
    replay = capture(lane.launch)
    # Everything, outputs too: what the graph must leave alone is there to be seen.
    for name, tensor in lane.call.tensors.items():
        tensor.block.copy_(padded.tensors[name].block)
    replay()
    lane.call.assert_equal(expected)
    assert_same_state(state, expected_state)
    record = state.ring.record(0)
    assert (record.num_reqs, record.slot, record.speculative_num_steps) == (3, SLOT, 3)
    assert record.num_correct_drafts == int(expected.tensors["accept_token_num"].view[:3].sum())
    for name in lane.call.mutated - {"accepted_tokens", "predicts"}:
        own, before = lane.call.tensors[name].view.cpu(), untouched.tensors[name].view
        assert torch.equal(own[3:], before[3:]), f"`{name}` was written for padding rows"


def test_update_of_three_live_rows_of_a_graph_for_eight(device):
    """The same for the adaptive step alone; the EMA is that of the three rows."""
    counts = torch.tensor([3, 1, 2, 77, -5, 3, 3, 3], dtype=torch.int32, device=device)
    num_reqs = torch.tensor([8], dtype=torch.int32, device=device)
    state, expected = AdaptiveState(CONFIG, 3, device=device), AdaptiveState(CONFIG, 3)

    def launch():
        adaptive_spec_ext.update_and_select(
            counts, **state_arguments(state), slot=SLOT, speculative_num_steps=3, num_reqs=num_reqs
        )

    launch()  # loads the kernel
    state.reset()
    replay = capture(launch)
    num_reqs.fill_(3)
    replay()
    expected.on_verify_complete([3, 1, 2], batch_size=4, executed_steps=3)
    assert_same_state(state, expected)


def test_a_captured_chain_tree_follows_its_sequence_lengths(device):
    """`positions` must come from the lengths at the replay, not at the capture."""
    shape = (8, 4)
    arrays = {
        name: torch.full(shape, SENTINEL, dtype=torch.int64, device=device)
        for name in ("retrive_index", "retrive_next_token", "retrive_next_sibling")
    }
    positions = Guarded.empty((32,), torch.int64, strided=False).to(device)
    seq_lens = torch.zeros(8, dtype=torch.int64, device=device)
    num_reqs = torch.tensor([8], dtype=torch.int32, device=device)

    def launch():
        adaptive_spec_ext.build_chain_tree(
            **arrays, positions=positions.view, seq_lens=seq_lens, num_reqs=num_reqs
        )

    launch()
    replay = capture(launch)
    positions.view.fill_(SENTINEL)
    seq_lens.copy_(torch.arange(8) * 100)
    num_reqs.fill_(3)
    replay()
    expected = (torch.arange(8)[:, None] * 100 + torch.arange(4)).where(
        torch.arange(8)[:, None] < 3, torch.tensor(SENTINEL)
    )
    assert torch.equal(positions.view.cpu().view(shape), expected)
    positions.check_guard("positions")
