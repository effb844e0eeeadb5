"""Verify ops with the adaptive state: it evolves as the Python policy does on the same counts."""

import dataclasses

import adaptive_spec_ext
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_spec import ops, ops_ref
from adaptive_spec.state import AdaptiveState
from adaptive_spec.step_policy import AdaptiveSpeculativeParams
from adaptive_spec.testing.op_cases import (
    CaseOptions,
    chain_call,
    logits_call,
    sample_calls,
    sampled_logits_chain_call,
    sampled_logits_tree_call,
    tree_call,
)

CONFIG = {
    "1": {"candidate_steps": [0, 1, 3, 7]},
    "4": {"candidate_steps": [1, 3], "down_hysteresis": 0.0},
    "9": {"candidate_steps": [0, 2]},
    "update_interval": 2,
    "warmup_batches": 1,
    "ema_alpha": 0.3,
}
OPS = {
    "tree": tree_call,
    "chain": chain_call,
    "logits": lambda rng, case: logits_call(rng, case, torch.float32),
    "sampled logits": lambda rng, case: sampled_logits_chain_call(rng, case, torch.float32),
    "sampled logits tree": lambda rng, case: sampled_logits_tree_call(rng, case, torch.float32),
}


@pytest.mark.parametrize("kind", OPS)
@pytest.mark.parametrize("padded", [False, True], ids=["exact", "padded"])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), malformed=st.booleans())
def test_state_equals_the_python_policy(kind, padded, seed, malformed):
    """Padding rows hold drafts like any other row, but must not count."""
    rng = np.random.default_rng(seed)
    state = AdaptiveState(CONFIG, 3)
    policy = AdaptiveSpeculativeParams(3, CONFIG)
    anomalies = 0
    for round_ in range(25):
        num_reqs = int(rng.integers(1, 12))
        slot = state.slot_for_batch(num_reqs)
        steps = policy.get_steps_for_batch(num_reqs)
        case = CaseOptions(
            batch_size=num_reqs + (int(rng.integers(0, 5)) if padded else 0),
            num_steps=steps,
            num_nodes=12,
            num_reqs=num_reqs if padded else None,
            max_accept=bool(rng.integers(2)),
            extra_width=int(rng.integers(0, 3)),
            malformed=malformed,
        )
        call = OPS[kind](rng, case)
        anomalies += call.clone().run(getattr(ops_ref, f"{call.op}_ref")).anomalies
        call.run(getattr(ops, call.op), state=state, slot=slot)
        counts = call.tensors["accept_token_num"].view[:num_reqs].tolist()
        policy.on_verify_complete(counts, num_reqs, executed_steps=steps)

        for ours, theirs in zip(state.slots, policy.status(), strict=True):
            assert ours.ema_accept_len.hex() == theirs["ema_accept_len"].hex()
            assert ours.speculative_num_steps == theirs["speculative_num_steps"]
        decision = state.ring.read(round_, slot)
        assert decision.speculative_num_steps == policy.get_steps_for_batch(num_reqs)
        record = state.ring.record(round_)
        assert (record.num_correct_drafts, record.num_reqs) == (sum(counts), num_reqs)
        assert (record.slot, record.speculative_num_steps) == (slot, steps)
    assert state.num_anomalies == anomalies


@pytest.mark.parametrize("kind", OPS)
def test_results_do_not_depend_on_the_state(kind):
    rng = np.random.default_rng(4)
    call = OPS[kind](rng, CaseOptions(5, 3, num_nodes=9, num_reqs=4))
    plain = call.clone()
    plain.run(getattr(ops, call.op))
    call.run(getattr(ops, call.op), state=AdaptiveState(CONFIG, 3), slot=0)
    call.assert_equal(plain)


@pytest.mark.parametrize("kind", OPS)
def test_a_round_of_padding_alone_is_a_round_but_no_observation(kind):
    rng = np.random.default_rng(4)
    call = OPS[kind](rng, CaseOptions(5, 3, num_nodes=9, num_reqs=0))
    untouched = call.clone()
    state = AdaptiveState(CONFIG, 3)
    before = state.slots[0]
    call.run(getattr(ops, call.op), state=state, slot=0)
    call.assert_equal(untouched)
    after = state.slots[0]
    assert (after.ema_accept_len, after.batch_count) == (before.ema_accept_len, 0)
    assert state.next_round == 1
    assert state.ring.read(0, 0).speculative_num_steps == 3


def test_update_and_select_takes_impossible_counts_to_the_nearest_possible():
    counts = torch.tensor([-5, 9, 2, 3, 100], dtype=torch.int32)
    num_reqs = torch.tensor([4], dtype=torch.int32)
    sums = ops_ref.update_and_select_ref(counts, speculative_num_steps=3, num_reqs=num_reqs)
    assert (sums.accepted, sums.num_reqs, sums.anomalies) == (0 + 3 + 2 + 3, 4, 2)
    state = AdaptiveState(CONFIG, 3)
    ops.update_and_select(counts, state, slot=0, speculative_num_steps=3, num_reqs=num_reqs)
    record = state.ring.record(0)
    assert (record.num_correct_drafts, record.num_reqs) == (sums.accepted, sums.num_reqs)
    assert state.num_anomalies == sums.anomalies


def update(target, **replaced):
    arguments = {
        "accept_token_num": torch.zeros(2, dtype=torch.int32),
        "state": target.tensor,
        "ring": target.ring.tensor,
        "slot": 0,
        "speculative_num_steps": 3,
    }
    adaptive_spec_ext.update_and_select(**(arguments | replaced))


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"slot": 3}, "`slot`"),
        ({"slot": -1}, "argument `slot`"),
        ({"slot": 16}, "argument `slot`"),
        ({"speculative_num_steps": 65}, "argument `speculative_num_steps`"),
        ({"speculative_num_steps": -1}, "argument `speculative_num_steps`"),
        ({"accept_token_num": torch.zeros(2, dtype=torch.int64)}, "argument `accept_token_num`"),
        ({"accept_token_num": torch.zeros((), dtype=torch.int32)}, "argument `accept_token_num`"),
        ({"num_reqs": torch.zeros(2, dtype=torch.int32)}, "argument `num_reqs`"),
        ({"state": torch.zeros(200, dtype=torch.int64)}, "`state` is not an adaptive state"),
        ({"state": torch.zeros(0, dtype=torch.int64)}, "argument `state`"),
        ({"state": torch.zeros(9, 9, dtype=torch.int64)}, "argument `state`"),
        ({"state": torch.zeros(200, dtype=torch.int32)}, "argument `state`"),
        ({"state": torch.zeros(33, dtype=torch.int64)}, "argument `state`: expected shape"),
        ({"ring": torch.zeros(7, dtype=torch.int64)}, "argument `ring`: expected shape"),
        ({"ring": torch.zeros(33, dtype=torch.int64)}, "`ring` has a size that does not match"),
        ({"ring": torch.zeros(400, dtype=torch.int64)[::2]}, "argument `ring`"),
        ({"ring": torch.zeros(7, dtype=torch.int64, device="meta")}, "argument `ring`"),
    ],
)
def test_wrong_state_arguments_change_nothing(replaced, message):
    state = AdaptiveState(CONFIG, 3)
    words, ring = state.tensor.clone(), state.ring.tensor.clone()
    with pytest.raises(ValueError, match="^update_and_select: " + message):
        update(state, **replaced)
    assert torch.equal(state.tensor, words)
    assert torch.equal(state.ring.tensor, ring)


def test_every_verify_op_checks_the_state():
    state = AdaptiveState(CONFIG, 3)
    for name, call in sample_calls().items():
        if not name.endswith(", full") or name.startswith("chain tree"):
            continue
        before = call.clone()
        with pytest.raises(ValueError, match=f"^{call.op}: `slot`"):
            call.run(getattr(ops, call.op), state=state, slot=3)
        with pytest.raises(ValueError, match=f"^{call.op}: `state`"):
            call.run(
                getattr(adaptive_spec_ext, call.op),
                state=state.tensor[:-1],
                ring=state.ring.tensor,
            )
        call.assert_equal(before)


def test_opcheck_with_state():
    state = AdaptiveState(CONFIG, 3)
    rng = np.random.default_rng(4)
    call = chain_call(rng, dataclasses.replace(CaseOptions(3, 3), outputs=False))
    positional = [
        call.tensors[name].view
        for name in ("draft_tokens", "target_predict", "output_token_ids", "accept_token_num")
    ]
    keywords = {"state": state.tensor, "ring": state.ring.tensor, "slot": 0}
    torch.library.opcheck(torch.ops.adaptive_spec.verify_chain_greedy.default, positional, keywords)
    torch.library.opcheck(
        torch.ops.adaptive_spec.update_and_select.default,
        (torch.zeros(2, dtype=torch.int32), state.tensor, state.ring.tensor),
        {"slot": 0, "speculative_num_steps": 3},
    )


def test_compile_updates_the_state_once_per_call():
    torch._dynamo.reset()
    state = AdaptiveState(CONFIG, 3)
    expected = AdaptiveState(CONFIG, 3)
    counts = torch.tensor([3, 1], dtype=torch.int32)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(counts, words, ring):
        adaptive_spec_ext.update_and_select(counts, words, ring, slot=0, speculative_num_steps=3)

    for _ in range(5):
        compiled(counts, state.tensor, state.ring.tensor)
        ops.update_and_select(counts, expected, slot=0, speculative_num_steps=3)
    assert torch.equal(state.tensor, expected.tensor)
    assert torch.equal(state.ring.tensor, expected.ring.tensor)
