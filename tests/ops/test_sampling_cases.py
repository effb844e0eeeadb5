"""Faults of sampling ops seen in the field, each with the smallest case that shows it."""

import adaptive_spec_ext
import numpy as np
import pytest
import torch

from adaptive_spec import ops, ops_ref
from adaptive_spec.state import AdaptiveState
from adaptive_spec.testing.op_cases import CaseOptions, sampled_chain_call, sampled_tree_call

NAN, INF = float("nan"), float("inf")


def verify_siblings(
    probs: list[float],
    children: list[int],
    *,
    coin: float = 0.0,
    final_coin: float = 0.0,
    draft_probs: torch.Tensor | None = None,
    **options,
) -> tuple[int, int, torch.Tensor]:
    """A root with sibling drafts: first token, accepted drafts, and draft_probs afterwards."""
    num_nodes, size = len(children) + 1, len(probs)
    first_child = torch.full((1, num_nodes), -1)
    sibling = torch.full((1, num_nodes), -1)
    if children:
        first_child[0, 0] = 1
        sibling[0, 1:-1] = torch.arange(2, num_nodes)
    predicts = torch.full((num_nodes,), -7, dtype=torch.int32)
    count = torch.zeros(1, dtype=torch.int32)
    if draft_probs is None:
        draft_probs = torch.zeros(1, num_nodes, size)
    adaptive_spec_ext.tree_speculative_sampling_target_only(
        predicts,
        torch.zeros(1, 2, dtype=torch.int32),
        count,
        torch.tensor([[0, *children]]),
        torch.arange(num_nodes)[None],
        first_child,
        sibling,
        torch.full((1, num_nodes), coin),
        torch.tensor([final_coin]),
        torch.tensor(probs).expand(1, num_nodes, size).contiguous(),
        draft_probs,
        **options,
    )
    return int(predicts[0]), int(count), draft_probs


def verify_chain(
    drafts: list[int],
    target: list[list[float]],
    draft: list[list[float]] | None,
    coins: list[float],
    final_coin: float = 0.0,
    **keywords,
) -> tuple[list[int], int]:
    """One request: its output row and accepted drafts."""
    output = torch.full((1, len(drafts) + 1), -7, dtype=torch.int32)
    count = torch.zeros(1, dtype=torch.int32)
    adaptive_spec_ext.verify_chain_sampling(
        None if draft is None else torch.tensor([draft]),
        torch.tensor([drafts], dtype=torch.int32).view(1, -1),
        torch.tensor([target]),
        torch.tensor([coins]).view(1, -1),
        torch.tensor([final_coin]),
        output,
        count,
        **keywords,
    )
    return output[0].tolist(), int(count)


def test_a_coin_of_zero_does_not_accept_what_is_impossible():
    assert verify_siblings([0.0, 1.0, 0.0], [2])[:2] == (1, 0)


def test_a_coin_on_the_border_belongs_to_the_next_interval():
    assert verify_siblings([0.0, 0.25, 0.0, 0.75], [1, 2, 3], coin=0.25)[:2] == (3, 1)
    assert verify_siblings([0.0, 0.25, 0.0, 0.75], [], final_coin=0.25)[0] == 3
    assert verify_siblings([0.0, 0.25, 0.0, 0.75], [], final_coin=0.25 - 2**-25)[0] == 1


def test_rejected_siblings_are_marked_and_not_drawn_again():
    token, count, draft_probs = verify_siblings([0.5, 0.25, 0.25], [1, 2], coin=0.75)
    assert (token, count) == (0, 0)
    assert draft_probs[0, 0].tolist() == [0.0, 0.25, 0.25]
    assert draft_probs[0, 1:].sum() == 0


def test_draft_probs_that_nobody_wrote_do_not_matter():
    garbage = torch.full((1, 3, 3), NAN)
    for final_coin in (0.0, 0.4, 0.9):
        clean = verify_siblings([0.5, 0.25, 0.25], [1, 2], coin=0.75, final_coin=final_coin)
        poisoned = verify_siblings(
            [0.5, 0.25, 0.25], [1, 2], coin=0.75, final_coin=final_coin, draft_probs=garbage.clone()
        )
        assert clean[:2] == poisoned[:2]


def test_thresholds_accept_more_than_the_target_allows():
    assert verify_siblings([0.5, 0.3, 0.2], [1], coin=0.31)[1] == 0
    assert verify_siblings([0.5, 0.3, 0.2], [1], coin=0.31, threshold_single=0.3)[1] == 1
    assert verify_siblings([0.5, 0.3, 0.2], [1], coin=0.31, threshold_acc=0.9)[1] == 1
    # A threshold of 0 is no licence for the impossible.
    for thresholds in ({"threshold_single": 0.0}, {"threshold_acc": 0.0}):
        assert verify_siblings([0.5, 0.5, 0.0], [2], **thresholds)[1] == 0


@pytest.mark.parametrize("name", ["threshold_single", "threshold_acc"])
@pytest.mark.parametrize("value", [-0.1, 1.1, NAN, INF])
def test_thresholds_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"argument `{name}`: expected a number from 0 to 1, got"):
        verify_siblings([0.5, 0.5], [1], **{name: value})


def test_drafts_that_are_no_tokens_are_neither_looked_up_nor_emitted():
    for bad in (-1, 3, 2**31 - 1):
        output, count = verify_chain(
            [1, bad, 2], [[0, 1, 0]] + [[0.25, 0.5, 0.25]] * 3, None, [0.0, 0.0, 0.0], 0.3
        )
        assert (output, count) == ([1, 1, -1, -1], 1)


def test_the_rate_of_acceptance_is_the_overlap_of_the_distributions():
    """Ignoring the draft's probabilities would accept with the target's alone."""
    generator = torch.Generator().manual_seed(3)
    size, num = 7, 100_000
    p, q = torch.rand(2, size, generator=generator).square().add(0.01).unbind()
    p, q = p / p.sum(), q / q.sum()
    drafts = torch.multinomial(q, num, replacement=True, generator=generator)
    counts = torch.empty(num, dtype=torch.int32)
    adaptive_spec_ext.verify_chain_sampling(
        q.expand(num, 1, size),
        drafts[:, None].int(),
        p.expand(num, 2, size),
        torch.rand(num, 1, generator=generator),
        torch.rand(num, generator=generator),
        torch.empty(num, 2, dtype=torch.int32),
        counts,
    )
    overlap = float(torch.minimum(p, q).sum())
    sigma = (overlap * (1 - overlap) / num) ** 0.5
    assert abs(float(counts.float().mean()) - overlap) < 5 * sigma


def test_a_draft_that_is_the_target_exactly_is_accepted_and_leaves_a_defined_rest():
    row = [0.125, 0.5, 0.375]
    assert verify_chain([2], [row, row], [row], [1 - 2**-24])[1] == 1
    # Rejected all the same (a coin that no generator gives): the likeliest token, not garbage.
    assert verify_chain([2], [row, row], [row], [1.0]) == ([1, -1], 0)


@pytest.mark.parametrize(
    ("row", "token", "anomalies"),
    [
        ([0.0, 0.0, 0.0], 0, 1),
        ([NAN, NAN, NAN], 0, 1),
        ([NAN, 0.0, 1.0], 2, 1),
        ([-INF, -1.0, 0.0], 0, 1),
        ([1e-45, 0.0, 1e-44], 2, 0),  # too small to count: the likeliest
        ([0.0, INF, 0.0], 1, 0),
        ([0.0, 1.001, 0.0], 1, 0),
        ([0.0, 0.0, 1.0], 2, 0),
    ],
)
def test_degenerate_rows_give_a_token_and_say_so(row, token, anomalies):
    state = AdaptiveState({"1": {"candidate_steps": [0, 1]}}, 0)
    assert draw(row, state) == token
    assert state.num_anomalies == anomalies


def draw(row: list[float], state: AdaptiveState) -> int:
    """The token that a round at S = 0 draws from `row`."""
    output = torch.full((1, 1), -7, dtype=torch.int32)
    ops.verify_chain_sampling(
        None,
        torch.zeros(1, 0, dtype=torch.int32),
        torch.tensor([[row]]),
        torch.zeros(1, 0),
        torch.tensor([0.5]),
        output,
        torch.zeros(1, dtype=torch.int32),
        state=state,
        slot=0,
    )
    return int(output)


def test_no_input_yields_a_token_outside_the_vocabulary_or_none_at_all():
    rng = np.random.default_rng(8)
    for _ in range(60):
        steps, size = int(rng.integers(0, 5)), int(rng.integers(1, 9))
        case = CaseOptions(7, steps, num_nodes=6, vocab_size=size, malformed=True)
        chain, tree = sampled_chain_call(rng, case), sampled_tree_call(rng, case)
        for call in (chain, tree):
            call.run(getattr(adaptive_spec_ext, call.op))
            bonus = call.tensors["bonus_tokens"].view
            assert ((bonus >= 0) & (bonus < size)).all()
            counts = call.tensors["accept_token_num"].view
            assert ((counts >= 0) & (counts <= steps)).all()


def test_chain_speculative_sampling_counts_as_flashinfer_does():
    """accepted: each draft by itself; emitted: up to the first rejection. Counters go on."""
    drafts = torch.tensor([[0, 1, 0], [0, 0, 0]], dtype=torch.int32)
    one = torch.tensor([1.0, 0.0])
    target = torch.stack([one, one, one, one]).expand(2, 4, 2)
    draft_probs = torch.full((2, 3, 2), 0.5)
    accepted, emitted = torch.tensor([10, 20]).int(), torch.tensor([1, 2]).int()
    tokens, *counters = adaptive_spec_ext.chain_speculative_sampling(
        draft_probs, drafts, target, accepted, emitted
    )
    assert tokens.tolist() == [[0, 0, -1, -1], [0, 0, 0, 0]]
    assert counters[0] is accepted
    assert counters[1] is emitted
    assert accepted.tolist() == [12, 23]
    assert emitted.tolist() == [2, 5]


def test_a_token_s_weight_does_not_depend_on_the_order_of_additions():
    """Float sums over 200,000 entries differ by the way they are split; counting units does not."""
    rng = np.random.default_rng(2)
    size = 200_000
    row = rng.dirichlet(np.full(size, 0.3)).astype(np.float32)
    units = [ops_ref._units(weight, size) for weight in row]
    assert abs(sum(units) / 2**43 - 1) < 1e-5
    for coin in (0.0, 0.3, 0.999999, 1 - 2**-24):
        output = torch.zeros(1, 1, dtype=torch.int32)
        adaptive_spec_ext.verify_chain_sampling(
            None,
            torch.zeros(1, 0, dtype=torch.int32),
            torch.from_numpy(row)[None, None],
            torch.zeros(1, 0),
            torch.tensor([coin]),
            output,
            torch.zeros(1, dtype=torch.int32),
        )
        below = np.cumsum(np.array(units, dtype=object))
        threshold = min(int(np.float32(coin) * float(below[-1])), below[-1] - 1)
        assert int(output) == int(np.searchsorted(below, threshold, side="right"))
