"""Links by the data socket to the receiver of `link_house`, and what is done to them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import zmq
import zmq.asyncio

from tests.unit.link_house import EMBEDDING_LAYOUT, IDENTITY, KV, KV_LAYOUT, REF, Host, sender_by
from triptych.obs import metrics
from triptych.rpc.client import transfer_stub
from triptych.transport.curve import CurveKeys
from triptych.transport.receiver_link import ReceiverLink
from triptych.transport.types import ArenaKind, SlotGrant
from triptych.transport.ways import DataSockets, Ways
from triptych.transport.zmq_carrier import ZmqCarrier
from triptych.transport.zmq_gate import Admission

WAYS = ("zmq-ipc", "zmq-tcp")


@asynccontextmanager
async def zmq_link(
    host: Host,
    way: str = "zmq-tcp",
    kind: ArenaKind = ArenaKind.EMBEDDING,
    address: str = "127.0.0.1",
    keys: CurveKeys | None = None,
) -> AsyncIterator[ReceiverLink]:
    sockets = DataSockets()
    layout, kv = (EMBEDDING_LAYOUT, None) if kind is ArenaKind.EMBEDDING else (KV_LAYOUT, KV)
    link = ReceiverLink(sender_by(way, host), host.info.ref, kind, layout, kv)
    await link.connect(transfer_stub(host.channels, host.info), Ways(sockets, address, keys))
    try:
        yield link
    finally:
        await link.close()
        sockets.close()


def carrier_of(link: ReceiverLink) -> ZmqCarrier:
    carrier = link._carrier()
    assert isinstance(carrier, ZmqCarrier)
    return carrier


def dropped(reason: str) -> float:
    return float(metrics.DATA_FRAMES_DROPPED.labels(reason)._value.get())


@asynccontextmanager
async def raw_socket(
    host: Host, username: bytes, password: bytes, admission: Admission | None = None
) -> AsyncIterator[zmq.asyncio.Socket]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.PUSH)
    socket.linger, socket.immediate = 0, True
    if username:
        socket.plain_username, socket.plain_password = username, password
    if admission is not None:
        admission.prepare(socket)
    socket.connect(f"tcp://127.0.0.1:{host.data_port.address.port}")
    try:
        yield socket
    finally:
        socket.close(0)
        context.destroy(linger=0)


async def slot_of(link: ReceiverLink, num_bytes: int = 64) -> SlotGrant:
    grant = await link.request_slot(REF, 0, IDENTITY, 1, num_bytes)
    assert isinstance(grant, SlotGrant)
    return grant


def tampered(carrier: ZmqCarrier, change: Callable[[int, list[bytes]], list[list[bytes]]]) -> None:
    """What leaves the carrier's socket goes through `change` first: number of the message, its parts, what is sent."""
    sent = carrier._socket.send_multipart
    count = 0

    async def send_changed(parts: list[bytes], **_: object) -> None:
        nonlocal count
        for message in change(count, [bytes(part) for part in parts]):
            await sent(message)
        count += 1

    carrier._socket.send_multipart = send_changed  # type: ignore[method-assign, assignment]
