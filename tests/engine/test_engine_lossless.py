"""Whatever S does, a request's tokens are those of plain decoding alone, greedy or sampled.

In float64: differently shaped matrix products differ by rounding, which in float32 can flip a near
tie between two tokens, or between two scores and their noise.
"""

import random
from pathlib import Path

import pytest
import torch

import adaptive_spec
from adaptive_spec import AdaptiveSpeculativeParams
from adaptive_spec.engine import Engine, SamplingParams, load_pair
from adaptive_spec.state import AdaptiveState
from adaptive_spec.testing.models import agreeing_pair, greedy_reference, sampled_reference

TINY_PAIR = Path(adaptive_spec.__file__).parent / "tiny_pair"

# Decides every round or two, so that a run of some hundred rounds sees every S at every batch size.
CONFIG = {
    "update_interval": 2,
    "warmup_batches": 0,
    "ema_alpha": 0.6,
    "1": {"candidate_steps": [0, 1, 3, 7]},
    "4": {"candidate_steps": [0, 2, 5]},
    "9": {"candidate_steps": [0, 1]},
}
POLICIES = {"host": AdaptiveSpeculativeParams, "device": AdaptiveState}


def make_policy(kind):
    if kind == "host":
        return AdaptiveSpeculativeParams(0, CONFIG)
    return AdaptiveState(CONFIG, 0)


@pytest.fixture(scope="module")
def pair():
    return agreeing_pair(0.3)


# Every second request samples, so that batches are mixed.
FILTERS = ({}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 9, "top_p": 0.9})


@pytest.fixture(scope="module")
def workload(pair):
    """(prompt, max_new_tokens, sampling, expected tokens) for 200 requests."""
    rng = random.Random(0)
    requests = []
    for number in range(200):
        prompt = [rng.randrange(64) for _ in range(rng.randint(1, 12))]
        length = rng.randint(1, 22)
        if number % 2:
            temperature = rng.choice([0.7, 1.0, 2.0])
            seed = rng.choice([number, -(2**63) + number, 2**63 - 1])
            sampling = SamplingParams(temperature, **rng.choice(FILTERS), seed=seed)
            expected = sampled_reference(pair.target, prompt, length, sampling)
        else:
            sampling = SamplingParams()
            expected = greedy_reference(pair.target, prompt, length)
        requests.append((prompt, length, sampling, expected))
    return requests


def test_sampled_requests_are_not_greedy(pair, workload):
    # Otherwise the tests below would say nothing about sampling.
    sampled = [(prompt, expected) for prompt, _, s, expected in workload if not s.is_greedy]
    greedy = [greedy_reference(pair.target, prompt, len(tokens)) for prompt, tokens in sampled]
    same = sum(a == b for (_, a), b in zip(sampled, greedy, strict=True))
    assert same < len(sampled) / 2


def check(requests, workload):
    assert [r.output_ids for r in requests] == [expected for *_, expected in workload]
    assert not any(request.had_bad_logits for request in requests)


def serve(engine, workload, seed):
    """Submit at random times, also retracting running requests; the finished requests in order."""
    rng = random.Random(seed)
    todo = list(workload)
    requests, reports = [], []
    while todo or not engine.idle:
        # Bursts and quiet spells, so that the batch size wanders over all slots.
        for _ in range(rng.choice([0, 0, 0, 1, 3, 9]) if len(engine.waiting) < 4 else 0):
            if todo:
                prompt, length, sampling, _ = todo.pop(0)
                requests.append(engine.submit(prompt, length, sampling=sampling))
        if engine.running and rng.random() < 0.1:
            engine.retract(rng.choice(engine.running))
        reports.append(engine.step())
    return requests, reports


overlaps = pytest.mark.parametrize("overlap", [False, True], ids=["awaited", "overlap"])


@overlaps
@pytest.mark.parametrize("cuda_graph_bs", [None, [1, 2, 4, 8, 12]], ids=["eager", "graphs"])
@pytest.mark.parametrize("kind", ["host", "device"])
def test_adaptive_output_is_that_of_plain_decoding(pair, workload, kind, cuda_graph_bs, overlap):
    engine = Engine(
        pair,
        max_batch_size=12,
        max_len=48,
        policy=make_policy(kind),
        cuda_graph_bs=cuda_graph_bs,
        overlap=overlap,
    )
    requests, reports = serve(engine, workload, seed=7)
    assert engine.worker.num_in_flight == 0, "a round was left in flight"

    check(requests, workload)
    rounds = [r for r in reports if r.batch_size]
    steps = {r.speculative_num_steps for r in rounds}
    assert steps >= {0, 1, 2} and len(steps) >= 4, "the run did not exercise enough values of S"
    assert {r.batch_size for r in rounds} >= {1, 4, 9, 12}
    zeros = [r.speculative_num_steps == 0 for r in rounds]
    assert any(a and not b for a, b in zip(zeros, zeros[1:], strict=False)), "never left S = 0"
    assert sum(sum(r.accepted) for r in rounds) > 100, "too few drafts were accepted"


@overlaps
@pytest.mark.parametrize("steps", [0, 1, 4])
def test_static_output_is_that_of_plain_decoding(pair, workload, steps, overlap):
    engine = Engine(
        pair, max_batch_size=5, max_len=48, speculative_num_steps=steps, overlap=overlap
    )
    requests, _ = serve(engine, workload[:60], seed=2)
    check(requests, workload[:60])


@overlaps
def test_host_and_device_policies_graphs_and_eager_decide_alike(pair, workload, overlap):
    sizes = list(range(1, 13))  # every size, so that padding does not change the routing
    runs = {}
    for kind in POLICIES:
        for graphs in (None, sizes):
            engine = Engine(
                pair,
                max_batch_size=12,
                max_len=48,
                policy=make_policy(kind),
                cuda_graph_bs=graphs,
                overlap=overlap,
            )
            _, reports = serve(engine, workload, seed=3)
            rounds = [(r.batch_size, r.speculative_num_steps, r.accepted) for r in reports]
            runs[kind, graphs is not None] = rounds
    reference = runs.pop(("host", False))
    assert len({steps for _, steps, _ in reference}) > 3
    for name, rounds in runs.items():
        assert rounds == reference, f"{name} decided differently from the host policy, eager"


@overlaps
def test_a_run_can_be_repeated_exactly(pair, workload, overlap):
    runs = []
    for _ in range(2):
        policy = make_policy("device")
        engine = Engine(pair, max_batch_size=12, max_len=48, policy=policy, overlap=overlap)
        if overlap and runs:
            # A device that is sometimes ahead of the host: the decisions must not show it.
            engine.worker.queue.early = random.Random(5)
        _, reports = serve(engine, workload[:40], seed=4)
        runs.append(([r.speculative_num_steps for r in reports], policy.tensor.tolist()))
    assert runs[0] == runs[1]


def test_plain_decoding_does_no_draft_work(pair, monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("the draft ran although nothing speculates")

    monkeypatch.setattr(pair.draft, "forward", fail)
    engine = Engine(pair, max_batch_size=2, max_len=48)
    (request,) = engine.generate([[1, 2, 3]], 8)
    assert request.output_ids == greedy_reference(pair.target, [1, 2, 3], 8)
    assert len(engine.worker.caches) == 1


def test_the_shipped_pair_is_lossless_too():
    shipped = load_pair(TINY_PAIR, dtype=torch.float64)
    texts = ("def read(self, size=-1):\n    ", "The module provides", "for i in range(")
    prompts = [shipped.tokenizer.encode(text) for text in texts]
    policy = AdaptiveState({"update_interval": 1, "1": {"candidate_steps": [0, 2, 7]}}, 7)
    engine = Engine(shipped, max_batch_size=2, max_len=64, policy=policy)
    requests = engine.generate(prompts, 10, ignore_eos=True)
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_ids == greedy_reference(shipped.target, prompt, 10)
    assert sum(request.num_correct_drafts for request in requests) > 0
