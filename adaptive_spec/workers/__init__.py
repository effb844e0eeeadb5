"""Speculative workers: they run the rounds, and swap runtime states as the policy decides."""

from adaptive_spec.workers.base import (
    BaseSpecWorker,
    SpecOptions,
    adaptive_unsupported_reason,
    num_new_kv_slots,
)
from adaptive_spec.workers.eagle import EagleWorker
from adaptive_spec.workers.eagle_v2 import EagleWorkerV2
from adaptive_spec.workers.rounds import DecodeResult

__all__ = [
    "BaseSpecWorker",
    "DecodeResult",
    "EagleWorker",
    "EagleWorkerV2",
    "SpecOptions",
    "adaptive_unsupported_reason",
    "num_new_kv_slots",
]
