"""Interpreter, system, cores, memory, limits, clock."""

from __future__ import annotations

import time

from triptych.cli.checks.cgroup import cpu_quota, memory_limit
from triptych.cli.checks.finding import Finding, counted, fail, ok, size, warn
from triptych.cli.checks.machine import Machine

OLDEST_PYTHON = (3, 11)
FEWEST_OPEN_FILES = 1024


def python(machine: Machine) -> Finding:
    version = ".".join(map(str, machine.python))
    if machine.python < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        return fail("python", version, f"install Python {wanted} or later and make the environment with it")
    return ok("python", version)


def system(machine: Machine) -> Finding:
    if machine.system != "Linux":
        todo = "run it on Linux, or in a Linux container: workers share memory and locks in its ways"
        return fail("system", machine.system, todo)
    return ok("system", f"{machine.system} {machine.release}")


def cores(machine: Machine, num_workers: int, threads: int) -> Finding:
    """`threads`: of each worker, as the launcher would set them."""
    quota = cpu_quota(machine)
    usable = machine.cores if quota is None else min(machine.cores, quota)
    found = counted(machine.cores, "core") + (
        f", of which a quota leaves {quota:.3g}" if usable < machine.cores else ""
    )
    found += f"; {counted(num_workers, 'worker')} of {counted(threads, 'thread')}"
    fair = max(1, int(usable) // num_workers)
    if threads > fair and num_workers * threads > usable:
        return warn("cores", found, f"give triptych up --threads {fair}: threads that wait for a core slow each other")
    return ok("cores", found)


def bfloat16(machine: Machine, dtypes: set[str]) -> Finding:
    """`dtypes`: that workers on the CPU compute in."""
    native = _has_bfloat16(machine)
    found = (
        f"the CPU {'computes' if native else 'does not compute'} bfloat16 natively; used: {', '.join(sorted(dtypes))}"
    )
    if "bfloat16" in dtypes and not native:
        return warn(
            "bfloat16", found, "set dtype to float32 (or auto) where the memory allows: here bfloat16 is slower"
        )
    return ok("bfloat16", found)


def memory(machine: Machine) -> Finding:
    available = available_bytes(machine)
    total = machine.kib_field("proc/meminfo", "MemTotal")
    if available is None or total is None:
        return warn("memory", "the kernel does not say how much there is", "mount /proc, so that it can be told")
    found = f"{size(available)} available of {size(total)}"
    limit = memory_limit(machine)
    if limit is not None and limit.limit_bytes < total:
        found += f"; this control group may use {size(limit.limit_bytes)}, {size(limit.free_bytes)} more than now"
    return ok("memory", found)


def available_bytes(machine: Machine) -> int | None:
    """What processes started now could get before someone is killed; None when the kernel does not say."""
    available = machine.kib_field("proc/meminfo", "MemAvailable")
    limit = memory_limit(machine)
    known = [value for value in (available, limit.free_bytes if limit else None) if value is not None]
    return min(known, default=None)


def open_files(machine: Machine) -> Finding:
    soft, hard = machine.open_files
    if soft is not None and soft < FEWEST_OPEN_FILES:
        can = hard is None or hard >= FEWEST_OPEN_FILES
        todo = f"run `ulimit -n {FEWEST_OPEN_FILES}` before triptych up"
        return warn("open files", f"at most {soft}", todo if can else f"{todo}; root must raise the hard limit {hard}")
    return ok("open files", f"at most {'any number' if soft is None else soft}")


def locked_memory(machine: Machine) -> Finding:
    """For information: nothing here needs it on a CPU."""
    limit = "unlimited" if machine.locked_bytes is None else size(machine.locked_bytes)
    return ok("locked memory", f"{limit} (matters only for transports that pin memory)")


def clock(machine: Machine) -> Finding:
    """Deadlines and timelines of all processes of a host compare this clock's readings."""
    info = time.get_clock_info("monotonic")
    readings = [time.monotonic_ns() for _ in range(1000)]
    if not info.monotonic or readings != sorted(readings) or info.resolution > 1e-3:
        source = machine.text("sys/devices/system/clocksource/clocksource0/current_clocksource") or "unknown"
        found = f"resolution {info.resolution:g} s, source {source}, {'steady' if info.monotonic else 'not steady'}"
        return fail("clock", found, "choose another clock source of the kernel (clocksource=tsc), or another machine")
    return ok("clock", f"monotonic, resolution {info.resolution:g} s")


def _has_bfloat16(machine: Machine) -> bool:
    names = {"flags", "Features"}  # on x86 and on ARM
    lines = ((machine.text("proc/cpuinfo")) or "").splitlines()
    words = next(
        (rest.split() for name, _, rest in (line.partition(":") for line in lines) if name.strip() in names), []
    )
    return bool({"avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"} & set(words))
