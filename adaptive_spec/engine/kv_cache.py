"""Key/value storage of one model: a fixed number of rows, one per request in the batch.

Keys and values of a position lie side by side, so that a forward pass writes both with one
indexed copy per layer. A position is always written before it is read (the model writes the
keys of the tokens it is given first, then attends), which is what makes rolling back free: a
rejected draft leaves entries behind, and the next tokens given at those positions replace them.
"""

from __future__ import annotations

import torch


class KVCache:
    """Keys and values of up to ``max_len`` tokens for each of ``num_rows`` requests.

    ``k`` and ``v`` are views ``[num_layers, num_rows, max_len, num_kv_heads, head_dim]`` of one
    allocation. The storage starts as zeros and only finite values should be written to it: a masked
    position has weight 0, and 0 * NaN would still be NaN. A row that may hold NaN or infinity (its
    last request overflowed) is made safe for the next one by `clear_row`; nothing that one
    row holds can reach another.
    """

    def __init__(
        self,
        num_layers: int,
        num_rows: int,
        max_len: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        shape = (num_layers, num_rows, max_len, num_kv_heads, head_dim)
        names = ("num_layers", "num_rows", "max_len", "num_kv_heads", "head_dim")
        for name, value in zip(names, shape, strict=True):
            if value < 1:
                raise ValueError(f"{name}: expected an integer >= 1, got {value}")
        data = torch.zeros(
            num_layers, num_rows, max_len, 2, num_kv_heads, head_dim, dtype=dtype, device=device
        )
        self._set(data)

    def _set(self, data: torch.Tensor) -> None:
        self.data = data
        self.num_layers, self.num_rows, self.max_len = data.shape[:3]
        self.k = data[:, :, :, 0]
        self.v = data[:, :, :, 1]
        # Per layer [num_rows, max_len, 2 * num_kv_heads * head_dim], made once: slicing per forward
        # pass costs more than the copies themselves at batch 1.
        self.entries = data.flatten(3).unbind(0)

    def rows(self, start: int, stop: int) -> KVCache:
        """The rows ``start..stop-1`` as a cache of their own that shares this one's storage."""
        if not 0 <= start < stop <= self.num_rows:
            raise ValueError(
                f"rows: expected 0 <= start < stop <= {self.num_rows}, "
                f"got start={start}, stop={stop}"
            )
        view = KVCache.__new__(KVCache)
        view._set(self.data[:, start:stop])
        return view

    def copy_row(self, src: int, dst: int, length: int) -> None:
        """Copies the first ``length`` positions of row ``src`` to row ``dst`` in every layer."""
        for name, row in (("src", src), ("dst", dst)):
            self._check_row(name, row)
        self._check_length(length)
        if src != dst:
            self.data[:, dst, :length].copy_(self.data[:, src, :length])

    def clear_row(self, row: int, length: int | None = None) -> None:
        """Zeroes the first ``length`` positions of a row (None: all), which a new request takes
        over: every one that may have been written."""
        self._check_row("row", row)
        length = self.max_len if length is None else length
        self._check_length(length)
        self.data[:, row, :length].zero_()

    def _check_row(self, name: str, row: int) -> None:
        if not 0 <= row < self.num_rows:
            raise ValueError(f"{name}: expected 0..{self.num_rows - 1}, got {row}")

    def _check_length(self, length: int) -> None:
        if not 0 <= length <= self.max_len:
            raise ValueError(f"length: expected 0..{self.max_len}, got {length}")
