"""All three stages in one process, on one engine: the reference and the baseline."""

from __future__ import annotations

from services.mono.settings import MonoSettings
from triptych.stages.worker import WorkerPlan


def worker_plan(settings: MonoSettings) -> WorkerPlan:
    """What this process runs."""
    return WorkerPlan(common=settings, vision=settings, prefill=settings, decode=settings)
