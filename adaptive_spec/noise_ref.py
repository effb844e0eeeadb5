"""Slow reference of csrc/core/noise.h and elementary.h: numbers from (seed, number, stream, token).

Philox is written from its paper (Salmon et al. 2011). Logarithm and power are those of the ops bit
for bit, so their polynomials are the same; how a number is taken apart and put together is not.
Everything is numpy in float32, which fuses no multiplication with an addition.
"""

from __future__ import annotations

import enum

import numpy as np

#: Words that one counter gives.
BLOCK = 4
_KINDS_OF_NOISE = 4
_LOW = np.uint64(0xFFFFFFFF)
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_KEY_STEPS = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)
_ROUNDS = 10


class Kind(enum.IntEnum):
    """What a number is for; numbers for different things are independent."""

    CHOICE = 0
    COIN = 1
    RESIDUAL = 2


def philox(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Philox 4x32-10: uint32 [..., 4] from counters [..., 4] and keys [..., 2]."""
    words, key = counter.astype(np.uint64), key.astype(np.uint64)
    for number in range(_ROUNDS):
        round_key = (key + np.uint64(number) * _KEY_STEPS) & _LOW
        products = words[..., 0::2] * _MULTIPLIERS
        high, low = products >> np.uint64(32), products & _LOW
        mixed = high[..., ::-1] ^ words[..., 1::2] ^ round_key
        words = np.stack([mixed[..., 0], low[..., 1], mixed[..., 1], low[..., 0]], -1)
    return words.astype(np.uint32)


def _halves(number: int | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of what is left mod 2^64: the low and the high 32 bits."""
    is_array = isinstance(number, np.ndarray)
    whole = number.astype(np.uint64) if is_array else np.uint64(number % 2**64)
    return whole & _LOW, whole >> np.uint64(32)


def noise_words(
    seed: int | np.ndarray, number: int | np.ndarray, stream: int, kind: Kind, count: int
) -> np.ndarray:
    """The words of tokens 0 .. count - 1, uint32 [..., count], for a seed and a number, or for
    int64 arrays [...] of them."""
    blocks = np.arange((count + BLOCK - 1) // BLOCK)
    counter = np.empty((*np.shape(number), len(blocks), BLOCK), dtype=np.uint64)
    counter[..., 0] = blocks
    for i, half in enumerate(_halves(number), start=1):
        counter[..., i] = half[..., None]
    counter[..., 3] = _KINDS_OF_NOISE * stream + kind
    words = philox(counter, np.stack(_halves(seed), -1)[..., None, :])
    return words.reshape(*np.shape(number), len(blocks) * BLOCK)[..., :count]


def _terms(*terms: str) -> np.ndarray:
    """Of a polynomial, the highest power first."""
    return np.array([float.fromhex(term) for term in reversed(terms)], dtype=np.float32)


_LOG2_TERMS = _terms(
    "0x1.715476p+0",
    "-0x1.715496p-1",
    "0x1.ec7198p-2",
    "-0x1.713adp-2",
    "0x1.271baep-2",
    "-0x1.f11916p-3",
    "0x1.bb0874p-3",
    "-0x1.64d24ap-3",
    "0x1.3fc1d8p-4",
)
_EXP2_TERMS = _terms(
    "0x1p+0",
    "0x1.62e42ap-1",
    "0x1.ebfd9ep-3",
    "0x1.c685p-5",
    "0x1.3d28p-7",
    "0x1.461958p-10",
    "0x1.c7211p-13",
)


def log2_near_one(x: np.ndarray) -> np.ndarray:
    """log2(1 + x) for x in [-1/4, 1/2]."""
    return np.polyval(_LOG2_TERMS, x) * x


def log2(x: np.ndarray) -> np.ndarray:
    """Of positive, normal float32 numbers."""
    mantissa, exponent = np.frexp(x)
    is_low = mantissa < np.float32(0.75)
    mantissa = np.where(is_low, mantissa * np.float32(2), mantissa)
    return (exponent - is_low).astype(np.float32) + log2_near_one(mantissa - np.float32(1))


def exp2(x: np.ndarray) -> np.ndarray:
    """2^x of float32 numbers up to 0; 0 below -126 and for NaN."""
    usable = np.where(x >= -126, x, np.float32(0))
    whole = np.floor(usable)
    power = np.ldexp(np.polyval(_EXP2_TERMS, usable - whole), whole.astype(np.int32))
    return np.where(x >= -126, power, np.float32(0))


def uniform(words: np.ndarray) -> np.ndarray:
    """In [0, 1), float32: a word's leading 24 bits."""
    return np.ldexp((words >> np.uint32(8)).astype(np.float32), -24)


def exponential(words: np.ndarray) -> np.ndarray:
    """Exponentially distributed, times log2(e), float32: -log2 of a word as a number in (0, 1]."""
    half = np.float32(0.5)
    value = np.ldexp(words.astype(np.float32) + half, -32)
    from_one = np.ldexp((~words).astype(np.float32) + half, -32)
    is_near = from_one < np.float32(0.25)
    near = log2_near_one(-np.where(is_near, from_one, np.float32(0)))
    return -np.where(is_near, near, log2(value))


def gumbel(words: np.ndarray) -> np.ndarray:
    """With Gumbel's distribution in units of ln 2, up to a constant, float32."""
    return -log2(exponential(words))
