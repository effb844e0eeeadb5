"""Faults of sampling from logits, seen in the field or likely, each with the smallest case that
shows it. Numbers of cases are those of the collection that the project was started with."""

import adaptive_spec_ext
import numpy as np
import pytest
import torch
from torch import Tensor

from adaptive_spec import ops
from adaptive_spec.state import AdaptiveState
from adaptive_spec.testing.op_cases import (
    CaseOptions,
    sampled_logits_chain_call,
    sampled_logits_tree_call,
)
from tests.ops.logits_rounds import Rule, sample, verify_chains

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)
MANY = 2000


def repeated(row: list[float] | Tensor, count: int = MANY, dtype=torch.float32) -> Tensor:
    """The same row of logits for many requests [count, V]."""
    return torch.as_tensor(row, dtype=dtype).expand(count, -1)


def draw(row: list[float] | Tensor, count: int = MANY, dtype=torch.float32, **rule) -> Tensor:
    """What many requests, each with a seed of its own, sample from the same row."""
    logits = repeated(row, count, dtype)
    return sample(
        logits, torch.arange(count), torch.zeros(count).long(), **Rule(**rule).arguments(count)
    )


def rates(tokens: Tensor, size: int) -> list[float]:
    return (torch.bincount(tokens, minlength=size) / len(tokens)).tolist()


class Decided:
    """What a round of one request without drafts decides on a row, and what it reports."""

    def __init__(self, row: list[float], dtype: torch.dtype, *, drafts=(), **rule) -> None:
        state = AdaptiveState({"1": {"candidate_steps": [0, 1, 2]}}, len(drafts))
        self.output = torch.full((1, len(drafts) + 1), -7, dtype=torch.int32)
        self.error_mask = torch.zeros(1, dtype=torch.bool)
        ops.verify_chain_sampling_from_logits(
            torch.tensor([drafts], dtype=torch.long).view(1, -1),
            torch.tensor(row, dtype=dtype).expand(1, len(drafts) + 1, -1),
            torch.tensor([5]),
            torch.tensor([9]),
            self.output,
            torch.zeros(1, dtype=torch.int32),
            error_mask=self.error_mask,
            state=state,
            slot=0,
            **Rule(**rule).arguments(1),
        )
        self.token = int(self.output[0, 0])
        self.has_error = bool(self.error_mask)
        self.num_anomalies = state.num_anomalies


# Rows that cannot be sampled, and what they choose instead.


@each_dtype
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("row", "token"),
    [
        ([-INF, -INF, -INF], 0),
        ([NAN, NAN, NAN], 0),
        ([INF, INF, INF], 0),
        ([NAN, -INF, INF], 0),
        ([NAN, 0.0, 1.0], 2),
        ([0.0, INF, 1.0], 2),
        ([1.0, 1.0, NAN], 0),
        ([-INF, -INF, NAN, -3.0], 3),
    ],
)
def test_rows_that_cannot_be_sampled_say_so(row, token, dtype, temperature):
    """Cases 10 and 12: the flag and the state's counter tell them from a plausible choice."""
    decided = Decided(row, dtype, temperature=temperature)
    assert (decided.token, decided.has_error, decided.num_anomalies) == (token, True, 1)


@each_dtype
def test_rows_with_a_finite_entry_are_sound_however_few_or_small(dtype):
    for row, tokens in [
        ([-INF, -INF, 3.0], {2}),
        ([5.0], {0}),
        ([0.0, -0.0], {0, 1}),
        ([torch.finfo(dtype).min / 2, torch.finfo(torch.float16).min], {0, 1}),
        (torch.tensor([1.0, 2.0]) * torch.finfo(dtype).smallest_normal / 8, {0, 1}),
    ]:
        decided = Decided(torch.as_tensor(row).tolist(), dtype)
        assert decided.token in tokens
        assert (decided.has_error, decided.num_anomalies) == (False, 0)


def test_a_row_without_any_choice_ends_the_walk_and_one_with_nan_does_not():
    """Even a draft of token 0 is not accepted where nothing supports it."""
    decided = Decided([-INF, -INF], torch.float32, drafts=[0, 0])
    assert decided.output.tolist() == [[0, -1, -1]]
    assert decided.num_anomalies == 1
    decided = Decided([NAN, 1.0, 0.0], torch.float32, drafts=[1, 1])
    assert decided.output.tolist() == [[1, 1, 1]]
    assert decided.num_anomalies == 3


def test_a_bad_row_behind_the_first_mismatch_is_no_error():
    """It is not read, so its memory need not even be filled."""
    logits = torch.full((1, 3, 4), NAN)
    logits[0, 0] = torch.tensor([0.0, 9.0, 0.0, 0.0]) * 10
    error_mask = torch.zeros(1, dtype=torch.bool)
    output = verify_chains(
        torch.tensor([[2, 2]]),
        logits,
        torch.tensor([1]),
        torch.tensor([1]),
        error_mask=error_mask,
    )
    assert output.tolist() == [[1, -1, -1]]
    assert not error_mask


def test_error_mask_is_only_ever_set():
    """So that it can be looked at once in many rounds."""
    logits = torch.tensor([[0.0, 1.0], [NAN, 1.0], [0.0, 1.0], [INF, 1.0]])
    error_mask = torch.tensor([False, False, True, True])
    sample(logits, torch.arange(4), torch.arange(4), error_mask=error_mask)
    assert error_mask.tolist() == [False, True, True, True]


def test_a_logit_that_float32_cannot_hold_is_an_error_only_where_it_is_sampled():
    """Sampling is done in float32; greedy rows are compared as they are."""
    row = [1.0, 1e300, -1e300]
    greedy = Decided(row, torch.float64, temperature=0.0)
    assert (greedy.token, greedy.has_error) == (1, False)
    sampled = Decided(row, torch.float64)
    assert (sampled.token, sampled.has_error) == (0, True)


# Temperatures and filters at their ends.


@pytest.mark.parametrize(
    "rule",
    [
        {"temperature": 0.0},
        {"temperature": -1.0},
        {"temperature": NAN},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_p": -0.5},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 1.0, "min_p": 7.0},
    ],
    ids=str,
)
@each_dtype
def test_what_leaves_nothing_but_the_likeliest_is_greedy(rule, dtype):
    """Case 22: the lowest id among equals, which no small temperature gives."""
    assert set(draw([0.0, 1.0, 1.0], 200, dtype, **rule).tolist()) == {1}


def test_greedy_requests_among_others_are_exact():
    """Cases 21 and 22: no division by 0, no sentinel, no effect on their neighbours."""
    logits = repeated([1.0, 1.0, 0.0], 3 * MANY)
    seeds, positions = torch.arange(3 * MANY), torch.full((3 * MANY,), 8)
    temperature = torch.tensor([0.0, 0.7, 0.0]).repeat(MANY)
    tokens = sample(logits, seeds, positions, temperature=temperature).view(MANY, 3)
    assert (tokens[:, [0, 2]] == 0).all()
    alone = sample(logits[1::3], seeds[1::3], positions[1::3], temperature=torch.full((MANY,), 0.7))
    assert torch.equal(tokens[:, 1], alone)
    assert set(alone.tolist()) == {0, 1, 2}


def test_a_temperature_that_is_not_given_is_one():
    """Case 22: not greedy."""
    logits, seeds = repeated([1.0, 0.5, 0.0]), torch.arange(MANY)
    plain = sample(logits, seeds, seeds)
    assert torch.equal(plain, sample(logits, seeds, seeds, temperature=torch.ones(MANY)))
    assert set(plain.tolist()) == {0, 1, 2}


def test_filters_that_are_off_change_nothing():
    logits = torch.randn(MANY, 50, generator=torch.Generator().manual_seed(1))
    seeds = torch.arange(MANY)
    plain = sample(logits, seeds, seeds)
    for off in (
        Rule(),
        Rule(top_k=-1),
        Rule(top_k=50),
        Rule(top_k=2**31 - 1),
        Rule(top_p=1.5),
        Rule(top_p=NAN),
        Rule(min_p=-1.0),
        Rule(min_p=NAN),
        Rule(min_p=1e-40),
    ):
        assert torch.equal(sample(logits, seeds, seeds, **off.arguments(MANY)), plain), off


def test_a_tiny_temperature_leaves_equals_and_nothing_else():
    """In float32 the noise would vanish beside logits of a million, and the first would win."""
    tokens = draw([30.0, 30.0, 29.9], temperature=1e-6)
    assert max(abs(a - b) for a, b in zip(rates(tokens, 3), [0.5, 0.5, 0], strict=True)) < 0.05
    for smallest in (1e-45, 1e-38):
        assert set(draw([30.0, 30.0, 29.9], temperature=smallest).tolist()) <= {0, 1}


@pytest.mark.parametrize("temperature", [1e4, 3e38, INF])
def test_a_huge_temperature_leaves_no_difference_but_masks(temperature):
    tokens = draw([10.0, -10.0, 0.0, -INF], 4 * MANY, temperature=temperature)
    expected = [1 / 3, 1 / 3, 1 / 3, 0]
    assert max(abs(a - b) for a, b in zip(rates(tokens, 4), expected, strict=True)) < 0.03
    assert 3 not in tokens


@pytest.mark.parametrize("rule", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.9}], ids=str)
def test_equals_at_a_border_all_stay(rule):
    """Whichever would be left out, order in the vocabulary would decide."""
    tokens = draw([0.0, 2.0, 2.0, 2.0, -1.0], **rule)
    assert set(tokens.tolist()) == {1, 2, 3}


def test_filters_look_at_the_whole_row_each():
    """Weights 8, 4, 2, 1, 1 of 16."""
    row = torch.tensor([8.0, 4.0, 2.0, 1.0, 1.0]).log()
    for rule, kept in [
        ({"top_k": 3, "top_p": 0.6}, {0, 1}),
        ({"top_k": 3, "top_p": 0.85}, {0, 1, 2}),
        ({"top_p": 0.97, "min_p": 0.2}, {0, 1, 2}),
        ({"top_k": 4}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.1}, {0}),
        ({"min_p": 0.45, "top_k": 4}, {0, 1}),
    ]:
        assert set(draw(row, **rule).tolist()) == kept, rule


@pytest.mark.parametrize("rule", [{"top_k": 2}, {"top_p": 0.99}, {"min_p": 0.01}], ids=str)
@pytest.mark.parametrize("has_draft_probs", [False, True])
def test_masked_rows_do_not_keep_a_filter_searching(rule, has_draft_probs):
    """Cases 8 and 28: a search for a border ends, also where -inf lies on both sides of it."""
    rows = [
        [-INF] * 9 + [1.0],
        [-INF] * 8 + [1.0, 1.0],
        [-INF] * 10,
        [-3e38] * 5 + [-INF] * 4 + [3e38],
        [NAN] * 10,
    ]
    logits = torch.tensor(rows)[:, None].expand(-1, 2, -1)
    probs = torch.full((5, 1, 10), 0.1) if has_draft_probs else None
    output = verify_chains(
        torch.full((5, 1), 3),
        logits,
        torch.arange(5),
        torch.arange(5),
        draft_probs=probs,
        **Rule(**rule).arguments(5),
    )
    assert output[0, 0] == 9
    assert output[1, 0] in (8, 9)
    assert output[2:].tolist() == [[0, -1], [9, -1], [0, -1]]


# Drafts with the probabilities that they were sampled from.


def accept_or_draw(
    row: list[float] | Tensor, draft: int, probs: list[float] | Tensor, **rule
) -> Tensor:
    """First tokens of many requests with the same draft behind the same row."""
    size = len(row)
    return verify_chains(
        torch.full((MANY, 1), draft),
        repeated(row)[:, None].expand(-1, 2, -1),
        torch.arange(MANY),
        torch.zeros(MANY).long(),
        draft_probs=torch.as_tensor(probs, dtype=torch.float32).expand(MANY, 1, size),
        **Rule(**rule).arguments(MANY),
    )


def test_a_certain_draft_is_accepted_as_often_as_the_target_says_and_not_drawn_again():
    output = accept_or_draw(torch.tensor([0.5, 0.3, 0.2]).log(), 1, [0.0, 1.0, 0.0])
    first, is_accepted = output[:, 0], output[:, 1] >= 0
    assert abs(is_accepted.float().mean() - 0.3) < 0.05
    assert (first[is_accepted] == 1).all()
    assert 1 not in first[~is_accepted]
    drawn = rates(first[~is_accepted], 3)
    assert abs(drawn[0] - 5 / 7) < 0.05


def test_a_draft_that_is_the_target_exactly_is_accepted():
    row = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    for draft in range(4):
        output = accept_or_draw(row, draft, [0.5, 0.25, 0.125, 0.125])
        assert ((output[:, 1] >= 0).float().mean()) > 0.999
        assert ((output[:, 0] >= 0) & (output[:, 0] < 4)).all()


def test_a_residual_without_anything_left_gives_the_likeliest_token():
    """Case 27: not the last thread's, not one past the vocabulary. Probabilities that no draft can
    have reject and leave nothing."""
    output = accept_or_draw([0.0, 1.0, 0.5], 0, [1e9, 1e9, 1e9])
    is_accepted = output[:, 1] >= 0
    assert (output[~is_accepted, 0] == 1).all()
    assert is_accepted.sum() < 3


@pytest.mark.parametrize("probs", [[0.0] * 4, [NAN] * 4], ids=["zero", "NaN"])
def test_probabilities_that_nobody_wrote_accept_what_is_possible(probs):
    """Like those of a draft that was never expected."""
    row = [0.0, 1.0, -INF, -1.0]
    assert (accept_or_draw(row, 3, probs)[:, 0] == 3).all()
    masked = accept_or_draw(row, 2, probs)
    assert (masked[:, 1] == -1).all()
    expected = torch.tensor(row).softmax(0).tolist()
    difference = [abs(a - b) for a, b in zip(rates(masked[:, 0], 4), expected, strict=True)]
    assert max(difference) < 0.05


def test_nan_among_probabilities_counts_as_zero():
    row, draft = [0.0, 1.0, 0.5, -1.0], 1
    with_nan = accept_or_draw(row, draft, [NAN, 0.7, 0.3, NAN])
    assert torch.equal(with_nan, accept_or_draw(row, draft, [0.0, 0.7, 0.3, 0.0]))


@pytest.mark.parametrize("rule", [{"top_k": 2}, {"top_p": 0.6}, {"min_p": 0.5}], ids=str)
def test_what_filters_leave_out_is_neither_accepted_nor_drawn(rule):
    """Case 34: the draft was sampled without the target's filters, as it may be."""
    probs = torch.tensor([0.4, 0.3, 0.2, 0.1])
    for draft in range(4):
        output = accept_or_draw(probs.log(), draft, [0.25] * 4, **rule)
        # What is left of the target makes up for more than the draft's share of a kept token.
        assert set(output[:, 0].tolist()) == ({draft} if draft < 2 else {0, 1})
        assert (output[:, 1] >= 0).any() == (draft < 2)


def test_probabilities_do_not_matter_where_a_request_is_greedy():
    output = accept_or_draw([0.0, 2.0, 2.0], 2, [0.0, 0.0, 1.0], temperature=0.0)
    assert (output == torch.tensor([1, -1])).all()
    output = accept_or_draw([0.0, 2.0, 2.0], 1, [0.0, 1.0, 0.0], temperature=0.0)
    assert (output == 1).all()


def test_only_the_draft_is_accepted_that_is_a_token():
    """Case 13: a placeholder is not looked up, emitted, or the end of the world."""
    for bad in (-1, 4, 2**31, -(2**40)):
        for probs in (None, torch.full((1, 3, 4), 0.25)):
            output = verify_chains(
                torch.tensor([[1, bad, 2]]),
                torch.tensor([0.0, 90.0, 0.0, 0.0]).expand(1, 4, 4),
                torch.tensor([3]),
                torch.tensor([4]),
                draft_probs=probs,
            )
            assert output.tolist() == [[1, 1, -1, -1]]


# Batches.


def test_the_same_seed_draws_the_same_in_any_row_and_another_does_not():
    """Case 18: no stream of numbers belongs to a row or is used up by a call."""
    logits = repeated(torch.zeros(1000), 6)
    seeds = torch.tensor([7, 8, 7, -7, 2**62, 8])
    tokens = sample(logits, seeds, torch.full((6,), 5)).tolist()
    assert tokens[0] == tokens[2]
    assert tokens[1] == tokens[5]
    assert len(set(tokens)) == 4


def test_each_request_has_its_own_seed_and_position():
    """Case 29: changing those of one request changes its tokens and no others."""
    logits = torch.randn(4, 3, 500, generator=torch.Generator().manual_seed(2)) / 10
    drafts = torch.zeros(4, 2).long()

    def first_tokens(seeds: list[int], positions: list[int]) -> Tensor:
        return verify_chains(drafts, logits, torch.tensor(seeds), torch.tensor(positions))[:, 0]

    before = first_tokens([1, 2, 3, 4], [9, 9, 9, 9])
    for after in (
        first_tokens([1, 2, 3 + 2**32, 4], [9, 9, 9, 9]),
        first_tokens([1, 2, 3, 4], [9, 9, 9 + 2**32, 9]),
    ):
        assert (after != before).tolist() == [False, False, True, False]


def test_torch_s_generator_takes_no_part():
    """Cases 7 and 45: its numbers depend on the device and on what was drawn before."""
    logits, seeds = torch.zeros(50, 100), torch.arange(50)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    tokens = sample(logits, seeds, seeds)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(sample(logits, seeds, seeds), tokens)


def test_padding_rows_are_left_alone_and_not_counted():
    """Case 35: a batch of three in buffers for eight, whose other rows hold anything."""
    state = AdaptiveState({"1": {"candidate_steps": [1]}}, 1)
    logits = torch.full((8, 2, 4), NAN)
    logits[:3] = torch.tensor([0.0, 90.0, 0.0, 0.0])
    output = torch.full((8, 2), -7, dtype=torch.int32)
    counts = torch.full((8,), -7, dtype=torch.int32)
    error_mask = torch.zeros(8, dtype=torch.bool)
    ops.verify_chain_sampling_from_logits(
        torch.tensor([[1]] * 3 + [[2**40]] * 5),
        logits,
        torch.arange(8),
        torch.arange(8),
        output,
        counts,
        temperature=torch.tensor([1.0] * 3 + [NAN] * 5),
        draft_probs=torch.cat([torch.full((3, 1, 4), 0.25), torch.full((5, 1, 4), NAN)]),
        error_mask=error_mask,
        num_reqs=torch.tensor([3], dtype=torch.int32),
        state=state,
        slot=0,
    )
    assert output.tolist() == [[1, 1]] * 3 + [[-7, -7]] * 5
    assert counts.tolist() == [1] * 3 + [-7] * 5
    assert not error_mask.any()
    record = state.ring.record(0)
    assert (record.num_correct_drafts, record.num_reqs, state.num_anomalies) == (3, 3, 0)


def verify_star(logits: Tensor, children: list[int], **arguments) -> tuple[list[int], int]:
    """A root with sibling drafts: tokens of the path, and accepted drafts."""
    num_nodes = len(children) + 1
    predicts = torch.full((num_nodes,), -7, dtype=torch.int32)
    accept_index = torch.zeros(1, 2, dtype=torch.int32)
    count = torch.zeros(1, dtype=torch.int32)
    adaptive_spec_ext.verify_tree_sampling_from_logits(
        predicts,
        accept_index,
        count,
        torch.tensor([[0, *children]]),
        torch.arange(num_nodes)[None],
        torch.tensor([[1] + [-1] * len(children)]),
        torch.tensor([[-1, *range(2, num_nodes), -1]]),
        logits[None],
        torch.tensor([4]),
        torch.tensor([[6] + [7] * len(children)]),
        **arguments,
    )
    n = int(count)
    return predicts[accept_index[0, : n + 1].long()].tolist(), n


def test_a_masked_child_is_never_accepted():
    """Case 42: a grammar masks the row behind the node that it belongs to."""
    logits = torch.zeros(4, 5)
    logits[0] = torch.tensor([-INF, 0.0, -INF, 0.0, -INF])
    for children in ([2, 4, 0], [0, 4, 2]):
        assert verify_star(logits, children)[1] == 0
    tokens, n = verify_star(logits, [2, 1, 3])
    assert n == 1
    assert tokens[0] in (1, 3)


def test_a_child_s_row_draws_behind_that_child():
    """Case 31: rows of other nodes must not be taken for it."""
    logits = torch.full((4, 5), -INF)
    logits[0, 3] = logits[1, 0] = logits[2, 4] = logits[3, 2] = 0.0
    assert verify_star(logits, [1, 3, 2]) == ([3, 4], 1)
    assert verify_star(logits, [3, 1, 2]) == ([3, 0], 1)
    assert verify_star(logits, [1, 2, 3]) == ([3, 2], 1)


def test_no_input_yields_a_token_outside_the_vocabulary_or_none_at_all():
    """Cases 8 and 24: NaN, cycles and placeholders included, each request gets a token."""
    rng = np.random.default_rng(8)
    for _ in range(60):
        steps, size = int(rng.integers(0, 5)), int(rng.integers(1, 9))
        case = CaseOptions(7, steps, num_nodes=6, vocab_size=size, malformed=True)
        for make in (sampled_logits_chain_call, sampled_logits_tree_call):
            call = make(rng, case, torch.float32)
            call.run(getattr(adaptive_spec_ext, call.op))
            bonus = call.tensors["bonus_tokens"].view
            assert ((bonus >= 0) & (bonus < size)).all()
            counts = call.tensors["accept_token_num"].view
            assert ((counts >= 0) & (counts <= steps)).all()


def test_what_was_decided_is_one_tensor():
    """Case 6: ranks whose logits differ by a unit in the last place may choose differently, so one
    of them tells the others. All that it has to send lies in `accepted_tokens`."""
    logits = torch.randn(3, 4, 20, generator=torch.Generator().manual_seed(2))
    drafts = torch.tensor([[5, 6, 7]] * 3)
    seq_lens, tokens = torch.tensor([10, 20, 30]), torch.zeros(12, dtype=torch.long)
    new_seq_lens = torch.zeros(3, dtype=torch.long)
    output = verify_chains(
        drafts,
        logits,
        torch.arange(3),
        seq_lens,
        seq_lens=seq_lens,
        new_seq_lens=new_seq_lens,
        accepted_tokens=tokens,
    )
    emitted = output[output >= 0]
    assert tokens[: len(emitted)].tolist() == emitted.tolist()
    assert int((new_seq_lens - seq_lens).sum()) == len(emitted)
