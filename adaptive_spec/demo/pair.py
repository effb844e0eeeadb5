"""Opening a pair directory for the command line, with errors that say what to do."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

import adaptive_spec

if TYPE_CHECKING:
    from adaptive_spec.engine.loading import ModelPair

TINY_PAIR = Path(adaptive_spec.__file__).parent / "tiny_pair"


def require(*packages: str) -> None:
    """Raise ImportError naming the extra to install where an optional package is missing."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ModuleNotFoundError as error:
            raise ImportError(
                f"this needs {package}: pip install 'adaptive-spec[demo]' (no {error.name} here)"
            ) from error


def open_pair(directory: Path | None, device: str | None = None) -> ModelPair:
    """Load a pair in float32 from ``directory``, by default the shipped one.

    ``device``: by default a GPU where one can be used. Raises ValueError where the directory holds
    no pair, or the device cannot be used.
    """
    from adaptive_spec.devices import default_device, resolve_device
    from adaptive_spec.engine.loading import load_pair

    directory = TINY_PAIR if directory is None else directory
    if not directory.is_dir():
        what = "a file" if directory.exists() else "nothing"
        raise ValueError(
            f"{directory}: expected a directory with target/, draft/ and tokenizer.json, got {what}"
        )
    chosen = default_device() if device is None else resolve_device(device)
    return load_pair(directory, device=chosen)
