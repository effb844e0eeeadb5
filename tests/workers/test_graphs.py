"""Prepared callables: shared buffers, captures, pruning, and what happens where none exists."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from adaptive_spec import AdaptiveSpeculativeParams
from adaptive_spec.capture import CapturePool, CudaGraph, PreparedCallable
from adaptive_spec.controller import AdaptiveController
from adaptive_spec.engine.llama import RotaryTable
from adaptive_spec.graphs import (
    DecodeBuffers,
    GraphTable,
    RoundFrame,
    SpecRuntimeState,
    check_states_cover_routing,
)
from adaptive_spec.state import AdaptiveState
from adaptive_spec.testing.models import agreeing_pair
from adaptive_spec.workers import EagleWorker

THREE_SLOTS = {
    "1": {"candidate_steps": [1, 3, 7]},
    "8": {"candidate_steps": [1, 3]},
    "32": {"candidate_steps": [1]},
}


@pytest.fixture(scope="module")
def pair():
    return agreeing_pair(0.5)


def make_worker(pair, config=THREE_SLOTS, initial=3, **keywords):
    keywords = {"max_batch_size": 4, "max_len": 64} | keywords
    return EagleWorker(pair.target, pair.draft, policy=AdaptiveState(config, initial), **keywords)


def fill_rows(worker, prompts=((1, 2, 3), (4, 5), (6,))):
    for prompt in prompts:
        worker.add_row(list(prompt))
    return worker


def test_shared_buffers_hold_the_largest_step_at_the_largest_batch(pair):
    # The buffers must not be sized by the initial step: 32 * 4 rows cannot hold S = 7.
    worker = make_worker(
        pair, {"1": {"candidate_steps": [1, 3, 7]}}, max_batch_size=32, cuda_graph_bs=[32]
    )
    assert worker.speculative_num_steps == 3
    assert worker.buffers.logits.size(0) == worker.buffers.hidden.size(0) == 32 * 8 == 256
    assert worker.buffers.input_ids.shape == worker.buffers.output_token_ids.shape == (32, 8)
    assert worker.controller.states[7].captured_batch_sizes == [32]


def test_frames_are_views_with_the_buffers_row_stride():
    buffers = DecodeBuffers.allocate(4, 7, 8, 16, dtype=torch.float64)
    frame = RoundFrame.of(buffers, 3, 2)
    assert frame.input_ids.shape == (2, 4)
    assert frame.input_ids.stride() == (8, 1)
    assert frame.draft_tokens.shape == (2, 3)
    assert frame.logits.shape == (2, 4, 16)
    assert frame.logits.is_contiguous()
    for name in ("input_ids", "positions", "logits", "hidden", "seq_lens", "draft_hidden"):
        base = getattr(buffers, name).untyped_storage().data_ptr()
        assert getattr(frame, name).untyped_storage().data_ptr() == base, name


@pytest.mark.parametrize(("steps", "batch_size"), [(8, 1), (-1, 1), (1, 5), (1, 0)])
def test_a_frame_outside_the_buffers_is_refused(steps, batch_size):
    buffers = DecodeBuffers.allocate(4, 7, 8, 16, dtype=torch.float64)
    with pytest.raises(ValueError, match="the buffers hold"):
        RoundFrame.of(buffers, steps, batch_size)


def test_captures_are_pruned_to_the_sizes_whose_slot_can_choose_the_step(pair):
    worker = make_worker(pair, max_batch_size=32, cuda_graph_bs=[4, 8, 16, 32])
    report = worker.capture_report
    assert report.batch_sizes == {1: [4, 8, 16, 32], 3: [4, 8, 16], 7: [4]}
    assert report.captured_pairs == 3 + 2 + 2 + 1
    assert report.full_pairs == 12
    assert 0 < report.captured_bytes < report.full_bytes
    assert worker.status()["captured_batch_sizes"][7] == [4]
    assert worker.status()["unpruned_bytes"] == report.full_bytes


def test_captures_run_from_the_largest_batch_to_the_smallest(pair, monkeypatch):
    order = []
    capture = PreparedCallable.capture.__func__

    def record(cls, stage, frame, kv_len):
        order.append((frame.speculative_num_steps, frame.batch_size))
        return capture(cls, stage, frame, kv_len)

    monkeypatch.setattr(PreparedCallable, "capture", classmethod(record))
    make_worker(pair, {"1": {"candidate_steps": [1, 2]}}, initial=1, cuda_graph_bs=[1, 4, 2])
    assert list(dict.fromkeys(order)) == [(2, 4), (2, 2), (2, 1), (1, 4), (1, 2), (1, 1)]


def test_an_empty_pruned_list_captures_nothing_and_the_step_still_runs(pair, monkeypatch):
    captured = []
    capture = GraphTable.capture

    def record(self, frame, kv_len):
        captured.append((frame.speculative_num_steps, frame.batch_size))
        capture(self, frame, kv_len)

    monkeypatch.setattr(GraphTable, "capture", record)
    worker = make_worker(pair, max_batch_size=64, cuda_graph_bs=[64, 128])
    assert set(captured) == {(1, 64)}
    assert worker.controller.states[7].captured_batch_sizes == []

    fill_rows(worker)
    worker.controller.active_steps = 7  # as if it had been chosen
    monkeypatch.setattr(worker, "activate_step_by_batch", lambda batch_size: None)
    monkeypatch.setattr(worker.controller, "cancel_round", lambda: None)
    worker.apply_runtime_state(worker.controller.states[7])
    eager = fill_rows(
        EagleWorker(pair.target, pair.draft, max_batch_size=3, max_len=64, speculative_num_steps=7)
    ).decode()
    assert worker.decode().tokens == eager.tokens


def test_every_pair_that_routing_can_return_has_a_state_and_a_graph(pair):
    sizes = [1, 2, 4, 8, 16, 32]
    worker = make_worker(pair, max_batch_size=40, cuda_graph_bs=sizes)
    router = worker.policy.router
    returned = set()
    for batch_size in range(1, 41):
        padded = next((size for size in sizes if size >= batch_size), None)
        slot = worker.policy.config.slots[router.slot_index(batch_size)]
        returned |= {(padded, steps) for steps in slot.candidate_steps}
    states = worker.controller.states
    assert {steps for _, steps in returned} == set(states)
    graphs = {(size, s) for s, state in states.items() for size in state.captured_batch_sizes}
    assert {pair for pair in returned if pair[0] is not None} == graphs


def runtime_state(steps, batch_sizes):
    def stage(frame, kv_len, *, learn):
        pass

    table = GraphTable(stage, CapturePool(torch.device("cpu")))
    buffers = DecodeBuffers.allocate(max(batch_sizes, default=1), steps, 2, 2, dtype=torch.float32)
    for size in batch_sizes:
        table.capture(RoundFrame.of(buffers, steps, size), 1)
    return SpecRuntimeState(steps, steps + 1, None, table, None)


def check_cover(states, candidates, sizes=(1, 8), max_batch_size=8):
    """Small batches can be asked for any candidate, batches of 2 and more (padded to 8) for 1."""

    def candidates_for(batch_size):
        return candidates if batch_size == 1 else [1]

    check_states_cover_routing(states, candidates, candidates_for, sizes, max_batch_size)


def test_a_missing_state_or_graph_is_an_error_at_start_up():
    states = {1: runtime_state(1, [1, 8]), 3: runtime_state(3, [1])}
    check_cover(states, [1, 3])
    with pytest.raises(RuntimeError, match="S = 3: no runtime state"):
        check_cover({1: states[1]}, [1, 3])
    short = states | {1: runtime_state(1, [1])}
    with pytest.raises(RuntimeError, match=r"S = 1: batch sizes \[8\] are not captured"):
        check_cover(short, [1, 3])
    # A batch of 2 is the first that is padded to 8; none larger than the worker's is routed, and
    # above every captured size rounds run eagerly.
    check_cover(short, [1, 3], max_batch_size=1)
    check_cover(short, [1, 3], sizes=(1,))
    check_cover(short, [1, 3], sizes=None)


@pytest.mark.parametrize("policy_type", ["host", "device"])
@pytest.mark.parametrize("debounce", [0, 3])
def test_pruning_keeps_every_pair_that_any_batch_size_is_routed_to(policy_type, debounce):
    config = {**THREE_SLOTS, "slot_debounce": debounce}
    policy = AdaptiveState(config, 3)
    if policy_type == "host":
        policy = AdaptiveSpeculativeParams(3, config)
    sizes = [2, 6, 12, 30, 40]
    policy.set_cuda_graph_bs(sizes)
    for batch_size in range(1, 41):
        padded = next(size for size in sizes if size >= batch_size)
        for steps in policy.candidate_steps_for_batch(batch_size):
            assert padded in policy.cuda_graph_bs_for_step(steps)
    assert policy.candidate_steps_for_batch(40) == ([1, 3, 7] if debounce else [1])


def test_a_pruned_pair_that_routing_can_return_stops_the_start_up(pair, monkeypatch):
    # Pruning and routing that disagree would otherwise show as a slow eager round under load.
    monkeypatch.setattr(
        AdaptiveState, "cuda_graph_bs_for_step", lambda self, step: [1] if step == 3 else [1, 4]
    )
    with pytest.raises(RuntimeError, match=r"S = 3: batch sizes \[4\] are not captured"):
        make_worker(pair, cuda_graph_bs=[1, 4])


def test_a_state_that_no_slot_can_choose_is_an_error(pair):
    with pytest.raises(RuntimeError, match="S = 5: in no slot"):
        check_cover({1: runtime_state(1, [1, 8]), 5: runtime_state(5, [])}, [1])
    worker = make_worker(pair)
    state = worker.build_adaptive_runtime_state(5, 6, [])
    with pytest.raises(ValueError, match="5"):
        worker.controller.register(state)
    assert sorted(worker.controller.states) == worker.policy.candidate_steps


def test_a_graph_captured_while_another_step_is_active_uses_its_own_metadata(pair):
    config = {"1": {"candidate_steps": [3, 7]}}
    expected = fill_rows(make_worker(pair, config, initial=7)).decode()
    assert expected.speculative_num_steps == 7

    worker = fill_rows(make_worker(pair, config, initial=3, cuda_graph_bs=[4]))
    active = worker.controller.states[3]
    assert worker.runtime_state is active
    state = worker.build_adaptive_runtime_state(7, 8, [4])
    frame = state.frames[4]
    with torch.inference_mode():
        for other in worker.controller.states.values():
            for poisoned in other.frames.values():
                poisoned.offsets.fill_(-99)
        for table in state.stages:
            table.graphs[4].replay(kv_len=64)
    rows = expected.num_correct_drafts
    assert frame.accept_token_num[:3].tolist() == rows
    for row, count in enumerate(rows):
        assert frame.output_token_ids[row, : count + 1].tolist() == expected.tokens[row]


def test_a_narrow_step_in_wide_poisoned_buffers_gives_the_result_of_exact_ones(pair):
    def run(config, poison):
        worker = fill_rows(make_worker(pair, config, initial=3), ((1, 2, 3), (4, 5)))
        if poison:
            buffers = worker.buffers
            for name in ("positions", "output_token_ids", "extend_ids", "select_index"):
                getattr(buffers, name).fill_(63)
            buffers.input_ids[:, 1:] = 63
            buffers.input_ids[2:] = 63
            buffers.seq_lens[2:] = 60
            for name in ("hidden", "logits"):
                getattr(buffers, name).fill_(float("nan"))
            buffers.draft_hidden[2:] = float("nan")
        return [worker.decode() for _ in range(4)]

    exact = run({"1": {"candidate_steps": [3]}}, poison=False)
    # Update interval 1000: both stay at S = 3.
    wide = run({"update_interval": 1000, "1": {"candidate_steps": [3, 7]}}, poison=True)
    assert [r.speculative_num_steps for r in wide] == [3] * 4
    assert [(r.num_correct_drafts, r.tokens) for r in wide] == [
        (r.num_correct_drafts, r.tokens) for r in exact
    ]


@pytest.mark.parametrize("stage", ["draft", "verify", "extend"])
@pytest.mark.parametrize("at_size", [4, 1], ids=["first size", "last size"])
def test_a_failed_capture_leaves_the_worker_as_it_was(pair, monkeypatch, stage, at_size):
    worker = fill_rows(make_worker(pair, cuda_graph_bs=[4]))
    twin = fill_rows(make_worker(pair, cuda_graph_bs=[4]))
    worker.decode(), twin.decode()
    carried = ("num_reqs", "seq_lens", "new_seq_lens", "draft_hidden", "input_ids")
    before = {name: getattr(worker.buffers, name).clone() for name in carried}
    sampling = [t.clone() for t in worker.buffers.sampling.tensors]
    learned = worker.policy.tensor.clone()
    active, states = worker.runtime_state, dict(worker.controller.states)
    original = getattr(worker.stages, stage)

    def fail(frame, kv_len, *, learn):
        original(frame, kv_len, learn=learn)
        if frame.batch_size == at_size:
            raise RuntimeError("out of memory")

    tables = []
    made = GraphTable.__init__

    def record(self, *args):
        tables.append(self)
        made(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(worker.stages, stage, fail)
        patch.setattr(GraphTable, "__init__", record)
        with pytest.raises(RuntimeError, match="out of memory"):
            worker.build_adaptive_runtime_state(5, 6, [1, 4])
    assert worker.runtime_state is active
    assert worker.controller.states == states
    assert worker.speculative_num_steps == active.speculative_num_steps
    failed = next(table for table in tables if table.stage is fail)
    assert at_size not in failed.graphs, "a capture that failed could be replayed"
    for name in carried[:-1]:
        assert torch.equal(getattr(worker.buffers, name), before[name]), name
    assert torch.equal(worker.buffers.input_ids[:, 0], before["input_ids"][:, 0])
    assert all(map(torch.equal, worker.buffers.sampling.tensors, sampling))
    assert torch.equal(worker.policy.tensor, learned)
    for _ in range(5):
        assert worker.decode().tokens == twin.decode().tokens


@pytest.mark.parametrize("failing_steps", [7, 3, 1])
def test_a_capture_that_fails_at_start_up_registers_no_state(pair, monkeypatch, failing_steps):
    worker = make_worker(pair, cuda_graph_bs=[4])
    controller = AdaptiveController(worker, AdaptiveState(THREE_SLOTS, 3))
    build = worker.build_adaptive_runtime_state

    def fail(speculative_num_steps, *args, **keywords):
        if speculative_num_steps == failing_steps:
            raise RuntimeError("out of memory")
        return build(speculative_num_steps, *args, **keywords)

    monkeypatch.setattr(worker, "build_adaptive_runtime_state", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        controller.init_states([4])
    assert controller.states == {}


def test_capturing_never_teaches_the_policy(pair):
    worker = make_worker(pair, cuda_graph_bs=[1, 2, 4])
    assert worker.policy.next_round == 0
    assert all(slot.batch_count == 0 for slot in worker.policy.slots)


def test_captures_reach_as_far_as_a_row_can_and_no_further(pair):
    # A frozen launch cannot follow the keys as they grow; asking for more must not be silent.
    worker = make_worker(pair, cuda_graph_bs=[2])
    tables = [table for state in worker.controller.states.values() for table in state.stages]
    captures = [capture for table in tables for capture in table.graphs.values()]
    assert {capture.kv_len for capture in captures} == {worker.row_capacity}
    with pytest.raises(
        ValueError, match=f"kv_len: the capture reads at most {worker.row_capacity}"
    ):
        captures[0].replay(worker.row_capacity + 1)


def test_time_and_bytes_are_reported_for_each_step(pair):
    report = make_worker(pair, max_batch_size=32, cuda_graph_bs=[4, 8, 16, 32]).capture_report
    assert set(report.seconds) == set(report.num_bytes) == {1, 3, 7}
    assert all(seconds > 0 for seconds in report.seconds.values())
    # S = 1 has 2 positions in each of 60 rows, S = 7 has 8 in the 4 rows that it was kept for.
    assert report.num_bytes[7] / report.num_bytes[1] == pytest.approx(8 * 4 / (2 * 60), rel=1e-3)


def test_tables_are_built_before_a_capture_and_not_in_it(pair, monkeypatch):
    # Built inside a CUDA graph, they would live in its memory pool and be overwritten.
    worker = make_worker(pair, cuda_graph_bs=[1, 2])
    monkeypatch.setattr(RotaryTable, "_build", lambda self, length: 1 / 0)
    fill_rows(worker, [[1, 2, 3], [4]])
    for _ in range(8):
        worker.decode()
    for state in worker.controller.states.values():
        for table in state.stages:
            for capture in table.graphs.values():
                capture.replay(worker.row_capacity)


class FakeGpu:
    """Records what a capture does to streams and graphs, in order."""

    def __init__(self, monkeypatch):
        self.log = []
        self.stream = SimpleNamespace(
            device="cuda:0", wait_stream=lambda other: self.log.append("side waits")
        )
        current = SimpleNamespace(wait_stream=lambda other: self.log.append("current waits"))
        graph = SimpleNamespace(replay=lambda: self.log.append("replay"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: self.block("side"))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
        monkeypatch.setattr(torch.cuda, "graph", self.record)

    @contextlib.contextmanager
    def block(self, name):
        self.log.append(f"{name} begins")
        yield
        self.log.append(f"{name} ends")

    def record(self, graph, *, pool, stream, capture_error_mode):
        assert pool == (0, 1)
        assert stream is self.stream, "libraries were warmed up on another stream"
        return self.block("recording")


def test_a_cuda_graph_is_warmed_up_without_and_recorded_with_the_state(monkeypatch):
    # The other way round, capturing would teach the policy and replays never would.
    gpu = FakeGpu(monkeypatch)

    def stage(frame, kv_len, *, learn):
        gpu.log.append(f"stage over {kv_len} keys, learn={learn}")

    graph = CudaGraph.capture(stage, None, 96, (0, 1), gpu.stream)
    assert gpu.log == [
        "side waits",
        "side begins",
        "stage over 96 keys, learn=False",
        "side ends",
        "recording begins",
        "stage over 96 keys, learn=True",
        "recording ends",
        "current waits",
    ]
    graph.replay(96)
    graph.replay(3)
    assert gpu.log[8:] == ["replay", "replay"]
    with pytest.raises(ValueError, match="at most 96 keys, got 97"):
        graph.replay(97)
