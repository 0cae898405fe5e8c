"""Settings of the encoder service; the only place where its process reads flags, environment and file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triptych.core.settings import load_settings
from triptych.stages.settings import VisionSettings, WorkerSettings

SERVICE = "encoder"


@dataclass(frozen=True, kw_only=True)
class EncoderSettings(WorkerSettings, VisionSettings):
    """Everything that `python -m services.encoder` can be told."""


def read_settings(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> EncoderSettings:
    """From flags, environment and file. Raises StartupError."""
    return load_settings(EncoderSettings, SERVICE, argv, environ)
