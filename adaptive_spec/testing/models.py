"""Small models whose draft agrees with the target some of the time, and slow references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from adaptive_spec import ops
from adaptive_spec.engine.draft import EagleDraft
from adaptive_spec.engine.llama import LlamaConfig, LlamaForCausalLM
from adaptive_spec.engine.loading import ModelPair
from adaptive_spec.engine.sampling import GREEDY, SamplingParams
from adaptive_spec.engine.tokenizer import Tokenizer


def agreeing_pair(
    disagreement: float = 0.5,
    *,
    seed: int = 0,
    vocab_size: int = 64,
    hidden_size: int = 32,
    max_position_embeddings: int = 512,
    dtype: torch.dtype = torch.float64,
    tokenizer: Tokenizer | None = None,
) -> ModelPair:
    """A random two-layer target, and a draft that is a copy of its first layer.

    The second layer's output is scaled by ``disagreement``: what it adds is what the draft cannot
    know. Mean accepted drafts at S = 7, over random prompts: about 3.5 at 0.3, 0.6 at 1, 0.2 at 2,
    and very different from prompt to prompt, so that adaptive runs have something to adapt to.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=max_position_embeddings,
    )
    generator = torch.Generator().manual_seed(seed)
    target = LlamaForCausalLM(config)
    draft = EagleDraft(replace(config, num_hidden_layers=1), target)
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, parameter.size(1) ** -0.5, generator=generator)
        target.embedding.normal_(generator=generator)
        for part in (target.layers[1].out, target.layers[1].down):
            part.weight *= disagreement
        draft.layer.load_state_dict(target.layers[0].state_dict())
        # The token alone: the draft then computes the target's first layer.
        draft.fc.weight.zero_()
        draft.fc.weight[:, :hidden_size] = torch.eye(hidden_size)
    for model in (target, draft):
        model.to(dtype).eval().requires_grad_(False)
    return ModelPair(target, draft, tokenizer)


@torch.inference_mode()
def greedy_reference(
    target: LlamaForCausalLM, prompt_ids: Sequence[int], max_new_tokens: int
) -> list[int]:
    """Plain greedy decoding that runs the whole sequence anew for each token, without a cache."""
    ids = list(prompt_ids)
    for _ in range(max_new_tokens):
        ids.append(int(next_logits(target, ids).argmax()))
    return ids[len(prompt_ids) :]


@torch.inference_mode()
def sampled_reference(
    target: LlamaForCausalLM,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    sampling: SamplingParams,
) -> list[int]:
    """Plain sampling with a seed, as `greedy_reference`: alone, token by token, without a cache."""
    ids = list(prompt_ids)
    for _ in range(max_new_tokens):
        ids.append(sampled_token(next_logits(target, ids), len(ids) - 1, sampling))
    return ids[len(prompt_ids) :]


def sampled_token(logits: torch.Tensor, position: int, sampling: SamplingParams) -> int:
    """What a row of ``logits`` [V] at ``position`` of its sequence chooses; needs a seed."""
    token = torch.zeros(1, dtype=torch.int64)
    ops.verify_chain_sampling_from_logits(
        torch.zeros(1, 0, dtype=torch.int64),
        logits[None, None],
        torch.tensor([sampling.seed]),
        torch.tensor([position]),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        torch.tensor([sampling.temperature], dtype=torch.float32),
        torch.tensor([sampling.top_k], dtype=torch.int32),
        torch.tensor([sampling.top_p], dtype=torch.float32),
        torch.tensor([sampling.min_p], dtype=torch.float32),
        bonus_tokens=token,
    )
    return int(token)


@torch.inference_mode()
def next_logits(target: LlamaForCausalLM, token_ids: Sequence[int]) -> torch.Tensor:
    """The target's logits [V] behind ``token_ids``, by a pass over all of them."""
    inputs = torch.tensor([list(token_ids)])
    hidden = target(inputs, torch.arange(inputs.size(1)).unsqueeze(0))
    return target.logits(hidden[0, -1])


@torch.inference_mode()
def draft_reference(
    pair: ModelPair, token_ids: Sequence[int], num_steps: int, sampling: SamplingParams = GREEDY
) -> list[int]:
    """What the draft proposes after ``token_ids``, computed anew from the whole sequence."""
    inputs = torch.tensor([list(token_ids)])
    positions = torch.arange(inputs.size(1)).unsqueeze(0)
    # Position p takes token p + 1 and the target's hidden state of p.
    hidden = pair.target(inputs, positions)[:, :-1]
    tokens, proposals = inputs[:, 1:], []
    for _ in range(num_steps):
        length = tokens.size(1)
        out = pair.draft(tokens, hidden, positions[:, :length])
        # `tokens` lack the sequence's first.
        proposals.append(sampled_token(pair.draft.logits(out[0, -1]), length, sampling))
        tokens = torch.cat([tokens, torch.tensor([proposals[-1:]])], dim=1)
        hidden = torch.cat([hidden, out[:, -1:]], dim=1)
        positions = torch.arange(tokens.size(1)).unsqueeze(0)
    return proposals
