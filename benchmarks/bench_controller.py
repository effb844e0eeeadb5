"""What adaptivity costs the host per decode round.

    python benchmarks/bench_controller.py [--json FILE]

device   AdaptiveController over an AdaptiveState: activate_step_by_batch is all there is, the
         verify op has done the rest.
python   the same controller over the Python reference policy: activate, turn the op's
         accept_token_num into a list, feed it to the policy.
sglang   SGLang's own policy and controller, where the package is installed, doing what
         `python` does.

Before timing, all alternatives are run over the same traffic and must choose the same steps.
"""

from __future__ import annotations

import json
import platform
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from adaptive_spec import ops
from adaptive_spec.controller import AdaptiveController
from adaptive_spec.state import AdaptiveState
from adaptive_spec.step_policy import AdaptiveSpeculativeParams
from adaptive_spec.testing.timer import time_interleaved

ROUNDS = 2_000
REPETITIONS = 25
# Holds the rounds of all repetitions, so that reads can be timed by themselves.
RING_DEPTH = 1 << 16
BATCH_SIZES = (1, 8, 64, 256)
CONFIG = {
    "1": {"candidate_steps": [1, 3, 7]},
    "8": {"candidate_steps": [1, 3, 7]},
    "64": {"candidate_steps": [1, 3]},
}
INITIAL_STEPS = 3


class RuntimeState:
    """Stands for a prepared runtime state: switching costs the same for all alternatives."""

    def __init__(self, steps: int):
        self.speculative_num_steps = steps


class Worker:
    speculative_num_steps = 0

    def build_adaptive_runtime_state(
        self, speculative_num_steps, speculative_num_draft_tokens, cuda_graph_bs=None
    ):
        return RuntimeState(speculative_num_steps)

    def apply_runtime_state(self, state):
        self.speculative_num_steps = state.speculative_num_steps


def accepted(batch_size: int, steps: int, round_: int) -> torch.Tensor:
    """Accepted drafts that drift slowly, so that every alternative switches now and then."""
    level = 0.02 if (round_ // 100) % 2 else 0.98
    generator = torch.Generator().manual_seed(round_)
    return (torch.rand(batch_size, generator=generator) < level).int() * steps


class DevicePath:
    name = "device"

    def __init__(self, batch_size: int):
        self.batch_size = batch_size
        self.worker = Worker()
        self.state = AdaptiveState(CONFIG, INITIAL_STEPS, ring_depth=RING_DEPTH)
        self.controller = AdaptiveController(self.worker, self.state)
        self.controller.init_states()
        self.slot = self.state.slot_for_batch(batch_size)

    def end_round(self, counts: torch.Tensor, steps: int) -> None:
        ops.update_and_select(counts, self.state, slot=self.slot, speculative_num_steps=steps)

    def prepare(self) -> None:
        """Let the ops of all timed rounds finish beforehand: their time is the device's."""
        self.state.reset()
        self.controller.init_states()
        counts = torch.ones(self.batch_size, dtype=torch.int32)
        for _ in range((REPETITIONS + 1) * ROUNDS):
            self.end_round(counts, INITIAL_STEPS)

    def rounds(self) -> int:
        activate, batch_size = self.controller.activate_step_by_batch, self.batch_size
        for _ in range(ROUNDS):
            activate(batch_size)
        return ROUNDS


class HostPath:
    """A policy fed with a list of counts, as engines do today."""

    def __init__(self, name: str, controller, worker: Worker, batch_size: int):
        self.name = name
        self.batch_size = batch_size
        self.worker = worker
        self.controller = controller
        self.controller.init_states()

    def end_round(self, counts: torch.Tensor, steps: int) -> None:
        self.controller.on_verify_complete(counts.tolist(), self.batch_size)

    def prepare(self) -> None:
        self.counts = torch.ones(self.batch_size, dtype=torch.int32)

    def rounds(self) -> int:
        controller, batch_size, counts = self.controller, self.batch_size, self.counts
        for _ in range(ROUNDS):
            controller.activate_step_by_batch(batch_size)
            controller.on_verify_complete(counts.tolist(), batch_size)
        return ROUNDS


def python_path(batch_size: int) -> HostPath:
    worker = Worker()
    policy = AdaptiveSpeculativeParams(INITIAL_STEPS, CONFIG)
    return HostPath("python", AdaptiveController(worker, policy), worker, batch_size)


def sglang_path(batch_size: int) -> HostPath | None:
    try:
        from sglang.srt.speculative.adaptive_runtime_state import AdaptiveController as Controller
        from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams as Params
    except ImportError:
        return None
    worker = Worker()
    worker.speculative_num_steps = INITIAL_STEPS
    with tempfile.NamedTemporaryFile("w", suffix=".json") as config_file:
        json.dump(CONFIG, config_file)
        config_file.flush()
        policy = Params(INITIAL_STEPS, config_file.name)
    return HostPath("sglang", Controller(worker, policy), worker, batch_size)


def check_same_choices(paths: list) -> None:
    """All alternatives see the same traffic; they must run it with the same steps."""
    used: dict[str, list[int]] = {path.name: [] for path in paths}
    for round_ in range(1_000):
        for path in paths:
            path.controller.activate_step_by_batch(path.batch_size)
            steps = path.worker.speculative_num_steps
            used[path.name].append(steps)
            path.end_round(accepted(path.batch_size, steps, round_), steps)
    first = used[paths[0].name]
    if len(set(first)) < 2:
        raise SystemExit("the traffic never made the policy switch: the check shows nothing")
    for name, steps in used.items():
        if steps != first:
            raise SystemExit(f"{name} and {paths[0].name} chose different steps")


def main(json_file: Annotated[Path | None, typer.Option("--json", help="Also write JSON.")] = None):
    console = Console()
    table = Table("B", "alternative", "µs per round", "p10-p90", "relative to device")
    rows = []
    with console.status("timing"):
        for batch_size in BATCH_SIZES:
            paths = [DevicePath(batch_size), python_path(batch_size)]
            paths += [p for p in [sglang_path(batch_size)] if p is not None]
            check_same_choices(paths)
            for path in paths:
                path.prepare()
            timings = time_interleaved({p.name: p.rounds for p in paths}, REPETITIONS)
            for name, timing in timings.items():
                ratio = timing.median / timings["device"].median
                rows.append(
                    {
                        "batch_size": batch_size,
                        "alternative": name,
                        "us": timing.median * 1e6,
                        "p10_us": timing.p10 * 1e6,
                        "p90_us": timing.p90 * 1e6,
                        "ratio": ratio,
                    }
                )
                table.add_row(
                    str(batch_size),
                    name,
                    f"{timing.median * 1e6:.3f}",
                    f"{timing.p10 * 1e6:.3f}-{timing.p90 * 1e6:.3f}",
                    f"{ratio:.1f}x",
                )
    console.print(table)
    machine = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}"
    console.print(
        f"{machine}; {REPETITIONS} repetitions of {ROUNDS} rounds, in turns, after one untimed"
    )
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
