"""`EagleWorker`: speculative decoding whose verify result is awaited each round (spec v1).

A round is launched, which only issues work, and later collected, which waits for its results. All
that differs between this worker and `EagleWorkerV2` is how many rounds may be in flight.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from adaptive_spec import ops
from adaptive_spec.capture import CapturePool
from adaptive_spec.config import validate_adaptive_initial_steps
from adaptive_spec.controller import AdaptiveController, AdaptiveSpecPolicy
from adaptive_spec.engine.sampling import GREEDY, SamplingParams
from adaptive_spec.graphs import (
    CaptureReport,
    DecodeBuffers,
    GraphTable,
    RoundFrame,
    SpecRuntimeState,
    check_states_cover_routing,
)
from adaptive_spec.routing import pad_to_cuda_graph_bs
from adaptive_spec.workers.base import (
    BaseSpecWorker,
    SpecOptions,
    resolve_adaptive_support,
)
from adaptive_spec.workers.queue import make_queue
from adaptive_spec.workers.rounds import DecodeResult, HostResults, LaunchedRound
from adaptive_spec.workers.rows import RowTable, take_first_tokens
from adaptive_spec.workers.stages import EagleStages

if TYPE_CHECKING:
    from adaptive_spec.engine.draft import EagleDraft
    from adaptive_spec.engine.llama import LlamaForCausalLM

__all__ = ["EagleWorker"]


class EagleWorker(BaseSpecWorker):
    """Target and draft with their caches, decoding a batch of requests round by round.

    Requests join and leave between rounds; the live ones occupy rows 0..n-1. Their tokens are those
    of plain decoding, greedy or sampled, whatever S and the draft do.

    Args:
        target, draft: the models; no draft for plain decoding.
        max_batch_size: most requests at a time.
        max_len: most tokens of a request, prompt and output.
        policy: chooses S each round: an `AdaptiveState` (updated inside the verify op) or a host
            policy (`AdaptiveSpeculativeParams`), fed after each round. None: S is fixed.
        speculative_num_steps: the fixed S; with a policy, the S it was told to start with, checked
            against its candidates.
        cuda_graph_bs: batch sizes to capture rounds for. None: every round runs eagerly.
        skip_draft_at_zero: do not extend the draft in rounds at S = 0. Off by default: it saves the
            draft's pass, but the draft resumes with a gap in its cache and accepts less until the
            gap is out of reach.
        options: serving options; where they rule out adapting, S stays fixed (one warning, and the
            reason in `status`), or, with ``strict``, the constructor raises.

    Raises ValueError for a bad argument, before anything is built.
    """

    # How many rounds may be launched before the oldest is collected; round r then runs with the S
    # that round r - rounds_in_flight led to.
    rounds_in_flight = 1

    def __init__(
        self,
        target: LlamaForCausalLM,
        draft: EagleDraft | None,
        *,
        max_batch_size: int,
        max_len: int,
        policy: AdaptiveSpecPolicy | None = None,
        speculative_num_steps: int | None = None,
        cuda_graph_bs: Sequence[int] | None = None,
        skip_draft_at_zero: bool = False,
        options: SpecOptions | None = None,
        strict: bool = False,
    ) -> None:
        for name, value in (("max_batch_size", max_batch_size), ("max_len", max_len)):
            check_int(name, value, 1)
        if max_len > target.config.max_position_embeddings:
            raise ValueError(
                f"max_len: expected at most {target.config.max_position_embeddings} (the target's "
                f"max_position_embeddings), got {max_len}"
            )
        if speculative_num_steps is not None:
            check_int("speculative_num_steps", speculative_num_steps, 0)
        sizes = check_batch_sizes(cuda_graph_bs)
        check_instance("policy", policy, AdaptiveSpecPolicy)
        check_instance("options", options, SpecOptions)
        self.unsupported_reason = None
        if policy is not None:
            if speculative_num_steps is not None:
                validate_adaptive_initial_steps(speculative_num_steps, policy.config)
            self.unsupported_reason = resolve_adaptive_support(
                options or SpecOptions(), strict=strict
            )
        steps = speculative_num_steps
        if steps is None:
            steps = 0 if policy is None else policy.get_steps_for_batch(1)
        if self.unsupported_reason is not None:
            policy = None
        # Only a policy that lives beside the op can be updated inside it.
        learns_in_op = hasattr(policy, "step_reader")
        weight = target.head_weight
        if learns_in_op and policy.tensor.device != weight.device:
            raise ValueError(
                f"policy: expected a state on {weight.device} (the target's device), got one on "
                f"{policy.tensor.device}"
            )
        all_steps = [steps] if policy is None else policy.candidate_steps
        if draft is None and max(all_steps) > 0:
            raise ValueError(
                f"draft: S = {max(all_steps)} needs a draft model, got None "
                "(without one only S = 0 can run)"
            )
        if learns_in_op:
            policy.bind(self)

        self.target, self.draft = target, draft
        self.policy = policy
        self.max_batch_size, self.max_len = max_batch_size, max_len
        self.max_steps = max(all_steps)
        self.skip_draft_at_zero = skip_draft_at_zero and draft is not None
        self.num_skipped_draft_rounds = 0
        # A batch is padded to a captured size: the rows must reach what the largest is padded to.
        num_rows = pad_to_cuda_graph_bs(max_batch_size, sizes)
        self.cuda_graph_bs = None if sizes is None else [s for s in sizes if s <= num_rows]
        self.row_capacity = max_len + self.rounds_in_flight * self.kv_tokens_per_round
        target_cache = target.make_cache(num_rows, self.row_capacity)
        draft_cache = None if draft is None else draft.make_cache(num_rows, self.row_capacity)
        self.caches = [cache for cache in (target_cache, draft_cache) if cache is not None]
        self.buffers = DecodeBuffers.allocate(
            num_rows,
            self.max_steps,
            target.config.hidden_size,
            target.config.vocab_size,
            dtype=weight.dtype,
            device=weight.device,
            keep_target_hidden=self.skip_draft_at_zero,
            workspace=ops.verify_workspace(num_rows, self.max_steps + 1, device=weight.device),
        )
        self._learns_in_op = learns_in_op
        self.stages = EagleStages(
            target, target_cache, draft, draft_cache, policy if learns_in_op else None
        )
        self.queue = make_queue(weight.device)
        self._capture_pool = CapturePool(weight.device)
        self.rows = RowTable(
            self.queue,
            self.stages,
            self.buffers,
            self.caches,
            max_batch_size=max_batch_size,
            max_len=max_len,
            tokens_per_round=self.kv_tokens_per_round,
            rounds_in_flight=self.rounds_in_flight,
        )
        self._in_flight: deque[LaunchedRound] = deque()
        # Collected, and not shown to the policy yet: counts, batch size, S.
        self._feedback: deque[tuple[list[int], int, int]] = deque()
        self._free_results = [
            HostResults(self.queue, self.buffers) for _ in range(self.rounds_in_flight)
        ]
        # As of the work that has been queued up to the stage that looks: only stages use it.
        self._draft_behind = False

        self.controller: AdaptiveController | None = None
        self.speculative_num_steps = steps
        self.runtime_state: SpecRuntimeState | None = None
        self._init_states()

    def _init_states(self) -> None:
        if self.policy is None:
            steps = self.speculative_num_steps
            state = self.build_adaptive_runtime_state(steps, steps + 1)
            self.apply_runtime_state(state)
            states = {steps: state}
        else:
            self.controller = AdaptiveController(self, self.policy, lag=self.rounds_in_flight)
            self.controller.init_states(self.cuda_graph_bs)
            states = self.controller.states
            check_states_cover_routing(
                states,
                self.policy.candidate_steps,
                self.policy.candidate_steps_for_batch,
                self.cuda_graph_bs,
                self.max_batch_size,
            )
        self.capture_report = CaptureReport.of(
            states.values(), self.cuda_graph_bs, self.buffers.frame_bytes
        )

    # Runtime states.

    def build_adaptive_runtime_state(
        self,
        speculative_num_steps: int,
        speculative_num_draft_tokens: int,
        cuda_graph_bs: list[int] | None = None,
    ) -> SpecRuntimeState:
        """The stages of a round at S, captured for ``cuda_graph_bs``, the largest first.

        None captures all of the worker's own sizes, an empty list none. The worker's active state,
        its rows and the adaptive state are as before afterwards, also if a capture fails.
        """
        steps = speculative_num_steps
        if speculative_num_draft_tokens != steps + 1:
            raise ValueError(
                f"speculative_num_draft_tokens: expected {steps + 1} (a chain of {steps} steps), "
                f"got {speculative_num_draft_tokens}"
            )
        stages, pool = self.stages, self._capture_pool
        extends = self.draft is not None and not (steps == 0 and self.skip_draft_at_zero)
        state = SpecRuntimeState(
            speculative_num_steps=steps,
            speculative_num_draft_tokens=speculative_num_draft_tokens,
            draft_graphs=GraphTable(stages.draft, pool) if steps > 0 else None,
            verify_graphs=GraphTable(stages.verify if extends else stages.verify_only, pool),
            draft_extend_graphs=GraphTable(stages.extend, pool) if extends else None,
        )
        sizes = self.cuda_graph_bs if cuda_graph_bs is None else cuda_graph_bs
        return self._capture(state, sorted(sizes, reverse=True)) if sizes else state

    @torch.inference_mode()
    def _capture(self, state: SpecRuntimeState, sizes: Sequence[int]) -> SpecRuntimeState:
        """Capture every stage of ``state`` for each of ``sizes``; the state, with what it took."""
        self.queue.drain()
        used = self._capture_pool.used_bytes()
        start = time.perf_counter()
        with self._override_worker_state(state):
            for size in sizes:
                frame = self._frame(state, size)
                for table in state.stages:
                    # A frozen launch cannot follow the keys as they grow, so it reads all there
                    # may ever be.
                    table.capture(frame, self.row_capacity)
        seconds = time.perf_counter() - start
        if used is None:
            steps = state.speculative_num_steps
            num_bytes = sum(self.buffers.frame_bytes(steps, size) for size in sizes)
        else:
            num_bytes = max(0, self._capture_pool.used_bytes() - used)
        return replace(state, num_bytes=num_bytes, capture_seconds=seconds)

    def apply_runtime_state(self, state: SpecRuntimeState) -> None:
        self.runtime_state = state
        self.speculative_num_steps = state.speculative_num_steps

    @contextlib.contextmanager
    def _override_worker_state(self, state: SpecRuntimeState) -> Iterator[None]:
        """Make ``state`` the active one for the block, with no live rows, and put everything back.

        What the block writes to the caches lies at or behind the end of the live rows' sequences,
        where their next round overwrites it.
        """
        active = (self.runtime_state, self.speculative_num_steps)
        saved = [(t, t.clone()) for t in (self.buffers.num_reqs, *self.buffers.row_state())]
        self.apply_runtime_state(state)
        self.buffers.num_reqs.zero_()
        try:
            yield
        finally:
            self.runtime_state, self.speculative_num_steps = active
            for tensor, value in saved:
                tensor.copy_(value)

    def _frame(self, state: SpecRuntimeState, batch_size: int) -> RoundFrame:
        frame = state.frames.get(batch_size)
        if frame is None:
            slot = self.policy.slot_for_batch(batch_size) if self._learns_in_op else 0
            frame = RoundFrame.of(self.buffers, state.speculative_num_steps, batch_size, slot)
            state.frames[batch_size] = frame
        return frame

    # Rows.

    @property
    def num_reqs(self) -> int:
        return len(self.rows)

    @property
    def kv_tokens_per_round(self) -> int:
        """Cache slots that a round may fill per request: by the largest S, whatever S is active."""
        return self.max_steps + 1

    def add_row(self, token_ids: Sequence[int], sampling: SamplingParams = GREEDY) -> int | None:
        """Run a request's tokens through both models in a new, last row.

        Returns its next token; None where rounds overlap: there the token comes with the row's
        first round (`DecodeResult.first_tokens`), or from `first_token`.

        A row that is removed and added again with its tokens so far and the same seed goes on as if
        it had stayed.

        Raises ValueError when there is no free row, no tokens, more than fit or one outside the
        vocabulary, and TypeError for tokens that are no integers.
        """
        row = self.rows.add(token_ids, sampling)
        if self.rounds_in_flight > 1:
            return None
        try:
            return self.first_token(row.index)
        except BaseException:
            self.remove_row(row.index)
            raise

    def first_token(self, row: int) -> int | None:
        """Wait for the token that the prompt in ``row`` led to; None if it was handed out before.

        If the prompt's pass failed, raises what it raised, and so does `collect` for the row's
        first round, until the row is removed.
        """
        return take_first_tokens([self.rows[row]])[0]

    def failed_prompts(self) -> list[int]:
        """The rows whose prompt's pass is known to have failed, the last first."""
        return [row.index for row in reversed(self.rows.rows) if row.prompt_failed]

    def remove_row(self, row: int) -> None:
        """Free ``row``; the last live row moves into it. Rounds in flight are not disturbed."""
        self.rows.remove(row)

    # Decoding.

    def activate_step_by_batch(self, batch_size: int) -> None:
        if self.controller is not None:
            self.controller.activate_step_by_batch(batch_size)

    def on_verify_complete_cpu(
        self,
        num_correct_drafts_per_req: Sequence[int],
        batch_size: int,
        executed_steps: int | None = None,
    ) -> None:
        # Where the op has learned from the round, counting it again would be wrong.
        if self.controller is not None and not self._learns_in_op:
            self.controller.on_verify_complete(
                num_correct_drafts_per_req, batch_size, executed_steps=executed_steps
            )

    @property
    def num_in_flight(self) -> int:
        """Rounds that were launched and not collected yet."""
        return len(self._in_flight)

    def launch(self) -> None:
        """Start a round for all live rows, without waiting for the device.

        Raises ValueError without live rows and for a row that has no room left, RuntimeError when
        ``rounds_in_flight`` rounds wait to be collected. Then nothing was started.
        """
        batch_size = self.num_reqs
        if batch_size == 0:
            raise ValueError("launch: there is no live row")
        if self.num_in_flight >= self.rounds_in_flight:
            raise RuntimeError(f"launch: {self.num_in_flight} rounds are in flight; collect first")
        self.rows.check_room()
        self.activate_step_by_batch(batch_size)
        state = self.runtime_state
        padded = pad_to_cuda_graph_bs(batch_size, self.cuda_graph_bs)
        launched = LaunchedRound(
            state,
            self._frame(state, padded),
            self.rows.reserve(),
            list(self.rows.rows),
            self._free_results[-1],
        )
        try:
            launched.job = self.queue.submit(lambda: self._run_round(launched))
        except BaseException:
            self._cancel(launched)
            raise
        self._free_results.pop()
        self._in_flight.append(launched)
        self._feed_policy()

    def _run_round(self, launched: LaunchedRound) -> None:
        state, frame, kv_len = launched.state, launched.frame, launched.kv_len
        steps, batch_size = state.speculative_num_steps, len(launched.rows)
        try:
            if self._draft_behind and steps > 0:
                self.stages.catch_up(frame, kv_len)
                self._draft_behind = False
            for table in state.stages:
                table.run(frame, kv_len)
                if table is state.verify_graphs:
                    launched.verified = True
            if steps == 0 and self.skip_draft_at_zero:
                self._draft_behind = True
                self.num_skipped_draft_rounds += 1
            launched.results.copy(batch_size)
        except Exception as error:
            error.add_note(f"in a decode round of {batch_size} rows at S = {steps}")
            raise

    def _cancel(self, launched: LaunchedRound) -> None:
        """The round failed. The rows are as before it, and so is the policy if it did not learn."""
        if self._learns_in_op and not launched.verified:
            self.controller.cancel_round()

    def collect(self) -> DecodeResult:
        """Wait for the oldest round in flight; its rows have each gained 1 to S + 1 tokens.

        Raises RuntimeError when none is in flight. If a model failed in it, raises what that
        raised: the round then counts as not run, and the rows are as before it.
        """
        if not self._in_flight:
            raise RuntimeError("collect: no round is in flight")
        launched = self._in_flight[0]
        try:
            launched.job.wait()
        except Exception:  # an interrupted wait leaves the round in flight
            self._cancel(launched)
            self._retire()
            raise
        rows = launched.rows
        # Before the round is let go: a prompt that failed must not pass for one that ran.
        first_tokens = take_first_tokens(rows)
        counts, tokens, errors = launched.results.read(len(rows))
        self._retire()
        steps = launched.state.speculative_num_steps
        for row, count, error in zip(rows, counts, errors, strict=True):
            row.length += count + 1
            row.had_bad_logits |= error
        self._feedback.append((counts, len(rows), steps))
        self._feed_policy()
        return DecodeResult(
            speculative_num_steps=steps,
            batch_size=len(rows),
            padded_batch_size=launched.frame.batch_size,
            num_correct_drafts=counts,
            tokens=tokens,
            rows=[row.index for row in rows],
            first_tokens=first_tokens,
        )

    def _feed_policy(self) -> None:
        """Hand a host policy the rounds that its next decision may know.

        Those are all but the newest ``rounds_in_flight - 1``, whether or not their results are
        here: as in the op, a decision depends on which rounds there were and never on timing.
        """
        while self._feedback and len(self._feedback) + self.num_in_flight >= self.rounds_in_flight:
            counts, batch_size, steps = self._feedback.popleft()
            self.on_verify_complete_cpu(counts, batch_size, executed_steps=steps)

    def _retire(self) -> None:
        self._free_results.append(self._in_flight.popleft().results)

    def decode(self) -> DecodeResult:
        """`launch` a round and `collect` the oldest."""
        self.launch()
        return self.collect()

    def status(self) -> dict[str, Any]:
        """What runs, and why: for operators."""
        report = self.capture_report
        return {
            "speculative_num_steps": self.speculative_num_steps,
            "adaptive": self.controller is not None,
            "adaptive_unsupported_reason": self.unsupported_reason,
            "skip_draft_at_zero": self.skip_draft_at_zero,
            "num_skipped_draft_rounds": self.num_skipped_draft_rounds,
            "num_rounds_in_flight": self.num_in_flight,
            "captured_batch_sizes": dict(report.batch_sizes),
            "captured_bytes": report.captured_bytes,
            "unpruned_bytes": report.full_bytes,
            "capture_seconds": dict(report.seconds),
            "controller": None if self.controller is None else self.controller.status(),
        }


def check_int(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an integer, got {value!r}")
    if value < minimum:
        raise ValueError(f"{name}: expected at least {minimum}, got {value}")


def check_instance(name: str, value: object, expected: type) -> None:
    if value is not None and not isinstance(value, expected):
        raise TypeError(f"{name}: expected {expected.__name__} or None, got {value!r}")


def check_batch_sizes(cuda_graph_bs: Sequence[int] | None) -> list[int] | None:
    if cuda_graph_bs is None:
        return None
    sizes = list(cuda_graph_bs)
    for size in sizes:
        check_int("cuda_graph_bs", size, 1)
    return sorted(set(sizes))
