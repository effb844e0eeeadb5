"""`adaptive-spec generate`: the text, its origins, and what is said where it cannot run."""

import pytest

from adaptive_spec.engine.loading import load_pair
from adaptive_spec.testing.models import greedy_reference

PROMPT = "def add(a, b):"


@pytest.fixture
def generate(run, pair_dir):
    def invoke(*arguments, **options):
        return run("generate", *arguments, "--model", pair_dir, "--threads", 1, **options)

    return invoke


@pytest.mark.parametrize("how", [[], ["--steps", 4], ["--no-speculation"]])
def test_text_is_the_targets_own_however_steps_are_chosen(generate, pair_dir, how):
    pair = load_pair(pair_dir)
    ids = greedy_reference(pair.target, pair.tokenizer.encode(PROMPT), 30)
    result = generate(PROMPT, "--max-new-tokens", 30, *how)
    assert result.exit_code == 0, result.output
    assert result.stdout == pair.tokenizer.decode(ids) + "\n"
    assert "30 tokens in" in result.stderr
    assert "tokens/s decoding" in result.stderr


def test_a_seed_gives_the_text_that_plain_sampling_does(generate):
    rule = ["--temperature", 0.8, "--top-k", 40, "--top-p", 0.95, "--min-p", 0.01, "--seed", 7]
    plain = generate(PROMPT, "--max-new-tokens", 30, "--no-speculation", *rule)
    assert plain.stderr.endswith("seed 7\n")
    assert generate(PROMPT, "--max-new-tokens", 30, "--steps", 4, *rule).stdout == plain.stdout
    other = [*rule[:-1], 8]
    assert generate(PROMPT, "--max-new-tokens", 30, *other).stdout != plain.stdout
    assert generate(PROMPT, "--max-new-tokens", 30).stdout != plain.stdout


def test_a_bad_sampling_rule_is_named(generate):
    result = generate(PROMPT, "--top-p", 0)
    assert result.exit_code != 0
    assert "top_p: expected a number above 0 and at most 1, got 0" in result.output


def test_drafts_are_coloured_on_request(generate):
    coloured = generate(PROMPT, "--max-new-tokens", 20, "--steps", 3, "--show-drafts").stdout
    assert "\x1b[32m" in coloured, "no accepted draft in green"
    assert "\x1b[33m" in coloured, "no token of the target in yellow"
    assert coloured.startswith(f"\x1b[2m{PROMPT}")
    plain = generate(PROMPT, "--max-new-tokens", 20, "--no-speculation", "--show-drafts").stdout
    assert "\x1b[32m" not in plain


def test_prompt_from_stdin(generate):
    expected = generate(PROMPT, "--max-new-tokens", 8).stdout
    assert generate("-", "--max-new-tokens", 8, input=PROMPT + "\n").stdout == expected


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_stdin_is_taken_as_it_is(generate, newline):
    """In UTF-8 whatever the locale, and without translated line ends."""
    text = f"# caf\u00e9{newline}x"
    expected = generate(text, "--max-new-tokens", 8).stdout
    assert generate("-", "--max-new-tokens", 8, input=text.encode()).stdout == expected


@pytest.mark.parametrize(
    ("prompt", "stdin"), [("-", b"abc\xffdef"), ("abc\udcffdef", None)], ids=["stdin", "argument"]
)
def test_a_prompt_that_is_not_utf8_is_refused(generate, prompt, stdin):
    result = generate(prompt, input=stdin)
    assert result.exit_code == 2
    assert "expected Unicode" in result.stderr
    assert "got '\\udcff' at character 3" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("command", ["generate", "demo"])
def test_more_threads_than_can_be_are_refused(run, command):
    """They would end the process inside the threading library."""
    prompt = [PROMPT] if command == "generate" else []
    result = run(command, *prompt, "--threads", 100000)
    assert result.exit_code == 2
    assert "--threads" in result.stderr
    assert "1024" in result.stderr


def test_one_token_needs_no_round(generate):
    result = generate(PROMPT, "--max-new-tokens", 1)
    assert result.exit_code == 0
    assert "1 tokens in" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([""], "PROMPT: expected some text"),
        (["x" * 600], "prompt: expected fewer than 512 tokens"),
        ([PROMPT, "--steps", 2, "--no-speculation"], "--no-speculation excludes --steps 2"),
        ([PROMPT, "--steps", 2, "--config", "x.json"], "--config chooses the steps"),
        ([PROMPT, "--config", "/no/such.json"], "/no/such.json: no such file"),
    ],
)
def test_what_is_wrong_is_one_line(generate, arguments, words):
    result = generate(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_model_that_is_not_there(run, tmp_path):
    result = run("generate", PROMPT, "--model", tmp_path)
    assert result.exit_code == 2
    assert f"no such file: {tmp_path}" in result.stderr
