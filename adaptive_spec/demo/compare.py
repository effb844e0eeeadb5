"""Are the outputs of all modes the same, and is every difference a tie that rounding decided?

In float32 the same logits come out a little different from matrix products of different shapes, so
where the target's two best tokens are nearly equal two modes may go different ways, and stay apart
from there. Each first difference is therefore judged by the target itself, in float64 and without
a cache: both tokens must be within `MAX_TIE_GAP` of the best there. Anything else would be a token
that the target cannot have chosen. For a request that samples, the best is that of its noisy
logits, among the tokens that its top-p keeps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from adaptive_spec.engine.sampling import GREEDY, SamplingParams
from adaptive_spec.noise_ref import Kind, gumbel, noise_words

if TYPE_CHECKING:
    from adaptive_spec.engine.llama import LlamaForCausalLM
    from adaptive_spec.engine.request import Request

MAX_TIE_GAP = 1e-4


@dataclass(frozen=True)
class Difference:
    """The first token at which a mode left the reference's output."""

    mode: str
    phase: int
    request: int  # within the phase
    position: int  # within the output
    reference_token: int
    token: int
    gap: float  # of the worse of the two to the best, in units of a logit

    @property
    def is_tie(self) -> bool:
        return self.gap < MAX_TIE_GAP


@dataclass
class Comparison:
    """All requests of all modes against the reference mode's, over their common length."""

    reference: str
    num_outputs: int = 0
    num_tokens: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def identical_share(self) -> float:
        return 1 - len(self.differences) / self.num_outputs if self.num_outputs else 1.0

    @property
    def lossless(self) -> bool:
        return all(difference.is_tie for difference in self.differences)


class TieJudge:
    """Asks the target in float64 how close tokens are to its choice."""

    def __init__(self, target: LlamaForCausalLM) -> None:
        # On the CPU whatever the device: it is asked rarely, and about single sequences.
        self._target = copy.deepcopy(target).double().cpu()

    @torch.inference_mode()
    def gap(
        self, token_ids: Sequence[int], tokens: Sequence[int], sampling: SamplingParams = GREEDY
    ) -> float:
        """How far the worst of ``tokens`` lies below the best one after ``token_ids``.

        ``sampling``: temperature, top-p and seed; other filters are not looked at. A token that
        top-p does not keep is infinitely far; where rounding may have kept it or not, it counts as
        kept if it is among ``tokens`` and as dropped if it would beat them.
        """
        ids = torch.tensor([list(token_ids)])
        hidden = self._target(ids, torch.arange(ids.size(1)).unsqueeze(0))
        logits = self._target.logits(hidden[0, -1])
        chosen = list(tokens)
        if sampling.is_greedy:
            return float(logits.max() - logits[chosen].min())
        above = _mass_above(logits / sampling.temperature)
        if bool((above[chosen] >= sampling.top_p + MAX_TIE_GAP).any()):
            return math.inf
        words = noise_words(sampling.seed, len(token_ids) - 1, 0, Kind.CHOICE, len(logits))
        noise = torch.from_numpy(gumbel(words)).double() * math.log(2)
        noisy = logits + sampling.temperature * noise
        is_kept = (above < sampling.top_p - MAX_TIE_GAP) | (above == 0)
        return max(0.0, float(noisy[is_kept].max() - noisy[chosen].min()))


def _mass_above(scores: torch.Tensor) -> torch.Tensor:
    """The probability of all tokens that are likelier, for each token of a row [V]."""
    ranked, order = scores.softmax(-1).sort(descending=True)
    above = torch.empty_like(ranked)
    above[order] = ranked.cumsum(-1) - ranked
    return above


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first unequal element within the common length."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)


def compare_outputs(
    outputs: dict[str, list[list[Request]]], reference: str, judge: TieJudge
) -> Comparison:
    """Compare every mode in ``outputs`` (by phase, then request) with the mode ``reference``.

    Modes are at different places when a phase ends, so the last requests have unequal lengths and
    are compared as far as both got.
    """
    comparison = Comparison(reference)
    for mode, phases in outputs.items():
        if mode == reference:
            continue
        for phase, requests in enumerate(phases):
            pairs = zip(outputs[reference][phase], requests, strict=False)
            for index, (expected, got) in enumerate(pairs):
                want, have = expected.output_ids, got.output_ids
                position = first_difference(want, have)
                comparison.num_outputs += 1
                if position is None:
                    comparison.num_tokens += min(len(want), len(have))
                    continue
                comparison.num_tokens += position
                tokens = (want[position], have[position])
                prefix = expected.prompt_ids + want[:position]
                gap = judge.gap(prefix, tokens, expected.sampling)
                comparison.differences.append(
                    Difference(mode, phase, index, position, *tokens, gap)
                )
    return comparison
