"""The data socket and those who may not speak to it: strangers, code, oversized messages and forged frames."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from tests.unit import link_house
from tests.unit.link_house import REF, Host, eventually, send
from tests.unit.zmq_house import carrier_of, dropped, raw_socket, slot_of, zmq_link
from triptych.core.ids import AttemptRef
from triptych.core.plan import EmbeddingSource
from triptych.transport import zmq_port
from triptych.transport.data_frame import DataHeader, PayloadKind, pack
from triptych.transport.layout import checksum64
from triptych.transport.zmq_gate import credentials

host = link_house.host


class Canary:
    """Unpickled, it leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.trace),)


def canary(trace: Path) -> bytes:
    import pickle

    return pickle.dumps(Canary(trace))


async def test_a_connection_without_a_sessions_key_delivers_nothing(host: Host, tmp_path: Path) -> None:
    async with zmq_link(host) as link:
        session = carrier_of(link)._session
        wrong = [
            (b"", b""),
            (str(session).encode(), b"0" * 32),
            (b"9" * 30, b"0" * 32),
            credentials(session + 1, b"k" * 16),
        ]
        for username, password in wrong:
            before = dropped("unauthenticated")
            async with raw_socket(host, username, password) as socket:
                assert not await socket.poll(200, zmq.POLLOUT)
                if password:  # without one the handshake ends before anybody is asked
                    await eventually(lambda before=before: dropped("unauthenticated") > before)
                with pytest.raises(zmq.Again):
                    await socket.send(canary(tmp_path / "trace"), zmq.NOBLOCK)
        await send(link, REF, 0, b"unharmed")
    assert not (tmp_path / "trace").exists()


async def test_a_canary_that_gets_in_is_never_unpickled(host: Host, tmp_path: Path) -> None:
    bird = canary(tmp_path / "trace")
    async with zmq_link(host) as link:
        carrier = carrier_of(link)
        async with raw_socket(host, *credentials(carrier._session, carrier._session_key)) as socket:
            assert await socket.poll(3000, zmq.POLLOUT)
            for parts in ([bird], [bird, bird], [bird] * 9, [b"", b""], [b""], [b"TPZ\0" + bird, bird]):
                before = dropped("malformed")
                await socket.send_multipart(parts)
                await eventually(lambda before=before: dropped("malformed") == before + 1)
        await send(link, REF, 0, b"unharmed")
    assert not (tmp_path / "trace").exists()
    assert host.embedding.landed[REF, 0].data == b"unharmed"


async def test_an_oversized_message_ends_its_connection_only(host: Host) -> None:
    async with zmq_link(host) as link:
        carrier = carrier_of(link)
        async with raw_socket(host, *credentials(carrier._session, carrier._session_key)) as socket:
            assert await socket.poll(3000, zmq.POLLOUT)
            await socket.send_multipart([b"x" * 88, bytes(zmq_port.MAX_PAYLOAD_BYTES + 1)])
            await send(link, REF, 0, b"unharmed")
    assert host.embedding.landed[REF, 0].data == b"unharmed"


FORGED: dict[str, tuple[str, Callable[[DataHeader], DataHeader]]] = {
    "kind": ("forged", lambda header: replace(header, kind=PayloadKind.PAGES)),
    "session": ("unknown_session", lambda header: replace(header, session=header.session + 1000)),
    "session_key": ("forged", lambda header: replace(header, session_key=b"x" * 16)),
    "ticket": ("late", lambda header: replace(header, ticket=header.ticket + 1)),
    "capability": ("forged", lambda header: replace(header, capability=b"x" * 16)),
    "generation": ("forged", lambda header: replace(header, generation=header.generation + 1)),
    "offset": ("out_of_order", lambda header: replace(header, offset=1)),
    "length": ("malformed", lambda header: replace(header, length=header.length + 1)),
}


@pytest.mark.parametrize("field", FORGED)
async def test_a_frame_with_any_field_forged_is_dropped_and_the_next_transfer_is_right(host: Host, field: str) -> None:
    reason, forge = FORGED[field]
    async with zmq_link(host) as link:
        carrier, grant = carrier_of(link), await slot_of(link)
        sound = DataHeader(
            PayloadKind.SLOT,
            carrier._session,
            carrier._session_key,
            grant.ticket,
            grant.capability,
            grant.generation,
            0,
            64,
        )
        before = dropped(reason)
        payload = memoryview(b"f" * 64)
        async with raw_socket(host, *credentials(carrier._session, carrier._session_key)) as socket:
            assert await socket.poll(3000, zmq.POLLOUT)
            await socket.send_multipart([pack(forge(sound), payload), payload])
            await eventually(lambda: dropped(reason) == before + 1)
        assert not any(host.embedding.arena.buffer)
        if field != "offset":  # that one leaves a gap in its own grant
            await link.write_slot(grant, memoryview(b"t" * 64))
            await link.commit_embedding(REF, 0, grant, EmbeddingSource.REMOTE, checksum64(b"t" * 64))
            assert host.embedding.landed[REF, 0].data == b"t" * 64
        await send(link, AttemptRef("req-2"), 0, b"next")
        assert host.embedding.landed[AttemptRef("req-2"), 0].data == b"next"
