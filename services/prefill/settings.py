"""Settings of the prefill service; the only place where its process reads flags, environment and file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from triptych.core.settings import load_settings
from triptych.core.worker import Role
from triptych.stages.settings import LanguageSettings, VisionSettings, WorkerSettings

SERVICE = "prefill"

_OTHER_STAGES = (Role.ENCODER.value, Role.DECODE.value)


@dataclass(frozen=True, kw_only=True)
class PrefillSettings(WorkerSettings, VisionSettings, LanguageSettings):
    """Everything that `python -m services.prefill` can be told. What concerns vision has no use without
    `--also encoder`."""

    also: tuple[str, ...] = field(
        default=(), metadata={"help": "other stages that this process serves: encoder, decode or both"}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.also:
            if name not in _OTHER_STAGES:
                raise ValueError(f"--also takes {', '.join(_OTHER_STAGES)} or both, but not {name!r}")

    @property
    def roles(self) -> frozenset[Role]:
        return frozenset({Role.PREFILL, *map(Role, self.also)})


def read_settings(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> PrefillSettings:
    """From flags, environment and file. Raises StartupError."""
    return load_settings(PrefillSettings, SERVICE, argv, environ)
