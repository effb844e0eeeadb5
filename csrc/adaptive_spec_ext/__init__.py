"""Verify ops for speculative decoding that also learn how many tokens to draft.

The functions here are the ops ``torch.ops.adaptive_spec.*`` under their usual names, ready to
replace an engine's own: without ``state`` they verify and nothing else; with it, the same launch
also takes the batch's accepted-draft counts into the adaptive state and publishes the next step
counts through the ring.

Words: B requests, S draft tokens each (``speculative_num_steps``), D verified tokens each
(``num_draft_tokens``; S + 1 for a chain: the last committed token, then the drafts), V vocabulary
size. *Accepted drafts* exclude the bonus token, the one that the target model adds itself.

All ops write only into tensors that the caller passes, allocate nothing (but a ``workspace`` that
is needed and not given), return nothing, never wait for a device, and can be compiled and captured
in CUDA graphs. All tensors of a call lie on one
device. Rows may be strided; S is not taken from a buffer's width where ``speculative_num_steps``
says otherwise, so buffers can be made for the largest S.

Keyword arguments of every verify op:

``state``, ``ring``
    int64, 1-D, contiguous, mutated; both or neither. ``AdaptiveState.tensor`` and
    ``AdaptiveState.ring.tensor`` of ``adaptive_spec``. The batch is credited to slot ``slot`` as
    one that ran with S = ``speculative_num_steps``. On a GPU the op cannot look into them before it
    is launched: a tensor that is no state is left as it is, nothing is published (so the host's
    wait for the round fails by its bound), and ``accepted_tokens`` may stay unwritten.
``slot``
    int, the slot that the batch size was routed to. Without ``state`` it means nothing.
``speculative_num_steps``
    int, S. Default: all that the buffers have room for.
``num_reqs``
    int32 [1]. Rows from this one on are padding: nothing is written for them and they are not
    counted. Values outside [0, B] are taken to the nearer end. Default: all B rows are live.
``max_accept``
    int32 [B], the most drafts that may be accepted of each request; values outside [0, S] are taken
    to the nearer end.
``accept_lens``
    int32 [B], out: accepted drafts + 1.
``bonus_tokens``
    int64 [B], out: the token after the last accepted draft.
``seq_lens``, ``new_seq_lens``
    int64 [B], in and out, both or neither: ``new_seq_lens = seq_lens + accept_lens``.
``select_index``
    int64 [B], out: ``b * D`` + accepted drafts, the row of request b's last accepted token in
    anything that holds the B * D verified tokens in order.
``accepted_tokens``
    int64 [>= B * (S + 1)], out: all emitted tokens (drafts and bonus) of the live requests, packed
    in request order. What lies behind them is left untouched.
``workspace``
    int64, 1-D, contiguous, mutated: scratch memory from `verify_workspace`, for one launch at a
    time. Only CUDA launches of several thread blocks use it: always the ops that read whole rows
    (``verify_chain_greedy_from_logits`` and those that sample), and ``accepted_tokens`` of more
    than 16 requests without a state. Where it is needed and not given, the op allocates a zeroed
    one, which is a launch more.

Errors: ``ValueError`` names the argument, what was expected and what came; nothing has been written
then. Malformed contents, as opposed to shapes, are no error, since no op may look at them from the
host: a draft that is no token id is not accepted, a target choice that is none becomes token 0 and
ends its request's walk, a tree link out of the tree ends its list. Each one that the walk meets is
counted in the state's ``num_anomalies``.
"""

from typing import TypedDict, Unpack

import torch
from torch import Tensor

# torch comes first: it has then loaded the libtorch that the compiled part needs.
try:
    import adaptive_spec_ext._C as _C
except ImportError as error:
    raise ImportError(
        "adaptive_spec_ext is not built for this Python and torch: run `make build` or "
        "`pip install -e .` in the adaptive_spec repository, which needs a C++20 compiler "
        f"({error})"
    ) from error

__all__ = [
    "build_chain_tree",
    "build_info",
    "chain_speculative_sampling",
    "tree_speculative_sampling_target_only",
    "update_and_select",
    "verify_chain_greedy",
    "verify_chain_greedy_from_logits",
    "verify_chain_sampling",
    "verify_chain_sampling_from_logits",
    "verify_tree_greedy",
    "verify_tree_sampling_from_logits",
    "verify_workspace",
]

#: What the binary was built with: ``torch_version``, ``compiler``, ``nvcc_version``, ``cuda_ops``,
#: ``cuda_architectures``.
build_info: dict = _C.build_info


class VerifyOptions(TypedDict, total=False):
    """Keyword arguments of every verify op, see the module's docstring.

    The ops take them as ``**keywords`` and hand them on: spelling out a dozen defaults would make
    up half of a call's cost.
    """

    slot: int
    speculative_num_steps: int | None
    num_reqs: Tensor | None
    max_accept: Tensor | None
    accept_lens: Tensor | None
    bonus_tokens: Tensor | None
    seq_lens: Tensor | None
    new_seq_lens: Tensor | None
    select_index: Tensor | None
    accepted_tokens: Tensor | None
    workspace: Tensor | None


class VerifyKeywords(VerifyOptions, total=False):
    """All of them: with the adaptive state."""

    state: Tensor | None
    ring: Tensor | None


_ops = torch.ops.adaptive_spec
_verify_tree_greedy = _ops.verify_tree_greedy.default
_verify_chain_greedy = _ops.verify_chain_greedy.default
_verify_chain_greedy_from_logits = _ops.verify_chain_greedy_from_logits.default
_tree_speculative_sampling_target_only = _ops.tree_speculative_sampling_target_only.default
_verify_chain_sampling = _ops.verify_chain_sampling.default
_verify_chain_sampling_from_logits = _ops.verify_chain_sampling_from_logits.default
_verify_tree_sampling_from_logits = _ops.verify_tree_sampling_from_logits.default
_update_and_select = _ops.update_and_select.default
_build_chain_tree = _ops.build_chain_tree.default


def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
    **keywords: Unpack[VerifyKeywords],
) -> None:
    """Greedy verification of token trees; a drop-in for sgl-kernel's op of the same name.

    A request's walk begins at node 0. At each depth the target's choice at the node accepted last
    is looked for among that node's children, in list order; the first child that carries it is
    accepted. The walk ends where no child does, or after S drafts.

    Args:
        predicts: int32 [>= B * D], mutated. For each node on the accepted path, at its flat id: the
            target's choice there. The last one is the bonus token. Other entries stay as they are.
        accept_index: int32 [B, >= S + 1], mutated. The flat ids of the accepted path, node 0 first.
            Entries behind them stay as they are.
        accept_token_num: int32 [B], mutated. Accepted drafts.
        candidates: int64 [B, D], the nodes' tokens; node 0 is the last committed token.
        retrive_index: int64 [B, D], the nodes' flat ids, b * D + i in a batch laid out as usual.
        retrive_next_token: int64 [B, D], each node's first child, -1 for none.
        retrive_next_sibling: int64 [B, D], each node's next sibling, -1 for none.
        target_predict: int64 [B, D], read by flat id: the target's choice after each node.

    The keyword arguments, errors and the treatment of malformed trees are described in the module's
    docstring. S defaults to ``accept_index.size(1) - 1``. A node whose flat id lies outside the
    live rows is never accepted; a root with such an id counts as b * D.
    """
    _verify_tree_greedy(
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        target_predict,
        **keywords,
    )


def verify_chain_greedy(
    draft_tokens: Tensor,
    target_predict: Tensor,
    output_token_ids: Tensor,
    accept_token_num: Tensor,
    **keywords: Unpack[VerifyKeywords],
) -> None:
    """Greedy verification of draft chains, without any tree arrays.

    Drafts are accepted as long as each equals the target's choice at its place; the target's choice
    after them is the bonus token.

    Args:
        draft_tokens: int64 [B, >= S].
        target_predict: int64 [B, >= S + 1]; column i is the target's choice after i drafts.
        output_token_ids: int32 [B, >= S + 1], mutated: accepted drafts, bonus token, then -1 to the
            end of the row.
        accept_token_num: int32 [B], mutated: accepted drafts.

    The keyword arguments and errors are described in the module's docstring. S defaults to
    ``draft_tokens.size(1)`` and may be 0.
    """
    _verify_chain_greedy(
        draft_tokens,
        target_predict,
        output_token_ids,
        accept_token_num,
        **keywords,
    )


def verify_chain_greedy_from_logits(
    draft_tokens: Tensor,
    target_logits: Tensor,
    output_token_ids: Tensor,
    accept_token_num: Tensor,
    **keywords: Unpack[VerifyKeywords],
) -> None:
    """Argmax and `verify_chain_greedy` in one: only the rows that matter are read.

    The target's choice is the largest logit of its row, the lowest index among equals, NaN left
    out. A row with a NaN in it counts as an anomaly; one with nothing above -inf does too, yields
    token 0, and ends the walk. On the CPU no row behind the first mismatch is read; on a GPU rows
    are read side by side, and those behind a mismatch that is already known are left out.

    Args:
        draft_tokens: int64 [B, >= S]. A draft outside [0, V) is never accepted.
        target_logits: float16, bfloat16, float32 or (CPU only) float64 [B, >= S + 1, V], contiguous
            along V; position i holds the logits after i drafts.
        output_token_ids: int32 [B, >= S + 1], mutated: accepted drafts, bonus token, then -1 to the
            end of the row.
        accept_token_num: int32 [B], mutated: accepted drafts.

    The keyword arguments and errors are described in the module's docstring. S defaults to
    ``draft_tokens.size(1)`` and may be 0.
    """
    _verify_chain_greedy_from_logits(
        draft_tokens,
        target_logits,
        output_token_ids,
        accept_token_num,
        **keywords,
    )


def tree_speculative_sampling_target_only(
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
    deterministic: bool = True,
    **keywords: Unpack[VerifyKeywords],
) -> None:
    """Verification of token trees by sampling; a drop-in for sgl-kernel's op of the same name.

    At each node the probabilities of its children are added up in list order, and the first child
    at which the sum, divided by ``threshold_acc``, exceeds the node's coin is accepted; so is one
    that is as probable as ``threshold_single``. A child of probability 0 never is. Where no child
    is accepted, or the tree or S ends, the last token is drawn from what the target's row there
    has left: its probabilities less those in ``draft_probs``, where rejected children have been
    marked; the whole row after S drafts.

    Args:
        predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token,
            retrive_next_sibling: as in `verify_tree_greedy`.
        uniform_samples: float32 [B, D], in [0, 1): a coin per node.
        uniform_samples_for_final_sampling: float32 [B], in [0, 1): for the last token.
        target_probs: float32 [B, D, V], contiguous along V: after each node.
        draft_probs: float32 [B, D, V], mutated: a rejected child's entry at its parent becomes the
            target's. NaN counts as 0, so that a caller without draft probabilities may leave it
            unwritten only if that cannot hold other numbers; zeros are safe.
        threshold_single, threshold_acc: from 0 to 1; below 1 more is accepted than the target's
            distribution allows.
        deterministic: accepted for compatibility; results are always deterministic.

    Probabilities are added up as integers of about 2^-43, so results do not depend on the device or
    on how work is spread over it. A row with nothing left to draw from yields its most likely
    token; one with nothing above 0 yields token 0 and counts as an anomaly, as does one with a NaN.
    Source: the behaviour of sgl-kernel's op, with half-open coins.
    """
    _tree_speculative_sampling_target_only(
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        uniform_samples,
        uniform_samples_for_final_sampling,
        target_probs,
        draft_probs,
        threshold_single,
        threshold_acc,
        deterministic,
        **keywords,
    )


def verify_chain_sampling(
    draft_probs: Tensor | None,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    output_token_ids: Tensor,
    accept_token_num: Tensor,
    output_accepted_token_num: Tensor | None = None,
    output_emitted_draft_token_num: Tensor | None = None,
    block_verification: bool = False,
    **keywords: Unpack[VerifyKeywords],
) -> None:
    """Speculative sampling of draft chains: the output follows the target's distribution.

    Draft i is accepted if ``coin * q < p``, with q and p its probabilities under draft and target.
    The token after the accepted drafts is drawn from max(p - q, 0) at the first rejected one, or
    from the target's row after S drafts.

    Args:
        draft_probs: float32 [B, >= S, V], contiguous along V: the distributions that the drafts
            were sampled from. None: the drafts were certain (a draft that takes the likeliest
            token).
        draft_token_ids: int32 [B, >= S]. A draft outside [0, V) is never accepted.
        target_probs: float32 [B, >= S + 1, V], contiguous along V.
        uniform_samples: float32 [B, >= S], in [0, 1).
        uniform_samples_for_final_sampling: float32 [B], in [0, 1), independent of the others.
        output_token_ids: int32 [B, >= S + 1], mutated: accepted drafts, drawn token, then -1.
        accept_token_num: int32 [B], mutated: accepted drafts.
        output_accepted_token_num: int32 [B], mutated: grows by the drafts that would be accepted if
            each stood alone.
        output_emitted_draft_token_num: int32 [B], mutated: grows by the accepted drafts.
        block_verification: verify a request's drafts as a block (Sun et al. 2024, arXiv
            2403.10444): the last position that passes counts instead of the first that fails. The
            output follows the same distribution, and as many drafts or more are accepted on
            average; all rows are read. S is at most 64.

    Degenerate rows and determinism are as in `tree_speculative_sampling_target_only`.
    Source: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).
    """
    _verify_chain_sampling(
        draft_probs,
        draft_token_ids,
        target_probs,
        uniform_samples,
        uniform_samples_for_final_sampling,
        output_token_ids,
        accept_token_num,
        output_accepted_token_num,
        output_emitted_draft_token_num,
        block_verification,
        **keywords,
    )


def chain_speculative_sampling(
    draft_probs: Tensor,
    draft_token_ids: Tensor,
    target_probs: Tensor,
    maybe_output_accepted_token_num: Tensor | None = None,
    maybe_output_emitted_draft_token_num: Tensor | None = None,
    deterministic: bool = True,
    generator: torch.Generator | None = None,
    **keywords: Unpack[VerifyKeywords],
) -> tuple[Tensor, Tensor, Tensor]:
    """`verify_chain_sampling` with FlashInfer's arguments and results.

    Args:
        draft_probs, draft_token_ids, target_probs: as there.
        maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num: int32 [B], mutated:
            counters to go on with; new ones start at 0.
        deterministic: accepted for compatibility; results are always deterministic given the
            uniform numbers.
        generator: of torch's uniform numbers.

    Returns:
        int32 [B, S + 1] tokens (accepted drafts, drawn token, -1), and the two counters.
    """
    batch_size, num_steps = draft_token_ids.shape
    device = draft_token_ids.device
    coins = torch.rand(batch_size, num_steps + 1, device=device, generator=generator)
    tokens = torch.empty(batch_size, num_steps + 1, dtype=torch.int32, device=device)
    counters = [
        torch.zeros(batch_size, dtype=torch.int32, device=device) if given is None else given
        for given in (maybe_output_accepted_token_num, maybe_output_emitted_draft_token_num)
    ]
    verify_chain_sampling(
        draft_probs,
        draft_token_ids,
        target_probs,
        coins[:, :num_steps],
        coins[:, num_steps],
        tokens,
        torch.empty_like(counters[0]),
        *counters,
        **keywords,
    )
    return tokens, *counters


def verify_chain_sampling_from_logits(
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
    **keywords: Unpack[VerifyKeywords],
) -> None:
    """Softmax, filters, sampling and verification of draft chains in one, without probabilities.

    Each row of logits chooses a token: it is sampled from the row's distribution at the request's
    temperature, as top-k, top-p and min-p leave it, by the largest of score and noise (Gumbel-max).
    Drafts are accepted as long as they are what the rows choose; the next choice is the bonus
    token. The noise is a function of (seed, position, stream, token) alone, so a request's tokens
    do not depend on S, on what is drafted, on its row or on the rest of the batch: speculative
    decoding emits token for token what plain decoding (S = 0) with the same seed does. A draft
    that was itself sampled by this op (S = 0, on the draft model's logits) with the same seed,
    position and stream is accepted most often (Daliri et al. 2024, arXiv 2408.07978).

    With ``draft_probs`` the choice behind draft i is made by speculative sampling instead: the
    draft with probability min(1, p / q), else a token of the residual max(p - q, 0). The drafts
    must then have been sampled from these probabilities with other noise, ``noise_stream`` for
    one. The tokens still follow the target's distribution, but depend on drafts and S.

    Args:
        draft_tokens: int64 [B, >= S]. A draft outside [0, V) is never accepted.
        target_logits: float16, bfloat16, float32 or (CPU only) float64 [B, >= S + 1, V], contiguous
            along V; position i holds the logits after i drafts. -inf masks a token. Sampled as
            float32.
        seeds: int64 [B], any numbers.
        positions: int64 [B]: row i draws with the noise of position ``positions[b] + i``, so a
            caller that passes its sequence lengths (``seq_lens``, which may be ``new_seq_lens``
            too) gets new noise each round, also where a captured graph is replayed.
        output_token_ids: int32 [B, >= S + 1], mutated: accepted drafts, bonus token, then -1.
        accept_token_num: int32 [B], mutated: accepted drafts.
        temperature: float32 [B]; default 1. 0 (and what is not above it, or NaN) is greedy: the
            largest logit, the lowest index among equals.
        top_k: int32 [B]: only tokens with fewer than k above them; 1 is greedy, below 1 off.
        top_p: float32 [B]: only tokens with less than this probability above them; 0 is greedy, 1
            off.
        min_p: float32 [B]: only tokens at least this share as probable as the likeliest; 1 is
            greedy, 0 off. All three look at the unfiltered row, and equals at a border all stay.
        draft_probs: float32 [B, >= S, V], contiguous along V; NaN counts as 0. Ignored where a
            request is greedy.
        noise_stream: 0 to 2^24; different streams share no noise.
        error_mask: bool [B], mutated: set to True, and never to False, for a request that met a row
            with a NaN or +inf, or with nothing above -inf. Such a row chooses its largest finite
            logit, or ends the walk with token 0 if it has none, and counts as an anomaly.

    The same arguments give the same tokens on every device, however rows are spread over it. The
    other keyword arguments and errors are described in the module's docstring.
    Source of the generator: Philox 4x32-10 (Salmon et al. 2011).
    """
    _verify_chain_sampling_from_logits(
        draft_tokens,
        target_logits,
        seeds,
        positions,
        output_token_ids,
        accept_token_num,
        temperature,
        top_k,
        top_p,
        min_p,
        draft_probs,
        noise_stream,
        error_mask,
        **keywords,
    )


def verify_tree_sampling_from_logits(
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
    **keywords: Unpack[VerifyKeywords],
) -> None:
    """`verify_chain_sampling_from_logits` for token trees.

    The row behind each node chooses a token, as there without ``draft_probs``; the child that has
    it is accepted, and the last choice is the bonus token.

    Args:
        predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token,
            retrive_next_sibling: as in `verify_tree_greedy`.
        target_logits: float16, bfloat16, float32 or (CPU only) float64 [B, D, V], contiguous along
            V: after each node, in the order of ``candidates``.
        positions: int64 [B, D]: the position whose noise the node's row draws with. Nodes of one
            depth may share it, since only one of them is on the accepted path.
        seeds, temperature, top_k, top_p, min_p, noise_stream, error_mask: as in
            `verify_chain_sampling_from_logits`.
    """
    _verify_tree_sampling_from_logits(
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        target_logits,
        seeds,
        positions,
        temperature,
        top_k,
        top_p,
        min_p,
        noise_stream,
        error_mask,
        **keywords,
    )


def update_and_select(
    accept_token_num: Tensor,
    state: Tensor,
    ring: Tensor,
    *,
    slot: int,
    speculative_num_steps: int,
    num_reqs: Tensor | None = None,
) -> None:
    """The adaptive step alone, for an engine that keeps its own verify op.

    Args:
        accept_token_num: int32 [B], accepted drafts (bonus excluded) of a batch that ran with S =
            ``speculative_num_steps``. A count outside [0, S] is an anomaly and is taken to the
            nearer end.
        state, ring: int64, 1-D, contiguous, mutated.
        slot: the slot that the batch size was routed to.
        speculative_num_steps: S.
        num_reqs: int32 [1], rows from this one on are padding and not counted.

    Raises ValueError as described in the module's docstring.
    """
    _update_and_select(
        accept_token_num,
        state,
        ring,
        slot=slot,
        speculative_num_steps=speculative_num_steps,
        num_reqs=num_reqs,
    )


def build_chain_tree(
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    *,
    positions: Tensor | None = None,
    seq_lens: Tensor | None = None,
    num_reqs: Tensor | None = None,
) -> None:
    """The tree arrays of `verify_tree_greedy` for trees that are chains (topk = 1).

    Args:
        retrive_index: int64 [B, D], mutated: b * D + i.
        retrive_next_token: int64 [B, D], mutated: i + 1, and -1 at the end.
        retrive_next_sibling: int64 [B, D], mutated: -1.
        positions: int64 [>= B * D], mutated, together with ``seq_lens``: ``seq_lens[b] + i`` at
            b * D + i.
        seq_lens: int64 [B].
        num_reqs: int32 [1], rows from this one on are padding and left untouched.

    Raises ValueError as described in the module's docstring.
    """
    _build_chain_tree(
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        positions=positions,
        seq_lens=seq_lens,
        num_reqs=num_reqs,
    )


def verify_workspace(
    batch_size: int, num_draft_tokens: int, *, device: torch.device | str = "cpu"
) -> Tensor:
    """Scratch memory for the verify ops, made once and passed as ``workspace``.

    Every launch leaves it ready for the next, so it may be captured in a graph and replayed; two
    launches that may run at the same time need one each.

    Args:
        batch_size: largest B it is to serve, padding included.
        num_draft_tokens: largest D = S + 1 of a chain.
        device: that of the ops' tensors.

    Returns:
        int64 [num_words], zero.

    Raises ValueError for a size below 0 or above all reason.
    """
    for name, value in (("batch_size", batch_size), ("num_draft_tokens", num_draft_tokens)):
        if not 0 <= value < 2**24:
            raise ValueError(
                f"verify_workspace: argument `{name}`: expected 0 to {2**24 - 1}, got {value}"
            )
    num_words = _C.num_workspace_words(batch_size, num_draft_tokens)
    return torch.zeros(num_words, dtype=torch.int64, device=device)
