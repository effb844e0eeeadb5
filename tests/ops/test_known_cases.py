"""Small cases worked out by hand: what each op is for, and faults that were seen elsewhere."""

import math

import adaptive_spec_ext as ext
import pytest
import torch

NAN, INF = math.nan, math.inf


def int32(*shape, fill=-9):
    return torch.full(shape, fill, dtype=torch.int32)


def int64(values):
    return torch.tensor(values, dtype=torch.int64)


def verify_chain(drafts, target, **keywords):
    drafts, target = int64(drafts), int64(target)
    output, count = int32(*target.shape), int32(target.size(0))
    ext.verify_chain_greedy(drafts.view(target.size(0), -1), target, output, count, **keywords)
    return output.tolist(), count.tolist()


def verify_logits(drafts, logits, dtype=torch.float32):
    logits = torch.tensor(logits, dtype=dtype)
    batch_size, width, _ = logits.shape
    output, count = int32(batch_size, width), int32(batch_size)
    ext.verify_chain_greedy_from_logits(
        int64(drafts).view(batch_size, width - 1), logits, output, count
    )
    return output.tolist(), count.tolist()


def test_chain_accepts_the_common_prefix_and_adds_the_bonus():
    output, count = verify_chain(
        [[1, 2, 3], [4, 9, 6], [9, 5, 6]], [[1, 2, 3, 7]] + [[4, 5, 6, 8]] * 2
    )
    assert output == [[1, 2, 3, 7], [4, 5, -1, -1], [4, -1, -1, -1]]
    assert count == [3, 1, 0]


def test_chain_of_no_drafts_emits_the_target_token():
    assert verify_chain([[], []], [[5], [6]]) == ([[5], [6]], [0, 0])


def test_tree_follows_the_matching_siblings():
    #       0
    #      / \
    #     1   2      tokens 5, 6
    #    / \   \
    #   3   4   5    tokens 7, 8, 9
    candidates = int64([[0, 5, 6, 7, 8, 9]])
    next_token = int64([[1, 3, 5, -1, -1, -1]])
    next_sibling = int64([[-1, 2, -1, 4, -1, -1]])
    flat_ids = torch.arange(6).view(1, 6)
    for choices, path, tokens in [
        ([5, 8, 0, 0, 3, 0], [0, 1, 4], [5, 8, 3]),
        ([6, 0, 9, 0, 0, 4], [0, 2, 5], [6, 9, 4]),
        ([5, 1, 0, 0, 0, 0], [0, 1], [5, 1]),
        ([7, 0, 0, 0, 0, 0], [0], [7]),
    ]:
        predicts, accept_index, count = int32(6), int32(1, 4), int32(1)
        ext.verify_tree_greedy(
            predicts,
            accept_index,
            count,
            candidates,
            flat_ids,
            next_token,
            next_sibling,
            int64([choices]),
        )
        assert count.item() == len(path) - 1
        assert accept_index.tolist() == [path + [-9] * (4 - len(path))]
        expected = [-9] * 6
        for node, token in zip(path, tokens, strict=True):
            expected[node] = token
        assert predicts.tolist() == expected


def test_optional_outputs_state_the_bonus_in_and_out():
    """accept_token_num leaves the bonus token out, accept_lens counts it."""
    outputs = {
        "accept_lens": int32(2),
        "bonus_tokens": int64([0, 0]),
        "seq_lens": int64([10, 20]),
        "new_seq_lens": int64([0, 0]),
        "select_index": int64([0, 0]),
        "accepted_tokens": int64([-9] * 6),
    }
    _, count = verify_chain([[1, 2], [4, 9]], [[1, 2, 3], [4, 5, 6]], **outputs)
    assert count == [2, 1]
    assert outputs["accept_lens"].tolist() == [3, 2]
    assert outputs["bonus_tokens"].tolist() == [3, 5]
    assert outputs["new_seq_lens"].tolist() == [13, 22]
    assert outputs["select_index"].tolist() == [0 * 3 + 2, 1 * 3 + 1]
    assert outputs["accepted_tokens"].tolist() == [1, 2, 3, 4, 5, -9]


def test_max_accept_caps_drafts_and_still_emits_the_targets_token():
    output, count = verify_chain(
        [[1, 2, 3]] * 4,
        [[1, 2, 3, 7]] * 4,
        max_accept=torch.tensor([0, 2, 99, -3], dtype=torch.int32),
    )
    assert output == [[1, -1, -1, -1], [1, 2, 3, -1], [1, 2, 3, 7], [1, -1, -1, -1]]
    assert count == [0, 2, 3, 0]


@pytest.mark.parametrize("steps", [1, 3])
def test_buffers_made_for_the_largest_step_give_the_result_of_exact_ones(steps):
    """The row stride is the buffer's, not the current step's: what lies beyond is poison."""
    drafts, target = int64([[1, 2, 3], [4, 5, 6]]), int64([[1, 2, 3, 7], [4, 5, 6, 8]])
    wide_drafts, wide_target = torch.full((2, 7), 2**40), torch.full((2, 8), 2**40)
    wide_drafts[:, :steps] = drafts[:, :steps]
    wide_target[:, : steps + 1] = target[:, : steps + 1]
    exact, exact_count = verify_chain(drafts[:, :steps].tolist(), target[:, : steps + 1].tolist())
    output, count = int32(2, 8), int32(2)
    ext.verify_chain_greedy(wide_drafts, wide_target, output, count, speculative_num_steps=steps)
    assert output[:, : steps + 1].tolist() == exact
    assert (output[:, steps + 1 :] == -1).all()
    assert count.tolist() == exact_count

    logits = torch.full((2, 8, 9), NAN)
    logits[:, : steps + 1] = torch.nn.functional.one_hot(target[:, : steps + 1], 9).float()
    output, count = int32(2, 8), int32(2)
    ext.verify_chain_greedy_from_logits(
        wide_drafts, logits, output, count, speculative_num_steps=steps
    )
    assert output[:, : steps + 1].tolist() == exact
    assert count.tolist() == exact_count


def test_tree_views_of_wide_buffers_give_the_result_of_exact_ones():
    def run(make):
        views = {
            "candidates": make([[0, 1, 2, 3], [0, 4, 5, 6]]),
            "retrive_index": make([[0, 1, 2, 3], [4, 5, 6, 7]]),
            "retrive_next_token": make([[1, 2, 3, -1]] * 2),
            "retrive_next_sibling": make([[-1] * 4] * 2),
            "target_predict": make([[1, 2, 3, 7], [4, 5, 0, 8]]),
        }
        predicts, accept_index, count = int32(8), int32(2, 4), int32(2)
        ext.verify_tree_greedy(predicts, accept_index, count, **views)
        return predicts.tolist(), accept_index.tolist(), count.tolist()

    def wide(values):
        buffer = torch.full((2, 9), 2**40)
        buffer[:, :4] = int64(values)
        return buffer[:, :4]

    assert run(wide) == run(int64)
    assert run(int64)[2] == [3, 2]


def test_negative_drafts_are_never_accepted_or_emitted():
    """-1 fills unused draft places; a target that says -1 as well must not make it a match."""
    assert verify_chain([[5, -1, 7]], [[5, 6, 7, 8]]) == ([[5, 6, -1, -1]], [1])
    assert verify_chain([[5, -1, 7]], [[5, -1, 7, 8]]) == ([[5, 0, -1, -1]], [1])


def test_drafts_outside_the_vocabulary_are_not_accepted():
    logits = [[[0, 1, 0], [0, 0, 1], [1, 0, 0]]]
    for wrong in (-1, 3, 2**32 + 1, -(2**32) + 1):
        assert verify_logits([[wrong, 2]], logits) == ([[1, -1, -1]], [0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_ties_go_to_the_lowest_id(dtype):
    logits = [[[1, 3, 3], [0, -0.0, 0]]]
    assert verify_logits([[1]], logits, dtype) == ([[1, 0]], [1])
    assert verify_logits([[2]], logits, dtype) == ([[1, -1]], [0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_smallest_difference_decides(dtype):
    """Also between subnormal numbers, and between neighbours that a narrower type cannot tell."""
    for low in (0.0, 1.0):
        x = torch.tensor(low, dtype=dtype)
        high = torch.nextafter(x, torch.tensor(INF, dtype=dtype)).item()
        assert verify_logits([[]], [[[low, high, low]]], dtype)[0] == [[1]]


def test_nan_is_left_out():
    assert verify_logits([[2]], [[[NAN, 1, 2, NAN], [0, 1, NAN, 0]]]) == ([[2, 1]], [1])


@pytest.mark.parametrize("row", [[NAN] * 3, [-INF] * 3, [NAN, -INF, NAN]])
def test_a_row_without_any_choice_emits_token_0_and_accepts_nothing(row):
    """Even a draft of token 0: nothing supports it."""
    assert verify_logits([[0]], [[row, [0, 1, 0]]]) == ([[0, -1]], [0])


def test_a_masked_token_is_not_accepted():
    """A grammar mask sets logits to -inf at the node it belongs to."""
    assert verify_logits([[1]], [[[0, -INF, -1], [0, 1, 2]]]) == ([[0, -1]], [0])


def test_rows_behind_the_first_mismatch_are_not_read():
    """Their memory need not even be filled: NaN there would count as an anomaly."""
    output, count = verify_logits([[9, 9, 9]], [[[0, 1, 0]] + [[NAN] * 3] * 3])
    assert (output, count) == ([[1, -1, -1, -1]], [0])


def test_padding_rows_stay_untouched_and_live_rows_do_not_depend_on_them():
    drafts = int64([[1, 2], [1, 2], [2**40, -1], [7, 7]])
    target = int64([[1, 2, 3], [1, 5, 5], [-(2**40)] * 3, [7, 7, 7]])
    output, count = int32(4, 3), int32(4)
    num_reqs = torch.tensor([2], dtype=torch.int32)
    packed = int64([-9] * 12)
    ext.verify_chain_greedy(
        drafts, target, output, count, num_reqs=num_reqs, accepted_tokens=packed
    )
    assert output.tolist() == [[1, 2, 3], [1, 5, -1], [-9] * 3, [-9] * 3]
    assert count.tolist() == [2, 1, -9, -9]
    assert packed.tolist() == [1, 2, 3, 1, 5] + [-9] * 7


def test_a_cycle_among_siblings_ends():
    next_sibling = int64([[-1, 2, 1]])
    predicts, accept_index, count = int32(3), int32(1, 3), int32(1)
    ext.verify_tree_greedy(
        predicts,
        accept_index,
        count,
        int64([[0, 5, 6]]),
        int64([[0, 1, 2]]),
        int64([[1, -1, -1]]),
        next_sibling,
        int64([[9, 9, 9]]),
    )
    assert (count.item(), predicts.tolist()) == (0, [9, -9, -9])


def test_flat_ids_of_other_rows_are_honoured_as_in_a_packed_layout():
    """retrive_index says where a node lies; here the second request's nodes come first."""
    predicts, accept_index, count = int32(4), int32(2, 2), int32(2)
    ext.verify_tree_greedy(
        predicts,
        accept_index,
        count,
        int64([[0, 5], [0, 6]]),
        int64([[2, 3], [0, 1]]),
        int64([[1, -1], [1, -1]]),
        int64([[-1, -1], [-1, -1]]),
        int64([[6, 60], [5, 50]]),
    )
    assert accept_index.tolist() == [[2, 3], [0, 1]]
    assert predicts.tolist() == [6, 60, 5, 50]


def test_chain_tree_is_the_tree_that_verifies_like_the_chain():
    arrays = [torch.empty(2, 4, dtype=torch.int64) for _ in range(3)]
    positions = torch.empty(8, dtype=torch.int64)
    ext.build_chain_tree(*arrays, positions=positions, seq_lens=int64([10, 100]))
    assert positions.tolist() == [10, 11, 12, 13, 100, 101, 102, 103]
    drafts, target = int64([[1, 2, 3], [4, 9, 6]]), int64([[1, 2, 3, 7], [4, 5, 6, 8]])
    candidates = torch.cat([int64([[0], [0]]), drafts], 1)
    tokens = int64([-9] * 8)
    predicts, accept_index, count = int32(8), int32(2, 4), int32(2)
    ext.verify_tree_greedy(
        predicts, accept_index, count, candidates, *arrays, target, accepted_tokens=tokens
    )
    assert count.tolist() == verify_chain(drafts.tolist(), target.tolist())[1]
    assert tokens.tolist() == [1, 2, 3, 7, 4, 5, -9, -9]
