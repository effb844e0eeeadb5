"""The adaptive state that the verify ops update: every slot's EMA, counters and current step.

It is one int64 tensor on the device that runs the ops, laid out by csrc/core/records.h, and a
decision ring that the host reads. The Python class only builds, inspects and saves it; the rules
that change it are in csrc/core/ema_policy.h and run inside the op.

On a CUDA device whatever looks into the state first waits for all work on that device and copies
the state to the host. A serving loop needs none of it: its decisions come from the ring.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
import torch

from adaptive_spec import ops
from adaptive_spec.config import AdaptiveConfig, load_adaptive_config
from adaptive_spec.devices import resolve_device
from adaptive_spec.extension import _C
from adaptive_spec.ring import DecisionRing
from adaptive_spec.routing import BatchRouter
from adaptive_spec.step_policy import DecisionReason

_DTYPES = _C.record_dtypes()


@dataclasses.dataclass(frozen=True)
class SlotSnapshot:
    """One slot as it stood when it was read."""

    batch_size: int
    speculative_num_steps: int
    ema_accept_len: float
    batch_count: int
    num_switches: int
    num_stale: int
    reason: DecisionReason


class AdaptiveState:
    """Adaptive state for one worker; a policy for `AdaptiveController`.

    Args:
        config: an `AdaptiveConfig`, a config mapping, the path of a JSON file, or None for the
            built-in table.
        initial_steps: the step count every slot that has it among its candidates starts with; the
            others start at their middle candidate.
        device: where the verify ops run: "cpu", "cuda" (the current device) or "cuda:<index>".
        ring_depth: rounds that the decision ring holds; a power of two, at least 8.

    Attributes:
        config: the resolved configuration.
        device: as resolved, with its index.
        tensor: int64 [num_words] on `device`, the state. Ops that take it as `state` mutate it. It
            stays where it is for the state's whole life, so CUDA graphs may hold its address.
        ring: the `DecisionRing` that goes with it.

    Raises:
        TypeError: `initial_steps` is no integer.
        ValueError: bad config, device or ring depth.
        RuntimeError: CUDA did not give the memory.
    """

    def __init__(
        self,
        config: AdaptiveConfig | Mapping[str, Any] | str | PathLike[str] | None,
        initial_steps: int,
        *,
        device: torch.device | str = "cpu",
        ring_depth: int = 64,
    ):
        if isinstance(initial_steps, bool) or not isinstance(initial_steps, int):
            raise TypeError(f"`initial_steps` must be an integer, got {initial_steps!r}")
        self.device = resolve_device(device)
        # Readers count rounds on their own, so whatever sets the round number tells them.
        self._readers: weakref.WeakSet[_C.StepReader] = weakref.WeakSet()
        self._worker: Callable[[], object | None] = lambda: None
        self.config = load_adaptive_config(config)
        self.router = BatchRouter(self.config)
        num_slots = len(self.config.slots)
        self.ring = DecisionRing(ring_depth, num_slots, device=self.device)
        # The state as the host sees it: on the CPU the state itself, else a copy of it.
        self._host = torch.zeros(_C.num_state_words(num_slots), dtype=torch.int64)
        self.tensor = self._host.to(self.device)
        self._words = self._host.numpy()
        self._header, self._configs, self._slots = _views(self._words, num_slots)
        self._header["magic"] = _C.STATE_MAGIC
        self._header["num_words"] = self.tensor.numel()
        self._header["num_slots"] = num_slots
        self._header["ring_depth"] = ring_depth
        for record, slot in zip(self._configs, self.config.slots, strict=True):
            _write_config(record, slot, initial_steps)
        _C.reset_state(self._words, self.ring.native)
        self._upload()

    def reset(self) -> None:
        """Every slot back to its start, the round counter to 0.

        Waits for the rounds that were launched; none may be launched meanwhile.
        """
        self._wait_for_rounds()
        _C.reset_state(self._words, self.ring.native)
        self._upload()
        self._restart_readers()

    def _wait_for_rounds(self) -> None:
        if self.tensor.is_cuda:
            torch.cuda.synchronize(self.device)

    def _download(self) -> None:
        """Bring the host's copy up to date with every round that was launched."""
        if self.tensor.is_cuda:
            self._wait_for_rounds()
            self._host.copy_(self.tensor)

    def _upload(self) -> None:
        """Hand the host's copy to the device, ahead of whatever any stream launches next."""
        if self.tensor.is_cuda:
            self.tensor.copy_(self._host)
            self._wait_for_rounds()

    @property
    def next_round(self) -> int:
        """Number of the round that will finish next: how many ops have updated the state so far.

        On CUDA this waits for the device.
        """
        self._download()
        return int(self._header["next_round"])

    @property
    def num_anomalies(self) -> int:
        """NaN rows and draft ids outside the vocabulary that the verify ops met.

        On CUDA this waits for the device.
        """
        self._download()
        return int(self._header["num_anomalies"])

    @property
    def slots(self) -> list[SlotSnapshot]:
        """A snapshot of every slot, in the order of their batch sizes.

        On CUDA this waits for the device.
        """
        self._download()
        return [
            SlotSnapshot(
                batch_size=int(config["batch_size"]),
                speculative_num_steps=int(config["candidate_steps"][slot["index"]]),
                ema_accept_len=float(slot["ema"]),
                batch_count=int(slot["batch_count"]),
                num_switches=int(slot["num_switches"]),
                num_stale=int(slot["num_stale"]),
                reason=DecisionReason(int(slot["reason"])),
            )
            for config, slot in zip(self._configs, self._slots, strict=True)
        ]

    def status(self) -> list[dict[str, Any]]:
        """What an operator wants to see of each slot, ascending by batch size.

        On CUDA this waits for the device: not for every round.
        """
        return [
            {**dataclasses.asdict(slot), "reason": slot.reason.name.lower()} for slot in self.slots
        ]

    # The policy protocol.

    @property
    def candidate_steps(self) -> list[int]:
        """Every step count that some slot can choose, ascending."""
        return list(self.config.candidate_steps)

    def set_cuda_graph_bs(self, cuda_graph_bs: Sequence[int] | None) -> None:
        """Set the captured batch sizes; batches are padded up to them before routing."""
        self.router.set_cuda_graph_bs(cuda_graph_bs)

    def slot_for_batch(self, batch_size: int) -> int:
        """Index of the slot that a batch belongs to: the `slot` argument of the verify ops."""
        return self.router.slot_index(batch_size)

    def get_steps_for_batch(self, batch_size: int) -> int:
        """The newest step count chosen for a batch of this size, of those that have arrived."""
        return self.ring.latest(self.slot_for_batch(batch_size)).speculative_num_steps

    def bind(self, worker: object) -> None:
        """Give this state to `worker`, whose rounds update it from now on, for as long as it lives.

        Raises:
            ValueError: it belongs to another worker. Each would take the other's rounds for its
                own, and wait for decisions of rounds that never were.
        """
        if self._worker() is not None:
            # One that is not used any more may only wait to be collected: workers hold cycles.
            gc.collect()
        if self._worker() not in (None, worker):
            raise ValueError(
                "policy: this AdaptiveState drives another engine or worker; give each its own "
                "(load_state_dict takes over what one has learnt)"
            )
        self._worker = weakref.ref(worker)

    def step_reader(self, *, lag: int, timeout_s: float) -> _C.StepReader:
        """The host's per-round read of this state's decisions, beginning at the next round.

        On CUDA making it waits for the device; using it does not.
        """
        reader = _C.StepReader(
            ring=self.ring.native,
            slot_batch_sizes=[slot.batch_size for slot in self.config.slots],
            cuda_graph_bs=self.router.cuda_graph_bs or [],
            lag=lag,
            debounce_rounds=self.config.slot_debounce,
            first_round=self.next_round,
            timeout_s=timeout_s,
        )
        self._readers.add(reader)
        return reader

    def candidate_steps_for_batch(self, batch_size: int) -> list[int]:
        """Every step count that a round of this size can be asked to run, ascending."""
        return self.router.candidate_steps_for_batch(batch_size)

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """The captured batch sizes whose slot can choose `step`; None where no graphs are used."""
        return self.router.cuda_graph_bs_for_step(step)

    def on_verify_complete(
        self,
        num_correct_drafts_per_req: Sequence[int] | torch.Tensor,
        batch_size: int,
        executed_steps: int | None = None,
    ) -> int | None:
        """Update from counts on the host, for an engine whose verify op was not given the state.

        On CUDA this waits for the device, before and after the update.

        Args:
            num_correct_drafts_per_req: accepted drafts of each live request, bonus excluded.
            batch_size: of the round that produced them.
            executed_steps: draft steps of that round; the slot's current ones if omitted.

        Returns:
            The routed slot's step count if it changed, else None.
        """
        slot = self.slot_for_batch(batch_size)
        self._wait_for_rounds()
        before = self.ring.latest(slot).speculative_num_steps
        steps = before if executed_steps is None else executed_steps
        counts = torch.as_tensor(num_correct_drafts_per_req, dtype=torch.int32, device=self.device)
        ops.update_and_select(counts, self, slot=slot, speculative_num_steps=steps)
        self._wait_for_rounds()
        after = self.ring.latest(slot).speculative_num_steps
        return after if after != before else None

    # Checkpoints.

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of the state, on the CPU, for `load_state_dict` of a state with the same config.

        On CUDA this waits for the device.
        """
        self._download()
        return {"state": self._host.clone()}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Continue from a saved state, bit for bit; devices and ring depths may differ.

        Waits for the rounds that were launched; none may be launched meanwhile.

        Raises:
            ValueError: `state_dict` is not a saved state, was saved under another config (the
                message names the first difference), or is a copy made while a round was in flight.
                Nothing is changed then.
        """
        saved = state_dict.get("state")
        if not isinstance(saved, torch.Tensor) or saved.dtype != torch.int64 or saved.dim() != 1:
            raise ValueError("`state_dict` must hold `state`, a 1-D int64 tensor")
        if saved.numel() != self.tensor.numel():
            raise ValueError(
                f"`state_dict` was saved with another number of slots: its state has "
                f"{saved.numel()} words, this one {self.tensor.numel()}"
            )
        saved = saved.cpu().contiguous()
        header, configs, slots = _views(saved.numpy(), len(self.config.slots))
        if header["magic"] != _C.STATE_MAGIC:
            raise ValueError("`state_dict` was saved by a version with another state layout")
        for name in ("num_words", "num_slots"):
            if header[name] != self._header[name]:
                raise ValueError(
                    f"`state_dict` is damaged: its {name} is {header[name]}, expected "
                    f"{self._header[name]}"
                )
        if header["pending"].any():
            raise ValueError(
                "`state_dict` is a copy made while a round was in flight: its pending sums and "
                f"ticket must be 0, got {header['pending'].tolist()}"
            )
        _check_same_config(configs, self._configs)
        _check_slots(header, configs, slots)
        self._wait_for_rounds()
        ring_depth = self._header["ring_depth"].copy()
        self._host.copy_(saved)
        self._header["ring_depth"] = ring_depth
        _C.seed_ring(self._words, self.ring.native)
        self._upload()
        self._restart_readers()

    def _restart_readers(self) -> None:
        for reader in self._readers:
            reader.restart(int(self._header["next_round"]))


def _views(words: np.ndarray, num_slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The header (0-d), slot configs and slot states in `words`, sharing its memory."""
    raw = words.view(np.uint8)
    views, start = [], 0
    for name, count in (("StateHeader", 1), ("SlotConfig", num_slots), ("SlotState", num_slots)):
        size = _DTYPES[name].itemsize * count
        views.append(raw[start : start + size].view(_DTYPES[name]))
        start += size
    header, configs, slots = views
    return header.reshape(()), configs, slots


def _write_config(record: np.void, slot: Any, initial_steps: int) -> None:
    steps = slot.candidate_steps
    for name in record.dtype.names:
        if name not in ("candidate_steps", "num_candidates", "initial_index"):
            record[name] = getattr(slot, name)
    record["num_candidates"] = len(steps)
    record["candidate_steps"][: len(steps)] = steps
    record["initial_index"] = (
        steps.index(initial_steps) if initial_steps in steps else len(steps) // 2
    )


def _check_same_config(saved: np.ndarray, own: np.ndarray) -> None:
    for index, (theirs, ours) in enumerate(zip(saved, own, strict=True)):
        for name in own.dtype.names:
            # Where a slot starts does not matter to one that has already started.
            if name != "initial_index" and not np.array_equal(theirs[name], ours[name]):
                raise ValueError(
                    f"`state_dict` was saved under another config: slot {index} "
                    f"(batch size {ours['batch_size']}) has {name} {theirs[name].tolist()} there "
                    f"and {ours[name].tolist()} here"
                )


def _check_slots(header: np.ndarray, configs: np.ndarray, slots: np.ndarray) -> None:
    """What no run can have led to; ops would read outside the state."""
    for name in ("next_round", "num_anomalies"):
        if header[name] < 0:
            raise ValueError(f"`state_dict` is damaged: its {name} is {header[name]}")
    reasons = {int(reason) for reason in DecisionReason}
    for number, (config, slot) in enumerate(zip(configs, slots, strict=True)):
        for name, is_sound in {
            "index": 0 <= slot["index"] < config["num_candidates"],
            "reason": int(slot["reason"]) in reasons,
            "ema": np.isfinite(slot["ema"]),
            "probing": slot["probing"] in (0, 1),
        }.items():
            if not is_sound:
                raise ValueError(
                    f"`state_dict` is damaged: slot {number} has {name} {slot[name].item()}"
                )
        for name in ("batch_count", "last_switch", "num_switches", "num_stale", "probe_wait"):
            if slot[name] < 0:
                raise ValueError(f"`state_dict` is damaged: slot {number} has a negative {name}")
