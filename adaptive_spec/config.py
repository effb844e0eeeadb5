"""Adaptive configuration: a JSON table keyed by batch size, checked once and then immutable.

    {"1": {"candidate_steps": [1, 3, 7]}, "8": {"candidate_steps": [1, 3]}, "ema_alpha": 0.3}

Each digit key is the lower bound of a slot's batch sizes; other top-level keys are defaults for
every slot (an entry's own value wins) or concern the whole table. All rules on single values live
in the two dataclasses, so a config built in Python is checked exactly like one read from a file;
the loader adds where the value came from. Every error is one line: where, which key, what was
expected, what came.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from adaptive_spec.config_file import read_json, show_value

MAX_SLOTS = 16
MAX_CANDIDATES = 16
MAX_STEPS = 64
_MAX_INT = 2**31 - 1

# What `load_adaptive_config(None)` loads, in the shape of the JSON file.
DEFAULT_ADAPTIVE_CONFIG: dict[str, dict[str, Any]] = {
    "1": {
        "candidate_steps": [1, 3, 7],
        "up_hysteresis": 0.0,
        "down_hysteresis": -0.25,
        "ceiling_coeff": 0,
    },
    "8": {
        "candidate_steps": [1, 3],
        "up_hysteresis": 0.0,
        "down_hysteresis": 0.0,
        "ceiling_coeff": 0,
    },
    "32": {
        "candidate_steps": [1],
        "up_hysteresis": 0.0,
        "down_hysteresis": 0.0,
        "ceiling_coeff": 0,
    },
}


class AdaptiveConfigWarning(UserWarning):
    """A config that loads but probably does not do what its author meant."""


@dataclasses.dataclass(frozen=True)
class SlotConfig:
    """How steps are chosen for batches of at least `batch_size` requests.

    Args:
        batch_size: lower bound of the slot's batch sizes, at least 1.
        candidate_steps: draft steps to choose from, each 0..64, at most 16 different ones; 0 means
            "do not speculate". Stored ascending, without duplicates.
        up_hysteresis, down_hysteresis: added to the EMA thresholds for more and for fewer steps.
        ceiling_coeff: steps above ``ceil(ema * ceiling_coeff)`` are left downwards; 0 = off.
        ema_alpha: weight of the newest batch, in (0, 1].
        update_interval: batches between two decisions, at least 1.
        warmup_batches: batches before the first interval begins.
        min_dwell: after a switch, decisions within this many batches are skipped; 0 = off.
        probe_backoff: factor by which failed probes of step 0 are spaced out; 1 = off.
        reset_ema_on_switch: cap the EMA at the new steps - 1 after a switch.

    Raises:
        ValueError: naming the slot, the field, what was expected and what came.
    """

    batch_size: int
    candidate_steps: tuple[int, ...]
    up_hysteresis: float = 0.0
    down_hysteresis: float = -0.25
    ceiling_coeff: float = 0.0
    ema_alpha: float = 0.2
    update_interval: int = 5
    warmup_batches: int = 10
    min_dwell: int = 0
    probe_backoff: int = 1
    reset_ema_on_switch: bool = False

    def __post_init__(self) -> None:
        if not is_int(self.batch_size) or not 1 <= self.batch_size <= _MAX_INT:
            raise ValueError(
                f"batch_size must be an integer from 1 to {_MAX_INT}, "
                f"got {show_value(self.batch_size)}"
            )
        where = f"BS {self.batch_size}: "
        # Frozen: normalised values can only be stored this way.
        object.__setattr__(self, "candidate_steps", _normal_candidates(where, self.candidate_steps))
        for name in _KNOB_NAMES:
            object.__setattr__(self, name, _normal_knob(where, name, getattr(self, name)))

    def knobs(self) -> dict[str, Any]:
        """The slot's entry in the JSON file, every knob spelled out."""
        entry = {name: getattr(self, name) for name in _KNOB_NAMES}
        return {"candidate_steps": list(self.candidate_steps), **entry}


@dataclasses.dataclass(frozen=True)
class AdaptiveConfig:
    """The resolved table.

    Args:
        slots: ascending by `batch_size`, 1 to 16 of them.
        slot_debounce: rounds in a row that another slot must be routed before its steps are used; 0
            and 1 = at once.
        strategy: the step policy; only "ema" exists.

    Raises:
        ValueError: naming the field, what was expected and what came.
    """

    slots: tuple[SlotConfig, ...]
    slot_debounce: int = 0
    strategy: str = "ema"

    def __post_init__(self) -> None:
        slots = self.slots
        if not isinstance(slots, tuple) or not all(isinstance(s, SlotConfig) for s in slots):
            raise ValueError(f"slots must be a tuple of SlotConfig, got {show_value(slots)}")
        if not 1 <= len(slots) <= MAX_SLOTS:
            raise ValueError(
                f"a table must have 1 to {MAX_SLOTS} slots (BS keys), got {len(slots)}; "
                "neighbouring slots with the same entry can be merged into the smaller one"
            )
        sizes = [slot.batch_size for slot in slots]
        if sizes != sorted(set(sizes)):
            raise ValueError(f"slots must ascend by batch_size without duplicates, got {sizes}")
        object.__setattr__(
            self, "slot_debounce", _normal_int("", "slot_debounce", self.slot_debounce, 0, 0)
        )
        if self.strategy != "ema":
            raise ValueError(
                f"strategy must be 'ema', got {show_value(self.strategy)}; leave it out"
            )

    @property
    def candidate_steps(self) -> tuple[int, ...]:
        """Sorted union of every slot's candidates."""
        return tuple(sorted({steps for slot in self.slots for steps in slot.candidate_steps}))

    def to_dict(self) -> dict[str, Any]:
        """The config in the JSON file's shape; loading it gives an equal config."""
        table: dict[str, Any] = {"strategy": self.strategy, "slot_debounce": self.slot_debounce}
        table.update({str(slot.batch_size): slot.knobs() for slot in self.slots})
        return table

    def to_json(self) -> str:
        """`to_dict` as JSON text, one slot a line."""
        return config_json(self.to_dict())


ConfigSource = AdaptiveConfig | Mapping[str, Any] | str | os.PathLike | None

_DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(SlotConfig)
    if field.default is not dataclasses.MISSING
}
_KNOB_NAMES = tuple(_DEFAULTS)
_ENTRY_KEYS = ("candidate_steps", *_KNOB_NAMES)
_TABLE_KEYS = ("strategy", "slot_debounce")


def load_adaptive_config(source: ConfigSource = None) -> AdaptiveConfig:
    """Read and check an adaptive config.

    Args:
        source: path of a JSON file, a mapping in the file's shape, or None for the built-in table.
            An `AdaptiveConfig` is returned as it is.

    Returns:
        The resolved config. Unknown keys and crossing thresholds warn (`AdaptiveConfigWarning`).

    Raises:
        ValueError: one line with the file (where there is one), the key, what was expected and what
            came. For the older format without batch-size keys it holds the converted config.
    """
    if isinstance(source, AdaptiveConfig):
        return source
    raw, origin = read_raw_config(source)
    try:
        config, notes = _resolve(raw)
    except ValueError as error:
        raise ValueError(f"{origin}{error}") from None
    for note in notes:
        warnings.warn(f"{origin}{note}", AdaptiveConfigWarning, stacklevel=2)
    return config


def resolve_candidate_steps(config: ConfigSource = None) -> list[int]:
    """Sorted union of every slot's candidate steps: the largest sizes shared buffers.

    Args and errors as for `load_adaptive_config`.
    """
    return list(load_adaptive_config(config).candidate_steps)


def validate_adaptive_initial_steps(initial_steps: int, config: ConfigSource = None) -> None:
    """Check the steps a server starts with. They are never added to a slot silently.

    Raises:
        ValueError: `initial_steps` is not an integer, or no slot has it among its candidates.
    """
    candidates = resolve_candidate_steps(config)
    if not is_int(initial_steps) or initial_steps not in candidates:
        raise ValueError(
            f"initial_steps must be one of the candidate steps "
            f"{', '.join(map(str, candidates))}, got {show_value(initial_steps)}; "
            "start with one of these, or add it to the candidate_steps of a slot"
        )


def migrate_adaptive_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the older format, one global `candidate_steps`, to a table with the single key "1".

    It behaves as the old global controller did. Anything else is returned as a copy: `raw` is not
    checked here, load the result for that.

    Raises:
        ValueError: `raw` is not a mapping.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"the top level must be an object, got {show_value(raw)}")
    if any(map(is_batch_size_key, raw)) or "candidate_steps" not in raw:
        return dict(raw)
    entry = {key: value for key, value in raw.items() if key in _ENTRY_KEYS}
    table = {key: value for key, value in raw.items() if key not in _ENTRY_KEYS}
    return {**table, "1": entry}


def slot_config(raw: Mapping[str, Any]) -> SlotConfig:
    """The only slot of a table without batch sizes, from a mapping of its knobs.

    Keys that are no knob warn and are ignored.

    Raises:
        ValueError: as `load_adaptive_config`.
    """
    slot = _slot(raw, 1)
    for note in _unknown_keys("", raw, _ENTRY_KEYS):
        warnings.warn(note, AdaptiveConfigWarning, stacklevel=3)
    return slot


def config_json(table: Mapping[str, Any]) -> str:
    """A config mapping as JSON text with one top-level key a line."""
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read_raw_config(source: Mapping[str, Any] | str | os.PathLike | None) -> tuple[Any, str]:
    """The config as written, and the prefix ("FILE: " or nothing) that its errors get.

    Raises:
        ValueError: `source` is of another type, or the file cannot be read as JSON.
    """
    if source is None:
        return DEFAULT_ADAPTIVE_CONFIG, ""
    if isinstance(source, Mapping):
        return source, ""
    if not isinstance(source, str | os.PathLike):
        raise ValueError(
            f"an adaptive config must be a path, a mapping or None, got {show_value(source)}"
        )
    path = os.fspath(source)
    shown = str(path) if str(path).isprintable() and path else repr(path)
    try:
        return read_json(path), f"{shown}: "
    except ValueError as error:
        raise ValueError(f"{shown}: {error}") from None


def _resolve(raw: Any) -> tuple[AdaptiveConfig, list[str]]:
    """The config, and what its author should be told about it."""
    if not isinstance(raw, Mapping):
        raise ValueError(
            f"the top level must be an object keyed by batch size, got {show_value(raw)}; "
            'write for example {"1": {"candidate_steps": [1, 3, 7]}}'
        )
    for key in raw:
        _check_key(key)
    if not any(map(is_batch_size_key, raw)):
        _fail_without_slots(raw)
    defaults = {
        name: _normal_knob("top-level ", name, raw[name]) for name in _KNOB_NAMES if name in raw
    }
    slots, notes = [], []
    for key in sorted(filter(is_batch_size_key, raw), key=int):
        entry = raw[key]
        merged = {**defaults, **entry} if isinstance(entry, Mapping) else entry
        slots.append(_slot(merged, int(key)))
        notes += _unknown_keys(f"BS {key}: ", entry, _ENTRY_KEYS)
        notes += crossing_thresholds(slots[-1])
    config = AdaptiveConfig(
        slots=tuple(slots), **{key: raw[key] for key in _TABLE_KEYS if key in raw}
    )
    rest = [key for key in raw if not is_batch_size_key(key)]
    if "candidate_steps" in rest:
        rest.remove("candidate_steps")
        notes.append("top-level candidate_steps is ignored: every BS entry has its own")
    notes += _unknown_keys("", rest, (*_KNOB_NAMES, *_TABLE_KEYS))
    return config, notes


def _slot(entry: Any, batch_size: int) -> SlotConfig:
    where = f"BS {batch_size}: "
    if not isinstance(entry, Mapping):
        raise ValueError(
            f'{where}must be an object such as {{"candidate_steps": [1, 3, 7]}}, '
            f"got {show_value(entry)}"
        )
    if "candidate_steps" not in entry:
        raise ValueError(
            f"{where}candidate_steps must be a list of integers from 0 to {MAX_STEPS}, but the "
            'entry has none; add for example "candidate_steps": [1, 3, 7]'
        )
    return SlotConfig(
        batch_size=batch_size, **{key: entry[key] for key in _ENTRY_KEYS if key in entry}
    )


def crossing_thresholds(slot: SlotConfig) -> list[str]:
    """Pairs of neighbouring candidates between which one and the same EMA moves up and down again.

    From `a` steps the policy rises to the next candidate `b` when EMA > a - 0.5 + up_hysteresis,
    unless it falls first; from `b` it falls back when EMA <= a - 0.5 + down_hysteresis. An EMA
    between the two switches at every decision. Leaving 0 is a probe, not a threshold, so that pair
    cannot cross.

    Returns:
        One line for each such pair; empty for a sound slot.
    """
    steps = slot.candidate_steps
    found = []
    for index in range(len(steps) - 1):
        low, high = steps[index], steps[index + 1]
        if low == 0:
            continue
        rise_above = low - 0.5 + slot.up_hysteresis
        fall_at = low - 0.5 + slot.down_hysteresis
        if index > 0:
            # At or below this the policy leaves `low` downwards instead of rising.
            lower = steps[index - 1]
            below = (0.5 if lower == 0 else lower - 0.5) + slot.down_hysteresis
            rise_above = max(rise_above, below)
        if rise_above < fall_at and fall_at >= 0 and rise_above < high:
            found.append(
                f"BS {slot.batch_size}: up_hysteresis {slot.up_hysteresis} lies below "
                f"down_hysteresis {slot.down_hysteresis}: an EMA above {rise_above:g} and up to "
                f"{fall_at:g} switches between {low} and {high} steps at every decision; raise "
                "up_hysteresis or lower down_hysteresis"
            )
    return found


def is_batch_size_key(key: Any) -> bool:
    return isinstance(key, str) and re.fullmatch("[1-9][0-9]*", key) is not None


def _check_key(key: Any) -> None:
    """Refuse keys that mean a batch size but would be read as something else, or as a duplicate."""
    if not isinstance(key, str):
        raise ValueError(f'key {show_value(key)} must be a string; write it as "{show_value(key)}"')
    if is_batch_size_key(key):
        if len(key) > 10 or int(key) > _MAX_INT:
            raise ValueError(f"BS {show_value(key)}: a BS key must be at most {_MAX_INT}")
        return
    looks_numeric = any(map(str.isnumeric, key)) and not any(map(str.isalpha, key))
    if looks_numeric or _is_float(key):
        raise ValueError(
            f"key {show_value(key)} must be a plain batch size of at least 1: digits 0-9 with "
            'no sign, space, point or leading zero, such as "8"'
        )


def _is_float(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _fail_without_slots(raw: Mapping[str, Any]) -> NoReturn:
    problem = "must contain at least one integer-string BS key"
    if "candidate_steps" in raw:
        older = "this is the older format with one global candidate_steps"
        table = migrate_adaptive_config(raw)
        try:
            _resolve(table)
        except ValueError as error:
            raise ValueError(
                f"{problem}; {older}, and wrong even when converted: {error}"
            ) from None
        raise ValueError(
            f"{problem}; {older}; write {json.dumps(table, default=repr)} instead "
            "(`adaptive-spec config migrate FILE` does)"
        )
    raise ValueError(
        f'{problem}, for example {{"1": {{"candidate_steps": [1, 3, 7]}}}}, '
        f"got keys {show_value(list(raw))}"
    )


def _normal_candidates(where: str, steps: Any) -> tuple[int, ...]:
    if (
        not isinstance(steps, list | tuple)
        or not steps
        or not all(is_int(step) and 0 <= step <= MAX_STEPS for step in steps)
    ):
        raise ValueError(
            f"{where}candidate_steps must be a list of integers from 0 to {MAX_STEPS}, at least "
            f"one, got {show_value(steps)}"
        )
    distinct = tuple(sorted(set(steps)))
    if len(distinct) > MAX_CANDIDATES:
        raise ValueError(
            f"{where}candidate_steps must be a list of at most {MAX_CANDIDATES} different values, "
            f"got {len(distinct)}"
        )
    return distinct


def _normal_knob(where: str, name: str, value: Any) -> Any:
    default = _DEFAULTS[name]
    if isinstance(default, bool):
        if not isinstance(value, bool):
            _fail_knob(where, name, "true or false", value, default)
        return value
    if isinstance(default, int):
        smallest = 1 if name in ("update_interval", "probe_backoff") else 0
        return _normal_int(where, name, value, smallest, default)
    number = _finite(value)
    if name == "ema_alpha":
        if number is None or not 0 < number <= 1:
            _fail_knob(where, name, "a number above 0 and at most 1", value, default)
    elif name == "ceiling_coeff":
        if number is None or number < 0:
            _fail_knob(where, name, "a finite number of at least 0", value, default)
    elif number is None:
        _fail_knob(where, name, "a finite number", value, default)
    return number


def _normal_int(where: str, name: str, value: Any, smallest: int, default: int) -> int:
    if not is_int(value) or not smallest <= value <= _MAX_INT:
        _fail_knob(where, name, f"an integer from {smallest} to {_MAX_INT}", value, default)
    return value


def _fail_knob(where: str, name: str, expected: str, value: Any, default: Any) -> NoReturn:
    raise ValueError(
        f"{where}{name} must be {expected}, got {show_value(value)}; leave it out for the default "
        f"{json.dumps(default)}"
    )


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _unknown_keys(where: str, keys: Iterable[str], known: tuple[str, ...]) -> list[str]:
    notes = []
    for key in keys:
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known)}"
            notes.append(f"{where}unknown key {show_value(key)} is ignored; {hint}")
    return notes
