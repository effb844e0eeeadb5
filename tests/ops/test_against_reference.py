"""Every op against its slow reference, on random batches of all shapes, well-formed and not."""

import dataclasses

import adaptive_spec_ext
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_spec import ops_ref
from adaptive_spec.testing.op_cases import (
    CaseOptions,
    OpCall,
    chain_call,
    chain_tree_call,
    logits_call,
    sample_calls,
    sampled_chain_call,
    sampled_logits_chain_call,
    sampled_logits_tree_call,
    sampled_tree_call,
    tree_call,
)

SAMPLES = sample_calls()
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def check(call: OpCall, **extra) -> ops_ref.RoundSums:
    expected = call.clone()
    sums = expected.run(getattr(ops_ref, f"{call.op}_ref"), **extra)
    call.run(getattr(adaptive_spec_ext, call.op), **extra)
    call.assert_equal(expected)
    return sums


@st.composite
def case_options(draw, max_batch_size=64, max_nodes=64, max_vocab_size=4) -> CaseOptions:
    batch_size = draw(st.integers(0, max_batch_size))
    return CaseOptions(
        batch_size=batch_size,
        num_steps=draw(st.integers(0, 12)),
        num_nodes=draw(st.integers(1, max_nodes)),
        vocab_size=draw(st.integers(1, max_vocab_size)),
        num_reqs=draw(st.none() | st.integers(-1, batch_size + 2)),
        max_accept=draw(st.booleans()),
        outputs=draw(st.booleans()),
        optional_inputs=draw(st.sampled_from([0.0, 0.5, 1.0])),
        extra_width=draw(st.integers(0, 4)),
        strided=draw(st.booleans()),
        malformed=draw(st.booleans()),
        pass_steps=True,
    )


seeds = st.integers(0, 2**32 - 1).map(np.random.default_rng)


@pytest.mark.parametrize("name", SAMPLES)
def test_samples(name):
    check(SAMPLES[name].clone())


@settings(max_examples=150, deadline=None)
@given(rng=seeds, case=case_options())
def test_tree(rng, case):
    check(tree_call(rng, case))


@settings(max_examples=100, deadline=None)
@given(rng=seeds, case=case_options(max_batch_size=6, max_nodes=5))
def test_small_malformed_trees(rng, case):
    """Small trees with bad links have cycles among siblings and from child to ancestor."""
    check(tree_call(rng, dataclasses.replace(case, malformed=True, vocab_size=2)))


@settings(max_examples=100, deadline=None)
@given(rng=seeds, case=case_options())
def test_chain(rng, case):
    check(chain_call(rng, case))


@settings(max_examples=100, deadline=None)
@given(rng=seeds, case=case_options(max_batch_size=9), dtype=st.sampled_from(DTYPES))
def test_logits(rng, case, dtype):
    check(logits_call(rng, case, dtype))


@settings(max_examples=30, deadline=None)
@given(
    rng=seeds,
    vocab_size=st.sampled_from([1, 31, 33, 127, 1023, 1024, 1025, 2049, 3001]),
    dtype=st.sampled_from(DTYPES),
    malformed=st.booleans(),
)
def test_logits_of_vocabularies_around_block_sizes(rng, vocab_size, dtype, malformed):
    case = CaseOptions(2, 2, vocab_size=vocab_size, malformed=malformed, outputs=False)
    check(logits_call(rng, case, dtype))


@settings(max_examples=150, deadline=None)
@given(rng=seeds, case=case_options(max_batch_size=12, max_nodes=24))
def test_sampled_tree(rng, case):
    check(sampled_tree_call(rng, case))


@settings(max_examples=150, deadline=None)
@given(rng=seeds, case=case_options(max_batch_size=12), has_draft_probs=st.booleans())
def test_sampled_chain(rng, case, has_draft_probs):
    call = sampled_chain_call(rng, case, has_draft_probs=has_draft_probs)
    check(call, **({} if has_draft_probs else {"draft_probs": None}))


SAMPLED_LOGITS = {"chain": sampled_logits_chain_call, "tree": sampled_logits_tree_call}
each_sampled_logits = pytest.mark.parametrize("kind", SAMPLED_LOGITS)


@each_sampled_logits
@settings(max_examples=150, deadline=None)
@given(
    rng=seeds,
    case=case_options(max_batch_size=9, max_nodes=24, max_vocab_size=40),
    dtype=st.sampled_from(DTYPES),
)
def test_sampled_logits(kind, rng, case, dtype):
    check(SAMPLED_LOGITS[kind](rng, case, dtype))


@each_sampled_logits
@settings(max_examples=30, deadline=None)
@given(
    rng=seeds,
    vocab_size=st.sampled_from([1, 7, 8, 9, 127, 1023, 1025, 3001]),
    dtype=st.sampled_from(DTYPES),
    malformed=st.booleans(),
)
def test_sampled_logits_of_vocabularies_around_block_sizes(kind, rng, vocab_size, dtype, malformed):
    case = CaseOptions(
        3, 2, num_nodes=5, vocab_size=vocab_size, malformed=malformed, optional_inputs=0.7
    )
    check(SAMPLED_LOGITS[kind](rng, case, dtype))


@settings(max_examples=50, deadline=None)
@given(rng=seeds, case=case_options())
def test_chain_tree(rng, case):
    check(chain_tree_call(rng, case))


def test_the_generator_reaches_deep_walks_and_every_kind_of_anomaly():
    """Agreement on batches where nothing happens would prove nothing."""
    rng = np.random.default_rng(1)
    case = CaseOptions(64, 6, num_nodes=32, vocab_size=3)
    for make in (
        tree_call,
        chain_call,
        lambda rng, case: logits_call(rng, case, torch.float32),
        sampled_tree_call,
        sampled_chain_call,
        lambda rng, case: sampled_logits_chain_call(rng, case, torch.float16),
        lambda rng, case: sampled_logits_tree_call(rng, case, torch.float32),
    ):
        clean = check(make(rng, case))
        assert clean.accepted > 32, "fewer than one accepted draft in two requests"
        assert clean.anomalies == 0
        assert check(make(rng, dataclasses.replace(case, malformed=True))).anomalies > 10
