"""The worker's rows, what it reserves, what it tells the policy, and its draft at S = 0."""

import itertools
import random
import warnings

import pytest
import torch

from adaptive_spec import AdaptiveSpeculativeParams
from adaptive_spec.engine.sampling import GREEDY, SamplingParams
from adaptive_spec.state import AdaptiveState
from adaptive_spec.testing.models import agreeing_pair, draft_reference, greedy_reference
from adaptive_spec.workers import (
    EagleWorker,
    SpecOptions,
    adaptive_unsupported_reason,
    num_new_kv_slots,
)
from adaptive_spec.workers.base import BaseSpecWorker

ONE_SLOT = {"1": {"candidate_steps": [1, 3, 7]}}


@pytest.fixture(scope="module")
def pair():
    return agreeing_pair(0.5)


def make_worker(pair, policy=None, **keywords):
    keywords = {"max_batch_size": 4, "max_len": 100} | keywords
    return EagleWorker(pair.target, pair.draft, policy=policy, **keywords)


def policy_of(steps, **knobs):
    """Device policy that steps through `steps` by force of `force`; learns nothing."""
    return AdaptiveState({"1": {"candidate_steps": steps, "update_interval": 10**6, **knobs}}, 0)


def force(worker, steps):
    """Run the next rounds at `steps`, as if the policy had chosen so."""
    state = worker.controller.states[steps]
    worker.activate_step_by_batch = lambda batch_size: worker.apply_runtime_state(state)


# Rows.


def test_rows_move_and_leave_without_touching_the_others(pair):
    rng = random.Random(0)
    worker = make_worker(pair, speculative_num_steps=3)
    rows = []  # (prompt, tokens so far)
    for _ in range(60):
        if len(rows) < 4 and rng.random() < 0.5:
            prompt = [rng.randrange(64) for _ in range(rng.randint(1, 9))]
            rows.append((prompt, [worker.add_row(prompt)]))
        elif rows and rng.random() < 0.3:
            row = rng.randrange(len(rows))
            prompt, tokens = rows[row]
            assert tokens == greedy_reference(pair.target, prompt, len(tokens))
            worker.remove_row(row)
            rows[row] = rows[-1]
            rows.pop()
        if rows:
            for (_, tokens), new in zip(rows, worker.decode().tokens, strict=True):
                tokens.extend(new[: 60 - len(tokens)])
                assert new
        for row in [r for r in range(len(rows) - 1, -1, -1) if worker.rows[r].length > 80]:
            worker.remove_row(row)
            rows[row] = rows[-1]
            rows.pop()


def test_a_freed_row_leaves_no_poison_for_the_next_request(pair):
    worker = make_worker(pair, speculative_num_steps=3, cuda_graph_bs=[4])
    worker.add_row([1, 2, 3, 4, 5])
    worker.decode()
    for cache in worker.caches:
        cache.data[:, 0, :12] = float("nan")  # a sequence that overflowed
    worker.buffers.draft_hidden[0] = float("nan")
    worker.remove_row(0)
    tokens = [worker.add_row([7, 8])]
    while len(tokens) < 10:
        tokens += worker.decode().tokens[0]
    assert tokens == greedy_reference(pair.target, [7, 8], len(tokens))


def test_what_a_wide_round_left_in_padding_rows_is_harmless_in_a_narrow_one(pair):
    # Row 3 of a round at S = 7 selects one of 32 positions; a padded round at S = 1 has only 8.
    worker = make_worker(pair, policy_of([1, 7]), cuda_graph_bs=[4])
    for prompt in ([1, 2], [3], [4, 5, 6], [7]):
        worker.add_row(prompt)
    force(worker, 7)
    worker.decode()
    for _ in range(4):
        worker.remove_row(0)
    tokens = [worker.add_row([8, 9])]
    force(worker, 1)
    while len(tokens) < 8:
        tokens += worker.decode().tokens[0]
    assert tokens == greedy_reference(pair.target, [8, 9], len(tokens))


def test_bad_rows_are_refused(pair):
    worker = make_worker(pair, max_batch_size=1, speculative_num_steps=1)
    with pytest.raises(ValueError, match="no live row"):
        worker.decode()
    with pytest.raises(ValueError, match="1 to 100 tokens"):
        worker.add_row([])
    with pytest.raises(ValueError, match="1 to 100 tokens"):
        worker.add_row([1] * 101)
    for token in (-1, 64):
        with pytest.raises(ValueError, match=f"token_ids: expected token ids 0 to 63, got {token}"):
            worker.add_row([1, token, 2])
    with pytest.raises(TypeError, match="sampling: expected SamplingParams, got 0.7"):
        worker.add_row([1], 0.7)
    assert worker.num_reqs == 0
    worker.add_row([1])
    with pytest.raises(ValueError, match="all 1 rows are taken"):
        worker.add_row([1])
    with pytest.raises(ValueError, match="row: expected 0 to 0"):
        worker.remove_row(1)


# Reservation of cache slots.


def test_the_reservation_covers_the_largest_step_whatever_is_active(pair):
    worker = make_worker(pair, AdaptiveState(ONE_SLOT, 1))
    assert worker.speculative_num_steps == 1
    assert worker.kv_tokens_per_round == 8
    assert worker.row_capacity == 100 + 8
    for steps in (7, 1, 3):
        worker.apply_runtime_state(worker.controller.states[steps])
        assert worker.kv_tokens_per_round == 8


@pytest.mark.parametrize(
    ("committed", "allocated", "tokens_per_round", "rounds", "expected"),
    [
        (100, 116, 2, 2, 0),  # after a step down: 100 + 4 - 116 is -12
        (100, 100, 8, 1, 8),
        (100, 104, 8, 1, 4),
        (100, 100, 8, 2, 16),
        (0, 0, 1, 1, 1),
    ],
)
def test_new_slots_are_never_negative(committed, allocated, tokens_per_round, rounds, expected):
    assert num_new_kv_slots(committed, allocated, tokens_per_round, rounds) == expected


def test_a_sequence_may_run_up_to_the_last_position(pair):
    worker = make_worker(pair, AdaptiveState(ONE_SLOT, 7), max_len=24)
    tokens = [worker.add_row([1, 2, 3])]
    while 3 + len(tokens) < 24:
        tokens += worker.decode().tokens[0]
    assert tokens == greedy_reference(pair.target, [1, 2, 3], len(tokens))


# The policy.


@pytest.mark.parametrize("policy_type", [AdaptiveSpeculativeParams, AdaptiveState])
def test_padding_rows_are_not_counted(pair, policy_type):
    config = {"1": {"candidate_steps": [3], "update_interval": 1, "ema_alpha": 1.0}}
    policy = policy_type(config, 3) if policy_type is AdaptiveState else policy_type(3, config)
    worker = make_worker(pair, policy, cuda_graph_bs=[4])

    def ema():
        if policy_type is AdaptiveState:
            return policy.slots[0].ema_accept_len
        return policy.status()[0]["ema_accept_len"]

    for prompt in ([1, 2], [3, 4, 5], [6]):
        worker.add_row(prompt)
    rng = random.Random(0)
    while worker.num_reqs:
        for _ in range(3):
            result = worker.decode()
            assert result.padded_batch_size == 4
            counts = result.num_correct_drafts
            assert len(counts) == worker.num_reqs
            # With alpha 1 the EMA is the mean over the live rows of this round.
            assert ema() == sum(counts) / len(counts)
        worker.remove_row(rng.randrange(worker.num_reqs))  # finished or retracted


def test_the_policy_hears_the_step_and_batch_size_that_ran(pair):
    class Recorder(AdaptiveSpeculativeParams):
        heard = ()

        def on_verify_complete(self, counts, batch_size, executed_steps=None):
            self.heard += ((len(counts), batch_size, executed_steps),)
            return super().on_verify_complete(counts, batch_size, executed_steps)

    policy = Recorder(3, ONE_SLOT)
    worker = make_worker(pair, policy, cuda_graph_bs=[4])
    worker.add_row([1])
    worker.add_row([2])
    results = [worker.decode() for _ in range(3)]
    assert policy.heard == tuple((2, 2, r.speculative_num_steps) for r in results)


def test_a_round_that_fails_can_be_run_again(pair, monkeypatch):
    policy = AdaptiveState(ONE_SLOT, 3)
    worker, twin = make_worker(pair, policy), make_worker(pair, AdaptiveState(ONE_SLOT, 3))
    for w in (worker, twin):
        w.add_row([1, 2, 3])
        w.decode()
    with monkeypatch.context() as patch:
        patch.setattr(type(pair.target), "logits", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            worker.decode()
    assert policy.next_round == 1
    # The controller has taken the round back, so the ring's reader is not a round ahead.
    assert [worker.decode().tokens for _ in range(4)] == [twin.decode().tokens for _ in range(4)]
    assert policy.next_round == 5


def test_initial_steps_outside_the_candidates_build_nothing(pair, monkeypatch):
    config = {"1": {"candidate_steps": [1, 3]}, "8": {"candidate_steps": [1, 7]}}
    built = []
    monkeypatch.setattr(
        EagleWorker, "build_adaptive_runtime_state", lambda self, *a, **k: built.append(a)
    )
    with pytest.raises(ValueError, match="1, 3, 7"):
        make_worker(pair, AdaptiveState(config, 5), speculative_num_steps=5)
    assert built == []


def test_a_state_drives_one_worker_at_a_time(pair):
    # Two would take each other's rounds for their own and wait for ones that never come.
    policy = AdaptiveState(ONE_SLOT, 3)
    worker = make_worker(pair, policy)
    with pytest.raises(ValueError, match="policy: this AdaptiveState drives another engine"):
        make_worker(pair, policy)
    worker.add_row([1, 2, 3])
    assert worker.decode().tokens
    del worker
    make_worker(pair, policy)


def test_a_state_on_another_device_is_refused(pair):
    policy = AdaptiveState(ONE_SLOT, 3)
    policy.tensor = policy.tensor.to("meta")
    with pytest.raises(ValueError, match=r"policy: expected a state on cpu .* got one on meta"):
        make_worker(pair, policy)


# Options under which nothing adapts.

UNSUPPORTED = [
    SpecOptions(topk=4),
    SpecOptions(attention_dp=True),
    SpecOptions(multi_layer_draft=True),
    SpecOptions(two_batch_overlap=True),
    SpecOptions(pdmux=True),
]


@pytest.mark.parametrize("options", UNSUPPORTED, ids=repr)
def test_an_unsupported_option_is_never_silent(pair, options):
    with pytest.warns(RuntimeWarning) as caught:
        worker = make_worker(pair, AdaptiveState(ONE_SLOT, 3), options=options)
    assert len(caught) == 1
    status = worker.status()
    assert status["adaptive"] is False
    assert status["adaptive_unsupported_reason"] == adaptive_unsupported_reason(options)
    assert status["adaptive_unsupported_reason"] in str(caught[0].message)
    assert worker.speculative_num_steps == 3
    with pytest.raises(ValueError, match="not available"):
        make_worker(pair, AdaptiveState(ONE_SLOT, 3), options=options, strict=True)


def test_supported_options_give_no_reason_and_no_warning(pair):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        worker = make_worker(pair, AdaptiveState(ONE_SLOT, 3), options=SpecOptions())
    assert worker.status()["adaptive"] is True
    assert worker.status()["adaptive_unsupported_reason"] is None


def test_the_base_worker_has_hooks_that_do_nothing():
    worker = BaseSpecWorker()
    assert worker.activate_step_by_batch(3) is None
    assert worker.on_verify_complete_cpu([1, 2], 2) is None
    with pytest.raises(NotImplementedError):
        worker.build_adaptive_runtime_state(1, 2)


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        ({"max_batch_size": 0}, ValueError, "max_batch_size"),
        ({"max_batch_size": True}, TypeError, "max_batch_size"),
        ({"max_len": 2.5}, TypeError, "max_len"),
        ({"max_len": 513}, ValueError, "max_position_embeddings"),
        ({"speculative_num_steps": -1}, ValueError, "speculative_num_steps"),
        ({"cuda_graph_bs": [0]}, ValueError, "cuda_graph_bs"),
        ({"cuda_graph_bs": ["4"]}, TypeError, "cuda_graph_bs"),
        ({"policy": 5}, TypeError, "policy: expected AdaptiveSpecPolicy or None, got 5"),
        ({"options": 5}, TypeError, "options: expected SpecOptions or None, got 5"),
    ],
)
def test_bad_arguments_are_named(pair, keywords, error, text):
    with pytest.raises(error, match=text):
        make_worker(pair, **keywords)


def test_drafting_without_a_draft_model_is_refused(pair):
    with pytest.raises(ValueError, match="draft: S = 2 needs a draft model"):
        EagleWorker(pair.target, None, max_batch_size=1, max_len=9, speculative_num_steps=2)
    with pytest.raises(ValueError, match="draft: S = 7 needs a draft model"):
        EagleWorker(
            pair.target, None, max_batch_size=1, max_len=9, policy=AdaptiveState(ONE_SLOT, 1)
        )


# Rounds at S = 0.


def run_alternating(pair, worker, prompts, pattern, sampling=(GREEDY,) * 3):
    """Rounds at the given steps; yields (sequences before the round, proposals) at S > 0."""
    sequences = [
        list(prompt) + [worker.add_row(prompt, own)]
        for prompt, own in zip(prompts, sampling, strict=True)
    ]
    for steps in pattern:
        force(worker, steps)
        before = [list(s) for s in sequences]
        result = worker.decode()
        assert result.speculative_num_steps == steps
        for sequence, tokens in zip(sequences, result.tokens, strict=True):
            sequence.extend(tokens)
        if steps > 0:
            frame = worker._frame(worker.runtime_state, result.padded_batch_size)
            yield before, frame.draft_tokens[: len(prompts)].tolist()


PATTERN = list(itertools.chain.from_iterable([0] * 5 + [3] * 5 for _ in range(3)))
PROMPTS = ([1, 2, 3], [40, 9], [5, 5, 5, 60])


@pytest.mark.parametrize("cuda_graph_bs", [None, [4]], ids=["eager", "graphs"])
def test_after_a_pause_the_draft_proposes_what_it_would_have_without(pair, cuda_graph_bs):
    worker = make_worker(pair, policy_of([0, 3]), cuda_graph_bs=cuda_graph_bs)
    checked = 0
    for sequences, proposals in run_alternating(pair, worker, PROMPTS, PATTERN):
        # Computed anew from the whole sequence: a draft that never paused.
        assert proposals == [draft_reference(pair, s, 3) for s in sequences]
        checked += 1
    assert checked == 15
    assert worker.num_skipped_draft_rounds == 0


def test_drafts_are_chosen_with_the_noise_that_will_judge_them(pair):
    # From the draft's logits, but by the request's own rule, seed and places in the sequence.
    worker = make_worker(pair, policy_of([0, 3]), cuda_graph_bs=[4])
    sampling = [
        SamplingParams(1.0, seed=7),
        SamplingParams(0.8, top_k=8, top_p=0.9, min_p=0.01, seed=-7),
        SamplingParams(),
    ]
    greedy = sampled = 0
    for sequences, proposals in run_alternating(pair, worker, PROMPTS, PATTERN, sampling):
        for sequence, own, proposal in zip(sequences, sampling, proposals, strict=True):
            own = own.with_seed()
            assert proposal == draft_reference(pair, sequence, 3, own)
            greedy += proposal == draft_reference(pair, sequence, 3)
            sampled += 1
    assert sampled == 45 and greedy < 30


def test_skipping_the_draft_at_zero_is_opt_in_counted_and_lossless(pair, monkeypatch):
    worker = make_worker(pair, policy_of([0, 3]), skip_draft_at_zero=True)
    forward, calls = type(pair.draft).forward, []

    def record(self, *args):
        calls.append(worker.speculative_num_steps)
        return forward(self, *args)

    monkeypatch.setattr(type(pair.draft), "forward", record)
    for before, _ in run_alternating(pair, worker, PROMPTS, PATTERN):
        sequences = before
    # 3 prompts, then only rounds at S = 3: two draft steps and an extend each, and 3 catch-ups.
    assert len(calls) == 3 + 15 * 3 + 3
    assert worker.num_skipped_draft_rounds == 15 == worker.status()["num_skipped_draft_rounds"]
    for prompt, sequence in zip(PROMPTS, sequences, strict=True):
        new = len(sequence) - len(prompt)
        assert sequence[len(prompt) :] == greedy_reference(pair.target, prompt, new)


def test_skipping_drafts_catches_up_with_the_last_position(pair):
    # The draft sees only the newest token here (no attention), so one position is all it needs.
    blind = agreeing_pair(0.5)
    for layer in (blind.draft.layer,):
        layer.out.weight.zero_()
    worker = make_worker(blind, policy_of([0, 3]), skip_draft_at_zero=True)
    for sequences, proposals in run_alternating(blind, worker, PROMPTS, PATTERN):
        assert proposals == [draft_reference(blind, s, 3) for s in sequences]


def test_the_draft_runs_s_minus_1_steps_and_one_extend(pair, monkeypatch):
    # An off-by-one here drafts a token too few, or pays for one that is never verified.
    shapes = []
    forward = type(pair.draft).forward

    def record(self, input_ids, *args):
        shapes.append(tuple(input_ids.shape))
        return forward(self, input_ids, *args)

    worker = make_worker(pair, speculative_num_steps=4)
    worker.add_row([1, 2, 3])
    monkeypatch.setattr(type(pair.draft), "forward", record)
    result = worker.decode()
    assert shapes == [(1, 1)] * 3 + [(1, 5)]
    assert result.speculative_num_steps == 4
    assert torch.all(worker._frame(worker.runtime_state, 1).draft_tokens >= 0)
