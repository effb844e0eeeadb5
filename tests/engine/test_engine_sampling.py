"""Sampled decoding: its distribution, its seeds, bad logits, and arguments that are refused.

That sampled tokens do not depend on S, batch, overlap and retraction is in test_engine_lossless.py.
"""

from pathlib import Path

import pytest
import torch

import adaptive_spec
from adaptive_spec.engine import Engine, SamplingParams, load_pair
from adaptive_spec.state import AdaptiveState
from adaptive_spec.testing.byte_tokenizer import byte_tokenizer
from adaptive_spec.testing.models import agreeing_pair, sampled_reference
from adaptive_spec.workers import stages
from tests.ops.markov_pairs import p_value

TINY_PAIR = Path(adaptive_spec.__file__).parent / "tiny_pair"
CONFIG = {"update_interval": 1, "ema_alpha": 0.6, "1": {"candidate_steps": [0, 1, 4]}}

# Of both distribution tests together (Bonferroni); seeds are fixed, so a run that has passed passes
# again.
FALSE_ALARM_RATE = 1e-4
NUM_BINS = 20
NUM_REQUESTS = 32
RULES = {
    "temperature": SamplingParams(0.8),
    "filters": SamplingParams(1.2, top_k=30, top_p=0.9, min_p=0.01),
}


def exact_distribution(logits, rule):
    """The distribution [n, V] that rows of logits should be sampled from, in float64."""
    probs = torch.softmax(logits.double() / rule.temperature, -1)
    ranked = probs.sort(-1, descending=True)
    above = ranked.values.cumsum(-1) - ranked.values
    kept = (above < rule.top_p) & (ranked.values >= rule.min_p * ranked.values[:, :1])
    if rule.top_k:
        kept[:, rule.top_k :] = False
    probs = probs * torch.zeros_like(kept).scatter(-1, ranked.indices, kept)
    return probs / probs.sum(-1, keepdim=True)


@torch.inference_mode()
def surprises(pair, requests, rule):
    """A number per output token: uniform in [0, 1) and independent if each follows the target.

    It is where the token lies among all, with a random place within its own probability (the
    randomised probability integral transform). Those that the output has already come first, since
    noise that is used again makes them win again; then the likeliest.
    """
    generator = torch.Generator().manual_seed(0)
    found = []
    for request in requests:
        ids = torch.tensor([request.token_ids])
        hidden = pair.target(ids, torch.arange(ids.size(1)).unsqueeze(0))
        first = len(request.prompt_ids)
        probs = exact_distribution(pair.target.logits(hidden[0, first - 1 : -1]), rule)
        order = probs.clone()
        for place in range(1, len(order)):
            order[place, ids[0, first : first + place]] += 1
        tokens = ids[0, first:, None]
        chosen = probs.gather(-1, tokens)
        before = (probs * (order > order.gather(-1, tokens))).sum(-1)
        share = torch.rand(len(chosen), generator=generator, dtype=torch.float64)
        found.append(before + share * chosen.squeeze(-1))
    # A token that should not be there at all lies at 1, give or take rounding.
    return torch.cat(found).clamp(max=1 - 1e-9)


def sample_and_test(pair, rule, num_tokens):
    """The p-value of what an adaptive engine emits, and the share of accepted drafts."""
    texts = ("The module provides", "for i in range(", "import", "def read(self")
    prompts = [pair.tokenizer.encode(texts[i % 4]) for i in range(NUM_REQUESTS)]
    sampling = [
        SamplingParams(rule.temperature, rule.top_k, rule.top_p, rule.min_p, seed=seed)
        for seed in range(NUM_REQUESTS)
    ]
    engine = Engine(pair, max_batch_size=NUM_REQUESTS, max_len=256, policy=AdaptiveState(CONFIG, 4))
    requests = engine.generate(prompts, num_tokens, ignore_eos=True, sampling=sampling)
    numbers = surprises(pair, requests, rule)
    counts = torch.histc(numbers, NUM_BINS, 0.0, 1.0)
    assert counts.sum() == NUM_REQUESTS * num_tokens
    accepted = sum(r.num_correct_drafts for r in requests) / sum(r.num_rounds for r in requests)
    return p_value(counts, torch.ones(NUM_BINS)), accepted


@pytest.fixture(scope="module")
def shipped():
    return load_pair(TINY_PAIR)


@pytest.mark.parametrize("rule", RULES)
def test_sampled_tokens_follow_the_target(shipped, rule):
    p, accepted = sample_and_test(shipped, RULES[rule], num_tokens=100)
    assert accepted > 0.3, "too few drafts were accepted to tell"
    assert p > FALSE_ALARM_RATE / len(RULES)


def plant(monkeypatch, fault):
    """Make the engine's stages call the op wrongly."""
    verify = stages.ops.verify_chain_sampling_from_logits

    def faulty(draft_tokens, logits, *, positions, seeds, **keywords):
        steps = keywords["speculative_num_steps"]
        if fault == "drafts are accepted whatever the target says" and steps > 0:
            logits = logits.clone()
            logits[:, :steps].scatter_(-1, draft_tokens[:, :steps, None], 1e4)
        if fault == "the noise does not advance":
            positions = torch.zeros_like(positions)
        if fault == "the filters are forgotten":
            keywords |= {"top_k": None, "top_p": None, "min_p": None}
        verify(draft_tokens, logits, positions=positions, seeds=seeds, **keywords)

    monkeypatch.setattr(stages.ops, "verify_chain_sampling_from_logits", faulty)


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        ("temperature", "drafts are accepted whatever the target says"),
        ("temperature", "the noise does not advance"),
        ("filters", "the filters are forgotten"),
    ],
)
def test_faults_show(shipped, monkeypatch, rule, fault):
    plant(monkeypatch, fault)
    p, _ = sample_and_test(shipped, RULES[rule], num_tokens=40)
    assert p < FALSE_ALARM_RATE / len(RULES)


# Seeds.


@pytest.fixture(scope="module")
def pair():
    return agreeing_pair(0.3)


@pytest.fixture(params=[False, True], ids=["awaited", "overlap"])
def make_engine(request, pair):
    def make(pair=pair, **keywords):
        keywords = {"max_batch_size": 4, "max_len": 64, "speculative_num_steps": 3} | keywords
        return Engine(pair, overlap=request.param, **keywords)

    return make


def test_a_seed_says_all_and_another_seed_something_else(make_engine):
    rule = SamplingParams(1.0, seed=5)
    first, second = make_engine().generate([[1, 2, 3]] * 2, 30, sampling=rule)
    assert first.output_ids == second.output_ids
    (other,) = make_engine().generate([[1, 2, 3]], 30, sampling=SamplingParams(1.0, seed=6))
    assert other.output_ids != first.output_ids


def test_without_a_seed_each_request_draws_one_that_repeats_it(make_engine):
    engine = make_engine()
    requests = engine.generate([[1, 2, 3]] * 4, 30, sampling=SamplingParams(1.0))
    assert len({request.sampling.seed for request in requests}) == 4
    assert len({tuple(request.output_ids) for request in requests}) > 1
    again = engine.generate([[1, 2, 3]] * 4, 30, sampling=[r.sampling for r in requests])
    assert [r.output_ids for r in again] == [r.output_ids for r in requests]


def test_a_stream_samples_too(make_engine):
    shipped = agreeing_pair(0.3, vocab_size=256, tokenizer=byte_tokenizer())
    engine, rule = make_engine(shipped), SamplingParams(1.0, seed=3)
    (request,) = engine.generate(["hello"], 20, sampling=rule)
    (greedy,) = engine.generate(["hello"], 20)
    assert "".join(engine.stream("hello", 20, sampling=rule)) == request.text != greedy.text


# Bad logits.


@pytest.mark.parametrize("length", [1, 12])
@pytest.mark.parametrize("rule", [SamplingParams(), SamplingParams(1.0, seed=1)], ids=repr)
def test_a_request_that_met_bad_logits_says_so_and_no_other_does(make_engine, rule, length):
    spoiled = agreeing_pair(0.3)
    spoiled.target.embedding[63] = float("nan")
    engine = make_engine(spoiled, max_batch_size=2)
    prompts = [[1, 2], [63, 2], [3, 4], [5], [6, 7]]
    requests = engine.generate(prompts, length, sampling=rule)
    # The rows of the second one are used again by others. A draft may have met bad logits too.
    met_bad = [63 in request.token_ids[:-1] for request in requests]
    flags = [request.had_bad_logits for request in requests]
    assert met_bad[1] and not all(flags)
    assert all(flag for flag, met in zip(flags, met_bad, strict=True) if met)
    for request in requests:
        if not request.had_bad_logits:
            expected = sampled_reference(
                spoiled.target, request.prompt_ids, length, rule.with_seed()
            )
            assert request.output_ids == expected


def test_bad_logits_are_remembered_over_a_retraction(make_engine):
    spoiled = agreeing_pair(0.3)
    spoiled.target.embedding[63] = float("nan")
    engine = make_engine(spoiled)
    request = engine.submit([63], 20)
    engine.step()
    engine.step()
    engine.retract(request)
    assert request.had_bad_logits


# Arguments.


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        ({"temperature": -0.1}, ValueError, "temperature: expected a finite number"),
        ({"temperature": float("nan")}, ValueError, "temperature: expected a finite number"),
        ({"temperature": float("inf")}, ValueError, "temperature: expected a finite number"),
        ({"temperature": "1"}, TypeError, "temperature: expected a finite number"),
        ({"temperature": True}, TypeError, "temperature: expected a finite number"),
        ({"top_k": -1}, ValueError, "top_k: expected 0 to 2147483647, got -1"),
        ({"top_k": 2**31}, ValueError, "top_k: expected 0 to 2147483647"),
        ({"top_k": 2.0}, TypeError, "top_k: expected an integer"),
        ({"top_p": 0}, ValueError, "top_p: expected a number above 0 and at most 1, got 0"),
        ({"top_p": 1.01}, ValueError, "top_p: expected"),
        ({"min_p": 1.01}, ValueError, "min_p: expected a number from 0 to 1, got 1.01"),
        ({"min_p": None}, TypeError, "min_p: expected"),
        ({"seed": 2**63}, ValueError, "seed: expected -9223372036854775808 to"),
        ({"seed": 0.5}, TypeError, "seed: expected an integer, got 0.5"),
    ],
)
def test_bad_rules_are_named(keywords, error, text):
    with pytest.raises(error, match=text):
        SamplingParams(**keywords)


def test_a_rule_that_is_none_or_not_one_per_prompt_queues_nothing(make_engine):
    engine = make_engine()
    with pytest.raises(TypeError, match="sampling: expected SamplingParams, got 0.7"):
        engine.submit([1], 4, sampling=0.7)
    with pytest.raises(TypeError, match="sampling: expected SamplingParams, got None"):
        engine.generate([[1]], 4, sampling=[None])
    with pytest.raises(ValueError, match="sampling: expected one for each of 2 prompts, got 1"):
        engine.generate([[1], [2]], 4, sampling=[SamplingParams()])
    assert engine.idle
