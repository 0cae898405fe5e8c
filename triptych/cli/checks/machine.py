"""The machine as the checks see it: frozen values and a folder that stands for `/`, so that a test can make another."""

from __future__ import annotations

import os
import platform
import resource
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Gpu:
    """`capability` is NVIDIA's compute capability, as (major, minor)."""

    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class TorchFacts:
    """What torch says of itself. `cuda_build` is the CUDA version it was built for, None for a CPU build."""

    version: str
    cuda_build: str | None
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process was given.

    Attributes:
        root: where /proc, /sys and /dev are looked up.
        python: version of the interpreter.
        system: the kernel's name, and its release.
        cores: that this process may be scheduled on.
        open_files: soft and hard limit of open files; None is no limit.
        locked_bytes: soft limit of locked memory; None is no limit.
        torch: None when it cannot be imported; then `torch_error` says why.
    """

    root: Path
    python: tuple[int, int, int]
    system: str
    release: str
    cores: int
    open_files: tuple[int | None, int | None]
    locked_bytes: int | None
    torch: TorchFacts | None
    torch_error: str = ""

    @property
    def shm(self) -> Path:
        return self.root / "dev" / "shm"

    @property
    def has_gpu(self) -> bool:
        """Whether torch can use one."""
        return self.torch is not None and bool(self.torch.gpus)

    def text(self, path: str) -> str | None:
        """A small file below `root`, stripped; None when it cannot be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def kib_field(self, path: str, field: str) -> int | None:
        """The bytes of a line `Field:   123 kB` in a file of /proc."""
        for line in (self.text(path) or "").splitlines():
            name, _, rest = line.partition(":")
            if name == field and rest.split()[1:] == ["kB"]:
                return int(rest.split()[0]) * 1024
        return None


def this_machine() -> Machine:
    """Imports torch, which takes seconds."""
    facts, error = _torch_facts()
    return Machine(
        root=Path("/"),
        python=sys.version_info[:3],
        system=platform.system(),
        release=platform.release(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        open_files=(_limit(resource.RLIMIT_NOFILE, 0), _limit(resource.RLIMIT_NOFILE, 1)),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK, 0),
        torch=facts,
        torch_error=error,
    )


def _limit(kind: int, which: int) -> int | None:
    value = resource.getrlimit(kind)[which]
    return None if value == resource.RLIM_INFINITY else value


def _torch_facts() -> tuple[TorchFacts | None, str]:
    try:
        import torch
    except Exception as error:  # a missing library of CUDA is an OSError, a broken installation anything
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(torch.cuda.get_device_name(index), total, free, torch.cuda.get_device_capability(index)))
    return TorchFacts(torch.__version__, torch.version.cuda, tuple(gpus)), ""
