"""`adaptive-spec simulate`: policies on simulated traffic, against every fixed S and an oracle."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adaptive_spec.cli.outputs import check_writable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from adaptive_spec.sim.acceptance import AcceptanceProcess
    from adaptive_spec.sim.compare import Result
    from adaptive_spec.sim.simulate import Phase

app = typer.Typer(add_completion=False)

DEFAULT_PHASES = "1:0.85:600,1:0.4:600,32:0.75:600,128:0.75:600,8:0.6/0.9:600"


@app.command()
def simulate(
    costs: Annotated[
        Path, typer.Argument(metavar="COSTS", help="Cost table: a file of `CostTable.save`.")
    ],
    phases: Annotated[
        str,
        typer.Option(
            metavar="B:RATE:ROUNDS,...",
            help="Phases. RATE: acceptance of a draft, or of positions 1/2/..., the last one on.",
        ),
    ] = DEFAULT_PHASES,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="CSV",
            help="Serve these arrivals (time, prompt and output tokens) instead of phases.",
        ),
    ] = None,
    faster: Annotated[float, typer.Option(help="Let the trace arrive this much faster.")] = 1.0,
    rate: Annotated[
        str, typer.Option(help="Acceptance in a trace: as RATE of a phase, or +-separated mixture.")
    ] = "0.5+0.85",
    recorded: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Acceptance recorded from real rounds, for all traffic."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of all that is drawn.")] = 0,
    lag: Annotated[
        int, typer.Option(min=1, max=8, help="Rounds until counts are known; 2: overlapped.")
    ] = 1,
    switch_ms: Annotated[float, typer.Option(min=0, help="Added to a round that changes S.")] = 0.0,
    plot: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Picture of S and tokens lost over rounds.")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers as JSON.")
    ] = None,
) -> None:
    """Run every policy over the same simulated rounds, and compare."""
    for option, path in (("--plot", plot), ("--json", json_file)):
        check_writable(option, path)
    draw = _plotter(plot)

    from rich.console import Console

    from adaptive_spec.cost_table import CostTable
    from adaptive_spec.sim import simulate as sim
    from adaptive_spec.sim.acceptance import Recorded
    from adaptive_spec.sim.arrivals import read_csv
    from adaptive_spec.sim.compare import judge
    from adaptive_spec.sim.policies import policy_factories

    table = CostTable.load(costs)
    table.check_complete()
    process = Recorded.load(recorded) if recorded is not None else None
    factories = policy_factories(table)
    console = Console()
    if not console.is_terminal:
        console = Console(width=110)
    with console.status("simulating"):
        if trace is None:
            drawn = sim.draw_phases(parse_phases(phases, process), seed)
            runs = {
                name: sim.replay_phases(make(), drawn, table, lag=lag, switch_ms=switch_ms)
                for name, make in factories.items()
            }
            runs["oracle"] = sim.replay_oracle(drawn, table)
        else:
            if lag != 1:
                raise ValueError(f"`--lag` must be 1 with a trace, got {lag}")
            requests = read_csv(trace).faster(faster)
            process = process or parse_mixture(rate)
            runs = {
                name: sim.replay_trace(
                    make(), requests, process, table, seed=seed, switch_ms=switch_ms
                )
                for name, make in factories.items()
            }
            oracle = sim.TraceOracle(process, table)
            runs["oracle"] = sim.replay_trace(oracle, requests, process, table, seed=seed)
    results = [judge(name, run, runs["oracle"]) for name, run in runs.items()]
    console.print(_table(results, f"{table.machine}, {table.model}"))
    if json_file is not None:
        numbers = [vars(result) for result in results]
        json_file.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
        console.print(f"wrote {json_file}")
    if draw is not None:
        draw(plot, runs)
        console.print(f"wrote {plot}")


def parse_phases(text: str, process: AcceptanceProcess | None = None) -> list[Phase]:
    """Phases from ``B:RATE:ROUNDS,...``; `process` takes the place of every RATE."""
    from adaptive_spec.sim.simulate import Phase

    phases = []
    for part in text.split(","):
        fields = part.strip().split(":")
        if len(fields) != 3:
            raise ValueError(f"a phase must be B:RATE:ROUNDS, such as 8:0.7:500, got {part!r}")
        batch, rate, rounds = fields
        if not (batch.isdecimal() and rounds.isdecimal()):
            raise ValueError(f"B and ROUNDS of a phase must be positive integers, got {part!r}")
        phases.append(
            Phase(
                int(batch),
                int(rounds),
                process or parse_rate(rate),
                name=f"B={batch}" if process else f"B={batch}, {rate}",
            )
        )
    return phases


def parse_rate(text: str) -> AcceptanceProcess:
    """``0.7`` for every position, or ``0.7/0.5/0.4`` for the first ones and all beyond."""
    from adaptive_spec.sim.acceptance import Positional

    try:
        rates = [float(part) for part in text.split("/")]
    except ValueError:
        raise ValueError(f"RATE must be numbers such as 0.7 or 0.7/0.5, got {text!r}") from None
    return Positional(rates)


def parse_mixture(text: str) -> AcceptanceProcess:
    """Requests that each follow one of several rates, ``0.5+0.85``, equally often."""
    from adaptive_spec.sim.acceptance import Mixture

    parts = [parse_rate(part) for part in text.split("+")]
    return Mixture(parts, [1.0] * len(parts))


def _plotter(path: Path | None):
    """The function that draws, or None; looked up before anything takes time."""
    if path is None:
        return None
    try:
        from adaptive_spec.sim.plot import plot_runs
    except ImportError as error:
        raise ImportError(
            f"--plot needs matplotlib: `pip install matplotlib` or leave it out ({error})"
        ) from None
    return plot_runs


def _table(results: Sequence[Result], title: str):
    from rich.box import SIMPLE_HEAVY
    from rich.table import Table

    table = Table(title=title, box=SIMPLE_HEAVY)
    table.add_column("policy")
    for heading in (
        "tokens/s",
        "ms/token\nmean",
        "ms/token\np99",
        "of the\noracle",
        "worst\nphase",
    ):
        table.add_column(heading, justify="right")
    table.add_column("which")
    table.add_column("switches\n/ 1000", justify="right")
    for result in results:
        table.add_row(
            result.name,
            f"{result.tokens_per_s:.1f}",
            f"{result.mean_tpot_ms:.2f}",
            f"{result.p99_tpot_ms:.2f}",
            f"{result.share:.3f}",
            "" if math.isnan(result.worst_share) else f"{result.worst_share:.3f}",
            result.worst_group,
            f"{result.switches_per_1000:.1f}",
        )
    return table
