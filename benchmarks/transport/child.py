"""The other process of a measurement, as this one sees it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.transport.peer import WORD

ROOT = Path(__file__).resolve().parents[2]
STOP_SECONDS = 5.0
TAIL_CHARS = 300


class Absent(Exception):
    """An arm that cannot be measured here; the message says why."""


class Child:
    """Owner of one process; `stop` ends it. `where` is what it said of itself."""

    def __init__(self, process: asyncio.subprocess.Process, where: dict[str, Any]) -> None:
        self.where = where
        self._process = process

    @classmethod
    async def start(cls, kind: str, folder: Path, room_bytes: int, timeout_s: float) -> Child:
        """Raises Absent."""
        log = folder / f"{kind}.log"
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "benchmarks.transport.peer", kind, str(folder), str(room_bytes)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                cwd=ROOT,
                start_new_session=True,  # signals to the group pass it by: it ends with its input
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *_python_path()])},
            )
        try:
            async with asyncio.timeout(timeout_s):
                where = await _said(process)
        except (TimeoutError, EOFError, OSError) as error:
            await _stop(process)
            raise Absent(f"its receiver did not start ({type(error).__name__}): {_tail(log)}") from None
        if "absent" in where:
            await _stop(process)
            raise Absent(where["absent"])
        return cls(process, where)

    async def stop(self) -> None:
        await _stop(self._process)


def _python_path() -> list[str]:
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


async def _said(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    while line := await process.stdout.readline():
        if line.startswith(WORD.encode()):
            where: dict[str, Any] = json.loads(line[len(WORD) :])
            return where
    raise EOFError


async def _stop(process: asyncio.subprocess.Process) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        async with asyncio.timeout(STOP_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace")[-TAIL_CHARS:].splitlines()
    return " / ".join(line.strip() for line in lines if line.strip()) or "it said nothing"
