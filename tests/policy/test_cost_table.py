"""CostTable: wrong or missing times must be named, and measured ones must come back untouched."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_spec import CostTable

NAMES = {"machine": "H200", "model": "Llama-3.1-8B"}


def cliff(batch_size, steps):
    """A tile of 64 tokens: a staircase that interpolation or smoothing would change."""
    return 4.0 + 0.3 * steps + 2.0 * math.ceil(batch_size * (steps + 1) / 64)


def table(**kwargs):
    return CostTable.from_function(cliff, [1, 8, 32, 64], range(8), **{**NAMES, **kwargs})


def test_a_function_fills_every_entry_and_nothing_is_smoothed():
    costs = table()
    for batch in (1, 8, 32, 64):
        assert costs.row(batch).tolist() == [cliff(batch, s) for s in range(8)]
        assert costs.cost(batch, 5) == cliff(batch, 5)
    assert costs.missing() == []


@pytest.mark.parametrize(("batch_size", "runs_as"), [(1, 1), (2, 8), (8, 8), (33, 64), (65, 64)])
def test_a_batch_costs_what_its_padded_graph_costs(batch_size, runs_as):
    assert table().padded_batch_size(batch_size) == runs_as
    assert table().cost(batch_size, 3) == cliff(runs_as, 3)


def test_times_cannot_be_changed_behind_the_table():
    with pytest.raises(ValueError, match="read-only"):
        table().times[0, 0] = 1.0


@pytest.mark.parametrize("bad", [0, 0.0, -1.0, math.nan, math.inf, "4", None, True])
def test_a_bad_time_is_refused_by_entry(bad):
    times = {(1, 0): 4.0, (8, 3): bad}
    with pytest.raises(ValueError, match="batch size 8, S 3 must be a finite number"):
        CostTable(times)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ((0, 1), "batch size must be an integer of at least 1, got 0"),
        ((1, 65), "S must be an integer from 0 to 64, got 65"),
        ((1, -1), "got -1"),
        ((1.5, 1), "got 1.5"),
        ((True, 1), "got True"),
    ],
)
def test_a_bad_key_is_refused(key, text):
    with pytest.raises(ValueError, match=text):
        CostTable({key: 1.0})


def test_an_empty_table_is_refused():
    with pytest.raises(ValueError, match="at least one entry"):
        CostTable({})


def test_missing_entries_are_found_and_named():
    costs = CostTable({(1, 0): 4.0, (1, 3): 5.0, (8, 0): 4.5})
    assert costs.missing() == [(8, 3)]
    assert costs.missing([5], [0, 1]) == [(8, 1)], "batch 5 runs as 8"
    with pytest.raises(ValueError, match=r"missing: \(batch size 8, S 3\); measure"):
        costs.check_complete()
    with pytest.raises(ValueError, match="no time for batch size 8, S 3"):
        costs.cost(5, 3)
    with pytest.raises(ValueError, match="S 2"):
        costs.cost(1, 2)
    assert np.isnan(costs.row(8)[1])
    costs.check_complete([1])


def test_context_adds_its_slope_and_only_that():
    costs = table(context_tokens=1000, context_slopes={64: 2.0})
    assert costs.cost(64, 3) == cliff(64, 3)
    assert costs.cost(64, 3, context_tokens=3000) == cliff(64, 3) + 4.0
    assert costs.cost(64, 3, context_tokens=0) == cliff(64, 3) - 2.0
    assert costs.cost(8, 3, context_tokens=3000) == cliff(8, 3)


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"context_slopes": {64: -1.0}}, "context_slopes of batch size 64"),
        ({"context_slopes": {2: 1.0}}, "got 2"),
        ({"context_tokens": math.nan}, "context_tokens"),
        ({"context_tokens": 1000, "context_slopes": {64: 9.0}}, "above 0 at no context"),
        ({"machine": 3}, "`machine` must be a string"),
        ({"estimated": [(2, 3)]}, "batch size 2, S 3, which has no time"),
    ],
)
def test_bad_descriptions_are_refused(kwargs, text):
    with pytest.raises(ValueError, match=text):
        table(**kwargs)


def test_a_file_brings_back_the_same_table(tmp_path):
    path = tmp_path / "costs.json"
    costs = CostTable(
        {(1, 0): 0.1 + 0.2, (1, 3): 5.0, (8, 0): 1 / 3},
        context_tokens=1000,
        context_slopes={8: 0.01},
        estimated=[(1, 3)],
        source="a test",
        **NAMES,
    )
    costs.save(path)
    assert CostTable.load(path) == costs
    assert json.loads(path.read_text())["unit"] == "ms"


@pytest.mark.parametrize("name", ["machine", "model"])
def test_times_of_an_unnamed_machine_are_not_saved(tmp_path, name):
    with pytest.raises(ValueError, match=f"`{name}` must say"):
        table(**{name: ""}).save(tmp_path / "costs.json")
    assert not list(tmp_path.iterdir())


def test_a_table_of_another_machine_or_model_is_refused():
    table().check_machine("H200", "Llama-3.1-8B")
    with pytest.raises(ValueError, match="`machine` must be 'B200', which runs here, got 'H200'"):
        table().check_machine("B200", "Llama-3.1-8B")
    with pytest.raises(ValueError, match="`model` must be 'Qwen3-8B'"):
        table().check_machine("H200", "Qwen3-8B")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"unit": "s"}, "`unit` must be 'ms', got 's'"),
        ({"machine": ""}, "`machine` must be given"),
        ({"colour": 1}, "unknown key 'colour'"),
        ({"times": {"1": [4.0]}}, "batch size 1 must be a list of 2 values"),
        ({"times": {"01": [4.0, 5.0]}}, "keyed by batch sizes of at least 1, got '01'"),
        ({"times": {"1": [4.0, 0]}}, "batch size 1, S 3 must be a finite number"),
        ({"times": {"1": [math.nan, 5.0]}}, "batch size 1, S 0 must be a finite number"),
        ({"steps": [0, 0]}, "list of different integers"),
        ({"steps": [0, 3.5]}, "got 3.5"),
    ],
)
def test_a_bad_file_is_refused_by_path_and_entry(tmp_path, change, text):
    path = tmp_path / "costs.json"
    good = {**NAMES, "unit": "ms", "steps": [0, 3], "times": {"1": [4.0, 5.0], "8": [5.0, None]}}
    path.write_text(json.dumps(good))
    assert CostTable.load(path).missing() == [(8, 3)]
    path.write_text(json.dumps(good | change))
    with pytest.raises(ValueError, match=text) as error:
        CostTable.load(path)
    assert str(error.value).startswith(str(path))


def test_a_batch_size_given_twice_is_refused(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text('{"times": {"1": [4.0], "1": [5.0]}}')
    with pytest.raises(ValueError, match="key '1' must appear once"):
        CostTable.load(path)


positive = st.floats(0.01, 10.0)


@given(fixed=positive, per_token=st.floats(0.001, 0.1), per_step=positive)
def test_a_roofline_is_recovered_from_a_few_points(fixed, per_token, per_step):
    """The knee of the maximum is only found up to the token counts measured, so a true roofline
    with its knee at one of them must come back exactly."""
    knee = 64
    weights = per_token * knee

    def roofline(batch, s):
        return fixed + max(weights, per_token * batch * (s + 1)) + per_step * s

    points = [(1, 0), (1, 3), (16, 3), (64, 0), (64, 3), (128, 7)]
    partial = CostTable({pair: roofline(*pair) for pair in points})
    full = partial.completed([1, 16, 64, 128], range(8))
    full.check_complete([1, 16, 64, 128], range(8))
    for batch in (1, 16, 64, 128):
        for s in range(8):
            assert full.cost(batch, s) == pytest.approx(roofline(batch, s), rel=1e-6)
    assert full.estimated == {(b, s) for b in (1, 16, 64, 128) for s in range(8)} - set(points)


def test_completing_keeps_what_was_measured_and_never_goes_below_zero():
    times = {(1, 0): 5.0, (1, 7): 4.9, (8, 0): 6.0, (8, 7): 5.5}
    full = CostTable(times, **NAMES).completed([1, 8, 64], range(8))
    assert {pair: full.cost(*pair) for pair in times} == times
    assert min(full.times.ravel()) > 0
    assert not full.estimated & times.keys()
    assert (full.machine, full.model) == ("H200", "Llama-3.1-8B")


@pytest.mark.parametrize(
    ("times", "text"),
    [
        ({(1, 0): 4.0, (1, 3): 5.0}, "two or more batch sizes, got 1"),
        ({(1, 3): 4.0, (8, 3): 5.0}, "two or more step counts S, got 3"),
    ],
)
def test_an_estimate_needs_points_that_tell_batch_and_steps_apart(times, text):
    with pytest.raises(ValueError, match=text):
        CostTable(times).completed([1, 8], range(4))
