"""Frames of an embedding over real sockets: cut in pieces, lost, damaged, doubled, late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from tests.seed import IS_FULL
from tests.unit import link_house
from tests.unit.cut_house import CuttingProxy
from tests.unit.link_house import ARENA_BYTES, REF, Host, eventually, send
from tests.unit.zmq_house import WAYS, carrier_of, dropped, slot_of, tampered, zmq_link
from triptych.core.errors import TransferRefused, TriptychError
from triptych.core.ids import AttemptRef
from triptych.core.plan import EmbeddingSource
from triptych.transport import zmq_carrier
from triptych.transport.layout import checksum64
from triptych.transport.ways import Ways

host = link_house.host


@pytest.mark.parametrize("way", WAYS)
async def test_what_is_larger_than_a_frame_lands_whole(host: Host, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_carrier, "MAX_PAYLOAD_BYTES", 100)
    async with zmq_link(host, way) as link:
        data = np.random.default_rng(7).bytes(ARENA_BYTES)
        await send(link, REF, 0, data)
        assert host.embedding.landed[REF, 0].data == data


WAYS_TO_LOSE: dict[str, Callable[[int, list[bytes]], list[list[bytes]]]] = {
    "the first is lost": lambda n, parts: [] if n == 0 else [parts],
    "the last is lost": lambda n, parts: [] if n == 4 else [parts],
    "one is damaged": lambda n, parts: [[parts[0], b"\xff" + parts[1][1:]]] if n == 2 else [parts],
    "one is cut": lambda n, parts: [[parts[0], parts[1][:-1]]] if n == 2 else [parts],
    "one lacks its payload": lambda n, parts: [parts[:1]] if n == 2 else [parts],
}


@pytest.mark.parametrize("loss", WAYS_TO_LOSE)
async def test_a_lost_frame_is_a_refusal_that_can_be_tried_again(
    host: Host, loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_carrier, "MAX_PAYLOAD_BYTES", 16)
    monkeypatch.setattr("triptych.transport.landings.STALLED_S", 0.3)
    async with zmq_link(host) as link:
        tampered(carrier_of(link), WAYS_TO_LOSE[loss])
        with pytest.raises(TransferRefused) as refused:
            await send(link, REF, 0, b"x" * 80)
        assert refused.value.retriable and not host.embedding.landed
        await link.abort(REF, None, "lost")
        await send(link, AttemptRef("req-2"), 0, b"y" * 80)
        assert host.embedding.landed[AttemptRef("req-2"), 0].data == b"y" * 80


@pytest.mark.parametrize("num_bytes", range(720) if IS_FULL else [*range(0, 720, 60), 1, 64, 65, 400, 433])
async def test_a_connection_cut_after_any_byte_is_a_refusal_or_a_right_transfer(
    host: Host, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZMQ connects again by itself; what was in the pipe is lost, and never half a frame."""
    monkeypatch.setattr(zmq_carrier, "MAX_PAYLOAD_BYTES", 16)
    monkeypatch.setattr("triptych.transport.landings.STALLED_S", 0.3)
    data = bytes(range(1, 81))
    proxy = CuttingProxy(host.data_port.address.port, num_bytes)
    async with proxy as port:
        monkeypatch.setattr(Ways, "_endpoint", lambda self, welcome: f"tcp://127.0.0.1:{port}")
        async with zmq_link(host) as link:
            with suppress(TransferRefused):
                await send(link, REF, 0, data)
            assert not host.embedding.landed or host.embedding.landed[REF, 0].data == data
            await link.abort(REF, None, "over")
            for attempt in range(20):  # the first may still go into the pipe that is being lost
                with suppress(TransferRefused):
                    await send(link, AttemptRef("req-2", 0, attempt), 0, data)
                    break
                await link.abort(AttemptRef("req-2", 0, attempt), None, "lost")
            assert host.embedding.landed[AttemptRef("req-2", 0, attempt), 0].data == data
            assert proxy.is_cut
    await eventually(lambda: host.embedding.slots.free_bytes == ARENA_BYTES)


async def test_a_bug_in_the_pump_fails_the_link_in_words(host: Host) -> None:
    async with zmq_link(host) as link:

        def broken(number: int, parts: list[bytes]) -> list[list[bytes]]:
            raise RuntimeError("a bug at 0x7f00")

        tampered(carrier_of(link), broken)
        grant = await slot_of(link)
        with pytest.raises(TriptychError) as caught:
            await link.write_slot(grant, memoryview(bytes(64)))
        assert "0x" not in str(caught.value)
        await asyncio.wait_for(link.closed.wait(), 5)


async def test_frames_that_come_twice_land_once(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_carrier, "MAX_PAYLOAD_BYTES", 16)
    async with zmq_link(host) as link:
        tampered(carrier_of(link), lambda n, parts: [parts, parts])
        data = bytes(range(80))
        await send(link, REF, 0, data)
        assert host.embedding.landed[REF, 0].data == data


async def test_a_late_frame_changes_nothing(host: Host) -> None:
    """After an abort, and after the very same slot was granted again."""
    async with zmq_link(host) as link:
        carrier, old = carrier_of(link), await slot_of(link)
        await link.abort(REF, None, "given up")
        await eventually(lambda: host.embedding.slots.free_bytes == ARENA_BYTES)
        before = dropped("late")
        await link.write_slot(old, memoryview(b"o" * 64))
        await eventually(lambda: dropped("late") == before + 1)
        assert not any(host.embedding.arena.buffer)
        new = await slot_of(link)
        assert new.offset == old.offset
        await link.write_slot(replace(new, ticket=old.ticket), memoryview(b"o" * 64))
        await link.write_slot(new, memoryview(b"n" * 64))
        await link.commit_embedding(REF, 0, new, EmbeddingSource.REMOTE, checksum64(b"n" * 64))
        assert host.embedding.landed[REF, 0].data == b"n" * 64
        await carrier.write_slot(new, memoryview(b"z" * 64))
        await eventually(lambda: dropped("late") == before + 3)
        assert bytes(host.embedding.arena.buffer[:64]) == b"n" * 64
