"""Where everything lies in the adaptive state, as the compiled core lays it out.

Offsets of the header are from the start of the state, those of a slot's configuration and state
from the start of the record. In units of the field's own size: int64 and float64 in words, int32 in
halves of one. The records themselves are described in csrc/core/records.h.
"""

import numpy as np
import triton.language as tl
from adaptive_spec_ext import _C

_records = _C.record_dtypes()


def _place(record: str, field: str) -> tl.constexpr:
    dtype, offset = _records[record].fields[field][:2]
    return tl.constexpr(offset // dtype.base.itemsize)


def _num_words(record: str) -> tl.constexpr:
    return tl.constexpr(_records[record].itemsize // np.dtype(np.int64).itemsize)


MAGIC_VALUE = tl.constexpr(_C.STATE_MAGIC)
MAX_SLOTS = tl.constexpr(_C.MAX_SLOTS)
MIN_RING_DEPTH = tl.constexpr(_C.MIN_RING_DEPTH)
RECORD_WORDS = tl.constexpr(_C.ROUND_RECORD_WORDS)

HEADER_WORDS = _num_words("StateHeader")
CONFIG_WORDS = _num_words("SlotConfig")
SLOT_WORDS = _num_words("SlotState")

MAGIC = _place("StateHeader", "magic")
NUM_WORDS = _place("StateHeader", "num_words")
NUM_SLOTS = _place("StateHeader", "num_slots")
RING_DEPTH = _place("StateHeader", "ring_depth")
NEXT_ROUND = _place("StateHeader", "next_round")
NUM_ANOMALIES = _place("StateHeader", "num_anomalies")

EMA_ALPHA = _place("SlotConfig", "ema_alpha")
UP_HYSTERESIS = _place("SlotConfig", "up_hysteresis")
DOWN_HYSTERESIS = _place("SlotConfig", "down_hysteresis")
CEILING_COEFF = _place("SlotConfig", "ceiling_coeff")
UPDATE_INTERVAL = _place("SlotConfig", "update_interval")
WARMUP_BATCHES = _place("SlotConfig", "warmup_batches")
MIN_DWELL = _place("SlotConfig", "min_dwell")
PROBE_BACKOFF = _place("SlotConfig", "probe_backoff")
NUM_CANDIDATES = _place("SlotConfig", "num_candidates")
RESET_EMA_ON_SWITCH = _place("SlotConfig", "reset_ema_on_switch")
CANDIDATE_STEPS = _place("SlotConfig", "candidate_steps")

EMA = _place("SlotState", "ema")
BATCH_COUNT = _place("SlotState", "batch_count")
LAST_SWITCH = _place("SlotState", "last_switch")
NUM_SWITCHES = _place("SlotState", "num_switches")
NUM_STALE = _place("SlotState", "num_stale")
INDEX = _place("SlotState", "index")
REASON = _place("SlotState", "reason")
PROBE_WAIT = _place("SlotState", "probe_wait")
PROBE_LEFT = _place("SlotState", "probe_left")
PROBING = _place("SlotState", "probing")
