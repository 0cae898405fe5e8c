"""The control connection is cut after any of its bytes, the commit's among them: what was written is there whole, or
not at all, and nothing is kept for the sender that was lost."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace

import pytest
from google.protobuf.message import DecodeError

from tests.seed import IS_FULL, SEED
from tests.unit import link_house
from tests.unit.cut_house import CuttingProxy
from tests.unit.link_house import ARENA_BYTES, EMBEDDING_LAYOUT, REF, TOKEN, Host, eventually, send, sender_by
from triptych.core.errors import TriptychError
from triptych.core.plan import EmbeddingSource
from triptych.rpc.client import ChannelPool, transfer_stub
from triptych.transport import frames
from triptych.transport.receiver_link import ReceiverLink
from triptych.transport.types import ArenaKind, EmbeddingCommitted
from triptych.transport.ways import DataSockets, Ways
from triptych.wire.v1 import transfer_pb2 as wire

host = link_house.host

DATA = bytes(range(1, 201))
NUM_CUTS = 14


async def send_through(host: Host, num_bytes: int | None) -> int:
    """One embedding by shared memory, over a connection that is cut there. Returns the bytes that passed."""
    proxy = CuttingProxy(int(host.info.grpc_address.rpartition(":")[2]), num_bytes)
    channels, sockets = ChannelPool(TOKEN), DataSockets()
    async with proxy as port:
        info = replace(host.info, grpc_address=f"127.0.0.1:{port}")
        link = ReceiverLink(sender_by("shm", host), host.info.ref, ArenaKind.EMBEDDING, EMBEDDING_LAYOUT)
        try:
            with suppress(TriptychError):
                await link.connect(transfer_stub(channels, info), Ways(sockets, "127.0.0.1"), timeout_s=5)
                await send(link, REF, 0, DATA)
        finally:
            await link.close()
            await channels.close()
            sockets.close()
    return proxy.num_passed


# gRPC's own server says so of a stream that ends before its first frame.
@pytest.mark.filterwarnings("ignore:coroutine '_MessageReceiver:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*_MessageReceiver:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.timeout(900)
async def test_a_control_connection_cut_anywhere_shows_nothing_or_all(host: Host) -> None:
    total = await send_through(host, None)
    assert host.embedding.landed.pop((REF, 0)).data == DATA
    cuts = range(total) if IS_FULL else random.Random(SEED).sample(range(total), NUM_CUTS)
    for num_bytes in cuts:
        await send_through(host, num_bytes)
        landed = host.embedding.landed.pop((REF, 0), None)
        assert landed is None or landed.data == DATA, f"cut after {num_bytes}"
        await eventually(lambda: host.embedding.slots.free_bytes == ARENA_BYTES)
    await send_through(host, None)
    assert host.embedding.landed[REF, 0].data == DATA


def test_a_commit_that_is_cut_anywhere_is_no_commit() -> None:
    commit = EmbeddingCommitted(REF, 3, 7, 9, b"c" * 16, 200, 2**63, EmbeddingSource.REMOTE)
    whole = frames.asked_to_frame(5, commit).SerializeToString()
    for end in range(len(whole)):
        with pytest.raises((DecodeError, TriptychError)):
            frames.asked_from_frame(wire.SessionRequest.FromString(whole[:end]))
    assert frames.asked_from_frame(wire.SessionRequest.FromString(whole)) == commit
