"""What a link and the Transfer service must refuse, and that the next request works."""

from __future__ import annotations

from dataclasses import replace

import grpc
import pytest

from tests.unit import link_house
from tests.unit.link_house import (
    ARENA_BYTES,
    EMBEDDING_LAYOUT,
    IDENTITY,
    KV_LAYOUT,
    NO_SOCKETS,
    REF,
    SENDER,
    Host,
    eventually,
    send,
)
from triptych.core.errors import PeerLost, TransferRefused, TriptychError, Unauthenticated
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import EmbeddingSource
from triptych.rpc.client import ChannelPool, transfer_stub
from triptych.transport.layout import checksum64, host_id
from triptych.transport.link import AskingLink
from triptych.transport.receiver_link import ReceiverLink
from triptych.transport.types import ArenaKind, Endpoint, SlotGrant
from triptych.wire.v1 import transfer_pb2 as wire
from triptych.wire.v1 import transfer_pb2_grpc

host, link, shm_link = link_house.host, link_house.link, link_house.shm_link


async def test_forged_handles_are_refused_and_the_next_request_works(host: Host, link: AskingLink) -> None:
    grant = await link.request_slot(REF, 0, IDENTITY, 1, 64)
    assert isinstance(grant, SlotGrant)
    await link.write_slot(grant, memoryview(bytes(64)))
    right = checksum64(bytes(64))
    forged = [
        replace(grant, capability=b"0" * 16),
        replace(grant, generation=grant.generation + 1),
        replace(grant, slot_id=grant.slot_id + 1),
        replace(grant, num_bytes=63),
    ]
    for bad in forged:
        with pytest.raises(TransferRefused):
            await link.commit_embedding(REF, 0, bad, EmbeddingSource.REMOTE, right)
    with pytest.raises(TransferRefused, match="checksum"):
        await link.commit_embedding(REF, 0, grant, EmbeddingSource.REMOTE, right ^ 1)
    with pytest.raises(TransferRefused, match="no such slot"):
        await link.commit_embedding(AttemptRef("req-other"), 0, grant, EmbeddingSource.REMOTE, right)
    assert not host.embedding.landed
    await link.commit_embedding(REF, 0, grant, EmbeddingSource.REMOTE, right)


async def test_a_slot_outside_the_arena_is_never_written(link: AskingLink) -> None:
    for offset, num_bytes in ((ARENA_BYTES - 63, 64), (-1, 64), (0, ARENA_BYTES + 1), (2**62, 2**62)):
        with pytest.raises(TransferRefused, match="outside"):
            await link.write_slot(SlotGrant(1, offset, num_bytes, 1, b"c" * 16), memoryview(bytes(64)))
    with pytest.raises(TransferRefused, match="size"):
        await link.write_slot(SlotGrant(1, 0, 64, 1, b"c" * 16), memoryview(bytes(63)))


async def test_too_large_for_the_arena_is_refused(link: AskingLink) -> None:
    with pytest.raises(TransferRefused, match="larger"):
        await link.request_slot(REF, 0, IDENTITY, 1, ARENA_BYTES + 1)


@pytest.mark.parametrize(
    ("kind", "layout", "sender", "error"),
    [
        (ArenaKind.EMBEDDING, KV_LAYOUT, SENDER, TransferRefused),
        (ArenaKind.EMBEDDING, EMBEDDING_LAYOUT, replace(SENDER, host_id="another"), TransferRefused),
        (ArenaKind.EMBEDDING, EMBEDDING_LAYOUT, replace(SENDER, transports=("pigeon",)), TransferRefused),
        (ArenaKind.EMBEDDING, b"short", SENDER, TriptychError),
        (ArenaKind.EMBEDDING, EMBEDDING_LAYOUT, replace(SENDER, ref=WorkerRef("bad name!", 1)), TriptychError),
    ],
)
async def test_a_wrong_hello_is_refused_and_a_right_one_works(
    host: Host, kind: ArenaKind, layout: bytes, sender: Endpoint, error: type[TriptychError]
) -> None:
    stub = transfer_stub(host.channels, host.info)
    wrong = ReceiverLink(sender, host.info.ref, kind, layout)
    with pytest.raises(error):
        await wrong.connect(stub, NO_SOCKETS)
    assert wrong.closed.is_set()
    right = ReceiverLink(SENDER, host.info.ref, ArenaKind.EMBEDDING, EMBEDDING_LAYOUT)
    await right.connect(stub, NO_SOCKETS)
    await send(right, REF, 0, b"works")
    await right.close()


async def test_another_epoch_at_the_address_is_a_lost_peer(host: Host) -> None:
    link = ReceiverLink(SENDER, WorkerRef("prefill-1", 99), ArenaKind.EMBEDDING, EMBEDDING_LAYOUT)
    with pytest.raises(PeerLost, match="another worker"):
        await link.connect(transfer_stub(host.channels, host.info), NO_SOCKETS)


async def test_no_token_no_session(host: Host) -> None:
    link = ReceiverLink(SENDER, host.info.ref, ArenaKind.EMBEDDING, EMBEDDING_LAYOUT)
    channels = ChannelPool("another-token")
    with pytest.raises(Unauthenticated):
        await link.connect(transfer_stub(channels, host.info), NO_SOCKETS)
    await channels.close()


async def test_nobody_there_is_a_lost_peer(host: Host) -> None:
    gone = replace(host.info, worker_id="gone", grpc_address="127.0.0.1:1")
    link = ReceiverLink(SENDER, gone.ref, ArenaKind.EMBEDDING, EMBEDDING_LAYOUT)
    with pytest.raises(PeerLost):
        await link.connect(transfer_stub(host.channels, gone), NO_SOCKETS)


def hello() -> wire.SessionRequest:
    return wire.SessionRequest(
        sequence=0,
        hello=wire.Hello(
            protocol_version=1,
            worker_id="raw",
            epoch=5,
            host_id=host_id(),
            transports=["shm"],
            arena=wire.ARENA_KIND_EMBEDDING,
            layout_fingerprint=EMBEDDING_LAYOUT,
        ),
    )


async def test_illegal_frames_are_answered_and_harm_nobody(host: Host, shm_link: ReceiverLink) -> None:
    call = transfer_stub(host.channels, host.info).Session(None)

    async def ask(frame: wire.SessionRequest) -> wire.SessionResponse:
        await call.write(frame)
        answer = await call.read()
        assert isinstance(answer, wire.SessionResponse)
        return answer

    slot = wire.SlotRequest(identity=IDENTITY, num_tokens=1, num_bytes=64)
    slot.ref.request_id = "req-raw"
    early = await ask(wire.SessionRequest(sequence=1, slot_request=slot))
    assert early.refused.error.code == "transfer_refused"
    assert (await ask(hello())).WhichOneof("kind") == "hello_ack"
    bind = wire.BindRequest(grant_id="grant-1", capability=b"c" * 16)
    bind.ref.CopyFrom(slot.ref)
    bad_identity = wire.SlotRequest(ref=slot.ref, identity=b"short", num_tokens=1, num_bytes=64)
    huge = wire.SlotRequest(ref=slot.ref, identity=IDENTITY, num_tokens=1, num_bytes=2**64 - 1)
    illegal = [
        wire.SessionRequest(sequence=2, hello=hello().hello),
        wire.SessionRequest(sequence=3),
        wire.SessionRequest(sequence=4, bind_request=bind),
        wire.SessionRequest(sequence=5, slot_request=bad_identity),
        wire.SessionRequest(sequence=6, slot_request=huge),
        wire.SessionRequest(sequence=7, commit=wire.Commit(ref=slot.ref, capability=b"c" * 16)),
        wire.SessionRequest(sequence=7, slot_request=slot),
        wire.SessionRequest(sequence=1, slot_request=slot),
    ]
    for frame in illegal:
        answer = await ask(frame)
        assert answer.WhichOneof("kind") == "refused" and answer.sequence == frame.sequence
    assert (await ask(wire.SessionRequest(sequence=8, slot_request=slot))).WhichOneof("kind") == "slot_grant"
    await send(shm_link, REF, 0, b"unharmed")
    call.cancel()
    await eventually(lambda: WorkerRef("raw", 5) in host.embedding.lost)
    assert host.embedding.slots.free_bytes == ARENA_BYTES


async def test_an_oversized_frame_ends_its_session_only(host: Host, shm_link: ReceiverLink) -> None:
    async def ask(num_bytes: int) -> object:
        await call.write(wire.SessionRequest(abort=wire.Abort(reason="x" * num_bytes)))
        return await call.read()

    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(host.info.grpc_address, options=options) as channel:
        call = transfer_pb2_grpc.TransferStub(channel).Session(metadata=host.channels.metadata())
        answer = await ask(3 * 2**20)
        assert isinstance(answer, wire.SessionResponse) and answer.refused.error.code == "transfer_refused"
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await ask(5 * 2**20)
        assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await send(shm_link, REF, 0, b"unharmed")
