"""Speculative workers: they run the rounds, and swap runtime states as the policy decides."""

from adaptive_spec.workers.base import (
    BaseSpecWorker,
    SpecOptions,
    adaptive_unsupported_reason,
    num_new_kv_slots,
)
from adaptive_spec.workers.eagle import DecodeResult, EagleWorker

__all__ = [
    "BaseSpecWorker",
    "DecodeResult",
    "EagleWorker",
    "SpecOptions",
    "adaptive_unsupported_reason",
    "num_new_kv_slots",
]
