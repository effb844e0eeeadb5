"""Decoded tokens per second for every number of draft steps S, batch size and kind of text.

Answers: which S should an adaptive config offer for which batch sizes, for this pair on this
machine? All S take turns many times in each cell, so machine noise hits all alike.

    python benchmarks/sweep_steps.py --json sweep.json
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.box import SIMPLE_HEAVY
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from adaptive_spec.demo.pair import open_pair
from adaptive_spec.demo.runner import Lane, Mode, run_workload
from adaptive_spec.demo.workload import REGIMES, Phase, Workload, measure_kinds, read_prompts

app = typer.Typer(add_completion=False)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


@app.command()
def sweep(
    model: Annotated[Path | None, typer.Option(help="Model pair; default: the shipped.")] = None,
    steps: Annotated[str, typer.Option(help="S to compare.")] = "0,1,2,3,5,7",
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes.")] = "1,4,16,32",
    tokens: Annotated[int, typer.Option(help="Tokens per S in a cell at batch size 1.")] = 400,
    max_seconds: Annotated[float, typer.Option(help="Cut the cells short to take this.")] = 240.0,
    max_new_tokens: Annotated[int, typer.Option(help="Longest output of a request.")] = 160,
    seed: Annotated[int, typer.Option(help="Of the order of prompts.")] = 1,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers.")] = None,
) -> None:
    """Print tokens per second for S x batch size x kind of text."""
    if threads is not None:
        torch.set_num_threads(threads)
    pair, prompts = open_pair(model), read_prompts(model)
    kinds = measure_kinds(pair, prompts, steps=7)
    texts = {
        "easy": prompts[max(kinds, key=kinds.get)],
        "hard": prompts[min(kinds, key=kinds.get)],
    }
    sizes = numbers(batch_sizes)
    phases = [
        Phase(size, regime, round(tokens * size**0.6)) for size in sizes for regime in REGIMES
    ]
    workload = Workload(pair, texts, phases, max_new_tokens, seed)
    modes = [Mode(f"S={s}", steps=s) for s in numbers(steps)]
    lanes = [Lane(mode, pair, workload, make_policy=None) for mode in modes]
    console = Console(width=110)
    console.print(
        f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads; "
        f"accepted drafts at S=7: {', '.join(f'{k} {v:.2f}' for k, v in kinds.items())}"
    )
    with Progress(console=console) as progress:
        bar = progress.add_task("", total=1.0)
        run_workload(
            lanes,
            workload,
            num_slices=12,
            max_seconds=max_seconds,
            on_progress=lambda phase, share: progress.update(
                bar, description=phase.name, completed=share
            ),
        )
    table = Table(title="tokens/s (accepted drafts per round)", box=SIMPLE_HEAVY)
    table.add_column("phase")
    for mode in modes:
        table.add_column(mode.name, justify="right")
    table.add_column("best", justify="right")
    for index, phase in enumerate(phases):
        runs = [lane.phases[index] for lane in lanes]
        best = max(range(len(runs)), key=lambda i: runs[i].tokens_per_second)  # noqa: B023
        cells = [f"{run.tokens_per_second:.0f} ({run.mean_accepted:.2f})" for run in runs]
        cells[best] = f"[bold]{cells[best]}[/]"
        table.add_row(phase.name, *cells, modes[best].name)
    console.print(table)
    if json_file is not None:
        rows = [
            {
                "batch_size": phase.batch_size,
                "regime": phase.regime,
                "speculative_num_steps": lane.mode.steps,
                "tokens_per_second": lane.phases[index].tokens_per_second,
                "mean_accepted_drafts": lane.phases[index].mean_accepted,
                "num_tokens": lane.phases[index].num_tokens,
            }
            for index, phase in enumerate(phases)
            for lane in lanes
        ]
        json_file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
