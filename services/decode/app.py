"""The decode worker: only the language model, KV in, tokens out."""

from __future__ import annotations

from services.decode.settings import DecodeSettings
from triptych.stages.worker import WorkerPlan


def worker_plan(settings: DecodeSettings) -> WorkerPlan:
    """What this process runs."""
    return WorkerPlan(common=settings, decode=settings)
