"""Settings of the prefill service; the only place where its process reads flags, environment and file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triptych.core.settings import load_settings
from triptych.stages.settings import LanguageSettings, WorkerSettings

SERVICE = "prefill"


@dataclass(frozen=True, kw_only=True)
class PrefillSettings(WorkerSettings, LanguageSettings):
    """Everything that `python -m services.prefill` can be told."""


def read_settings(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> PrefillSettings:
    """From flags, environment and file. Raises StartupError."""
    return load_settings(PrefillSettings, SERVICE, argv, environ)
