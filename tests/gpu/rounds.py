"""Rounds of an op on a device, and the same rounds with the CPU op to compare them with.

A lane calls one op on the same tensors again and again, as a decode loop does: inputs are
overwritten in place, outputs stay what they were where the op does not write them. What it leaves
is kept on the device, and compared only when all rounds have been launched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import adaptive_spec_ext
import numpy as np
import torch
from torch import Tensor

from adaptive_spec.state import AdaptiveState
from adaptive_spec.testing.op_cases import (
    CaseOptions,
    OpCall,
    chain_call,
    logits_call,
    tree_call,
)

#: Makers of calls of each verify op.
VERIFY_OPS: Mapping[str, Callable[[np.random.Generator, CaseOptions], OpCall]] = {
    "tree": tree_call,
    "chain": chain_call,
    "logits": lambda rng, case: logits_call(rng, case, torch.bfloat16),
}

#: Switches often, so that what the state does next depends on what it did before.
CONFIG = {
    "1": {"candidate_steps": [0, 1, 3]},
    "4": {"candidate_steps": [1, 3]},
    "9": {"candidate_steps": [1, 3, 7]},
    "update_interval": 2,
    "warmup_batches": 1,
    "ema_alpha": 0.5,
}


class Lane:
    def __init__(self, first: OpCall, device: torch.device | str, **keywords: Any):
        """`keywords`: further arguments of the op, such as state, ring, slot and workspace."""
        self.call = first.to(device)
        self.keywords = keywords
        self.log: dict[str, list[Tensor]] = {name: [] for name in sorted(self.call.mutated)}

    def load(self, inputs: OpCall) -> None:
        """Take over the inputs of a call with the same shapes, without waiting for it."""
        for name, tensor in self.call.tensors.items():
            if name not in self.call.mutated:
                tensor.block.copy_(inputs.tensors[name].block, non_blocking=True)

    def launch(self) -> None:
        self.call.run(getattr(adaptive_spec_ext, self.call.op), **self.keywords)

    def record(self) -> None:
        for name, blocks in self.log.items():
            blocks.append(self.call.tensors[name].block.clone())

    def assert_same_rounds(self, expected: Lane) -> None:
        for name, blocks in self.log.items():
            own, other = torch.stack(blocks).cpu(), torch.stack(expected.log[name]).cpu()
            different = (own != other).flatten(1).any(1).nonzero().flatten().tolist()
            assert different == [], f"`{name}` differs in rounds {different[:10]} of {len(blocks)}"


def state_arguments(state: AdaptiveState) -> dict[str, Tensor]:
    return {"state": state.tensor, "ring": state.ring.tensor}


def host_copy(words: Tensor) -> Tensor:
    """By a kernel, since a ring's words are host memory under a device address."""
    return words.add(0).cpu()


def assert_same_state(state: AdaptiveState, expected: AdaptiveState) -> None:
    """Every word of state and ring, those of the round in flight (all zero) included."""
    for name, own, other in (
        ("state", state.tensor, expected.tensor),
        ("ring", state.ring.tensor, expected.ring.tensor),
    ):
        different = (host_copy(own) != host_copy(other)).nonzero().flatten().tolist()
        assert different == [], f"words {different} of the {name} differ"


def assert_counters_at_zero(workspace: Tensor) -> None:
    """The workspace's first quarter, which the next launch relies on."""
    left = workspace[: workspace.numel() // 4].nonzero().flatten().tolist()
    assert left == [], f"words {left} of the workspace's counters are not zero"


def capture(launch: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph of what `launch` launches; returns its replay. Nothing is run."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph.replay


def warm_up(call: OpCall, device: torch.device | str) -> None:
    """Have the op's kernel loaded, which a capture may not do."""
    call.to(device).run(getattr(adaptive_spec_ext, call.op))


class Gate:
    """Holds back streams until the device has slept a while, so that work piles up behind it."""

    def __init__(self, milliseconds: float):
        self._opened = torch.cuda.Event()
        with torch.cuda.stream(torch.cuda.Stream()):
            # In clock cycles; GPUs run at 1 to 2 GHz.
            torch.cuda._sleep(int(milliseconds * 2e6))
            self._opened.record()

    def hold(self, stream: torch.cuda.Stream) -> None:
        stream.wait_event(self._opened)

    @property
    def is_open(self) -> bool:
        return self._opened.query()
