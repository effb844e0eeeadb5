"""A request: what was asked for, what has been produced, and when it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from adaptive_spec.engine.sampling import GREEDY, SamplingParams
from adaptive_spec.engine.text import TextOutput
from adaptive_spec.engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class Limits:
    """When a request ends.

    max_new_tokens: at least 1. stop_token_ids: the request ends with the first of these, which is
    kept in its tokens but not in its text. stop_strings: its text ends before the first of these.
    """

    max_new_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()

    @classmethod
    def of(
        cls, max_new_tokens: int, stop_token_ids: Sequence[int], stop_strings: Sequence[str]
    ) -> Limits:
        """Checked limits. Raises TypeError or ValueError naming the argument."""
        if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int):
            raise TypeError(f"max_new_tokens: expected an integer, got {max_new_tokens!r}")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: expected at least 1, got {max_new_tokens}")
        for token in stop_token_ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise TypeError(f"stop_token_ids: expected integers, got {token!r}")
        if isinstance(stop_strings, str):
            raise TypeError(f"stop_strings: expected a list of strings, got {stop_strings!r}")
        for string in stop_strings:
            if not isinstance(string, str):
                raise TypeError(f"stop_strings: expected strings, got {string!r}")
            if not string:
                raise ValueError("stop_strings: expected non-empty strings, got ''")
        return cls(max_new_tokens, frozenset(stop_token_ids), tuple(stop_strings))


@dataclass(eq=False)
class Request:
    """One prompt and its output. Made by `Engine.submit`; read it freely, do not write to it."""

    id: int
    prompt_ids: list[int]
    limits: Limits
    tokenizer: Tokenizer | None = None
    on_text: Callable[[str], None] | None = None
    sampling: SamplingParams = GREEDY  # with the seed it got
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # "length", "stop_token", "stop_string" or "abort"
    num_rounds: int = 0  # decode rounds it took part in
    num_proposed_drafts: int = 0
    num_correct_drafts: int = 0  # accepted drafts, bonus excluded, as the verify op saw them
    # Whether its rounds met logits with a NaN, +inf or nothing above -inf: its tokens are then not
    # what the models should have given. Known when it ends or is retracted. A draft that was
    # rejected, or lay behind the end of the output, may have been the cause.
    had_bad_logits: bool = False

    def __post_init__(self) -> None:
        # Text costs time per token, so it is built along the way only where someone waits for it.
        self._text = None
        if self.on_text is not None or self.limits.stop_strings:
            self._text = TextOutput(self.tokenizer.stream(), self.limits.stop_strings)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output so far."""
        return self.prompt_ids + self.output_ids

    @property
    def text(self) -> str:
        """The output so far as text, without stop token and stop string. Needs a tokenizer."""
        if self._text is not None:
            return self._text.text
        if self.tokenizer is None:
            raise ValueError("text: the engine's models have no tokenizer")
        ids = self.output_ids
        return self.tokenizer.decode(ids[:-1] if self.finish_reason == "stop_token" else ids)

    @property
    def mean_accepted_drafts(self) -> float:
        """Accepted drafts per round, bonus excluded; 0 before the first round."""
        return self.num_correct_drafts / self.num_rounds if self.num_rounds else 0.0

    @property
    def accept_rate(self) -> float:
        """Accepted share of the drafts proposed; 0 while none was."""
        proposed = self.num_proposed_drafts
        return self.num_correct_drafts / proposed if proposed else 0.0

    def take(self, tokens: Sequence[int]) -> tuple[int, str]:
        """Take a round's tokens up to where the request ends.

        Returns how many were taken and the text they release; sets ``finish_reason`` at the end.
        """
        pieces = []
        taken = 0
        for token in tokens:
            self.output_ids.append(token)
            taken += 1
            if token in self.limits.stop_token_ids:
                self.finish_reason = "stop_token"
            elif self._text is not None:
                pieces.append(self._text.push(token))
                if self._text.stop_match is not None:
                    self.finish_reason = "stop_string"
            if not self.finished and len(self.output_ids) >= self.limits.max_new_tokens:
                self.finish_reason = "length"
            if self.finished:
                pieces.append(self._finish_text())
                break
        return taken, "".join(pieces)

    def abort(self) -> str:
        """End the request where it is; returns the text that was held back."""
        self.finish_reason = "abort"
        return self._finish_text()

    def _finish_text(self) -> str:
        if self._text is None:
            return ""
        piece = self._text.finish()
        # The last bytes can complete a stop string too.
        if self._text.stop_match is not None and self.finish_reason == "length":
            self.finish_reason = "stop_string"
        return piece
