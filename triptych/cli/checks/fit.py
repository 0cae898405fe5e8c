"""Whether the model fits: memory of each worker, tokens of the KV pools, the largest picture in the landing arena."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from triptych.cli.checks.finding import Finding, fail, ok, size, warn
from triptych.cli.checks.host import available_bytes
from triptych.cli.checks.machine import Machine
from triptych.cli.checks.workers import Wanted
from triptych.kv.allocator import RESERVED_PAGES

if TYPE_CHECKING:
    from triptych.cli.checks.checkpoint import Parts
    from triptych.model.adapters.base import Adapter

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# The router's bound on a picture, as a square.
LARGEST_SIDE_PX = 10_000
# Enough for a question and an answer beside the largest picture.
TALK_TOKENS = 256
SMALLEST_POOL_PAGES = 2


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a worker takes on the host, shared memory included, and on its GPU.

    `weights` and `pool` are part of one or of both; `pool` is what `kv_pool_bytes` asks for.
    """

    name: str
    weights: int
    pool: int
    host: int
    gpu: int


def need_of(worker: Wanted, parts: Parts, process_bytes: int) -> Need:
    """`process_bytes`: an interpreter with torch and transformers, before any weights."""
    element = ELEMENT_BYTES[worker.dtype]
    weights = element * (parts.vision * worker.has_vision + parts.language * worker.has_language)
    pool = worker.sizes.kv_pool_bytes * worker.has_language
    others = process_bytes + worker.sizes.landing_bytes * worker.has_landing
    others += worker.sizes.embedding_cache_bytes * worker.has_vision
    if worker.device == "cpu":
        return Need(worker.name, weights, pool, weights + pool + others, 0)
    return Need(
        worker.name, weights, pool, others + pool * worker.shares_pool, weights + pool
    )  # others write to a mirror


def part_sizes(adapter: Adapter, parts: Parts, workers: Sequence[Wanted]) -> Finding:
    shown = []
    for dtype in sorted({worker.dtype for worker in workers}):
        vision, language = (size(ELEMENT_BYTES[dtype] * part) for part in (parts.vision, parts.language))
        shown.append(
            f"in {dtype}: vision {vision}, language {language}, {token_bytes(adapter, dtype):,} bytes of KV a token"
        )
    return ok("model size", "; ".join(shown))


def token_bytes(adapter: Adapter, dtype: str) -> int:
    """K and V of one token over all layers."""
    kv = adapter.kv_shape
    return 2 * kv.num_layers * kv.num_kv_heads * kv.head_dim * ELEMENT_BYTES[dtype]


def pool_tokens(adapter: Adapter, worker: Wanted) -> int:
    """Tokens that the worker's pool can hold; zero when it is too small to start."""
    page_bytes = worker.sizes.page_tokens * token_bytes(adapter, worker.dtype)
    num_pages = worker.sizes.kv_pool_bytes // page_bytes
    return (num_pages - RESERVED_PAGES) * worker.sizes.page_tokens if num_pages >= SMALLEST_POOL_PAGES else 0


def kv_pool(adapter: Adapter, workers: Sequence[Wanted]) -> Finding:
    """The smallest pool decides how long a sequence may be."""
    worker = min((worker for worker in workers if worker.has_language), key=lambda w: pool_tokens(adapter, w))
    page_bytes = worker.sizes.page_tokens * token_bytes(adapter, worker.dtype)
    tokens = pool_tokens(adapter, worker)
    longest = min(tokens, adapter.max_sequence_tokens)
    found = f"{size(worker.sizes.kv_pool_bytes)} on {worker.name} hold {tokens} tokens; longest sequence {longest}"
    largest = largest_picture_tokens(adapter)
    if tokens == 0:
        least = SMALLEST_POOL_PAGES * page_bytes
        return fail("KV pool", found, f"set kv_pool_bytes to at least {least} (TRIPTYCH_KV_POOL_BYTES={least})")
    if tokens < min(adapter.max_sequence_tokens, largest + TALK_TOKENS):
        pages = -(-min(adapter.max_sequence_tokens, largest + TALK_TOKENS) // worker.sizes.page_tokens) + 1
        wanted = pages * page_bytes
        found += f", less than the largest picture ({largest} tokens) and a question"
        return warn("KV pool", found, f"set kv_pool_bytes to {wanted} or more (TRIPTYCH_KV_POOL_BYTES={wanted})")
    return ok("KV pool", f"{found} of the model's {adapter.max_sequence_tokens}")


def landing(adapter: Adapter, workers: Sequence[Wanted]) -> Finding:
    """Room for the embedding of the largest picture that the model makes of any."""
    smallest = min((worker for worker in workers if worker.has_landing), key=lambda worker: worker.sizes.landing_bytes)
    tokens = largest_picture_tokens(adapter)
    needed = tokens * adapter.hidden_size * ELEMENT_BYTES[smallest.dtype]
    found = f"{size(smallest.sizes.landing_bytes)}; the largest picture is {tokens} tokens, {size(needed)}"
    if needed > smallest.sizes.landing_bytes:
        todo = f"set landing_bytes to {needed} or more (TRIPTYCH_LANDING_BYTES={needed}), or send smaller pictures"
        return warn("landing", found, todo)
    return ok("landing", found)


def largest_picture_tokens(adapter: Adapter) -> int:
    return adapter.image_layout(LARGEST_SIDE_PX, LARGEST_SIDE_PX).num_tokens


def process_bytes(machine: Machine) -> int:
    """What an idle worker takes, taken from this process: it has imported the same libraries."""
    return machine.kib_field("proc/self/status", "RssAnon") or 0


def memory_fit(machine: Machine, workers: Sequence[Wanted], parts: Parts) -> Finding:
    """All workers together in the memory of this machine or group."""
    needs = [need_of(worker, parts, process_bytes(machine)) for worker in workers]
    available = available_bytes(machine)
    if available is None:
        return warn("memory fit", "unknown: the kernel does not say how much memory there is", "mount /proc")
    sizes = {need.name: need.host for need in needs}
    pools = {need.name: need.pool for need, w in zip(needs, workers, strict=True) if w.device == "cpu" or w.shares_pool}
    return _fit("memory fit", "memory", sizes, pools, available, workers)


def gpu_fit(machine: Machine, workers: Sequence[Wanted], parts: Parts) -> Finding:
    """All workers on one GPU, where `device` puts them unless it names others."""
    assert machine.torch is not None
    sizes = {w.name: need_of(w, parts, 0).gpu for w in workers if w.device == "cuda"}
    pools = {w.name: w.sizes.kv_pool_bytes for w in workers if w.device == "cuda" and w.has_language}
    return _fit("GPU fit", "the GPU's memory", sizes, pools, machine.torch.gpus[0].free_bytes, workers)


def _fit(
    name: str, what: str, sizes: dict[str, int], pools: dict[str, int], available: int, workers: Sequence[Wanted]
) -> Finding:
    total = sum(sizes.values())
    shown = ", ".join(f"{worker} {size(num_bytes)}" for worker, num_bytes in sizes.items())
    if total <= available:
        return ok(name, f"{shown}: together {size(total)} of {size(available)} available")
    alone = [worker for worker, num_bytes in sizes.items() if num_bytes > available]
    largest = alone[0] if alone else max(sizes, key=lambda worker: sizes[worker])
    found = f"{shown}: together {size(total - available)} more than the {size(available)} of {what} available; "
    if alone:
        found += f"{largest} alone is {size(sizes[largest] - available)} too large"
    else:
        found += f"the largest is {largest}"
    return fail(name, found, _smaller(total - available, pools, workers))


def _smaller(excess: int, pools: dict[str, int], workers: Sequence[Wanted]) -> str:
    """The first setting that would help, with its value where it can be computed."""
    active = [num_bytes for num_bytes in pools.values() if num_bytes]
    left = (sum(active) - excess) // max(1, len(active))
    if active and left >= max(active) // 8:
        pool = 2 ** int(math.log2(left))
        return f"set kv_pool_bytes to {pool} (TRIPTYCH_KV_POOL_BYTES={pool})"
    if any(worker.dtype == "float32" for worker in workers):
        return "set dtype to bfloat16 (TRIPTYCH_DTYPE=bfloat16), which halves weights and KV, or give a smaller --model"
    if len(workers) > 1:
        return "use --topology mono, which holds the weights once, give a smaller --model, or use a larger machine"
    return "give a smaller --model, or use a machine with more memory"
