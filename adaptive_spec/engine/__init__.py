"""The embedded engine: models, their caches, and continuous batching on top of a worker."""

from __future__ import annotations

import importlib
from typing import Any

# Looked up on first use: the models alone (training, conversion) need no built extension.
_HOMES = {
    "Engine": "engine",
    "RoundReport": "engine",
    "Request": "request",
    "SamplingParams": "sampling",
    "ModelPair": "loading",
    "load_pair": "loading",
    "random_pair": "loading",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
