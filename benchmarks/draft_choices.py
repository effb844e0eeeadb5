"""Accepted drafts per round, by how drafts are chosen from the draft model's logits.

Answers: what does it bring to draft with the noise that verifies, and how far is it from rejection
sampling? Text, rule and seeds are the same for all; only the drafts differ:

    shared       each draft is chosen as the target would, with the very noise it will have
    greedy       the draft model's likeliest token
    independent  sampled, with noise of its own

The first draft of each round is looked at closer: how often it is accepted, and how often rejection
sampling, which knows both distributions p and q, would accept it: sum(min(p, q)).

    python benchmarks/draft_choices.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer
from rich.box import SIMPLE_HEAVY
from rich.console import Console
from rich.table import Table

from adaptive_spec.demo.pair import open_pair
from adaptive_spec.demo.workload import encode, read_prompts
from adaptive_spec.engine.engine import Engine
from adaptive_spec.engine.sampling import SamplingParams
from adaptive_spec.graphs import RoundFrame
from adaptive_spec.workers import eagle
from adaptive_spec.workers.stages import EagleStages

CHOICES = ("shared", "greedy", "independent")

app = typer.Typer(add_completion=False)


@dataclass
class FirstDrafts:
    """Of all live rows of all rounds."""

    num: int = 0
    num_accepted: int = 0
    overlap: float = 0.0  # sum(min(p, q)), added up


class ObservedStages(EagleStages):
    """With other drafts, counting what becomes of the first of each round."""

    def __init__(self, *arguments: Any, choice: str, temperature: float) -> None:
        super().__init__(*arguments)
        self.first = FirstDrafts()
        self._choice, self._temperature = choice, temperature

    def choose_draft(self, frame: RoundFrame, step: int, logits: torch.Tensor) -> None:
        if step == 0:
            self._q = self._probs(logits[:, 0])
        rule = frame.sampling
        if self._choice == "greedy":
            rule = replace(rule, temperature=torch.zeros_like(rule.temperature))
        elif self._choice == "independent":
            rule = replace(rule, seeds=rule.seeds + 1)
        super().choose_draft(replace(frame, sampling=rule), step, logits)

    def verify(self, frame: RoundFrame, kv_len: int, *, learn: bool) -> None:
        super().verify(frame, kv_len, learn=learn)
        num_live = int(frame.num_reqs)
        overlap = torch.minimum(self._probs(frame.logits[:, 0]), self._q).sum(-1)
        self.first.num += num_live
        self.first.num_accepted += int((frame.accept_token_num[:num_live] > 0).sum())
        self.first.overlap += float(overlap[:num_live].sum())

    def _probs(self, logits: torch.Tensor) -> torch.Tensor:
        return (logits / self._temperature).softmax(-1)


@app.command()
def compare(
    model: Annotated[Path | None, typer.Option(help="Model pair; default: the shipped.")] = None,
    temperatures: Annotated[str, typer.Option(help="To sample at.")] = "0.3,0.7,1.0",
    steps: Annotated[int, typer.Option(min=1, max=64, help="Drafts per round.")] = 5,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Of each prompt.")] = 96,
    num_prompts: Annotated[int, typer.Option(min=1, help="Of each kind.")] = 32,
    seed: Annotated[int, typer.Option(help="Prompt i samples with seed + i.")] = 0,
) -> None:
    """Print a row for each kind of text, temperature and choice."""
    pair, prompts = open_pair(model, "cpu"), read_prompts(model)
    table = Table(title=f"S = {steps}", box=SIMPLE_HEAVY)
    table.add_column("text")
    table.add_column("temperature", justify="right")
    table.add_column("drafts")
    for heading in ("accepted\nper round", "first draft\naccepted", "sum(min(p, q))", "rounds"):
        table.add_column(heading, justify="right")
    for kind, texts in prompts.items():
        jobs = [encode(pair, text, max_new_tokens) for text in texts[:num_prompts]]
        for temperature in map(float, temperatures.split(",")):
            rules = [SamplingParams(temperature, seed=seed + i) for i in range(len(jobs))]
            for choice in CHOICES:
                stages = partial(ObservedStages, choice=choice, temperature=temperature)
                with mock.patch.object(eagle, "EagleStages", stages):
                    engine = Engine(
                        pair,
                        max_batch_size=len(jobs),
                        max_len=max(len(job.prompt_ids) + job.max_new_tokens for job in jobs),
                        speculative_num_steps=steps,
                    )
                requests = engine.generate(
                    [job.prompt_ids for job in jobs], max_new_tokens, sampling=rules
                )
                rounds = sum(request.num_rounds for request in requests)
                accepted = sum(request.num_correct_drafts for request in requests)
                first = engine.worker.stages.first
                table.add_row(
                    kind,
                    f"{temperature:g}",
                    choice,
                    f"{accepted / rounds:.2f}",
                    f"{first.num_accepted / first.num:.3f}",
                    f"{first.overlap / first.num:.3f}",
                    str(rounds),
                    end_section=choice == CHOICES[-1],
                )
    Console(width=None if Console().is_terminal else 110).print(table)


if __name__ == "__main__":
    app()
