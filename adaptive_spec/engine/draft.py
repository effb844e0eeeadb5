"""An EAGLE-style draft model: one decoder layer on top of the target's hidden states.

At position p the draft is given the token x[p+1] and the target's hidden state h[p] (the one whose
logits chose x[p+1]) and predicts x[p+2]. To draft further it takes its own output in place of the
target's next hidden state. It shares the target's embedding and LM head, so it is small and its
outputs live in the same space as the target's hidden states.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .kv_cache import KVCache
from .llama import (
    DecoderLayer,
    LlamaConfig,
    LlamaForCausalLM,
    RotaryTable,
    check_tokens,
    make_context,
    rms_norm,
)


class EagleDraft(nn.Module):
    """One-layer draft for ``target``, whose embedding and head it uses without owning them.

    Source: EAGLE (arXiv 2401.15077); trained on its own outputs as in HASS (arXiv 2408.15766).
    """

    def __init__(self, config: LlamaConfig, target: LlamaForCausalLM):
        super().__init__()
        for name in ("hidden_size", "vocab_size"):
            got, expected = getattr(config, name), getattr(target.config, name)
            if got != expected:
                raise ValueError(f"{name}: expected {expected} (the target's), got {got}")
        if config.num_hidden_layers != 1:
            raise ValueError(f"num_hidden_layers: expected 1, got {config.num_hidden_layers}")
        self.config = config
        # In a tuple, so that the target's parameters are not registered as the draft's.
        self._target = (target,)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = DecoderLayer(config)
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.rotary = RotaryTable(config)

    @property
    def target(self) -> LlamaForCausalLM:
        return self._target[0]

    def make_cache(self, num_rows: int, max_len: int) -> KVCache:
        """An empty cache for this model, of its dtype and device."""
        c, w = self.config, self.norm
        return KVCache(1, num_rows, max_len, c.num_key_value_heads, c.head_dim, w.dtype, w.device)

    def combine(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's input ``[batch * length, hidden_size]`` from tokens and hidden states."""
        embedded = F.embedding(input_ids.reshape(-1), self.target.embedding)
        return self.fc(torch.cat([embedded, hidden.reshape(embedded.shape)], dim=-1))

    def forward(
        self,
        input_ids: torch.Tensor,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache | None = None,
        kv_len: int | None = None,
    ) -> torch.Tensor:
        """Hidden states ``[batch, length, hidden_size]`` predicting what follows ``input_ids``.

        ``input_ids`` and ``positions`` int64 ``[batch, length]``, ``hidden``
        ``[batch, length, hidden_size]``: the token x[p+1] and the hidden state of p at position p.
        Cache and ``kv_len`` as in `LlamaForCausalLM.forward`; the cache is mutated.
        """
        check_tokens(input_ids, positions)
        expected = (*input_ids.shape, self.config.hidden_size)
        if hidden.shape != expected:
            raise ValueError(f"hidden: expected shape {list(expected)}, got {list(hidden.shape)}")
        if hidden.dtype != self.norm.dtype:
            raise TypeError(
                f"hidden: expected dtype {self.norm.dtype} (the draft's), got {hidden.dtype}"
            )
        context = make_context(self.config, self.rotary, positions, self.norm.dtype, cache, kv_len)
        x = self.layer(self.combine(input_ids, hidden), context, 0)
        return rms_norm(x, self.norm, self.config.rms_norm_eps).view(expected)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., hidden_size]`` to ``[..., vocab_size]`` by the target's head."""
        return self.target.logits(hidden)
