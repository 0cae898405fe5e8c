"""The prefill worker: prompts in, KV out. With `--also decode` it goes on to decode them in the same engine, with
`--also encoder` it loads the vision tower too."""

from __future__ import annotations

from services.prefill.settings import PrefillSettings
from triptych.core.worker import Role
from triptych.stages.worker import WorkerPlan


def worker_plan(settings: PrefillSettings) -> WorkerPlan:
    """What this process runs."""
    return WorkerPlan(
        common=settings,
        vision=settings if Role.ENCODER in settings.roles else None,
        prefill=settings,
        decode=settings if Role.DECODE in settings.roles else None,
    )
