"""The data plane's control frames <-> domain values. From-frame functions raise TriptychErrors and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from triptych.core.errors import InvalidRequest, TriptychError
from triptych.core.kv_format import MAX_PAGE_TOKENS, KvTerms, PageFormat
from triptych.core.plan import IDENTITY_BYTES
from triptych.rpc import check, convert
from triptych.rpc.errors import detail_from_error, error_from_detail
from triptych.transport.control_wire import CONTROL_KEY_BYTES
from triptych.transport.data_frame import CURVE_KEY_BYTES, SESSION_KEY_BYTES
from triptych.transport.device import HANDLE_BYTES, UUID_BYTES, DeviceAddress
from triptych.transport.layout import FINGERPRINT_BYTES
from triptych.transport.nixl_api import MAX_METADATA_BYTES, NixlAddress
from triptych.transport.types import (
    AbortAsked,
    Acknowledged,
    Answer,
    ArenaKind,
    Asked,
    BindAsked,
    Bound,
    ControlAddress,
    DataAddress,
    EmbeddingCommitted,
    Endpoint,
    HaveIt,
    KvCommitted,
    SlotAsked,
    SlotGrant,
)
from triptych.wire.v1 import common_pb2 as pb
from triptych.wire.v1 import transfer_pb2 as wire

PROTOCOL_VERSION: Final = 1
MAX_REASON_CHARS: Final = 256
MAX_MAPPING_ID: Final = 2**62
# What sockaddr_un holds, less the closing zero.
MAX_SOCKET_PATH_BYTES: Final = 107
_INT63: Final = 2**63 - 1
_INT64: Final = 2**64 - 1

_ARENA: dict[wire.ArenaKind, ArenaKind] = {
    wire.ARENA_KIND_EMBEDDING: ArenaKind.EMBEDDING,
    wire.ARENA_KIND_KV: ArenaKind.KV,
}
_ARENA_TO = {domain: number for number, domain in _ARENA.items()}


@dataclass(frozen=True, slots=True)
class Greeting:
    """Domain form of Hello. `curve_key` is empty where the sender does not encrypt; `kv` is there for KV alone."""

    sender: Endpoint
    kind: ArenaKind
    layout_fingerprint: bytes
    curve_key: bytes = b""
    kv: KvTerms | None = None


@dataclass(frozen=True, slots=True)
class Welcome:
    """Domain form of HelloAck. `segment_name` is for `shm`, `data` for `zmq-*`, `device` for `cuda_ipc`, `nixl` for
    `nixl`; they are empty for others. `pages` are how a KV pool is cut; None for embeddings. `control` is for
    senders of the same host."""

    transport: str
    segment_name: str = ""
    segment_bytes: int = 0
    mapping_id: int = 0
    data: DataAddress = field(default_factory=DataAddress)
    device: DeviceAddress | None = None
    pages: PageFormat | None = None
    nixl: NixlAddress | None = None
    control: ControlAddress = field(default_factory=ControlAddress)


# --- hello -----------------------------------------------------------------------------------------------------------


def greeting_to_frame(sequence: int, greeting: Greeting) -> wire.SessionRequest:
    sender = greeting.sender
    hello = wire.Hello(
        protocol_version=PROTOCOL_VERSION,
        worker_id=sender.ref.worker_id,
        epoch=sender.ref.epoch,
        host_id=sender.host_id,
        transports=sender.transports,
        arena=_ARENA_TO[greeting.kind],
        layout_fingerprint=greeting.layout_fingerprint,
        curve_key=greeting.curve_key,
        pages=None if greeting.kv is None else _pages_to_proto(greeting.kv.pages),
        may_narrow=greeting.kv is not None and greeting.kv.may_narrow,
    )
    return wire.SessionRequest(sequence=sequence, hello=hello)


def greeting_from_frame(hello: wire.Hello) -> Greeting:
    if hello.protocol_version != PROTOCOL_VERSION:
        raise InvalidRequest(f"this worker speaks version {PROTOCOL_VERSION} of the transfer protocol")
    check.at_most("transports", hello.transports, 16)
    sender = Endpoint(
        convert.worker_ref_from_proto(hello.worker_id, hello.epoch),
        check.text("host_id", hello.host_id, 128),
        tuple(check.name("transports", transport) for transport in hello.transports),
    )
    fingerprint = check.exact_bytes("layout_fingerprint", hello.layout_fingerprint, FINGERPRINT_BYTES)
    kind = check.choice("arena", _ARENA, hello.arena)
    return Greeting(sender, kind, fingerprint, _curve_key(hello.curve_key), _kv_terms(kind, hello))


def _kv_terms(kind: ArenaKind, hello: wire.Hello) -> KvTerms | None:
    if kind is ArenaKind.KV:
        check.present(hello, "pages")
        return KvTerms(_pages_from_proto(hello.pages), hello.may_narrow)
    if hello.HasField("pages") or hello.may_narrow:
        raise InvalidRequest("pages are for KV only", param="pages")
    return None


def _pages_to_proto(pages: PageFormat) -> wire.PageFormat:
    return wire.PageFormat(page_tokens=pages.page_tokens, dtype=convert.kv_dtype_to_proto(pages.dtype))


def _pages_from_proto(pages: wire.PageFormat) -> PageFormat:
    return PageFormat(
        check.integer("page_tokens", pages.page_tokens, 1, MAX_PAGE_TOKENS), convert.kv_dtype_from_proto(pages.dtype)
    )


def welcome_to_frame(sequence: int, receiver: Endpoint, welcome: Welcome) -> wire.SessionResponse:
    ack = wire.HelloAck(
        worker_id=receiver.ref.worker_id,
        epoch=receiver.ref.epoch,
        transport=welcome.transport,
        segment_name=welcome.segment_name,
        segment_bytes=welcome.segment_bytes,
        mapping_id=welcome.mapping_id,
        socket_path=welcome.data.socket_path,
        data_port=welcome.data.port,
        session_key=welcome.data.session_key,
        curve_key=welcome.data.curve_key,
        pages=None if welcome.pages is None else _pages_to_proto(welcome.pages),
        control_path=welcome.control.socket_path,
        control_key=welcome.control.key,
    )
    if welcome.device is not None:
        device = welcome.device
        ack.device.CopyFrom(
            wire.DeviceAddress(handle=device.handle, device_uuid=device.uuid, lease_name=device.lease_name)
        )
    if welcome.nixl is not None:
        ack.nixl.CopyFrom(wire.NixlAddress(metadata=welcome.nixl.metadata, base=welcome.nixl.base))
    return wire.SessionResponse(sequence=sequence, hello_ack=ack)


def welcome_from_frame(ack: wire.HelloAck) -> Welcome:
    return Welcome(
        check.name("transport", ack.transport),
        check.text("segment_name", ack.segment_name, 64),
        check.integer("segment_bytes", ack.segment_bytes, 0, _INT63),
        check.integer("mapping_id", ack.mapping_id, 0, MAX_MAPPING_ID),
        _data_address(ack),
        _device_address(ack.device) if ack.HasField("device") else None,
        _pages_from_proto(ack.pages) if ack.HasField("pages") else None,
        _nixl_address(ack.nixl, ack.segment_bytes) if ack.HasField("nixl") else None,
        _control_address(ack),
    )


def _data_address(ack: wire.HelloAck) -> DataAddress:
    if ack.session_key:
        check.exact_bytes("session_key", ack.session_key, SESSION_KEY_BYTES)
    path = _socket_path("socket_path", ack.socket_path)
    port = check.integer("data_port", ack.data_port, 0, 65535)
    return DataAddress(path, port, ack.session_key, _curve_key(ack.curve_key))


def _control_address(ack: wire.HelloAck) -> ControlAddress:
    path = _socket_path("control_path", ack.control_path)
    if not path and not ack.control_key:
        return ControlAddress()
    return ControlAddress(path, check.exact_bytes("control_key", ack.control_key, CONTROL_KEY_BYTES))


def _socket_path(name: str, raw: str) -> str:
    path = check.text(name, raw, MAX_SOCKET_PATH_BYTES)
    if path and not path.startswith("/"):
        raise InvalidRequest(f"{name} must be an absolute path", param=name)
    return path


def _curve_key(raw: bytes) -> bytes:
    return check.exact_bytes("curve_key", raw, CURVE_KEY_BYTES) if raw else b""


def _device_address(device: wire.DeviceAddress) -> DeviceAddress:
    return DeviceAddress(
        check.exact_bytes("handle", device.handle, HANDLE_BYTES),
        check.exact_bytes("device_uuid", device.device_uuid, UUID_BYTES),
        check.text("lease_name", device.lease_name, 64),
    )


def _nixl_address(nixl: wire.NixlAddress, arena_bytes: int) -> NixlAddress:
    if not 1 <= len(nixl.metadata) <= MAX_METADATA_BYTES:
        raise InvalidRequest(f"metadata must be 1 to {MAX_METADATA_BYTES} bytes", param="metadata")
    return NixlAddress(nixl.metadata, check.integer("base", nixl.base, 1, _INT63 - arena_bytes))


# --- requests --------------------------------------------------------------------------------------------------------


def asked_to_frame(sequence: int, asked: Asked) -> wire.SessionRequest:
    ref = convert.ref_to_proto(asked.ref)
    match asked:
        case SlotAsked():
            slot = wire.SlotRequest(
                ref=ref,
                item_index=asked.item_index,
                identity=asked.identity,
                num_tokens=asked.num_tokens,
                num_bytes=asked.num_bytes,
            )
            return wire.SessionRequest(sequence=sequence, slot_request=slot)
        case BindAsked():
            bind = wire.BindRequest(ref=ref, grant_id=asked.grant_id, capability=asked.capability)
            return wire.SessionRequest(sequence=sequence, bind_request=bind)
        case AbortAsked():
            abort = wire.Abort(ref=ref, grant_id=asked.grant_id or "", reason=asked.reason[:MAX_REASON_CHARS])
            return wire.SessionRequest(sequence=sequence, abort=abort)
        case EmbeddingCommitted() | KvCommitted():
            return wire.SessionRequest(sequence=sequence, commit=_commit_to_proto(ref, asked))


def _commit_to_proto(ref: pb.AttemptRef, asked: EmbeddingCommitted | KvCommitted) -> wire.Commit:
    commit = wire.Commit(ref=ref, generation=asked.generation, capability=asked.capability)
    if isinstance(asked, EmbeddingCommitted):
        commit.embedding.CopyFrom(
            wire.EmbeddingCommit(
                item_index=asked.item_index,
                slot_id=asked.slot_id,
                num_bytes=asked.num_bytes,
                checksum=asked.checksum,
                source=convert.source_to_proto(asked.source),
            )
        )
        return commit
    commit.kv.CopyFrom(
        wire.KvCommit(
            grant_id=asked.grant_id,
            num_tokens=asked.num_tokens,
            num_bytes=asked.num_bytes,
            first_token=convert.token_to_proto(asked.first_token),
            position_delta=asked.position_delta,
            checksum=asked.checksum,
        )
    )
    return commit


def asked_from_frame(frame: wire.SessionRequest) -> Asked:
    """Anything but a hello."""
    match frame.WhichOneof("kind"):
        case "slot_request":
            return _slot_from_proto(frame.slot_request)
        case "bind_request":
            bind = frame.bind_request
            return BindAsked(
                convert.ref_from_proto(bind.ref),
                check.name("grant_id", bind.grant_id),
                convert.capability_from_proto(bind.capability),
            )
        case "commit":
            return _commit_from_proto(frame.commit)
        case "abort":
            abort = frame.abort
            grant_id = check.name("grant_id", abort.grant_id) if abort.grant_id else None
            reason = check.text("reason", abort.reason, MAX_REASON_CHARS)
            return AbortAsked(convert.ref_from_proto(abort.ref), grant_id, reason)
    raise InvalidRequest("the frame is empty, or of a kind that is not known here")


def _slot_from_proto(slot: wire.SlotRequest) -> SlotAsked:
    return SlotAsked(
        convert.ref_from_proto(slot.ref),
        check.integer("item_index", slot.item_index, 0, convert.MAX_ITEMS - 1),
        check.exact_bytes("identity", slot.identity, IDENTITY_BYTES),
        check.integer("num_tokens", slot.num_tokens, 1, convert.MAX_TOKENS),
        check.integer("num_bytes", slot.num_bytes, 1, _INT63),
    )


def _commit_from_proto(commit: wire.Commit) -> EmbeddingCommitted | KvCommitted:
    ref = convert.ref_from_proto(commit.ref)
    generation = check.integer("generation", commit.generation, 0, _INT64)
    capability = convert.capability_from_proto(commit.capability)
    match commit.WhichOneof("kind"):
        case "embedding":
            embedding = commit.embedding
            return EmbeddingCommitted(
                ref,
                check.integer("item_index", embedding.item_index, 0, convert.MAX_ITEMS - 1),
                embedding.slot_id,
                generation,
                capability,
                check.integer("num_bytes", embedding.num_bytes, 1, _INT63),
                embedding.checksum,
                convert.source_from_proto(embedding.source),
            )
        case "kv":
            kv = commit.kv
            check.present(kv, "first_token")
            return KvCommitted(
                ref,
                check.name("grant_id", kv.grant_id),
                generation,
                capability,
                check.integer("num_tokens", kv.num_tokens, 1, 2 * convert.MAX_TOKENS),
                check.integer("num_bytes", kv.num_bytes, 1, _INT63),
                convert.token_from_proto(kv.first_token),
                check.integer("position_delta", kv.position_delta, -2 * convert.MAX_TOKENS, 2 * convert.MAX_TOKENS),
                kv.checksum if kv.HasField("checksum") else None,
            )
    raise InvalidRequest("a commit must name an embedding or a grant")


# --- answers ---------------------------------------------------------------------------------------------------------


def answer_to_frame(sequence: int, answer: Answer | TriptychError) -> wire.SessionResponse:
    match answer:
        case SlotGrant():
            grant = wire.SlotGrant(
                slot_id=answer.slot_id,
                offset=answer.offset,
                num_bytes=answer.num_bytes,
                generation=answer.generation,
                capability=answer.capability,
            )
            return wire.SessionResponse(sequence=sequence, slot_grant=grant)
        case HaveIt():
            have_it = wire.HaveIt(source=convert.source_to_proto(answer.source))
            return wire.SessionResponse(sequence=sequence, have_it=have_it)
        case Bound():
            groups = [convert.group_to_proto(group) for group in answer.groups]
            bound = wire.Bound(generation=answer.generation, groups=groups, num_held_tokens=answer.num_held_tokens)
            return wire.SessionResponse(sequence=sequence, bound=bound)
        case Acknowledged():
            return wire.SessionResponse(sequence=sequence, ack=wire.Ack())
        case TriptychError():
            return wire.SessionResponse(sequence=sequence, refused=wire.Refused(error=detail_from_error(answer)))


def answer_from_frame(frame: wire.SessionResponse) -> Answer | TriptychError:
    """Anything but a hello_ack. A `refused` is answered as the error it carries, not raised."""
    match frame.WhichOneof("kind"):
        case "slot_grant":
            grant = frame.slot_grant
            return SlotGrant(
                grant.slot_id,
                check.integer("offset", grant.offset, 0, _INT63),
                check.integer("num_bytes", grant.num_bytes, 1, _INT63),
                grant.generation,
                convert.capability_from_proto(grant.capability),
            )
        case "have_it":
            return HaveIt(convert.source_from_proto(frame.have_it.source))
        case "bound":
            bound = frame.bound
            num_held = check.integer("num_held_tokens", bound.num_held_tokens, 0, 2 * convert.MAX_TOKENS)
            return Bound(bound.generation, convert.groups_from_proto(bound.groups), num_held)
        case "ack":
            return Acknowledged()
        case "refused":
            return error_from_detail(frame.refused.error)
    raise InvalidRequest("the answer is empty, or of a kind that is not known here")
