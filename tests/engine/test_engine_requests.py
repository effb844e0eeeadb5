"""The engine as a user meets it: limits, text, joining and leaving, and arguments it refuses."""

import codecs
import contextlib

import pytest

from adaptive_spec.engine import Engine
from adaptive_spec.state import AdaptiveState
from adaptive_spec.testing.byte_tokenizer import byte_tokenizer
from adaptive_spec.testing.models import agreeing_pair, greedy_reference


@pytest.fixture(scope="module")
def pair():
    return agreeing_pair(0.3, vocab_size=256, tokenizer=byte_tokenizer())


@pytest.fixture(params=[False, True], ids=["awaited", "overlap"])
def make_engine(request, pair):
    """All of this holds whether or not rounds overlap."""

    def make(pair=pair, **keywords):
        keywords = {"max_batch_size": 4, "max_len": 64, "speculative_num_steps": 5} | keywords
        return Engine(pair, overlap=request.param, **keywords)

    return make


def reference(pair, prompt, length):
    return greedy_reference(pair.target, prompt, length)


# Limits.


@pytest.mark.parametrize("length", [1, 2, 7])
def test_a_request_ends_at_its_length(pair, make_engine, length):
    (request,) = make_engine().generate([[1, 2, 3]], length)
    assert request.output_ids == reference(pair, [1, 2, 3], length)
    assert request.finish_reason == "length"


def test_a_request_ends_where_the_engine_does(pair, make_engine):
    (request,) = make_engine(max_len=20).generate([[1, 2, 3]], 1000)
    assert request.output_ids == reference(pair, [1, 2, 3], 17)
    assert request.finish_reason == "length"


@pytest.mark.parametrize("index", [0, 1, 5])
def test_a_stop_token_ends_the_request_wherever_it_falls_in_a_round(pair, make_engine, index):
    tokens = reference(pair, [9, 8], 12)
    stop = tokens[index]
    end = tokens.index(stop) + 1
    (request,) = make_engine().generate([[9, 8]], 12, stop_token_ids=[stop])
    assert request.output_ids == tokens[:end]
    assert request.finish_reason == "stop_token"
    assert request.text == pair.tokenizer.decode(tokens[: end - 1])


def test_end_of_text_stops_unless_ignored(pair, make_engine):
    tokens = reference(pair, [9, 8], 6)
    engine = make_engine()
    pair.eos_token_ids = (tokens[2],)
    try:
        (stopped,) = engine.generate([[9, 8]], 6)
        (ignoring,) = engine.generate([[9, 8]], 6, ignore_eos=True)
    finally:
        pair.eos_token_ids = ()
    assert stopped.output_ids == tokens[: tokens.index(tokens[2]) + 1]
    assert ignoring.output_ids == tokens


def prompt_with_ascii_output(pair):
    """A prompt whose output holds two neighbouring tokens that are ASCII, not at its beginning."""
    for first in range(256):
        tokens = reference(pair, [first, 3], 14)
        for index in range(2, 13):
            a, b = tokens[index], tokens[index + 1]
            text = pair.tokenizer.decode(tokens[: index + 2])
            if 32 <= a < 127 and 32 <= b < 127 and text.find(chr(a) + chr(b)) == len(text) - 2:
                return [first, 3], tokens, index
    raise AssertionError("no such prompt")


def test_a_stop_string_across_two_tokens_ends_text_and_request(pair, make_engine):
    prompt, tokens, index = prompt_with_ascii_output(pair)
    stop = chr(tokens[index]) + chr(tokens[index + 1])
    pieces = []
    engine = make_engine()
    request = engine.submit(prompt, 14, stop_strings=[stop], on_text=pieces.append)
    engine.run()
    assert request.finish_reason == "stop_string"
    assert request.output_ids == tokens[: index + 2]
    assert request.text == "".join(pieces) == pair.tokenizer.decode(tokens[:index])


# Text.


def test_streamed_text_is_whole_characters_and_adds_up(pair, make_engine):
    engine = make_engine()
    for first in range(0, 256, 32):
        pieces = list(engine.stream([first, 200], 30))
        expected = pair.tokenizer.decode(reference(pair, [first, 200], 30))
        assert "".join(pieces) == expected
        for piece in pieces:
            assert piece
            codecs.encode(piece, "utf-8")


def test_closing_a_stream_aborts_its_request(make_engine):
    engine = make_engine()
    stream = engine.stream([1, 2, 3], 50)
    next(stream)
    stream.close()
    assert engine.idle
    assert engine.worker.num_reqs == 0


def test_a_text_prompt_is_encoded(pair, make_engine):
    (request,) = make_engine().generate(["hé"], 4)
    assert request.prompt_ids == list("hé".encode())
    assert request.text == pair.tokenizer.decode(request.output_ids)


def test_a_raising_callback_spares_the_other_requests(pair, make_engine):
    engine = make_engine()

    def fail(piece):
        raise OSError("the client has gone")

    seen = []
    bad = engine.submit([1], 10, on_text=fail)
    good = engine.submit([2], 10, on_text=seen.append)
    while not engine.idle:
        try:
            engine.step()
        except OSError:
            engine.abort(bad)
    assert bad.finish_reason == "abort"
    assert good.output_ids == reference(pair, [2], 10)
    assert "".join(seen) == good.text


def test_a_callback_may_submit_and_abort_but_not_step(pair, make_engine):
    engine = make_engine()
    followers, errors = [], []

    def on_text(piece):
        engine.abort(victim)
        if not followers:
            followers.append(engine.submit([7], 5))
        try:
            engine.step()
        except RuntimeError as error:
            errors.append(str(error))

    engine.submit(list(b"ab"), 12, on_text=on_text)
    victim = engine.submit([5], 40)
    engine.run()
    assert victim.finish_reason == "abort"
    assert followers[0].output_ids == reference(pair, [7], 5)
    assert errors and "callback" in errors[0]


# Joining and leaving.


def test_waiting_requests_join_in_order_as_rows_become_free(pair, make_engine):
    engine = make_engine(max_batch_size=2)
    requests = [engine.submit([i], 3 + i) for i in range(1, 6)]
    first = engine.step()
    assert engine.running == requests[:2] or requests[0].finished
    assert first.num_joined >= 2
    engine.run()
    for i, request in enumerate(requests, 1):
        assert request.output_ids == reference(pair, [i], 3 + i)
    assert engine.worker.num_reqs == 0


@pytest.mark.parametrize("cuda_graph_bs", [None, [4]], ids=["eager", "graphs"])
def test_abort_between_rounds_leaves_the_others_as_they_were(pair, make_engine, cuda_graph_bs):
    engine = make_engine(cuda_graph_bs=cuda_graph_bs)
    requests = [engine.submit([i, 3], 30) for i in range(6)]
    engine.step()
    engine.abort(requests[1])  # running
    engine.abort(requests[5])  # waiting
    engine.abort(requests[5])  # again: nothing
    engine.run()
    for i in (0, 2, 3, 4):
        assert requests[i].output_ids == reference(pair, [i, 3], 30)
    for i in (1, 5):
        assert requests[i].finish_reason == "abort"
        kept = requests[i].output_ids
        assert kept == reference(pair, [i, 3], 30)[: len(kept)]


def test_a_retracted_request_comes_back_to_the_same_output(pair, make_engine):
    engine = make_engine(max_batch_size=2)
    requests = [engine.submit([i, 4], 25) for i in range(4)]
    engine.step()
    engine.retract(requests[0])
    assert engine.waiting[0] is requests[0]
    with pytest.raises(ValueError, match="not running"):
        engine.retract(requests[0])
    engine.run()
    for i, request in enumerate(requests):
        assert request.output_ids == reference(pair, [i, 4], 25)


def test_reports_and_counters_add_up(make_engine):
    engine = make_engine()
    requests = [engine.submit([i], 9) for i in range(3)]
    reports = engine.run()
    rounds = [report for report in reports if report.batch_size]
    assert [report.round for report in rounds] == list(range(len(rounds)))
    assert sum(r.num_joined for r in reports) == 3
    assert sum(r.emitted for r in reports) + 3 == sum(len(r.output_ids) for r in requests) == 27
    seen = sum(sum(r.accepted) for r in rounds)
    used = sum(r.num_correct_drafts for r in requests)
    # With overlap a request that has ended still runs in the round that is in flight.
    assert seen == used if engine.worker.rounds_in_flight == 1 else seen >= used
    for request in requests:
        assert request.num_proposed_drafts == 5 * request.num_rounds
        assert request.accept_rate == request.num_correct_drafts / request.num_proposed_drafts
        assert request.mean_accepted_drafts == request.num_correct_drafts / request.num_rounds
    assert engine.num_rounds == len(rounds) + (engine.worker.rounds_in_flight - 1)
    assert engine.worker.num_in_flight == 0
    empty = engine.step()
    assert (empty.batch_size, empty.emitted, empty.accepted) == (0, 0, [])


@pytest.mark.parametrize("overlap", [False, True])
def test_status_says_what_runs(pair, overlap):
    policy = AdaptiveState({"1": {"candidate_steps": [1, 3]}}, 3)
    engine = Engine(
        pair,
        max_batch_size=2,
        max_len=64,
        policy=policy,
        speculative_num_steps=3,
        overlap=overlap,
    )
    engine.submit([1], 20)
    engine.step()
    status = engine.status()
    assert status["adaptive"] is True
    assert (status["num_running"], status["num_waiting"], status["num_rounds"]) == (1, 0, 1)
    assert status["num_rounds_in_flight"] == (1 if overlap else 0)
    assert status["controller"]["active_steps"] == status["speculative_num_steps"]


# Overlap.


def test_overlapping_rounds_stream_the_same_text_one_round_later(pair):
    prompts = [[9, 8], [1, 2, 3], [200]]
    pieces, rounds = {}, {}
    for overlap in (False, True):
        engine = Engine(
            pair, max_batch_size=2, max_len=64, speculative_num_steps=3, overlap=overlap
        )
        pieces[overlap] = [[] for _ in prompts]
        for prompt, seen in zip(prompts, pieces[overlap], strict=True):
            engine.submit(prompt, 20, on_text=seen.append)
        rounds[overlap] = len([report for report in engine.run() if report.batch_size])
        assert (engine.idle, engine.worker.num_in_flight, engine.worker.num_reqs) == (True, 0, 0)
    assert ["".join(p) for p in pieces[True]] == ["".join(p) for p in pieces[False]]
    assert rounds[True] > rounds[False], "nothing ran ahead"


def test_a_step_launches_the_next_round_before_it_waits(pair):
    engine = Engine(pair, max_batch_size=2, max_len=64, speculative_num_steps=3, overlap=True)
    engine.submit([1, 2], 30)
    order = []
    worker = engine.worker
    launch, collect = worker.launch, worker.collect
    worker.launch = lambda: (order.append("launch"), launch())[1]
    worker.collect = lambda: (order.append("collect"), collect())[1]
    for _ in range(3):
        engine.step()
    assert order == ["launch", "launch", "collect", "launch", "collect", "launch", "collect"]


def test_tokens_in_flight_of_a_retracted_request_are_not_used_twice(pair):
    # It joins again while a round that it ran in before is still in flight.
    engine = Engine(pair, max_batch_size=2, max_len=64, speculative_num_steps=3, overlap=True)
    requests = [engine.submit([i, 4], 25) for i in range(2)]
    for index in (0, 1, 1, 0):
        engine.step()
        engine.retract(requests[index])
        assert engine.worker.num_in_flight == 1
    engine.run()
    for i, request in enumerate(requests):
        assert request.output_ids == reference(pair, [i, 4], 25)


def test_aborting_the_last_request_leaves_no_round_in_flight(pair):
    engine = Engine(pair, max_batch_size=2, max_len=64, speculative_num_steps=3, overlap=True)
    request = engine.submit([1, 2], 30)
    engine.step()
    assert engine.worker.num_in_flight == 1
    engine.abort(request)
    assert engine.worker.num_in_flight == 0
    assert request.output_ids == reference(pair, [1, 2], len(request.output_ids))


def test_a_step_that_fails_can_be_repeated(pair, make_engine, monkeypatch):
    engine = make_engine()
    request = engine.submit([1, 2], 20)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(pair.target, "logits", lambda *a, **k: 1 / 0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                engine.step()
    engine.run()
    assert request.output_ids == reference(pair, [1, 2], 20)


# Arguments.


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"prompt": []}, ValueError, "prompt: expected at least one token"),
        ({"prompt": ""}, ValueError, "prompt: expected at least one token"),
        ({"prompt": [256]}, ValueError, "prompt: expected token ids 0 to 255, got 256"),
        ({"prompt": [-1]}, ValueError, "prompt"),
        ({"prompt": [1.0]}, TypeError, "prompt"),
        ({"prompt": [True]}, TypeError, "prompt"),
        ({"prompt": [1] * 64}, ValueError, "prompt: expected fewer than 64 tokens"),
        ({"max_new_tokens": 0}, ValueError, "max_new_tokens"),
        ({"max_new_tokens": True}, TypeError, "max_new_tokens"),
        ({"max_new_tokens": 1.5}, TypeError, "max_new_tokens"),
        ({"stop_token_ids": ["a"]}, TypeError, "stop_token_ids"),
        ({"stop_strings": "END"}, TypeError, "stop_strings"),
        ({"stop_strings": [""]}, ValueError, "stop_strings"),
        ({"stop_strings": [1]}, TypeError, "stop_strings"),
    ],
)
def test_a_bad_request_is_refused_before_anything_is_queued(make_engine, arguments, error, text):
    engine = make_engine()
    arguments = {"prompt": [1], "max_new_tokens": 4} | arguments
    with pytest.raises(error, match=text):
        engine.submit(**arguments)
    with pytest.raises(error, match=text):
        engine.stream(**arguments)
    prompts = [[1], arguments.pop("prompt")]
    with pytest.raises(error, match=text):
        engine.generate(prompts, **arguments)
    assert engine.idle


def test_text_needs_a_tokenizer(make_engine):
    engine = make_engine(agreeing_pair(0.3))
    with pytest.raises(ValueError, match="prompt: .* no tokenizer"):
        engine.submit("text", 4)
    with pytest.raises(ValueError, match="stop_strings: .* no tokenizer"):
        engine.submit([1], 4, stop_strings=["a"])
    with pytest.raises(ValueError, match="on_text: .* no tokenizer"):
        engine.stream([1], 4)
    (request,) = engine.generate([[1]], 4)
    with pytest.raises(ValueError, match="no tokenizer"):
        request.text  # noqa: B018


def test_requests_of_another_engine_are_refused(make_engine):
    request = make_engine().submit([1], 4)
    with pytest.raises(ValueError, match="not submitted to this engine"):
        make_engine().abort(request)


# Streams and interruptions.


def test_a_stream_yields_all_its_text_whoever_steps_the_engine(pair, make_engine):
    engine = make_engine()
    prompts = "hello", "world"
    streams = [engine.stream(prompt, 12) for prompt in prompts]
    texts = ["".join(stream) for stream in streams]
    assert texts == [request.text for request in engine.generate(prompts, 12)]
    stream = engine.stream("hello", 12)
    engine.run()
    assert "".join(stream) == texts[0]


def test_closing_a_stream_that_was_never_read_aborts_its_request(make_engine):
    engine = make_engine()
    closed, dropped = engine.stream("hello", 10), engine.stream("world", 10)
    closed.close()
    del dropped
    assert engine.idle
    assert list(closed) == []


def test_a_prompt_that_fails_once_is_run_again(pair, make_engine, monkeypatch):
    """With overlap its failure shows a step later, and must not show for ever."""
    engine = make_engine()
    forward, failures = pair.target.forward, ["once"]

    def fail_once(*arguments, **keywords):
        if failures:
            raise RuntimeError(failures.pop())
        return forward(*arguments, **keywords)

    monkeypatch.setattr(pair.target, "forward", fail_once)
    requests = [engine.submit([n, 2, 3], 6) for n in (1, 9)]
    errors = 0
    for _ in range(40):
        try:
            engine.step()
        except RuntimeError:
            errors += 1
        if engine.idle:
            break
    assert errors == 1
    for request, first in zip(requests, (1, 9), strict=True):
        assert request.output_ids == reference(pair, [first, 2, 3], 6)


def test_an_interrupted_generate_raises_the_interruption(pair, make_engine, monkeypatch):
    engine = make_engine()
    forward, calls = pair.target.forward, []

    def interrupt(*arguments, **keywords):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return forward(*arguments, **keywords)

    monkeypatch.setattr(pair.target, "forward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2, 3], [4, 5, 6]], 20)
    assert engine.idle
    (request,) = engine.generate([[1, 2, 3]], 9)
    assert request.output_ids == reference(pair, [1, 2, 3], 9)


def test_a_callback_that_is_interrupted_spares_the_other_requests(pair, make_engine):
    engine = make_engine()
    pieces: list[str] = []

    def interrupt(_piece):
        raise KeyboardInterrupt

    engine.submit("hello", 6, on_text=interrupt)
    other = engine.submit("world", 6, on_text=pieces.append)
    while not engine.idle:
        with contextlib.suppress(KeyboardInterrupt):
            engine.step()
    assert "".join(pieces) == other.text
