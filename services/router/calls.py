"""The router's side of the three gRPC calls, in domain values. Nothing here decides; `attempt.py` does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import grpc
from grpc.aio import EOF  # type: ignore[attr-defined]

from triptych.core.errors import (
    Aborted,
    InvalidRequest,
    MediaMismatch,
    PeerLost,
    StartupError,
    TriptychError,
    Unauthenticated,
)
from triptych.core.grant import Grant
from triptych.core.ids import AttemptRef
from triptych.core.plan import FinishReason, Item, Plan, Token, Usage
from triptych.core.timeline import TimelineEvent
from triptych.core.worker import WorkerInfo
from triptych.rpc import client, convert
from triptych.rpc.client import ChannelPool
from triptych.rpc.errors import ERROR_METADATA_KEY, error_from_rpc
from triptych.rpc.line_client import line_to
from triptych.rpc.line_frames import Method
from triptych.wire.v1 import common_pb2, decode_pb2, encoder_pb2, prefill_pb2

CHUNK_BYTES = 2**20
MAX_TIMELINE_EVENTS = 10_000

# What gRPC calls a connection that was reset under a call. A worker that fails by itself sends its error along.
_BROKEN_OFF = frozenset({grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE})

Value = TypeVar("Value")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Granted:
    grant: Grant


@dataclass(frozen=True, slots=True)
class Tokens:
    tokens: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Admitted:
    """Prefill has room for the prompt. `missing` are the items whose embeddings it waits for; None where it does not
    say."""

    cached_tokens: int
    missing: frozenset[int] | None = None

    def lacks(self, index: int, item: Item) -> bool:
        if self.missing is None:
            return item.end > self.cached_tokens
        return index in self.missing


@dataclass(frozen=True, slots=True)
class NeedItems:
    """Embeddings that were lost: these items must be encoded again."""

    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Retracted:
    """The answer lost its place: what comes last of this call."""

    num_tokens: int
    timeline: tuple[TimelineEvent, ...] = ()


@dataclass(frozen=True, slots=True)
class StageDone:
    """The last message of a call. `finish_reason` is None when the answer goes on at another stage."""

    timeline: tuple[TimelineEvent, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None


class CutOff(PeerLost):
    """A worker that had answered this call is gone: its process, its host or the way there."""


DecodeEvent = Granted | Tokens | Retracted | StageDone
PrefillEvent = Admitted | NeedItems | Tokens | StageDone


class GenerateCall:
    """Decode.Generate. Whoever opened it cancels it; that frees the grant."""

    def __init__(
        self, channels: ChannelPool, worker: WorkerInfo, ref: AttemptRef, plan: Plan, timeout_s: float
    ) -> None:
        self.worker = worker
        request = decode_pb2.GenerateRequest(ref=convert.ref_to_proto(ref), plan=convert.plan_to_proto(plan))
        line = line_to(channels, worker)
        self._call: Any = (
            client.decode_stub(channels, worker).Generate(request, timeout=timeout_s)
            if line is None
            else line.call(Method.GENERATE, request, decode_pb2.GenerateResponse.FromString, timeout_s)
        )
        self._messages = _Messages(self._call)

    async def granted(self) -> Grant:
        """The first message. Raises NoRoom, RequestTooLarge, PeerLost and whatever else the worker says."""
        first = await self._messages.next(_decode_event)
        if not isinstance(first, Granted):
            raise TriptychError("a decode worker answered without a grant")
        return first.grant

    async def events(self) -> AsyncGenerator[DecodeEvent, None]:
        """What follows the grant. Raises PeerLost when the stream breaks off."""
        while True:
            event = await self._messages.next(_decode_event)
            yield event
            if isinstance(event, StageDone):
                return

    def cancel(self) -> None:
        self._call.cancel()


async def prefill_events(
    channels: ChannelPool, worker: WorkerInfo, ref: AttemptRef, plan: Plan, grant: Grant, timeout_s: float
) -> AsyncGenerator[PrefillEvent, None]:
    """Prefill.Prefill, up to its StageDone. Closing the iterator cancels the call."""
    request = prefill_pb2.PrefillRequest(
        ref=convert.ref_to_proto(ref), plan=convert.plan_to_proto(plan), grant=convert.grant_to_proto(grant)
    )
    line = line_to(channels, worker)
    call: Any = (
        client.prefill_stub(channels, worker).Prefill(request, timeout=timeout_s)
        if line is None
        else line.call(Method.PREFILL, request, prefill_pb2.PrefillResponse.FromString, timeout_s)
    )
    messages = _Messages(call)
    try:
        while True:
            event = await messages.next(_prefill_event)
            yield event
            if isinstance(event, StageDone):
                return
    finally:
        call.cancel()


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """Items for one encoder, with the encoded media of each, by index in the plan."""

    ref: AttemptRef
    prefill: WorkerInfo
    items: Mapping[int, Item]
    media: Mapping[int, bytes]
    model_fingerprint: bytes
    cache_salt: bytes = b""


async def encode(channels: ChannelPool, worker: WorkerInfo, job: EncodeJob, timeout_s: float) -> StageDone:
    """Encoder.Encode: sends the bytes that the encoder asks for. Returns when all items have landed at prefill."""
    # Without a request iterator, which the stub's type knows nothing of: requests are written one by one.
    call = cast(Any, client.encoder_stub(channels, worker)).Encode(timeout=timeout_s)
    messages = _Messages(call)
    try:
        await _write(call, encoder_pb2.EncodeRequest(start=_encode_start(job, timeout_s)))
        while True:
            message = await messages.next_message()
            match message.WhichOneof("kind"):
                case "need_bytes":
                    await _send_media(call, job, message.need_bytes.item_index)
                case "encode_done":
                    return StageDone(_timeline(message.encode_done.timeline))
    finally:
        call.cancel()


def _encode_start(job: EncodeJob, timeout_s: float) -> encoder_pb2.EncodeStart:
    return encoder_pb2.EncodeStart(
        ref=convert.ref_to_proto(job.ref),
        prefill_worker_id=job.prefill.worker_id,
        prefill_epoch=job.prefill.epoch,
        items=[
            encoder_pb2.EncodeItem(item_index=index, item=convert.item_to_proto(item))
            for index, item in job.items.items()
        ],
        timeout_ms=convert.timeout_to_ms(timeout_s),
        model_fingerprint=job.model_fingerprint,
        cache_salt=job.cache_salt,
    )


async def _send_media(call: Any, job: EncodeJob, index: int) -> None:
    if index not in job.media:
        raise TriptychError("an encoder asked for an item that it was not given")
    media = memoryview(job.media[index])
    for offset in range(0, len(media), CHUNK_BYTES):
        data = bytes(media[offset : offset + CHUNK_BYTES])
        chunk = encoder_pb2.MediaChunk(item_index=index, offset=offset, data=data)
        await _write(call, encoder_pb2.EncodeRequest(chunk=chunk))


async def _write(call: Any, message: object) -> None:
    try:
        with _peer_errors():
            await call.write(message)
    except asyncio.InvalidStateError:
        return  # The call has ended already: the next read says why.


class _Messages:
    """What a worker sends on a call that must not end yet."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._has_answered = False

    async def next(self, translate: Callable[[Any], Value]) -> Value:
        message = await self.next_message()
        with _distrusted():
            return translate(message)

    async def next_message(self) -> Any:
        try:
            with _peer_errors():
                message = await self._call.read()
        except _BrokenOff as error:
            if self._has_answered:
                raise CutOff(error.message) from None
            raise
        if message is EOF:
            # An OK status here is the peer's fault too: it left out its last message.
            raise PeerLost("a worker ended a call too early")
        self._has_answered = True
        return message


class _BrokenOff(PeerLost):
    """A call ended without a word of the worker."""


@contextmanager
def _distrusted() -> Iterator[None]:
    """A malformed message of a worker is not the caller's bad request."""
    try:
        yield
    except (InvalidRequest, MediaMismatch) as error:
        raise TriptychError("a worker sent a message that is not valid") from error


@contextmanager
def _peer_errors() -> Iterator[None]:
    """What becomes of a call, as an error of ours. Only a cancellation that was meant for this task stays one: a task
    that ends cancelled without having been asked to ends unheard, and whoever waits for its answer waits on."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _peer_error(error) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        # The channel was closed under the call, as that of a worker that left the registry is.
        raise PeerLost("the connection to a worker was lost") from None


def _peer_error(error: grpc.aio.AioRpcError) -> TriptychError:
    """The worker's error; trouble between us and the worker is not the caller's to mend."""
    if error.code() in _BROKEN_OFF and not _has_detail(error):
        _log.debug("a call broke off", extra={"status": error.code().name, "reason": error.details()})
        return _BrokenOff("the connection to a worker was lost")
    found = error_from_rpc(error)
    if isinstance(found, (Unauthenticated, StartupError)):
        return TriptychError("a worker refused the router; its log has the reason")
    if isinstance(found, Aborted):
        # We did not ask for it: the worker is shutting down.
        return PeerLost("a worker gave the call up")
    return found


def _has_detail(error: grpc.aio.AioRpcError) -> bool:
    metadata: Any = error.trailing_metadata()
    return any(entry[0] == ERROR_METADATA_KEY for entry in metadata or ())


def _decode_event(message: decode_pb2.GenerateResponse) -> DecodeEvent:
    match message.WhichOneof("kind"):
        case "granted":
            return Granted(convert.grant_from_proto(message.granted))
        case "tokens":
            return Tokens(tuple(convert.token_from_proto(token) for token in message.tokens.tokens))
        case "retracted":
            return Retracted(message.retracted.num_tokens, _timeline(message.retracted.timeline))
        case "generate_done":
            done = message.generate_done
            reason = convert.finish_reason_from_proto(done.finish_reason)
            return StageDone(_timeline(done.timeline), reason, convert.usage_from_proto(done.usage))
    raise InvalidRequest("an empty message")


def _prefill_event(message: prefill_pb2.PrefillResponse) -> PrefillEvent:
    match message.WhichOneof("kind"):
        case "admitted":
            admitted = message.admitted
            missing = frozenset(admitted.missing.item_indices) if admitted.HasField("missing") else None
            return Admitted(admitted.cached_tokens, missing)
        case "need_items":
            return NeedItems(tuple(message.need_items.item_indices))
        case "first_token":
            return Tokens((convert.token_from_proto(message.first_token),))
        case "prefill_done":
            done = message.prefill_done
            reason = convert.optional_finish_reason_from_proto(done.finish_reason)
            return StageDone(_timeline(done.timeline), reason, convert.usage_from_proto(done.usage))
    raise InvalidRequest("an empty message")


def _timeline(events: Sequence[common_pb2.TimelineEvent]) -> tuple[TimelineEvent, ...]:
    with _distrusted():
        return tuple(convert.event_from_proto(event) for event in events[:MAX_TIMELINE_EVENTS])
