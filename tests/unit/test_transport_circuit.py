"""The circuit to a peer: who may try when, in the circuit alone and on links to a process that is stopped."""

from __future__ import annotations

import asyncio
import random
import signal
import time

import pytest

from tests.unit.link_house import EMBEDDING_LAYOUT, IDENTITY, TOKEN
from tests.unit.test_transport_zmq_stopped import link_again, receiver_process, worst_lag_s
from triptych.core.errors import DeadlineExceeded, PeerLost
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import EmbeddingSource
from triptych.obs import metrics
from triptych.rpc.client import ChannelPool, transfer_stub
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
