"""A router of several processes: it serves, counts and ends as one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx

from tests.integration.test_router_process import Router, listening, until
from triptych.core.ids import new_epoch
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.registry.runtime import RuntimeFolder
from triptych.registry.static import StaticRegistry

ALL_STAGES = WorkerInfo("mono-0", new_epoch(), frozenset(Role), WorkerState.READY, "")


@contextlib.contextmanager
def running(folder: Path, *flags: str) -> Iterator[tuple[Router, str]]:
    router = Router(folder, "--port", "0", "--workers", "2", *flags)
    try:
        url = router.url()
        until(lambda: router.log.read_text().count("the API listens") == 2)
        yield router, url
    finally:
        router.process.kill()
        router.process.wait()


def processes(router: Router) -> list[int]:
    """Of the supervisor's, that live."""
    children = Path(f"/proc/{router.process.pid}/task/{router.process.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


def count(text: str, name: str, **labels: str) -> float:
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    return sum(float(line.rpartition(" ")[2]) for line in lines if wanted <= set(re.findall(r'\w+="[^"]*"', line)))


def refused(url: str) -> int:
    """A request on a connection of its own, which comes to its end at the router."""
    return httpx.post(f"{url}/v1/chat/completions", json={"messages": []}, timeout=10).status_code


def test_they_count_together_and_end_together(tmp_path: Path) -> None:
    with running(tmp_path) as (router, url):
        pids = processes(router)
        assert len(pids) == 2
        assert [refused(url) for _ in range(30)] == [400] * 30
        for _ in range(6):  # whichever of them is asked
            text = httpx.get(f"{url}/metrics", timeout=10).text
            name = "triptych_requests_total"
            assert count(text, name, endpoint="/v1/chat/completions", status="400") == 30
            assert count(text, "triptych_router_inflight_requests") == 0
            assert "pid=" not in text, "each gauge says how it adds up"
        assert router.stop() == 0
        assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        assert "Traceback" not in router.log.read_text()


def test_one_frozen_leaves_the_other_to_serve(tmp_path: Path) -> None:
    with running(tmp_path) as (router, url):
        frozen, _ = processes(router)
        os.kill(frozen, signal.SIGSTOP)
        assert [refused(url) for _ in range(10)] == [400] * 10
        os.kill(frozen, signal.SIGCONT)


def test_one_that_is_killed_is_started_again(tmp_path: Path) -> None:
    with running(tmp_path) as (router, url):
        killed, other = processes(router)
        refused(url)
        os.kill(killed, signal.SIGKILL)
        until(lambda: len(set(processes(router)) - {killed, other}) == 1)
        until(lambda: router.log.read_text().count("the API listens") == 3)
        assert [refused(url) for _ in range(10)] == [400] * 10
        text = httpx.get(f"{url}/metrics", timeout=10).text
        assert count(text, "triptych_requests_total", endpoint="/v1/chat/completions") == 11, "what it counted stays"
        assert router.stop() == 0


def test_a_request_under_way_ends_before_they_do(tmp_path: Path) -> None:
    with running(tmp_path) as (router, url):
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 15\r\n\r\n"
            connection.sendall(head.encode() + b'{"messages"')
            inflight = "triptych_router_inflight_requests"
            until(lambda: count(httpx.get(f"{url}/metrics", timeout=10).text, inflight) == 1)
            router.process.send_signal(signal.SIGTERM)
            until(lambda: len(processes(router)) < 2)
            connection.sendall(b":[]}")
            assert b" 400 " in connection.recv(1000).split(b"\r\n")[0]
        assert router.process.wait(15) == 0


def test_they_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    with running(tmp_path) as (router, _):
        pids = processes(router)
        router.process.kill()
        router.process.wait()
        until(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()])


def test_a_start_that_cannot_work_ends_all(tmp_path: Path) -> None:
    router = Router(tmp_path, "--port", "0", "--workers", "2", "--fetch-only", "not a place!")
    try:
        assert router.process.wait(50) == 1
    finally:
        router.process.kill()
        router.process.wait()
    assert Counter("Traceback" in line for line in router.log.read_text().splitlines())[True] == 0


def test_ready_when_all_of_them_are(tmp_path: Path) -> None:
    with running(tmp_path) as (router, url):
        folder = RuntimeFolder(router.runtime)
        registry = StaticRegistry(folder)
        assert not router.ready_file.exists()
        with listening(ALL_STAGES, folder) as worker:
            registry.announce(replace(worker))
            until(router.ready_file.exists)
            assert url in router.ready_file.read_text()
            assert [httpx.get(f"{url}/ready", timeout=5).status_code for _ in range(6)] == [200] * 6
            registry.withdraw()
        assert router.stop() == 0
