"""A second of checks that the built ops do here what they should."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def check_ops(device: torch.device) -> int:
    """Run each op once or more against its reference; returns the number of calls.

    Raises AssertionError saying what differs.
    """
    import adaptive_spec_ext

    from adaptive_spec import ops_ref
    from adaptive_spec.testing.op_cases import sample_calls

    calls = sample_calls()
    for name, expected in calls.items():
        call = expected.to(device)
        expected.run(getattr(ops_ref, f"{call.op}_ref"))
        call.run(getattr(adaptive_spec_ext, call.op))
        try:
            call.assert_equal(expected)
        except AssertionError as error:
            raise AssertionError(f"{call.op} ({name}) on {device}: {error}") from None
    return len(calls) + _check_updates(device)


def _check_updates(device: torch.device) -> int:
    """The state that the op updates against the policy in Python, bit for bit."""
    import torch

    from adaptive_spec import ops
    from adaptive_spec.state import AdaptiveState
    from adaptive_spec.step_policy import AdaptiveSpeculativeParams

    state, reference = AdaptiveState(None, 3, device=device), AdaptiveSpeculativeParams(3)
    num_rounds = 40
    for number in range(num_rounds):
        steps = reference.get_steps_for_batch(1)
        # Everything accepted, then nothing: S goes up and down again.
        counts = [steps if number < num_rounds // 2 else 0]
        ops.update_and_select(
            torch.tensor(counts, dtype=torch.int32, device=device),
            state,
            slot=0,
            speculative_num_steps=steps,
        )
        reference.on_verify_complete(counts, 1, executed_steps=steps)
        if state.status() != reference.status():
            raise AssertionError(
                f"update_and_select, round {number}: got {state.status()[0]}, expected "
                f"{reference.status()[0]}"
            )
    return num_rounds
