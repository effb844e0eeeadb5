"""A picture of a comparison: S of the adaptive policies and the oracle, and tokens lost to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from adaptive_spec.sim.compare import regret  # noqa: E402
from adaptive_spec.sim.policies import is_static  # noqa: E402
from adaptive_spec.sim.simulate import Run  # noqa: E402


def plot_runs(path: Path, runs: Mapping[str, Run]) -> None:
    """Write a PNG. `runs` has the oracle's under "oracle". Raises OSError where it cannot be
    written."""
    oracle = runs["oracle"]
    adaptive = {name: run for name, run in runs.items() if not is_static(name)}
    figure, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(12, 7.5), sharex=True, height_ratios=(3, 3, 1.4), layout="constrained"
    )
    for name, run in adaptive.items():
        style = {"color": "black", "lw": 1.6, "zorder": 3} if name == "oracle" else {"lw": 0.9}
        top.step(_rounds(run), run.steps, where="post", label=name, **style)
    top.set_ylabel("draft steps S")
    top.legend(fontsize=8, loc="upper right")
    for name, run in runs.items():
        if name == "oracle":
            continue
        # Fixed steps are the backdrop: many, and thin.
        style = {"color": "#00000055", "lw": 0.7} if is_static(name) else {"lw": 1.4, "label": name}
        lost = regret(run, oracle)
        middle.plot(_rounds(run), lost, **style)
        if is_static(name):
            middle.annotate(name, (len(lost), lost[-1]), fontsize=7)
    middle.set_ylabel("tokens lost to the oracle\n(grey: fixed S)")
    middle.legend(fontsize=8, loc="upper left")
    bottom.step(_rounds(oracle), oracle.batch_size, where="post", color="#555555", lw=0.9)
    bottom.set_ylabel("batch size")
    bottom.set_yscale("log", base=2)
    bottom.set_xlabel("decode round")
    for axes in (top, middle, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#00000018", lw=0.7)
    try:
        figure.savefig(path, dpi=130, format="png")
    finally:
        plt.close(figure)


def _rounds(run: Run) -> range:
    return range(len(run.ms))
