"""The rounds of verification by sampling that bench_verify.py times, and what it compares with.

The compared ways are what an engine without a fused kernel does in torch: whole tensors, no wait
for the device. They draw by an exponential race, which is torch.multinomial less its checks.

A round accepts a known number of drafts. Where probabilities decide, drafts are certain of being
accepted (more probable for the target than for the draft) or rejected (impossible for the target).
Where the rows' own choices do (coupled noise), drafts are what the op chooses: for it alone, so of
the others only the range of what they give is checked.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor
from verify_alternatives import NUM_STEPS, Alternative, Batch, Fused, Shape, accepted_drafts

from adaptive_spec import ops

WIDTH = NUM_STEPS + 1
TOP_K, TOP_P, TEMPERATURE = 50, 0.9, 0.8
#: Spreads normal logits so that a row is neither flat nor certain.
LOGITS_SCALE = 4.0


@dataclasses.dataclass(frozen=True)
class SampledShape(Shape):
    """A shape of verification by sampling; `op` is its name in the report."""

    is_tree: bool = False
    from_logits: bool = False
    has_filters: bool = False
    has_draft_probs: bool = False
    is_block: bool = False

    @property
    def row_bytes(self) -> int:
        """Of logits or the target's probabilities."""
        return self.vocab_size * (self.dtype.itemsize if self.from_logits else 4)

    @property
    def kernel(self):
        if self.from_logits:
            if self.is_tree:
                return ops.verify_tree_sampling_from_logits
            return ops.verify_chain_sampling_from_logits
        return (
            ops.tree_speculative_sampling_target_only if self.is_tree else ops.verify_chain_sampling
        )


# What varies, by name in the report.
SAMPLED_OPS: dict[str, dict[str, bool]] = {
    "sampled tree": {"is_tree": True},
    "sampled chain": {"has_draft_probs": True},
    "sampled chain, block": {"has_draft_probs": True, "is_block": True},
    "logits, sampled": {"from_logits": True},
    "logits, sampled, filters": {"from_logits": True, "has_filters": True},
    "logits, sampled, draft": {"from_logits": True, "has_draft_probs": True},
    "logits, sampled, draft, filters": {
        "from_logits": True,
        "has_filters": True,
        "has_draft_probs": True,
    },
    "tree logits, sampled": {"is_tree": True, "from_logits": True},
    "tree logits, sampled, filters": {"is_tree": True, "from_logits": True, "has_filters": True},
}


@dataclasses.dataclass
class SampledBatch(Batch):
    vocab_size: int = 0
    #: Whether every way accepts the same drafts, see the module's docstring.
    is_certain: bool = False

    def check(self, name: str) -> None:
        counts, bonus = (self.outputs[key].cpu() for key in ("accept_token_num", "bonus_tokens"))
        is_known = self.is_certain or name.startswith("fused")
        if is_known and not torch.equal(counts, self.accepted.to(counts.dtype)):
            raise SystemExit(f"{name}: wrong `accept_token_num`: nothing is timed")
        if not ((counts >= 0) & (counts <= NUM_STEPS)).all():
            raise SystemExit(f"{name}: `accept_token_num` out of range: nothing is timed")
        if not ((bonus >= 0) & (bonus < self.vocab_size)).all():
            raise SystemExit(f"{name}: `bonus_tokens` out of range: nothing is timed")


def make_sampled_batch(shape: SampledShape, seed: int) -> SampledBatch:
    batch_size, vocab_size, device = shape.batch_size, shape.vocab_size, shape.device
    generator = torch.Generator(device).manual_seed(seed)
    accepted = torch.from_numpy(accepted_drafts(np.random.default_rng(seed), batch_size))
    logits = torch.empty(batch_size, WIDTH, vocab_size, device=device)
    logits.normal_(generator=generator).mul_(LOGITS_SCALE)
    is_certain = shape.has_draft_probs or not shape.from_logits
    if is_certain:
        # The token that is certain to be rejected.
        logits[..., 0] = -torch.inf
    logits = logits.to(shape.dtype) if shape.from_logits else logits

    def empty(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(size, -5, dtype=dtype, device=device)

    outputs = {
        "accept_token_num": empty(batch_size),
        "accept_lens": empty(batch_size),
        "bonus_tokens": empty(batch_size, dtype=torch.int64),
    }
    options = sampling_options(shape, seed) if shape.from_logits else {}
    choices = logits.argmax(-1) if is_certain else own_choices(shape, logits, options)
    drafts = choices[:, :NUM_STEPS].clone()
    rejected = (accepted < NUM_STEPS).nonzero().flatten().to(device)
    place = accepted.to(device)[rejected]
    drafts[rejected, place] = 0 if is_certain else (drafts[rejected, place] + 1) % vocab_size
    if shape.is_tree:
        root = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        inputs = {"candidates": torch.cat([root, drafts], 1)}
        links = ("retrive_index", "retrive_next_token", "retrive_next_sibling")
        inputs |= {name: empty(batch_size, WIDTH, dtype=torch.int64) for name in links}
        ops.build_chain_tree(**{name: inputs[name] for name in links})
        outputs["predicts"] = empty(batch_size * WIDTH)
        outputs["accept_index"] = empty(batch_size, WIDTH)
    else:
        outputs["output_token_ids"] = empty(batch_size, WIDTH)
        inputs = (
            {"draft_tokens": drafts} if shape.from_logits else {"draft_token_ids": drafts.int()}
        )
    if shape.from_logits:
        inputs |= {"target_logits": logits} | options
    else:
        inputs["target_probs"] = logits.softmax(-1)
        coins = torch.rand(batch_size, WIDTH, generator=generator, device=device)
        if shape.is_tree:
            # Without a draft's probabilities to be above, any coin but 0 could reject.
            inputs["uniform_samples"] = torch.zeros_like(coins)
            inputs["draft_probs"] = torch.zeros_like(inputs["target_probs"])
        else:
            inputs["uniform_samples"] = coins[:, :NUM_STEPS].contiguous()
        inputs["uniform_samples_for_final_sampling"] = coins[:, NUM_STEPS].contiguous()
    if shape.has_draft_probs:
        flat = torch.rand(batch_size, NUM_STEPS, vocab_size, generator=generator, device=device)
        # Less than what any best token has, and something for the impossible one.
        inputs["draft_probs"] = flat.add_(1).softmax(-1)
    num_bytes = sum(tensor.nbytes for tensor in inputs.values())
    # Of the draft's rows, which the op needs for the same positions, too.
    row_bytes = shape.row_bytes + (4 * vocab_size if "draft_probs" in inputs else 0)
    unneeded = 0 if shape.is_block else int((NUM_STEPS - accepted).sum()) * row_bytes
    return SampledBatch(
        inputs,
        outputs,
        accepted,
        torch.zeros(batch_size),
        num_bytes,
        num_bytes - unneeded,
        vocab_size,
        is_certain,
    )


def sampling_options(shape: SampledShape, seed: int) -> dict[str, Tensor]:
    def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((shape.batch_size,), value, dtype=dtype, device=shape.device)

    requests = torch.arange(shape.batch_size, device=shape.device)
    positions = 100 * requests
    if shape.is_tree:
        positions = positions[:, None] + torch.arange(WIDTH, device=shape.device)
    options = {"seeds": requests + 1000 * seed, "positions": positions}
    options["temperature"] = full(TEMPERATURE)
    if shape.has_filters:
        options |= {"top_k": full(TOP_K, torch.int32), "top_p": full(TOP_P)}
    return options


def own_choices(shape: SampledShape, logits: Tensor, options: dict[str, Tensor]) -> Tensor:
    """What the op chooses behind each position, int64 [B, D]: its results without any draft."""
    choices = torch.empty(logits.shape[:2], dtype=torch.int64, device=logits.device)
    positions = options["positions"] if not shape.is_tree else options["positions"][:, 0]
    for at in range(WIDTH):
        bonus = choices.new_empty(shape.batch_size)
        ops.verify_chain_sampling_from_logits(
            choices.new_empty(shape.batch_size, 0),
            logits[:, at : at + 1],
            output_token_ids=bonus.new_empty(shape.batch_size, 1, dtype=torch.int32),
            accept_token_num=bonus.new_empty(shape.batch_size, dtype=torch.int32),
            bonus_tokens=bonus,
            **options | {"positions": positions + at},
        )
        choices[:, at] = bonus
    return choices


class SampledFused(Fused):
    shape: SampledShape

    def launch(self, batch: Batch) -> None:
        self.verify(batch, state=self.state, slot=self.slot)

    def verify(self, batch: Batch, **adaptive) -> None:
        block = {"block_verification": True} if self.shape.is_block else {}
        self.shape.kernel(
            **batch.inputs, **batch.outputs, workspace=self.workspace, **block, **adaptive
        )


def sampled_alternatives(shape: SampledShape, fused: SampledFused) -> list[Alternative]:
    found = [
        Alternative("fused, with state", "this library", fused.launch),
        Alternative("fused, no state", "the same op, not adaptive", fused.verify),
    ]
    if not shape.from_logits:
        launch = block_from_probs if shape.is_block else reject_from_probs
        return [*found, Alternative("torch rejection", TORCH_REJECTION, launch)]
    if not shape.has_draft_probs:
        return [*found, Alternative("softmax + draw + match", SOFTMAX_DRAW, draw_and_match)]
    return [
        *found,
        Alternative("softmax + torch rejection", SOFTMAX_REJECTION, reject_from_logits),
        Alternative("softmax + sampled chain", SOFTMAX_CHAIN, softmax_and_op(shape, fused)),
    ]


TORCH_REJECTION = "an engine without a kernel for it: rejection on whole tensors, one draw"
SOFTMAX_DRAW = (
    "an engine without fused sampling: temperature, filters by sorting, softmax, a draw from every "
    "row, and this library's greedy op to match drafts with them"
)
SOFTMAX_REJECTION = "temperature, filters by sorting and softmax, then rejection on whole tensors"
SOFTMAX_CHAIN = "the same softmax, then this library's verify_chain_sampling"


def target_probs(inputs: dict[str, Tensor]) -> Tensor:
    """float32 [B, D, V]: after temperature, top-k and top-p."""
    logits = inputs["target_logits"].float() / inputs["temperature"][:, None, None]
    if "top_k" not in inputs:
        return logits.softmax(-1)
    ordered, order = logits.sort(-1)
    size = (*logits.shape[:2], 1)
    last = (logits.size(-1) - inputs["top_k"].long())[:, None, None].expand(size)
    ordered.masked_fill_(ordered < ordered.gather(-1, last), -torch.inf)
    below = ordered.softmax(-1).cumsum(-1)
    is_out = below <= 1 - inputs["top_p"][:, None, None]
    is_out[..., -1] = False
    ordered.masked_fill_(is_out, -torch.inf)
    return torch.empty_like(logits).scatter_(-1, order, ordered).softmax(-1)


def draw(weights: Tensor) -> Tensor:
    """A token of each row, in proportion to its weight."""
    return weights.div(torch.empty_like(weights).exponential_()).argmax(-1)


def drafts_of(batch: Batch) -> Tensor:
    if "candidates" in batch.inputs:
        return batch.inputs["candidates"][:, 1:]
    key = "draft_tokens" if "draft_tokens" in batch.inputs else "draft_token_ids"
    return batch.inputs[key].long()


def draw_and_match(batch: Batch) -> None:
    choices = draw(target_probs(batch.inputs))
    if "candidates" not in batch.inputs:
        ops.verify_chain_greedy(drafts_of(batch), choices, **batch.outputs)
        return
    names = ("candidates", "retrive_index", "retrive_next_token", "retrive_next_sibling")
    tree = {name: batch.inputs[name] for name in names}
    ops.verify_tree_greedy(**tree, target_predict=choices, **batch.outputs)


def reject_from_logits(batch: Batch) -> None:
    inputs = batch.inputs
    coins = torch.rand(drafts_of(batch).shape, device=inputs["target_logits"].device)
    reject(batch, target_probs(inputs), inputs["draft_probs"], coins)


def reject_from_probs(batch: Batch) -> None:
    inputs = batch.inputs
    draft, coins = inputs["draft_probs"], inputs["uniform_samples"][:, :NUM_STEPS]
    # A tree that is a chain; its op's coins are compared with the target's probability alone.
    draft = None if "candidates" in inputs else draft
    reject(batch, inputs["target_probs"], draft, coins)


def block_from_probs(batch: Batch) -> None:
    """Block verification: the last position that passes counts."""
    inputs, drafts = batch.inputs, drafts_of(batch)
    target, draft = inputs["target_probs"], inputs["draft_probs"]
    p, q = (probs[:, :NUM_STEPS].gather(2, drafts[..., None])[..., 0] for probs in (target, draft))
    ratios = [torch.ones_like(p[:, 0])]
    for step in range(NUM_STEPS):
        ratios.append((ratios[-1] * p[:, step] / q[:, step]).clamp_max(1))
    ratio = torch.stack(ratios, 1)
    between = ratio[:, 1:-1, None] * target[:, 1:-1] - draft[:, 1:]
    rest = between.clamp_min_(0).sum(-1)
    passing = torch.cat([rest / (rest + 1 - ratio[:, 1:-1]), ratio[:, -1:]], 1)
    steps = torch.arange(1, WIDTH, device=p.device)
    accepted = torch.where(inputs["uniform_samples"] < passing, steps, 0).amax(1)
    finish(batch, target, draft, accepted, ratio.gather(1, accepted[:, None]))


def reject(batch: Batch, target: Tensor, draft: Tensor | None, coins: Tensor) -> None:
    """Speculative sampling with the probabilities [B, D, V] and [B, S, V], or certain drafts."""
    drafts = drafts_of(batch)[..., None]
    p = target[:, :NUM_STEPS].gather(2, drafts)[..., 0]
    q = 1.0 if draft is None else draft.gather(2, drafts)[..., 0]
    accepted = (coins * q < p).cumprod(1).sum(1)
    finish(batch, target, draft, accepted)


def finish(
    batch: Batch,
    target: Tensor,
    draft: Tensor | None,
    accepted: Tensor,
    ratio: Tensor | float = 1.0,
) -> None:
    """Draws the last token from what is left at the first rejected draft; writes the outputs."""

    def row(probs: Tensor) -> Tensor:
        at = accepted.clamp_max(probs.size(1) - 1)
        return probs.gather(1, at[:, None, None].expand(-1, 1, probs.size(2)))[:, 0]

    left = row(target)
    drafts = drafts_of(batch)
    is_rejected = (accepted < NUM_STEPS)[:, None]
    if draft is not None:
        left = torch.where(is_rejected, (ratio * left - row(draft)).clamp_min_(0), left)
    else:
        token = drafts.gather(1, accepted.clamp_max(NUM_STEPS - 1)[:, None])
        left = torch.where(is_rejected, left.scatter(1, token, 0.0), left)
    bonus = draw(left)
    outputs = batch.outputs
    places = torch.arange(WIDTH, device=accepted.device)
    padded = torch.nn.functional.pad(drafts, (0, 1))
    tokens = torch.where(places < accepted[:, None], padded, -1)
    tokens.scatter_(1, accepted[:, None], bonus[:, None])
    outputs["accept_token_num"].copy_(accepted)
    outputs["accept_lens"].copy_(accepted + 1)
    outputs["bonus_tokens"].copy_(bonus)
    if "predicts" in outputs:
        outputs["predicts"].copy_(tokens.flatten())
        is_path = places <= accepted[:, None]
        outputs["accept_index"].copy_(torch.where(is_path, batch.inputs["retrive_index"], -1))
    else:
        outputs["output_token_ids"].copy_(tokens)


def softmax_and_op(shape: SampledShape, fused: SampledFused):
    def launch(batch: Batch) -> None:
        inputs = batch.inputs
        coins = torch.rand(shape.batch_size, WIDTH, device=shape.device)
        ops.verify_chain_sampling(
            inputs["draft_probs"],
            inputs["draft_tokens"].int(),
            target_probs(inputs),
            coins[:, :NUM_STEPS],
            coins[:, NUM_STEPS],
            **batch.outputs,
            workspace=fused.workspace,
        )

    return launch
