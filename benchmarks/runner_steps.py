"""Decode steps of one language model, below the engine: transformers' modules against our own decoder, in one process.

    python -m benchmarks.runner_steps MODEL [--dtype float32] [--threads 2] [--batches 1,4,16] [--context 256]

Both take turns, so that what else the machine does meets both alike. With each time stands the share of the memory's
bandwidth that our decoder used: bytes of weights and KV that a step must read, over what a triad reaches
(`benchmarks/triad.py`). Weights that fit into caches may exceed it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.triad import triad_bytes_per_s
from triptych.core.plan import Sampling
from triptych.kv.pool import PoolShape
from triptych.model.adapters.base import Adapter
from triptych.model.language_weights import LanguageWeights
from triptych.model.parts import LanguagePart
from triptych.model.registry import adapter_for
from triptych.model.runner import LanguageRunner, RunSlice
from triptych.model.sampler import SampleRow
from triptych.model.stock_language import StockLanguage

PAGE_TOKENS = 16
WARM_UP_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--context", type=int, default=256, help="tokens of each sequence when timing begins")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    adapter, dtype = adapter_for(options.model), getattr(torch, options.dtype)
    parts = load_both(adapter, dtype)
    triad = triad_bytes_per_s(options.threads)
    print(f"{adapter.model_name} {options.dtype}, {options.threads} threads, {options.context} tokens of context")
    print(f"triad: {triad / 1e9:.1f} GB/s")
    for batch in map(int, options.batches.split(",")):
        medians = compare(adapter, parts, batch, options.context, options.steps)
        read = step_bytes(adapter, parts["own"], batch, options.context)
        share = read / (medians["own"] / 1e3) / triad
        shown = ", ".join(f"{name} {ms:.1f} ms" for name, ms in medians.items())
        print(f"batch {batch:2}: {shown}; {share:.0%} of the triad's bandwidth")


def load_both(adapter: Adapter, dtype: torch.dtype) -> dict[str, LanguagePart]:
    """transformers' modules ("stock") and ours ("own"), each with weights of its own."""
    cpu = torch.device("cpu")
    weights, stock = weights_of(adapter)
    stock_part = weights.load_stock(stock, dtype, cpu)
    return {"stock": stock_part, "own": weights_of(adapter)[0].load_own(dtype, cpu)}


def weights_of(adapter: Any) -> tuple[LanguageWeights, type[StockLanguage]]:
    if not adapter.modalities:
        from triptych.model.llama_parts import language_weights

        return language_weights(adapter), StockLanguage
    from triptych.model import qwen3_vl_parts, qwen_vl_parts

    levels = adapter.num_embedding_levels
    return qwen_vl_parts.language_weights(adapter), (
        qwen3_vl_parts.Qwen3Language if levels else qwen_vl_parts.QwenLanguage
    )


def compare(adapter: Adapter, parts: dict[str, LanguagePart], batch: int, context: int, steps: int) -> dict[str, float]:
    """Median milliseconds of a step, by the part's name."""
    runs = {name: Decoding(adapter, part, batch, context, steps + WARM_UP_STEPS) for name, part in parts.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(WARM_UP_STEPS + steps):
        for name, run in runs.items():
            took = run.step()
            if step >= WARM_UP_STEPS:
                times[name].append(took * 1e3)
    return {name: statistics.median(taken) for name, taken in times.items()}


class Decoding:
    """Sequences of random tokens that are decoded, with their pages scattered over a pool."""

    def __init__(self, adapter: Adapter, part: LanguagePart, batch: int, context: int, steps: int) -> None:
        kv, num_pages = adapter.kv_shape, -(-(context + steps) // PAGE_TOKENS)
        shape = PoolShape(kv.num_layers, 1 + batch * num_pages, PAGE_TOKENS, kv.num_kv_heads, kv.head_dim)
        rng = np.random.default_rng(0)
        pool = torch.randn(shape.dims).to(part.dtype)
        self._runner = LanguageRunner(part, pool, PAGE_TOKENS, adapter.lookup_id)
        self._tables: Sequence[list[int]] = (1 + rng.permutation(batch * num_pages)).reshape(batch, -1).tolist()
        self._num_axes = len(adapter.positions(1, ())[0])
        self._length = context
        self._ids = [np.array([token], dtype=np.int64) for token in rng.integers(0, adapter.vocab_size, batch)]

    def step(self) -> float:
        """Seconds."""
        where = np.full((self._num_axes, 1), self._length, dtype=np.int64)
        sample = SampleRow(Sampling(max_tokens=self._length + 1), 0, self._length)
        slices = [
            RunSlice(ids, where, table, self._length, (), sample)
            for ids, table in zip(self._ids, self._tables, strict=True)
        ]
        before = time.perf_counter()
        out = self._runner.run(slices)
        took = time.perf_counter() - before
        self._ids = [np.array([token], dtype=np.int64) for token in out.token_ids]
        self._length += 1
        return took


def step_bytes(adapter: Adapter, part: LanguagePart, batch: int, context: int) -> int:
    """Weights once and the KV of all sequences; a tied head counts once, since the embeddings are only looked up."""
    kv = adapter.kv_shape
    of_kv = 2 * kv.num_layers * kv.num_kv_heads * kv.head_dim * context * batch
    return (part.num_parameters + of_kv) * part.dtype.itemsize


if __name__ == "__main__":
    main()
