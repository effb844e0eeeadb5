"""Measures the tiny pair on text it was not trained on, and picks the prompts shipped with it.

`prompts` writes 64 pieces of held-out code and 64 of held-out prose to prompts.json: code from unit
tests, the most regular code there is, and prose from plain sentences, so that the two differ in how
far a draft can see ahead. `report` gives bits per byte on all held-out text, how many drafts the
target accepts when those prompts are continued greedily, and what a pass of each model costs.
"""

from __future__ import annotations

import json
import math
import platform
import random
import re
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from tiny_pair_text import Document, standard_library
from train_tiny_pair import DEFAULT_OUT, Out, encode_documents

from adaptive_spec.engine import Engine, ModelPair, load_pair

app = typer.Typer(add_completion=False, no_args_is_help=True)
console = Console()
PROMPT_KINDS = ("code", "prose")
PROMPTS_PER_KIND = 64


# --- Prompts ------------------------------------------------------------------------------------


def pieces(text: str, low: int = 200, high: int = 400) -> list[str]:
    """Runs of whole lines of ``low`` to ``high`` bytes each, one after the other."""
    found, current = [], ""
    for line in text.splitlines(keepends=True):
        if len((current + line).encode()) > high:
            current = ""
            continue
        current += line
        if len(current.encode()) >= low and line.strip():
            found.append(current.rstrip("\n"))
            current = ""
    return found


def choose_prompts(documents: list[Document], trained: str, seed: int = 0) -> list[tuple[str, str]]:
    """``(text, source)`` of prompts, from the documents in turn; none occurs in ``trained``."""
    generator = random.Random(seed)
    stacks = [(d.source, generator.sample(p, len(p))) for d in documents if (p := pieces(d.text))]
    generator.shuffle(stacks)
    chosen: dict[str, str] = {}
    while len(chosen) < PROMPTS_PER_KIND:
        stacks = [(source, stack) for source, stack in stacks if stack]
        if not stacks:
            raise ValueError(f"documents: expected text for {PROMPTS_PER_KIND} prompts, got less")
        for source, stack in stacks[: PROMPTS_PER_KIND - len(chosen)]:
            # Files quote each other, whichever of them was held out.
            if (text := stack.pop()) not in trained:
                chosen.setdefault(text, source)
    return list(chosen.items())


def sentences(text: str) -> str:
    """The paragraphs of ``text`` that are plain sentences: no code, tables, lists or headings."""
    line = re.compile(r"[A-Za-z(][^=<>{}|\\_\[\]`*]*")
    paragraphs = [paragraph.strip("\n").split("\n") for paragraph in text.split("\n\n")]
    plain = [
        lines
        for lines in paragraphs
        if len(lines) > 1 and all(line.fullmatch(x) and "   " not in x for x in lines)
    ]
    return "\n\n".join("\n".join(lines) for lines in plain) + "\n"


@app.command()
def prompts(out: Out = DEFAULT_OUT) -> None:
    """Writes OUT/prompts.json: "code" and "prose" (texts) and "sources" (where each is from)."""
    documents = standard_library()
    trained = "\0".join(d.text for d in documents if not d.held_out)
    held_out = [d for d in documents if d.held_out]
    candidates = {
        "code": [d for d in held_out if d.kind == "tests"],
        "prose": [replace(d, text=sentences(d.text)) for d in held_out if d.kind == "prose"],
    }
    content: dict[str, object] = {}
    sources = {}
    for kind in PROMPT_KINDS:
        chosen = choose_prompts(candidates[kind], trained)
        content[kind] = [text for text, _ in chosen]
        sources[kind] = [source for _, source in chosen]
        console.print(f"{kind}: {len(chosen)} prompts of {len(set(sources[kind]))} sources")
    content["sources"] = sources
    text = json.dumps(content, indent=1, ensure_ascii=False)
    (out / "prompts.json").write_text(text + "\n", encoding="utf-8")


# --- Measurements -------------------------------------------------------------------------------


@torch.inference_mode()
def bits_per_byte(pair: ModelPair, documents: list[Document]) -> float:
    """Of the target, over windows of its full context, each begun without what came before."""
    length = pair.target.config.max_position_embeddings
    tokens = encode_documents(documents, pair.tokenizer)
    size = sum(len(d.text.encode()) for d in documents)
    rows = (tokens.numel() - 1) // length
    inputs = tokens[: rows * length].view(rows, length)
    wanted = tokens[1 : rows * length + 1].view(rows, length)
    total = 0.0
    for x, y in zip(inputs.split(8), wanted.split(8), strict=True):
        logits = pair.target.logits(pair.target(x, torch.arange(length).expand_as(x)))
        total += F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum").item()
    return total / math.log(2) / (size * wanted.numel() / tokens.numel())


@dataclass
class Acceptance:
    """What the target accepted over all rounds of all prompts of a kind."""

    prompts: int
    rounds: int
    # Accepted drafts per round, and share of rounds in which at least 1, 2, ... were accepted.
    mean_accepted: float
    reaching: list[float]
    # Of the drafts at each place that were compared (all before them accepted), the share accepted.
    by_place: list[float]
    # Share of continuations whose end only repeats itself.
    looping: float
    example: str


def measure_acceptance(
    pair: ModelPair, prompts: list[str], steps: int, new_tokens: int
) -> Acceptance:
    engine = Engine(
        pair,
        max_batch_size=16,
        max_len=pair.target.config.max_position_embeddings,
        speculative_num_steps=steps,
    )
    requests = [engine.submit(prompt, new_tokens) for prompt in prompts]
    accepted = [count for report in engine.run() for count in report.accepted]
    at_least = [sum(count >= place for count in accepted) for place in range(steps + 1)]
    return Acceptance(
        prompts=len(prompts),
        rounds=len(accepted),
        mean_accepted=statistics.fmean(accepted),
        reaching=[count / len(accepted) for count in at_least[1:]],
        by_place=[
            after / max(before, 1)
            for before, after in zip(at_least[:-1], at_least[1:], strict=True)
        ],
        looping=statistics.fmean(loops(request.output_ids) for request in requests),
        example=prompts[0] + "█" + requests[0].text,
    )


def loops(ids: list[int], end: int = 64, longest: int = 24) -> bool:
    """Whether the last ``end`` tokens repeat with a period of at most ``longest``."""
    tail = ids[-end:]
    return len(tail) == end and any(tail[p:] == tail[:-p] for p in range(1, longest + 1))


@torch.inference_mode()
def forward_times(pair: ModelPair, repeats: int = 200) -> tuple[float, float]:
    """Median seconds of one token at batch 1 up to its argmax: target, draft (taken in turn)."""
    ids, positions = torch.tensor([[5]]), torch.tensor([[200]])
    hidden = torch.zeros(1, 1, pair.target.config.hidden_size)
    caches = pair.target.make_cache(1, 512), pair.draft.make_cache(1, 512)

    def target_pass() -> None:
        pair.target.logits(pair.target(ids, positions, caches[0], 256)).argmax(-1)

    def draft_pass() -> None:
        pair.draft.logits(pair.draft(ids, hidden, positions, caches[1], 256)).argmax(-1)

    times: tuple[list[float], list[float]] = [], []
    for _ in range(repeats):
        for call, taken in zip((target_pass, draft_pass), times, strict=True):
            begin = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begin)
    return statistics.median(times[0]), statistics.median(times[1])


@app.command()
def report(
    out: Out = DEFAULT_OUT,
    steps: Annotated[int, typer.Option(help="Drafts per round.")] = 7,
    new_tokens: Annotated[int, typer.Option(help="Tokens per prompt.")] = 128,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write here.")] = None,
) -> None:
    """Measures the pair in OUT, its prompts included."""
    pair = load_pair(out)
    prompts = json.loads((out / "prompts.json").read_text(encoding="utf-8"))
    documents = [d for d in standard_library() if d.held_out]
    entropy = {
        kind: bits_per_byte(pair, [d for d in documents if d.kind == kind])
        for kind in ("code", "prose", "tests")
    }
    accepted = {
        kind: measure_acceptance(pair, prompts[kind], steps, new_tokens) for kind in PROMPT_KINDS
    }
    target_time, draft_time = forward_times(pair)
    console.print(
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}, "
        f"Python {platform.python_version()}"
    )
    console.print("bits per byte: " + ", ".join(f"{k} {v:.3f}" for k, v in entropy.items()))
    console.print(acceptance_table(accepted, steps))
    console.print(
        f"one token at batch 1: target {1e3 * target_time:.2f} ms, "
        f"draft {1e3 * draft_time:.2f} ms, ratio {target_time / draft_time:.1f}"
    )
    for kind, result in accepted.items():
        console.rule(kind)
        console.print(result.example, markup=False, highlight=False)
    if json_path is not None:
        content = {
            "bits_per_byte": entropy,
            "acceptance": {kind: asdict(result) for kind, result in accepted.items()},
            "seconds_per_token": {"target": target_time, "draft": draft_time},
        }
        json_path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def acceptance_table(accepted: dict[str, Acceptance], steps: int) -> Table:
    table = Table(title=f"Accepted drafts at S = {steps}, greedy")
    for name in ("", "rounds", "mean", "looping", *(f"≥{k}" for k in range(1, steps + 1))):
        table.add_column(name, justify="right")
    for kind, result in accepted.items():
        shares = (f"{share:.2f}" for share in result.reaching)
        head = (kind, str(result.rounds), f"{result.mean_accepted:.2f}", f"{result.looping:.0%}")
        table.add_row(*head, *shares)
    return table


if __name__ == "__main__":
    app()
