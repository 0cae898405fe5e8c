"""The circuit to a peer: who may try when, in the circuit alone and on links to a process that is stopped."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from functools import partial
from pathlib import Path

import grpc
import pytest

from tests.unit import link_house
from tests.unit.link_house import EMBEDDING_LAYOUT, IDENTITY, KV_LAYOUT, SENDER, TOKEN
from tests.unit.test_transport_zmq_stopped import link_again, receiver_process, worst_lag_s
from triptych.core.errors import DeadlineExceeded, PeerLost
from triptych.core.grant import Grant
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import EmbeddingSource
from triptych.obs import metrics
from triptych.registry.runtime import RuntimeFolder
from triptych.registry.static import StaticRegistry
from triptych.rpc.client import ChannelPool, transfer_stub
from triptych.stages.links import tend_peers
from triptych.transport import receiver_link, zmq_carrier
from triptych.transport.circuit import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    PROBE_TIMEOUT_S,
    Circuit,
    Circuits,
    CircuitState,
)
from triptych.transport.layout import checksum64, host_id
from triptych.transport.link_pool import LinkPool
from triptych.transport.types import Endpoint, SlotGrant

PEER = WorkerRef("prefill-1", 21)
NUM_BYTES = 64 << 20
GRANT = Grant("grant-1", "prefill-1", 21, b"c" * 16, 4, 0)


def num_open() -> float:
    return float(metrics.OPEN_CIRCUITS._value.get())


def openings(reason: str) -> float:
    return float(metrics.CIRCUIT_OPENINGS.labels(reason)._value.get())


def test_one_may_try_after_the_pause_and_nobody_else_meanwhile() -> None:
    circuit = Circuit()
    assert circuit.admits(0.0) and circuit.admits(0.0)
    circuit.failed(10.0)
    assert not circuit.admits(10.0 + FIRST_PAUSE_S - 0.01)
    assert circuit.admits(10.0 + FIRST_PAUSE_S) and circuit.state is CircuitState.HALF_OPEN
    assert not circuit.admits(10.0 + FIRST_PAUSE_S + PROBE_TIMEOUT_S - 0.01)
    assert circuit.admits(10.0 + FIRST_PAUSE_S + PROBE_TIMEOUT_S), "a probe that is never heard of holds up nobody"


def test_each_probe_that_fails_doubles_the_pause_up_to_a_bound() -> None:
    circuit, now_s, pauses = Circuit(), 0.0, []
    for _ in range(8):
        circuit.failed(now_s)
        circuit.failed(now_s + 0.1)  # all the others who were waiting: no news
        began_s = now_s
        while not circuit.admits(now_s):
            now_s += 0.25
        pauses.append(now_s - began_s)
    assert pauses == [min(FIRST_PAUSE_S * 2**n, LONGEST_PAUSE_S) for n in range(8)]


def test_it_is_counted_once_and_forgotten_when_the_peer_answers(seed: int) -> None:
    """Any order of failures, answers and trials: the gauge is what is open, and an answer closes at once."""
    dice, now_s, before = random.Random(seed), [0.0], num_open()
    circuits, opened = Circuits(lambda: now_s[0]), openings("stalled")
    for _ in range(300):
        now_s[0] += dice.random() * 2
        match dice.randrange(3):
            case 0:
                circuits.failed(PEER, "stalled")
                assert num_open() == before + 1
            case 1:
                circuits.answered(PEER)
                assert num_open() == before
                circuits.check(PEER)
            case _:
                is_known = circuits.is_tried(PEER)
                try:
                    circuits.check(PEER)
                except PeerLost:
                    assert is_known
    assert openings("stalled") > opened
    circuits.failed(PEER, "stalled")
    circuits.close()
    assert num_open() == before


async def test_a_stopped_peer_is_left_alone_and_taken_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_carrier, "SEND_TIMEOUT_S", 1.0)
    channels, me = ChannelPool(TOKEN), Endpoint(WorkerRef("encoder-1", 11), host_id(), ("zmq-tcp",))
    before, opened, data = num_open(), openings("stalled"), memoryview(bytes(NUM_BYTES))
    async with receiver_process(NUM_BYTES) as (child, info):
        pool = LinkPool(me, lambda worker: transfer_stub(channels, worker))
        link = await pool.embedding_link(info, EMBEDDING_LAYOUT)
        grant = await link.request_slot(AttemptRef("req-1"), 0, IDENTITY, 1, NUM_BYTES)
        assert isinstance(grant, SlotGrant)
        child.send_signal(signal.SIGSTOP)
        stop = asyncio.Event()
        lag = asyncio.create_task(worst_lag_s(stop))
        with pytest.raises(PeerLost):
            await asyncio.wait_for(link.write_slot(grant, data), 20)
        assert (num_open(), openings("stalled")) == (before + 1, opened + 1)
        began_s = time.monotonic()
        for _ in range(50):
            with pytest.raises(PeerLost):
                await pool.embedding_link(info, EMBEDDING_LAYOUT)
        assert time.monotonic() - began_s < 1.0, "whoever comes while it is open must not wait"
        stop.set()
        assert await lag < 1.0
        child.send_signal(signal.SIGCONT)
        again = await link_again(pool, info)
        assert num_open() == before
        fresh = await again.request_slot(AttemptRef("req-2"), 0, IDENTITY, 1, NUM_BYTES)
        assert isinstance(fresh, SlotGrant)
        await again.write_slot(fresh, data)
        await again.commit_embedding(AttemptRef("req-2"), 0, fresh, EmbeddingSource.REMOTE, checksum64(data))
        await pool.close()
    await channels.close()


async def test_a_peer_that_does_not_answer_a_commit_is_left_alone_until_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By shared memory nothing is ever sent in vain: that the peer is stopped shows at the commit."""
    monkeypatch.setattr(receiver_link, "SILENT_AFTER_S", 0.5)
    channels, me = ChannelPool(TOKEN), Endpoint(WorkerRef("encoder-1", 11), host_id(), ("shm",))
    before, opened, data = num_open(), openings("silent"), memoryview(bytes(1024))
    async with receiver_process(1 << 16) as (child, info):
        pool = LinkPool(me, lambda worker: transfer_stub(channels, worker))
        link = await pool.embedding_link(info, EMBEDDING_LAYOUT)
        ref = AttemptRef("req-1")
        grant = await link.request_slot(ref, 0, IDENTITY, 1, len(data))
        assert isinstance(grant, SlotGrant)
        child.send_signal(signal.SIGSTOP)
        await link.write_slot(grant, data)
        with pytest.raises(DeadlineExceeded):
            await link.commit_embedding(ref, 0, grant, EmbeddingSource.REMOTE, checksum64(data), timeout_s=0.5)
        assert (num_open(), openings("silent")) == (before + 1, opened + 1)
        with pytest.raises(PeerLost, match="left alone"):
            await pool.embedding_link(info, EMBEDDING_LAYOUT)
        child.send_signal(signal.SIGCONT)
        async with asyncio.timeout(20):
            while num_open() != before:  # noqa: ASYNC110 - its late answer tells nobody
                await asyncio.sleep(0.02)
        assert await pool.embedding_link(info, EMBEDDING_LAYOUT) is link, "the link itself never broke"
        await pool.close()
    await channels.close()


# --- who is gone, and who was asleep ----------------------------------------------------------------------------------


async def test_what_is_known_of_a_former_self_goes_when_the_worker_is_born_again() -> None:
    """Also where there never was a link: nobody would try the dead one again, and it would count as open for ever."""
    channels, before = ChannelPool(TOKEN), num_open()
    async with link_house.running(epoch=22) as reborn:
        pool = LinkPool(SENDER, partial(transfer_stub, channels))
        pool._circuits.failed(PEER, "unreachable")
        pool._circuits.failed(WorkerRef("prefill-2", 5), "unreachable")
        assert num_open() == before + 2
        await pool.embedding_link(reborn.info, EMBEDDING_LAYOUT)
        assert num_open() == before + 1
        assert pool.keep_only({reborn.info.ref}) == {reborn.info.ref}
        assert num_open() == before
        await pool.close()
    await channels.close()


async def test_links_and_channels_of_workers_that_left_go_when_they_are_over() -> None:
    channels = ChannelPool(TOKEN)
    pool = LinkPool(SENDER, partial(transfer_stub, channels))
    async with link_house.running() as host:
        link = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
        assert pool.keep_only(()) == {PEER}, "who leaves ends what it has begun"
        await link_house.send(link, AttemptRef("req-1"), 0, b"goes on")  # type: ignore[arg-type]
    await asyncio.wait_for(link.closed.wait(), 5)
    assert pool.keep_only(()) == set()
    channel = channels.channel(host.info)
    await channels.keep_only(())
    assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
    await pool.close()


async def test_a_worker_tends_its_peers(tmp_path: Path) -> None:
    """As they come, go and are born again: one link and one channel to each that is there, nothing to others."""
    registry, channels = StaticRegistry(RuntimeFolder(tmp_path / "run")), ChannelPool(TOKEN)
    pool = LinkPool(SENDER, partial(transfer_stub, channels))
    beside = [asyncio.create_task(registry.run()), asyncio.create_task(tend_peers(registry, pool, channels))]
    for epoch in range(31, 35):
        async with link_house.running(epoch=epoch) as host:
            registry.announce(host.info)
            await link_house.eventually(lambda: host.info in registry.workers())
            link = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
            await link_house.send(link, AttemptRef("req-1"), 0, b"here")  # type: ignore[arg-type]
            if epoch % 2:
                registry.withdraw()
    registry.withdraw()
    await link_house.eventually(lambda: not pool._links and not channels._channels)
    for task in beside:
        task.cancel()
    await asyncio.gather(*beside, return_exceptions=True)
    await pool.close()


@pytest.mark.parametrize("was_asleep", [True, False])
async def test_who_was_asleep_blames_nobody_for_its_timers(was_asleep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped finds all its deadlines past when it goes on; its peers may be well."""
    monkeypatch.setattr(receiver_link, "SILENT_AFTER_S", 0.1)
    monkeypatch.setattr("triptych.transport.circuit.ASLEEP_S", 0.2)
    before = num_open()
    async with link_house.running() as host:
        pool = host.pool()
        link = await pool.kv_link(host.info, KV_LAYOUT)
        host.kv.credits["grant-1"] = GRANT
        host.kv.may_bind.clear()
        binding = asyncio.create_task(link.bind_kv(AttemptRef("req-1"), GRANT, timeout_s=0.1))
        await asyncio.sleep(0.02)
        if was_asleep:
            time.sleep(0.6)  # noqa: ASYNC251 - as if it had been stopped
        with pytest.raises(DeadlineExceeded):
            await binding
        assert num_open() == before + (not was_asleep)
        await pool.close()
