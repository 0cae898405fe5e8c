"""Which workers a router sends requests to: those that it can talk to, and that answer."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from services.router import reach
from services.router.reach import ReachableWorkers
from tests.certificates import Authority
from tests.unit.link_house import eventually
from triptych.core.ids import new_epoch
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.registry.records import from_json, to_json
from triptych.registry.runtime import RuntimeFolder
from triptych.registry.static import StaticRegistry
from triptych.rpc.client import ChannelPool
from triptych.rpc.server import RpcServer, add_describe
from triptych.rpc.tls import ClusterTls, load_tls

TOKEN = "a-token-for-tests"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "GREET_AGAIN_S", 0.05)


@pytest.fixture
def tls(tmp_path: Path) -> ClusterTls:
    made = load_tls(Authority(tmp_path).issue())
    assert made is not None
    return made


@pytest.fixture
def registry(tmp_path: Path) -> StaticRegistry:
    return StaticRegistry(RuntimeFolder(tmp_path / "run"))


@asynccontextmanager
async def serving(tls: ClusterTls | None, token: str = TOKEN, says: str | None = None) -> AsyncIterator[WorkerInfo]:
    """A worker; `says`: under another name than its record has."""
    server = RpcServer("127.0.0.1", 0, token=token, tls=tls)
    info = WorkerInfo("decode-0", new_epoch(), frozenset({Role.DECODE}), WorkerState.READY, "127.0.0.1:1")
    info = replace(info, speaks_tls=tls is not None)
    add_describe(server, lambda: replace(info, worker_id=says or info.worker_id))
    info = replace(info, grpc_address=f"127.0.0.1:{await server.start()}")
    try:
        yield info
    finally:
        await server.stop(0)


@asynccontextmanager
async def routing(registry: StaticRegistry, tls: ClusterTls | None) -> AsyncIterator[ReachableWorkers]:
    channels = ChannelPool(TOKEN, tls)
    reachable = ReachableWorkers(registry, channels, tls)
    tasks = [asyncio.create_task(each) for each in (registry.run(), reachable.run(registry))]
    try:
        yield reachable
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await channels.close()


@pytest.mark.parametrize("has_tls", [True, False])
async def test_a_worker_that_answers_gets_requests_until_it_leaves_or_is_born_again(
    has_tls: bool, tls: ClusterTls, registry: StaticRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    mine = tls if has_tls else None
    async with routing(registry, mine) as reachable, serving(mine) as first, serving(mine) as second:
        assert reachable.workers() == ()
        for info in (first, second):
            changed = asyncio.create_task(reachable.changed())
            registry.announce(info)
            await asyncio.wait_for(changed, 10)
            assert reachable.workers() == reachable.refresh() == (info,)
        registry.withdraw()
        assert reachable.refresh() == ()
        await eventually(lambda: not reachable._answered)
    assert "gets no requests" not in caplog.text


@pytest.mark.parametrize("what", ["plain", "tls", "another authority", "another token", "somebody else", "nobody"])
async def test_one_that_cannot_be_talked_to_is_named_once_and_gets_none(
    what: str, tls: ClusterTls, registry: StaticRegistry, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = load_tls(Authority(tmp_path, "other").issue("stranger"))
    mine = None if what == "tls" else tls
    theirs = {"plain": None, "another authority": other}.get(what, tls)
    token = "another-token" if what == "another token" else TOKEN
    async with routing(registry, mine) as reachable:
        async with serving(theirs, token, "decode-7" if what == "somebody else" else None) as info:
            if what == "nobody":
                info = replace(info, grpc_address="127.0.0.1:1")
            registry.announce(info)
            await eventually(lambda: "gets no requests" in caplog.text)
            await asyncio.sleep(0.3)
            assert reachable.workers() == ()
        (said,) = [record.getMessage() for record in caplog.records if "gets no requests" in record.getMessage()]
        hint = {
            "plain": "restart it with --tls-cert",
            "tls": "give the router --tls-cert",
            "another authority": "is its certificate of the same authority",
            "another token": "the same token",
            "somebody else": "another process answers",
            "nobody": "is its certificate of the same authority",
        }
        assert hint[what] in said and "127.0.0.1" not in said
        registry.withdraw()


async def test_one_that_answers_late_gets_them_then(
    tls: ClusterTls, registry: StaticRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    """As when the network between the two comes back."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    info = WorkerInfo("decode-0", 5, frozenset({Role.DECODE}), WorkerState.READY, f"127.0.0.1:{port}", speaks_tls=True)
    async with routing(registry, tls) as reachable:
        registry.announce(info)
        await eventually(lambda: "gets no requests" in caplog.text)
        server = RpcServer("127.0.0.1", port, token=TOKEN, tls=tls)
        add_describe(server, lambda: info)
        await server.start()
        await eventually(lambda: reachable.workers() == (info,))
        registry.withdraw()
        await server.stop(0)


def test_a_record_says_whether_it_speaks_tls() -> None:
    info = WorkerInfo("decode-0", 1, frozenset({Role.DECODE}), WorkerState.READY, "127.0.0.1:1")
    for record in (info, replace(info, speaks_tls=True)):
        assert from_json(to_json(record)) == record
