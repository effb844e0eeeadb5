"""The numbers behind sampling, by their reference; that the ops use the same, bit for bit, is what
test_against_reference.py shows."""

import numpy as np
import pytest

from adaptive_spec import noise_ref
from adaptive_spec.noise_ref import Kind

ALL_ONES = [0xFFFFFFFF] * 4


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        (ALL_ONES, ALL_ONES[:2], [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers(counter, key, expected):
    """Those of Random123, the authors' library."""
    assert noise_ref.philox(np.array(counter), np.array(key)).tolist() == expected


def test_a_row_s_words_are_philox_of_seed_number_stream_and_token():
    seed, number, stream = 0x299F31D0A4093822, 0x13198A2E85A308D3, 7
    words = noise_ref.noise_words(seed, number, stream, Kind.RESIDUAL, 11)
    for token in range(11):
        counter = [token // 4, 0x85A308D3, 0x13198A2E, 4 * 7 + 2]
        block = noise_ref.philox(np.array(counter), np.array([0xA4093822, 0x299F31D0]))
        assert words[token] == block[token % 4]


def test_no_two_uses_share_words():
    """Rows, seeds, streams, kinds and tokens; numbers and seeds that differ by 2^32 among them."""
    words = [
        noise_ref.noise_words(seed, number, stream, kind, 64)
        for seed in (0, 1, -1, 2**32, 2**63 - 1)
        for number in (0, 1, -1, 2**32, -(2**63))
        for stream in (0, 1, 2**24)
        for kind in Kind
    ]
    flat = np.concatenate(words)
    # Of 14,400 random words, 0.024 pairs agree by chance.
    assert len(np.unique(flat)) >= len(flat) - 2


def test_numbers_go_round_at_64_bits():
    for number in (0, 5, 2**63):
        same = [
            noise_ref.noise_words(3, number + turn * 2**64, 0, Kind.CHOICE, 5)
            for turn in (-1, 0, 1)
        ]
        assert np.array_equal(same[0], same[1])
        assert np.array_equal(same[1], same[2])


def test_arrays_of_seeds_and_numbers_give_each_one_s_words():
    seeds = np.array([-(2**63), -1, 0, 2**40], dtype=np.int64)
    numbers = np.array([7, -1, 2**63 - 1, 0], dtype=np.int64)
    together = noise_ref.noise_words(seeds, numbers, 1, Kind.CHOICE, 6)
    for words, seed, number in zip(together, seeds.tolist(), numbers.tolist(), strict=True):
        assert np.array_equal(words, noise_ref.noise_words(seed, number, 1, Kind.CHOICE, 6))


def relative_error(result: np.ndarray, exact: np.ndarray) -> float:
    assert result.dtype == np.float32
    return float(np.max(np.abs(result.astype(np.float64) - exact) / np.abs(exact)))


def test_log2_near_one_is_accurate_for_the_smallest_numbers_too():
    """An exponential number that wins a race is the logarithm of one close to 1."""
    small = np.float32(2.0) ** -np.arange(2, 126, dtype=np.float32)
    spread = np.linspace(-0.25, 0.5, 1_000_001, dtype=np.float32)
    x = np.concatenate([spread[spread != 0], small, -small])
    exact = np.log1p(x.astype(np.float64)) / np.log(2)
    assert relative_error(noise_ref.log2_near_one(x), exact) < 2.1e-7


def test_log2_is_accurate_over_all_exponents():
    mantissas = np.linspace(1, 2, 40_001, dtype=np.float32)[:-1]
    exponents = np.arange(-126, 128)
    x = np.ldexp(mantissas, exponents[:, None]).astype(np.float32).ravel()
    result, exact = noise_ref.log2(x), np.log2(x.astype(np.float64))
    ulps = np.abs(result - exact) / np.spacing(np.abs(exact).astype(np.float32))
    assert ulps[exact != 0].max() < 3
    # Min-p of 1 is 0 below the best, and one below 1 is below 0.
    assert noise_ref.log2(np.float32(1)) == 0
    assert noise_ref.log2(np.nextafter(np.float32(1), np.float32(0))) < 0


def test_exp2_is_accurate_and_ends_where_it_should():
    x = np.linspace(-126, 0, 2_000_001, dtype=np.float32)
    assert relative_error(noise_ref.exp2(x), np.exp2(x.astype(np.float64))) < 2**-22
    ends = np.array([0, -0.0, -126, np.nextafter(np.float32(-126), np.float32(-127))])
    ends = np.concatenate([ends, [-1e30, -np.inf, np.nan, -1e-45]]).astype(np.float32)
    assert noise_ref.exp2(ends).tolist() == [1, 1, 2**-126, 0, 0, 0, 0, 1]


def test_exp2_never_exceeds_one():
    """A weight above the best's would count for more units than a row has room for."""
    x = -np.ldexp(np.float32(1), -np.arange(150)).astype(np.float32)
    assert (noise_ref.exp2(x) <= 1).all()


WORDS = np.unique(
    np.concatenate(
        [
            np.linspace(0, 2**32 - 1, 1_000_001).astype(np.uint32),
            np.arange(1000, dtype=np.uint32),
            ~np.arange(1000, dtype=np.uint32),
            # Where from_one passes 1/4, from either side.
            np.uint32(3 * 2**30 - 500) + np.arange(1000, dtype=np.uint32),
        ]
    )
)


def test_uniform_numbers_are_below_one():
    numbers = noise_ref.uniform(WORDS)
    assert (numbers[0], numbers[-1]) == (0, 1 - 2**-24)
    assert np.abs(numbers.astype(np.float64) - WORDS / 2**32).max() < 2**-24


def test_exponential_numbers_are_accurate_at_both_ends():
    exact = -np.log1p(-(~WORDS + 0.5) / 2**32) / np.log(2)
    result = noise_ref.exponential(WORDS)
    assert relative_error(result, exact) < 5e-7
    assert result.min() > 0, "a race would be divided by 0"


def test_gumbel_numbers_are_accurate_and_bounded():
    """33 is the bound by which a scan leaves out what cannot win."""
    exact = -np.log2(-np.log1p(-(~WORDS + 0.5) / 2**32) / np.log(2))
    result = noise_ref.gumbel(WORDS)
    assert np.abs(result - exact).max() < 3e-6
    assert 32 < result.max() < 33
    assert np.isfinite(result).all()
