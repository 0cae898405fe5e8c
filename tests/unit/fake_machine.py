"""Machines that tests make up: a folder for `/`, and what the kernel would say."""

from __future__ import annotations

from pathlib import Path

from triptych.cli.checks.machine import Machine, TorchFacts

GIB = 2**30
MEMINFO = "MemTotal:       {total} kB\nMemFree:  1 kB\nMemAvailable:   {available} kB\n"


def machine_at(root: Path, files: dict[str, str] | None = None, *, memory_gib: float = 64.0) -> Machine:
    """Eight cores, `memory_gib` of memory all available, no GPU, and the given files."""
    kib = int(memory_gib * 2**20)
    standard = {
        "proc/meminfo": MEMINFO.format(total=kib, available=kib),
        "proc/self/status": "Name:\tpython\nRssAnon:\t  262144 kB\n",
    }
    for name, text in {**standard, **(files or {})}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "dev" / "shm").mkdir(parents=True, exist_ok=True)
    return Machine(
        root=root,
        python=(3, 11, 7),
        system="Linux",
        release="6.1",
        cores=8,
        open_files=(1024, 4096),
        locked_bytes=None,
        torch=TorchFacts("2.13.0+cpu", None, ()),
    )
