"""Acceptance statistics: right when the step count changes, and never NaN."""

import numpy as np
import pytest
import torch

from adaptive_spec.metrics import AcceptanceStats


def stats_of(*rounds):
    stats = AcceptanceStats()
    for steps, counts in rounds:
        stats.observe(counts, steps)
    return stats


def test_late_feedback_is_counted_at_the_steps_it_ran_with():
    """Two accepted of three, learnt after the slot went down to one step."""
    stats = stats_of((3, [2]))
    assert stats.position_rates() == [1.0, 1.0, 0.0]
    assert stats.hist == {3: [0, 0, 1, 0]}


def test_requests_that_could_not_reach_a_position_do_not_lower_its_rate():
    stats = stats_of((1, [1, 1, 0]), (3, [3]))
    assert stats.position_rates() == [0.75, 1.0, 1.0]
    assert stats.conditional_rates() == [0.75, 1.0, 1.0]


def test_conditional_rates_stop_where_nothing_is_known():
    stats = stats_of((4, [1, 0]))
    assert stats.position_rates() == [0.5, 0.0, 0.0, 0.0]
    assert stats.conditional_rates() == [0.5, 0.0]


def test_waste_is_the_rejected_share_of_what_was_proposed():
    stats = stats_of((3, [1, 2]))
    assert (stats.num_proposed, stats.num_accepted) == (6, 3)
    assert (stats.wasted_share, stats.accept_rate, stats.mean_accepted) == (0.5, 0.5, 1.5)


@pytest.mark.parametrize("stats", [stats_of((0, [0, 0])), stats_of(), stats_of((3, []))])
def test_nothing_proposed_is_zero_and_not_nan(stats):
    assert (stats.num_proposed, stats.wasted_share, stats.accept_rate) == (0, 0.0, 0.0)
    assert stats.mean_accepted == 0.0
    assert stats.position_rates() == stats.conditional_rates() == []
    assert stats.quantiles() == [0, 0, 0]


def test_the_rate_counts_the_verified_drafts_and_not_the_width_of_the_block():
    """A verify width of 8 checks 7 drafts: all accepted is 7/7, whatever the block's size."""
    assert stats_of((7, [7])).accept_rate == 1.0


def test_quantiles_tell_a_mix_of_easy_and_hard_from_middling_requests():
    mixed, even = stats_of((7, [7, 7, 0, 0])), stats_of((7, [4, 3, 4, 3]))
    assert mixed.mean_accepted == even.mean_accepted
    assert mixed.quantiles() == [0, 0, 7]
    assert even.quantiles() == [3, 3, 4]
    assert mixed.hist != even.hist
    assert even.quantiles([0, 1]) == [3, 4]


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_quantile_shares_outside_0_to_1_are_refused(share):
    with pytest.raises(ValueError, match="`shares` must lie in 0..1"):
        stats_of((1, [1])).quantiles([share])


@pytest.mark.parametrize("container", [tuple, np.array, torch.tensor])
def test_counts_may_come_in_any_container(container):
    stats = AcceptanceStats()
    stats.observe(container([2, 0]), 2)
    assert stats.hist == {2: [1, 0, 1]}


@pytest.mark.parametrize(
    ("counts", "steps", "error"),
    [
        ([3], 2, ValueError),
        ([1, -1], 2, ValueError),
        ([1.0], 2, TypeError),
        ([1], None, TypeError),
        ([1], -1, ValueError),
    ],
)
def test_bad_rounds_are_refused_and_not_half_counted(counts, steps, error):
    stats = stats_of((2, [1]))
    with pytest.raises(error):
        stats.observe(counts, steps)
    assert stats.hist == {2: [0, 1, 0]}
