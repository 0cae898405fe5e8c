"""The encode stage: asks prefill for a landing slot, computes only what it must, writes and commits."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import grpc
import torch

from triptych.core.clock import Clock
from triptych.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MediaMismatch,
    PeerLost,
    ReceiverLost,
    RequestError,
    TransferRefused,
    TriptychError,
)
from triptych.core.expansion import check_own_ranges
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import EmbeddingSource, Item, ItemFormat, Modality
from triptych.core.timeline import Timeline
from triptych.engine.delivery import Written
from triptych.mm.item import MultimodalDataItem, received_item
from triptych.model.adapters.base import Adapter
from triptych.obs import metrics
from triptych.rpc import check, convert
from triptych.rpc.errors import AbortOnError
from triptych.stages.attempts import AttemptFence
from triptych.stages.embeddings import EmbeddingSupply
from triptych.stages.links import needs_receiver
from triptych.stages.tasks import Background
from triptych.transport.layout import checksum64
from triptych.transport.link import EmbeddingLink
from triptych.transport.names import INPROC
from triptych.transport.slot_writer import SlotWriter, size_bytes
from triptych.transport.types import HaveIt, SlotGrant
from triptych.wire.v1 import encoder_pb2 as pb
from triptych.wire.v1 import encoder_pb2_grpc

log = logging.getLogger(__name__)

MAX_CHUNK_BYTES = 1 << 20


class EmbeddingLinks(Protocol):
    async def embedding(self, worker: WorkerRef) -> EmbeddingLink:
        """A link to that prefill process. Raises PeerLost when it is not (any more) in the registry."""
        ...


class EncoderStage(encoder_pb2_grpc.EncoderServicer):
    """Serves Encode calls. Owns no state but the fence: the supply owns embeddings."""

    def __init__(
        self,
        supply: EmbeddingSupply,
        adapter: Adapter,
        worker: WorkerRef,
        links: EmbeddingLinks,
        clock: Clock,
        background: Background,
        max_media_bytes: int,
    ) -> None:
        self._supply = supply
        self._adapter = adapter
        self._worker = worker
        self._links = links
        self._clock = clock
        self._background = background
        self._max_media_bytes = max_media_bytes
        self._fence = AttemptFence()

    async def Encode(  # noqa: N802 - the name in the proto
        self, requests: AsyncIterator[pb.EncodeRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.EncodeResponse]:
        async with AbortOnError(context, "encoder"):
            start = await self._start_of(requests)
            run = _EncodeRun(self, start)
            try:
                async with asyncio.timeout(convert.timeout_from_ms(start.timeout_ms)):
                    async for response in run.responses(requests):
                        yield response
            except TimeoutError:
                raise DeadlineExceeded("the pictures were not encoded within the request's time") from None

    def check_item(self, item: Item) -> None:
        """What can be said before any byte has come. Raises InvalidRequest or MediaMismatch."""
        check_own_ranges(item, "the item")
        if item.modality is not Modality.IMAGE:
            raise InvalidRequest(f"{item.modality.value} input is not served yet")
        self._adapter.check_layout(item)
        if item.format is not ItemFormat.NORMAL:
            self._supply.check_announced(item)
        elif item.media_bytes > self._max_media_bytes:
            raise InvalidRequest(
                f"a picture of {item.media_bytes} bytes exceeds this encoder's limit of {self._max_media_bytes}"
            )

    def hold(self, item: Item, data: bytes, cache_salt: bytes) -> MultimodalDataItem:
        """The item with the data that came for it. Hashes them: not for the event loop.

        Raises MediaMismatch when the data are not those that the identity names, so that no cache keeps an embedding
        under a name that is not its own; InvalidRequest for a tensor that is none.
        """
        held = received_item(item, data)
        if not hmac.compare_digest(self._identity_of(held, cache_salt), item.identity):
            raise MediaMismatch("the bytes that came are not those that the item's identity names")
        return held

    def _identity_of(self, held: MultimodalDataItem, cache_salt: bytes) -> bytes:
        """What a caller's hash names can be a name of that caller's tenant only: the salt is in it, and the tag."""
        item, adapter = held.item, self._adapter
        if item.caller_hash:
            return adapter.caller_identity(item.modality, item.grid, item.num_tokens, item.caller_hash, cache_salt)
        if isinstance(held.data, bytes):
            return adapter.identity(item.modality, held.data, cache_salt)
        return adapter.tensor_identity(item.modality, item.format, item.grid, held.data, cache_salt)

    async def _start_of(self, requests: AsyncIterator[pb.EncodeRequest]) -> pb.EncodeStart:
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("kind") != "start":
            raise InvalidRequest("an Encode call begins with `start`")
        if first.start.model_fingerprint != self._adapter.fingerprint:
            raise TransferRefused("the request was made for another model than this worker serves")
        if not first.start.items:
            raise InvalidRequest("an Encode call needs at least one item")
        check.at_most("items", first.start.items, convert.MAX_ITEMS)
        if len({entry.item_index for entry in first.start.items}) != len(first.start.items):
            raise InvalidRequest("an Encode call names an item twice")
        self._fence.enter(convert.ref_from_proto(first.start.ref))
        return first.start


class _EncodeRun:
    """One Encode call: a task for each item, one reader of media chunks, answers in the order they come."""

    def __init__(self, stage: EncoderStage, start: pb.EncodeStart) -> None:
        self._stage = stage
        self._ref: AttemptRef = convert.ref_from_proto(start.ref)
        self._prefill = convert.worker_ref_from_proto(start.prefill_worker_id, start.prefill_epoch)
        self._items = {entry.item_index: convert.item_from_proto(entry.item) for entry in start.items}
        self._timeout_s = convert.timeout_from_ms(start.timeout_ms)
        self._timeline = Timeline("encoder", stage._worker.worker_id, stage._clock, self._ref.attempt)
        self._cache_salt = convert.cache_salt_from_proto(start.cache_salt)
        for index, item in self._items.items():
            with _named(index):
                stage.check_item(item)
        self._media = {index: _MediaBuffer(item) for index, item in self._items.items()}
        self._answers: asyncio.Queue[pb.EncodeResponse | TriptychError] = asyncio.Queue()

    async def responses(self, requests: AsyncIterator[pb.EncodeRequest]) -> AsyncIterator[pb.EncodeResponse]:
        with needs_receiver():
            link = await self._stage._links.embedding(self._prefill)
        tasks = [asyncio.create_task(self._read_media(requests))]
        tasks += [asyncio.create_task(self._encode(link, index, item)) for index, item in self._items.items()]
        is_complete = False
        try:
            unfinished = set(self._items)
            while unfinished:
                answer = await self._answers.get()
                if isinstance(answer, TriptychError):
                    raise answer
                yield answer
                unfinished.discard(answer.item_done.item_index if answer.HasField("item_done") else -1)
            is_complete = True
            events = [convert.event_to_proto(event) for event in self._timeline.events]
            yield pb.EncodeResponse(encode_done=pb.EncodeDone(timeline=events))
        finally:
            self._stage._background.start(self._end(link, tasks, is_complete))

    async def _end(self, link: EmbeddingLink, tasks: list[asyncio.Task[None]], is_complete: bool) -> None:
        """Only when no task can write any more does prefill hear that the call is over."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not is_complete:
            await link.abort(self._ref, None, "the encode call ended")

    async def _encode(self, link: EmbeddingLink, index: int, item: Item) -> None:
        try:
            with _named(index):
                answer = await self._encode_item(link, index, item)
            self._answers.put_nowait(answer)
        except TriptychError as error:
            self._answers.put_nowait(error)
        except Exception:
            log.exception("an item could not be encoded", extra={"request_id": self._ref.request_id})
            self._answers.put_nowait(TriptychError("the encoder met an internal error"))

    async def _encode_item(self, link: EmbeddingLink, index: int, item: Item) -> pb.EncodeResponse:
        start_ns = self._stage._clock.monotonic_ns()
        num_bytes = item.num_tokens * self._stage._supply.row_bytes
        try:
            slot = await link.request_slot(
                self._ref, index, item.identity, item.num_tokens, num_bytes, timeout_s=self._timeout_s
            )
        except PeerLost:  # here a deadline is the request's own: room may be long in coming
            raise ReceiverLost("the prefill worker was lost to the encoder") from None
        self._timeline.add("slot_wait", start_ns, item_index=index)
        if isinstance(slot, HaveIt):
            event = "radix_hit" if slot.source is EmbeddingSource.RADIX else "landed_hit"
            self._timeline.add(event, start_ns, source=slot.source, item_index=index)
            return self._item_done(index, slot.source, 0)
        await self._enter_flight(link, index, slot)
        try:
            return await self._deliver(link, index, item, slot)
        finally:
            link.in_flight.leave(slot.num_bytes)

    async def _enter_flight(self, link: EmbeddingLink, index: int, slot: SlotGrant) -> None:
        start_ns = self._stage._clock.monotonic_ns()
        with needs_receiver():
            had_to_wait = await link.in_flight.enter(slot.num_bytes)
        if had_to_wait:
            self._timeline.add("in_flight_wait", start_ns, item_index=index)

    async def _deliver(self, link: EmbeddingLink, index: int, item: Item, slot: SlotGrant) -> pb.EncodeResponse:
        writer = link.slot_writer(slot)
        rows, source = await self._stage._supply.get(
            item, index, lambda: self._fetch(index, item), self._timeline, writer
        )
        if source is EmbeddingSource.REMOTE and link.transport == INPROC:
            source = EmbeddingSource.LOCAL
        start_ns = rows.start_ns if isinstance(rows, Written) else self._stage._clock.monotonic_ns()
        with needs_receiver():
            checksum = await _written(link, slot, writer, rows)
            await link.commit_embedding(self._ref, index, slot, source, checksum)
        self._timeline.add("write", start_ns, num_bytes=slot.num_bytes, source=source, item_index=index)
        return self._item_done(index, source, slot.num_bytes)

    def _item_done(self, index: int, source: EmbeddingSource, num_bytes: int) -> pb.EncodeResponse:
        metrics.ENCODER_ITEMS.labels(source.value).inc()
        done = pb.ItemDone(item_index=index, source=convert.source_to_proto(source), num_bytes=num_bytes)
        return pb.EncodeResponse(item_done=done)

    async def _fetch(self, index: int, item: Item) -> MultimodalDataItem:
        if not item.media_bytes:
            raise InvalidRequest("the item is not known here, and no bytes were announced for it")
        if not self._media[index].is_wanted:
            self._media[index].is_wanted = True
            self._answers.put_nowait(pb.EncodeResponse(need_bytes=pb.NeedBytes(item_index=index)))
        data = await self._media[index].complete
        return await asyncio.to_thread(self._stage.hold, item, data, self._cache_salt)

    async def _read_media(self, requests: AsyncIterator[pb.EncodeRequest]) -> None:
        """Collects chunks until the router closes its side."""
        try:
            async for request in requests:
                if request.WhichOneof("kind") != "chunk" or request.chunk.item_index not in self._media:
                    raise InvalidRequest("only chunks of the call's items may follow `start`")
                self._media[request.chunk.item_index].add(request.chunk.offset, request.chunk.data)
        except TriptychError as error:
            self._answers.put_nowait(error)
            return
        if any(not buffer.complete.done() and buffer.is_wanted for buffer in self._media.values()):
            self._answers.put_nowait(PeerLost("the router stopped in the middle of a picture"))


async def _written(
    link: EmbeddingLink, slot: SlotGrant, writer: SlotWriter | None, rows: torch.Tensor | Written
) -> int:
    """Returns when the embedding is in the slot, with the checksum over it."""
    if isinstance(rows, Written):
        assert writer is not None, "only a writer could have written them"
        return await writer.finish()
    if size_bytes(rows) != slot.num_bytes:
        raise MediaMismatch("the picture's embedding has another length than the prompt")
    if writer is not None:
        if not writer.write(rows):
            raise PeerLost("the slot cannot be written to any more")
        return await writer.finish()
    data = rows.view(torch.uint8).numpy().data.cast("B")
    await link.write_slot(slot, data)
    return checksum64(data)


@contextmanager
def _named(index: int) -> Iterator[None]:
    """What is wrong with an item is told together with which one it is."""
    try:
        yield
    except RequestError as error:
        named = f"picture {index + 1} of the request: {error.message}"
        raise type(error)(named, param=error.param or "messages") from error


class _MediaBuffer:
    """Chunks of one item. `complete` resolves with all of its bytes."""

    def __init__(self, item: Item) -> None:
        self._expected = item.media_bytes
        self._data = bytearray()
        self.is_wanted = False
        self.complete: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def add(self, offset: int, data: bytes) -> None:
        """Raises InvalidRequest for a gap, an overlap, an oversized chunk or more bytes than were announced."""
        too_much = len(self._data) + len(data) > self._expected or len(data) > MAX_CHUNK_BYTES
        if offset != len(self._data) or not data or too_much or self.complete.done():
            raise InvalidRequest("a media chunk is out of order or too large")
        self._data += data
        if len(self._data) == self._expected:
            self.complete.set_result(bytes(self._data))
            self._data = bytearray()
