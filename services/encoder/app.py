"""The encoder: only the vision tower."""

from __future__ import annotations

from services.encoder.settings import EncoderSettings
from triptych.stages.worker import WorkerPlan


def worker_plan(settings: EncoderSettings) -> WorkerPlan:
    """What this process runs."""
    return WorkerPlan(common=settings, vision=settings)
