"""Where each token of a request came from: an accepted draft, or the target itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adaptive_spec.engine.request import Request
    from adaptive_spec.engine.tokenizer import Tokenizer


class OriginTracker:
    """Follows one request; call `update` after each step of its engine.

    Attributes:
        accepted: for each output token so far, whether it was an accepted draft.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.accepted: list[bool] = []
        self._num_correct = 0

    def update(self) -> list[tuple[int, bool]]:
        """The tokens since the last call, each with whether it was an accepted draft."""
        request = self.request
        new = request.output_ids[len(self.accepted) :]
        num_correct = request.num_correct_drafts - self._num_correct
        self._num_correct = request.num_correct_drafts
        # The first token of all comes from the prefill, in the same step as the first round.
        first = 0 if self.accepted else 1
        flags = [first <= i < first + num_correct for i in range(len(new))]
        self.accepted += flags
        return list(zip(new, flags, strict=True))


def text_pieces(
    tokenizer: Tokenizer, ids: list[int], accepted: list[bool]
) -> Iterator[tuple[str, bool]]:
    """Text of each token with its origin; a character split over tokens goes to its last one."""
    stream = tokenizer.stream()
    for token, flag in zip(ids, accepted, strict=True):
        if piece := stream.push(token):
            yield piece, flag
    if rest := stream.finish():
        yield rest, False
