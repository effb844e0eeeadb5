"""From tokens to text: whole characters, stop strings across tokens, nothing shown too early."""

import random

import pytest

from adaptive_spec.engine.text import TextOutput
from adaptive_spec.testing.byte_tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def push_all(tokenizer, text, stop_strings=()):
    """The pieces released for each byte of `text`, then at the end."""
    output = TextOutput(tokenizer.stream(), stop_strings)
    pieces = [output.push(token) for token in text.encode()]
    return [*pieces, output.finish()], output


def test_a_character_is_released_whole_with_its_last_byte(tokenizer):
    pieces, output = push_all(tokenizer, "a🙂é")
    assert pieces == ["a", "", "", "", "🙂", "", "é", ""]
    assert output.text == "a🙂é"


def test_an_unfinished_character_is_released_at_the_end_as_a_replacement(tokenizer):
    output = TextOutput(tokenizer.stream())
    pieces = [output.push(token) for token in "日".encode()[:2]]
    assert pieces == ["", ""]
    assert output.finish() == "\ufffd"


def test_pieces_of_any_bytes_add_up_to_the_decoded_text(tokenizer):
    rng = random.Random(0)
    for _ in range(300):
        # Much of it broken UTF-8.
        ids = [rng.choice([rng.randrange(256), 0xE2, 0x82, 0xAC, 65]) for _ in range(20)]
        output = TextOutput(tokenizer.stream(), ["\u20acA", "never"])
        pieces = [output.push(token) for token in ids] + [output.finish()]
        assert "".join(pieces) == output.text == tokenizer.decode(ids).split("\u20acA")[0]


@pytest.mark.parametrize(
    ("text", "stop_strings", "expected", "match"),
    [
        ("one END two", ["END"], "one ", "END"),
        ("one EN", ["END"], "one EN", None),  # held back, then released at the end
        ("EEND", ["END"], "E", "END"),
        ("abcabd", ["abd"], "abc", "abd"),
        ("xxyz", ["yz", "xyz"], "x", "xyz"),  # the earliest beginning wins
        ("ab", ["ab", "b"], "", "ab"),
        ("né🙂e", ["🙂"], "né", "🙂"),
        ("END", ["END"], "", "END"),
        ("plain", [], "plain", None),
    ],
)
def test_text_ends_before_the_first_stop_string(tokenizer, text, stop_strings, expected, match):
    pieces, output = push_all(tokenizer, text, stop_strings)
    assert "".join(pieces) == output.text == expected
    assert output.stop_match == match


def test_nothing_that_may_begin_a_stop_string_is_shown(tokenizer):
    pieces, _ = push_all(tokenizer, "a\nUs\nUser:", ["\nUser:"])
    assert pieces[:5] == ["a", "", "", "", "\nUs"]
    assert "".join(pieces) == "a\nUs"


def test_tokens_after_a_stop_string_release_nothing(tokenizer):
    output = TextOutput(tokenizer.stream(), ["!"])
    assert [output.push(token) for token in b"a!b"] == ["a", "", ""]
    assert output.finish() == ""
