"""A picture of an adaptive run: S, the EMA it follows, and the batch size, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter  # noqa: E402

from adaptive_spec.demo.runner import Round  # noqa: E402
from adaptive_spec.demo.workload import Phase  # noqa: E402

SHADES = {"easy": "#e8f3ea", "hard": "#fbeee6"}
STEPS_COLOR, EMA_COLOR, BATCH_COLOR = "#1f4e79", "#c0504d", "#555555"


def plot_rounds(
    path: Path, rounds: Sequence[Round], phases: Sequence[Phase], candidate_steps: Sequence[int]
) -> None:
    """Write a PNG. Raises OSError where ``path`` cannot be written."""
    figure, (top, middle, bottom) = plt.subplots(
        3,
        1,
        figsize=(12, 6.4),
        sharex=True,
        height_ratios=(3, 3, 1.6),
        layout="constrained",
    )
    x = range(len(rounds))
    top.step(x, [r.speculative_num_steps for r in rounds], where="post", color=STEPS_COLOR, lw=1.2)
    top.set_ylabel("draft steps S")
    top.yaxis.set_major_locator(FixedLocator(list(candidate_steps)))
    top.set_ylim(min(candidate_steps) - 0.5, max(candidate_steps) + 0.5)
    # One line per phase: the EMA of another slot is another quantity.
    start = 0
    for index, group in groupby(rounds, key=lambda r: r.phase):
        ema = [r.ema for r in group]
        stretch = range(start, start + len(ema))
        middle.plot(stretch, ema, color=EMA_COLOR, lw=1.0)
        _mark_phase((top, middle, bottom), start, start + len(ema), phases[index])
        start += len(ema)
    middle.set_ylabel("EMA of\naccepted drafts")
    bottom.fill_between(
        x, [r.batch_size for r in rounds], step="post", color=BATCH_COLOR, alpha=0.55, lw=0
    )
    bottom.set_ylabel("batch size")
    bottom.set_yscale("log", base=2)
    bottom.yaxis.set_major_locator(FixedLocator(sorted({p.batch_size for p in phases})))
    bottom.yaxis.set_major_formatter(ScalarFormatter())
    bottom.yaxis.set_minor_locator(NullLocator())
    bottom.set_ylim(0.5, None)
    bottom.set_xlabel("decode round")
    for axes in (top, middle, bottom):
        axes.set_xlim(0, max(len(rounds), 1))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#00000018", lw=0.7)
    figure.suptitle("Adaptive speculative decoding: S follows acceptance and batch size")
    try:
        figure.savefig(path, dpi=130, format="png")
    finally:
        plt.close(figure)


def _mark_phase(axes: Sequence[plt.Axes], start: int, end: int, phase: Phase) -> None:
    for each in axes:
        each.axvspan(start, end, color=SHADES[phase.regime], lw=0)
        each.axvline(start, color="#00000030", lw=0.8)
    axes[0].annotate(
        f"B={phase.batch_size}\n{phase.regime}",
        ((start + end) / 2, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=8,
    )
