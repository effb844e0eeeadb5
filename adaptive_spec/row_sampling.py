"""How each row of a batch chooses its tokens: the sampling arguments of the verify ops, by row.

Which random numbers a token gets is settled here, for everything that chooses one. The token behind
position p of a sequence is chosen with the noise of (the request's seed, p), whoever chooses it:

- prefill of L tokens, whose last row is at L - 1, with L - 1;
- verification, row i behind ``seq_lens`` tokens in the cache, with ``seq_lens + i``;
- the draft model, which proposes the token behind the same position, with the same number.

So a token depends on the seed and on what is before it in the sequence, and on nothing else: not on
S, on what was drafted, on the batch, or on how often the request was retracted. And where draft and
target have similar logits they choose the same token, since they see the same noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from adaptive_spec.engine.sampling import SamplingParams

__all__ = ["RowSampling"]


@dataclass(frozen=True)
class RowSampling:
    """Per-row arguments of `ops.verify_chain_sampling_from_logits`. All zero is a greedy row."""

    seeds: torch.Tensor  # int64 [P]
    temperature: torch.Tensor  # float32 [P]
    top_k: torch.Tensor  # int32 [P]
    top_p: torch.Tensor  # float32 [P]
    min_p: torch.Tensor  # float32 [P]
    error_mask: torch.Tensor  # bool [P]; set by the op where a row's logits were bad, never unset

    @classmethod
    def allocate(cls, num_rows: int, device: torch.device | str) -> RowSampling:
        def zeros(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(num_rows, dtype=dtype, device=device)

        return cls(
            seeds=zeros(torch.int64),
            temperature=zeros(torch.float32),
            top_k=zeros(torch.int32),
            top_p=zeros(torch.float32),
            min_p=zeros(torch.float32),
            error_mask=zeros(torch.bool),
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(vars(self).values())

    def rows(self, start: int, end: int) -> RowSampling:
        """Views of rows ``start`` to ``end - 1``."""
        return RowSampling(*(tensor[start:end] for tensor in self.tensors))

    def write(self, row: int, params: SamplingParams) -> None:
        """Fill in ``row`` for a new request; ``params`` must have a seed."""
        for name in ("temperature", "top_k", "top_p", "min_p"):
            getattr(self, name)[row] = getattr(params, name)
        self.seeds[row] = params.seed
        self.error_mask[row] = False

    @property
    def choice(self) -> dict[str, torch.Tensor]:
        """Those of the op's arguments that say what is chosen."""
        return {
            "seeds": self.seeds,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
        }
