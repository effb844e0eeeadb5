"""What the demo prints: measured numbers, and the requirements as ratios of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAVY
from rich.console import Console
from rich.table import Table
from rich.text import Text

from adaptive_spec.demo.compare import MAX_TIE_GAP, Comparison
from adaptive_spec.demo.origins import text_pieces
from adaptive_spec.demo.runner import Lane
from adaptive_spec.demo.workload import Phase, Workload

if TYPE_CHECKING:
    from adaptive_spec.engine.tokenizer import Tokenizer

PHASE_RATIO = 0.95
ACCEPTED_STYLE, TARGET_STYLE, PROMPT_STYLE = "bold green", "yellow", "dim"
_STEP_MARKS = "0123456789abcdefghijklmnopqrstuvwxyz"


def static_rivals(lane: Lane, lanes: Sequence[Lane]) -> list[Lane]:
    """The lanes of fixed S that an adaptive lane could have chosen: its candidates."""
    candidates = lane.mode.config.candidate_steps
    return [other for other in lanes if other.mode.steps in candidates]


def steps_over_time(steps: Sequence[int], width: int = 24) -> str:
    """S over a phase in at most ``width`` characters, each the S of most rounds in its stretch."""
    width = min(width, len(steps))
    marks = []
    for i in range(width):
        stretch = steps[len(steps) * i // width : len(steps) * (i + 1) // width]
        most = max(sorted(set(stretch)), key=stretch.count)
        marks.append(_STEP_MARKS[most] if most < len(_STEP_MARKS) else "+")
    return "".join(marks)


def best_ratio(speed: float, rivals: Sequence[float]) -> float | None:
    """``speed`` over the best of the rivals; None without any."""
    return speed / max(rivals) if rivals and max(rivals) > 0 else None


def show_throughput(console: Console, lanes: Sequence[Lane], phases: Sequence[Phase]) -> None:
    table = Table(title="Decoded tokens per second (prefill not counted)", box=SIMPLE_HEAVY)
    table.add_column("phase")
    adaptive = [lane for lane in lanes if lane.policy is not None]
    for lane in lanes:
        table.add_column(lane.mode.name, justify="right")
    for lane in adaptive:
        table.add_column(f"{lane.mode.name}\n/ best static", justify="right")
        table.add_column(f"{lane.mode.name}\n/ none", justify="right")
    for index, phase in enumerate(phases):
        speeds = {id(lane): lane.phases[index].tokens_per_second for lane in lanes}
        table.add_row(phase.name, *_speed_cells(lanes, speeds), end_section=phase is phases[-1])
    speeds = {id(lane): lane.tokens_per_second for lane in lanes}
    table.add_row("all", *_speed_cells(lanes, speeds))
    console.print(table)


def _speed_cells(lanes: Sequence[Lane], speeds: dict[int, float]) -> list[str | Text]:
    best = max(speeds.values())
    cells: list[str | Text] = [
        Text(f"{speeds[id(lane)]:.0f}", style="bold" if speeds[id(lane)] == best else "")
        for lane in lanes
    ]
    none = [speeds[id(lane)] for lane in lanes if lane.mode.steps == 0]
    for lane in lanes:
        if lane.policy is None:
            continue
        rivals = [speeds[id(other)] for other in static_rivals(lane, lanes)]
        for ratio in (best_ratio(speeds[id(lane)], rivals), best_ratio(speeds[id(lane)], none)):
            cells.append("" if ratio is None else f"{ratio:.3f}")
    return cells


def show_adaptation(console: Console, lane: Lane, phases: Sequence[Phase]) -> None:
    table = Table(title=f"What S did ({lane.mode.name})", box=SIMPLE_HEAVY)
    table.add_column("phase")
    for heading in ("rounds", "accepted\ndrafts"):
        table.add_column(heading, justify="right")
    table.add_column("S over time")
    for heading in ("switches", "rounds\nto settle", "prefill s"):
        table.add_column(heading, justify="right")
    for phase, run in zip(phases, lane.phases, strict=True):
        table.add_row(
            phase.name,
            str(len(run.steps)),
            f"{run.mean_accepted:.2f}",
            steps_over_time(run.steps),
            str(run.num_switches),
            str(run.rounds_to_settle),
            f"{run.prefill_seconds:.2f}",
        )
    console.print(table)
    rounds = sum(len(run.steps) for run in lane.phases)
    settling = sum(run.rounds_to_settle for run in lane.phases)
    console.print(
        f"{settling} of {rounds} rounds ({settling / rounds:.1%}) came before the S that their "
        "phase mostly ran with.\n"
    )


def show_requirements(console: Console, lane: Lane, lanes: Sequence[Lane]) -> None:
    """The two requirements on throughput, as measured."""
    rivals = static_rivals(lane, lanes)
    if not rivals:
        return
    ratios = [
        best_ratio(run.tokens_per_second, [other.phases[i].tokens_per_second for other in rivals])
        for i, run in enumerate(lane.phases)
    ]
    worst = min(ratios)
    overall = best_ratio(lane.tokens_per_second, [other.tokens_per_second for other in rivals])
    for what, value, limit in (
        ("worst phase against that phase's best static S", worst, PHASE_RATIO),
        ("whole workload against the best single static S", overall, 1.0),
    ):
        met = "[green]met[/]" if value >= limit else "[red]not met[/]"
        console.print(f"{lane.mode.name}: {what}: {value:.3f}x, wanted {limit:g}: {met}")


def show_comparison(console: Console, comparison: Comparison, workload: Workload) -> None:
    c = comparison
    console.print(
        f"Outputs against {c.reference!r}: {c.num_outputs - len(c.differences)} of {c.num_outputs} "
        f"identical ({c.identical_share:.2%}) over {c.num_tokens} tokens."
    )
    if not c.differences:
        return
    gaps = sorted(d.gap for d in c.differences)
    verdict = (
        f"[green]every first difference is a tie within {MAX_TIE_GAP:g}[/]"
        if c.lossless
        else f"[bold red]a gap of {MAX_TIE_GAP:g} or more is a wrong token[/]"
    )
    console.print(
        f"First differences lie where the target's best choices are {gaps[0]:.1e} to "
        f"{gaps[-1]:.1e} of a logit apart (recomputed in float64): {verdict}."
    )
    for d in [d for d in c.differences if not d.is_tie][:10]:
        console.print(
            f"  {d.mode}, {workload.phases[d.phase].name}, request {d.request}, output token "
            f"{d.position}: {d.token} instead of {d.reference_token}, gap {d.gap:.2e}"
        )


def show_text(console: Console, lane: Lane, workload: Workload, tokenizer: Tokenizer) -> None:
    """One output of each kind of text, coloured by where its tokens came from."""
    shown: set[str] = set()
    for phase, run in zip(workload.phases, lane.phases, strict=True):
        if phase.regime in shown:
            continue
        shown.add(phase.regime)
        request, accepted = run.sample.request, run.sample.accepted
        text = Text("..." + tokenizer.decode(request.prompt_ids)[-160:], style=PROMPT_STYLE)
        for piece, is_draft in text_pieces(tokenizer, request.output_ids[:96], accepted[:96]):
            text.append(piece, style=ACCEPTED_STYLE if is_draft else TARGET_STYLE)
        console.rule(f"{phase.name}, {lane.mode.name}", align="left")
        console.print(text)
    console.rule()
    console.print(
        Text.assemble(
            ("prompt", PROMPT_STYLE),
            ", ",
            ("accepted draft", ACCEPTED_STYLE),
            ", ",
            ("chosen by the target itself", TARGET_STYLE),
            "\n",
        )
    )


def as_dict(
    lanes: Sequence[Lane], workload: Workload, comparison: Comparison, setup: dict[str, Any]
) -> dict[str, Any]:
    """All of it for ``--json``."""
    modes = []
    for lane in lanes:
        phases = [
            {
                "num_tokens": run.num_tokens,
                "seconds": run.seconds,
                "tokens_per_second": run.tokens_per_second,
                "prefill_seconds": run.prefill_seconds,
                "rounds": len(run.steps),
                "mean_accepted_drafts": run.mean_accepted,
                "num_switches": run.num_switches,
                "rounds_to_settle": run.rounds_to_settle,
                "steps": run.steps,
            }
            for run in lane.phases
        ]
        mode: dict[str, Any] = {
            "name": lane.mode.name,
            "tokens_per_second": lane.tokens_per_second,
            "phases": phases,
        }
        if lane.policy is None:
            mode["speculative_num_steps"] = lane.mode.steps
        else:
            mode["config"] = lane.mode.config.to_dict()
            mode["best_static_ratio"] = [
                best_ratio(
                    run.tokens_per_second,
                    [o.phases[i].tokens_per_second for o in static_rivals(lane, lanes)],
                )
                for i, run in enumerate(lane.phases)
            ]
            mode["rounds"] = [vars(r) for r in lane.rounds]
        modes.append(mode)
    return {
        "setup": setup,
        "phases": [vars(phase) | {"name": phase.name} for phase in workload.phases],
        "modes": modes,
        "comparison": {
            "reference": comparison.reference,
            "num_outputs": comparison.num_outputs,
            "num_tokens": comparison.num_tokens,
            "identical_share": comparison.identical_share,
            "lossless": comparison.lossless,
            "max_tie_gap": MAX_TIE_GAP,
            "differences": [vars(d) for d in comparison.differences],
        },
    }
