"""Derives the tables in benchmarks/cost_tables from published kernel latencies; needs no GPU.

    pip install pyarrow && pip install --no-deps aiconfigurator-core==0.12.0
    python benchmarks/derive_cost_tables.py

`aiconfigurator-core` (NVIDIA, Apache-2.0) carries measured latencies of single kernels: matrix
products by (m, n, k), decode attention by (batch size, context), fused mixtures of experts by
tokens, all-reduces by message size. A round is the sum of its kernels:

    verify with B * (S + 1) tokens + draft extend with B * (S + 1) tokens + (S - 1) draft steps of
    B tokens; with S = 0 the verify alone.

What that leaves out: host time, sampling, gaps between kernels. So rounds are somewhat too cheap,
most at B = 1. Where the data has no point of a shape, the neighbours in n and k are interpolated
linearly; in the number of tokens it has a point on either side of each tile edge, so the line
between two points keeps the cliffs. Verification reads a request's context once for all its
S + 1 tokens, so attention costs what one token's does.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from adaptive_spec.cost_table import CostTable

OUT = Path(__file__).parent / "cost_tables"
BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
STEPS = range(11)
CONTEXT, LONG_CONTEXT = 1024, 4096
FRAMEWORK = "vllm/0.24.0"
BYTES = 2

# Memory bandwidth in bytes/ms, and the share of it and the constant in ms that AIConfigurator's
# systems/*.yaml reckon with for kernels that only move data.
SYSTEMS = {"h100": 3.35e9, "h200": 4.8e9, "b200": 7.7e9}
BANDWIDTH_SHARE, ELEMENTWISE_MS = 0.8, 0.003


@dataclasses.dataclass(frozen=True)
class Layers:
    """A stack of decoder layers with an output layer, as each of `gpus` GPUs runs it.

    `inner_in` is the width that attention reads: EAGLE's layer reads an embedding and a hidden
    state side by side. `experts` is (number, active ones per token, inner width).
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    gpus: int = 1
    inner_in: int | None = None
    experts: tuple[int, int, int] | None = None


# Shapes from the models' public config.json files.
LLAMA_8B = Layers(4096, 32, 32, 8, 128, 14336, 128256)
LLAMA_70B = Layers(8192, 80, 64, 8, 128, 28672, 128256, gpus=4)
LLAMA_1B = Layers(2048, 16, 32, 8, 64, 8192, 128256)
QWEN_30B = Layers(2048, 48, 32, 4, 128, 0, 151936, experts=(128, 8, 768))
QWEN_06B = Layers(1024, 28, 16, 8, 128, 3072, 151936)
# EAGLE-3 heads: one layer of the target's width, a draft vocabulary of 32,000.
EAGLE_8B = Layers(4096, 1, 32, 8, 128, 14336, 32000, inner_in=8192)
EAGLE_70B = Layers(8192, 1, 64, 8, 128, 28672, 32000, gpus=4, inner_in=16384)
EAGLE_30B = Layers(2048, 1, 32, 4, 128, 6144, 32000, inner_in=4096)

PAIRS = {
    "llama8b-eagle3": ("Llama-3.1-8B bf16 + EAGLE-3", LLAMA_8B, EAGLE_8B),
    "llama8b-draft1b": ("Llama-3.1-8B bf16 + Llama-3.2-1B", LLAMA_8B, LLAMA_1B),
    "llama70b-tp4-eagle3": ("Llama-3.1-70B bf16 TP4 + EAGLE-3", LLAMA_70B, EAGLE_70B),
    "llama70b-tp4-draft1b": ("Llama-3.1-70B bf16 TP4 + Llama-3.2-1B", LLAMA_70B, LLAMA_1B),
    "qwen30b-moe-eagle3": ("Qwen3-30B-A3B bf16 + EAGLE-3", QWEN_30B, EAGLE_30B),
    "qwen30b-moe-draft0.6b": ("Qwen3-30B-A3B bf16 + Qwen3-0.6B", QWEN_30B, QWEN_06B),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="systems/data of the package; default: installed")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    data, version = args.data, ""
    if data is None:
        # Found without importing it: only its data files are of interest.
        data = Path(importlib.util.find_spec("aiconfigurator_core").origin).parent / "systems/data"
        version = " " + importlib.metadata.version("aiconfigurator-core")
    source = f"kernel latencies of aiconfigurator-core{version}, {FRAMEWORK}; no host time"
    args.out.mkdir(exist_ok=True)
    for system, bandwidth in SYSTEMS.items():
        kernels = Kernels(data / f"{system}_sxm", bandwidth)
        for name, (model, target, draft) in PAIRS.items():
            path = args.out / f"{system}-{name}.json"
            table = derive(
                kernels, target, draft, machine=system.upper(), model=model, source=source
            )
            table.save(path)
            row = " ".join(f"{time:.2f}" for time in table.row(1)[:8])
            print(f"{path.name:34} B=1: {row} | B=128, S=3: {table.cost(128, 3):.2f} ms")


def derive(kernels: Kernels, target: Layers, draft: Layers, **names: str) -> CostTable:
    def round_ms(batch: int, steps: int) -> float:
        verify = kernels.forward(target, batch * (steps + 1), batch)
        if steps == 0:
            return round(verify, 4)
        extend = kernels.forward(draft, batch * (steps + 1), batch)
        return round(verify + extend + (steps - 1) * kernels.forward(draft, batch, batch), 4)

    slopes = {
        batch: round(
            kernels.attention_slope(target, batch) + kernels.attention_slope(draft, batch), 6
        )
        for batch in BATCH_SIZES
    }
    return CostTable.from_function(
        round_ms, BATCH_SIZES, STEPS, context_tokens=CONTEXT, context_slopes=slopes, **names
    )


class Kernels:
    """Latencies in ms of one GPU's kernels in bfloat16."""

    def __init__(self, folder: Path, bandwidth: float):
        self._bandwidth = bandwidth * BANDWIDTH_SHARE
        gemm = _rows(folder, "gemm/gemm_perf", {"gemm_dtype": "bfloat16"}, ("n", "k", "m"))
        self._gemm = _grouped(gemm, 2)
        self._widths = sorted({n for n, _ in self._gemm})
        attention = _rows(
            folder,
            "attention/generation_attention_perf",
            {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "window_size": 0},
            ("num_heads", "num_key_value_heads", "head_dim", "step", "batch_size"),
        )
        self._attention = _grouped(attention, 4)
        moe = _rows(
            folder,
            "moe/moe_perf",
            # Tokens that favour some experts, as real ones do.
            {
                "moe_dtype": "bfloat16",
                "distribution": "power_law_1.2",
                "moe_tp_size": 1,
                "moe_ep_size": 1,
            },
            ("hidden_size", "num_experts", "topk", "inter_size", "num_tokens"),
        )
        self._moe = _grouped(moe, 4)
        # Sizes are in elements: 2^29 of them take what 1 GiB takes over these links.
        reduce = _rows(
            folder,
            "comm/custom_allreduce_perf",
            {"backend": "vllm_graph"},
            ("num_gpus", "message_size"),
        )
        self._reduce = _grouped(reduce, 1)

    def forward(self, model: Layers, tokens: int, batch: int) -> float:
        """One pass of `tokens` tokens of `batch` requests at `CONTEXT` tokens each."""
        gpus, hidden = model.gpus, model.hidden
        width = model.heads * model.head_dim // gpus
        qkv = (model.heads + 2 * model.kv_heads) * model.head_dim // gpus
        layer = (
            self.matmul(tokens, qkv, model.inner_in or hidden)
            + self.attention(model, batch, CONTEXT)
            + self.matmul(tokens, hidden, width)
            + 2 * self.elementwise(tokens * hidden * 3)
        )
        if model.experts:
            experts, active, inner = model.experts
            layer += self.matmul(tokens, experts, hidden)
            layer += _between(self._moe[hidden, experts, active, inner], tokens)
        else:
            inner = model.inner // gpus
            layer += self.matmul(tokens, 2 * inner, hidden) + self.matmul(tokens, hidden, inner)
            layer += self.elementwise(tokens * inner * 3)
        if gpus > 1:
            layer += 2 * _between(self._reduce[(gpus,)], tokens * hidden)
        return model.layers * layer + self.matmul(tokens, model.vocabulary // gpus, hidden)

    def matmul(self, m: int, n: int, k: int) -> float:
        """[m, k] times [k, n]; wider than the data reaches is several products."""
        parts = -(-n // self._widths[-1])
        return parts * self._in_n(m, n / parts, k)

    def elementwise(self, elements: int) -> float:
        return ELEMENTWISE_MS + elements * BYTES / self._bandwidth

    def attention(self, model: Layers, batch: int, context: int) -> float:
        key = (
            model.heads // model.gpus,
            model.kv_heads // model.gpus,
            model.head_dim,
            context - 1,
        )
        return _between(self._attention[key], batch)

    def attention_slope(self, model: Layers, batch: int) -> float:
        """ms of one pass that 1000 more tokens of context add. A draft's later steps read it again,
        which is left out: a slope holds for every S."""
        longer, shorter = (self.attention(model, batch, c) for c in (LONG_CONTEXT, CONTEXT))
        return max(0.0, model.layers * (longer - shorter) * 1000 / (LONG_CONTEXT - CONTEXT))

    def _in_n(self, m: int, n: float, k: int) -> float:
        return _interpolate(self._widths, n, lambda width: self._in_k(m, width, k))

    def _in_k(self, m: int, n: int, k: int) -> float:
        return _interpolate(self._widths, k, lambda width: _between(self._gemm[n, width], m))


def _interpolate(grid: list[int], x: float, value: Callable[[int], float]) -> float:
    high = bisect_left(grid, x)
    if grid[high] == x:
        return value(grid[high])
    low, up = grid[high - 1], grid[high]
    return value(low) + (value(up) - value(low)) * (x - low) / (up - low)


def _between(points: dict[int, float], x: int) -> float:
    grid = sorted(points)
    return _interpolate(grid, max(x, grid[0]), points.__getitem__)


def _rows(
    folder: Path, name: str, where: dict[str, str | int], columns: tuple[str, ...]
) -> list[tuple]:
    family, file = name.split("/")
    table = pq.read_table(folder / family / FRAMEWORK / f"{file}.parquet")
    for column, value in where.items():
        table = table.filter(pc.equal(table[column], value))
    return list(zip(*(table[column].to_pylist() for column in (*columns, "latency")), strict=True))


def _grouped(rows: list[tuple], depth: int) -> dict[tuple, dict[int, float]]:
    """Latency by the last column before it, for each combination of the first `depth` ones. Of
    several kernels for the same thing an engine picks the fastest."""
    groups: dict[tuple, dict[int, float]] = defaultdict(dict)
    for *key, x, latency in rows:
        group = groups[tuple(key[:depth])]
        group[x] = min(latency, group.get(x, latency))
    return groups


if __name__ == "__main__":
    main()
