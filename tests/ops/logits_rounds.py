"""Rounds of the ops that sample from logits, and the laws that they should follow, in float64."""

from __future__ import annotations

import dataclasses

import adaptive_spec_ext
import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Rule:
    """How all requests of a batch are sampled."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def arguments(self, batch_size: int) -> dict[str, Tensor]:
        dtypes = {"top_k": torch.int32}
        return {
            name: torch.full((batch_size,), value, dtype=dtypes.get(name, torch.float32))
            for name, value in dataclasses.asdict(self).items()
        }

    def kept(self, logits: Tensor) -> Tensor:
        """Which tokens the filters leave, of logits [..., V]."""
        ranked, order = logits.double().sort(-1, descending=True)
        probs = self.unfiltered(logits).gather(-1, order)
        # Where a token's equals begin.
        num_above = torch.searchsorted(-ranked, -ranked)
        keeps = probs >= self.min_p * probs[..., :1]
        if self.top_p < 1:
            keeps &= (probs.cumsum(-1) - probs).gather(-1, num_above) < self.top_p
        if self.top_k > 0:
            keeps &= num_above < self.top_k
        return torch.zeros_like(keeps).scatter_(-1, order, keeps)

    def unfiltered(self, logits: Tensor) -> Tensor:
        return (logits.double() / self.temperature).softmax(-1)

    def probs(self, logits: Tensor) -> Tensor:
        left = self.unfiltered(logits) * self.kept(logits)
        return left / left.sum(-1, keepdim=True)


def verify_chains(
    drafts: Tensor, logits: Tensor, seeds: Tensor, positions: Tensor, **arguments
) -> Tensor:
    """The emitted tokens, int32 [B, S + 1], -1 behind them."""
    batch_size, num_steps = drafts.shape
    output = torch.empty(batch_size, num_steps + 1, dtype=torch.int32)
    adaptive_spec_ext.verify_chain_sampling_from_logits(
        drafts,
        logits,
        seeds,
        positions,
        output,
        torch.empty(batch_size, dtype=torch.int32),
        **arguments,
    )
    return output


def sample(logits: Tensor, seeds: Tensor, positions: Tensor, **arguments) -> Tensor:
    """Plain decoding: the token [B] that each row of logits [B, V] chooses."""
    no_drafts = torch.empty(len(logits), 0, dtype=torch.long)
    return verify_chains(no_drafts, logits[:, None], seeds, positions, **arguments)[:, 0].long()


def shared_noise_agreement(target: Tensor, draft: Tensor) -> Tensor:
    """P(target and draft choose token i, both), from [..., V] distributions raced by one noise.

    Token i wins both races if its time is below those of all others j even at the larger of the two
    speeds that j has against it: an exponential race against the sum of these (Daliri et al. 2024).
    """
    speeds = torch.maximum(
        target[..., None, :] / target[..., :, None], draft[..., None, :] / draft[..., :, None]
    )
    possible = (target > 0) & (draft > 0)
    return torch.where(possible, 1 / speeds.nan_to_num(0.0, posinf=torch.inf).sum(-1), 0.0)
