"""Reading and writing models as Hugging Face directories.

A target directory holds ``config.json`` and ``model.safetensors`` (or shards with
``model.safetensors.index.json``), a draft directory the same for the one-layer draft, and a pair
directory ``target/``, ``draft/`` and ``tokenizer.json``. Separate query/key/value and gate/up
matrices are joined on reading and split again on writing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from .draft import EagleDraft
from .llama import DecoderLayer, LlamaConfig, LlamaForCausalLM
from .tokenizer import Tokenizer

DRAFT_MODEL_TYPE = "adaptive_spec_eagle"


@dataclass
class ModelPair:
    """A target, its draft and their tokenizer (None for random models)."""

    target: LlamaForCausalLM
    draft: EagleDraft
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...] = ()


def load_llama(
    directory: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> LlamaForCausalLM:
    """Loads a decoder of model type llama, mistral, qwen2 or qwen3, else raises ValueError."""
    directory = Path(directory)
    config = read_llama_config(directory)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tensors = _Tensors(directory)
    state = {
        "embedding": tensors.take("model.embed_tokens.weight"),
        "norm": tensors.take("model.norm.weight"),
    }
    if config.tie_word_embeddings:
        tensors.discard("lm_head.weight")
    else:
        state["head"] = tensors.take("lm_head.weight")
    for index in range(config.num_hidden_layers):
        state |= _take_layer(tensors, config, f"model.layers.{index}.", f"layers.{index}.")
        tensors.discard(f"model.layers.{index}.self_attn.rotary_emb.inv_freq")
    return _fill(model, state, tensors, dtype, device)


def load_draft(
    directory: str | Path,
    target: LlamaForCausalLM,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> EagleDraft:
    """Loads a draft for ``target``, by default with the target's dtype and device."""
    directory = Path(directory)
    raw = _read_json(directory / "config.json")
    if raw.get("model_type") != DRAFT_MODEL_TYPE:
        raise ValueError(
            f"{directory / 'config.json'}: expected model_type {DRAFT_MODEL_TYPE!r}, "
            f"got {raw.get('model_type')!r}"
        )
    config = _parse_config(raw, directory / "config.json")
    try:
        with torch.device("meta"):
            draft = EagleDraft(config, target)
    except ValueError as error:
        raise ValueError(f"{directory / 'config.json'}: {error}") from error
    tensors = _Tensors(directory)
    state = {"fc.weight": tensors.take("fc.weight"), "norm": tensors.take("norm.weight")}
    state |= _take_layer(tensors, config, "layers.0.", "layer.")
    weight = target.embedding
    return _fill(draft, state, tensors, dtype or weight.dtype, device or weight.device)


def load_pair(
    directory: str | Path,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> ModelPair:
    """Loads ``target/``, ``draft/`` and ``tokenizer.json`` of one directory."""
    directory = Path(directory)
    target = load_llama(directory / "target", dtype, device)
    draft = load_draft(directory / "draft", target)
    tokenizer = Tokenizer.from_file(directory / "tokenizer.json")
    if tokenizer.vocab_size > target.config.vocab_size:
        raise ValueError(
            f"{directory / 'tokenizer.json'}: expected at most {target.config.vocab_size} tokens "
            f"(the target's vocabulary), got {tokenizer.vocab_size}"
        )
    return ModelPair(target, draft, tokenizer, read_eos_token_ids(directory / "target"))


def random_pair(
    seed: int = 0,
    *,
    vocab_size: int = 64,
    hidden_size: int = 32,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    max_position_embeddings: int = 512,
    dtype: torch.dtype = torch.float32,
) -> ModelPair:
    """A small random target and draft, the same for the same arguments; for tests."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=hidden_size // num_attention_heads,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=True,
    )
    generator = torch.Generator().manual_seed(seed)
    target = LlamaForCausalLM(config)
    draft = EagleDraft(replace(config, num_hidden_layers=1), target)
    with torch.no_grad():
        for model in (target, draft):
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(0.0, parameter.size(1) ** -0.5, generator=generator)
    for model in (target, draft):
        model.to(dtype).eval().requires_grad_(False)
    return ModelPair(target, draft, None)


def save_llama(
    model: LlamaForCausalLM,
    directory: str | Path,
    dtype: torch.dtype = torch.float16,
    eos_token_id: int | None = None,
) -> None:
    """Writes ``config.json`` and ``model.safetensors`` that Hugging Face's Llama can read too."""
    config = model.config
    # Among the options only those of plain Llama are written under its model type.
    if config.qk_norm or config.qkv_bias != config.o_bias:
        raise ValueError("model: expected plain Llama (no query/key norm, biases on all or none)")
    tensors = {"model.embed_tokens.weight": model.embedding, "model.norm.weight": model.norm}
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = model.head
    for index, layer in enumerate(model.layers):
        tensors |= _split_layer(layer, f"model.layers.{index}.")
    raw = _config_json(config, dtype) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "eos_token_id": eos_token_id,
        "bos_token_id": eos_token_id,
    }
    _write(Path(directory), raw, tensors, dtype)


def save_draft(
    draft: EagleDraft, directory: str | Path, dtype: torch.dtype = torch.float16
) -> None:
    """Writes the draft's own weights; embedding and head stay with the target."""
    tensors = {"fc.weight": draft.fc.weight, "norm.weight": draft.norm}
    tensors |= _split_layer(draft.layer, "layers.0.")
    raw = _config_json(draft.config, dtype) | {
        "architectures": ["EagleDraft"],
        "model_type": DRAFT_MODEL_TYPE,
    }
    _write(Path(directory), raw, tensors, dtype)


def read_llama_config(directory: str | Path) -> LlamaConfig:
    """The shape described by ``config.json``; ValueError for what this engine does not run."""
    path = Path(directory) / "config.json"
    raw = _read_json(path)
    supported = ("llama", "mistral", "qwen2", "qwen3")
    if raw.get("model_type") not in supported:
        raise ValueError(
            f"{path}: expected model_type one of {', '.join(supported)}, "
            f"got {raw.get('model_type')!r}"
        )
    return _parse_config(raw, path)


def read_eos_token_ids(directory: str | Path) -> tuple[int, ...]:
    """End-of-text ids of ``generation_config.json`` if it names any, else of ``config.json``."""
    directory = Path(directory)
    for name in ("generation_config.json", "config.json"):
        if not (directory / name).is_file():
            continue
        value = _read_json(directory / name).get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list):
            return tuple(value)
    return ()


def _parse_config(raw: dict[str, Any], path: Path) -> LlamaConfig:
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"):
        if key not in raw:
            raise ValueError(f"{path}: expected the key {key!r}, found none")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"{path}: expected hidden_act 'silu', got {raw['hidden_act']!r}")
    if raw.get("quantization_config"):
        raise ValueError(f"{path}: quantization_config: quantized weights are not supported")
    kind = raw.get("model_type")
    # Qwen configs carry a window size even where the window is off.
    windowed = raw.get("use_sliding_window", kind == "mistral")
    if windowed and raw.get("sliding_window") is not None:
        raise ValueError(
            f"{path}: sliding_window: expected null (full attention), got {raw['sliding_window']}"
        )
    # transformers 5 writes base and scaling together, older versions separately.
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    attention_bias = bool(raw.get("attention_bias", False))
    try:
        return LlamaConfig(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_hidden_layers=raw.get("num_hidden_layers", 1),
            num_attention_heads=raw["num_attention_heads"],
            num_key_value_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
            rope_scaling=rope or None,
            max_position_embeddings=raw.get("max_position_embeddings", 2048),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or kind == "qwen2",
            o_bias=attention_bias and kind != "qwen2",
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=kind == "qwen3",
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _config_json(config: LlamaConfig, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


class _Tensors:
    """The tensors of a model directory, taken out one by one so that leftovers are noticed."""

    def __init__(self, directory: Path):
        single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
        if single.is_file():
            self.path, files = single, [single]
        elif index.is_file():
            shards = _read_json(index).get("weight_map")
            if not isinstance(shards, dict) or not shards:
                raise ValueError(f"{index}: expected an object under 'weight_map'")
            self.path, files = index, [directory / name for name in sorted(set(shards.values()))]
        else:
            raise ValueError(f"no model.safetensors or model.safetensors.index.json in {directory}")
        self._tensors: dict[str, torch.Tensor] = {}
        for file in files:
            if not file.is_file():
                raise ValueError(f"no such file: {file} (named by {self.path})")
            try:
                self._tensors |= load_file(file)
            except SafetensorError as error:
                raise ValueError(f"{file}: not a safetensors file: {error}") from error

    def take(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise ValueError(f"{self.path}: expected a tensor {name!r}, found none")
        return self._tensors.pop(name)

    def join(self, names: Iterable[str]) -> torch.Tensor:
        return torch.cat([self.take(name) for name in names])

    def discard(self, name: str) -> None:
        self._tensors.pop(name, None)

    def leftovers(self) -> list[str]:
        return sorted(self._tensors)


def _take_layer(
    tensors: _Tensors, config: LlamaConfig, source: str, prefix: str
) -> dict[str, torch.Tensor]:
    attention, mlp = source + "self_attn.", source + "mlp."
    state = {
        "input_norm": tensors.take(source + "input_layernorm.weight"),
        "mlp_norm": tensors.take(source + "post_attention_layernorm.weight"),
    }
    qkv = [attention + name for name in ("q_proj.", "k_proj.", "v_proj.")]
    gate_up = [mlp + name for name in ("gate_proj.", "up_proj.")]
    kinds = (
        ("weight", True, True, True),
        ("bias", config.qkv_bias, config.o_bias, config.mlp_bias),
    )
    for kind, has_qkv, has_out, has_mlp in kinds:
        if has_qkv:
            state["qkv." + kind] = tensors.join(name + kind for name in qkv)
        if has_out:
            state["out." + kind] = tensors.take(attention + "o_proj." + kind)
        if has_mlp:
            state["gate_up." + kind] = tensors.join(name + kind for name in gate_up)
            state["down." + kind] = tensors.take(mlp + "down_proj." + kind)
    if config.qk_norm:
        state["q_norm"] = tensors.take(attention + "q_norm.weight")
        state["k_norm"] = tensors.take(attention + "k_norm.weight")
    return {prefix + name: tensor for name, tensor in state.items()}


def _split_layer(layer: DecoderLayer, prefix: str) -> dict[str, torch.Tensor]:
    config, attention, mlp = layer.config, prefix + "self_attn.", prefix + "mlp."
    sizes = [
        config.num_attention_heads * config.head_dim,
        config.num_key_value_heads * config.head_dim,
        config.num_key_value_heads * config.head_dim,
    ]
    tensors = {
        prefix + "input_layernorm.weight": layer.input_norm,
        prefix + "post_attention_layernorm.weight": layer.mlp_norm,
    }
    for kind in ("weight", "bias"):
        if (joined := getattr(layer.qkv, kind)) is not None:
            parts = zip(("q_proj.", "k_proj.", "v_proj."), joined.split(sizes), strict=True)
            tensors |= {attention + name + kind: part for name, part in parts}
        if (out := getattr(layer.out, kind)) is not None:
            tensors[attention + "o_proj." + kind] = out
        if (joined := getattr(layer.gate_up, kind)) is not None:
            parts = zip(("gate_proj.", "up_proj."), joined.chunk(2), strict=True)
            tensors |= {mlp + name + kind: part for name, part in parts}
            tensors[mlp + "down_proj." + kind] = getattr(layer.down, kind)
    return tensors


def _fill(
    model: torch.nn.Module,
    state: dict[str, torch.Tensor],
    tensors: _Tensors,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Any:
    if tensors.leftovers():
        raise ValueError(
            f"{tensors.path}: tensors that the config does not account for: "
            f"{', '.join(tensors.leftovers()[:4])}"
        )
    for name, parameter in model.named_parameters():
        if state[name].shape != parameter.shape:
            raise ValueError(
                f"{tensors.path}: {name}: expected shape {list(parameter.shape)} from config.json, "
                f"got {list(state[name].shape)}"
            )
    state = {name: tensor.to(device=device, dtype=dtype) for name, tensor in state.items()}
    model.load_state_dict(state, assign=True)
    return model.eval().requires_grad_(False)


def _write(
    directory: Path, raw: dict[str, Any], tensors: dict[str, torch.Tensor], dtype: torch.dtype
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    copies = {name: t.detach().to("cpu", dtype).contiguous() for name, t in tensors.items()}
    save_file(copies, directory / "model.safetensors", metadata={"format": "pt"})
