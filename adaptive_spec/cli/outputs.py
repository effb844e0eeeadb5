"""Files that commands write."""

from __future__ import annotations

import os
from pathlib import Path


def check_writable(option: str, path: Path | None) -> None:
    """Before minutes of work: can ``path`` be written?"""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{option}: {path} is a directory; name a file")
    folder = path.parent
    if not folder.is_dir():
        raise ValueError(f"{option}: there is no directory {folder} to write {path.name} to")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{option}: {path} cannot be written; choose another place")
