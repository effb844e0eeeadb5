"""From a request's tokens to the text that may be shown: whole characters only, and nothing that
may yet turn out to be the beginning of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from adaptive_spec.engine.tokenizer import TextStream


class TextOutput:
    """The text of one request as it grows.

    Args:
        stream: incremental decoder of the request's tokens.
        stop_strings: the text ends before the first occurrence of any of them, wherever the
            boundaries between tokens fall.
    """

    def __init__(self, stream: TextStream, stop_strings: Sequence[str] = ()) -> None:
        self._stream = stream
        self._stop_strings = tuple(stop_strings)
        self._pending = ""  # decoded but not released
        self._released: list[str] = []
        self.stop_match: str | None = None

    @property
    def text(self) -> str:
        """What has been released."""
        return "".join(self._released)

    def push(self, token_id: int) -> str:
        """Take one token; returns the text it releases. After a stop string matched, none."""
        if self.stop_match is not None:
            return ""
        self._pending += self._stream.push(token_id)
        return self._release(hold_back=True)

    def finish(self) -> str:
        """The rest of the text, when no more tokens will come."""
        if self.stop_match is not None:
            return ""
        self._pending += self._stream.finish()
        return self._release(hold_back=False)

    def _release(self, hold_back: bool) -> str:
        end = self._find_stop()
        if end is None:
            held = self._possible_stop_len() if hold_back else 0
            end = len(self._pending) - held
        piece, self._pending = self._pending[:end], self._pending[end:]
        if piece:
            self._released.append(piece)
        return piece

    def _find_stop(self) -> int | None:
        found = [(self._pending.find(stop), stop) for stop in self._stop_strings]
        found = [(start, stop) for start, stop in found if start >= 0]
        if not found:
            return None
        start, self.stop_match = min(found)
        return start

    def _possible_stop_len(self) -> int:
        """Length of the longest end of the pending text that begins a stop string."""
        longest = max(map(len, self._stop_strings), default=1) - 1
        for length in range(min(longest, len(self._pending)), 0, -1):
            tail = self._pending[-length:]
            if any(stop.startswith(tail) for stop in self._stop_strings):
                return length
        return 0
