"""Whether the model fits: memory of each worker, tokens of the KV pools, the largest picture in the landing arena."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from triptych.cli.checks.finding import Finding, Status, counted, fail, ok, size, warn
from triptych.cli.checks.host import available_bytes
from triptych.cli.checks.machine import Machine
from triptych.cli.checks.workers import Wanted
from triptych.core.worker import Role
from triptych.kv.allocator import RESERVED_PAGES

if TYPE_CHECKING:
    from triptych.cli.checks.checkpoint import Parts
    from triptych.model.adapters.base import Adapter

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# The router's bound on a picture, as a square.
LARGEST_SIDE_PX = 10_000
# Of a media process that waits for a picture; a test measures one.
IDLE_MEDIA_BYTES = 40 << 20
# Enough for a question and an answer beside the largest picture.
TALK_TOKENS = 256
SMALLEST_POOL_PAGES = 2
# Enough for a picture of some megapixels.
SMALLEST_MEDIA_BYTES = 128 << 20
# A remedy leaves a pool at least an eighth of what it was.
SMALLEST_SHARE_SHIFT = 3


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a worker takes on the host, shared memory and waiting media processes included, and on its GPU.
    `weights` are part of one."""

    name: str
    weights: int
    host: int
    gpu: int


def need_of(worker: Wanted, parts: Parts, process_bytes: int) -> Need:
    """`process_bytes`: an interpreter with torch and transformers, before any weights."""
    element = ELEMENT_BYTES[worker.dtype]
    weights = element * (parts.vision * worker.has_vision + parts.language * worker.has_language)
    pool = worker.sizes.kv_pool_bytes * worker.has_language
    others = process_bytes + worker.sizes.landing_bytes * worker.has_landing
    others += worker.sizes.embedding_cache_bytes * worker.has_vision
    others += worker.sizes.host_pool_bytes * worker.has_host_pool
    others += IDLE_MEDIA_BYTES * worker.media_processes
    if worker.device == "cpu":
        return Need(worker.name, weights, weights + pool + others, 0)
    mirror = pool * worker.shares_pool  # what other processes write to, on the host
    return Need(worker.name, weights, others + mirror, weights + pool)


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
    needed = tokens * adapter.row_elements * ELEMENT_BYTES[smallest.dtype]
    found = f"{size(smallest.sizes.landing_bytes)}; the largest picture is {tokens} tokens, {size(needed)}"
    if needed > smallest.sizes.landing_bytes:
        todo = f"set landing_bytes to {needed} or more (TRIPTYCH_LANDING_BYTES={needed}), or send smaller pictures"
        return warn("landing", found, todo)
    kept = min(smallest.sizes.landed_cache_bytes, smallest.sizes.landing_bytes)
    return ok("landing", f"{found}; up to {size(kept)} keep what has landed")


def largest_picture_tokens(adapter: Adapter) -> int:
    """0 for a model that takes none."""
    if adapter.image_placeholder_id is None:
        return 0
    return adapter.image_layout(LARGEST_SIDE_PX, LARGEST_SIDE_PX).num_tokens


def process_bytes(machine: Machine) -> int:
    """What an idle worker takes, taken from this process: it has imported the same libraries."""
    return machine.kib_field("proc/self/status", "RssAnon") or 0


def memory_fit(machine: Machine, workers: Sequence[Wanted], parts: Parts) -> Finding:
    """All workers together in the memory of this machine or group."""
    available = available_bytes(machine)
    if available is None:
        return warn("memory fit", "unknown: the kernel does not say how much memory there is", "mount /proc")
    idle = process_bytes(machine)
    room = _Room("memory", available, lambda worker: need_of(worker, parts, idle).host)
    return _fit("memory fit", workers, room)


def media_fit(machine: Machine, workers: Sequence[Wanted], parts: Parts) -> Finding:
    """Whether all media processes may decode the largest pictures at once, beside workers that fit."""
    count = sum(worker.media_processes for worker in workers)
    if count == 0:
        return ok("media memory", "no worker decodes pictures")
    idle = process_bytes(machine)
    left = (available_bytes(machine) or 0) - sum(need_of(worker, parts, idle).host for worker in workers)
    most = sum(worker.media_processes * worker.sizes.media_memory_bytes for worker in workers)
    found = f"{count} media process{'' if count == 1 else 'es'} may take {size(most)} for the largest pictures"
    if most <= left:
        return ok("media memory", f"{found}, of {size(left)} that the workers leave")
    return warn(
        "media memory", f"{found}, but the workers leave {size(max(0, left))}", _media_remedy(left, count, workers)
    )


def _media_remedy(left: int, count: int, workers: Sequence[Wanted]) -> str:
    """Fewer processes of the same size, else smaller ones, which refuse what needs more."""
    encoders = sum(worker.has_vision for worker in workers)
    each = left // max(worker.sizes.media_memory_bytes for worker in workers if worker.has_vision) // encoders
    if each >= 1:
        return f"set media_processes to {each} (TRIPTYCH_MEDIA_PROCESSES={each})"
    if left // count >= SMALLEST_MEDIA_BYTES:
        smaller = left // count >> 20 << 20
        return f"set media_memory_bytes to {smaller} (TRIPTYCH_MEDIA_MEMORY_BYTES={smaller})"
    return "set media_processes to 1 (TRIPTYCH_MEDIA_PROCESSES=1), and send small pictures or lower kv_pool_bytes"


def gpu_fit(machine: Machine, workers: Sequence[Wanted], parts: Parts) -> Finding:
    """The workers of each GPU together in its memory: the first one where they do not fit, else all."""
    gpus = machine.torch.gpus if machine.torch is not None else ()
    fine = []
    for index in sorted({worker.gpu_index for worker in workers if worker.device == "cuda"}):
        there = [worker for worker in workers if worker.device == "cuda" and worker.gpu_index == index]
        if index >= len(gpus):
            names = ", ".join(worker.name for worker in there)
            found = f"{names}: device {there[0].sizes.device}, but torch can use {counted(len(gpus), 'GPU')}"
            return fail("GPU fit", found, "set device to auto, cpu or a GPU that is there (TRIPTYCH_DEVICE=auto)")
        room = _Room(f"GPU {index}", gpus[index].free_bytes, lambda worker: need_of(worker, parts, 0).gpu)
        finding = _fit("GPU fit", there, room)
        if finding.status is not Status.OK:
            return finding
        fine.append(f"GPU {index}: {finding.found}")
    return ok("GPU fit", "; ".join(fine))


@dataclass(frozen=True, slots=True)
class _Room:
    """Bytes of some memory, and how many a worker takes of it."""

    what: str
    available: int
    taken_by: Callable[[Wanted], int]

    def excess(self, workers: Sequence[Wanted]) -> int:
        """Negative where all fit."""
        return sum(map(self.taken_by, workers)) - self.available


def _fit(name: str, workers: Sequence[Wanted], room: _Room) -> Finding:
    shown = ", ".join(f"{worker.name} {size(room.taken_by(worker))}" for worker in workers)
    excess = room.excess(workers)
    if excess <= 0:
        return ok(name, f"{shown}: together {size(room.available + excess)} of {size(room.available)} available")
    largest = max(workers, key=room.taken_by)
    too_large = room.taken_by(largest) - room.available
    found = f"{shown}: together {size(excess)} more than the {size(room.available)} of {room.what} available; "
    found += f"{largest.name} alone is {size(too_large)} too large" if too_large > 0 else f"largest is {largest.name}"
    return fail(name, found, _remedy(workers, room))


def _remedy(workers: Sequence[Wanted], room: _Room) -> str:
    """The first change that makes all fit, tried out."""
    pool_bytes = max(worker.sizes.kv_pool_bytes for worker in workers)
    for smaller in (pool_bytes >> shift for shift in range(1, SMALLEST_SHARE_SHIFT + 1)):
        pools = [replace(w, sizes=replace(w.sizes, kv_pool_bytes=min(smaller, w.sizes.kv_pool_bytes))) for w in workers]
        if room.excess(pools) <= 0:
            return f"set kv_pool_bytes to {smaller} (TRIPTYCH_KV_POOL_BYTES={smaller})"
    halved = [replace(worker, dtype="bfloat16") for worker in workers]
    if room.excess(halved) <= 0:
        return "set dtype to bfloat16 (TRIPTYCH_DTYPE=bfloat16), which halves the weights"
    mono = replace(workers[-1], name="mono-0", roles=frozenset(Role))
    if room.excess([mono]) <= 0:
        return "use --topology mono, which holds the weights once"
    if room.excess([replace(mono, dtype="bfloat16")]) <= 0:
        return "use --topology mono and set dtype to bfloat16 (TRIPTYCH_DTYPE=bfloat16)"
    return f"give a smaller --model, or find {size(room.excess(workers))} more of {room.what}"
