"""The text the tiny pair is trained and measured on: the running interpreter's standard library.

Modules are taken as code, the language reference in `pydoc_data` and long docstrings as prose; all
of it is under PSF-2.0. What is held out is decided by a hash of the name, so it is the same for
training and for measuring, and the same wherever the same Python is installed.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_SHARE = 0.04


@dataclass(frozen=True)
class Document:
    """One text, its kind ("code", "tests" or "prose") and where it comes from."""

    kind: str
    source: str
    text: str
    held_out: bool


def is_held_out(name: str) -> bool:
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


def standard_library() -> list[Document]:
    """All documents of the running interpreter's standard library, in a fixed order."""
    root = Path(sysconfig.get_path("stdlib"))
    documents = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        # The codecs' character tables and the bundled pip are no prose or code worth learning;
        # the reference's topics are taken as prose below.
        if name.startswith(("site-packages/", "encodings/", "pydoc_data/", "ensurepip/")):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        # The test suite holds files that are broken on purpose.
        except (SyntaxError, ValueError, RecursionError):
            continue
        held_out = is_held_out(name)
        tests = any(part in ("test", "tests", "idle_test") for part in path.relative_to(root).parts)
        documents.append(Document("tests" if tests else "code", name, text, held_out))
        # Among the test suite's many files only those that are held out: prose to measure on.
        if not tests or held_out:
            prose = "\n\n".join(long_docstrings(tree))
            if prose:
                documents.append(Document("prose", f"docstrings of {name}", prose, held_out))
    documents += reference_topics()
    return documents


def long_docstrings(tree: ast.Module) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)) and len(text) >= 200:
            yield inspect.cleandoc(text)


def reference_topics() -> list[Document]:
    from pydoc_data.topics import topics

    texts = {f"pydoc topic {name}": text.strip() + "\n" for name, text in sorted(topics.items())}
    # Topics quote each other at length; what a held-out one contains is cut from the others.
    held_out = {
        paragraph.strip()
        for name, text in texts.items()
        if is_held_out(name)
        for paragraph in text.split("\n\n")
    }
    documents = []
    for name, text in texts.items():
        if not is_held_out(name):
            text = "\n\n".join(p for p in text.split("\n\n") if p.strip() not in held_out)
        documents.append(Document("prose", name, text, is_held_out(name)))
    return documents
