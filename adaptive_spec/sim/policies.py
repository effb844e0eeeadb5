"""The policies that a comparison runs, by name. A new strategy is one more entry here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from adaptive_spec.config import DEFAULT_ADAPTIVE_CONFIG, resolve_candidate_steps
from adaptive_spec.cost_table import CostTable
from adaptive_spec.sim.simulate import StaticPolicy
from adaptive_spec.step_policy import AdaptiveSpeculativeParams, StepPolicy

PolicyFactory = Callable[[], StepPolicy]

INITIAL_STEPS = 3


def policy_factories(believed: CostTable) -> dict[str, PolicyFactory]:
    """A maker of a fresh policy for each name: no and fixed speculation, and what adapts.

    A config with candidates that the table has no times for is left out.

    Args:
        believed: the costs as a policy is told them.
    """
    factories: dict[str, PolicyFactory] = {
        "none" if steps == 0 else f"S={steps}": (lambda s=steps: StaticPolicy(s))
        for steps in believed.steps
    }
    for name, config in (("ema", None), ("ema+0", _with_zero(DEFAULT_ADAPTIVE_CONFIG))):
        if set(resolve_candidate_steps(config)) <= set(believed.steps):
            factories[name] = lambda c=config: AdaptiveSpeculativeParams(INITIAL_STEPS, c)
    return factories


def is_static(name: str) -> bool:
    return name == "none" or name.startswith("S=")


def _with_zero(config: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        key: {**entry, "candidate_steps": [0, *entry["candidate_steps"]]}
        for key, entry in config.items()
    }
