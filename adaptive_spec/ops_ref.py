"""Slow references of the ops: plain Python over lists, written from the ops' description.

They take the arguments of the functions in `adaptive_spec_ext` except `state`, `ring` and `slot`,
write the same outputs, and return what an op tells the adaptive state. Nothing is checked. They
serve tests and benchmarks and need no built extension.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from .row_choice_ref import Draft, RowRule, choose, unit_bits

MAX_TOKEN_ID = 2**31 - 1


@dataclasses.dataclass
class RoundSums:
    """What an op adds to the adaptive state: accepted drafts and live rows, and anomalies met."""

    accepted: int = 0
    num_reqs: int = 0
    anomalies: int = 0


@dataclasses.dataclass
class _Row:
    """One request's result: the emitted tokens are its accepted drafts and the bonus token."""

    emitted: list[int]
    anomalies: int

    @property
    def num_accepted(self) -> int:
        return len(self.emitted) - 1


def _is_token(token: int) -> bool:
    return 0 <= token <= MAX_TOKEN_ID


def _num_live(num_reqs: Tensor | None, batch_size: int) -> int:
    return batch_size if num_reqs is None else min(max(int(num_reqs), 0), batch_size)


def _verify_rows(
    batch_size: int,
    num_steps: int,
    num_verified: int,
    verify_row: Callable[[int, int], _Row],
    accept_token_num: Tensor,
    num_reqs: Tensor | None = None,
    max_accept: Tensor | None = None,
    accept_lens: Tensor | None = None,
    bonus_tokens: Tensor | None = None,
    seq_lens: Tensor | None = None,
    new_seq_lens: Tensor | None = None,
    select_index: Tensor | None = None,
    accepted_tokens: Tensor | None = None,
) -> RoundSums:
    sums = RoundSums(num_reqs=_num_live(num_reqs, batch_size))
    packed: list[int] = []
    for b in range(sums.num_reqs):
        limit = num_steps
        if max_accept is not None:
            limit = min(max(int(max_accept[b]), 0), num_steps)
        row = verify_row(b, limit)
        accept_token_num[b] = row.num_accepted
        if accept_lens is not None:
            accept_lens[b] = len(row.emitted)
        if bonus_tokens is not None:
            bonus_tokens[b] = row.emitted[-1]
        if seq_lens is not None and new_seq_lens is not None:
            new_seq_lens[b] = int(seq_lens[b]) + len(row.emitted)
        if select_index is not None:
            select_index[b] = b * num_verified + row.num_accepted
        packed += row.emitted
        sums.accepted += row.num_accepted
        sums.anomalies += row.anomalies
    if accepted_tokens is not None:
        for i, token in enumerate(packed):
            accepted_tokens[i] = token
    return sums


class _Tree:
    """One request's tree; counts what is wrong with it as it is met."""

    def __init__(
        self,
        b: int,
        num_flat_ids: int,
        candidates: Tensor,
        retrive_index: Tensor,
        retrive_next_token: Tensor,
        retrive_next_sibling: Tensor,
    ) -> None:
        self.tokens: list[int] = candidates[b].tolist()
        self.flat_ids: list[int] = retrive_index[b].tolist()
        self._first_child = retrive_next_token[b].tolist()
        self._next_sibling = retrive_next_sibling[b].tolist()
        self._num_flat_ids = num_flat_ids
        self.anomalies = 0
        self.root = self.flat_ids[0]
        if not self.has_id(0):
            self.root = b * len(self.tokens)
            self.anomalies += 1

    def has_id(self, node: int) -> bool:
        return 0 <= self.flat_ids[node] < self._num_flat_ids

    def children(self, node: int) -> Iterator[int]:
        child = self._first_child[node]
        for _ in self.tokens:
            if not 0 <= child < len(self.tokens):
                break
            yield child
            child = self._next_sibling[child]
        # A full list that does not end here goes round in circles, or leaves the tree.
        self.anomalies += child != -1


def _walk_tree(
    tree: _Tree,
    b: int,
    limit: int,
    target: Callable[[int, int], tuple[int | None, bool]],
    predicts: Tensor,
    accept_index: Tensor,
) -> _Row:
    """target(node, flat_id) -> the target's choice behind a node, None for none, and whether it is
    sound."""

    def find(node: int, wanted: int) -> int | None:
        for child in tree.children(node):
            if tree.tokens[child] == wanted:
                if tree.has_id(child):
                    return child
                tree.anomalies += 1
            tree.anomalies += not _is_token(tree.tokens[child])
        return None

    node, path, emitted = 0, [tree.root], []
    while True:
        wanted, is_sound = target(node, path[-1])
        tree.anomalies += not is_sound
        emitted.append(0 if wanted is None else wanted)
        if wanted is None or len(emitted) > limit:
            break
        child = find(node, wanted)
        if child is None:
            break
        node = child
        path.append(tree.flat_ids[child])
    for j, (flat_id, token) in enumerate(zip(path, emitted, strict=True)):
        accept_index[b, j] = flat_id
        predicts[flat_id] = token
    return _Row(emitted, tree.anomalies)


def verify_tree_greedy_ref(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
    *,
    speculative_num_steps: int | None = None,
    num_reqs: Tensor | None = None,
    **outputs: Tensor | None,
) -> RoundSums:
    """Reference of `adaptive_spec_ext.verify_tree_greedy`."""
    batch_size, num_nodes = candidates.shape
    num_steps = accept_index.size(1) - 1 if speculative_num_steps is None else speculative_num_steps
    num_flat_ids = _num_live(num_reqs, batch_size) * num_nodes
    choices = [token for row in target_predict.tolist() for token in row]

    def target(node: int, flat_id: int) -> tuple[int | None, bool]:
        is_token = _is_token(choices[flat_id])
        return (choices[flat_id] if is_token else None), is_token

    def verify_row(b: int, limit: int) -> _Row:
        tree = _Tree(
            b, num_flat_ids, candidates, retrive_index, retrive_next_token, retrive_next_sibling
        )
        return _walk_tree(tree, b, limit, target, predicts, accept_index)

    return _verify_rows(
        batch_size, num_steps, num_nodes, verify_row, accept_token_num, num_reqs, **outputs
    )


def _verify_chain(
    drafts: list[int],
    limit: int,
    vocab_size: int,
    target: Callable[[int], tuple[int | None, bool]],
) -> _Row:
    """target(i) -> the target's choice after i drafts, None for none, and whether it is sound."""
    emitted: list[int] = []
    anomalies = 0
    for i in range(limit + 1):
        wanted, is_sound = target(i)
        anomalies += not is_sound
        emitted.append(0 if wanted is None else wanted)
        if wanted is None or i == limit:
            break
        anomalies += not 0 <= drafts[i] < vocab_size
        if drafts[i] != wanted:
            break
    return _Row(emitted, anomalies)


def _write_chain_row(output_token_ids: Tensor, b: int, row: _Row) -> _Row:
    padding = output_token_ids.size(1) - len(row.emitted)
    for i, token in enumerate(row.emitted + [-1] * padding):
        output_token_ids[b, i] = token
    return row


def verify_chain_greedy_ref(
    draft_tokens: Tensor,
    target_predict: Tensor,
    output_token_ids: Tensor,
    accept_token_num: Tensor,
    *,
    speculative_num_steps: int | None = None,
    num_reqs: Tensor | None = None,
    **outputs: Tensor | None,
) -> RoundSums:
    """Reference of `adaptive_spec_ext.verify_chain_greedy`."""
    batch_size, width = draft_tokens.shape
    num_steps = width if speculative_num_steps is None else speculative_num_steps

    def verify_row(b: int, limit: int) -> _Row:
        choices = target_predict[b].tolist()

        def target(i: int) -> tuple[int | None, bool]:
            is_token = _is_token(choices[i])
            return (choices[i] if is_token else None), is_token

        row = _verify_chain(draft_tokens[b].tolist(), limit, MAX_TOKEN_ID + 1, target)
        return _write_chain_row(output_token_ids, b, row)

    return _verify_rows(
        batch_size, num_steps, num_steps + 1, verify_row, accept_token_num, num_reqs, **outputs
    )


def argmax_ref(row: list[float]) -> tuple[int | None, bool]:
    """The index of the first largest entry that is above -inf (None if there is none), and whether
    the row is sound: has such an entry and no NaN."""
    usable = [i for i, x in enumerate(row) if x > -math.inf]
    if not usable:
        return None, False
    return max(usable, key=lambda i: (row[i], -i)), not any(math.isnan(x) for x in row)


def verify_chain_greedy_from_logits_ref(
    draft_tokens: Tensor,
    target_logits: Tensor,
    output_token_ids: Tensor,
    accept_token_num: Tensor,
    *,
    speculative_num_steps: int | None = None,
    num_reqs: Tensor | None = None,
    **outputs: Tensor | None,
) -> RoundSums:
    """Reference of `adaptive_spec_ext.verify_chain_greedy_from_logits`."""
    batch_size, width = draft_tokens.shape
    num_steps = width if speculative_num_steps is None else speculative_num_steps
    vocab_size = target_logits.size(2)

    def verify_row(b: int, limit: int) -> _Row:
        row = _verify_chain(
            draft_tokens[b].tolist(),
            limit,
            vocab_size,
            lambda i: argmax_ref(target_logits[b, i].tolist()),
        )
        return _write_chain_row(output_token_ids, b, row)

    return _verify_rows(
        batch_size, num_steps, num_steps + 1, verify_row, accept_token_num, num_reqs, **outputs
    )


def _units(weight: np.float32, vocab_size: int) -> int:
    """A weight as a whole number of units; see csrc/core/draw.h."""
    if not weight > 0:
        return 0
    return math.floor(Fraction(min(float(weight), 2.0)) * 2 ** unit_bits(vocab_size))


def _residual_units(
    target: np.ndarray,
    draft: np.ndarray | None,
    excluded: int | None,
    scale: np.float32 | float = 1.0,
) -> list[int]:
    """What a row has left of the target's probabilities.

    target, draft: float32 [V]; draft None: nothing is taken off.
    """
    taken = np.float32(0) if draft is None else np.where(np.isnan(draft), np.float32(0), draft)
    with np.errstate(invalid="ignore", over="ignore"):
        left = np.float32(scale) * target - taken
    if excluded is not None:
        left[excluded] = 0
    return [_units(weight, len(target)) for weight in left]


def _draw(target: np.ndarray, units: list[int], coin: float) -> tuple[int, bool]:
    """The token that `coin` draws, and whether the target's row is sound."""
    total = sum(units)
    best, is_sound = argmax_ref(target.tolist())
    has_best = best is not None and target[best] > 0
    if total == 0:
        return (best if has_best else 0), has_best and is_sound
    coin = 0.0 if math.isnan(coin) else coin
    threshold = total - 1 if coin >= 1 else min(int(max(coin, 0.0) * float(total)), total - 1)
    token = next(i for i, below in enumerate(itertools.accumulate(units)) if below > threshold)
    return token, has_best and is_sound


def tree_speculative_sampling_target_only_ref(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    *,
    speculative_num_steps: int | None = None,
    num_reqs: Tensor | None = None,
    **outputs: Tensor | None,
) -> RoundSums:
    """Reference of `adaptive_spec_ext.tree_speculative_sampling_target_only`."""
    batch_size, num_nodes = candidates.shape
    vocab_size = target_probs.size(2)
    num_steps = accept_index.size(1) - 1 if speculative_num_steps is None else speculative_num_steps
    num_flat_ids = _num_live(num_reqs, batch_size) * num_nodes
    scale = max(np.float32(threshold_acc), np.float32(1e-9))

    def verify_row(b: int, limit: int) -> _Row:
        tree = _Tree(
            b, num_flat_ids, candidates, retrive_index, retrive_next_token, retrive_next_sibling
        )
        coins, probs = uniform_samples[b].numpy(), target_probs[b].numpy()

        def find(node: int) -> int | None:
            """The child that the node's coin accepts; marks those before it."""
            mass = np.float32(0)
            for child in tree.children(node):
                token = tree.tokens[child]
                if not 0 <= token < vocab_size or not tree.has_id(child):
                    tree.anomalies += 1
                    continue
                p = probs[node, token]
                if p > 0:
                    with np.errstate(over="ignore"):
                        mass = np.float32(mass + p)
                        share = np.float32(mass / scale)
                    if coins[node] < share or p >= np.float32(threshold_single):
                        return child
                draft_probs[b, node, token] = float(p)
            return None

        node, path, emitted = 0, [tree.root], []
        is_complete = True
        while len(emitted) < limit:
            child = find(node)
            if child is None:
                is_complete = False
                break
            emitted.append(tree.tokens[child])
            node = child
            path.append(tree.flat_ids[child])
        left = _residual_units(
            probs[node], None if is_complete else draft_probs[b, node].numpy(), None
        )
        drawn, is_sound = _draw(probs[node], left, float(uniform_samples_for_final_sampling[b]))
        emitted.append(drawn)
        for j, (flat_id, token) in enumerate(zip(path, emitted, strict=True)):
            accept_index[b, j] = flat_id
            predicts[flat_id] = token
        # A path that came back to a node, through links that go upwards, has overwritten its token.
        emitted = [int(predicts[flat_id]) for flat_id in path]
        return _Row(emitted, tree.anomalies + (not is_sound))

    return _verify_rows(
        batch_size, num_steps, num_nodes, verify_row, accept_token_num, num_reqs, **outputs
    )


def _joint_ratio(before: np.float32, chances: tuple[np.float32, np.float32] | None) -> np.float32:
    """How probable the target finds a block of drafts against the draft, after one more of them."""
    if chances is None:
        return np.float32(0)
    p, q = chances
    with np.errstate(all="ignore"):
        scaled = np.float32(before * p)
        if not scaled > 0:
            return np.float32(0)
        if scaled >= q:
            return np.float32(1)
        ratio = np.float32(scaled / q)
    return ratio if ratio > 0 else np.float32(0)


def verify_chain_sampling_ref(
    draft_token_ids: Tensor,
    target_probs: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    output_token_ids: Tensor,
    accept_token_num: Tensor,
    *,
    draft_probs: Tensor | None = None,
    output_accepted_token_num: Tensor | None = None,
    output_emitted_draft_token_num: Tensor | None = None,
    block_verification: bool = False,
    speculative_num_steps: int | None = None,
    num_reqs: Tensor | None = None,
    **outputs: Tensor | None,
) -> RoundSums:
    """Reference of `adaptive_spec_ext.verify_chain_sampling`."""
    batch_size, width = draft_token_ids.shape
    num_steps = width if speculative_num_steps is None else speculative_num_steps
    vocab_size = target_probs.size(2)

    def verify_row(b: int, limit: int) -> _Row:
        drafts = draft_token_ids[b].tolist()
        probs = target_probs[b].numpy()
        coins = uniform_samples[b].numpy()

        def chances(i: int) -> tuple[np.float32, np.float32] | None:
            """p and q of draft i; None if it is no token."""
            if not 0 <= drafts[i] < vocab_size:
                return None
            q = np.float32(1) if draft_probs is None else draft_probs[b, i].numpy()[drafts[i]]
            return probs[i, drafts[i]], q

        def accepts(i: int) -> bool:
            pair = chances(i)
            if pair is None:
                return False
            with np.errstate(over="ignore", invalid="ignore"):
                return bool(np.float32(coins[i] * pair[1]) < pair[0])

        def left(i: int, scale: np.float32) -> list[int]:
            """Row i's residual, where draft i was rejected."""
            draft = None if draft_probs is None else draft_probs[b, i].numpy()
            excluded = drafts[i] if draft is None and 0 <= drafts[i] < vocab_size else None
            return _residual_units(probs[i], draft, excluded, scale)

        def last_of_block() -> tuple[int, np.float32]:
            """Drafts that the block's rule accepts, and the joint ratio behind them."""
            last, joint = 0, np.float32(1)
            ratio_at_last = joint
            for i in range(1, limit + 1):
                joint = _joint_ratio(joint, chances(i - 1))
                coin = coins[i - 1]
                if i == limit:
                    passes = bool(coin < joint)
                else:
                    rest = sum(left(i, joint)) / 2.0 ** unit_bits(vocab_size)
                    passes = float(coin) * (rest + (1.0 - float(joint))) < rest
                if passes:
                    last, ratio_at_last = i, joint
            return last, ratio_at_last

        accepted = [accepts(i) for i in range(limit)]
        bad = [i for i in range(limit) if chances(i) is None]
        if block_verification:
            n, scale = last_of_block()
            anomalies = len(bad[:1])
        else:
            n, scale = next((i for i, yes in enumerate(accepted) if not yes), limit), np.float32(1)
            anomalies = sum(i <= n for i in bad)
        units = _residual_units(probs[n], None, None) if n == limit else left(n, scale)
        drawn, is_sound = _draw(probs[n], units, float(uniform_samples_for_final_sampling[b]))
        for counter, count in (
            (output_accepted_token_num, sum(accepted)),
            (output_emitted_draft_token_num, n),
        ):
            if counter is not None:
                counter[b] += count
        row = _Row([*drafts[:n], drawn], anomalies + (not is_sound))
        return _write_chain_row(output_token_ids, b, row)

    return _verify_rows(
        batch_size, num_steps, num_steps + 1, verify_row, accept_token_num, num_reqs, **outputs
    )


@dataclasses.dataclass
class _SampledLogits:
    """Rows of logits and how they are sampled, as the ops that do so are given them."""

    target_logits: Tensor
    seeds: Tensor
    temperature: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    noise_stream: int
    error_mask: Tensor | None

    def rule(self, b: int) -> RowRule:
        given = {
            name: getattr(self, name)[b].item()
            for name in ("temperature", "top_k", "top_p", "min_p")
            if getattr(self, name) is not None
        }
        return RowRule(seed=int(self.seeds[b]), stream=self.noise_stream, **given)

    def choose(
        self, b: int, i: int, position: int, draft: Draft | None = None
    ) -> tuple[int | None, bool]:
        row = self.target_logits[b, i]
        logits = (row if row.dtype == torch.float64 else row.float()).numpy()
        choice, is_sound = choose(logits, self.rule(b), position, draft)
        if self.error_mask is not None and not is_sound:
            self.error_mask[b] = True
        return choice, is_sound


def verify_chain_sampling_from_logits_ref(
    draft_tokens: Tensor,
    target_logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    output_token_ids: Tensor,
    accept_token_num: Tensor,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    draft_probs: Tensor | None = None,
    noise_stream: int = 0,
    error_mask: Tensor | None = None,
    *,
    speculative_num_steps: int | None = None,
    num_reqs: Tensor | None = None,
    **outputs: Tensor | None,
) -> RoundSums:
    """Reference of `adaptive_spec_ext.verify_chain_sampling_from_logits`."""
    batch_size, width = draft_tokens.shape
    num_steps = width if speculative_num_steps is None else speculative_num_steps
    rows = _SampledLogits(
        target_logits, seeds, temperature, top_k, top_p, min_p, noise_stream, error_mask
    )

    def verify_row(b: int, limit: int) -> _Row:
        drafts = draft_tokens[b].tolist()

        def target(i: int) -> tuple[int | None, bool]:
            draft = None
            if draft_probs is not None and i < limit:
                draft = Draft(drafts[i], draft_probs[b, i].numpy())
            return rows.choose(b, i, int(positions[b]) + i, draft)

        row = _verify_chain(drafts, limit, target_logits.size(2), target)
        return _write_chain_row(output_token_ids, b, row)

    return _verify_rows(
        batch_size, num_steps, num_steps + 1, verify_row, accept_token_num, num_reqs, **outputs
    )


def verify_tree_sampling_from_logits_ref(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_logits: Tensor,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    noise_stream: int = 0,
    error_mask: Tensor | None = None,
    *,
    speculative_num_steps: int | None = None,
    num_reqs: Tensor | None = None,
    **outputs: Tensor | None,
) -> RoundSums:
    """Reference of `adaptive_spec_ext.verify_tree_sampling_from_logits`."""
    batch_size, num_nodes = candidates.shape
    num_steps = accept_index.size(1) - 1 if speculative_num_steps is None else speculative_num_steps
    num_flat_ids = _num_live(num_reqs, batch_size) * num_nodes
    rows = _SampledLogits(
        target_logits, seeds, temperature, top_k, top_p, min_p, noise_stream, error_mask
    )

    def verify_row(b: int, limit: int) -> _Row:
        tree = _Tree(
            b, num_flat_ids, candidates, retrive_index, retrive_next_token, retrive_next_sibling
        )

        def target(node: int, flat_id: int) -> tuple[int | None, bool]:
            return rows.choose(b, node, int(positions[b, node]))

        return _walk_tree(tree, b, limit, target, predicts, accept_index)

    return _verify_rows(
        batch_size, num_steps, num_nodes, verify_row, accept_token_num, num_reqs, **outputs
    )


def update_and_select_ref(
    accept_token_num: Tensor, *, speculative_num_steps: int, num_reqs: Tensor | None = None
) -> RoundSums:
    """What `adaptive_spec_ext.update_and_select` tells the state."""
    live = accept_token_num.tolist()[: _num_live(num_reqs, accept_token_num.size(0))]
    taken = [min(max(count, 0), speculative_num_steps) for count in live]
    return RoundSums(
        accepted=sum(taken),
        num_reqs=len(live),
        anomalies=sum(a != b for a, b in zip(live, taken, strict=True)),
    )


def build_chain_tree_ref(
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    *,
    positions: Tensor | None = None,
    seq_lens: Tensor | None = None,
    num_reqs: Tensor | None = None,
) -> None:
    """Reference of `adaptive_spec_ext.build_chain_tree`."""
    batch_size, num_nodes = retrive_index.shape
    for b in range(_num_live(num_reqs, batch_size)):
        for i in range(num_nodes):
            retrive_index[b, i] = b * num_nodes + i
            retrive_next_token[b, i] = i + 1 if i + 1 < num_nodes else -1
            retrive_next_sibling[b, i] = -1
            if positions is not None and seq_lens is not None:
                positions[b * num_nodes + i] = int(seq_lens[b]) + i
