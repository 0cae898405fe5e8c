"""Settings of the mono service; the only place where its process reads flags, environment and file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triptych.core.settings import load_settings
from triptych.stages.settings import LanguageSettings, VisionSettings, WorkerSettings

SERVICE = "mono"


@dataclass(frozen=True, kw_only=True)
class MonoSettings(WorkerSettings, VisionSettings, LanguageSettings):
    """Everything that `python -m services.mono` can be told."""


def read_settings(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> MonoSettings:
    """From flags, environment and file. Raises StartupError."""
    return load_settings(MonoSettings, SERVICE, argv, environ)
