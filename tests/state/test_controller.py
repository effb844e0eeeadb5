"""The controller: the right state for the batch, from exactly the right decision."""

import pytest
import torch

from adaptive_spec import ops
from adaptive_spec.controller import AdaptiveController
from adaptive_spec.ring import RingTimeoutError
from adaptive_spec.state import AdaptiveState
from adaptive_spec.step_policy import AdaptiveSpeculativeParams, DecisionReason

CONFIG = {
    "1": {"candidate_steps": [1, 3, 7]},
    "8": {"candidate_steps": [1, 3]},
    "ema_alpha": 1.0,
    "warmup_batches": 0,
    "update_interval": 1,
}


class FakeState:
    def __init__(self, steps):
        self.speculative_num_steps = steps


class FakeWorker:
    """Records what the controller asks of it."""

    def __init__(self, fail_at=None):
        self.speculative_num_steps = None
        self.built = {}
        self.applied = []
        self.fail_at = fail_at

    def build_adaptive_runtime_state(
        self, speculative_num_steps, speculative_num_draft_tokens, cuda_graph_bs=None
    ):
        assert speculative_num_draft_tokens == speculative_num_steps + 1
        if speculative_num_steps == self.fail_at:
            raise MemoryError("capture failed")
        self.built[speculative_num_steps] = cuda_graph_bs
        return FakeState(speculative_num_steps)

    def apply_runtime_state(self, state):
        self.speculative_num_steps = state.speculative_num_steps
        self.applied.append(state.speculative_num_steps)


def make(policy_class=AdaptiveState, config=CONFIG, initial_steps=3, graphs=None, **kwargs):
    if policy_class is AdaptiveState:
        policy = AdaptiveState(config, initial_steps)
    else:
        policy = AdaptiveSpeculativeParams(initial_steps, config)
    worker = FakeWorker()
    controller = AdaptiveController(worker, policy, **kwargs)
    controller.init_states(graphs)
    return worker, policy, controller


def feed(policy, controller, counts, batch_size, steps):
    """The end of a round, as a verify op that was given the state, or as a host policy, sees it."""
    if isinstance(policy, AdaptiveState):
        ops.update_and_select(
            torch.tensor(counts, dtype=torch.int32),
            policy,
            slot=policy.slot_for_batch(batch_size),
            speculative_num_steps=steps,
        )
    else:
        controller.on_verify_complete(counts, batch_size, executed_steps=steps)


both_policies = pytest.mark.parametrize(
    "policy_class", [AdaptiveState, AdaptiveSpeculativeParams], ids=["device", "host"]
)


@both_policies
def test_each_step_gets_only_the_graphs_its_slots_can_run(policy_class):
    config = {
        "1": {"candidate_steps": [1, 3, 7]},
        "8": {"candidate_steps": [1, 3]},
        "32": {"candidate_steps": [1]},
    }
    worker, _, _ = make(policy_class, config, graphs=[4, 8, 16, 32])
    assert worker.built == {1: [4, 8, 16, 32], 3: [4, 8, 16], 7: [4]}


@both_policies
def test_a_step_without_any_graph_gets_an_empty_list_and_not_all(policy_class):
    config = {"1": {"candidate_steps": [1, 7]}, "32": {"candidate_steps": [1]}}
    worker, _, _ = make(policy_class, config, initial_steps=1, graphs=[64, 128])
    assert worker.built == {1: [64, 128], 7: []}


@both_policies
def test_feedback_of_one_slot_never_activates_anything_for_another(policy_class):
    """SGLang activates the finished batch's new step even if the next is in another slot."""
    worker, policy, controller = make(policy_class)
    controller.activate_step_by_batch(1)
    before = list(worker.applied)
    feed(policy, controller, [3], batch_size=1, steps=3)
    assert worker.applied == before
    controller.activate_step_by_batch(8)
    assert worker.speculative_num_steps == 3
    feed(policy, controller, [0] * 8, batch_size=8, steps=3)
    controller.activate_step_by_batch(1)
    assert worker.speculative_num_steps == 7


def test_lag_two_uses_exactly_the_decision_of_two_rounds_before():
    """A fresher decision that happens to be there must not be used: ranks would diverge."""
    worker, policy, controller = make(lag=2)
    used = []
    for counts in ([3], [3], [7], [7], [7]):
        controller.activate_step_by_batch(1)
        used.append(worker.speculative_num_steps)
        feed(policy, controller, counts, batch_size=1, steps=worker.speculative_num_steps)
    # Round 0's decision (3 -> 7) is there before round 1 starts, but round 1 belongs to round -1's.
    assert used == [3, 3, 7, 7, 7]
    assert policy.slots[0].num_stale == 1


def test_a_round_without_a_verify_op_is_a_named_error_and_can_be_taken_back():
    worker, policy, controller = make(timeout_s=0.01)
    controller.activate_step_by_batch(1)
    with pytest.raises(RingTimeoutError, match="round 0 for slot 0"):
        controller.activate_step_by_batch(1)
    assert controller.status()["ring_stalls"] == 1
    controller.cancel_round()
    controller.activate_step_by_batch(1)
    feed(policy, controller, [0], batch_size=1, steps=3)
    controller.activate_step_by_batch(1)
    assert worker.speculative_num_steps == 1
    controller.cancel_round()
    with pytest.raises(RuntimeError, match="no started round"):
        controller.cancel_round()


@both_policies
def test_hovering_at_a_slot_boundary_does_not_swap_every_round(policy_class):
    config = {
        "1": {"candidate_steps": [7]},
        "8": {"candidate_steps": [1]},
        "slot_debounce": 3,
    }
    worker, policy, controller = make(policy_class, config, initial_steps=7, graphs=[1, 8])
    assert worker.built == {7: [1, 8], 1: [1, 8]}, "any size may run with any step"

    def run(batch_sizes):
        used = []
        for batch_size in batch_sizes:
            controller.activate_step_by_batch(batch_size)
            used.append(worker.speculative_num_steps)
            feed(policy, controller, [0] * batch_size, batch_size, worker.speculative_num_steps)
        return used

    assert run([1, 8, 1, 8, 1, 8, 8, 1]) == [7] * 8
    assert run([8, 8, 8]) == [7, 7, 1]


def test_a_cancelled_round_does_not_count_for_the_debounce():
    config = {
        "1": {"candidate_steps": [7]},
        "8": {"candidate_steps": [1]},
        "slot_debounce": 2,
    }
    worker, policy, controller = make(config=config, initial_steps=7)
    controller.activate_step_by_batch(1)
    feed(policy, controller, [0], 1, 7)
    controller.activate_step_by_batch(8)
    controller.cancel_round()
    controller.activate_step_by_batch(8)
    assert worker.speculative_num_steps == 7


def test_with_overlap_both_rounds_in_flight_can_be_taken_back():
    # The second of two that fail must not be left counted: the reader would wait for a decision
    # that no op is going to make.
    worker, policy, controller = make(lag=2, timeout_s=0.05)
    for _ in range(2):
        controller.activate_step_by_batch(1)
    for _ in range(2):
        controller.cancel_round()
    with pytest.raises(RuntimeError, match="no started round"):
        controller.cancel_round()
    for _ in range(4):
        controller.activate_step_by_batch(1)
        feed(policy, controller, [0], batch_size=1, steps=worker.speculative_num_steps)
    assert controller.status()["ring_stalls"] == 0


def test_registering_a_state_that_no_slot_can_choose_is_refused():
    worker = FakeWorker()
    controller = AdaptiveController(worker, AdaptiveState({"1": {"candidate_steps": [1, 3]}}, 3))
    with pytest.raises(ValueError, match="5 steps, which no slot can choose"):
        controller.register(FakeState(5))
    controller.register(FakeState(3))
    with pytest.raises(ValueError, match="already registered"):
        controller.register(FakeState(3))
    controller.init_states()
    assert worker.built == {1: None}
    assert set(controller.states) == {1, 3}


def test_a_failed_build_leaves_no_half_built_table():
    worker = FakeWorker(fail_at=3)
    controller = AdaptiveController(worker, AdaptiveState(CONFIG, 3))
    with pytest.raises(MemoryError):
        controller.init_states()
    assert controller.states == {}
    assert worker.applied == []
    worker.fail_at = None
    controller.init_states()
    assert set(controller.states) == {1, 3, 7}


def test_use_before_init_states_says_what_to_do():
    controller = AdaptiveController(FakeWorker(), AdaptiveState(CONFIG, 3))
    with pytest.raises(RuntimeError, match="call init_states"):
        controller.activate_step_by_batch(1)


def test_a_bad_batch_size_starts_no_round():
    _, policy, controller = make()
    with pytest.raises(ValueError, match="`batch_size` must not be negative, got -1"):
        controller.activate_step_by_batch(-1)
    with pytest.raises(TypeError):
        controller.activate_step_by_batch("1")
    with pytest.raises(RuntimeError, match="no started round"):
        controller.cancel_round()
    controller.activate_step_by_batch(1)


@both_policies
def test_status_shows_why_each_slot_is_where_it_is(policy_class):
    worker, policy, controller = make(policy_class)
    controller.activate_step_by_batch(1)
    feed(policy, controller, [0], batch_size=1, steps=3)
    controller.activate_step_by_batch(1)
    status = controller.status()
    assert status["active_steps"] == 1
    assert status["num_switches"] == 1
    slot = status["slots"][0]
    assert slot["ema_accept_len"] == 0.0
    assert slot["batch_count"] == 1
    assert slot["speculative_num_steps"] == 1
    assert slot["reason"] == DecisionReason.DOWN.name.lower()


def test_host_and_device_policies_choose_the_same_steps_on_random_traffic():
    generator = torch.Generator().manual_seed(7)
    config = {**CONFIG, "ema_alpha": 0.3, "update_interval": 2, "slot_debounce": 2}
    runs = [
        make(policy_class, config, graphs=[1, 2, 4, 8, 16])
        for policy_class in (AdaptiveState, AdaptiveSpeculativeParams)
    ]
    for round_ in range(500):
        batch_size = int(torch.randint(1, 20, (), generator=generator))
        uniform = torch.rand(batch_size, generator=generator) * (0.3 if round_ // 50 % 2 else 1.5)
        for worker, policy, controller in runs:
            controller.activate_step_by_batch(batch_size)
            steps = worker.speculative_num_steps
            counts = (uniform * (steps + 1)).int().clamp(max=steps).tolist()
            feed(policy, controller, counts, batch_size, steps)
    device, host = (worker for worker, _, _ in runs)
    assert device.applied == host.applied
    assert len(device.applied) > 10
