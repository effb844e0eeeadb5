"""Calls of the ops on made-up batches: inputs that hit all paths, outputs that show stray writes.

Each tensor of a call is a view into a larger block whose other elements hold a sentinel: in front,
behind and, for strided views, between the rows and columns. Outputs are filled with the sentinel
too, so an element that an op should have written, or should not have, differs from the reference's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: Fits all dtypes in use and is no valid index, count, token or link in any case.
SENTINEL = -77
_GUARD = 5


def _sentinel(dtype: torch.dtype) -> int:
    """Of bool: what no op writes over the other."""
    return 0 if dtype == torch.bool else SENTINEL


@dataclasses.dataclass(frozen=True)
class Guarded:
    """A tensor inside a block of sentinels."""

    view: Tensor
    block: Tensor
    inside: Tensor

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: torch.dtype, *, strided: bool) -> Guarded:
        """`strided`: rows wider than the view, and every second element of a row."""
        step = 2 if strided else 1
        inner = shape[-1] * step + (3 if strided else 0)
        rows = int(np.prod(shape[:-1]))
        block = torch.full((rows * inner + 2 * _GUARD,), _sentinel(dtype), dtype=dtype)
        strides, span = [step], inner
        for size in reversed(shape[1:-1] if len(shape) > 1 else ()):
            strides.insert(0, span)
            span *= size
        if len(shape) > 1:
            strides.insert(0, span)
        view = block.as_strided(shape, strides, _GUARD)
        inside = torch.zeros(block.numel(), dtype=torch.bool)
        inside.as_strided(shape, strides, _GUARD).fill_(True)
        return cls(view, block, inside)

    @classmethod
    def of(cls, values: Any, dtype: torch.dtype, *, strided: bool = False) -> Guarded:
        values = torch.as_tensor(values, dtype=dtype)
        guarded = cls.empty(tuple(values.shape), dtype, strided=strided)
        guarded.view.copy_(values)
        return guarded

    @classmethod
    def rows(cls, values: np.ndarray, dtype: torch.dtype, *, aligned: bool) -> Guarded:
        """Rows of logits or probabilities [B, n, V], contiguous along V. `aligned`: as far as the
        guard in front allows."""
        vocab_size = values.shape[2]
        wide = cls.empty((*values.shape[:2], vocab_size + 3), dtype, strided=False)
        view = wide.view[..., :vocab_size] if aligned else wide.view[..., 3:]
        view.copy_(torch.from_numpy(values))
        inside = torch.zeros_like(wide.inside)
        inside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
        # The guard columns beside the vocabulary would win every comparison.
        wide.block[~inside] = SENTINEL
        return cls(view, wide.block, inside)

    def clone(self) -> Guarded:
        return self._in(self.block.clone())

    def to(self, device: torch.device | str) -> Guarded:
        """A copy on `device`: the same layout and guards, the same place between 16-byte lines."""
        return self._in(self.block.to(device, copy=True))

    def _in(self, block: Tensor) -> Guarded:
        view = self.view
        return Guarded(
            block.as_strided(view.shape, view.stride(), view.storage_offset()), block, self.inside
        )

    def check_guard(self, name: str) -> None:
        outside = self.block.cpu()[~self.inside]
        stray = (outside != _sentinel(outside.dtype)).nonzero()
        assert stray.numel() == 0, f"`{name}`: written outside the tensor, at {stray.tolist()}"


@dataclasses.dataclass
class OpCall:
    """One call: `tensors` by argument name, those in `mutated` are outputs."""

    op: str
    tensors: dict[str, Guarded]
    mutated: frozenset[str]
    options: dict[str, int] = dataclasses.field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        return {name: tensor.view for name, tensor in self.tensors.items()} | self.options

    def clone(self) -> OpCall:
        tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        return OpCall(self.op, tensors, self.mutated, dict(self.options))

    def to(self, device: torch.device | str) -> OpCall:
        """A copy of the call with its tensors on `device`."""
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return OpCall(self.op, tensors, self.mutated, dict(self.options))

    def run(self, function: Callable[..., Any], **extra: Any) -> Any:
        return function(**self.arguments(), **extra)

    def assert_equal(self, expected: OpCall) -> None:
        """Same outputs as `expected`, inputs and guards untouched. Their devices may differ."""
        for name, tensor in self.tensors.items():
            tensor.check_guard(name)
            own, other = tensor.view.cpu(), expected.tensors[name].view.cpu()
            if not torch.equal(own.nan_to_num(nan=0.5), other.nan_to_num(nan=0.5)):
                raise AssertionError(f"`{name}`: got\n{own}\nexpected\n{other}")


_MUTATED = frozenset(
    [
        "predicts",
        "accept_index",
        "accept_token_num",
        "output_token_ids",
        "accept_lens",
        "bonus_tokens",
        "new_seq_lens",
        "select_index",
        "accepted_tokens",
        "retrive_index",
        "retrive_next_token",
        "retrive_next_sibling",
        "positions",
        "draft_probs",
        "output_accepted_token_num",
        "output_emitted_draft_token_num",
        "error_mask",
    ]
)


@dataclasses.dataclass(frozen=True)
class CaseOptions:
    """What a generated call looks like. `num_reqs` and `max_accept` None: not passed."""

    batch_size: int
    num_steps: int
    num_nodes: int = 0  # trees only
    vocab_size: int = 3
    num_reqs: int | None = None
    max_accept: bool = False
    outputs: bool = True  # all optional outputs
    optional_inputs: float = 1.0  # the share that is passed, of those that have a default
    extra_width: int = 0  # columns that buffers are wider than S asks for
    strided: bool = False
    malformed: bool = False
    pass_steps: bool = True


def _common(rng: np.random.Generator, case: CaseOptions) -> tuple[dict[str, Guarded], dict]:
    batch_size, steps = case.batch_size, case.num_steps
    tensors = {
        "accept_token_num": Guarded.empty((batch_size,), torch.int32, strided=case.strided),
    }
    if case.num_reqs is not None:
        tensors["num_reqs"] = Guarded.of([case.num_reqs], torch.int32)
    if case.max_accept:
        limits = rng.integers(-2, steps + 3, batch_size)
        tensors["max_accept"] = Guarded.of(limits, torch.int32, strided=case.strided)
    if case.outputs:
        for name, dtype in {
            "accept_lens": torch.int32,
            "bonus_tokens": torch.int64,
            "new_seq_lens": torch.int64,
            "select_index": torch.int64,
        }.items():
            tensors[name] = Guarded.empty((batch_size,), dtype, strided=case.strided)
        seq_lens = rng.integers(1, 1000, batch_size)
        tensors["seq_lens"] = Guarded.of(seq_lens, torch.int64, strided=case.strided)
        tensors["accepted_tokens"] = Guarded.empty(
            (batch_size * (steps + 1) + case.extra_width,), torch.int64, strided=case.strided
        )
    options = {"speculative_num_steps": steps} if case.pass_steps else {}
    return tensors, options


def _call(op: str, tensors: dict[str, Guarded], options: dict[str, int], inputs: str) -> OpCall:
    return OpCall(op, tensors, _MUTATED.intersection(tensors) - set(inputs.split()), options)


def _spoil(rng: np.random.Generator, values: np.ndarray, wrong: list[int], share: float) -> None:
    hit = rng.random(values.shape) < share
    values[hit] = rng.choice(np.array(wrong, dtype=np.int64), int(hit.sum()))


_WRONG_TOKENS = [-1, -7, 2**31, 2**40, -(2**62), 2**32]


def random_forest(
    rng: np.random.Generator, batch_size: int, num_nodes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Parent, first child and next sibling [B, D] of random trees. Some nodes are not linked, as
    in trees that were pruned."""
    parents = np.full((batch_size, num_nodes), -1, dtype=np.int64)
    first_child = np.full((batch_size, num_nodes), -1, dtype=np.int64)
    next_sibling = np.full((batch_size, num_nodes), -1, dtype=np.int64)
    for b in range(batch_size):
        is_chain = rng.random() < 0.25
        for node in range(1, num_nodes):
            parent = node - 1 if is_chain else int(rng.integers(max(0, node - 6), node))
            parents[b, node] = parent
            if rng.random() < 0.05:
                continue
            next_sibling[b, node] = first_child[b, parent]
            first_child[b, parent] = node
    return parents, first_child, next_sibling


def tree_call(rng: np.random.Generator, case: CaseOptions) -> OpCall:
    """A call of verify_tree_greedy."""
    batch_size, num_nodes = case.batch_size, case.num_nodes
    tensors, options = _common(rng, case)
    parents = _tree(rng, case, tensors)
    candidates = tensors["candidates"].view
    target = rng.integers(0, case.vocab_size, (batch_size, num_nodes))
    # Most nodes' choice is one of their children's tokens, so that walks go deep.
    for b in range(batch_size):
        for node in range(1, num_nodes):
            if rng.random() < 0.6:
                target[b, parents[b, node]] = candidates[b, node]
    if case.malformed:
        _spoil(rng, target, _WRONG_TOKENS, 0.1)
    tensors["target_predict"] = Guarded.of(target, torch.int64, strided=case.strided)
    return _call("verify_tree_greedy", tensors, options, _TREE_INPUTS)


_TREE_INPUTS = "retrive_index retrive_next_token retrive_next_sibling"


def _tree(rng: np.random.Generator, case: CaseOptions, tensors: dict[str, Guarded]) -> np.ndarray:
    """Adds a batch of trees and the outputs of walks through them; returns the nodes' parents."""
    batch_size, num_nodes = case.batch_size, case.num_nodes
    parents, first_child, next_sibling = random_forest(rng, batch_size, num_nodes)
    # Few distinct tokens, so that siblings repeat them.
    candidates = rng.integers(0, case.vocab_size, (batch_size, num_nodes))
    flat_ids = np.arange(batch_size * num_nodes, dtype=np.int64).reshape(batch_size, num_nodes)
    if case.malformed:
        links = [-1, -2, 0, 1, num_nodes - 1, num_nodes, num_nodes + 1, 2**31, -(2**40)]
        _spoil(rng, first_child, links, 0.1)
        _spoil(rng, next_sibling, links, 0.3)
        _spoil(rng, flat_ids, [-1, -(2**33), batch_size * num_nodes, 2**40, 2**32], 0.1)
        _spoil(rng, candidates, _WRONG_TOKENS, 0.1)
    for name, values in {
        "candidates": candidates,
        "retrive_index": flat_ids,
        "retrive_next_token": first_child,
        "retrive_next_sibling": next_sibling,
    }.items():
        tensors[name] = Guarded.of(values, torch.int64, strided=case.strided)
    tensors["predicts"] = Guarded.empty(
        (batch_size * num_nodes + case.extra_width,), torch.int32, strided=case.strided
    )
    tensors["accept_index"] = Guarded.empty(
        (batch_size, case.num_steps + 1 + case.extra_width), torch.int32, strided=case.strided
    )
    return parents


def _drafts(
    rng: np.random.Generator, case: CaseOptions, choices: np.ndarray, wrong: list[int]
) -> np.ndarray:
    """Draft tokens that agree with the target's choices most of the time."""
    drafts = choices[:, :-1].copy()
    _spoil(rng, drafts, list(range(case.vocab_size)), 0.3)
    if case.malformed:
        _spoil(rng, drafts, wrong, 0.15)
    return drafts


def chain_call(rng: np.random.Generator, case: CaseOptions) -> OpCall:
    """A call of verify_chain_greedy."""
    tensors, options = _common(rng, case)
    width = case.num_steps + case.extra_width
    choices = rng.integers(0, case.vocab_size, (case.batch_size, width + 1))
    if case.malformed:
        _spoil(rng, choices, _WRONG_TOKENS, 0.1)
    drafts = _drafts(rng, case, choices, _WRONG_TOKENS)
    tensors["draft_tokens"] = Guarded.of(drafts, torch.int64, strided=case.strided)
    tensors["target_predict"] = Guarded.of(choices, torch.int64, strided=case.strided)
    tensors["output_token_ids"] = Guarded.empty(
        (case.batch_size, width + 1), torch.int32, strided=case.strided
    )
    return _call("verify_chain_greedy", tensors, options, "")


def logits_call(rng: np.random.Generator, case: CaseOptions, dtype: torch.dtype) -> OpCall:
    """A call of verify_chain_greedy_from_logits. Malformed: rows with some or only NaN, of -inf
    only, with +inf, besides drafts that are no token ids."""
    tensors, options = _common(rng, case)
    width = case.num_steps + case.extra_width
    vocab_size = case.vocab_size
    # Few distinct values, so that the maximum is often shared, and -0.0 meets 0.0.
    values = rng.choice([-2.0, -1.0, -0.0, 0.0, 1.5], (case.batch_size, width + 1, vocab_size))
    if case.malformed:
        for row in values.reshape(-1, vocab_size):
            kind = rng.integers(8)
            if kind == 0:
                row[:] = np.nan
            elif kind == 1:
                row[:] = -np.inf
            elif kind == 2:
                row[rng.random(vocab_size) < 0.5] = np.nan
            elif kind == 3:
                row[rng.integers(vocab_size)] = np.inf
            elif kind == 4:
                row[:] = np.where(rng.random(vocab_size) < 0.5, np.nan, -np.inf)
    usable = np.where(values > -np.inf, values, -np.inf)
    choices = usable.argmax(-1).astype(np.int64)
    drafts = _drafts(rng, case, choices, [*_WRONG_TOKENS, vocab_size, vocab_size + 1])
    tensors["target_logits"] = Guarded.rows(values, dtype, aligned=case.strided)
    tensors["draft_tokens"] = Guarded.of(drafts, torch.int64, strided=case.strided)
    tensors["output_token_ids"] = Guarded.empty(
        (case.batch_size, width + 1), torch.int32, strided=case.strided
    )
    return _call("verify_chain_greedy_from_logits", tensors, options, "")


def _coins(rng: np.random.Generator, case: CaseOptions, shape: tuple[int, ...]) -> Guarded:
    """Uniform numbers, often on the borders of the intervals that `_probabilities` make."""
    coins = rng.random(shape, dtype=np.float32)
    on_border = rng.random(shape) < 0.3
    coins[on_border] = rng.choice(np.float32([0.0, 0.25, 0.5, 0.75, 1 - 2**-24]), on_border.sum())
    if case.malformed:
        spoilt = rng.random(shape) < 0.1
        coins[spoilt] = rng.choice(np.float32([np.nan, -1.0, 1.0, np.inf]), spoilt.sum())
    return Guarded.of(coins, torch.float32, strided=case.strided)


def _probabilities(rng: np.random.Generator, case: CaseOptions, num_rows: int) -> np.ndarray:
    """float32 [B, num_rows, V]: some rows with simple fractions. Malformed: rows that are zero,
    not normalised, tiny, or have NaN, infinities or negative numbers in them."""
    shape = (case.batch_size, num_rows, case.vocab_size)
    probs = rng.dirichlet(np.full(case.vocab_size, 0.5), shape[:2]).astype(np.float32)
    for row in probs.reshape(-1, case.vocab_size):
        kind = rng.integers(12)
        if kind < 3:
            row[:] = np.bincount(rng.integers(0, case.vocab_size, 4), minlength=case.vocab_size) / 4
        elif case.malformed and kind < 8:
            if kind == 3:
                row[:] = 0
            elif kind == 4:
                row *= np.float32(1.001)
            elif kind == 5:
                row[:] = 1e-42
            else:
                worst = np.float32([np.nan, np.inf, -np.inf, -0.5, 3e38])
                row[rng.integers(case.vocab_size)] = rng.choice(worst)
    return probs


def _probability_rows(rng: np.random.Generator, case: CaseOptions, num_rows: int) -> Guarded:
    values = _probabilities(rng, case, num_rows)
    return Guarded.rows(values, torch.float32, aligned=case.strided)


def sampled_tree_call(rng: np.random.Generator, case: CaseOptions) -> OpCall:
    """A call of tree_speculative_sampling_target_only."""
    tensors, options = _common(rng, case)
    _tree(rng, case, tensors)
    shape = (case.batch_size, case.num_nodes)
    tensors["uniform_samples"] = _coins(rng, case, shape)
    tensors["uniform_samples_for_final_sampling"] = _coins(rng, case, shape[:1])
    tensors["target_probs"] = _probability_rows(rng, case, case.num_nodes)
    draft_probs = _probabilities(rng, case, case.num_nodes)
    draft_probs[rng.random(shape) < 0.7] = 0
    tensors["draft_probs"] = Guarded.rows(draft_probs, torch.float32, aligned=case.strided)
    if rng.random() < 0.3:
        options["threshold_single"], options["threshold_acc"] = 0.5, 0.75
    return _call("tree_speculative_sampling_target_only", tensors, options, _TREE_INPUTS)


def sampled_chain_call(
    rng: np.random.Generator, case: CaseOptions, *, has_draft_probs: bool = True
) -> OpCall:
    """A call of verify_chain_sampling."""
    tensors, options = _common(rng, case)
    width = case.num_steps + case.extra_width
    drafts = rng.integers(0, case.vocab_size, (case.batch_size, width))
    if case.malformed:
        _spoil(rng, drafts, [-1, -7, 2**31 - 1, case.vocab_size], 0.1)
    tensors["draft_token_ids"] = Guarded.of(drafts, torch.int32, strided=case.strided)
    if has_draft_probs:
        tensors["draft_probs"] = _probability_rows(rng, case, width)
    tensors["target_probs"] = _probability_rows(rng, case, width + 1)
    tensors["uniform_samples"] = _coins(rng, case, (case.batch_size, width))
    tensors["uniform_samples_for_final_sampling"] = _coins(rng, case, (case.batch_size,))
    tensors["output_token_ids"] = Guarded.empty(
        (case.batch_size, width + 1), torch.int32, strided=case.strided
    )
    if case.outputs:
        for name in ("output_accepted_token_num", "output_emitted_draft_token_num"):
            counts = rng.integers(0, 100, case.batch_size)
            tensors[name] = Guarded.of(counts, torch.int32, strided=case.strided)
    options["block_verification"] = bool(rng.integers(2))
    return _call("verify_chain_sampling", tensors, options, "draft_probs")


def _pick(rng: np.random.Generator, size: int, usual: list[float], ends: list[float]) -> np.ndarray:
    """Mostly usual values, and now and then one at the end of its range or beyond."""
    return np.where(rng.random(size) < 0.25, rng.choice(ends, size), rng.choice(usual, size))


def _noise_numbers(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Seeds or positions: small ones, any 64 bits, and those around which a counter wraps."""
    numbers = rng.integers(-(2**63), 2**63, shape, dtype=np.int64)
    small = rng.random(shape) < 0.4
    numbers[small] = rng.integers(-2, 3, int(small.sum()))
    edge = rng.random(shape) < 0.2
    edges = np.array([-(2**63), 2**63 - 1, 2**32 - 1, 2**32, -(2**32)], dtype=np.int64)
    numbers[edge] = rng.choice(edges, int(edge.sum()))
    return numbers


def _sampling(
    rng: np.random.Generator, case: CaseOptions, tensors: dict[str, Guarded], options: dict
) -> None:
    """Adds how each request is sampled: seed, temperature, filters, stream, and the error mask."""
    size, vocab_size = case.batch_size, case.vocab_size
    seeds = _noise_numbers(rng, (size,))
    tensors["seeds"] = Guarded.of(seeds, torch.int64, strided=case.strided)
    values = {
        "temperature": _pick(
            rng, size, [0.7, 1.0, 1.3], [0.0, -1.0, np.nan, np.inf, 1e-6, 1e4, 1e-45, 3e38]
        ),
        "top_k": _pick(
            rng, size, [0, 2, 3, 50], [-(2**31), 1, vocab_size - 1, vocab_size, 2**31 - 1]
        ),
        "top_p": _pick(
            rng, size, [0.3, 0.9, 0.999, 1.0], [0.0, -1.0, np.nan, 1e-45, 1 - 2**-24, 1.5]
        ),
        "min_p": _pick(
            rng, size, [0.0, 0.05, 0.4], [-1.0, np.nan, 1e-45, 1e-37, 1 - 2**-24, 1.0, 2.0]
        ),
    }
    for name, numbers in values.items():
        if rng.random() < case.optional_inputs:
            dtype = torch.int32 if name == "top_k" else torch.float32
            tensors[name] = Guarded.of(numbers, dtype, strided=case.strided)
    if case.outputs:
        already = rng.random(size) < 0.2
        tensors["error_mask"] = Guarded.of(already, torch.bool, strided=case.strided)
    if rng.random() < case.optional_inputs:
        options["noise_stream"] = int(rng.choice([1, 2, 2**24 - 1, 2**24]))


def _sampled_logits(
    rng: np.random.Generator, case: CaseOptions, num_rows: int, dtype: torch.dtype
) -> np.ndarray:
    """float64 [B, num_rows, V], all of which fit `dtype`: rows with ties, with a likely token,
    flat, far apart, masked, and subnormal. Malformed: with NaN or +inf, some or only, of -inf only,
    and with what fits float64 alone."""
    size = case.vocab_size
    values = 2 * rng.standard_normal((case.batch_size, num_rows, size))
    for row in values.reshape(-1, size):
        kind = rng.integers(10)
        if kind < 3:
            row[:] = rng.choice([-2.0, -1.0, -0.0, 0.0, 1.5], size)
        elif kind == 3:
            row *= 3e3
        elif kind == 4:
            row *= 0.3 * torch.finfo(dtype).tiny
        elif kind == 5:
            row[:] = rng.standard_normal()
        if rng.random() < 0.5:
            row[rng.integers(size)] += 9
        if rng.random() < 0.3:
            kept = rng.integers(size)
            row[(rng.random(size) < rng.random()) & (np.arange(size) != kept)] = -np.inf
        if case.malformed and rng.random() < 0.4:
            worst = [np.nan, np.inf, -np.inf, 1e300, -1e300]
            row[rng.random(size) < rng.choice([0.1, 0.5, 1.0])] = rng.choice(worst)
    return values


def _likely_tokens(values: np.ndarray) -> np.ndarray:
    """The largest finite logit of each row."""
    return np.where(values < np.inf, values, -np.inf).argmax(-1).astype(np.int64)


def _draft_probs(
    rng: np.random.Generator, case: CaseOptions, drafts: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """float32 [B, n, V] for drafts [B, n] and logits [B, n, V]: any distributions, the target's at
    temperature 1, the draft alone, and none. Malformed: some or only NaN, and others."""
    probs = _probabilities(rng, case, drafts.shape[1])
    finite = np.nan_to_num(np.clip(values, -1e4, 1e4), nan=-1e4)
    softmax = np.exp(finite - finite.max(-1, keepdims=True, initial=-1e4))
    softmax /= softmax.sum(-1, keepdims=True)
    kinds = rng.integers(8, size=drafts.shape)
    probs[kinds == 0] = softmax[kinds == 0]
    tokens = np.arange(case.vocab_size)
    probs[kinds == 1] = (drafts[..., None] == tokens)[kinds == 1]
    probs[kinds == 2] = 0
    if case.malformed:
        probs[kinds == 3] = np.nan
    return probs


def sampled_logits_chain_call(
    rng: np.random.Generator, case: CaseOptions, dtype: torch.dtype
) -> OpCall:
    """A call of verify_chain_sampling_from_logits."""
    tensors, options = _common(rng, case)
    _sampling(rng, case, tensors, options)
    width = case.num_steps + case.extra_width
    values = _sampled_logits(rng, case, width + 1, dtype)
    drafts = _drafts(
        rng, case, _likely_tokens(values), [*_WRONG_TOKENS, case.vocab_size, case.vocab_size + 1]
    )
    tensors["draft_tokens"] = Guarded.of(drafts, torch.int64, strided=case.strided)
    tensors["target_logits"] = Guarded.rows(values, dtype, aligned=case.strided)
    positions = _noise_numbers(rng, (case.batch_size,))
    tensors["positions"] = Guarded.of(positions, torch.int64, strided=case.strided)
    if rng.random() < case.optional_inputs:
        probs = _draft_probs(rng, case, drafts, values[:, :-1])
        tensors["draft_probs"] = Guarded.rows(probs, torch.float32, aligned=case.strided)
    tensors["output_token_ids"] = Guarded.empty(
        (case.batch_size, width + 1), torch.int32, strided=case.strided
    )
    return _call("verify_chain_sampling_from_logits", tensors, options, "positions draft_probs")


def sampled_logits_tree_call(
    rng: np.random.Generator, case: CaseOptions, dtype: torch.dtype
) -> OpCall:
    """A call of verify_tree_sampling_from_logits."""
    tensors, options = _common(rng, case)
    _sampling(rng, case, tensors, options)
    parents = _tree(rng, case, tensors)
    values = _sampled_logits(rng, case, case.num_nodes, dtype)
    # Most nodes have a child with their likely token, so that walks go deep.
    likely, candidates = _likely_tokens(values), tensors["candidates"].view
    for b, node in zip(*np.nonzero(rng.random(likely.shape) < 0.6), strict=True):
        if node > 0:
            candidates[b, node] = int(likely[b, parents[b, node]])
    tensors["target_logits"] = Guarded.rows(values, dtype, aligned=case.strided)
    positions = _noise_numbers(rng, likely.shape)
    tensors["positions"] = Guarded.of(positions, torch.int64, strided=case.strided)
    return _call("verify_tree_sampling_from_logits", tensors, options, f"positions {_TREE_INPUTS}")


def chain_tree_call(rng: np.random.Generator, case: CaseOptions) -> OpCall:
    """A call of build_chain_tree."""
    shape = (case.batch_size, case.num_nodes)
    tensors = {
        name: Guarded.empty(shape, torch.int64, strided=case.strided)
        for name in ("retrive_index", "retrive_next_token", "retrive_next_sibling")
    }
    if case.outputs:
        tensors["positions"] = Guarded.empty(
            (case.batch_size * case.num_nodes + case.extra_width,),
            torch.int64,
            strided=case.strided,
        )
        seq_lens = rng.integers(1, 1000, case.batch_size)
        tensors["seq_lens"] = Guarded.of(seq_lens, torch.int64, strided=case.strided)
    if case.num_reqs is not None:
        tensors["num_reqs"] = Guarded.of([case.num_reqs], torch.int32)
    return _call("build_chain_tree", tensors, {}, "")


def sample_calls(seed: int = 0) -> Mapping[str, OpCall]:
    """A few calls of every op by name, for correctness, opcheck, compile and benchmark runs."""
    rng = np.random.default_rng(seed)
    full = CaseOptions(4, 3, num_nodes=8, vocab_size=5, num_reqs=3, max_accept=True, extra_width=2)
    cases = {
        "plain": dataclasses.replace(
            full,
            num_reqs=None,
            max_accept=False,
            outputs=False,
            optional_inputs=0.0,
            pass_steps=False,
        ),
        "full": full,
        "strided": dataclasses.replace(full, strided=True),
        "one node": dataclasses.replace(full, num_steps=0, num_nodes=1, extra_width=0),
        "empty batch": dataclasses.replace(full, batch_size=0, num_reqs=0),
    }
    calls: dict[str, OpCall] = {}
    for name, case in cases.items():
        calls[f"tree, {name}"] = tree_call(rng, case)
        calls[f"chain, {name}"] = chain_call(rng, case)
        calls[f"logits, {name}"] = logits_call(rng, case, torch.float32)
        calls[f"chain tree, {name}"] = chain_tree_call(rng, case)
        calls[f"sampled tree, {name}"] = sampled_tree_call(rng, case)
        calls[f"sampled chain, {name}"] = sampled_chain_call(rng, case)
        calls[f"sampled logits, {name}"] = sampled_logits_chain_call(rng, case, torch.float32)
        calls[f"sampled logits tree, {name}"] = sampled_logits_tree_call(rng, case, torch.float32)
    calls["logits, bfloat16"] = logits_call(rng, full, torch.bfloat16)
    return calls
