"""Runs each CUDA op a few times on small inputs; for compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/gpu/sanitizer_case.py

PYTORCH_NO_CUDA_MEMORY_CACHING=1 gives every tensor an allocation of its own, so that memcheck sees
where it ends. Few torch kernels are used, since the sanitizer slows down all of them.
"""

import sys

import adaptive_spec_ext
import numpy as np
import torch

from adaptive_spec import ops
from adaptive_spec.state import AdaptiveState
from adaptive_spec.testing.op_cases import (
    CaseOptions,
    OpCall,
    chain_call,
    chain_tree_call,
    logits_call,
    tree_call,
)

CONFIG = {"1": {"candidate_steps": [1, 3]}, "warmup_batches": 0, "update_interval": 1}


def cases(rng: np.random.Generator) -> list[OpCall]:
    """One block and several, one piece of a row and several, odd sizes."""
    calls = []
    for batch_size in (3, 37):
        case = CaseOptions(
            batch_size, 3, num_nodes=9, num_reqs=batch_size - 1, max_accept=True, malformed=True
        )
        calls += [make(rng, case) for make in (tree_call, chain_call, chain_tree_call)]
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for batch_size, vocab_size in ((2, 20_011), (33, 131)):
            case = CaseOptions(batch_size, 3, vocab_size=vocab_size, malformed=True)
            calls.append(logits_call(rng, case, dtype))
    return calls


def exact(call: OpCall, device: str) -> dict:
    """The call's arguments without guards around them: any access beyond is out of bounds."""
    arguments = call.arguments()
    return {
        name: value.contiguous().to(device, copy=True) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


def main(device: str) -> None:
    rng = np.random.default_rng(1)
    state, expected_state = AdaptiveState(CONFIG, 3, device=device), AdaptiveState(CONFIG, 3)
    num_runs = 0
    for call in cases(rng):
        function = getattr(adaptive_spec_ext, call.op)
        expected = call.clone()
        if call.op == "build_chain_tree":
            expected.run(function)
            actual = call.to(device)
            actual.run(function)
            actual.assert_equal(expected)
            function(**exact(call, device))
            num_runs += 2
            continue
        expected.run(getattr(ops, call.op), state=expected_state, slot=0)
        workspace = adaptive_spec_ext.verify_workspace(37, 4, device=device)
        for keywords in (
            {"workspace": workspace},
            {},
            {"workspace": workspace, "state": state.tensor, "ring": state.ring.tensor},
        ):
            actual = call.to(device)
            actual.run(function, **keywords)
            actual.assert_equal(expected)
            num_runs += 1
        function(**exact(call, device), workspace=workspace)
        num_runs += 1
    counts = torch.tensor([0, 3, 9, 1], dtype=torch.int32)
    ops.update_and_select(counts, expected_state, slot=0, speculative_num_steps=3)
    ops.update_and_select(counts.to(device), state, slot=0, speculative_num_steps=3)
    assert torch.equal(state.tensor.cpu(), expected_state.tensor)
    print(f"{num_runs + 1} launches, all results equal to the CPU's")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["cuda"])
