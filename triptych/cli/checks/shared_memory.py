"""/dev/shm: whether what the topology shares really fits, and what the dead left there."""

from __future__ import annotations

import os

from triptych.cli.checks.finding import MIB, Finding, counted, fail, ok, size, warn
from triptych.cli.checks.host import available_bytes
from triptych.cli.checks.machine import Machine
from triptych.core.errors import StartupError
from triptych.transport.shm import SharedSegment, find_dead_segments

_NAMED_LEFTOVERS = 3


def shared_memory(machine: Machine, needed_bytes: int) -> Finding:
    """Allocates all of `needed_bytes` for an instant, if there seems to be room: nothing else proves it."""
    try:
        room = os.statvfs(machine.shm)
    except OSError as error:
        return fail("shared memory", f"no /dev/shm ({error.strerror})", "mount a tmpfs at /dev/shm: " + _MOUNT)
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    found = f"/dev/shm is {size(total)} with {size(free)} free; this topology shares {size(needed_bytes)}"
    if free < needed_bytes:
        return fail("shared memory", found, _larger(total - free + needed_bytes))
    available = available_bytes(machine)
    if available is not None and available < needed_bytes:
        todo = "raise the memory limit, or set kv_pool_bytes or landing_bytes lower: shared memory counts as memory"
        return fail("shared memory", f"{found}, but only {size(available)} of memory are available", todo)
    try:
        SharedSegment.create(max(1, needed_bytes), "doctor", directory=machine.shm).close()
    except StartupError as error:
        return fail("shared memory", error.message, _larger(total - free + needed_bytes))
    return ok("shared memory", f"{found}; allocated and given back")


def leftovers(machine: Machine) -> Finding:
    """By the sweep that `triptych up` begins with, without its hand."""
    names = find_dead_segments(directory=machine.shm)
    if not names:
        return ok("leftovers", "none in /dev/shm")
    held = sum(_size_of(machine, name) for name in names)
    shown = ", ".join(names[:_NAMED_LEFTOVERS]) + (", ..." if len(names) > _NAMED_LEFTOVERS else "")
    todo = f"nothing (the next triptych up removes them), or: rm {' '.join(f'/dev/shm/{name}' for name in names)}"
    return warn("leftovers", f"{counted(len(names), 'segment')} of dead workers, {size(held)}: {shown}", todo)


_MOUNT = "docker run --shm-size, or in Kubernetes an emptyDir of medium Memory with a sizeLimit"


def _larger(num_bytes: int) -> str:
    """What to say when at least `num_bytes` are needed in all."""
    mib = -(-num_bytes // MIB)
    return (
        f"make it at least {mib} MiB (docker run --shm-size={mib}m; Kubernetes: an emptyDir of medium Memory with a "
        f"sizeLimit; else: mount -o remount,size={mib}m /dev/shm), or set kv_pool_bytes or landing_bytes lower"
    )


def _size_of(machine: Machine, name: str) -> int:
    try:
        return (machine.shm / name).stat().st_blocks * 512
    except OSError:
        return 0
