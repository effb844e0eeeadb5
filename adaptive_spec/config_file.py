"""Reading a config file: strict JSON, with one line that says what is wrong and where."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def read_json(path: str | bytes) -> Any:
    """Parse a UTF-8 JSON file that has no duplicate keys and no numbers that JSON does not have.

    Raises:
        ValueError: it cannot be read, or is not that. The message does not repeat the path.
    """
    return _parse_json(_read_text(path))


def show_value(value: Any) -> str:
    """`repr`, short and on one line, also where `repr` itself fails or is huge."""
    try:
        text = repr(value)
    except ValueError:
        # Integers of thousands of digits have no decimal repr.
        return f"a {type(value).__name__} too large to print"
    text = " ".join(text.split())
    return text if len(text) <= 120 else f"{text[:117]}..."


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, for `object_pairs_hook`; ValueError where it repeats a key."""
    table = dict(pairs)
    if len(table) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(
            f"key {show_value(twice)} must appear once in its object, got it "
            f"{keys.count(twice)} times; keep one of them"
        )
    return table


def _read_text(path: str | bytes) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        raise ValueError("no such file; check the path of the adaptive config") from None
    except IsADirectoryError:
        raise ValueError("must be a JSON file, got a directory; name the file in it") from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None
    try:
        # Editors on Windows put a byte-order mark first; it means nothing in UTF-8.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"must be UTF-8 text, got byte 0x{data[error.start]:02x} at offset {error.start}; "
            "save the file as UTF-8"
        ) from None
    if not text.strip():
        raise ValueError(
            'the file is empty; the smallest config is {"1": {"candidate_steps": [1, 3, 7]}}'
        )
    return text


def _parse_json(text: str) -> Any:
    try:
        return json.loads(
            text,
            object_pairs_hook=unique_keys,
            parse_constant=_refuse_constant,
            parse_int=_parse_int,
        )
    except json.JSONDecodeError as error:
        raise ValueError(
            f"must be JSON, got a syntax error at line {error.lineno} column {error.colno}: "
            f"{error.msg}"
        ) from None
    except RecursionError:
        raise ValueError("must be an object of objects, got JSON nested too deeply") from None


def _refuse_constant(literal: str) -> NoReturn:
    raise ValueError(f"every number must be finite, got {literal}, which is not JSON")


def _parse_int(digits: str) -> int:
    # Python refuses to convert very long ones with a message about its own settings.
    if len(digits) > 40:
        raise ValueError(f"every integer must have at most 40 digits, got one of {len(digits)}")
    return int(digits)
