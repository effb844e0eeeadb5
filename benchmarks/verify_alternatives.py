"""The batches that bench_verify.py times, and the ways to verify them that it compares."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from adaptive_spec import ops
from adaptive_spec.state import AdaptiveState
from adaptive_spec.step_policy import AdaptiveSpeculativeParams

MEAN_ACCEPTED = 2
# Every round ends with a decision, and the decision is to stay: with two accepted drafts on average
# no slot leaves the larger S, so all rounds do the same work.
CONFIG = {
    str(batch_size): {"candidate_steps": [1, 7], "update_interval": 1, "warmup_batches": 0}
    for batch_size in (1, 8, 64)
}
NUM_STEPS = 7


@dataclasses.dataclass(frozen=True)
class Shape:
    op: str  # "tree", "chain" or "logits"
    batch_size: int
    vocab_size: int
    device: torch.device
    dtype: torch.dtype = torch.bfloat16

    @property
    def row_bytes(self) -> int:
        """Of logits."""
        return self.vocab_size * self.dtype.itemsize if self.op == "logits" else 0


@dataclasses.dataclass
class Batch:
    """The tensors of one round, and what must come of it."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    accepted: Tensor  # [B], on the CPU
    bonus: Tensor
    num_bytes: int  # of all inputs
    num_needed_bytes: int  # of logits rows up to the first mismatch, and of the other inputs

    def check(self, name: str) -> None:
        for output, expected in (("accept_token_num", self.accepted), ("bonus_tokens", self.bonus)):
            if not torch.equal(self.outputs[output].cpu(), expected.to(self.outputs[output].dtype)):
                raise SystemExit(f"{name}: wrong `{output}`: nothing is timed")


def accepted_drafts(rng: np.random.Generator, batch_size: int) -> np.ndarray:
    """Drafts accepted of each request, as if each were accepted with the same probability.

    Evenly spaced quantiles of that distribution rather than independent draws, and the probability
    that brings their mean nearest to MEAN_ACCEPTED: so it is 2 at batch size 1, too.
    """
    quantiles = (np.arange(batch_size) + 0.5) / batch_size

    def draw(probability: float) -> np.ndarray:
        at_least = probability ** np.arange(1, NUM_STEPS + 1)
        return (quantiles[:, None] < at_least).sum(1)

    draws = [draw(probability) for probability in np.linspace(0.5, 0.9, 400)]
    return rng.permutation(min(draws, key=lambda draw: abs(draw.mean() - MEAN_ACCEPTED)))


def make_batch(shape: Shape, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    batch_size, width = shape.batch_size, NUM_STEPS + 1
    accepted = torch.from_numpy(accepted_drafts(rng, batch_size))
    choices = torch.from_numpy(rng.integers(0, shape.vocab_size, (batch_size, width)))
    drafts = choices[:, :-1].clone()
    rows = (accepted < NUM_STEPS).nonzero().flatten()
    drafts[rows, accepted[rows]] = (drafts[rows, accepted[rows]] + 1) % shape.vocab_size
    bonus = choices.gather(1, accepted[:, None]).flatten()

    def on_device(tensor: Tensor) -> Tensor:
        return tensor.to(shape.device)

    def empty(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full(size, -5, dtype=dtype, device=shape.device)

    outputs = {
        "accept_token_num": empty(batch_size),
        "accept_lens": empty(batch_size),
        "bonus_tokens": empty(batch_size, dtype=torch.int64),
    }
    if shape.op == "tree":
        root = torch.zeros(batch_size, 1, dtype=torch.int64)
        inputs = {
            "candidates": on_device(torch.cat([root, drafts], 1)),
            "target_predict": on_device(choices),
        }
        links = ("retrive_index", "retrive_next_token", "retrive_next_sibling")
        inputs |= {name: empty(batch_size, width, dtype=torch.int64) for name in links}
        ops.build_chain_tree(**{name: inputs[name] for name in links})
        outputs["predicts"] = empty(batch_size * width)
        outputs["accept_index"] = empty(batch_size, width)
    else:
        inputs = {"draft_tokens": on_device(drafts)}
        outputs["output_token_ids"] = empty(batch_size, width)
    if shape.op == "chain":
        inputs["target_predict"] = on_device(choices)
    if shape.op == "logits":
        generator = torch.Generator(shape.device).manual_seed(seed)
        size = (batch_size, width, shape.vocab_size)
        logits = torch.empty(size, dtype=shape.dtype, device=shape.device)
        logits.normal_(generator=generator)
        # Above all others: then no alternative's rule for ties matters.
        logits.scatter_(2, on_device(choices)[..., None], 100.0)
        inputs["target_logits"] = logits
    num_bytes = sum(tensor.nbytes for tensor in inputs.values())
    unneeded = int((NUM_STEPS - accepted).sum()) * shape.row_bytes
    return Batch(inputs, outputs, accepted, bonus, num_bytes, num_bytes - unneeded)


@dataclasses.dataclass
class Alternative:
    """A way to do a round. `launch` is its work on the device."""

    name: str
    stands_for: str
    launch: Callable[[Batch], None]
    #: Begins a series of rounds; returns what the host must do between two of them.
    start_rounds: Callable[[], Callable[[], object]] | None = None
    #: False: only a part of the work, as a bound on what it can be done in.
    is_whole: bool = True


def fused_op(shape: Shape):
    return {
        "tree": ops.verify_tree_greedy,
        "chain": ops.verify_chain_greedy,
        "logits": ops.verify_chain_greedy_from_logits,
    }[shape.op]


class Fused:
    """The op with a state, and what it needs."""

    def __init__(self, shape: Shape):
        self.shape = shape
        self.state = AdaptiveState(CONFIG, NUM_STEPS, device=shape.device)
        self.slot = self.state.slot_for_batch(shape.batch_size)
        self.workspace = ops.verify_workspace(shape.batch_size, NUM_STEPS + 1, device=shape.device)

    def launch(self, batch: Batch) -> None:
        fused_op(self.shape)(
            **batch.inputs,
            **batch.outputs,
            state=self.state,
            slot=self.slot,
            workspace=self.workspace,
        )

    def start_rounds(self) -> Callable[[], int]:
        """The host's read of the decision of two rounds ago, once per round from now on."""
        reader = self.state.step_reader(lag=2, timeout_s=10.0)
        reader.next_steps(self.shape.batch_size)
        return lambda: reader.next_steps(self.shape.batch_size)

    def check_state(self, num_rounds: int, batches: list[Batch]) -> None:
        """The state is where the Python policy gets on the same counts."""
        policy = host_policy()
        for i in range(num_rounds):
            counts = batches[i % len(batches)].accepted.tolist()
            policy.on_verify_complete(counts, self.shape.batch_size, executed_steps=NUM_STEPS)
        own = self.state.slots[self.slot]
        expected = policy.status()[self.slot]
        if own.ema_accept_len != expected["ema_accept_len"]:
            raise SystemExit("the op's state and the Python policy disagree: nothing is timed")
        if own.speculative_num_steps != NUM_STEPS:
            raise SystemExit("the state left S = 7: rounds would not be alike")


def host_policy() -> AdaptiveSpeculativeParams:
    return AdaptiveSpeculativeParams(NUM_STEPS, CONFIG)


def num_pieces(shape: Shape) -> int:
    """For the split argmax: enough pieces to fill a device, of equal size."""
    rows = shape.batch_size * (NUM_STEPS + 1)
    pieces = 1
    while rows * pieces < 2_048 and pieces < 64 and shape.vocab_size % (2 * pieces) == 0:
        pieces *= 2
    return pieces


def alternatives(shape: Shape, fused: Fused) -> list[Alternative]:
    verify = fused_op(shape)
    workspace = fused.workspace
    is_cuda = shape.device.type == "cuda"
    on_host = torch.zeros(shape.batch_size, dtype=torch.int32, pin_memory=is_cuda)
    policy = host_policy()
    copied = torch.cuda.Event() if is_cuda else None

    def without_state(batch: Batch) -> None:
        verify(**batch.inputs, **batch.outputs, workspace=workspace)

    def with_copy(batch: Batch) -> None:
        without_state(batch)
        on_host.copy_(batch.outputs["accept_token_num"], non_blocking=True)

    def feed_host_policy() -> None:
        if copied is not None:
            copied.record()
            copied.synchronize()
        policy.on_verify_complete(on_host.tolist(), shape.batch_size, executed_steps=NUM_STEPS)

    found = [
        Alternative("fused, with state", "this library", fused.launch, fused.start_rounds),
        Alternative("fused, no state", "the same op, not adaptive", without_state),
        Alternative(
            "fused, policy on the host",
            "how SGLang adapts: counts to the host, policy in Python, then the next round",
            with_copy,
            lambda: feed_host_policy,
        ),
    ]
    if shape.op == "logits":
        found += [sampling_op(shape, workspace), *argmax_alternatives(shape)]
    return found


def sampling_op(shape: Shape, workspace: Tensor) -> Alternative:
    """What greedy requests pay in an engine that calls the sampling op for all."""

    def zeros(dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape.batch_size, dtype=dtype, device=shape.device)

    seeds, positions, temperature = zeros(torch.int64), zeros(torch.int64), zeros(torch.float32)

    def verify(batch: Batch) -> None:
        ops.verify_chain_sampling_from_logits(
            **batch.inputs,
            seeds=seeds,
            positions=positions,
            temperature=temperature,
            **batch.outputs,
            workspace=workspace,
        )

    return Alternative("sampling op at temperature 0", "one op for all requests, no state", verify)


def argmax_alternatives(shape: Shape) -> list[Alternative]:
    """Argmax over all rows first, then verification of the choices; neither adapts."""
    size = (shape.batch_size, NUM_STEPS + 1)
    choices = torch.zeros(size, dtype=torch.int64, device=shape.device)
    pieces = num_pieces(shape)
    piece_size = shape.vocab_size // pieces
    best = torch.zeros(*size, pieces, dtype=shape.dtype, device=shape.device)
    place = torch.zeros(*size, pieces, dtype=torch.int64, device=shape.device)

    def verify(batch: Batch) -> None:
        ops.verify_chain_greedy(batch.inputs["draft_tokens"], choices, **batch.outputs)

    def argmax(batch: Batch) -> None:
        torch.argmax(batch.inputs["target_logits"], -1, out=choices)
        verify(batch)

    def split(batch: Batch) -> None:
        logits = batch.inputs["target_logits"].view(*size, pieces, piece_size)
        torch.max(logits, -1, out=(best, place))

    def split_argmax(batch: Batch) -> None:
        split(batch)
        piece = best.argmax(-1, keepdim=True)
        torch.add(
            place.gather(-1, piece).squeeze(-1), piece.squeeze(-1), alpha=piece_size, out=choices
        )
        verify(batch)

    return [
        Alternative("argmax + verify", "what engines do without such an op", argmax),
        Alternative(
            "split argmax + finalize + verify",
            "the strongest public way: rows cut over blocks, merged in a second step; from torch's "
            "ops, so its merge takes three launches where a kernel of its own takes one",
            split_argmax,
        ),
        Alternative(
            "split argmax, first step only",
            "a bound on any kernel that does it in two steps",
            split,
            is_whole=False,
        ),
    ]
