"""The whole decode loop on a GPU: CUDA graphs, two rounds in flight, no wait for the device.

Only `Job.wait` may wait, for an event, which is what `set_sync_debug_mode` lets pass.
"""

import contextlib
import random

import pytest
import torch

from adaptive_spec.capture import CudaGraph
from adaptive_spec.engine import Engine
from adaptive_spec.state import AdaptiveState
from adaptive_spec.testing.models import agreeing_pair, greedy_reference

pytestmark = pytest.mark.gpu

CONFIG = {
    "update_interval": 2,
    "warmup_batches": 0,
    "ema_alpha": 0.6,
    "1": {"candidate_steps": [0, 1, 3, 7]},
    "3": {"candidate_steps": [0, 2, 5]},
}
SIZES = [1, 2, 4, 8]


def pair_on(device):
    # float64: differently shaped products differ by rounding, which must not flip a token.
    pair = agreeing_pair(0.3)
    pair.target.to(device)
    pair.draft.to(device)
    return pair


@pytest.fixture(scope="module")
def workload():
    """(prompt, max_new_tokens) of 400 requests."""
    rng = random.Random(0)
    return [
        ([rng.randrange(64) for _ in range(rng.randint(1, 12))], rng.randint(1, 40))
        for _ in range(400)
    ]


def make_engine(device, policy="device", **keywords):
    if policy == "device":
        policy = AdaptiveState(CONFIG, 0, device=device)
    keywords = {"max_batch_size": 8, "max_len": 64, "overlap": True} | keywords
    return Engine(pair_on(device), policy=policy, **keywords)


@contextlib.contextmanager
def no_sync():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def serve(engine, workload, num_rounds, *, guarded):
    """Requests join, leave and are retracted by a fixed plan. Returns rounds and outputs."""
    rng, todo, requests, rounds = random.Random(1), iter(workload), [], []
    while len(rounds) < num_rounds:
        # The first rounds warm up: lazily loaded kernels, and the eager passes' own first use.
        with no_sync() if guarded and len(rounds) >= 30 else contextlib.nullcontext():
            for _ in range(rng.choice([0, 0, 1, 3]) if len(engine.waiting) < 4 else 0):
                requests.append(engine.submit(*next(todo)))
            if engine.running and rng.random() < 0.1:
                engine.retract(rng.choice(engine.running))
            report = engine.step()
        if report.batch_size:
            rounds.append((report.speculative_num_steps, report.batch_size, report.accepted))
    return rounds, [request.output_ids for request in requests]


@pytest.mark.parametrize("cuda_graph_bs", [SIZES, None], ids=["graphs", "eager"])
def test_300_rounds_without_a_sync_equal_the_cpu_engine(workload, cuda_graph_bs):
    engine = make_engine("cuda", cuda_graph_bs=cuda_graph_bs)
    rounds, outputs = serve(engine, workload, 330, guarded=True)
    assert {steps for steps, _, _ in rounds} >= {0, 1, 2}, "S did not move enough"

    reference = make_engine("cpu", cuda_graph_bs=cuda_graph_bs)
    assert (rounds, outputs) == serve(reference, workload, 330, guarded=False)
    # Both policies went the same way, to the last bit.
    torch.cuda.synchronize()
    assert engine.worker.policy.slots == reference.worker.policy.slots


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", [0, 3])
def test_fixed_steps_are_lossless(workload, steps, overlap):
    engine = make_engine(
        "cuda", policy=None, speculative_num_steps=steps, overlap=overlap, cuda_graph_bs=SIZES
    )
    requests = [engine.submit(*request) for request in workload[:40]]
    engine.run()
    cpu = pair_on("cpu")
    for request in requests:
        expected = greedy_reference(cpu.target, request.prompt_ids, request.limits.max_new_tokens)
        assert request.output_ids == expected


def test_captures_are_cuda_graphs_and_teach_nothing():
    engine = make_engine("cuda", cuda_graph_bs=SIZES)
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
    engine = make_engine("cuda", cuda_graph_bs=[8])
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
def test_a_failed_capture_leaves_the_worker_as_it_was(workload, monkeypatch, stage):
    engine, twin = (make_engine("cuda", cuda_graph_bs=SIZES) for _ in range(2))
    requests = [[e.submit(*request) for request in workload[:4]] for e in (engine, twin)]
    engine.step(), twin.step()
    worker = engine.worker
    original = getattr(worker.stages, stage)

    def fail(frame, kv_len, *, learn):
        original(frame, kv_len, learn=learn)
        if learn:  # while recording, not while warming up
            raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(worker.stages, stage, fail)
        with pytest.raises(RuntimeError):
            worker.build_adaptive_runtime_state(5, 6, [4])
    engine.run(), twin.run()
    assert [r.output_ids for r in requests[0]] == [r.output_ids for r in requests[1]]
    torch.cuda.synchronize()
    assert worker.policy.slots == twin.worker.policy.slots
