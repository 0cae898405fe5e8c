"""Which transports a worker offers, and where it takes data frames."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from triptych.core.errors import StartupError
from triptych.obs import metrics
from triptych.stages.data_port import open_data_port
from triptych.stages.settings import LanguageSettings, VisionSettings, WorkerSettings
from triptych.stages.worker import WorkerPlan


@pytest.fixture
def runtime() -> Iterator[Path]:
    """Short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="triptych-test-") as name:
        yield Path(name) / "run"


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as opened:
        yield opened


def worker(runtime: Path, transport: str = "auto", *, strict: bool = False) -> WorkerSettings:
    return WorkerSettings(
        model=Path("/m"), worker_id="decode-0", runtime_dir=runtime, transport=transport, strict=strict
    )


@pytest.mark.parametrize(
    ("transport", "offered", "listens"),
    [
        ("auto", ("inproc", "cuda_ipc", "shm", "zmq-ipc", "zmq-tcp"), True),
        ("cuda_ipc", ("inproc", "cuda_ipc"), False),
        ("shm", ("inproc", "shm"), False),
        ("auto+nixl", ("inproc", "cuda_ipc", "shm", "nixl", "zmq-ipc", "zmq-tcp"), True),
        ("nixl", ("inproc", "nixl"), False),
        ("zmq", ("inproc", "zmq-ipc", "zmq-tcp"), True),
        ("zmq-ipc", ("inproc", "zmq-ipc"), True),
        ("zmq-tcp", ("inproc", "zmq-tcp"), True),
    ],
)
async def test_a_worker_offers_what_its_setting_allows(
    runtime: Path, stack: AsyncExitStack, transport: str, offered: tuple[str, ...], listens: bool
) -> None:
    transports, port = await open_data_port(worker(runtime, transport), stack)
    assert transports == offered and (port is not None) == listens
    if port is not None:
        assert (port.address.port > 0) == ("zmq-tcp" in offered)
        assert bool(os.listdir(runtime / "sockets")) == bool(port.address.socket_path) == ("zmq-ipc" in offered)


def test_who_receives_nothing_from_others_needs_no_port(runtime: Path) -> None:
    common, vision, language = worker(runtime), VisionSettings(), LanguageSettings()
    landing = {
        "encoder": WorkerPlan(common, vision=vision),
        "prefill": WorkerPlan(common, prefill=language),
        "decode": WorkerPlan(common, decode=language),
        "ep": WorkerPlan(common, vision=vision, prefill=language),
        "pd": WorkerPlan(common, prefill=language, decode=language),
        "mono": WorkerPlan(common, vision=vision, prefill=language, decode=language),
    }
    who = {name for name, plan in landing.items() if plan.lands_embeddings_of_others or plan.lands_kv_of_others}
    assert who == {"prefill", "decode", "pd"}


async def test_what_a_dead_predecessor_left_is_swept(runtime: Path, stack: AsyncExitStack) -> None:
    await open_data_port(worker(runtime), stack)
    stale = runtime / "sockets" / "decode-0.00000000.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(stale))
        left.listen()
    await open_data_port(worker(runtime), stack)
    assert stale.name not in os.listdir(runtime / "sockets")
    assert len(os.listdir(runtime / "sockets")) == 2


async def test_a_path_too_long_for_a_socket_leaves_tcp_and_is_counted(tmp_path: Path, stack: AsyncExitStack) -> None:
    deep = tmp_path / ("d" * 100)
    counter = metrics.FALLBACKS.labels("socket_path_too_long")
    before = counter._value.get()
    transports, port = await open_data_port(worker(deep), stack)
    assert transports == ("inproc", "cuda_ipc", "shm", "zmq-tcp") and port is not None and not port.address.socket_path
    assert counter._value.get() == before + 1
    for settings in (worker(deep, "zmq-ipc"), worker(deep, strict=True)):
        with pytest.raises(StartupError, match="shorter --runtime-dir"):
            await open_data_port(settings, stack)
    await open_data_port(worker(deep, "zmq-tcp", strict=True), stack)
