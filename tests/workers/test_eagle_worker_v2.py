"""Overlapping rounds: the tokens of `EagleWorker`, though the host knows less when it acts.

On the CPU the device queue defers all work until it is waited for, so whatever depends on a round
in flight reads stale buffers here and gives wrong tokens or decisions.
"""

import random

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from adaptive_spec import AdaptiveSpeculativeParams
from adaptive_spec.state import AdaptiveState
from adaptive_spec.testing.models import agreeing_pair, greedy_reference
from adaptive_spec.workers import EagleWorker, EagleWorkerV2
from adaptive_spec.workers.queue import DeferredQueue

# Decides every round, so that S changes all the time.
RESTLESS = {
    "update_interval": 1,
    "warmup_batches": 0,
    "ema_alpha": 0.9,
    "1": {"candidate_steps": [0, 1, 3, 7]},
    "3": {"candidate_steps": [0, 2, 5]},
}


@pytest.fixture(scope="module")
def pair():
    return agreeing_pair(0.4)


def certain_pair():
    """A pair whose drafts are all accepted: without attention both are the same function."""
    pair = agreeing_pair(0.0, max_position_embeddings=1024)
    for layer in (pair.target.layers[0], pair.draft.layer):
        layer.out.weight.zero_()
    return pair


def make_worker(pair, policy=None, worker_type=EagleWorkerV2, **keywords):
    keywords = {"max_batch_size": 4, "max_len": 120} | keywords
    return worker_type(pair.target, pair.draft, policy=policy, **keywords)


def make_policy(kind, config=RESTLESS, initial=0):
    if kind == "host":
        return AdaptiveSpeculativeParams(initial, config)
    return AdaptiveState(config, initial)


class Session:
    """Rows of a worker and the sequences that its results add up to."""

    def __init__(self, worker):
        self.worker = worker
        self.rows = []  # (prompt, tokens so far) by row
        self.ended = []
        self.steps = []

    def add(self, prompt):
        token = self.worker.add_row(prompt)
        self.rows.append((prompt, [] if token is None else [token]))

    def remove(self, row):
        self.worker.remove_row(row)
        self.ended.append(self.rows[row])
        self.rows[row] = self.rows[-1]
        self.rows.pop()

    def collect(self):
        result = self.worker.collect()
        self.steps.append(result.speculative_num_steps)
        for i, row in enumerate(result.rows):
            if row is None:
                continue
            tokens = self.rows[row][1]
            if result.first_tokens[i] is not None:
                assert not tokens, "a first token came twice or late"
                tokens.append(result.first_tokens[i])
            tokens.extend(result.tokens[i])
        return result

    def advance(self):
        """Launch as far as allowed, then collect the oldest round."""
        worker = self.worker
        while self.rows and worker.num_in_flight < worker.rounds_in_flight:
            worker.launch()
        return self.collect() if worker.num_in_flight else None

    def finish(self):
        while self.worker.num_in_flight:
            self.collect()
        while self.rows:
            self.remove(0)


def check(pair, sequences, least):
    assert sum(len(tokens) for _, tokens in sequences) > least, "the run was too short"
    for prompt, tokens in sequences:
        assert tokens == greedy_reference(pair.target, prompt, len(tokens))


# Tokens.


@pytest.mark.parametrize("early", [None, 0], ids=["late", "at random"])
@pytest.mark.parametrize("skip", [False, True], ids=["extend", "skip"])
@pytest.mark.parametrize("cuda_graph_bs", [None, [2, 4]], ids=["eager", "graphs"])
@pytest.mark.parametrize("kind", ["host", "device"])
def test_rows_come_and_go_while_rounds_are_in_flight(pair, kind, cuda_graph_bs, skip, early):
    worker = make_worker(
        pair, make_policy(kind), cuda_graph_bs=cuda_graph_bs, skip_draft_at_zero=skip
    )
    if early is not None:
        worker.queue.early = random.Random(early)
    rng = random.Random(7)
    session = Session(worker)
    for _ in range(50):
        while len(session.rows) < 4 and rng.random() < 0.5:
            session.add([rng.randrange(64) for _ in range(rng.randint(1, 9))])
        session.advance()
        for row in range(len(session.rows) - 1, -1, -1):
            if len(session.rows[row][1]) > 60 or rng.random() < 0.08:
                session.remove(row)
    session.finish()
    check(pair, session.ended, least=150)
    assert len(set(session.steps)) >= 3, "S did not move enough"
    if skip:
        assert worker.num_skipped_draft_rounds > 0


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_fixed_steps_give_the_tokens_of_the_worker_that_waits(pair, steps):
    prompts = ([1, 2, 3], [40, 9], [5, 5, 5, 60])
    runs = []
    for worker_type in (EagleWorker, EagleWorkerV2):
        session = Session(make_worker(pair, None, worker_type, speculative_num_steps=steps))
        for prompt in prompts:
            session.add(list(prompt))
        for _ in range(12):
            session.advance()
        runs.append([tokens for _, tokens in session.rows])
    assert runs[0] == runs[1]


def test_a_row_whose_request_moved_twice_still_gets_its_tokens(pair):
    # Rounds in flight know rows, not indices: row 2 becomes 1, then 0, before any result is here.
    worker = make_worker(pair, speculative_num_steps=3)
    session = Session(worker)
    for prompt in ([1, 2], [3, 4], [5, 6, 7]):
        session.add(prompt)
    worker.launch()
    worker.launch()
    worker.remove_row(1)
    worker.remove_row(0)
    session.rows = [session.rows[2]]
    assert session.collect().rows == [None, None, 0]
    session.add([8, 9])
    assert session.collect().rows == [None, None, 0]
    for _ in range(4):
        session.advance()
    check(pair, session.rows, least=10)


# What is in flight.


def test_a_round_is_launched_before_the_results_of_the_one_before(pair):
    worker = make_worker(pair, speculative_num_steps=3)
    assert worker.add_row([1, 2, 3]) is None
    worker.launch()
    worker.launch()
    # The prompt and two rounds, none of which has begun.
    assert worker.queue.num_pending == 3
    assert worker.buffers.seq_lens.tolist() == [0] * 4
    with pytest.raises(RuntimeError, match="2 rounds are in flight"):
        worker.launch()
    worker.collect()
    assert worker.queue.num_pending == 1, "waiting for a round ran the one behind it"
    worker.collect()
    with pytest.raises(RuntimeError, match="no round is in flight"):
        worker.collect()
    assert worker.num_in_flight == worker.status()["num_rounds_in_flight"] == 0


def test_one_round_in_flight_is_all_that_the_first_worker_allows(pair):
    worker = make_worker(pair, None, EagleWorker, speculative_num_steps=3)
    worker.add_row([1, 2, 3])
    worker.launch()
    with pytest.raises(RuntimeError, match="1 rounds are in flight"):
        worker.launch()


def test_results_in_flight_do_not_share_memory(pair):
    # With one set of host buffers the second round would overwrite what the first brought.
    worker = make_worker(pair, speculative_num_steps=3)
    worker.add_row([1, 2, 3])
    worker.launch()
    worker.launch()
    worker.queue.drain()
    tokens = [worker.first_token(0)]
    for _ in range(2):
        tokens += worker.collect().tokens[0]
    assert tokens == greedy_reference(pair.target, [1, 2, 3], len(tokens))


def test_a_prompt_is_run_without_waiting_for_its_token(pair):
    worker = make_worker(pair, speculative_num_steps=3)
    expected = [greedy_reference(pair.target, prompt, 1)[0] for prompt in ([1, 2], [3])]
    assert worker.add_row([1, 2]) is None
    assert worker.add_row([3]) is None
    assert worker.queue.num_pending == 2
    # Asked for, the token is waited for; it is handed out once.
    assert worker.first_token(0) == expected[0]
    assert worker.first_token(0) is None
    worker.launch()
    assert worker.collect().first_tokens == [None, expected[1]]
    worker.launch()
    assert worker.collect().first_tokens == [None, None]


class NoReadBack(TorchDispatchMode):
    """Refuses the operations that wait for the device to hand a value or a shape to the host."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert not name.startswith(self.NAMES), f"{name} waits for the device"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("cuda_graph_bs", [None, [2, 4]], ids=["eager", "graphs"])
def test_queued_work_never_hands_a_value_to_the_host(pair, monkeypatch, cuda_graph_bs):
    # On a GPU this would stop the host until the device has caught up, and end a capture.
    run_next, ran = DeferredQueue.run_next, []

    def guarded(queue):
        with NoReadBack():
            run_next(queue)
        ran.append(1)

    monkeypatch.setattr(DeferredQueue, "run_next", guarded)
    worker = make_worker(
        pair, make_policy("device"), cuda_graph_bs=cuda_graph_bs, skip_draft_at_zero=True
    )
    session = Session(worker)
    for number in range(20):
        session.add([number, 2, 3])
        session.advance()
        if len(session.rows) > 3:
            session.remove(number % 3)
    session.finish()
    check(pair, session.ended, least=40)
    assert len(ran) > 50
    with pytest.raises(AssertionError, match="waits for the device"), NoReadBack():
        worker.buffers.seq_lens[0].item()


# Decisions.


def test_round_r_runs_with_the_decision_of_round_r_minus_2(pair):
    for early in (None, 0, 1):
        policy = make_policy("device")
        worker = make_worker(pair, policy)
        if early is not None:
            # A device that is ahead: fresher decisions are there and must not be used.
            worker.queue.early = random.Random(early)
        session = Session(worker)
        session.add([1, 2, 3])
        used, chosen = [], []
        for number in range(30):
            session.advance()
            used.append(session.steps[-1])
            chosen.append(policy.ring.read(number, 0).speculative_num_steps)
        assert used[:2] == [0, 0], "the steps to start with"
        assert used[2:] == chosen[:-2]
        assert used[1:] != chosen[:-1], "one round of lag would have looked the same"


@pytest.mark.parametrize("kind", ["host", "device"])
def test_late_feedback_switches_once_and_not_every_round(kind):
    # Everything is accepted. Credited to the slot's new S, a round that ran at S = 0 would look
    # like a round with nothing accepted and send the slot back down.
    config = {
        "ema_alpha": 1.0,
        "update_interval": 1,
        "warmup_batches": 0,
        "1": {"candidate_steps": [0, 3]},
    }
    policy = make_policy(kind, config)
    worker = make_worker(certain_pair(), policy, max_len=900)
    session = Session(worker)
    session.add([1, 2])
    for _ in range(200):
        session.advance()
    assert set(session.steps[3:]) == {3}
    assert policy.status()[0]["num_switches"] == 1
    assert worker.controller.num_switches == 1


class Recorder(AdaptiveSpeculativeParams):
    def __init__(self, *args):
        super().__init__(*args)
        self.heard = []

    def on_verify_complete(self, counts, batch_size, executed_steps=None):
        self.heard.append((list(counts), batch_size, executed_steps))
        return super().on_verify_complete(counts, batch_size, executed_steps)


def test_late_counts_are_credited_to_the_batch_and_steps_that_ran(pair):
    policy = Recorder(0, RESTLESS)
    session = Session(make_worker(pair, policy, max_batch_size=6))
    rng = random.Random(0)
    ran, mixed = [], 0
    for number in range(40):
        # The batch changes between launch and collect, in size and in slot.
        target = rng.choice([1, 2, 4, 5])
        while len(session.rows) < target:
            session.add([rng.randrange(64) for _ in range(3)])
        while len(session.rows) > target:
            session.remove(0)
        result = session.advance()
        assert len(policy.heard) == number + 1, "a round was not heard when it was collected"
        now = (len(session.rows), session.worker.speculative_num_steps)
        mixed += now != (result.batch_size, result.speculative_num_steps)
        ran.append((result.num_correct_drafts, result.batch_size, result.speculative_num_steps))
        for row in range(len(session.rows) - 1, -1, -1):
            if len(session.rows[row][1]) > 80:
                session.remove(row)
    assert policy.heard == ran
    assert mixed > 10, "what ran was always what is active: nothing was tested"


def test_a_host_policy_decides_as_the_op_does_with_the_same_lag(pair):
    runs = []
    for kind in ("host", "device"):
        session = Session(make_worker(pair, make_policy(kind)))
        rng = random.Random(3)
        rounds = []
        for _ in range(60):
            if rng.random() < 0.15:
                # No row is left: what is in flight comes in before the next round is launched, and
                # a host policy must not use it a round early for that.
                session.finish()
            while len(session.rows) < rng.choice([1, 2, 4]):
                session.add([rng.randrange(64) for _ in range(3)])
            result = session.advance()
            rounds.append((result.batch_size, result.speculative_num_steps))
            if rng.random() < 0.3:
                session.remove(rng.randrange(len(session.rows)))
            for row in range(len(session.rows) - 1, -1, -1):
                if len(session.rows[row][1]) > 80:
                    session.remove(row)
        session.finish()
        runs.append(rounds)
    assert runs[0] == runs[1]
    assert len({steps for _, steps in runs[0]}) >= 4


# Cache slots.


def test_the_reservation_covers_two_rounds_at_the_largest_step(pair, monkeypatch):
    monkeypatch.setattr("adaptive_spec.workers.rows.KV_BLOCK", 1)
    config = {"update_interval": 1000, "1": {"candidate_steps": [1, 7]}}
    worker = make_worker(pair, make_policy("device", config, initial=1))
    worker.add_row([1, 2, 3])
    for _ in range(10):
        worker.launch()
        row = worker.rows[0]
        # Reserved by the active S = 1 it would be 4 more; for one round in flight, 8.
        assert worker.speculative_num_steps == 1
        assert row.reserved >= row.length + 2 * 8
        if worker.num_in_flight == 2:
            worker.collect()


def test_the_keys_of_both_rounds_in_flight_are_within_the_bound(monkeypatch):
    # From a reservation without slack and with most drafts accepted, a bound for one round in
    # flight cuts off keys that the second one needs.
    monkeypatch.setattr("adaptive_spec.workers.rows.KV_BLOCK", 1)
    agreeing = agreeing_pair(0.1)
    session = Session(make_worker(agreeing, speculative_num_steps=7))
    for prompt in ([1, 2, 3], [4], [50, 51, 52]):
        session.add(prompt)
    for _ in range(10):
        session.advance()
    check(agreeing, session.rows, least=120)


def test_a_sequence_may_run_up_to_the_last_position_and_no_further():
    certain = certain_pair()
    worker = make_worker(certain, max_len=24, speculative_num_steps=7)
    assert worker.row_capacity == 24 + 2 * 8
    session = Session(worker)
    session.add([1, 2, 3])
    # Known lengths 3, 3, 11, 19: the round launched last really starts at 27 and writes up to 34.
    for _ in range(3):
        session.advance()
    session.collect()
    check(certain, session.rows, least=20)
    with pytest.raises(ValueError, match=r"row 0 has 35 tokens, expected at most 24 \(max_len\)"):
        worker.launch()


# Failures.


def test_a_failing_stage_surfaces_when_its_round_is_collected(pair, monkeypatch):
    policy = make_policy("device")
    worker = make_worker(pair, policy)
    session = Session(worker)
    session.add([1, 2, 3])
    session.advance()
    session.advance()
    extend, calls = worker.stages.target.logits, []

    def fail_once(*args, **keywords):
        calls.append(1)
        if len(calls) == 1:
            raise FloatingPointError("broken")
        return extend(*args, **keywords)

    worker.launch()
    with monkeypatch.context() as patch:
        patch.setattr(worker.stages.target, "logits", fail_once)
        with pytest.raises(FloatingPointError, match="broken") as caught:
            worker.collect()
        assert "in a decode round of 1 rows at S = " in caught.value.__notes__[0]
        # The round behind it runs from where the failed one left the row.
        session.collect()
    for _ in range(8):
        session.advance()
    check(pair, session.rows, least=10)
    # The reader of the ring and the op still agree on round numbers.
    assert policy.next_round == len(session.steps) + worker.num_in_flight - 1


def test_rounds_that_fail_one_after_another_are_all_taken_back(pair, monkeypatch):
    policy = make_policy("device")
    worker = make_worker(pair, policy)
    session = Session(worker)
    session.add([1, 2, 3])
    session.advance()
    with monkeypatch.context() as patch:
        patch.setattr(worker.stages.target, "logits", lambda *a, **k: 1 / 0)
        for _ in range(3):
            worker.launch()
            while worker.num_in_flight:
                with pytest.raises(ZeroDivisionError):
                    worker.collect()
    for _ in range(8):
        session.advance()
    check(pair, session.rows, least=8)
    assert worker.controller.status()["ring_stalls"] == 0


def test_a_prompt_that_fails_stops_its_round_until_the_row_is_removed(pair, monkeypatch):
    worker = make_worker(pair, speculative_num_steps=3)
    session = Session(worker)
    session.add([1, 2, 3])
    session.add([4, 5])
    worker.queue.run_next()
    with monkeypatch.context() as patch:
        patch.setattr(worker.stages.target, "logits", lambda *a, **k: 1 / 0)
        worker.queue.run_next()
    worker.launch()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError) as caught:
            worker.collect()
        assert caught.value.__notes__ == ["while running a prompt of 2 tokens in row 1"]
    session.remove(1)
    # Row 0 has lost nothing, and the next request in row 1 inherits nothing.
    session.add([6, 7])
    for _ in range(5):
        session.advance()
    check(pair, session.rows, least=10)


def test_a_prompt_that_fails_where_it_is_awaited_leaves_no_row(pair, monkeypatch):
    worker = make_worker(pair, None, EagleWorker, speculative_num_steps=3)
    session = Session(worker)
    session.add([1, 2, 3])
    with monkeypatch.context() as patch:
        patch.setattr(worker.stages.target, "logits", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.add([4, 5])
    assert worker.num_reqs == 1
    session.add([6, 7])
    for _ in range(5):
        session.advance()
    check(pair, session.rows, least=10)


def test_bad_tokens_are_refused_before_anything_is_queued(pair):
    worker = make_worker(pair, speculative_num_steps=1)
    for tokens, error in (([], ValueError), ([1] * 121, ValueError), ([1.5], TypeError)):
        with pytest.raises(error, match="token_ids: expected"):
            worker.add_row(tokens)
    with pytest.raises(ValueError, match="no live row"):
        worker.launch()
    assert worker.num_reqs == worker.queue.num_pending == 0
