"""`adaptive-spec demo`: adaptive, fixed and no speculation on one workload of real text."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adaptive_spec.cli.outputs import check_writable

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from adaptive_spec.config import AdaptiveConfig
    from adaptive_spec.controller import AdaptiveSpecPolicy
    from adaptive_spec.demo.compare import Comparison
    from adaptive_spec.demo.runner import Lane
    from adaptive_spec.demo.workload import Workload
    from adaptive_spec.engine.sampling import SamplingParams
    from adaptive_spec.engine.tokenizer import Tokenizer

app = typer.Typer(add_completion=False)


class PolicyKind(enum.StrEnum):
    device = "device"
    host = "host"


@app.command()
def demo(
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Model pair; default: the shipped one.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Adaptive config; default: the demo's measured table."),
    ] = None,
    modes: Annotated[
        str,
        typer.Option(
            help="What to compare: none, static, adaptive, built-in, or numbers of steps."
        ),
    ] = "none,static,adaptive,built-in",
    policy: Annotated[
        PolicyKind, typer.Option(help="Learn inside the verify op, or on the host.")
    ] = PolicyKind.device,
    phases: Annotated[
        str | None,
        typer.Option(metavar="B:REGIME:TOKENS,...", help="Phases, e.g. 1:easy:2000,16:hard:5000."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Longest output of a request.")] = 160,
    max_seconds: Annotated[
        float, typer.Option(min=1, help="Cut phases short so that all of it takes about this long.")
    ] = 220.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="A sixth of the tokens and of the time.")
    ] = False,
    temperature: Annotated[
        float, typer.Option(help="Sample at this temperature; 0: the likeliest token each time.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Of the likeliest tokens only up to this probability; 1: off.")
    ] = 1.0,
    seed: Annotated[
        int, typer.Option(help="Of the order of prompts, the output lengths, and of sampling.")
    ] = 0,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda[:i]; default: a GPU where one can be used.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="CPU threads; default: torch's choice.")
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="PNG", help="Picture of S, EMA and batch size over rounds.")
    ] = Path("adaptive-spec-demo.png"),
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON.")
    ] = None,
) -> None:
    """Decode one workload with no, fixed and adaptive speculation, and compare.

    All modes take turns many times in each phase, so that machine noise hits all alike.

    Exit status 1 if some mode's output differs from the first mode's by more than a tie.
    """
    for option, path in (("--out", out), ("--json", json_file)):
        check_writable(option, path)
    from adaptive_spec.demo.pair import open_pair, require

    require("safetensors", "tokenizers", "matplotlib")
    from adaptive_spec.config import load_adaptive_config
    from adaptive_spec.demo.modes import MEASURED_CONFIG, parse_modes
    from adaptive_spec.demo.workload import DEFAULT_PHASES, parse_phases, read_prompts, scaled
    from adaptive_spec.engine.sampling import SamplingParams

    sampling = SamplingParams(temperature=temperature, top_p=top_p)
    table = load_adaptive_config(config or MEASURED_CONFIG)
    chosen = parse_modes(modes, table)
    plan = DEFAULT_PHASES if phases is None else parse_phases(phases)
    if quick:
        plan, max_seconds = scaled(plan, 1 / 6), max_seconds / 6
    pair = open_pair(model, device)
    prompts = read_prompts(model)
    place = pair.target.embedding.device

    import torch
    from rich.console import Console

    from adaptive_spec.demo.compare import TieJudge, compare_outputs
    from adaptive_spec.demo.runner import Lane
    from adaptive_spec.demo.workload import Workload, measure_kinds

    if threads is not None:
        torch.set_num_threads(threads)
    console = Console()
    if not console.is_terminal:
        console = Console(width=110)
    with console.status("measuring the kinds of text, preparing the engines"):
        kinds = measure_kinds(pair, prompts, max(*table.candidate_steps, 1), sampling)
        easy, hard = max(kinds, key=kinds.get), min(kinds, key=kinds.get)
        texts = {"easy": prompts[easy], "hard": prompts[hard]}
        workload = Workload(pair, texts, plan, max_new_tokens, seed, sampling)
        lanes = [Lane(m, pair, workload, lambda c: make_policy(policy, c, place)) for m in chosen]
    console.print(
        f"torch {torch.__version__}, {describe(place)}, float32; {describe_sampling(sampling)}; "
        f"policy on the {policy.value}; "
        f"adaptive config: {config or 'the demo table, chosen by measurement'}"
    )
    shown = ", ".join(f"{kind} {mean:.2f}" for kind, mean in kinds.items())
    console.print(
        f"accepted drafts per round at the largest S: {shown}; easy = {easy}, hard = {hard}"
    )
    run_with_progress(console, lanes, workload, max_seconds)
    with console.status("comparing outputs"):
        outputs = {lane.mode.name: [run.requests for run in lane.phases] for lane in lanes}
        comparison = compare_outputs(outputs, lanes[0].mode.name, TieJudge(pair.target))

    show(console, lanes, workload, comparison, pair.tokenizer, out)
    if json_file is not None:
        from adaptive_spec.demo.report import as_dict

        setup = {
            "torch": torch.__version__,
            "device": describe(place),
            "threads": torch.get_num_threads(),
            "policy": policy.value,
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
            "max_new_tokens": max_new_tokens,
            "mean_accepted_by_kind": kinds,
            "regimes": {"easy": easy, "hard": hard},
        }
        data = as_dict(lanes, workload, comparison, setup)
        json_file.write_text(json.dumps(data) + "\n", encoding="utf-8")
        console.print(f"wrote {json_file}")
    if not comparison.lossless:
        raise typer.Exit(1)


def describe(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} CPU threads"


def describe_sampling(sampling: SamplingParams) -> str:
    if sampling.is_greedy:
        return "greedy"
    return f"sampling at temperature {sampling.temperature:g}, top-p {sampling.top_p:g}"


def make_policy(
    kind: PolicyKind, config: AdaptiveConfig, device: torch.device
) -> AdaptiveSpecPolicy:
    """A policy for ``config`` that starts in the middle of the smallest batches' candidates."""
    from adaptive_spec.state import AdaptiveState
    from adaptive_spec.step_policy import AdaptiveSpeculativeParams

    first = config.slots[0].candidate_steps
    initial = first[len(first) // 2]
    if kind is PolicyKind.device:
        return AdaptiveState(config, initial, device=device)
    return AdaptiveSpeculativeParams(initial, config)


def run_with_progress(
    console: Console, lanes: list[Lane], workload: Workload, max_seconds: float
) -> None:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from adaptive_spec.demo.runner import run_workload

    columns = (TextColumn("{task.description:12}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=1.0)
        run_workload(
            lanes,
            workload,
            num_slices=24,
            max_seconds=max_seconds,
            on_progress=lambda phase, share: progress.update(
                bar, description=phase.name, completed=share
            ),
        )


def show(
    console: Console,
    lanes: list[Lane],
    workload: Workload,
    comparison: Comparison,
    tokenizer: Tokenizer,
    picture: Path,
) -> None:
    """Text, tables, verdicts and the picture."""
    from adaptive_spec.demo import plot, report

    phases = workload.phases
    adaptive = [lane for lane in lanes if lane.policy is not None]
    if adaptive:
        report.show_text(console, adaptive[0], workload, tokenizer)
    report.show_throughput(console, lanes, phases)
    for lane in adaptive:
        report.show_adaptation(console, lane, phases)
    for lane in adaptive:
        report.show_requirements(console, lane, lanes)
    report.show_comparison(console, comparison, workload)
    if adaptive:
        first = adaptive[0]
        plot.plot_rounds(picture, first.rounds, phases, first.mode.config.candidate_steps)
        console.print(f"wrote {picture}")
