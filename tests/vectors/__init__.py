"""Recorded runs of the step policy, and the replay that any backend can be put through."""

from __future__ import annotations

import gzip
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adaptive_spec.config import AdaptiveConfigWarning

_FILE = Path(__file__).with_name("step_policy.json.gz")


def load_vectors() -> list[dict[str, Any]]:
    """The 90 recorded runs. EMAs are C hex floats of a binary64."""
    with gzip.open(_FILE) as file:
        return json.load(file)["cases"]


def read_state_slot(state: Any, batch_size: int) -> tuple[float, int]:
    """`replay`'s `read_slot` for an `AdaptiveState`."""
    slot = state.slots[state.slot_for_batch(batch_size)]
    return slot.ema_accept_len, slot.speculative_num_steps


def replay(
    make_policy: Callable[[int, dict[str, Any]], Any],
    read_slot: Callable[[Any, int], tuple[float, int]],
    case: dict[str, Any],
) -> int:
    """Run `case` through a backend and compare every recorded value exactly.

    Args:
        make_policy: ``(initial_steps, config) -> policy``, an object of the policy protocol.
        read_slot: ``(policy, batch_size) -> (ema_accept_len, steps)`` of the slot of that batch.
        case: one entry of `load_vectors()`.

    Returns:
        The number of rounds compared.

    Raises:
        AssertionError: naming the first round and value that differ.
    """
    with warnings.catch_warnings():
        # Some recorded tables cross their thresholds, on purpose.
        warnings.simplefilter("ignore", AdaptiveConfigWarning)
        policy = make_policy(case["initial_steps"], case["config"])
    policy.set_cuda_graph_bs(case["cuda_graph_bs"])
    assert policy.candidate_steps == case["candidate_steps"]
    pruned = {str(step): policy.cuda_graph_bs_for_step(step) for step in policy.candidate_steps}
    assert pruned == case["graph_bs_for_step"]
    for number, expected in enumerate(case["rounds"]):
        batch_size = expected["batch_size"]
        steps = policy.get_steps_for_batch(batch_size)
        returned = policy.on_verify_complete(expected["accepted"], batch_size, executed_steps=steps)
        ema, steps_after = read_slot(policy, batch_size)
        got = {
            "batch_size": batch_size,
            "steps": steps,
            "accepted": expected["accepted"],
            "returned": returned,
            "ema_after": ema.hex(),
            "steps_after": steps_after,
        }
        assert got == expected, f"round {number}"
    return len(case["rounds"])
