"""A Llama-family decoder in plain torch, arranged for small batches.

Speculative decoding spends its time in forward passes of one to a few tokens per request, where
the number of operations matters as much as their size. So everything that does not depend on the
layer (rotary factors, mask, views of the cache) is computed once per pass, query/key/value and
gate/up are one matrix each, and the grouped query heads of a key head are folded into the sequence
dimension, so that attention reads the cache in place.

Nothing in a pass depends on values on the device: no synchronisation and no data-dependent
shape, which is what lets a pass be captured in a graph.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .kv_cache import KVCache


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of a decoder. Fields have the names of Hugging Face's ``config.json``.

    ``qkv_bias``, ``o_bias`` and ``mlp_bias`` say which projections have a bias, ``qk_norm`` whether
    queries and keys are normalised per head before rotation (Qwen3). ``rope_scaling`` is ``None``
    or a mapping with ``rope_type`` "linear" or "llama3" and that type's parameters.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = field(default=None)
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: expected an integer >= 1, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads: expected a divisor of num_attention_heads "
                f"({self.num_attention_heads}), got {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even number, got {self.head_dim}")
        rope_inverse_frequencies(self)


def rope_inverse_frequencies(config: LlamaConfig) -> torch.Tensor:
    """Rotation per position of each pair of head dimensions, float64 ``[head_dim / 2]``."""
    # On the CPU whatever the default device, which is "meta" while a model is being loaded.
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device="cpu")
    exponents = pairs / config.head_dim
    inverse = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return inverse
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return inverse
    if kind not in ("linear", "llama3"):
        raise ValueError(
            f"rope_scaling: expected rope_type 'default', 'linear' or 'llama3', got {kind!r}"
        )
    factor = _scaling_number(scaling, "factor")
    if kind == "linear":
        return inverse / factor
    # Long wavelengths are stretched by `factor`, short ones kept, and those between interpolated by
    # how many turns they make within the original context.
    low = _scaling_number(scaling, "low_freq_factor")
    high = _scaling_number(scaling, "high_freq_factor")
    turns = _scaling_number(scaling, "original_max_position_embeddings") * inverse / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return inverse * (keep + (1.0 - keep) / factor)


def _scaling_number(scaling: dict[str, Any], key: str) -> float:
    value = scaling.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"rope_scaling: expected a number > 0 under {key!r}, got {value!r}")
    return float(value)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension."""
    if x.dtype in (torch.float16, torch.bfloat16):
        return F.rms_norm(x, (x.size(-1),), weight, eps)
    # On CPUs torch's own function is a dozen small operations; these five take half the time.
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square()
    scale = torch.rsqrt(scale / x.size(-1) + eps)
    return x * scale * weight


class RotaryTable:
    """Cosines and signed sines of every position, grown when a longer cache is used.

    The second half of a rotated vector is ``x2 * cos + x1 * sin`` and the first
    ``x1 * cos - x2 * sin``; with the sign in the table both are ``x * cos + rolled(x) * sin``.
    """

    def __init__(self, config: LlamaConfig):
        self._inverse = rope_inverse_frequencies(config)
        self._length = min(config.max_position_embeddings, 4096)
        self._tables: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def lookup(
        self, positions: torch.Tensor, length: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(cos, sin)``, each ``[positions.numel(), 1, head_dim]``; positions < ``length``."""
        key = (dtype, positions.device)
        table = self._tables.get(key)
        if table is None or table.size(0) < length:
            table = self._build(max(length, self._length)).to(dtype).to(positions.device)
            self._tables[key] = table
        cos, sin = table.index_select(0, positions.reshape(-1)).unsqueeze(1).chunk(2, dim=-1)
        return cos, sin

    def _build(self, length: int) -> torch.Tensor:
        steps = torch.arange(length, dtype=torch.float64, device="cpu")
        angles = steps[:, None] * self._inverse
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos, -sin, sin], dim=-1)


@dataclass
class PassContext:
    """What all layers of one forward pass share. Built by `make_context`."""

    batch: int
    length: int
    cos: torch.Tensor
    sin: torch.Tensor
    # The rest is None without a cache.
    # [batch, 1, length * group, kv_len], 0 where a key may be read and -inf elsewhere.
    mask: torch.Tensor | None = None
    # Per layer [batch, num_kv_heads, kv_len, head_dim].
    keys: tuple[torch.Tensor, ...] = ()
    values: tuple[torch.Tensor, ...] = ()
    # Per layer [num_rows, max_len, 2 * num_kv_heads * head_dim], and where to write in it.
    entries: tuple[torch.Tensor, ...] = ()
    where: tuple[torch.Tensor, torch.Tensor] | None = None


def make_context(
    config: LlamaConfig,
    rotary: RotaryTable,
    positions: torch.Tensor,
    dtype: torch.dtype,
    cache: KVCache | None,
    kv_len: int | None,
) -> PassContext:
    """Checks a pass's arguments and computes what its layers share.

    ``positions`` int64 ``[batch, length]``; ``kv_len`` bounds them (every position < kv_len).
    """
    batch, length = positions.shape
    if cache is None:
        cos, sin = rotary.lookup(positions, length, dtype)
        return PassContext(batch, length, cos, sin)
    if cache.k.dtype != dtype:
        raise TypeError(f"cache: expected dtype {dtype} (the model's), got {cache.k.dtype}")
    shape = (config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    got = (cache.num_layers, *cache.k.shape[3:])
    if got != shape:
        raise ValueError(
            f"cache: expected {shape} layers, key/value heads and head_dim (the model's), got {got}"
        )
    if batch > cache.num_rows:
        raise ValueError(f"cache: expected at least {batch} rows (the batch), got {cache.num_rows}")
    if kv_len is None:
        kv_len = cache.max_len
    if not 1 <= kv_len <= cache.max_len:
        raise ValueError(f"kv_len: expected 1..{cache.max_len} (the cache's length), got {kv_len}")
    cos, sin = rotary.lookup(positions, cache.max_len, dtype)
    steps = torch.arange(kv_len, device=positions.device)
    group = config.num_attention_heads // config.num_key_value_heads
    hidden = steps > positions.unsqueeze(-1)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    mask = mask.masked_fill_(hidden, float("-inf"))
    # A query's whole group shares its row of the mask.
    mask = mask.unsqueeze(2).expand(-1, -1, group, -1).reshape(batch, 1, length * group, kv_len)
    rows = torch.arange(batch, device=positions.device).unsqueeze(1).expand(batch, length)
    return PassContext(
        batch,
        length,
        cos,
        sin,
        mask,
        cache.k[:, :batch, :kv_len].transpose(2, 3).unbind(0),
        cache.v[:, :batch, :kv_len].transpose(2, 3).unbind(0),
        cache.entries,
        (rows.reshape(-1), positions.reshape(-1)),
    )


class DecoderLayer(nn.Module):
    """One layer over a flat batch ``[batch * length, hidden_size]``."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        d, f, hd = config.hidden_size, config.intermediate_size, config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.group = self.num_heads // self.num_kv_heads
        self.input_norm = nn.Parameter(torch.ones(d))
        self.qkv = nn.Linear(d, (self.num_heads + 2 * self.num_kv_heads) * hd, config.qkv_bias)
        self.out = nn.Linear(self.num_heads * hd, d, config.o_bias)
        self.mlp_norm = nn.Parameter(torch.ones(d))
        self.gate_up = nn.Linear(d, 2 * f, config.mlp_bias)
        self.down = nn.Linear(f, d, config.mlp_bias)
        if config.qk_norm:
            self.q_norm = nn.Parameter(torch.ones(hd))
            self.k_norm = nn.Parameter(torch.ones(hd))

    def forward(self, x: torch.Tensor, context: PassContext, index: int) -> torch.Tensor:
        """``x`` ``[batch * length, hidden_size]``; writes this layer's entries of the cache."""
        return self.finish(x, self.attend(self.project(x, context), context, index))

    def project(self, x: torch.Tensor, context: PassContext) -> torch.Tensor:
        """Rotated queries and keys, and values: ``[n, heads + 2 * kv_heads, head_dim]``."""
        c, n = self.config, x.size(0)
        heads, rotated = self.num_heads, self.num_heads + self.num_kv_heads
        qkv = self.qkv(rms_norm(x, self.input_norm, c.rms_norm_eps))
        qkv = qkv.view(n, rotated + self.num_kv_heads, c.head_dim)
        if c.qk_norm:
            q = rms_norm(qkv[:, :heads], self.q_norm, c.rms_norm_eps)
            k = rms_norm(qkv[:, heads:rotated], self.k_norm, c.rms_norm_eps)
            qkv = torch.cat([q, k, qkv[:, rotated:]], dim=1)
        qk = qkv[:, :rotated]
        turned = qk.roll(c.head_dim // 2, -1)
        # In place: values stay beside the keys, ready to be written to the cache as one block.
        qk.mul_(context.cos).addcmul_(turned, context.sin)
        return qkv

    def attend(self, qkv: torch.Tensor, context: PassContext, index: int) -> torch.Tensor:
        """Attention of the projected tokens, ``[n, num_heads * head_dim]``."""
        batch, length, heads = context.batch, context.length, self.num_heads
        n, _, hd = qkv.shape
        if context.mask is None:
            q, k, v = (
                part.view(batch, length, -1, hd).transpose(1, 2)
                for part in qkv.split([heads, self.num_kv_heads, self.num_kv_heads], dim=1)
            )
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2).reshape(n, heads * hd)
        context.entries[index].index_put_(context.where, qkv[:, heads:].flatten(1))
        q = qkv[:, :heads].view(batch, length, self.num_kv_heads, self.group, hd)
        q = q.transpose(1, 2).reshape(batch, self.num_kv_heads, length * self.group, hd)
        out = F.scaled_dot_product_attention(
            q, context.keys[index], context.values[index], attn_mask=context.mask
        )
        out = out.view(batch, self.num_kv_heads, length, self.group, hd)
        return out.transpose(1, 2).reshape(n, heads * hd)

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output from its input and its attention: projection, residuals, MLP."""
        x = x + self.out(attended)
        gate, up = self.gate_up(rms_norm(x, self.mlp_norm, self.config.rms_norm_eps)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class LlamaForCausalLM(nn.Module):
    """Decoder with embedding and LM head (tied or not).

    Source: the architecture of Llama 2/3 (arXiv 2307.09288, 2407.21783), with the options of Qwen2
    (biases) and Qwen3 (query/key norms); `adaptive_spec.engine.loading` reads Hugging Face weights.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        if not config.tie_word_embeddings:
            self.head = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.rotary = RotaryTable(config)

    @property
    def head_weight(self) -> torch.Tensor:
        """LM head ``[vocab_size, hidden_size]``; the embedding itself when tied."""
        return self.embedding if self.config.tie_word_embeddings else self.head

    def make_cache(self, num_rows: int, max_len: int) -> KVCache:
        """An empty cache for this model, of its dtype and device."""
        c, w = self.config, self.embedding
        return KVCache(
            c.num_hidden_layers,
            num_rows,
            max_len,
            c.num_key_value_heads,
            c.head_dim,
            w.dtype,
            w.device,
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        cache: KVCache | None = None,
        kv_len: int | None = None,
    ) -> torch.Tensor:
        """Hidden states after the final norm, ``[batch, length, hidden_size]``.

        ``input_ids`` and ``positions`` int64 ``[batch, length]``. With a cache, batch row b uses
        cache row b: its keys and values are written at ``positions`` (mutating the cache), then
        keys 0..kv_len-1 are read as far as they are not after the query's own position. ``kv_len``
        is known to the host and bounds the positions (None: the cache's length); a position outside
        the cache is an IndexError on the CPU, a device assertion elsewhere. Without a cache the
        rows are whole sequences at positions 0..length-1 under a causal mask.
        """
        check_tokens(input_ids, positions)
        context = make_context(
            self.config, self.rotary, positions, self.embedding.dtype, cache, kv_len
        )
        x = F.embedding(input_ids.reshape(-1), self.embedding)
        for index, layer in enumerate(self.layers):
            x = layer(x, context, index)
        return rms_norm(x, self.norm, self.config.rms_norm_eps).view(*input_ids.shape, -1)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """``[..., hidden_size]`` to ``[..., vocab_size]``, in the model's dtype.

        ``out``: contiguous tensor of that shape to write to instead of a new one.
        """
        if out is None:
            return F.linear(hidden, self.head_weight)
        torch.mm(hidden.flatten(0, -2), self.head_weight.t(), out=out.flatten(0, -2))
        return out


def check_tokens(input_ids: torch.Tensor, positions: torch.Tensor) -> None:
    """Raises unless both are int64 ``[batch, length]`` of the same, non-empty shape."""
    for name, tensor in (("input_ids", input_ids), ("positions", positions)):
        if tensor.dtype != torch.int64:
            raise TypeError(f"{name}: expected dtype torch.int64, got {tensor.dtype}")
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(
            f"input_ids: expected shape [batch >= 1, length >= 1], got {list(input_ids.shape)}"
        )
    if positions.shape != input_ids.shape:
        raise ValueError(
            f"positions: expected shape {list(input_ids.shape)} (that of input_ids), "
            f"got {list(positions.shape)}"
        )
