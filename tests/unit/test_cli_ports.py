"""Ports that launchers hand out: never the same to two, and usable by the servers that they are for."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from threading import Barrier

import pytest

from services.router.listener import listen as router_listen
from triptych.cli import layout
from triptych.cli.ports import HeldPorts, TakePort, is_free
from triptych.cli.settings import UpSettings
from triptych.core.errors import StartupError
from triptych.obs.metrics import serve_metrics
from triptych.rpc.server import RpcServer

HOST = "127.0.0.1"


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """The first of encoders. This and all other standard ports are where nothing else on the machine has any, and below
    those that the kernel gives out by itself."""
    first = next(first for first in iter(lambda: random.randrange(10_000, 30_000), None) if is_free(HOST, first))
    standard = layout.FIRST_PORT
    moved = {role: port - standard["encoder"] + first for role, port in standard.items()}
    monkeypatch.setattr(layout, "FIRST_PORT", moved)
    monkeypatch.setattr(layout, "FIRST_METRICS_PORT", layout.FIRST_METRICS_PORT - standard["encoder"] + first)
    return first


@pytest.fixture
def ports() -> Iterator[HeldPorts]:
    with closing(HeldPorts()) as held:
        yield held


def _chosen(take_port: TakePort) -> list[int]:
    settings = UpSettings(topology="e-p-d+mono", encoders=3, monos=2)
    specs = layout.workers(settings, Path("/m"), Path("/r"), 8, take_port)
    wanted = ("--port", "--metrics-port")
    return [int(spec.flags[spec.flags.index(name) + 1]) for spec in specs for name in wanted]


def _choices(take_ports: list[TakePort]) -> list[list[int]]:
    """What launchers choose that all look at the same moment."""
    barrier = Barrier(len(take_ports))

    def choose(take_port: TakePort) -> list[int]:
        barrier.wait()
        return _chosen(take_port)

    with ThreadPoolExecutor(len(take_ports)) as pool:
        return list(pool.map(choose, take_ports))


def _given_twice(choices: list[list[int]]) -> set[int]:
    given = [port for chosen in choices for port in chosen if port]
    return {port for port in given if given.count(port) > 1}


@pytest.mark.usefixtures("port")
def test_launchers_that_look_at_the_same_moment_choose_other_ports() -> None:
    with ExitStack() as stack:
        launchers = [stack.enter_context(closing(HeldPorts())) for _ in range(4)]
        choices = _choices([launcher.take for launcher in launchers])
        assert _given_twice(choices) == set()
        assert any(any(chosen) for chosen in choices), "standard ports are given at all"


@pytest.mark.usefixtures("port")
def test_a_look_alone_would_choose_the_same() -> None:
    """What the names are for: without them the test above would find this."""
    assert _given_twice(_choices([is_free] * 4))


def test_a_port_is_one_launchers_until_it_gives_it_back_or_is_gone(ports: HeldPorts, port: int) -> None:
    assert ports.take(HOST, port)
    with _other_launcher(port) as (other, took):
        assert took == "False"
    ports.close()
    with _other_launcher(port) as (other, took):
        assert took == "True"
        assert not ports.take(HOST, port)
        other.kill()
        other.wait()
        assert ports.take(HOST, port)


@contextmanager
def _other_launcher(port: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Another process, and whether it got the port; it lives until the end."""
    code = "import sys; from triptych.cli.ports import HeldPorts; ports = HeldPorts()\n"
    code += f"print(ports.take({HOST!r}, {port}), flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        yield other, other.stdout.readline().strip()
        other.kill()


def test_no_launcher_gets_one_port_twice_nor_where_a_server_listens(ports: HeldPorts, port: int) -> None:
    assert ports.take(HOST, port)
    assert not ports.take(HOST, port)
    with socket.create_server((HOST, 0)) as server:
        assert not ports.take(HOST, server.getsockname()[1])
    assert not ports.take("192.0.2.1", port), "no address of this machine"
    assert ports.take("127.0.0.2", port), "another address"


def test_each_kind_of_server_can_listen_on_a_port_that_is_held_again_and_again(ports: HeldPorts) -> None:
    grpc, metrics, api = (ports.take_any(HOST) for _ in range(3))
    assert serve_metrics(HOST, metrics) == metrics
    for _ in range(2):  # a worker that died is started again
        asyncio.run(_listen(grpc, api))


async def _listen(grpc: int, api: int) -> None:
    server = RpcServer(HOST, grpc, token="t" * 32)
    assert await server.start() == grpc
    await server.stop(0.0)
    with router_listen(HOST, api) as listener:
        assert listener.getsockname()[1] == api


def test_a_port_that_is_held_is_no_free_one_for_anybody(ports: HeldPorts) -> None:
    """The kernel gives free ports out of a range of 28,000: were those held among them, one would be met."""
    held = {ports.take_any(HOST) for _ in range(60)}
    assert len(held) == 60
    assert not held & {_port_of_a_server() for _ in range(4_000)}


def _port_of_a_server() -> int:
    with socket.create_server((HOST, 0)) as server:
        return int(server.getsockname()[1])


def test_a_host_with_no_port_left_is_an_error(ports: HeldPorts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeldPorts, "take", lambda self, host, port: False)
    with pytest.raises(StartupError, match=r"no port of 127\.0\.0\.1 is free"):
        ports.take_any(HOST)


def test_an_api_port_among_the_workers_is_the_apis_alone(ports: HeldPorts, port: int) -> None:
    settings = UpSettings(port=port)
    assert layout.api_port(settings, ports) == port
    (encoder, *_) = layout.workers(settings, Path("/m"), Path("/r"), 8, ports.take)
    assert encoder.flags[encoder.flags.index("--port") + 1] == "0"
