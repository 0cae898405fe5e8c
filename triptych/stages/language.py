"""Builds the language-model half of a worker: part, pool, manager, engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from triptych.core.clock import Clock
from triptych.core.errors import StartupError
from triptych.engine.landing import LandingTable
from triptych.engine.loop import EngineLimits, LanguageEngine, LogitsObserver
from triptych.kv.journal import Journal
from triptych.kv.manager import CacheManager
from triptych.kv.pool import PoolShape
from triptych.model.adapters.base import Adapter
from triptych.model.runner import LanguageRunner
from triptych.obs import metrics
from triptych.sched.language import StepBudget
from triptych.stages.poison import poisoned_pages
from triptych.stages.settings import LanguageSettings
from triptych.transport.slots import SlotAllocator


@dataclass(frozen=True, slots=True)
class ComputeChoice:
    """Where and in what precision a worker computes."""

    device: torch.device
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def choose_compute(device: str, dtype: str) -> ComputeChoice:
    """Resolves `auto`. Raises StartupError for a device that is not there."""
    name = device if device != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(name)
    except RuntimeError:
        raise StartupError(f"--device {device!r} is not a device; use cpu, cuda, cuda:N or auto") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise StartupError("--device asks for a GPU, but torch finds none; use --device cpu or install torch for CUDA")
    if chosen.type not in ("cpu", "cuda"):
        raise StartupError(f"--device {device!r} is not supported; use cpu, cuda, cuda:N or auto")
    resolved = dtype if dtype != "auto" else ("bfloat16" if chosen.type == "cuda" else "float32")
    return ComputeChoice(chosen, getattr(torch, resolved))


def pool_shape(adapter: Adapter, settings: LanguageSettings, dtype: torch.dtype) -> PoolShape:
    """As many pages as fit `kv_pool_bytes`. Raises StartupError when not even one sequence page does."""
    kv = adapter.kv_shape
    one = PoolShape(kv.num_layers, 1, settings.page_tokens, kv.num_kv_heads, kv.head_dim)
    num_pages = settings.kv_pool_bytes // one.page_bytes(dtype)
    if num_pages < 2:
        raise StartupError(
            f"--kv-pool-bytes {settings.kv_pool_bytes} is too small; give at least {2 * one.page_bytes(dtype)}"
        )
    return one.with_pages(num_pages)


def build_engine(
    adapter: Adapter,
    settings: LanguageSettings,
    compute: ComputeChoice,
    pool: torch.Tensor,
    slots: SlotAllocator,
    clock: Clock,
    stage: str,
    observer: LogitsObserver | None = None,
    journal: Journal | None = None,
) -> LanguageEngine:
    """Loads the language model and wires an engine (not started) over `pool`. `journal` hears of its caches."""
    part = adapter.load_language(compute.dtype, compute.device)
    metrics.MODEL_PARAMETERS.labels("language").set(part.num_parameters)
    runner = LanguageRunner(part, pool, settings.page_tokens, adapter.lookup_id)
    limits = EngineLimits(
        budget=StepBudget(
            max(settings.step_tokens, settings.max_sequences), settings.chunk_tokens, settings.min_partial_tokens
        ),
        max_sequences=settings.max_sequences,
        max_waiting=settings.max_waiting,
        row_bytes=adapter.row_elements * compute.dtype.itemsize,
        host_pool_bytes=settings.host_pool_bytes,
    )
    on_free = poisoned_pages(pool) if settings.poison_freed else None
    manager = CacheManager(pool.shape[2], settings.page_tokens, on_free, journal)
    landing = LandingTable(slots, settings.landed_cache_bytes, journal)
    return LanguageEngine(runner, manager, landing, limits, clock, stage, observer)
