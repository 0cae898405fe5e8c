"""The prefill worker: only the language model, prompts in, KV out."""

from __future__ import annotations

from services.prefill.settings import PrefillSettings
from triptych.stages.worker import WorkerPlan


def worker_plan(settings: PrefillSettings) -> WorkerPlan:
    """What this process runs."""
    return WorkerPlan(common=settings, prefill=settings)
