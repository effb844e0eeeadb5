"""The ways to choose S that the demo compares."""

from __future__ import annotations

from pathlib import Path

from adaptive_spec.config import AdaptiveConfig, load_adaptive_config
from adaptive_spec.demo.runner import Mode

MEASURED_CONFIG = Path(__file__).with_name("config.json")
ADAPTIVE, BUILT_IN, NONE, STATIC = "adaptive", "built-in", "none", "static"


def parse_modes(text: str, config: AdaptiveConfig) -> list[Mode]:
    """Modes from a comma-separated list of ``none``, ``static``, ``adaptive``, ``built-in``, or S.

    ``static`` stands for every candidate of the adaptive modes in the list; S = 0 is ``none``.
    Raises ValueError quoting what is wrong.
    """
    names = [name.strip() for name in text.split(",")]
    configs = {ADAPTIVE: config, BUILT_IN: load_adaptive_config(None)}
    chosen = {name: configs[name] for name in names if name in configs}
    candidates = {s for c in chosen.values() for s in c.candidate_steps}
    fixed: set[int] = set()
    for name in names:
        if name == NONE:
            fixed.add(0)
        elif name == STATIC:
            fixed |= candidates or set(config.candidate_steps)
        elif name.isascii() and name.isdigit() and int(name) <= 64:
            fixed.add(int(name))
        elif name not in configs:
            raise ValueError(
                f"--modes: expected a list of none, static, adaptive, built-in or numbers of steps "
                f"from 0 to 64, got {name!r}"
            )
    static = [Mode(f"S={s}" if s else NONE, steps=s) for s in sorted(fixed)]
    return static + [Mode(name, config=c) for name, c in chosen.items()]
