"""All processes of a run: the router, timed fakes behind it, the load, and the bare application to compare with."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.router.client import Job
from benchmarks.router.fakes import Spec
from benchmarks.router.processes import Process, StartFailed, cpu_s
from benchmarks.router.timing import Pace
from triptych.model.checkpoint_files import optional_json
from triptych.registry.runtime import RuntimeFolder
from triptych.text.model_files import read_tokenizer

START_SECONDS = 60.0
WORKERS: Mapping[str, Sequence[str]] = {
    f"{role}-{number}": [role] for role in ("encoder", "prefill", "decode") for number in range(2)
}
_ANSWER = (
    "Keep the warehouse for now and mend its roof, because boats need it in winter, and find out first what a hall"
    " would cost to heat and who would use it once the summer guests have gone home again. "
)


@dataclass(frozen=True, slots=True)
class Router:
    """A router and its fakes. `calls`: the way by which it calls them."""

    process: Process
    fakes: Process
    url: str
    model: str
    addresses: Mapping[str, str]
    token: str | None
    calls: str

    def cpu_s(self) -> float:
        return sum(cpu_s(pid) for pid in (self.process.pid, *_children(self.process.pid)))

    def num_encoded(self) -> int:
        count: int = self.fakes.ask({})["num_encoded"]
        return count


@contextmanager
def running_router(
    folder: Path,
    model: Path,
    pace: Pace,
    workers: Mapping[str, Sequence[str]] = WORKERS,
    flags: Sequence[str] = (),
    *,
    is_elsewhere: bool = False,
) -> Iterator[Router]:
    """`python -m services.router` once all stages can serve. Raises StartFailed."""
    folder.mkdir()
    runtime = folder / "run"
    spec = Spec(str(runtime), workers, asdict(pace), _answer_ids(model), is_elsewhere)
    (folder / "fakes.json").write_text(json.dumps(asdict(spec)))
    with ExitStack() as stack:
        fakes, said = Process.speaking(folder / "fakes.log", "benchmarks.router.fakes", str(folder / "fakes.json"))
        stack.callback(fakes.stop)
        ready_file = folder / "ready.json"
        command = [sys.executable, "-P", "-m", "services.router", "--model", str(model), "--port", "0"]
        command += ["--runtime-dir", str(runtime), "--ready-file", str(ready_file), "--log-level", "warning", *flags]
        process = Process(command, folder / "router.log")
        stack.callback(process.stop)
        url = _ready(process, ready_file)["url"]
        yield Router(process, fakes, url, model.name, said["workers"], RuntimeFolder(runtime).token(), said["calls"])


def _ready(process: Process, file: Path) -> dict[str, Any]:
    give_up_s = time.monotonic() + START_SECONDS
    while not file.exists():
        if process.has_ended or time.monotonic() > give_up_s:
            raise StartFailed(f"the router was not ready: {process.tail()}")
        time.sleep(0.05)
    said: dict[str, Any] = json.loads(file.read_text())
    return said


def _answer_ids(model: Path) -> list[int]:
    """Ordinary words, so that each token shows a text."""
    ids = list(read_tokenizer(model / "tokenizer.json").encode(_ANSWER, add_special_tokens=False).ids)
    assert not set(ids) & _end_ids(model)
    return ids


def _end_ids(model: Path) -> set[int]:
    found = optional_json(model / "generation_config.json").get("eos_token_id")
    return {found} if isinstance(found, int) else set(found or ())


def _children(pid: int) -> list[int]:
    """Of all its threads; none for a process that has ended."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in file.read_text().split():
            found += [int(child), *_children(int(child))]
    return found


@contextmanager
def running_echo(folder: Path) -> Iterator[tuple[Process, str]]:
    """The bare application and its address."""
    process, said = Process.speaking(folder / "echo.log", "benchmarks.router.echo")
    try:
        yield process, said["url"]
    finally:
        process.stop()


@contextmanager
def running_client(folder: Path) -> Iterator[Client]:
    process, _ = Process.speaking(folder / "client.log", "benchmarks.router.client")
    try:
        yield Client(process)
    finally:
        process.stop()


class LoadFailed(RuntimeError):
    """Requests were not answered as they should be."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What came of a job: seconds of each request to its first byte and to its end, and reads of the client's."""

    wall_s: float
    cpu_s: float
    first_s: Sequence[float]
    total_s: Sequence[float]
    num_reads: int

    @property
    def num_requests(self) -> int:
        return len(self.total_s)


class Client:
    """The load's process. No two requests of a run have the same number."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._next_number = 1

    def load(self, job: Job) -> Loaded:
        """Raises LoadFailed when a single request failed."""
        said = self._process.ask({**asdict(job), "first_number": self._next_number})
        self._next_number += len(said["total_s"]) + said["num_errors"]
        if said["num_errors"] or not said["total_s"]:
            raise LoadFailed(f"{said['num_errors']} requests of {job.kind} failed: {'; '.join(said['errors'])}")
        return Loaded(said["wall_s"], said["cpu_s"], said["first_s"], said["total_s"], said["reads"])
