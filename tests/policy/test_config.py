"""Loading a config: what it resolves to, and one clear line for everything wrong with it."""

import dataclasses
import json
import re
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_spec.config import (
    DEFAULT_ADAPTIVE_CONFIG,
    AdaptiveConfig,
    AdaptiveConfigWarning,
    SlotConfig,
    load_adaptive_config,
    migrate_adaptive_config,
    resolve_candidate_steps,
    validate_adaptive_initial_steps,
)

ONE = {"1": {"candidate_steps": [1, 3]}}


def entry(**knobs):
    return {"1": {"candidate_steps": [1, 3], **knobs}}


def write(tmp_path, content):
    path = tmp_path / "adaptive.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def error_of(source):
    """The message of the ValueError that loading raises; always one line."""
    with pytest.raises(ValueError) as caught:
        load_adaptive_config(source)
    message = str(caught.value)
    assert "\n" not in message
    return message


# What a good config resolves to.


def test_no_config_is_the_built_in_table():
    config = load_adaptive_config()
    assert [slot.batch_size for slot in config.slots] == [1, 8, 32]
    assert [slot.candidate_steps for slot in config.slots] == [(1, 3, 7), (1, 3), (1,)]
    assert [slot.down_hysteresis for slot in config.slots] == [-0.25, 0.0, 0.0]
    assert (config.strategy, config.slot_debounce) == ("ema", 0)
    assert load_adaptive_config(DEFAULT_ADAPTIVE_CONFIG) == config


def test_an_entry_wins_over_the_top_level_default():
    config = load_adaptive_config(
        {
            "up_hysteresis": 0.5,
            "warmup_batches": 2,
            "1": {"candidate_steps": [1, 3], "up_hysteresis": 0.1},
            "8": {"candidate_steps": [3]},
        }
    )
    small, large = config.slots
    assert (small.up_hysteresis, small.warmup_batches) == (0.1, 2)
    assert (large.up_hysteresis, large.warmup_batches) == (0.5, 2)
    assert small.ema_alpha == 0.2


def test_slots_and_candidates_are_sorted_and_deduplicated():
    config = load_adaptive_config(
        {"16": {"candidate_steps": [5, 0, 5, 2]}, "2": {"candidate_steps": [7, 1]}}
    )
    assert [slot.batch_size for slot in config.slots] == [2, 16]
    assert [slot.candidate_steps for slot in config.slots] == [(1, 7), (0, 2, 5)]
    assert resolve_candidate_steps(config) == [0, 1, 2, 5, 7]


def test_a_file_with_a_byte_order_mark_loads(tmp_path):
    path = write(tmp_path, b"\xef\xbb\xbf" + json.dumps(ONE).encode())
    assert (
        load_adaptive_config(path) == load_adaptive_config(str(path)) == load_adaptive_config(ONE)
    )


def test_configs_are_immutable():
    config = load_adaptive_config(ONE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.slot_debounce = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.slots[0].ema_alpha = 0.5
    assert hash(config) == hash(load_adaptive_config(ONE))


def test_the_largest_table_that_fits_loads():
    table = {str(2**k): {"candidate_steps": list(range(49, 65))} for k in range(16)}
    config = load_adaptive_config(table)
    assert len(config.slots) == 16
    assert config.candidate_steps == tuple(range(49, 65))


# What is wrong, and what the message says.

BAD_CANDIDATES = [
    None, 3, "1,3", {"1": 3}, [], [-1, 3], [1.0, 3], [True, 3], ["1"], [65], [10**30], [[1]],
]  # fmt: skip


@pytest.mark.parametrize("steps", BAD_CANDIDATES, ids=repr)
def test_bad_candidate_steps(tmp_path, steps):
    expected = "BS 8: candidate_steps must be a list of integers from 0 to 64"
    path = write(tmp_path, json.dumps({**ONE, "8": {"candidate_steps": steps}}))
    message = error_of(path)
    assert message.startswith(f"{path}: {expected}")
    assert message.endswith(f", got {steps!r}")


BAD_KNOBS = {
    "ema_alpha": ([0, -0.1, 1.1, "0.2", True, [0.2], 10**400], "a number above 0 and at most 1"),
    "up_hysteresis": (["0", True, None, {}, 10**400], "a finite number"),
    "down_hysteresis": (["-1", False, None], "a finite number"),
    "ceiling_coeff": ([-0.5, "1", True, None], "a finite number of at least 0"),
    "update_interval": ([0, -1, 2.0, True, "5", None, 2**31], "an integer from 1 to 2147483647"),
    "warmup_batches": ([-1, 1.5, False, "10", 10**30], "an integer from 0 to 2147483647"),
    "min_dwell": ([-1, 0.0, True, None], "an integer from 0 to 2147483647"),
    "probe_backoff": ([0, -2, 1.5, True, None], "an integer from 1 to 2147483647"),
    "reset_ema_on_switch": ([0, 1, "true", None], "true or false"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [(name, value, expected) for name, (values, expected) in BAD_KNOBS.items() for value in values],
)
def test_bad_knobs_in_an_entry_and_as_default(name, value, expected):
    in_entry = error_of(entry(**{name: value}))
    assert in_entry.startswith(f"BS 1: {name} must be {expected}, got ")
    as_default = error_of({name: value, **ONE})
    assert as_default.startswith(f"top-level {name} must be {expected}, got ")
    assert "; leave it out for the default" in in_entry


@pytest.mark.parametrize("value", [-1, 1.0, True, "3", None])
def test_bad_slot_debounce(value):
    assert error_of({"slot_debounce": value, **ONE}).startswith(
        "slot_debounce must be an integer from 0 to 2147483647, got"
    )


@pytest.mark.parametrize("value", ["throughput", "EMA", "", None, 1, ["ema"]])
def test_unknown_strategies(value):
    assert error_of({"strategy": value, **ONE}).startswith("strategy must be 'ema', got")


@pytest.mark.parametrize(
    "key", ["01", "0", "00", "-1", "+1", " 1", "1 ", "1.0", "1e3", "²", "１", "٣", "8-16", "½"]
)  # fmt: skip
def test_keys_that_look_like_a_batch_size_but_are_none(tmp_path, key):
    path = write(tmp_path, json.dumps({**ONE, key: {"candidate_steps": [2]}}))
    message = error_of(path)
    assert message.startswith(f"{path}: key {key!r} must be a plain batch size of at least 1")


@pytest.mark.parametrize("key", ["2147483648", "9" * 5000])
def test_keys_beyond_any_batch_size(key):
    assert "a BS key must be at most 2147483647" in error_of({key: {"candidate_steps": [1]}})


@pytest.mark.parametrize("value", [None, [1, 3], 3, "x", True])
def test_entries_that_are_no_object(value):
    message = error_of({"1": value})
    assert message.startswith("BS 1: must be an object such as")
    assert message.endswith(f"got {value!r}")


def test_an_entry_without_candidates():
    message = error_of({"1": {"ema_alpha": 0.3}})
    assert message.startswith("BS 1: candidate_steps must be a list of integers from 0 to 64")
    assert "the entry has none" in message


@pytest.mark.parametrize("raw", [[], [1], 3, "x", None, True])
def test_a_top_level_that_is_no_object(tmp_path, raw):
    path = write(tmp_path, json.dumps(raw))
    message = error_of(path)
    assert message.startswith(f"{path}: the top level must be an object keyed by batch size")


@pytest.mark.parametrize("raw", [{}, {"not_a_bs": "bad"}, {"ema_alpha": 0.5}])
def test_no_batch_size_key_at_all(raw):
    message = error_of(raw)
    assert message.startswith("must contain at least one integer-string BS key, for example")
    assert message.endswith(f"got keys {list(raw)!r}")


def test_keys_of_a_mapping_must_be_strings():
    assert error_of({1: {"candidate_steps": [1]}}).startswith(
        'key 1 must be a string; write it as "1"'
    )


def test_too_many_slots_and_candidates():
    table = {str(k): {"candidate_steps": [1]} for k in range(1, 18)}
    assert error_of(table).startswith("a table must have 1 to 16 slots (BS keys), got 17")
    assert error_of({"1": {"candidate_steps": list(range(17))}}).startswith(
        "BS 1: candidate_steps must be a list of at most 16 different values, got 17"
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "the file is empty"),
        (" \n\t", "the file is empty"),
        ('{"1": {"candidate_steps": [1,3]}', "got a syntax error at line 1 column 33"),
        ('{\n"1": {,}}', "must be JSON, got a syntax error at line 2 column 7"),
        ('{"1": {"candidate_steps": [1]}} {}', "got a syntax error at line 1 column 33"),
        ('{"1": {"candidate_steps": [01]}}', "must be JSON, got a syntax error at line 1"),
        ('{"1": {"candidate_steps": [1]}, "1": {"candidate_steps": [3]}}', "key '1' must"),
        ('{"1": {"ema_alpha": 0.1, "candidate_steps": [1], "ema_alpha": 1}}', "'ema_alpha' must"),
        ('{"1": {"candidate_steps": [NaN]}}', "every number must be finite, got NaN"),
        ('{"ema_alpha": Infinity, "1": {"candidate_steps": [1]}}', "every number must be finite"),
        ('{"up_hysteresis": -Infinity, "1": {"candidate_steps": [1]}}', "got -Infinity"),
        ('{"up_hysteresis": 1e999, "1": {"candidate_steps": [1]}}', "top-level up_hysteresis must"),
        ('{"1": {"candidate_steps": [%s]}}' % ("9" * 5000), "at most 40 digits, got one of 5000"),
        (b'{"1": {"candidate_steps": [1]}}\xff', "must be UTF-8 text, got byte 0xff at offset 31"),
        ('{"1": 3}'.encode("utf-16"), "must be UTF-8 text"),
        ("[" * 100_000, "nested too deeply"),
    ],
)  # fmt: skip
def test_files_that_are_no_config(tmp_path, content, expected):
    path = write(tmp_path, content)
    message = error_of(path)
    assert message.startswith(f"{path}: ")
    assert expected in message


def test_files_that_cannot_be_read(tmp_path):
    missing = tmp_path / "missing.json"
    assert error_of(missing) == f"{missing}: no such file; check the path of the adaptive config"
    assert "must be a JSON file, got a directory" in error_of(tmp_path)
    assert error_of(tmp_path / "a\nb").startswith("'/")
    assert "no such file" in error_of("")


@pytest.mark.parametrize("source", [3, True, [ONE], b"x".join])
def test_sources_of_another_type(source):
    assert error_of(source).startswith("an adaptive config must be a path, a mapping or None, got")


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (lambda: SlotConfig(0, (1,)), "batch_size must be an integer from 1 to"),
        (lambda: SlotConfig(True, (1,)), "batch_size must be an integer"),
        (lambda: SlotConfig(8, (1, 65)), "BS 8: candidate_steps must be a list of"),
        (lambda: SlotConfig(8, (1,), ema_alpha=float("nan")), "BS 8: ema_alpha must be"),
        (lambda: AdaptiveConfig(()), "a table must have 1 to 16 slots"),
        (lambda: AdaptiveConfig([SlotConfig(1, (1,))]), "slots must be a tuple of SlotConfig"),
        (
            lambda: AdaptiveConfig((SlotConfig(8, (1,)), SlotConfig(1, (1,)))),
            re.escape("slots must ascend by batch_size without duplicates, got [8, 1]"),
        ),
        (lambda: AdaptiveConfig((SlotConfig(1, (1,)),), strategy="best"), "strategy must be 'ema'"),
    ],
)
def test_configs_built_in_python_are_checked_too(build, expected):
    with pytest.raises(ValueError, match=expected):
        build()


# What loads but deserves a word.


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (entry(update_intervall=3), "BS 1: unknown key 'update_intervall' is ignored; did you mean "
                                    "'update_interval'?"),
        ({"warmup": 3, **ONE}, "unknown key 'warmup' is ignored; did you mean 'warmup_batches'?"),
        ({"bs8": {}, **ONE}, "unknown key 'bs8' is ignored; known: up_hysteresis,"),
        (entry(slot_debounce=3), "BS 1: unknown key 'slot_debounce' is ignored"),
        ({"candidate_steps": [5], **ONE}, "top-level candidate_steps is ignored: every BS entry"),
        (entry(up_hysteresis=-0.1, down_hysteresis=0.25), "BS 1: up_hysteresis -0.1 lies below"),
    ],
)  # fmt: skip
def test_warnings_name_the_file_the_key_and_the_nearest_name(tmp_path, raw, expected):
    path = write(tmp_path, json.dumps(raw))
    with pytest.warns(AdaptiveConfigWarning) as caught:
        config = load_adaptive_config(path)
    (warning,) = caught
    assert str(warning.message).startswith(f"{path}: {expected}")
    assert warning.filename == __file__, "points at the caller"
    assert config.slots[0].candidate_steps == (1, 3)


def test_sound_configs_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_adaptive_config()
        load_adaptive_config(entry(up_hysteresis=0.25, down_hysteresis=0.25))


# The step to start with.


@pytest.mark.parametrize("steps", [5, 0, -1, True, 1.0, "3", None])
def test_initial_steps_that_no_slot_has(steps):
    config = {"1": {"candidate_steps": [1, 3]}, "8": {"candidate_steps": [1, 7]}}
    with pytest.raises(ValueError, match=r"one of the candidate steps 1, 3, 7, got"):
        validate_adaptive_initial_steps(steps, config)
    for good in (1, 3, 7):
        validate_adaptive_initial_steps(good, load_adaptive_config(config))


# The older format.

OLD = {"candidate_steps": [1, 3, 7], "ema_alpha": 0.3, "warmup_batches": 4}


def test_the_older_format_is_refused_with_the_converted_config_ready_to_paste(tmp_path):
    path = write(tmp_path, json.dumps(OLD))
    message = error_of(path)
    assert message.startswith(f"{path}: must contain at least one integer-string BS key")
    pasted = json.loads(message[message.index("{") : message.rindex("}") + 1])
    assert pasted == {"1": OLD} == migrate_adaptive_config(OLD)
    (slot,) = load_adaptive_config(pasted).slots
    assert (slot.candidate_steps, slot.ema_alpha, slot.warmup_batches) == ((1, 3, 7), 0.3, 4)


def test_the_older_format_with_bad_values_says_so():
    message = error_of({"candidate_steps": [-1]})
    assert message.startswith("must contain at least one integer-string BS key")
    assert message.endswith("at least one, got [-1]")


def test_migrating_keeps_what_concerns_the_whole_table_and_new_configs():
    assert migrate_adaptive_config({**OLD, "slot_debounce": 3}) == {"slot_debounce": 3, "1": OLD}
    assert migrate_adaptive_config(ONE) == ONE
    with pytest.raises(ValueError, match="the top level must be an object, got"):
        migrate_adaptive_config([1])


# Round trips, and everything else that JSON can hold.

FINITE = st.floats(-1e6, 1e6)
SLOTS = st.builds(
    SlotConfig,
    batch_size=st.integers(1, 2**31 - 1),
    candidate_steps=st.lists(st.integers(0, 64), min_size=1, max_size=16),
    up_hysteresis=FINITE,
    down_hysteresis=FINITE,
    ceiling_coeff=st.floats(0, 1e300),
    ema_alpha=st.floats(0, 1, exclude_min=True),
    update_interval=st.integers(1, 2**31 - 1),
    warmup_batches=st.integers(0, 2**31 - 1),
    min_dwell=st.integers(0, 100),
    probe_backoff=st.integers(1, 100),
    reset_ema_on_switch=st.booleans(),
)


@pytest.mark.filterwarnings("ignore::adaptive_spec.config.AdaptiveConfigWarning")
@settings(deadline=None, max_examples=50)
@given(
    st.lists(SLOTS, min_size=1, max_size=16, unique_by=lambda slot: slot.batch_size),
    st.integers(0, 9),
)
def test_a_config_survives_the_way_through_json(tmp_path_factory, slots, debounce):
    config = AdaptiveConfig(tuple(sorted(slots, key=lambda slot: slot.batch_size)), debounce)
    assert load_adaptive_config(config.to_dict()) == config
    path = tmp_path_factory.getbasetemp() / "round_trip.json"
    path.write_text(config.to_json())
    assert load_adaptive_config(path) == config


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["1", "8", "01", "²", "candidate_steps", "ema_alpha", "strategy", "x"])
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@pytest.mark.filterwarnings("ignore::adaptive_spec.config.AdaptiveConfigWarning")
@settings(deadline=None, max_examples=60)
@given(JSON.filter(lambda raw: raw is not None and not isinstance(raw, str)))
def test_any_value_loads_or_is_one_line_of_value_error(raw):
    try:
        assert isinstance(load_adaptive_config(raw), AdaptiveConfig)
    except ValueError as error:
        assert len(str(error).splitlines()) == 1


@pytest.mark.filterwarnings("ignore::adaptive_spec.config.AdaptiveConfigWarning")
@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=40) | JSON.map(lambda raw: json.dumps(raw).encode()))
def test_any_file_loads_or_is_one_line_of_value_error(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(content)
    try:
        assert isinstance(load_adaptive_config(path), AdaptiveConfig)
    except ValueError as error:
        assert str(error).startswith(f"{path}: ")
        assert len(str(error).splitlines()) == 1
