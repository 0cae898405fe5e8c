"""Settings of the decode service; the only place where its process reads flags, environment and file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triptych.core.settings import load_settings
from triptych.stages.settings import LanguageSettings, WorkerSettings

SERVICE = "decode"


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(WorkerSettings, LanguageSettings):
    """Everything that `python -m services.decode` can be told."""


def read_settings(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> DecodeSettings:
    """From flags, environment and file. Raises StartupError."""
    return load_settings(DecodeSettings, SERVICE, argv, environ)
