"""What a round of verification takes on the device, with and without adaptivity.

    python benchmarks/bench_verify.py [--output DIR]

Ways to do the same round over the same inputs in one process (verify_alternatives.py and, for
sampling, sampling_alternatives.py say what each stands for), S = 7, two accepted drafts a request
on average. Before timing, all must give the right tokens (or possible ones, where their own noise
draws them), and the state must be where the Python policy gets.

device   time of a round on the device: rounds captured in a CUDA graph, events around replays.
         warm: one batch over and over. cold: from logits, batches that exceed the L2 cache take
         turns; else the cache is overwritten before each round and that time taken off.
round    wall-clock time of a round where the next one waits for what it must wait for.
floor    the bytes that must be read, over the bandwidth of a copy measured in the same process.
         `needed` counts the rows up to each request's first mismatch. A lazy kernel reads those and
         an unknown number of the others, so its share of the bandwidth is a lower bound.

With --device cpu (the default where there is no GPU) everything is timed by the wall clock on small
shapes: that exercises this script and says nothing about a GPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.box import SIMPLE_HEAVY
from rich.console import Console
from rich.table import Table
from sampling_alternatives import (
    SAMPLED_OPS,
    SampledFused,
    SampledShape,
    make_sampled_batch,
    sampled_alternatives,
)
from verify_alternatives import (
    NUM_STEPS,
    Alternative,
    Batch,
    Fused,
    Shape,
    alternatives,
    make_batch,
)

from adaptive_spec.testing.device_timer import round_sampler
from adaptive_spec.testing.launches import device_launches
from adaptive_spec.testing.machine import describe_machine
from adaptive_spec.testing.timer import Timing, sample_interleaved

FUSED, PLAIN = "fused, with state", "fused, no state"
MAX_STATE_SHARE, MAX_STATE_S = 0.03, 0.5e-6
MIN_SPEEDUP, MIN_BANDWIDTH_SHARE = 1.8, 0.7
ROUNDS_PER_GRAPH = 16
PIPE_WIDTH = 200


@dataclasses.dataclass
class Sizes:
    """How much is measured."""

    tree_and_chain: list[int]
    logits: list[int]
    sampled: list[int]
    vocab_size: int
    samples: int
    sample_s: float
    copy_bytes: int
    host_rounds: int


GPU_SIZES = Sizes([1, 8, 64, 256], [1, 8, 64], [1, 64], 128_256, 21, 2e-3, 1 << 30, 300)
CPU_SIZES = Sizes([1, 8], [1, 4], [1, 4], 2_048, 5, 1e-3, 1 << 24, 20)


class Bench:
    def __init__(self, device: torch.device, sizes: Sizes):
        self.device, self.sizes = device, sizes
        is_cuda = device.type == "cuda"
        self.cache_bytes = (
            torch.cuda.get_device_properties(device).L2_cache_size if is_cuda else 1 << 20
        )
        self.copy_bandwidth = self.measure_copy_bandwidth()
        word = torch.zeros(1, device=device)
        word.add_(1)
        self.launch_floor = self.time({"": [lambda: word.add_(1)] * ROUNDS_PER_GRAPH})[""].median
        # Twice the cache, so that nothing of a round before stays.
        self.flush_buffer = torch.zeros(2 * self.cache_bytes, dtype=torch.int8, device=device)

    def sample(self, rounds: dict[str, list]) -> dict[str, list[float]]:
        samplers = {
            name: round_sampler(launches, self.device, self.sizes.sample_s)
            for name, launches in rounds.items()
        }
        return sample_interleaved(samplers, self.sizes.samples)

    def time(self, rounds: dict[str, list]) -> dict[str, Timing]:
        return {name: Timing.of(seconds) for name, seconds in self.sample(rounds).items()}

    def measure_copy_bandwidth(self) -> float:
        """Bytes per second, read and written."""
        source = torch.zeros(self.sizes.copy_bytes, dtype=torch.int8, device=self.device).random_()
        target = torch.empty_like(source)
        target.copy_(source)
        timing = self.time({"copy": [lambda: target.copy_(source)] * 2})["copy"]
        return 2 * source.nbytes / timing.median

    def run_shape(self, op: str, batch_size: int) -> list[dict]:
        shape = Shape(op, batch_size, self.sizes.vocab_size, self.device)
        batches = [make_batch(shape, seed=0)]
        if op == "logits":
            batches += [make_batch(shape, seed) for seed in range(1, self.num_copies(batches[0]))]
        fused = Fused(shape)
        ways = alternatives(shape, fused)
        check(fused, ways, batches)
        launches = {way.name: self.count_launches(way, batches[0]) for way in ways}
        rows = []
        for cache in ("warm", "cold"):
            samples = self.sample_rounds(ways, batches, cache)
            for way in ways:
                rows.append(
                    self.row(shape, way, batches, cache, samples) | {"launches": launches[way.name]}
                )
        for way in ways:
            if way.start_rounds is not None:
                timing = self.time_round_on_host(way, batches[0])
                for row in rows:
                    if row["alternative"] == way.name:
                        row["round_us"] = timing * 1e6
        return rows

    def run_sampled_shape(self, op: str, batch_size: int) -> list[dict]:
        """Cold only: the rows come from a forward pass that has filled the cache with weights."""
        shape = SampledShape(op, batch_size, self.sizes.vocab_size, self.device, **SAMPLED_OPS[op])
        batches = [make_sampled_batch(shape, seed=0)]
        batches += [make_sampled_batch(shape, s) for s in range(1, self.num_copies(batches[0]))]
        fused = SampledFused(shape)
        ways = sampled_alternatives(shape, fused)
        check(fused, ways, batches)
        launches = {way.name: self.count_launches(way, batches[0]) for way in ways}
        samples = self.sample_rounds(ways, batches, "cold")
        return [
            self.row(shape, way, batches, "cold", samples) | {"launches": launches[way.name]}
            for way in ways
        ]

    def num_copies(self, batch: Batch) -> int:
        """What the laziest reads of all copies is three times the cache."""
        copies = min(-(-3 * self.cache_bytes // batch.num_needed_bytes), 256)
        return max(copies, 2)

    def sample_rounds(
        self, ways: list[Alternative], batches: list[Batch], cache: str
    ) -> dict[str, list[float]]:
        if cache == "warm":
            batches = batches[:1] * ROUNDS_PER_GRAPH
        elif len(batches) == 1:
            batches = batches * ROUNDS_PER_GRAPH
        rounds = {
            way.name: [lambda way=way, batch=batch: way.launch(batch) for batch in batches]
            for way in ways
        }
        if cache == "warm" or batches[0] is not batches[-1]:
            return self.sample(rounds)
        # Small inputs: one batch, and the cache overwritten in front of each round.
        flush = self.flush_buffer.zero_
        samples = self.sample(
            {"": [flush] * len(batches)}
            | {
                name: [step for launch in launches for step in (flush, launch)]
                for name, launches in rounds.items()
            }
        )
        flushing = samples.pop("")
        # A round of these has two steps, hence twice the time per step.
        return {
            name: [2 * both - alone for both, alone in zip(seconds, flushing, strict=True)]
            for name, seconds in samples.items()
        }

    def row(self, shape: Shape, way: Alternative, batches, cache: str, samples) -> dict:
        timing = Timing.of(samples[way.name])
        used = batches[:1] if cache == "warm" else batches
        num_bytes = sum(batch.num_bytes for batch in used) / len(used)
        needed = sum(batch.num_needed_bytes for batch in used) / len(used)
        row = {
            "op": shape.op,
            "batch_size": shape.batch_size,
            "num_draft_tokens": NUM_STEPS + 1,
            "vocab_size": shape.vocab_size,
            "mean_accepted": sum(b.accepted.float().mean().item() for b in used) / len(used),
            "cache": cache,
            "alternative": way.name,
            "is_whole": way.is_whole,
            "us": timing.median * 1e6,
            "p10_us": timing.p10 * 1e6,
            "p90_us": timing.p90 * 1e6,
            "num_samples": timing.repetitions,
            "relative_to_fused": timing.median / Timing.of(samples[FUSED]).median,
            "num_bytes": num_bytes,
            "num_needed_bytes": needed,
            "floor_all_us": num_bytes / self.copy_bandwidth * 1e6,
            "floor_needed_us": needed / self.copy_bandwidth * 1e6,
            "round_us": None,
        }
        if way.name == FUSED:
            turns = zip(samples[FUSED], samples[PLAIN], strict=True)
            cost = Timing.of([own - plain for own, plain in turns])
            row["state_cost_us"] = cost.median * 1e6
            row["state_cost_p10_us"] = cost.p10 * 1e6
            row["state_cost_p90_us"] = cost.p90 * 1e6
            row["state_cost_share"] = cost.median / Timing.of(samples[PLAIN]).median
        return row

    def count_launches(self, way: Alternative, batch: Batch) -> int | None:
        if self.device.type != "cuda":
            return None
        return len(device_launches(lambda: way.launch(batch)))

    def time_round_on_host(self, way: Alternative, batch: Batch) -> float:
        """Seconds from one launch to the next, where the host does what it must in between."""
        if self.device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                way.launch(batch)
            launch = graph.replay
        else:
            launch = lambda: way.launch(batch)  # noqa: E731
        between_rounds = way.start_rounds()
        seconds = []
        for _ in range(self.sizes.samples + 1):
            start = time.perf_counter()
            for _ in range(self.sizes.host_rounds):
                launch()
                between_rounds()
            self.synchronize()
            seconds.append((time.perf_counter() - start) / self.sizes.host_rounds)
        return Timing.of(seconds[1:]).median

    def rounds_without_sync(self, num_rounds: int = 1_000) -> bool | None:
        """Whether that many rounds with state, host reads included, pass torch's sync detector."""
        if self.device.type != "cuda":
            return None
        shape = Shape("logits", 8, self.sizes.vocab_size, self.device)
        batch, fused = make_batch(shape, seed=0), Fused(shape)
        fused.launch(batch)
        read_steps = fused.start_rounds()
        self.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(num_rounds):
                fused.launch(batch)
                read_steps()
        except RuntimeError as error:
            print(f"a round synchronised: {error}", file=sys.stderr)
            return False
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return True

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def check(fused: Fused, ways: list[Alternative], batches: list[Batch]) -> None:
    """All give the right tokens for all batches, into outputs that held something else."""
    for way in ways:
        for batch in batches:
            for output in batch.outputs.values():
                output.fill_(-5)
            way.launch(batch)
            if way.is_whole:
                batch.check(way.name)
    fused.check_state(len(batches), batches)


def targets(rows: list[dict], no_syncs: bool | None, on_gpu: bool) -> list[dict]:
    """What the library promises, beside what was measured. On a CPU nothing is judged."""
    states = [row for row in rows if "state_cost_us" in row]
    worst = max(
        states,
        key=lambda row: min(
            row["state_cost_share"] / MAX_STATE_SHARE, row["state_cost_us"] / (MAX_STATE_S * 1e6)
        ),
    )
    largest = max(row["batch_size"] for row in rows if row["op"] == "logits")
    cold = {
        row["alternative"]: row
        for row in rows
        if (row["op"], row["batch_size"], row["cache"]) == ("logits", largest, "cold")
    }
    speedup = cold["argmax + verify"]["relative_to_fused"]
    share = cold[FUSED]["floor_needed_us"] / cold[FUSED]["us"]
    launches = {row["launches"] for row in rows if row["alternative"] in (FUSED, PLAIN)}
    where = f"{worst['op']}, B = {worst['batch_size']}, {worst['cache']}"
    found = [
        (
            f"state costs at most {MAX_STATE_SHARE:.0%} or {MAX_STATE_S * 1e6} µs",
            f"worst of {len(states)}: {worst['state_cost_share']:.1%}, "
            f"{worst['state_cost_us']:.2f} µs ({where})",
            worst["state_cost_share"] <= MAX_STATE_SHARE
            or worst["state_cost_us"] <= MAX_STATE_S * 1e6,
        ),
        (
            f"from logits, B = {largest}: at least {MIN_SPEEDUP}x argmax + verify",
            f"{speedup:.2f}x",
            speedup >= MIN_SPEEDUP,
        ),
        (
            f"from logits, B = {largest}: at least {MIN_BANDWIDTH_SHARE:.0%} of copy bandwidth",
            f"{share:.0%} by the rows that are needed",
            share >= MIN_BANDWIDTH_SHARE,
        ),
        ("one launch per op", f"launches: {sorted(launches, key=str)}", launches == {1}),
        ("no host sync in 1,000 rounds", str(no_syncs), no_syncs is True),
    ]
    return [
        {"target": target, "measured": measured, "passed": bool(passed) if on_gpu else None}
        for target, measured, passed in found
    ]


COLUMNS = {
    "op": "op",
    "batch_size": "B",
    "cache": "cache",
    "alternative": "alternative",
    "us": "device µs",
    "spread": "p10-p90",
    "relative_to_fused": "of fused",
    "launches": "launches",
    "floor_needed_us": "floor, needed µs",
    "floor_all_us": "floor, all µs",
    "round_us": "round µs",
}


def cells(row: dict) -> list[str]:
    shown = row | {"spread": f"{row['p10_us']:.2f}-{row['p90_us']:.2f}"}
    shown["relative_to_fused"] = f"{row['relative_to_fused']:.2f}x"
    texts = []
    for name in COLUMNS:
        value = shown[name]
        texts.append(
            "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
        )
    return texts


STATE_COLUMNS = ["op", "B", "cache", "state costs µs", "p10-p90", "share"]


def state_cells(row: dict) -> list[str]:
    return [
        row["op"],
        str(row["batch_size"]),
        row["cache"],
        f"{row['state_cost_us']:.3f}",
        f"{row['state_cost_p10_us']:.3f}-{row['state_cost_p90_us']:.3f}",
        f"{row['state_cost_share']:.1%}",
    ]


VERDICTS = {True: "pass", False: "FAIL", None: "not judged"}


def tables(report: dict) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, header and rows of each."""
    state_rows = [row for row in report["rows"] if "state_cost_us" in row]
    return [
        (
            "Targets",
            ["target", "measured", ""],
            [[t["target"], t["measured"], VERDICTS[t["passed"]]] for t in report["targets"]],
        ),
        (
            "State: fused with it, less fused without, turn by turn",
            STATE_COLUMNS,
            [state_cells(row) for row in state_rows],
        ),
        ("Rounds", list(COLUMNS.values()), [cells(row) for row in report["rows"]]),
    ]


def summary(report: dict) -> list[str]:
    lines = [", ".join(f"{name} {value}" for name, value in report["machine"].items())]
    lines.append(
        f"copy {report['copy_gb_per_s']:.0f} GB/s read and written; one tiny launch "
        f"{report['launch_floor_us']:.2f} µs; reproduce with `{report['command']}`"
    )
    if report["device"] == "cpu":
        lines.append("CPU, wall clock, small shapes: exercises the script, measures no GPU.")
    return lines


def to_markdown(report: dict) -> str:
    lines = ["# bench_verify", "", *(line + "  " for line in summary(report))]
    for title, header, rows in tables(report):
        lines += ["", f"## {title}", "", "| " + " | ".join(header) + " |"]
        lines.append("|" + "---|" * len(header))
        lines += ["| " + " | ".join(row) + " |" for row in rows]
    lines += ["", "Stands for:", ""]
    lines += [f"- {name}: {text}." for name, text in report["stands_for"].items()]
    return "\n".join(lines) + "\n"


def show(report: dict, console: Console) -> None:
    for title, header, rows in tables(report):
        table = Table(*header, title=title, box=SIMPLE_HEAVY, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for line in summary(report):
        console.print(line, highlight=False)


def stands_for(vocab_size: int, device: torch.device) -> dict[str, str]:
    shape = Shape("logits", 1, vocab_size, device)
    ways = alternatives(shape, Fused(shape))
    for op, traits in SAMPLED_OPS.items():
        sampled = SampledShape(op, 1, vocab_size, device, **traits)
        ways += sampled_alternatives(sampled, SampledFused(sampled))
    return {way.name: way.stands_for for way in ways}


def check_output(folder: Path) -> None:
    """Before minutes are spent on what could not be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise typer.BadParameter(f"cannot write into it: {error}", param_hint="--output") from None


def main(
    device: Annotated[str, typer.Option(help="cuda or cpu; default: cuda if there is one.")] = "",
    output: Annotated[Path | None, typer.Option(help="Folder for JSON and Markdown.")] = None,
    samples: Annotated[int | None, typer.Option(min=2, help="Per alternative.")] = None,
):
    """Time a verification round on the device, with and without adaptivity."""
    if output is not None:
        check_output(output)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = where.type == "cuda"
    sizes = GPU_SIZES if on_gpu else CPU_SIZES
    if samples is not None:
        sizes = dataclasses.replace(sizes, samples=samples)
    bench = Bench(where, sizes)
    console = Console()
    if not console.is_terminal:
        # Else a pipe or a file gets 80 columns, and most cells without their ends.
        console.width = PIPE_WIDTH
    rows = []
    shapes = [(op, size) for op in ("tree", "chain") for size in sizes.tree_and_chain]
    shapes += [("logits", size) for size in sizes.logits]
    for op, batch_size in shapes:
        with console.status(f"{op}, B = {batch_size}"):
            rows += bench.run_shape(op, batch_size)
    for op, batch_size in itertools.product(SAMPLED_OPS, sizes.sampled):
        with console.status(f"{op}, B = {batch_size}"):
            rows += bench.run_sampled_shape(op, batch_size)
    report = {
        "machine": describe_machine(where),
        "device": where.type,
        "command": "python " + " ".join(sys.argv),
        "copy_gb_per_s": bench.copy_bandwidth / 1e9,
        "launch_floor_us": bench.launch_floor * 1e6,
        "targets": targets(rows, bench.rounds_without_sync(), on_gpu),
        "rows": rows,
        "stands_for": stands_for(sizes.vocab_size, where),
    }
    show(report, console)
    if output is not None:
        (output / "bench_verify.json").write_text(json.dumps(report, indent=1) + "\n")
        (output / "bench_verify.md").write_text(to_markdown(report), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
