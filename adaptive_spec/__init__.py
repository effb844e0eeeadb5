"""Adaptive speculative decoding: how many tokens to draft, decided where the drafts are verified.

Names are looked up on first use: importing the package costs neither torch nor the compiled
extension, and the parts that are pure Python work without either.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "DEFAULT_ADAPTIVE_CONFIG": "config",
    "AdaptiveConfig": "config",
    "AdaptiveConfigWarning": "config",
    "SlotConfig": "config",
    "load_adaptive_config": "config",
    "migrate_adaptive_config": "config",
    "resolve_candidate_steps": "config",
    "validate_adaptive_initial_steps": "config",
    "AdaptiveSpeculativeParams": "step_policy",
    "AdaptiveStepSlot": "step_policy",
    "DecisionReason": "step_policy",
    "CostTable": "cost_table",
    "AcceptanceStats": "metrics",
    "AdaptiveState": "state",
    "DecisionRing": "ring",
    "AdaptiveController": "controller",
    "SpecRuntimeState": "graphs",
    "BaseSpecWorker": "workers",
    "EagleWorker": "workers",
    "EagleWorkerV2": "workers",
    "Engine": "engine",
}
_MODULES = ("ops",)

__all__ = [*_HOMES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
