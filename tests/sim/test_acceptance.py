"""Acceptance processes: their draws must follow the survival that the oracle is computed from.

Statistical tests compare a share of n rounds with its expectation and allow 5 standard errors,
with the number of independent requests as n where rounds of a request are alike. Seeds are fixed,
so they pass or fail for good; a new seed would fail with a probability below 1e-5 each.
"""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_spec.sim.acceptance import (
    MAX_DEPTH,
    Correlated,
    Mixture,
    Positional,
    Recorded,
    RegimeSwitching,
    drifting,
    expected_tokens,
    geometric,
    kaplan_meier,
)

LENGTHS = np.array([37, 1, 200] * 500)
PROCESSES = {
    "geometric": geometric(0.7),
    "falling": drifting(0.9, 0.3, 5),
    "rising": drifting(0.3, 0.95, 5),
    "mixture": Mixture([geometric(0.2), geometric(0.9)], [1, 3]),
    "regimes": RegimeSwitching([geometric(0.2), geometric(0.8), geometric(0.9)], [20, 40, 5]),
    "correlated": Correlated(0.7, 1.0, 20),
}


def rng(seed=3):
    return np.random.Generator(np.random.PCG64(seed))


@pytest.mark.parametrize("name", PROCESSES)
def test_draws_follow_the_survival_function(name):
    process = PROCESSES[name]
    # Requests of one length: where rounds are alike, the mean of a request is one sample.
    by_request = process.depths(rng(), np.full(4000, 60)).reshape(4000, 60)
    for k in range(1, 8):
        shares = (by_request >= k).mean(axis=1)
        error = shares.std() / np.sqrt(len(shares))
        assert abs(shares.mean() - process.survival()[k]) < 5 * error + 1e-12


@pytest.mark.parametrize("name", PROCESSES)
def test_same_seed_same_depths_in_the_shape_asked_for(name):
    first, again = (PROCESSES[name].depths(rng(), LENGTHS) for _ in range(2))
    assert first.dtype == np.int8
    assert first.shape == (LENGTHS.sum(),)
    assert (first == again).all()
    assert first.min() >= 0
    assert PROCESSES[name].depths(rng(), np.array([], dtype=int)).shape == (0,)


def test_certain_outcomes_are_certain():
    assert (geometric(1.0).depths(rng(), LENGTHS) == MAX_DEPTH).all()
    assert (geometric(0.0).depths(rng(), LENGTHS) == 0).all()
    assert (Positional([1.0, 0.0]).depths(rng(), LENGTHS) == 1).all()


def test_expected_tokens_are_the_sum_that_defines_them():
    tokens = expected_tokens(Positional([0.5, 0.4]))
    assert tokens[:4] == pytest.approx([1, 1.5, 1.7, 1.7 + 0.5 * 0.4 * 0.4])


def test_requests_of_a_mixture_keep_their_process():
    depths = Mixture([geometric(0.0), geometric(1.0)], [1, 1]).depths(rng(), np.full(200, 50))
    kinds = depths.reshape(200, 50)
    assert (kinds == kinds[:, :1]).all()
    assert 0 < (kinds[:, 0] == 0).mean() < 1


def test_regimes_last_as_long_as_said():
    process = RegimeSwitching([geometric(0.0), geometric(1.0)], [30, 90])
    bad = process.depths(rng(), np.array([400_000])) == 0
    edges = np.flatnonzero(np.diff(bad.astype(int)))
    stretches = np.diff(edges)
    means = sorted((stretches[::2].mean(), stretches[1::2].mean()))
    assert means == pytest.approx([30, 90], rel=0.1)


def test_correlation_fades_with_the_memory_given():
    """The latent x itself is not seen; alikeness of neighbouring depths is, and it must fade."""
    depths = Correlated(0.7, 1.5, 20).depths(rng(), np.full(500, 400)).reshape(500, 400)
    depths = np.minimum(depths, 5)
    near, far = (np.corrcoef(depths[:, :-d].ravel(), depths[:, d:].ravel())[0, 1] for d in (1, 200))
    assert near > 0.2
    assert abs(far) < 0.02


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.integers(0, 2**32))
def test_censored_rounds_give_back_the_rates(rates, seed):
    """The estimate that replaces what a small S hides, under a mix of S. At the last position at
    most 2,857 of 20,000 rounds tell: a standard error of 0.01, a tenth of what is allowed."""
    depths = Positional(rates).depths(rng(seed), np.array([20_000]))
    steps = rng(seed + 1).integers(0, 7, 20_000)
    found = kaplan_meier(steps, np.minimum(depths, steps))
    true = Positional(rates).survival()
    assert np.abs(found[:7] - true[:7]).max() < 0.1


def test_a_recording_is_replayed_in_order_where_nothing_is_hidden():
    steps = np.full(6, 5)
    accepted = np.array([0, 1, 2, 3, 4, 0])
    depths = Recorded(np.zeros(6, dtype=int), steps, accepted).depths(rng(), np.array([12]))
    begin = int(np.flatnonzero(depths[:6] == 1)[0]) - 1
    assert np.roll(depths[:6], -begin).tolist() == accepted.tolist()
    assert depths[6:].tolist() == depths[:6].tolist()


def test_a_recording_completes_what_its_steps_hid():
    true = geometric(0.8)
    depths = true.depths(rng(), np.full(500, 100))
    steps = np.resize([0, 1, 3, 6], len(depths))
    process = Recorded(np.repeat(np.arange(500), 100), steps, np.minimum(depths, steps))
    replayed = process.depths(rng(4), np.full(500, 100))
    for k in range(1, 10):
        # 50,000 rounds of which a quarter shows position 6: 5 standard errors of the estimate.
        assert abs((replayed >= k).mean() - true.survival()[k]) < 0.03


@pytest.mark.parametrize("suffix", [".json", ".npz"])
def test_recordings_are_read_from_files(tmp_path, suffix):
    path = tmp_path / f"rounds{suffix}"
    columns = {"request": [1, 0, 1], "steps": [3, 3, 3], "accepted": [3, 0, 1]}
    if suffix == ".json":
        path.write_text(json.dumps(columns))
    else:
        np.savez(path, **columns)
    expected = Recorded(*map(np.array, columns.values()))
    assert Recorded.load(path).survival().tolist() == expected.survival().tolist()


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ({"request": [0], "steps": [3], "accepted": [4]}, "round 0 must have 0 <= accepted"),
        ({"request": [0], "steps": [3], "accepted": [-1]}, "got accepted -1 of 3 steps"),
        ({"request": [0], "steps": [0], "accepted": [0]}, "above 0 in some round"),
        ({"request": [0, 1], "steps": [3], "accepted": [1]}, "got 2, 1 and 1"),
        ({"request": [0], "steps": [3.5], "accepted": [1]}, "`steps` must be a list of integers"),
        ({"request": [0], "steps": [3]}, "must have request, steps and accepted"),
        ([1, 2], "must have request, steps and accepted"),
    ],
)
def test_bad_recordings_are_refused_by_path(tmp_path, columns, text):
    path = tmp_path / "rounds.json"
    path.write_text(json.dumps(columns))
    with pytest.raises(ValueError, match=text) as error:
        Recorded.load(path)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Positional([]), "1 to 64 values"),
        (lambda: Positional([0.5, 1.5]), "got 1.5"),
        (lambda: Mixture([geometric(0.5)], [0.0]), "`weights`"),
        (lambda: Mixture([geometric(0.5)], [1.0, 1.0]), "`weights` must be 1 values"),
        (lambda: RegimeSwitching([geometric(0.5)], [3]), "two or more pairs"),
        (lambda: RegimeSwitching([geometric(0.5)] * 2, [3, 0]), "at least 1"),
        (lambda: Correlated(1.0, 1.0, 1.0), "`rate`"),
        (lambda: Correlated(0.5, 1.0, 0.0), "`memory`"),
    ],
)
def test_bad_parameters_are_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make()
