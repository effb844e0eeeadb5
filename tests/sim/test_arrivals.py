"""Arrival traces: rates as asked for, and public CSV files read as they are."""

import numpy as np
import pytest

from adaptive_spec.sim.arrivals import Trace, bursty, constant, diurnal, read_csv

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:17:04.0319600,3180,8\n"
    "2023-11-16 18:17:03.9799600,4808,10\n"
    "2023-11-16 18:17:05.9799600,12,0\n"
)


def rng(seed=5):
    return np.random.Generator(np.random.PCG64(seed))


def test_azure_traces_are_read_sorted_in_milliseconds_and_without_empty_requests(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    trace = read_csv(path)
    assert trace.arrival_ms == pytest.approx([0.0, 52.0], abs=1e-3)
    assert trace.prompt_tokens.tolist() == [4808, 3180]
    assert trace.output_tokens.tolist() == [10, 8]


def test_traces_with_seconds_are_read(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n5.5,10,3\n7,20,4\n")
    assert read_csv(path).arrival_ms.tolist() == [0.0, 1500.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have a column timestamp or .*, got none"),
        ("a,b,c\n1,2,3\n", "got a, b, c"),
        (AZURE + "soon,1,1\n", "line 5: "),
        (AZURE + "2023-11-16 18:17:04\n", "line 5: "),
        ("time,input_tokens,output_tokens\n1,2,0\n", "requests with output tokens, got none"),
    ],
)
def test_bad_files_are_refused_by_path(tmp_path, text, message):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        read_csv(path)
    assert str(error.value).startswith(str(path))


def test_rates_are_those_asked_for():
    """20,000 arrivals have a relative standard error of 0.7 %, and 4 % are more than 5 of them.
    About 2,000 bursts and calms of exponential length make it 4 %, hence the 25 %."""
    seconds = constant(rng(), 20_000, 50.0).arrival_ms[-1] / 1000
    assert 20_000 / seconds == pytest.approx(50.0, rel=0.04)
    seconds = bursty(rng(), 20_000, 5.0, 95.0, mean_seconds=0.2).arrival_ms[-1] / 1000
    assert 20_000 / seconds == pytest.approx(50.0, rel=0.25)
    trace = diurnal(rng(), 20_000, 10.0, 90.0, day_seconds=100.0)
    in_day = (trace.arrival_ms / 1000) % 100
    night, noon = (np.count_nonzero(abs(in_day - t) < 10) for t in (0, 50))
    # Rates 10 to 17.6 in the ten seconds after midnight, 82 to 90 in the twenty around noon.
    assert noon / max(night, 1) > 6


def test_faster_only_moves_arrivals():
    trace = constant(rng(), 10, 5.0)
    assert trace.faster(2).arrival_ms.tolist() == (trace.arrival_ms / 2).tolist()
    assert trace.faster(2).output_tokens is trace.output_tokens


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (([0.0], [1], [1, 2]), "got 1, 1 and 2"),
        (([], [], []), "got 0, 0 and 0"),
        (([1.0, 0.5], [1, 1], [1, 1]), "must not fall"),
        (([np.nan], [1], [1]), "finite"),
        (([0.0], [-1], [1]), "`prompt_tokens` must be at least 0, got -1"),
        (([0.0], [1], [0]), "`output_tokens` must be at least 1, got 0"),
    ],
)
def test_bad_traces_are_refused(columns, text):
    with pytest.raises(ValueError, match=text):
        Trace(*map(np.array, columns))


@pytest.mark.parametrize("rate", [0, -1, np.inf, np.nan])
def test_bad_rates_are_refused(rate):
    with pytest.raises(ValueError, match="above 0"):
        constant(rng(), 3, rate)
    with pytest.raises(ValueError, match="above 0"):
        constant(rng(), 3, 1.0).faster(rate)
