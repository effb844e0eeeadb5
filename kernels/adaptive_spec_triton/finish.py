"""How a round ends: twin of csrc/core/round.h and ring.h.

One program's scalars: what it stores, it stores with one thread, so nothing here reads back from
memory what it has stored before.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from . import layout
from .policy import observe, steps_at
from .tensors import int32_at


class Adaptive(NamedTuple):
    """The adaptive state that a round reports to."""

    words: tl.tensor
    ring: tl.tensor
    num_words: tl.tensor
    num_ring_words: tl.tensor
    slot: tl.tensor


@triton.jit
def num_live_rows(num_reqs, batch_size):
    """Rows that are not padding, int64."""
    num_live = batch_size.to(tl.int64)
    if num_reqs is not None:
        num_live = tl.minimum(tl.maximum(tl.load(num_reqs).to(tl.int64), 0), num_live)
    return num_live


@triton.jit
def is_usable(adaptive):
    """Whether the tensors are a state with its ring and slot: `state_error` of the core."""
    words = adaptive.words
    num_slots = tl.load(int32_at(words, layout.NUM_SLOTS)).to(tl.int64)
    depth = tl.load(int32_at(words, layout.RING_DEPTH)).to(tl.int64)
    num_words = layout.HEADER_WORDS + num_slots * (layout.CONFIG_WORDS + layout.SLOT_WORDS)
    is_state = tl.load(words + layout.MAGIC) == layout.MAGIC_VALUE
    is_state &= (num_slots >= 1) & (num_slots <= layout.MAX_SLOTS)
    is_state &= tl.load(words + layout.NUM_WORDS) == num_words
    is_state &= adaptive.num_words == num_words
    is_state &= (depth >= layout.MIN_RING_DEPTH) & ((depth & (depth - 1)) == 0)
    is_state &= adaptive.num_ring_words == depth * (num_slots + layout.RECORD_WORDS)
    return is_state & (adaptive.slot >= 0) & (adaptive.slot < num_slots)


@triton.jit
def _store_word(word, round_number, payload, sem: tl.constexpr):
    """A word of the ring: the round number's low 32 bits, above them those of `payload`.

    Triton has no plain store of system scope; an exchange is one.
    """
    low = tl.full([], 0xFFFFFFFF, tl.int64)
    value = (round_number & low) | ((payload.to(tl.int64) & low) << 32)
    tl.atomic_xchg(word, value, sem=sem, scope="sys")


@triton.jit
def _decision(steps, reason):
    """The payload of a `DecisionWord`."""
    return (steps & 0xFF) | ((reason & 0xFF) << 8)


@triton.jit
def close_round(adaptive, num_steps, accepted, num_anomalies, num_live):
    """By one program, with the round's exact sums, int64. What is no state stays as it is.

    The word of the round's slot comes last and releases: a host that has seen it is ordered behind
    all that was written before.
    """
    if is_usable(adaptive):
        words = adaptive.words
        num_slots = tl.load(int32_at(words, layout.NUM_SLOTS))
        configs = words + layout.HEADER_WORDS
        slots = configs + num_slots * layout.CONFIG_WORDS
        executed_steps = num_steps.to(tl.int32)
        config = configs + adaptive.slot * layout.CONFIG_WORDS
        slot = slots + adaptive.slot * layout.SLOT_WORDS
        steps, reason = observe(config, slot, executed_steps, accepted, num_live)
        anomalies = tl.load(words + layout.NUM_ANOMALIES)
        tl.store(words + layout.NUM_ANOMALIES, anomalies + num_anomalies)
        number = tl.load(words + layout.NEXT_ROUND)
        tl.store(words + layout.NEXT_ROUND, number + 1)

        depth = tl.load(int32_at(words, layout.RING_DEPTH)).to(tl.int64)
        decisions = adaptive.ring + (number & (depth - 1)) * (num_slots + layout.RECORD_WORDS)
        record = decisions + num_slots
        _store_word(record, number, accepted, "relaxed")
        _store_word(record + 1, number, num_live, "relaxed")
        _store_word(record + 2, number, executed_steps | (adaptive.slot << 8), "relaxed")
        for other in range(num_slots):
            if other != adaptive.slot:
                other_config = configs + other * layout.CONFIG_WORDS
                other_slot = slots + other * layout.SLOT_WORDS
                other_steps = steps_at(other_config, tl.load(int32_at(other_slot, layout.INDEX)))
                other_reason = tl.load(int32_at(other_slot, layout.REASON))
                _store_word(
                    decisions + other, number, _decision(other_steps, other_reason), "relaxed"
                )
        _store_word(decisions + adaptive.slot, number, _decision(steps, reason), "release")
