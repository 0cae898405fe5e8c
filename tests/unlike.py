"""A cluster in one process whose workers differ in their settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triptych.core.worker import Role
from triptych.stages.settings import LanguageSettings, WorkerSettings
from triptych.stages.worker import WorkerPlan
from triptych.testing.cluster import InProcessCluster, Topology

Differences = Mapping[str, Mapping[str, Any]]
"""Settings by the worker's id, or by what ids begin with."""


class UnlikeCluster(InProcessCluster):
    def __init__(self, model_dir: Path, topology: Topology, differences: Differences, **options: Any) -> None:
        super().__init__(model_dir, topology, **options)
        self._differences = differences

    def _plan_of(self, worker_id: str, roles: frozenset[Role]) -> WorkerPlan:
        plan = super()._plan_of(worker_id, roles)
        own = {
            name: value
            for begin, settings in self._differences.items()
            if worker_id.startswith(begin)
            for name, value in settings.items()
        }
        language = plan.language
        if language is not None:
            language = dataclasses.replace(language, **_of(LanguageSettings, own))
        return dataclasses.replace(
            plan,
            common=dataclasses.replace(plan.common, **_of(WorkerSettings, own)),
            prefill=language if plan.prefill is not None else None,
            decode=language if plan.decode is not None else None,
        )


def _of(kind: type[LanguageSettings | WorkerSettings], settings: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in settings.items() if name in names}
