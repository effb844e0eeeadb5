"""Text to token ids and back, over a Hugging Face ``tokenizer.json``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as HFTokenizer
from tokenizers.decoders import DecodeStream


class Tokenizer:
    """A ``tokenizer.json``, without the special tokens a template would add."""

    def __init__(self, inner: HFTokenizer):
        self._inner = inner

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"tokenizer: no such file: {path}")
        try:
            return cls(HFTokenizer.from_file(str(path)))
        # The library reports a malformed file as a bare Exception.
        except Exception as error:
            raise ValueError(f"tokenizer: {path} is not a tokenizer.json: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._inner.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Raises ValueError where ``text`` has a surrogate, as undecodable input bytes become."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            found = ascii(text[error.start])
            raise ValueError(
                f"text: expected Unicode (was it read from bytes that are not UTF-8?), got {found} "
                f"at character {error.start}"
            ) from None
        return self._inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._inner.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, special tokens left out; bytes that are not UTF-8 become U+FFFD."""
        return self._inner.decode(list(ids), skip_special_tokens=True)

    def token_id(self, token: str) -> int | None:
        """Id of a token given as the vocabulary spells it, None if there is none."""
        return self._inner.token_to_id(token)

    def stream(self) -> TextStream:
        return TextStream(self._inner)


class TextStream:
    """Turns ids that arrive one by one into text, holding back unfinished characters."""

    def __init__(self, inner: HFTokenizer):
        self._inner = inner
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._emitted = 0

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; empty while a character is unfinished."""
        self._ids.append(token_id)
        piece = self._stream.step(self._inner, token_id) or ""
        self._emitted += len(piece)
        return piece

    def finish(self) -> str:
        """What is still held back, with U+FFFD for a character that was never finished."""
        text = self._inner.decode(self._ids, skip_special_tokens=True)
        rest, self._emitted = text[self._emitted :], len(text)
        return rest
