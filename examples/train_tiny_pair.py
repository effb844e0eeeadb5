"""Trains the tiny target/draft pair that ships with the repository, on CPUs, from what Python has.

Text comes from the standard library of the running interpreter (PSF-2.0): its modules as code, the
language reference in `pydoc_data` and the docstrings as prose. Files are held out by a hash of
their name and never trained on. Three stages: a byte-level BPE tokenizer; the target, with
next-token cross entropy; the draft, against the target's own distribution while it is fed its own
hidden states for several steps, which is how it runs when drafting.

The learning rate follows the share of the time budget used, so a run always ends on time, and two
runs with the same seed differ in as many steps as the machine managed.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from tiny_pair_text import Document, standard_library
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from adaptive_spec.engine.draft import EagleDraft
from adaptive_spec.engine.llama import LlamaConfig, LlamaForCausalLM, make_context, rms_norm
from adaptive_spec.engine.loading import load_draft, load_llama, save_draft, save_llama
from adaptive_spec.engine.tokenizer import Tokenizer

END_OF_TEXT = "<|endoftext|>"
app = typer.Typer(add_completion=False, no_args_is_help=True)
console = Console(width=110)

Out = Annotated[Path, typer.Option(help="Directory of the pair.")]
DEFAULT_OUT = Path(__file__).resolve().parents[1] / "adaptive_spec" / "tiny_pair"


# --- Batches ------------------------------------------------------------------------------------


def train_tokenizer(documents: list[Document], vocab_size: int, path: Path) -> Tokenizer:
    inner = HFTokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator((d.text for d in documents if d.kind != "tests"), trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    inner.save(str(path))
    return Tokenizer.from_file(path)


def encode_documents(documents: list[Document], tokenizer: Tokenizer) -> torch.Tensor:
    """All documents as one int64 sequence, each ended by the end-of-text token."""
    end = tokenizer.token_id(END_OF_TEXT)
    ids: list[int] = []
    for encoded in tokenizer.encode_batch([d.text for d in documents]):
        ids += encoded
        ids.append(end)
    return torch.tensor(ids)


class Windows:
    """Shuffled windows of a token sequence, each once per epoch, cut at a new offset each epoch."""

    def __init__(self, tokens: torch.Tensor, seed: int):
        self.tokens = tokens
        self.epochs = 0.0
        self._generator = torch.Generator().manual_seed(seed)
        self._starts: list[int] = []
        self._length = 0

    def take(self, count: int, length: int) -> torch.Tensor:
        if length != self._length:
            self._starts, self._length = [], length
        rows = []
        for _ in range(count):
            if not self._starts:
                offset = int(torch.randint(length, (1,), generator=self._generator))
                starts = torch.arange(offset, self.tokens.numel() - length + 1, length)
                order = torch.randperm(starts.numel(), generator=self._generator)
                self._starts = starts[order].tolist()
            start = self._starts.pop()
            rows.append(self.tokens[start : start + length])
            self.epochs += length / self.tokens.numel()
        return torch.stack(rows)


class Mixture:
    """Batches drawn from several `Windows`, the kind of each row by weight."""

    def __init__(self, parts: dict[str, tuple[float, Windows]], seed: int):
        self.parts = parts
        self._random = random.Random(seed)

    def take(self, rows: int, length: int) -> torch.Tensor:
        names = list(self.parts)
        weights = [self.parts[name][0] for name in names]
        drawn = self._random.choices(names, weights, k=rows)
        batches = [
            self.parts[name][1].take(count, length)
            for name in names
            if (count := drawn.count(name))
        ]
        return torch.cat(batches)

    def epochs(self) -> str:
        return " ".join(f"{name} {part.epochs:.2f}" for name, (_, part) in self.parts.items())


def text_mixture(documents: list[Document], tokenizer: Tokenizer, seed: int) -> Mixture:
    parts = {}
    for index, (kind, weight) in enumerate((("code", 0.55), ("tests", 0.15), ("prose", 0.30))):
        chosen = [d for d in documents if d.kind == kind and not d.held_out]
        tokens = encode_documents(chosen, tokenizer)
        size = sum(len(d.text.encode()) for d in chosen)
        console.print(
            f"{kind}: {len(chosen)} documents, {size / 1e6:.2f} MB, {tokens.numel() / 1e6:.2f} M "
            f"tokens ({size / tokens.numel():.2f} bytes per token)"
        )
        parts[kind] = (weight, Windows(tokens, seed + index))
    return Mixture(parts, seed)


# --- Optimizer ----------------------------------------------------------------------------------


class Muon:
    """Momentum orthogonalised by Newton-Schulz, for matrices; same-shaped ones in one batch.

    torch.optim.Muon does this matrix by matrix in bfloat16, five times slower than float32 on a
    CPU without bfloat16 units. Source: https://kellerjordan.github.io/posts/muon/
    """

    def __init__(self, parameters: list[torch.nn.Parameter], weight_decay: float = 0.05):
        groups: dict[torch.Size, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            groups.setdefault(parameter.shape, []).append(parameter)
        self._groups = [(ps, torch.zeros(len(ps), *shape)) for shape, ps in groups.items()]
        self._decay = weight_decay

    @torch.no_grad()
    def step(self, lr: float, momentum: float = 0.95) -> None:
        for parameters, buffer in self._groups:
            gradients = torch.stack([p.grad for p in parameters])
            buffer.lerp_(gradients, 1 - momentum)
            update = orthogonalize(gradients.lerp_(buffer, momentum))
            rows, columns = update.shape[-2:]
            scale = lr * math.sqrt(max(1.0, rows / columns))
            for parameter, direction in zip(parameters, update, strict=True):
                parameter.mul_(1 - lr * self._decay).sub_(direction, alpha=scale)
                parameter.grad = None


def orthogonalize(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Pushes all singular values of ``[n, rows, columns]`` towards 1 by a quintic iteration."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT.contiguous() if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Trainer:
    """Runs a loss until its time is used up: Muon for matrices, AdamW for the rest."""

    def __init__(
        self,
        matrices: list[torch.nn.Parameter],
        others: list[torch.nn.Parameter],
        *,
        matrix_lr: float,
        other_lr: float,
    ):
        self.muon, self.matrix_lr = Muon(matrices), matrix_lr
        self.adam = torch.optim.AdamW(others, lr=other_lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.other_lr = other_lr

    def run(
        self,
        name: str,
        seconds: float,
        loss_of: Callable[[float], tuple[torch.Tensor, int]],
        save: Callable[[], None],
        save_every: float = 240.0,
    ) -> None:
        """``loss_of(share)`` gives the loss of a new batch and its number of tokens."""
        begin = time.monotonic()
        steps, tokens, smooth, said, saved = 0, 0, None, begin, begin
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task(name, total=1.0)
            while (share := (time.monotonic() - begin) / seconds) < 1.0:
                loss, count = loss_of(share)
                loss.backward()
                # Up within 2 % of the time, level until 40 %, then straight down to zero.
                rate = min(share / 0.02 + 0.05, 1.0, (1.0 - share) / 0.6)
                self.muon.step(self.matrix_lr * rate)
                for group in self.adam.param_groups:
                    group["lr"] = self.other_lr * rate
                self.adam.step()
                self.adam.zero_grad()
                steps, tokens = steps + 1, tokens + count
                value = loss.item()
                smooth = value if smooth is None else 0.98 * smooth + 0.02 * value
                now = time.monotonic()
                speed = tokens / (now - begin)
                progress.update(bar, completed=share, description=f"{name} loss {smooth:.4f}")
                if now - said > 20.0:
                    console.print(
                        f"{name} {now - begin:6.0f} s  step {steps}  loss {smooth:.4f}  "
                        f"{tokens / 1e6:.2f} M tokens  {speed:.0f} tokens/s"
                    )
                    said = now
                if now - saved > save_every:
                    save()
                    saved = now
        save()
        console.print(f"{name}: {steps} steps, {tokens / 1e6:.2f} M tokens, loss {smooth:.4f}")


# --- Target -------------------------------------------------------------------------------------


def new_target(vocab_size: int, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=12,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.embedding.normal_(0.0, 0.02)
        for layer in model.layers:
            for linear in (layer.qkv, layer.gate_up):
                linear.weight.normal_(0.0, linear.in_features**-0.5)
            # Layers start as the identity.
            layer.out.weight.zero_()
            layer.down.weight.zero_()
    return model


def split_parameters(
    model: torch.nn.Module, apart: tuple[str, ...]
) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Matrices for Muon, and vectors and the matrices named in ``apart`` for AdamW."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        chosen = matrices if parameter.dim() == 2 and name not in apart else others
        chosen.append(parameter)
    return matrices, others


def next_token_loss(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    inputs = ids[:, :-1].contiguous()
    positions = torch.arange(inputs.size(1)).expand_as(inputs)
    logits = model.logits(model(inputs, positions))
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def train_target(
    out: Path, mixture: Mixture, vocab_size: int, end: int, minutes: float, seed: int, fuse: bool
) -> LlamaForCausalLM:
    model = new_target(vocab_size, seed)
    count = sum(p.numel() for p in model.parameters())
    console.print(f"target: {count / 1e6:.2f} M parameters, {torch.get_num_threads()} threads")
    matrices, others = split_parameters(model, ("embedding",))
    trainer = Trainer(matrices, others, matrix_lr=0.02, other_lr=0.004)
    # Filled before compiling: growing it during a traced call would have the call traced again.
    model.rotary.lookup(torch.zeros(1, 1, dtype=torch.int64), 1, model.embedding.dtype)
    loss_of_ids = torch.compile(next_token_loss, dynamic=False) if fuse else next_token_loss

    def loss_of(share: float) -> tuple[torch.Tensor, int]:
        # Short windows first: cheaper attention, and more different text per batch.
        rows, length = (12, 256) if share < 0.75 else (6, 512)
        ids = mixture.take(rows, length + 1)
        return loss_of_ids(model, ids), rows * length

    def save() -> None:
        save_llama(model, out / "target", eos_token_id=end)

    trainer.run("target", 60 * minutes, loss_of, save)
    console.print(f"target: epochs {mixture.epochs()}")
    return model.eval().requires_grad_(False)


# --- Draft --------------------------------------------------------------------------------------


def new_draft(target: LlamaForCausalLM) -> EagleDraft:
    """Begins as the target's last layer on the sum of hidden state and embedding."""
    config = target.config
    draft = EagleDraft(replace(config, num_hidden_layers=1), target)
    draft.layer.load_state_dict(target.layers[-1].state_dict())
    with torch.no_grad():
        draft.norm.copy_(target.norm)
        identity = torch.eye(config.hidden_size)
        # Both parts of the sum at the size of a hidden state.
        ratio = target.norm.square().mean().sqrt() / target.embedding.square().mean().sqrt()
        draft.fc.weight.copy_(torch.cat([ratio * identity, identity], dim=1))
    return draft


def unrolled_loss(
    draft: EagleDraft, ids: torch.Tensor, steps: int, decay: float = 0.85
) -> torch.Tensor:
    """Cross entropy against the target's distribution over ``steps`` of drafting everywhere."""
    target = draft.target
    with torch.no_grad():
        states = target(ids, torch.arange(ids.size(1)).expand_as(ids))
        wanted = target.logits(states[:, 1:]).softmax(-1)
    total, weight = torch.zeros(()), 0.0
    for step, hidden in enumerate(unrolled(draft, ids[:, 1:], states[:, :-1], steps)):
        predicted = draft.logits(hidden[:, step:]).log_softmax(-1)
        total = total - decay**step * (wanted[:, step:] * predicted).sum(-1).mean()
        weight += decay**step
    return total / weight


def unrolled(
    draft: EagleDraft, tokens: torch.Tensor, hidden: torch.Tensor, steps: int
) -> Iterator[torch.Tensor]:
    """The draft's hidden states ``[batch, length, d]`` after 1, 2, ... ``steps`` steps of its own.

    ``tokens`` and ``hidden`` are the draft's inputs for whole sequences. In step k (from 0) it is
    at position p after k steps of its own: its hidden input is what it gave in step k-1 at p-1, and
    it attends to entries made from the target's hidden states up to p-k and to its own k after
    that. Positions before k have no such past; what they give is finite and meaningless.
    """
    config, layer = draft.config, draft.layer
    batch, length = tokens.shape
    positions = torch.arange(length).expand(batch, length)
    context = make_context(config, draft.rotary, positions, hidden.dtype, None, None)
    kinds = [layer.num_heads, layer.num_kv_heads, layer.num_kv_heads]
    distance = torch.arange(length)[:, None] - torch.arange(length)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for step in range(steps):
        x = draft.combine(tokens, hidden)
        qkv = layer.project(x, context).view(batch, length, -1, config.head_dim).transpose(1, 2)
        q, k, v = qkv.split(kinds, dim=1)
        q = q * config.head_dim**-0.5
        keys.append(k.repeat_interleave(layer.group, 1))
        values.append(v.repeat_interleave(layer.group, 1))
        scores = (q @ keys[0].mT).masked_fill(distance < step, -1e4)
        # Entries of later steps: one per query, the one made `step - i` positions before it.
        own = [(q * shifted(keys[i], step - i)).sum(-1, True) for i in range(1, step + 1)]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1)
        out = weights[..., :length] @ values[0]
        for i in range(1, step + 1):
            out = out + weights[..., length + i - 1, None] * shifted(values[i], step - i)
        x = layer.finish(x, out.transpose(1, 2).reshape(batch * length, -1))
        given = rms_norm(x, draft.norm, config.rms_norm_eps).view(batch, length, -1)
        yield given
        hidden = shifted(given, 1, dim=1)


def shifted(x: torch.Tensor, by: int, dim: int = 2) -> torch.Tensor:
    """Moves entries ``by`` positions later along ``dim``; what wraps round is never used."""
    return x.roll(by, dim) if by else x


@torch.inference_mode()
def greedy_texts(
    target: LlamaForCausalLM, mixture: Mixture, seconds: float, length: int
) -> torch.Tensor:
    """Training text continued greedily by the target: what the draft will have to guess."""
    rows, prompt = 128, 64
    done, begin = [], time.monotonic()
    while not done or time.monotonic() - begin < seconds:
        ids = torch.empty(rows, length, dtype=torch.int64)
        ids[:, :prompt] = mixture.take(rows, prompt)
        positions = torch.arange(length).expand(rows, length)
        cache = target.make_cache(rows, length)
        hidden = target(ids[:, :prompt], positions[:, :prompt], cache, prompt)[:, -1:]
        for at in range(prompt, length):
            ids[:, at : at + 1] = target.logits(hidden).argmax(-1)
            hidden = target(ids[:, at : at + 1], positions[:, at : at + 1], cache, at + 1)
        done.append(ids)
    return torch.cat(done)


def train_draft(
    out: Path,
    target: LlamaForCausalLM,
    mixture: Mixture,
    minutes: float,
    steps: int,
    seed: int,
    resume: bool,
) -> EagleDraft:
    length = 256
    texts = greedy_texts(target, mixture, 0.25 * 60 * minutes, length)
    console.print(f"draft: {texts.numel() / 1e6:.2f} M tokens continued by the target itself")
    draft = load_draft(out / "draft", target) if resume else new_draft(target)
    draft.requires_grad_(True)
    count = sum(p.numel() for p in draft.parameters())
    console.print(f"draft: {count / 1e6:.2f} M parameters of its own")
    matrices, others = split_parameters(draft, ("fc.weight",))
    trainer = Trainer(matrices, others, matrix_lr=0.01, other_lr=0.002)
    own = Mixture({"own": (1.0, Windows(texts.flatten(), seed + 7))}, seed)

    def loss_of(share: float) -> tuple[torch.Tensor, int]:
        ids = torch.cat([own.take(6, length), mixture.take(2, length)])
        return unrolled_loss(draft, ids, steps), ids.numel()

    trainer.run("draft", 0.75 * 60 * minutes, loss_of, lambda: save_draft(draft, out / "draft"))
    console.print(f"draft: epochs {mixture.epochs()}; own texts {own.epochs()}")
    return draft.eval().requires_grad_(False)


# --- Command ------------------------------------------------------------------------------------


@app.command()
def train(
    out: Out = DEFAULT_OUT,
    target_minutes: Annotated[float, typer.Option(help="Time for the target; 0 keeps it.")] = 35.0,
    draft_minutes: Annotated[float, typer.Option(help="Time for the draft; 0 keeps it.")] = 15.0,
    vocab_size: Annotated[int, typer.Option(help="Size of the tokenizer.")] = 1024,
    steps: Annotated[int, typer.Option(help="Drafting steps the draft is trained for.")] = 6,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = 0,
    resume_draft: Annotated[bool, typer.Option(help="Go on with OUT's draft.")] = False,
    fuse: Annotated[bool, typer.Option(help="Compile the target's loss (needs g++).")] = True,
) -> None:
    """Trains tokenizer, target and draft and writes them to OUT."""
    torch.manual_seed(seed)
    documents = standard_library()
    path = out / "tokenizer.json"
    if target_minutes > 0:
        kept = [d for d in documents if not d.held_out]
        tokenizer = train_tokenizer(kept, vocab_size, path)
    else:
        tokenizer = Tokenizer.from_file(path)
    mixture = text_mixture(documents, tokenizer, seed)
    end = tokenizer.token_id(END_OF_TEXT)
    if target_minutes > 0:
        train_target(out, mixture, vocab_size, end, target_minutes, seed, fuse)
    if draft_minutes > 0:
        # From the file, so that the draft learns from the weights it will run with.
        train_draft(
            out, load_llama(out / "target"), mixture, draft_minutes, steps, seed, resume_draft
        )


if __name__ == "__main__":
    app()
