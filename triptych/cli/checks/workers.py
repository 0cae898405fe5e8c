"""The workers that a command line asks for, and the sizes that each would be told: from flags and variables, else from
the table of its service in the file, else from the top of the file, else the service's default."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from triptych.cli import layout
from triptych.cli.doctor_settings import DoctorSettings
from triptych.core.environment import ENVIRONMENT_PREFIX
from triptych.core.errors import StartupError
from triptych.core.setting_values import Setting, parse_toml
from triptych.core.worker import Role
from triptych.media.count import num_processes

_DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,4})?")
_ROLES = {"encoder": {Role.ENCODER}, "prefill": {Role.PREFILL}, "decode": {Role.DECODE}, "mono": set(Role)}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The services' settings of the same names; a test holds their defaults together."""

    kv_pool_bytes: int = 256 << 20
    host_pool_bytes: int = 256 << 20
    landing_bytes: int = 64 << 20
    page_tokens: int = 16
    embedding_cache_bytes: int = 256 << 20
    landed_cache_bytes: int = 64 << 20
    media_processes: int = 0
    media_memory_bytes: int = 2 << 30
    dtype: str = "auto"
    device: str = "auto"
    allow_kv_narrowing: bool = False
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Wanted:
    """A worker to be. `device` and `dtype` are resolved: cpu or cuda, float32 and the like. `media_processes`: how many
    it starts, none without a vision tower."""

    name: str
    roles: frozenset[Role]
    threads: int
    sizes: Sizes
    device: str
    dtype: str
    media_processes: int = 0

    @property
    def gpu_index(self) -> int:
        """Of the GPU where it computes, if it does on one."""
        return int(self.sizes.device.partition(":")[2] or 0)

    @property
    def has_language(self) -> bool:
        return bool(self.roles & {Role.PREFILL, Role.DECODE})

    @property
    def has_vision(self) -> bool:
        return Role.ENCODER in self.roles

    @property
    def has_host_pool(self) -> bool:
        """Whether KV of those that it decodes may wait on the host."""
        return Role.DECODE in self.roles

    @property
    def shares_pool(self) -> bool:
        """Whether other processes write KV to it."""
        return Role.DECODE in self.roles and Role.PREFILL not in self.roles

    @property
    def has_landing(self) -> bool:
        return Role.PREFILL in self.roles

    @property
    def shares_landing(self) -> bool:
        """Whether other processes write embeddings to it."""
        return self.has_landing and not self.has_vision

    @property
    def shared_bytes(self) -> int:
        """Of /dev/shm."""
        pool = self.sizes.kv_pool_bytes if self.shares_pool else 0
        return pool + (self.sizes.landing_bytes if self.shares_landing else 0)


def wanted_workers(
    settings: DoctorSettings, config: Path | None, given: frozenset[str], cores: int, has_gpu: bool
) -> list[Wanted]:
    """Those that `triptych up` would start. `given`: the names that flags and variables set. Raises StartupError."""
    document = _document(config)
    specs = layout.workers(settings, Path(), Path(), cores, lambda _host, _port: True)
    return [_wanted(spec, settings, document, given, cores, has_gpu) for spec in specs]


def given_names(argv: Sequence[str], environ: Mapping[str, str]) -> frozenset[str]:
    """Settings that flags or variables set."""
    flags = {word.split("=")[0].removeprefix("--").replace("-", "_") for word in argv if word.startswith("--")}
    variables = {
        name.removeprefix(ENVIRONMENT_PREFIX).lower() for name in environ if name.startswith(ENVIRONMENT_PREFIX)
    }
    return frozenset(flags | variables)


def _wanted(
    spec: layout.ProcessSpec,
    settings: DoctorSettings,
    document: Mapping[str, Any],
    given: frozenset[str],
    cores: int,
    has_gpu: bool,
) -> Wanted:
    flags = dict(zip(spec.flags[::2], spec.flags[1::2], strict=True))
    also = {Role(name) for name in flags.get("--also", "").split(",") if name}
    sizes = _sizes(spec.role, settings, document.get(spec.role, {}), given)
    if not _DEVICE.fullmatch(sizes.device):
        raise StartupError(f"the setting device must be cpu, cuda, cuda:N or auto, not {sizes.device!r}")
    device = "cuda" if sizes.device.startswith("cuda") or (sizes.device == "auto" and has_gpu) else "cpu"
    dtype = sizes.dtype if sizes.dtype != "auto" else ("bfloat16" if device == "cuda" else "float32")
    roles = frozenset(_ROLES[spec.role] | also)
    media = num_processes(sizes.media_processes, cores) if Role.ENCODER in roles else 0
    return Wanted(spec.name, roles, int(flags["--threads"]), sizes, device, dtype, media)


def _sizes(service: str, settings: DoctorSettings, table: Mapping[str, Any], given: frozenset[str]) -> Sizes:
    hints = get_type_hints(DoctorSettings)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Sizes):
        merged = getattr(settings, field.name)
        if field.name in table and field.name not in given:
            declared = DoctorSettings.__dataclass_fields__[field.name]
            setting = Setting.of(declared, hints[field.name])
            values[field.name] = parse_toml(setting, table[field.name], f"[{service}] of the file given by --config")
        elif merged is not None:
            values[field.name] = merged
    return Sizes(**values)


def _document(config: Path | None) -> Mapping[str, Any]:
    if config is None:
        return {}
    try:
        return tomllib.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError(f"{config.name} cannot be read: {error}") from error
