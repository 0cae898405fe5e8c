"""The router as a process: how it starts, when it says that it is ready, how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import httpx

from tests.unit.demo_dir import demo_model_dir
from triptych.core.ids import new_epoch
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.registry.runtime import RuntimeFolder
from triptych.registry.static import StaticRegistry
from triptych.rpc.server import RpcServer, add_describe

T = TypeVar("T")
ROOT = Path(__file__).parents[2]


class Router:
    def __init__(self, folder: Path, *flags: str, environ: Mapping[str, str] | None = None) -> None:
        self.runtime = folder / "run"
        self.ready_file = folder / "ready.json"
        self.log = folder / "log"
        command = [sys.executable, "-m", "services.router", "--model", str(demo_model_dir())]
        command += ["--runtime-dir", str(self.runtime), "--ready-file", str(self.ready_file), *flags]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=os.environ | dict(environ or {})
            )

    def url(self) -> str:
        lines = until(lambda: [line for line in self.log.read_text().splitlines() if "the API listens" in line])
        return lines[0].rpartition("url=")[2]

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(15)


def until(found: Callable[[], T], seconds: float = 30.0) -> T:
    deadline = time.monotonic() + seconds
    while not (answer := found()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return answer


@contextmanager
def listening(info: WorkerInfo, folder: RuntimeFolder) -> Iterator[WorkerInfo]:
    """A worker that says who it is, and nothing else; on a loop and a thread of its own."""

    async def serve() -> None:
        server = RpcServer("127.0.0.1", 0, token=folder.token())
        add_describe(server, lambda: info)
        address.set_result(f"127.0.0.1:{await server.start()}")
        while not stop.is_set():  # noqa: ASYNC110 - it is told by another thread
            await asyncio.sleep(0.05)
        await server.stop(0)

    address, stop = Future[str](), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield replace(info, grpc_address=address.result(10))
    finally:
        stop.set()
        thread.join()


def status(url: str) -> int:
    return httpx.get(f"{url}/ready", timeout=5).status_code


def test_ready_when_every_stage_is_and_quiet_at_the_end(tmp_path: Path) -> None:
    router = Router(tmp_path, "--port", "0")
    try:
        url = router.url()
        assert httpx.get(f"{url}/health", timeout=5).json() == {"status": "ok"}
        missing = httpx.get(f"{url}/ready", timeout=5)
        assert (missing.status_code, missing.json()["missing"]) == (503, ["encoder", "prefill", "decode"])
        assert not router.ready_file.exists()

        folder = RuntimeFolder(router.runtime)
        registry = StaticRegistry(folder)
        with listening(WorkerInfo("mono-0", new_epoch(), frozenset(Role), WorkerState.READY, ""), folder) as worker:
            registry.announce(replace(worker, epoch=new_epoch(), grpc_address="127.0.0.1:1"))
            until(lambda: "a worker gets no requests: no connection to it can be made" in router.log.read_text())
            assert status(url) == 503 and not router.ready_file.exists()
            registry.withdraw()
            registry.announce(worker)
            until(router.ready_file.exists)
            assert json.loads(router.ready_file.read_text()) == {"url": url}
            assert status(url) == 200
            registry.withdraw()
            until(lambda: status(url) == 503)
    finally:
        assert router.stop() == 0
    assert "Traceback" not in router.log.read_text()


def test_an_interrupt_ends_it_too(tmp_path: Path) -> None:
    router = Router(tmp_path, "--port", "0")
    router.url()
    assert router.stop(signal.SIGINT) == 0


def test_a_start_that_cannot_work_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        router = Router(tmp_path, "--port", port)
        assert router.process.wait(30) == 1
    (line,) = [text for text in router.log.read_text().splitlines() if text.startswith("error:")]
    assert port in line
    assert "--port" in line
    assert "Traceback" not in router.log.read_text()


def test_it_loads_no_torch() -> None:
    """The router starts in a second or two, on a machine without an accelerator's software."""
    code = "import sys, services.router.__main__; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.strip() == "[]"
