"""What the control groups leave this process, in version 1 or 2: a container's limits, which the kernel's own counts of
cores and memory do not show.

Limits hold for a group and for all above it, so the least on the way up counts. Inside a container the path in
/proc/self/cgroup is often the host's and not mounted: then the mount's root is the container's own group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from triptych.cli.checks.machine import Machine

_MOUNT = "sys/fs/cgroup"
# Version 1 says "no limit" with the largest number of whole pages.
_UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """`used_bytes` leaves out the file cache that the kernel drops before anyone is killed."""

    limit_bytes: int
    used_bytes: int

    @property
    def free_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)


def cpu_quota(machine: Machine) -> float | None:
    """Cores' worth of time that may be used; None without a limit."""
    quotas = [_ratio(words) for group in _groups(machine, None) if (words := _words(machine, f"{group}/cpu.max"))]
    for group in _groups(machine, "cpu"):
        quota, period = (_number(machine, f"{group}/cpu.cfs_{name}_us") for name in ("quota", "period"))
        quotas.append(quota / period if quota and quota > 0 and period else None)
    return min((quota for quota in quotas if quota is not None), default=None)


def memory_limit(machine: Machine) -> MemoryLimit | None:
    """The limit that leaves the least; None without one."""
    found = [
        _memory(machine, group, "memory.max", "memory.current", "inactive_file") for group in _groups(machine, None)
    ]
    found += [
        _memory(machine, group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        for group in _groups(machine, "memory")
    ]
    return min((limit for limit in found if limit is not None), key=lambda limit: limit.free_bytes, default=None)


def _memory(machine: Machine, group: str, limit_file: str, used_file: str, dropped: str) -> MemoryLimit | None:
    limit = _number(machine, f"{group}/{limit_file}")
    if limit is None or limit >= _UNLIMITED_BYTES:
        return None
    statistics = dict(line.split(maxsplit=1) for line in (machine.text(f"{group}/memory.stat") or "").splitlines())
    used = (_number(machine, f"{group}/{used_file}") or 0) - int(statistics.get(dropped, 0))
    return MemoryLimit(limit, max(0, used))


def _groups(machine: Machine, controller: str | None) -> Iterator[str]:
    """Folders of this process's group and those above it: of version 2 without a controller, else of version 1."""
    for line in (machine.text("proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",") if controllers else []
        if controller is None and not names:
            yield from _upward(_MOUNT, path)
            yield from _upward(f"{_MOUNT}/unified", path)
        elif controller in names:
            yield from _upward(f"{_MOUNT}/{controllers}", path)
            if len(names) > 1:
                yield from _upward(f"{_MOUNT}/{controller}", path)


def _upward(mount: str, path: str) -> Iterator[str]:
    for part in (PurePosixPath(path), *PurePosixPath(path).parents):
        yield f"{mount}/{part}".replace("//", "/").rstrip("/")


def _words(machine: Machine, path: str) -> list[str]:
    return (machine.text(path) or "").split()


def _ratio(words: list[str]) -> float | None:
    """`QUOTA PERIOD`, or `max PERIOD`."""
    return int(words[0]) / int(words[1]) if words[0] != "max" else None


def _number(machine: Machine, path: str) -> int | None:
    text = machine.text(path)
    return int(text) if text and text.lstrip("-").isdigit() else None
