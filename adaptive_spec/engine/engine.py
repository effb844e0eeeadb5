"""The engine: text or tokens in, text or tokens out, many requests at a time.

Requests join and leave between decode rounds. Output is lossless: whatever the draft proposes and
however S changes, a request's tokens are those of plain decoding, greedy or sampled with its seed.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from adaptive_spec.controller import AdaptiveController, AdaptiveSpecPolicy
from adaptive_spec.engine.loading import ModelPair
from adaptive_spec.engine.request import Limits, Request
from adaptive_spec.engine.sampling import GREEDY, SamplingParams
from adaptive_spec.engine.scheduler import Scheduler
from adaptive_spec.workers import DecodeResult, EagleWorker, EagleWorkerV2, SpecOptions


@dataclass(frozen=True)
class RoundReport:
    """What one `Engine.step` did. Where no decode round ended in it, batch_size is 0.

    With overlap the round that is reported was launched a step earlier (or, by the first step of a
    busy spell, in the same one), while joins and seconds are those of this step: requests that
    join now are not in the round reported now.
    """

    round: int  # decode rounds that ended before this one
    batch_size: int
    padded_batch_size: int
    speculative_num_steps: int
    # Accepted drafts of each request that the round ran with, bonus excluded. With overlap also of
    # those that had ended or left by the time it was known.
    accepted: list[int]
    emitted: int  # tokens the round added to requests, after their limits; no first tokens
    seconds: float  # launching and waiting
    num_joined: int  # each gets its first token at once or, with overlap, with its first round
    join_seconds: float


class Engine:
    """Serves a pair of models on one machine.

    Args:
        pair: target, draft and tokenizer (`load_pair`, `random_pair`).
        max_batch_size: most requests that run at a time; the others wait.
        max_len: most tokens of a request, prompt and output.
        policy: chooses the draft steps S: `AdaptiveState` or `AdaptiveSpeculativeParams`.
        speculative_num_steps: without a policy, the fixed S; 0 (the default) decodes plainly, with
            no draft work at all. With a policy, the S it was told to start with.
        overlap: launch each round before the results of the one before are known, so that the
            device does not wait for the host (`EagleWorkerV2`). The same tokens, a round later.
        cuda_graph_bs, skip_draft_at_zero, options, strict: see `EagleWorker`.

    Raises TypeError or ValueError naming a bad argument.
    """

    def __init__(
        self,
        pair: ModelPair,
        *,
        max_batch_size: int,
        max_len: int,
        policy: AdaptiveSpecPolicy | None = None,
        speculative_num_steps: int | None = None,
        cuda_graph_bs: Sequence[int] | None = None,
        skip_draft_at_zero: bool = False,
        options: SpecOptions | None = None,
        strict: bool = False,
        overlap: bool = False,
    ) -> None:
        plain = policy is None and not speculative_num_steps
        self.pair = pair
        self.worker = (EagleWorkerV2 if overlap else EagleWorker)(
            pair.target,
            None if plain else pair.draft,
            max_batch_size=max_batch_size,
            max_len=max_len,
            policy=policy,
            speculative_num_steps=speculative_num_steps,
            cuda_graph_bs=cuda_graph_bs,
            skip_draft_at_zero=skip_draft_at_zero,
            options=options,
            strict=strict,
        )
        self.max_len = max_len
        self.num_rounds = 0
        self._scheduler = Scheduler(max_batch_size)
        self._num_submitted = 0
        self._stepping = False

    @property
    def controller(self) -> AdaptiveController | None:
        return self.worker.controller

    @property
    def running(self) -> list[Request]:
        """The requests that take part in the next round, by row."""
        return list(self._scheduler.running)

    @property
    def waiting(self) -> list[Request]:
        return list(self._scheduler.waiting)

    @property
    def idle(self) -> bool:
        return not self._scheduler.has_work

    def status(self) -> dict[str, Any]:
        """The worker's status and the queue's."""
        return self.worker.status() | {
            "num_rounds": self.num_rounds,
            "num_running": len(self._scheduler.running),
            "num_waiting": len(self._scheduler.waiting),
        }

    # Requests.

    def submit(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int,
        *,
        stop_token_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        ignore_eos: bool = False,
        on_text: Callable[[str], None] | None = None,
        sampling: SamplingParams = GREEDY,
    ) -> Request:
        """Queue a prompt (text or token ids). It joins a coming round and ends at its limits.

        The pair's end-of-text tokens are stop tokens unless ``ignore_eos``. A request also ends
        ("length") where prompt and output reach the engine's max_len. ``on_text`` is called at the
        end of a step with the text that the step released: whole characters, never part of a stop
        string. ``sampling``: how its tokens are chosen; greedily by default. Raises TypeError or
        ValueError naming the argument; then nothing was queued.
        """
        request = self._make_request(
            prompt, max_new_tokens, stop_token_ids, stop_strings, ignore_eos, on_text, sampling
        )
        self._scheduler.waiting.append(request)
        return request

    def abort(self, request: Request) -> None:
        """End a request now, wherever it is; a finished one is left alone."""
        if request.finished:
            return
        self._take_out(request)
        piece = request.abort()
        try:
            if piece and request.on_text is not None:
                request.on_text(piece)
        finally:
            self._collect_unclaimed()

    def retract(self, request: Request) -> None:
        """Take a running request out of its row and put it at the head of the queue.

        When it joins again, its tokens are run through the models again; its output is unaffected.
        With overlap, tokens of rounds in flight are lost to it and decoded again.
        """
        if request not in self._scheduler.running:
            raise ValueError(f"request: {request.id} is not running")
        self._take_out(request)
        self._scheduler.waiting.appendleft(request)

    # Running.

    def step(self) -> RoundReport:
        """Let waiting requests join, run one decode round, let finished requests leave.

        With overlap the next round is launched before this one's results are waited for.

        Text callbacks run last. If one raises, the others still run and the first error is raised
        then; the engine is intact.
        """
        if self._stepping:
            # Text of an inner step would overtake what this one still has to hand out.
            raise RuntimeError("step: called from a text callback of a step")
        self._stepping = True
        pieces: list[tuple[Request, str]] = []
        try:
            try:
                return self._step(pieces)
            finally:
                self._deliver(pieces)
        finally:
            self._stepping = False

    def run(self) -> list[RoundReport]:
        """Step until no request is left."""
        reports = []
        while not self.idle:
            reports.append(self.step())
        return reports

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        max_new_tokens: int,
        *,
        stop_token_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        ignore_eos: bool = False,
        sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    ) -> list[Request]:
        """Submit all prompts and step until they are done; the finished requests, in order.

        ``sampling``: one for all prompts, or one for each.
        """
        each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(prompts):
            raise ValueError(
                f"sampling: expected one for each of {len(prompts)} prompts, got {len(each)}"
            )
        requests = [
            self._make_request(
                prompt, max_new_tokens, stop_token_ids, stop_strings, ignore_eos, None, own
            )
            for prompt, own in zip(prompts, each, strict=True)
        ]
        self._scheduler.waiting.extend(requests)
        try:
            while not all(request.finished for request in requests):
                self.step()
        except BaseException:
            for request in requests:
                # What ended the loop is to be seen, not what it broke.
                with contextlib.suppress(Exception):
                    self.abort(request)
            raise
        return requests

    def stream(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int,
        *,
        stop_token_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        ignore_eos: bool = False,
        sampling: SamplingParams = GREEDY,
    ) -> TextStream:
        """Submit a prompt and yield its text as it comes; closing the stream aborts the request.

        Arguments are checked by the call itself, not at the first piece.
        """
        pieces: deque[str] = deque()
        request = self.submit(
            prompt,
            max_new_tokens,
            stop_token_ids=stop_token_ids,
            stop_strings=stop_strings,
            ignore_eos=ignore_eos,
            on_text=pieces.append,
            sampling=sampling,
        )
        return TextStream(self, request, pieces)

    def _make_request(
        self,
        prompt: str | Sequence[int],
        max_new_tokens: int,
        stop_token_ids: Sequence[int],
        stop_strings: Sequence[str],
        ignore_eos: bool,
        on_text: Callable[[str], None] | None,
        sampling: SamplingParams,
    ) -> Request:
        if not isinstance(sampling, SamplingParams):
            raise TypeError(f"sampling: expected SamplingParams, got {sampling!r}")
        tokenizer = self.pair.tokenizer
        if tokenizer is None:
            for name, value in (("stop_strings", stop_strings), ("on_text", on_text)):
                if value:
                    raise ValueError(f"{name}: the engine's models have no tokenizer")
        ids = self._check_prompt(prompt)
        if not ignore_eos:
            stop_token_ids = (*stop_token_ids, *self.pair.eos_token_ids)
        limits = Limits.of(max_new_tokens, stop_token_ids, stop_strings)
        room = self.max_len - len(ids)
        if limits.max_new_tokens > room:
            limits = Limits(room, limits.stop_token_ids, limits.stop_strings)
        request = Request(
            self._num_submitted, ids, limits, tokenizer, on_text, sampling.with_seed()
        )
        self._num_submitted += 1
        return request

    def _check_prompt(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if self.pair.tokenizer is None:
                raise ValueError("prompt: the engine's models have no tokenizer; pass token ids")
            ids = self.pair.tokenizer.encode(prompt)
        else:
            ids = list(prompt)
        if not ids:
            raise ValueError("prompt: expected at least one token, got none")
        if len(ids) >= self.max_len:
            raise ValueError(
                f"prompt: expected fewer than {self.max_len} tokens (max_len), got {len(ids)}"
            )
        vocab_size = self.pair.target.config.vocab_size
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise TypeError(f"prompt: expected integer token ids, got {token!r}")
            if not 0 <= token < vocab_size:
                raise ValueError(f"prompt: expected token ids 0 to {vocab_size - 1}, got {token}")
        return ids

    def _step(self, pieces: list[tuple[Request, str]]) -> RoundReport:
        start = time.perf_counter()
        num_joined = self._let_join(pieces)
        joined = time.perf_counter()
        worker = self.worker
        while self._scheduler.running and worker.num_in_flight < worker.rounds_in_flight:
            worker.launch()
        if not worker.num_in_flight:
            return RoundReport(
                round=self.num_rounds,
                batch_size=0,
                padded_batch_size=0,
                speculative_num_steps=worker.speculative_num_steps,
                accepted=[],
                emitted=0,
                seconds=0.0,
                num_joined=num_joined,
                join_seconds=joined - start,
            )
        try:
            result = worker.collect()
        except BaseException:
            # A prompt that failed is run again, as it would be without overlap.
            for row in worker.failed_prompts():
                self.retract(self._scheduler.running[row])
            raise
        seconds = time.perf_counter() - joined
        number = self.num_rounds
        self.num_rounds += 1
        emitted = self._take(result, pieces)
        self._collect_unclaimed()
        return RoundReport(
            round=number,
            batch_size=result.batch_size,
            padded_batch_size=result.padded_batch_size,
            speculative_num_steps=result.speculative_num_steps,
            accepted=result.num_correct_drafts,
            emitted=emitted,
            seconds=seconds,
            num_joined=num_joined,
            join_seconds=joined - start,
        )

    def _collect_unclaimed(self) -> None:
        """With no request left, nobody would collect the rounds in flight."""
        first_error: Exception | None = None
        while self.worker.num_in_flight and not self._scheduler.has_work:
            try:
                self.worker.collect()
            except Exception as error:
                first_error = first_error or error
            self.num_rounds += 1
        if first_error is not None:
            raise first_error

    def _let_join(self, pieces: list[tuple[Request, str]]) -> int:
        num_joined = 0
        while (request := self._scheduler.next_to_join()) is not None:
            # A retracted request comes back with the tokens it already has.
            token = self.worker.add_row(request.token_ids, request.sampling)
            self._scheduler.join()
            num_joined += 1
            if token is None:
                continue
            _, piece = request.take([token])
            pieces.append((request, piece))
            if request.finished:
                self._leave(len(self._scheduler.running) - 1)
        return num_joined

    def _take(self, result: DecodeResult, pieces: list[tuple[Request, str]]) -> int:
        emitted = 0
        running = self._scheduler.running
        for index, row in enumerate(result.rows):
            if row is None:
                continue  # it left while the round was in flight
            request = running[row]
            first = result.first_tokens[index]
            if first is not None:
                _, piece = request.take([first])
                pieces.append((request, piece))
                if request.finished:
                    continue
            request.num_rounds += 1
            request.num_proposed_drafts += result.speculative_num_steps
            request.num_correct_drafts += result.num_correct_drafts[index]
            taken, piece = request.take(result.tokens[index])
            emitted += taken
            pieces.append((request, piece))
        # From the last row down: what moves into a freed row has been looked at already.
        for row in range(len(running) - 1, -1, -1):
            if running[row].finished:
                self._leave(row)
        return emitted

    def _leave(self, row: int) -> None:
        self._scheduler.running[row].had_bad_logits |= self.worker.rows[row].had_bad_logits
        self.worker.remove_row(row)
        self._scheduler.leave(row)

    def _take_out(self, request: Request) -> None:
        scheduler = self._scheduler
        if request in scheduler.running:
            self._leave(scheduler.running.index(request))
        elif request in scheduler.waiting:
            scheduler.waiting.remove(request)
        else:
            raise ValueError(f"request: {request.id} was not submitted to this engine")

    def _deliver(self, pieces: list[tuple[Request, str]]) -> None:
        first_error: BaseException | None = None
        for request, piece in pieces:
            # A callback may have aborted another request of the same step.
            if not piece or request.on_text is None or request.finish_reason == "abort":
                continue
            try:
                request.on_text(piece)
            except BaseException as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error


class TextStream(Iterator[str]):
    """The text of one request, piece by piece; steps the engine when there is none to hand out."""

    def __init__(self, engine: Engine, request: Request, pieces: deque[str]) -> None:
        self.request = request
        self._engine = engine
        self._pieces = pieces

    def __next__(self) -> str:
        while not self._pieces:
            if self.request.finished:
                raise StopIteration
            try:
                self._engine.step()
            except BaseException:
                with contextlib.suppress(Exception):
                    self.close()
                raise
        return self._pieces.popleft()

    def close(self) -> None:
        """Abort the request if it has not ended; nothing more is yielded."""
        self._engine.abort(self.request)
        self._pieces.clear()

    def __del__(self) -> None:
        if not self.request.finished:
            self.close()
