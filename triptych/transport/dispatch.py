"""What a session asks, put to the receiver that it is for. The same for peers and for this process itself."""

from __future__ import annotations

from triptych.core.errors import TransferRefused
from triptych.core.ids import WorkerRef
from triptych.transport.receiver import EmbeddingReceiver, KvReceiver, Receivers
from triptych.transport.types import (
    AbortAsked,
    Acknowledged,
    Answer,
    ArenaKind,
    Asked,
    BindAsked,
    Bound,
    EmbeddingCommitted,
    KvCommitted,
    SlotAsked,
)


async def carry_out(receivers: Receivers, kind: ArenaKind, peer: WorkerRef, asked: Asked) -> Answer:
    """Raises what the receiver raises, or TransferRefused when there is none of that kind."""
    if kind is ArenaKind.EMBEDDING and receivers.embedding is not None:
        return await _embedding(receivers.embedding, peer, asked)
    if kind is ArenaKind.KV and receivers.kv is not None:
        return await _kv(receivers.kv, peer, asked)
    raise TransferRefused("this worker has no arena of that kind")


async def peer_lost(receivers: Receivers, kind: ArenaKind, peer: WorkerRef) -> None:
    receiver = receivers.embedding if kind is ArenaKind.EMBEDDING else receivers.kv
    if receiver is not None:
        await receiver.peer_lost(peer)


async def _embedding(receiver: EmbeddingReceiver, peer: WorkerRef, asked: Asked) -> Answer:
    match asked:
        case SlotAsked():
            return await receiver.request_slot(
                peer, asked.ref, asked.item_index, asked.identity, asked.num_tokens, asked.num_bytes
            )
        case EmbeddingCommitted():
            await receiver.commit_embedding(
                peer,
                asked.ref,
                asked.item_index,
                asked.slot_id,
                asked.generation,
                asked.capability,
                asked.num_bytes,
                asked.checksum,
                asked.source,
            )
        case AbortAsked():
            await receiver.abort(peer, asked.ref, asked.reason)
        case _:
            raise TransferRefused("this link goes to no KV pool")
    return Acknowledged()


async def _kv(receiver: KvReceiver, peer: WorkerRef, asked: Asked) -> Answer:
    match asked:
        case BindAsked():
            grant = await receiver.bind(peer, asked.ref, asked.grant_id, asked.capability)
            return Bound(grant.generation, grant.groups, grant.num_held_tokens)
        case KvCommitted():
            await receiver.commit_kv(
                peer,
                asked.ref,
                asked.grant_id,
                asked.generation,
                asked.capability,
                asked.num_tokens,
                asked.num_bytes,
                asked.first_token,
                asked.position_delta,
            )
        case AbortAsked():
            await receiver.abort(peer, asked.ref, asked.grant_id, asked.reason)
        case _:
            raise TransferRefused("this link goes to no embedding arena")
    return Acknowledged()
