"""SIGTERM while requests are under way: of the router alone, and of `triptych up`."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.launching import launched, living
from tests.integration.test_router_process import Router, until
from tests.unit.demo_dir import demo_model_dir


def test_a_router_that_is_told_to_stop_ends_what_it_has_begun(tmp_path: Path) -> None:
    router = Router(tmp_path, "--port", "0")
    try:
        url = router.url()
        host, _, port = url.removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as slow:
            slow.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{")
            time.sleep(0.3)
            router.process.send_signal(signal.SIGTERM)
            until(lambda: httpx.get(f"{url}/health/ready", timeout=5).json()["status"] == "stopping")
            late = httpx.post(f"{url}/v1/chat/completions", json={}, timeout=5)
            assert late.status_code == 503
            slow.sendall(b"}")
            assert slow.recv(4096).startswith(b"HTTP/1.1 400"), "its own answer, and no other"
        assert router.process.wait(10) == 0
    finally:
        router.process.kill()
    assert "Traceback" not in router.log.read_text()


def test_requests_that_do_not_end_are_cut_off_in_time(tmp_path: Path) -> None:
    router = Router(tmp_path, "--port", "0", "--drain-timeout-s", "0.5")
    try:
        host, _, port = router.url().removeprefix("http://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as slow:
            slow.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{")
            time.sleep(0.3)
            began = time.monotonic()
            router.process.send_signal(signal.SIGTERM)
            assert router.process.wait(20) == 0
            assert time.monotonic() - began < 15
    finally:
        router.process.kill()
    assert "cut off" in router.log.read_text()


@pytest.mark.cluster
@pytest.mark.timeout(180)
def test_answers_under_way_are_complete_when_the_launcher_is_told_to_stop(tmp_path: Path) -> None:
    with launched(tmp_path, "--model", str(demo_model_dir()), "--topology", "mono") as launcher:
        ready = launcher.wait_ready(120)
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 150, "ignore_eos": True, "seed": 1}
        whole = httpx.post(f"{ready['url']}/v1/chat/completions", json=body, timeout=60).json()
        texts: list[str] = []
        begun = threading.Event()

        def read() -> None:
            with httpx.stream("POST", f"{ready['url']}/v1/chat/completions", json=body | {"stream": True}) as answer:
                for event in events(answer.iter_lines()):
                    texts.append(event)
                    begun.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(30)
        status, output = launcher.signal_and_wait(signal.SIGTERM)
        reader.join(20)
    assert status == 0, output
    assert texts[-1] == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in texts[:-1]]
    assert "".join(deltas) == whole["choices"][0]["message"]["content"]
    assert living(ready["pids"]) == {}


def events(lines: Iterator[str]) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in lines if line)
