"""The whole decode loop on a GPU: CUDA graphs, two rounds in flight, no wait for the device.

Only `Job.wait` may wait, for an event, which is what `set_sync_debug_mode` lets pass. Models are in
float32, where differently shaped products may flip a near tie between two tokens; so outputs are
held against a float64 pass over themselves instead of another run's.
"""

import contextlib
import random

import pytest
import torch

from adaptive_spec import AdaptiveSpeculativeParams
from adaptive_spec.capture import CudaGraph
from adaptive_spec.engine import Engine
from adaptive_spec.state import AdaptiveState
from adaptive_spec.testing.models import agreeing_pair

pytestmark = pytest.mark.gpu

CONFIG = {
    "update_interval": 2,
    "warmup_batches": 0,
    "ema_alpha": 0.6,
    "1": {"candidate_steps": [0, 1, 3, 7]},
    "3": {"candidate_steps": [0, 2, 5]},
}
SIZES = [1, 2, 4, 8]
NEAR_TIE = 1e-3  # between logits of some units; a token from a wrong state is off by more


def make_engine(device="cuda", policy="adaptive", **keywords):
    if policy == "adaptive":
        policy = AdaptiveState(CONFIG, 0, device=device)
    pair = agreeing_pair(0.3, dtype=torch.float32)
    pair.target.to(device)
    pair.draft.to(device)
    keywords = {"max_batch_size": 8, "max_len": 64, "overlap": True} | keywords
    return Engine(pair, policy=policy, **keywords)


@pytest.fixture(scope="module")
def workload():
    """(prompt, max_new_tokens) of 600 requests."""
    rng = random.Random(0)
    return [
        ([rng.randrange(64) for _ in range(rng.randint(1, 12))], rng.randint(1, 40))
        for _ in range(600)
    ]


@pytest.fixture(scope="module")
def check_greedy():
    """Fails unless each output token is the target's choice after those before it."""
    target = agreeing_pair(0.3).target

    @torch.inference_mode()
    def check(requests):
        assert sum(len(request.output_ids) for request in requests) > 200
        for request in requests:
            if not request.output_ids:
                continue
            ids = torch.tensor([request.token_ids])
            hidden = target(ids, torch.arange(ids.size(1)).unsqueeze(0))
            first = len(request.prompt_ids)
            logits = target.logits(hidden[0, first - 1 : -1])
            chosen = logits.gather(1, ids[0, first:, None]).squeeze(1)
            worst = (logits.amax(1) - chosen).max()
            assert worst < NEAR_TIE, f"request {request.id} has a token that is no greedy choice"

    return check


@contextlib.contextmanager
def no_sync():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def serve(engine, workload, num_rounds):
    """Requests join, leave and are retracted. Returns all requests, and every round's result."""
    rng, todo, requests, results = random.Random(1), iter(workload), [], []
    collect = engine.worker.collect
    engine.worker.collect = lambda: results.append(collect()) or results[-1]
    while len(results) < num_rounds:
        # The first rounds warm up: lazily loaded kernels and tables, the first prompts.
        with no_sync() if len(results) >= 30 else contextlib.nullcontext():
            for _ in range(rng.choice([0, 0, 1, 3]) if len(engine.waiting) < 4 else 0):
                requests.append(engine.submit(*next(todo)))
            if engine.running and rng.random() < 0.1:
                engine.retract(rng.choice(engine.running))
            engine.step()
    for request in requests:
        engine.abort(request)
    assert engine.worker.num_in_flight == 0
    return requests, results


@pytest.mark.parametrize("cuda_graph_bs", [SIZES, None], ids=["graphs", "eager"])
def test_300_rounds_without_a_sync_are_greedy_and_decide_exactly(
    workload, check_greedy, cuda_graph_bs
):
    engine = make_engine(cuda_graph_bs=cuda_graph_bs)
    requests, results = serve(engine, workload, 330)
    check_greedy(requests)
    assert {result.speculative_num_steps for result in results} >= {0, 1, 2}

    # The Python reference, told what each round did two rounds later, chooses the same S.
    reference = AdaptiveSpeculativeParams(0, CONFIG)
    reference.set_cuda_graph_bs(cuda_graph_bs)

    def tell(result):
        reference.on_verify_complete(
            result.num_correct_drafts, result.batch_size, result.speculative_num_steps
        )

    for number, result in enumerate(results):
        if number >= 2:
            tell(results[number - 2])
        expected = reference.get_steps_for_batch(result.batch_size)
        assert result.speculative_num_steps == expected, f"round {number}"
    for result in results[-2:]:
        tell(result)
    torch.cuda.synchronize()
    for slot, told in zip(engine.worker.policy.slots, reference.status(), strict=True):
        assert slot.ema_accept_len == told["ema_accept_len"]
        assert slot.batch_count == told["batch_count"]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
def test_fixed_steps_are_greedy(workload, check_greedy, steps, overlap):
    engine = make_engine(
        policy=None, speculative_num_steps=steps, overlap=overlap, cuda_graph_bs=SIZES
    )
    requests = [engine.submit(*request) for request in workload[:40]]
    engine.run()
    check_greedy(requests)
    for request, (_, length) in zip(requests, workload, strict=False):
        assert len(request.output_ids) == length


def test_captures_are_cuda_graphs_and_teach_nothing():
    engine = make_engine(cuda_graph_bs=SIZES)
    worker = engine.worker
    assert worker.policy.next_round == 0
    for state in worker.controller.states.values():
        for table in state.stages:
            for graph in table.graphs.values():
                assert isinstance(graph, CudaGraph)
                assert graph.kv_len == worker.row_capacity
    report = worker.capture_report
    assert report.captured_pairs < report.full_pairs
    assert report.captured_bytes <= report.full_bytes
    assert all(seconds > 0 for seconds in report.seconds.values())


def test_a_replay_learns_and_counts_only_live_rows():
    # Recorded without the state, a graph would verify and never learn.
    engine = make_engine(cuda_graph_bs=[8])
    for prompt in ([1, 2], [3], [4, 5, 6]):
        engine.submit(prompt, 20)
    for _ in range(6):
        engine.step()
    torch.cuda.synchronize()
    policy = engine.worker.policy
    assert policy.next_round >= 6
    record = policy.ring.record(0)
    assert (record.num_reqs, record.speculative_num_steps) == (3, 0)


@pytest.mark.parametrize("stage", ["draft", "verify", "extend"])
def test_a_capture_that_fails_while_requests_run_disturbs_none(
    workload, check_greedy, monkeypatch, stage
):
    engine = make_engine(cuda_graph_bs=SIZES)
    requests = [engine.submit(*request) for request in workload[:30]]
    for _ in range(3):
        engine.step()
    worker = engine.worker
    original = getattr(worker.stages, stage)

    def fail(frame, kv_len, *, learn):
        original(frame, kv_len, learn=learn)
        if learn:  # while recording, not while warming up
            raise RuntimeError("out of memory")

    worker.queue.drain()
    learned = worker.policy.tensor.clone()
    with monkeypatch.context() as patch:
        patch.setattr(worker.stages, stage, fail)
        with pytest.raises(RuntimeError):
            worker.build_adaptive_runtime_state(5, 6, [4])
    assert torch.equal(worker.policy.tensor, learned)
    engine.run()
    check_greedy(requests)
