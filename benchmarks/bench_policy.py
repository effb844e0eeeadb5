"""How near do the step policies come to an oracle, on simulated traffic over many cost tables?

Every policy of `adaptive_spec.sim.policies` meets the same rounds. The oracle knows the acceptance
process and the costs, and runs each phase with the S of the most expected tokens per millisecond.

    python benchmarks/bench_policy.py                    all of it
    python benchmarks/bench_policy.py --only recovery    one part

Parts: mixed (random phases), stationary (3,000 rounds each), recovery (after a step change), costs
(the policy is told costs that are wrong by up to 20 %), adversarial, speed (of the simulation).
"""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.box import SIMPLE_HEAVY
from rich.console import Console
from rich.table import Table

from adaptive_spec.cost_table import CostTable
from adaptive_spec.sim.acceptance import (
    AcceptanceProcess,
    Correlated,
    Mixture,
    RegimeSwitching,
    drifting,
    geometric,
)
from adaptive_spec.sim.compare import best_static, group_shares, judge, share_of_oracle
from adaptive_spec.sim.policies import is_static, policy_factories
from adaptive_spec.sim.simulate import (
    DrawnPhase,
    Phase,
    Run,
    draw_phases,
    expected_rates,
    replay_oracle,
    replay_phases,
)

TABLES = Path(__file__).parent / "cost_tables"
BATCH_SIZES = (1, 8, 32, 128)
RATES = (0.15, 0.4, 0.65, 0.85, 0.95)
LONG_PHASE, WORST_PHASE = 3000, 400
# A policy has recovered when its next rounds together come within 3% of the best expected rate.
RECOVERED, RECOVERY_WINDOW = 0.97, 20

app = typer.Typer(add_completion=False)


class Part(enum.StrEnum):
    mixed = "mixed"
    stationary = "stationary"
    recovery = "recovery"
    costs = "costs"
    adversarial = "adversarial"
    speed = "speed"


@app.command()
def bench(
    only: Annotated[Part | None, typer.Option(help="Run one part.")] = None,
    tables: Annotated[str, typer.Option(help="Cost tables: a file pattern.")] = "*.json",
    folder: Annotated[Path, typer.Option(help="Where the cost tables are.")] = TABLES,
    seeds: Annotated[str, typer.Option(help="Of every part.")] = "11,12,13",
    lag: Annotated[int, typer.Option(min=1, help="Rounds until counts are known.")] = 1,
    switch_ms: Annotated[float, typer.Option(min=0, help="Added to rounds that change S.")] = 0.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the numbers.")] = None,
) -> None:
    """Print the numbers of each part for every policy."""
    costs = {path.stem: CostTable.load(path) for path in sorted(folder.glob(tables))}
    if not costs:
        raise typer.BadParameter(f"no cost table matches {folder / tables}")
    chosen = [int(seed) for seed in seeds.split(",")]
    console = Console(width=120)
    console.print(
        f"{len(costs)} cost tables, seeds {seeds}, feedback lag {lag}, switch {switch_ms:g} ms"
    )
    world = World(costs, chosen, lag, switch_ms)
    results = {}
    for part in Part if only is None else (only,):
        rows = PARTS[part](world)
        results[part.value] = rows
        console.print(_table(part.value, rows))
    if json_file is not None:
        about = {"tables": sorted(costs), "seeds": chosen, "lag": lag, "switch_ms": switch_ms}
        json_file.write_text(json.dumps(about | results, indent=1) + "\n", encoding="utf-8")
        console.print(f"wrote {json_file}")


class World:
    """The tables and seeds of a benchmark run."""

    def __init__(
        self, costs: Mapping[str, CostTable], seeds: Sequence[int], lag: int, switch_ms: float
    ):
        self.costs, self.seeds = costs, seeds
        self._options = {"lag": lag, "switch_ms": switch_ms}

    def __iter__(self) -> Iterator[tuple[str, CostTable, int]]:
        return ((name, table, seed) for name, table in self.costs.items() for seed in self.seeds)

    def adaptive(self) -> list[str]:
        """Names of the policies that every table can run."""
        offers = [policy_factories(table) for table in self.costs.values()]
        names = [name for name in offers[0] if not is_static(name)]
        return [name for name in names if all(name in offer for offer in offers)]

    def run(
        self,
        drawn: Sequence[DrawnPhase],
        table: CostTable,
        names: Sequence[str] | None = None,
        believed: CostTable | None = None,
    ) -> dict[str, Run]:
        """A run of each policy, by default all, and of the oracle; policies start afresh."""
        factories = policy_factories(believed or table)
        runs = {
            name: replay_phases(make(), drawn, table, **self._options)
            for name, make in factories.items()
            if names is None or name in names
        }
        return runs | {"oracle": replay_oracle(drawn, table)}


def mixed(world: World) -> list[dict[str, Any]]:
    """Phases of random batch size, acceptance and length."""
    found: dict[str, list] = {}
    for _, table, seed in world:
        drawn = draw_phases(mixed_phases(seed), seed)
        runs = world.run(drawn, table)
        results = {
            name: judge(name, run, runs["oracle"], WORST_PHASE) for name, run in runs.items()
        }
        single = max((r for n, r in results.items() if is_static(n)), key=lambda r: r.share)
        results["best single S"] = single
        for name, result in results.items():
            if not is_static(name) or name == "none":
                found.setdefault(name, []).append(result)
    return [
        {
            "policy": name,
            "share mean": np.mean([r.share for r in results]),
            "share min": min(r.share for r in results),
            f"worst phase of {WORST_PHASE}+ rounds": min(r.worst_share for r in results),
            "switches / 1000 mean": np.mean([r.switches_per_1000 for r in results]),
            "switches / 1000 max": max(r.switches_per_1000 for r in results),
        }
        for name, results in found.items()
    ]


def mixed_phases(seed: int, count: int = 40) -> list[Phase]:
    """Batch sizes 1-128 and lengths of 150-3,000 rounds, both log-uniform; acceptance 0.15-0.95."""
    rng = np.random.Generator(np.random.PCG64(seed))
    return [
        Phase(
            batch_size=_log_uniform(rng, 1, 128),
            num_rounds=_log_uniform(rng, 150, 3000),
            process=random_process(rng),
        )
        for _ in range(count)
    ]


def random_process(rng: np.random.Generator) -> AcceptanceProcess:
    rate, other = rng.uniform(0.15, 0.95, 2)
    kind = rng.integers(6)
    if kind == 0:
        return drifting(rate, max(0.15, rate - rng.uniform(0.1, 0.4)), 5)
    if kind == 1:
        return drifting(rate, min(0.95, rate + rng.uniform(0.1, 0.3)), 5)
    if kind == 2:
        return Mixture([geometric(rate), geometric(other)], [1.0, 1.0])
    if kind == 3:
        return RegimeSwitching([geometric(rate), geometric(other)], [40.0, 40.0])
    if kind == 4:
        return Correlated(rate, 0.8, 30.0)
    return geometric(rate)


def stationary(world: World) -> list[dict[str, Any]]:
    """Long phases in random order, the policy carried from one to the next."""
    found: dict[str, list[float]] = {}
    for _, table, seed in world:
        rng = np.random.Generator(np.random.PCG64(seed))
        phases = [Phase(b, LONG_PHASE, geometric(rate)) for b in BATCH_SIZES for rate in RATES]
        phases = [phases[i] for i in rng.permutation(len(phases))]
        runs = world.run(draw_phases(phases, seed), table)
        best = best_static(runs)
        for name in (*world.adaptive(), "oracle"):
            found.setdefault(name, []).extend(runs[name].group_rates() / best)
    return [
        {
            "policy": name,
            "of the best static S, mean": np.mean(shares),
            "1st percentile": np.quantile(shares, 0.01),
            "min": min(shares),
        }
        for name, shares in found.items()
    ]


def recovery(world: World) -> list[dict[str, Any]]:
    """Rounds after a step change until S is within 3% of the new optimum. Changes after which the
    old optimum is still within 3% of the new one are left out."""
    changes = {
        "acceptance, B=1": [((1, a), (1, b)) for a, b in ((0.3, 0.9), (0.9, 0.3))],
        "acceptance, B=64": [((64, a), (64, b)) for a, b in ((0.3, 0.9), (0.9, 0.3))],
        "batch 64 -> 1": [((64, a), (1, a)) for a in (0.6, 0.8)],
        "batch 1 -> 64": [((1, a), (64, a)) for a in (0.6, 0.8)],
    }
    rows = []
    for what, pairs in changes.items():
        found: dict[str, list[float]] = {name: [] for name in world.adaptive()}
        for _, table, seed in world:
            for index, (before, after) in enumerate(pairs):
                # Between phases of the other kind, so that a slot has history and must unlearn it.
                phases = [
                    Phase(batch, 600, geometric(rate)) for batch, rate in (after, before, after)
                ]
                rates = expected_rates(phases[2], table)
                old = int(np.nanargmax(expected_rates(phases[1], table)))
                if rates[old] >= RECOVERED * np.nanmax(rates):
                    continue
                drawn = draw_phases(phases, 1000 * seed + index)
                for name, run in world.run(drawn, table, found.keys()).items():
                    if name != "oracle":
                        found[name].append(rounds_to_recover(run.steps[1200:], phases[2], table))
        rows += [
            {
                "policy": name,
                "change": what,
                "cases": len(rounds),
                "rounds, median": np.median(rounds),
                "90th percentile": np.quantile(rounds, 0.9),
                "never in 600": sum(r >= 600 for r in rounds),
            }
            for name, rounds in found.items()
            if rounds
        ]
    return rows


def rounds_to_recover(steps: np.ndarray, phase: Phase, table: CostTable) -> int:
    """The first round from which the next `RECOVERY_WINDOW` have enough expected throughput."""
    tokens = phase.expected_tokens()[steps]
    column = {s: i for i, s in enumerate(table.steps)}
    ms = table.row(phase.batch_size)[[column[s] for s in steps.tolist()]]
    sums = [np.convolve(values, np.ones(RECOVERY_WINDOW), "valid") for values in (tokens, ms)]
    good = sums[0] / sums[1] >= RECOVERED * np.nanmax(expected_rates(phase, table))
    return int(np.argmax(good)) if good.any() else len(steps)


def costs(world: World) -> list[dict[str, Any]]:
    """Points of the oracle's throughput lost when every cost that the policy is told is wrong."""
    found: dict[str, list[float]] = {name: [] for name in world.adaptive()}
    for _, table, seed in world:
        drawn = draw_phases(mixed_phases(seed), seed)
        right = world.run(drawn, table, found.keys())
        wrong = world.run(drawn, table, found.keys(), believed=distorted(table, 0.2, seed))
        for name, losses in found.items():
            losses.append(
                100
                * (
                    share_of_oracle(right[name], right["oracle"])
                    - share_of_oracle(wrong[name], wrong["oracle"])
                )
            )
    return [
        {"policy": name, "points lost, mean": np.mean(losses), "max": max(losses)}
        for name, losses in found.items()
    ]


def distorted(table: CostTable, error: float, seed: int) -> CostTable:
    """Every entry times a factor of its own, uniform in 1 - error to 1 + error."""
    rng = np.random.Generator(np.random.PCG64(seed))
    return CostTable.from_function(
        lambda b, s: table.cost(b, s) * rng.uniform(1 - error, 1 + error),
        table.batch_sizes,
        table.steps,
        machine=table.machine,
        model=table.model,
    )


def adversarial(world: World) -> list[dict[str, Any]]:
    """Traffic that is made to mislead."""
    rows = []
    for what, make in ADVERSARIES.items():
        found: dict[str, list[tuple[float, float, float]]] = {}
        for _, table, seed in world:
            for batch in (4, 64) if what == "batch hovers" else (1, 8, 64):
                runs = world.run(draw_phases(make(batch), seed), table)
                best = max(
                    share_of_oracle(run, runs["oracle"])
                    for name, run in runs.items()
                    if is_static(name)
                )
                for name in world.adaptive():
                    run = runs[name]
                    share = share_of_oracle(run, runs["oracle"])
                    lowest = float(np.nanmin(group_shares(run, runs["oracle"])))
                    found.setdefault(name, []).append(
                        (share, share / best, lowest, run.switches_per_1000)
                    )
        for name, values in found.items():
            share, of_static, lowest, switches = np.array(values).T
            rows.append(
                {
                    "policy": name,
                    "traffic": what,
                    "share mean": share.mean(),
                    "share min": share.min(),
                    "worst kind of phase": lowest.min(),
                    "of the best static, mean": of_static.mean(),
                    "min": of_static.min(),
                    "switches / 1000 max": switches.max(),
                }
            )
    return rows


def speed(world: World) -> list[dict[str, Any]]:
    """Simulated rounds a minute on one core, drawing not counted; on the first table."""
    table = next(iter(world.costs.values()))
    factories = policy_factories(table)
    rows = []
    for batch in (1, 8, 64):
        phases = [Phase(batch, 250, geometric(rate)) for rate in (0.3, 0.9) * 100]
        drawn = draw_phases(phases, world.seeds[0])
        for name in ("none", "S=3", *world.adaptive()):
            begin = time.perf_counter()
            run = replay_phases(factories[name](), drawn, table)
            rate = len(run.ms) * 60 / (time.perf_counter() - begin)
            rows.append({"policy": name, "batch size": batch, "million rounds / min": rate / 1e6})
    return rows


def _flipping(batch: int) -> list[Phase]:
    good, bad = geometric(0.9), geometric(0.2)
    return [
        Phase(batch, 50, process, name=name)
        for _ in range(30)
        for process, name in ((good, "good"), (bad, "bad"))
    ]


def _hovering(batch: int) -> list[Phase]:
    return [
        Phase(size, 1, geometric(0.7), name=f"B={size}")
        for _ in range(LONG_PHASE // 2)
        for size in (batch, batch + 1)
    ]


ADVERSARIES: dict[str, Callable[[int], list[Phase]]] = {
    "flips every 50": _flipping,
    "rises with depth": lambda b: [Phase(b, LONG_PHASE, drifting(0.3, 0.97, 4))],
    "falls with depth": lambda b: [Phase(b, LONG_PHASE, drifting(0.9, 0.1, 4))],
    "all accepted": lambda b: [Phase(b, LONG_PHASE, geometric(1.0))],
    "none accepted": lambda b: [Phase(b, LONG_PHASE, geometric(0.0))],
    "one request hogs": lambda b: [Phase(b, LONG_PHASE, geometric(0.98), others=geometric(0.1))],
    "batch hovers": _hovering,
}

PARTS = {
    Part.mixed: mixed,
    Part.stationary: stationary,
    Part.recovery: recovery,
    Part.costs: costs,
    Part.adversarial: adversarial,
    Part.speed: speed,
}


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return int(np.floor(np.exp(rng.uniform(np.log(low), np.log(high + 1)))))


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAVY)
    for heading, value in rows[0].items():
        table.add_column(heading, justify="left" if isinstance(value, str) else "right")
    for row in rows:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    return table


if __name__ == "__main__":
    app()
