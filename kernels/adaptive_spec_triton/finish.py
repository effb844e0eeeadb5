"""How a round ends: twin of csrc/core/round.h and ring.h.

One program's scalars: what it stores, it stores with one thread, so nothing here reads back from
memory what it has stored before.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from . import layout
from .policy import observe
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
def _publish(adaptive, round_number, accepted, num_reqs, executed_steps, steps, reason):
    """`RingView::publish`. steps, reason: those that the round's slot has now.

    Triton has no plain store of system scope; an exchange is one. The word of the round's slot
    comes last and releases: a host that has seen it is ordered behind all that was written before.
    """
    num_slots = tl.load(int32_at(adaptive.words, layout.NUM_SLOTS))
    depth = tl.load(int32_at(adaptive.words, layout.RING_DEPTH)).to(tl.int64)
    ring_words = adaptive.ring + (round_number & (depth - 1)) * (num_slots + layout.RECORD_WORDS)
    tag = round_number & 0xFFFFFFFF
    low = tl.full([], 0xFFFFFFFF, tl.int64)
    record = ring_words + num_slots
    slot_and_steps = (executed_steps | (adaptive.slot << 8)).to(tl.int64)
    tl.atomic_xchg(record, tag | ((accepted & low) << 32), sem="relaxed", scope="sys")
    tl.atomic_xchg(record + 1, tag | ((num_reqs & low) << 32), sem="relaxed", scope="sys")
    tl.atomic_xchg(record + 2, tag | ((slot_and_steps & low) << 32), sem="relaxed", scope="sys")
    configs = adaptive.words + layout.HEADER_WORDS
    slots = configs + num_slots * layout.CONFIG_WORDS
    for other in range(num_slots):
        if other != adaptive.slot:
            index = tl.load(int32_at(slots + other * layout.SLOT_WORDS, layout.INDEX))
            config = configs + other * layout.CONFIG_WORDS
            other_steps = tl.load(int32_at(config, layout.CANDIDATE_STEPS + index))
            other_reason = tl.load(int32_at(slots + other * layout.SLOT_WORDS, layout.REASON))
            payload = (other_steps & 0xFF) | ((other_reason & 0xFF) << 8)
            word = tag | (payload.to(tl.int64) << 32)
            tl.atomic_xchg(ring_words + other, word, sem="relaxed", scope="sys")
    payload = (steps & 0xFF) | ((reason & 0xFF) << 8)
    word = tag | (payload.to(tl.int64) << 32)
    tl.atomic_xchg(ring_words + adaptive.slot, word, sem="release", scope="sys")


@triton.jit
def close_round(adaptive, num_steps, accepted, num_anomalies, num_live):
    """By one program, with the round's exact sums, int64. What is no state stays as it is."""
    if is_usable(adaptive):
        words = adaptive.words
        num_slots = tl.load(int32_at(words, layout.NUM_SLOTS)).to(tl.int64)
        config = words + layout.HEADER_WORDS + adaptive.slot * layout.CONFIG_WORDS
        slots = words + layout.HEADER_WORDS + num_slots * layout.CONFIG_WORDS
        slot = slots + adaptive.slot * layout.SLOT_WORDS
        executed_steps = num_steps.to(tl.int32)
        steps, reason = observe(config, slot, executed_steps, accepted, num_live)
        anomalies = tl.load(words + layout.NUM_ANOMALIES)
        tl.store(words + layout.NUM_ANOMALIES, anomalies + num_anomalies)
        round_number = tl.load(words + layout.NEXT_ROUND)
        tl.store(words + layout.NEXT_ROUND, round_number + 1)
        _publish(adaptive, round_number, accepted, num_live, executed_steps, steps, reason)
