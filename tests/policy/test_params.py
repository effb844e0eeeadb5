"""The table of slots: routing, graph sizes, and feedback that reaches only its own slot."""

import json

import pytest

from adaptive_spec.routing import Debounce, pad_to_cuda_graph_bs, slot_index_for_batch
from adaptive_spec.step_policy import (
    AdaptiveSpeculativeParams,
    DecisionReason,
    _load_adaptive_config,
    resolve_candidate_steps_from_config,
)

EAGER = {"ema_alpha": 1.0, "warmup_batches": 0, "update_interval": 1}


def test_the_built_in_table():
    params = AdaptiveSpeculativeParams(initial_steps=3)
    assert params._bs_list == [1, 8, 32]
    table = {size: slot.candidate_steps for size, slot in params._slots.items()}
    assert table == {1: [1, 3, 7], 8: [1, 3], 32: [1]}
    assert [slot.down_hysteresis for slot in params._slots.values()] == [-0.25, 0.0, 0.0]
    assert all(slot.up_hysteresis == slot.ceiling_coeff == 0 for slot in params._slots.values())
    assert params.candidate_steps == [1, 3, 7]
    assert [params.get_steps_for_batch(size) for size in (1, 8, 32)] == [3, 3, 1]


def test_batches_go_to_the_largest_bound_not_above_them():
    params = AdaptiveSpeculativeParams(
        3,
        {
            "4": {"candidate_steps": [1]},
            "8": {"candidate_steps": [2]},
            "32": {"candidate_steps": [3]},
        },
    )
    routed = {size: params._route(size).candidate_steps[0] for size in (1, 4, 7, 8, 31, 32, 999)}
    assert routed == {1: 1, 4: 1, 7: 1, 8: 2, 31: 2, 32: 3, 999: 3}


def test_batches_are_padded_before_they_are_routed():
    params = AdaptiveSpeculativeParams(3)
    params.set_cuda_graph_bs([32, 8, 4, 16, 8])
    assert params._route(5) is params._slots[8]
    assert params._route(17) is params._slots[32]
    assert params._route(100) is params._slots[32], "beyond every graph: its own size decides"
    params.set_cuda_graph_bs(None)
    assert params._route(5) is params._slots[1]


def test_graphs_are_pruned_to_the_sizes_that_can_run_the_step():
    params = AdaptiveSpeculativeParams(3)
    assert params.cuda_graph_bs_for_step(7) is None
    params.set_cuda_graph_bs([4, 8, 16, 32])
    sizes = {step: params.cuda_graph_bs_for_step(step) for step in params.candidate_steps}
    assert sizes == {1: [4, 8, 16, 32], 3: [4, 8, 16], 7: [4]}
    assert sum(map(len, sizes.values())) == 3 + 2 + 2 + 1, "the sum of the sizes' ladders"


def test_a_step_that_no_graph_can_run_gets_an_empty_list_and_not_all():
    params = AdaptiveSpeculativeParams(3)
    params.set_cuda_graph_bs([64, 128])
    assert params.cuda_graph_bs_for_step(7) == []
    assert params.cuda_graph_bs_for_step(1) == [64, 128]
    assert params.cuda_graph_bs_for_step(5) == [], "a step of no slot"
    params.set_cuda_graph_bs([])
    assert params.cuda_graph_bs_for_step(7) is None, "no sizes: graphs are off"


@pytest.mark.parametrize("graphs", [[1, 2, 4, 8, 16], [3, 6, 40], [64]])
@pytest.mark.parametrize("debounce", [0, 3])
def test_whatever_routing_asks_for_was_not_pruned(graphs, debounce):
    """Every (padded size, step) that a round can run with has a graph."""
    params = AdaptiveSpeculativeParams(
        3,
        {
            "1": {"candidate_steps": [0, 5]},
            "5": {"candidate_steps": [2]},
            "33": {"candidate_steps": [1, 2]},
            "slot_debounce": debounce,
        },
    )
    params.set_cuda_graph_bs(graphs)
    captured = {
        (size, step)
        for step in params.candidate_steps
        for size in params.cuda_graph_bs_for_step(step)
    }
    needed = {
        (pad_to_cuda_graph_bs(batch_size, graphs), step)
        for batch_size in range(1, graphs[-1] + 1)
        for step in params._route(batch_size).candidate_steps
    }
    assert captured >= needed
    if debounce:
        assert captured == {(size, step) for size in graphs for step in params.candidate_steps}
    else:
        assert captured == needed


@pytest.mark.parametrize("sizes", [[1, 0], [-4], [True], [2.0], ["8"], [None]])
def test_bad_graph_sizes_are_refused_and_change_nothing(sizes):
    params = AdaptiveSpeculativeParams(3)
    params.set_cuda_graph_bs([4, 8])
    with pytest.raises(ValueError, match="`cuda_graph_bs` must hold positive integers, got"):
        params.set_cuda_graph_bs(sizes)
    assert params.cuda_graph_bs_for_step(1) == [4, 8]


def test_feedback_reaches_the_slot_of_its_batch_only():
    params = AdaptiveSpeculativeParams(
        3, {**EAGER, "1": {"candidate_steps": [1, 3]}, "8": {"candidate_steps": [1, 3, 5]}}
    )
    assert params.on_verify_complete([0], batch_size=1) == 1
    assert params.on_verify_complete([3] * 8, batch_size=8) == 5
    assert params.on_verify_complete([], batch_size=8) is None
    assert (params.get_steps_for_batch(1), params.get_steps_for_batch(8)) == (1, 5)
    small, large = params.status()
    assert (small["batch_size"], small["batch_count"], small["reason"]) == (1, 1, "down")
    assert (large["batch_size"], large["batch_count"], large["reason"]) == (8, 1, "empty")


def test_a_late_sample_of_the_old_steps_is_dropped():
    params = AdaptiveSpeculativeParams(3, {**EAGER, "1": {"candidate_steps": [1, 3]}})
    assert params.on_verify_complete([0], 1, executed_steps=3) == 1
    slot = params._route(1)
    before = (slot.ema_accept_len, slot._batch_count)
    assert params.on_verify_complete([3], 1, executed_steps=3) is None
    assert (slot.ema_accept_len, slot._batch_count) == before
    assert slot.reason is DecisionReason.STALE


def test_asking_for_the_steps_changes_nothing():
    params = AdaptiveSpeculativeParams(3)
    before = params.status()
    assert [params.get_steps_for_batch(size) for size in (1, 40, 1, 9)] == [3, 1, 3, 3]
    assert params.status() == before


def test_hovering_at_a_boundary_needs_several_rounds_in_a_row_to_swap():
    params = AdaptiveSpeculativeParams(
        7, {"1": {"candidate_steps": [7]}, "8": {"candidate_steps": [1]}, "slot_debounce": 3}
    )
    assert params.get_steps_for_batch(1) == 7
    assert [params.get_steps_for_batch(size) for size in (8, 1, 8, 1, 8, 8, 1)] == [7] * 7
    assert [params.get_steps_for_batch(8) for _ in range(4)] == [7, 7, 1, 1]
    params.on_verify_complete([1], batch_size=1)
    assert params._slots[1]._batch_count == 1, "learning goes to the routed slot all the same"


def test_debounce_counts_rounds_of_one_and_the_same_other_slot():
    debounce = Debounce(2)
    assert [debounce.follow(slot) for slot in (0, 1, 2, 1, 2, 2)] == [0, 0, 0, 0, 0, 2]
    debounce.reset()
    assert debounce.follow(1) == 1
    for rounds in (0, 1):
        at_once = Debounce(rounds)
        assert [at_once.follow(slot) for slot in (0, 1, 0, 2)] == [0, 1, 0, 2]


def test_routing_functions_at_their_edges():
    assert [pad_to_cuda_graph_bs(size, [2, 4]) for size in (0, 1, 2, 3, 4, 5)] == [2, 2, 2, 4, 4, 5]
    assert pad_to_cuda_graph_bs(3, None) == pad_to_cuda_graph_bs(3, []) == 3
    assert [slot_index_for_batch(size, [4, 8]) for size in (0, 3, 4, 8, 99)] == [0, 0, 0, 1, 1]


def test_easy_and_hard_requests_have_the_same_ema_as_middling_ones():
    """Why `AcceptanceStats` keeps a histogram: the policy itself sees the mean only."""
    mixed, even = (
        AdaptiveSpeculativeParams(7, EAGER | {"1": {"candidate_steps": [7]}}) for _ in "ab"
    )
    mixed.on_verify_complete([7, 7, 0, 0], 4)
    even.on_verify_complete([4, 3, 4, 3], 4)
    assert mixed._route(4).ema_accept_len == even._route(4).ema_accept_len == 3.5


def test_loading_under_the_names_that_sglang_uses(tmp_path):
    path = tmp_path / "config.json"
    raw = {"ema_alpha": 0.5, "1": {"candidate_steps": [5, 2]}, "8": {"candidate_steps": [3]}}
    path.write_text(json.dumps(raw))
    table, entries = _load_adaptive_config(str(path))
    assert table == raw
    assert entries == {1: raw["1"], 8: raw["8"]}
    assert resolve_candidate_steps_from_config(cfg_path=str(path)) == [2, 3, 5]
    assert resolve_candidate_steps_from_config() == [1, 3, 7]
    params = AdaptiveSpeculativeParams(initial_steps=5, cfg_path=str(path))
    assert (params._slots[1].current_steps, params._slots[8].current_steps) == (5, 3)
    assert params._slots[8].ema_alpha == 0.5
