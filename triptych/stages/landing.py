"""The receiving end of embeddings at a prefill worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch

from triptych.core.errors import (
    DeadlineExceeded,
    EmbeddingMissing,
    Overloaded,
    StaleAttempt,
    TransferRefused,
    TriptychError,
)
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import EmbeddingSource
from triptych.engine.landed_cache import Content
from triptych.engine.loop import LanguageEngine
from triptych.stages.tasks import on_engine
from triptych.transport.device import DeviceError
from triptych.transport.layout import checksum64
from triptych.transport.slots import Slot
from triptych.transport.types import Arena, HaveIt, SlotGrant

PLAN_WAIT_S = 30.0
"""How long a slot request may wait for its plan to come."""

SHARED_WAIT_S = 5.0
"""How long a slot request may wait for what another encoder is writing for somebody else. Then its own is written."""

MAX_EXPECTED = 65_536
ONE_VISIT_BYTES = 1 << 19
"""An embedding of up to so many bytes is checked where it lands, on the engine's thread: some 30 us, where two further
changes of thread take longer."""


class EmbeddingLanding:
    """Implements `EmbeddingReceiver`. Slot requests that come before the plan is admitted wait in a bounded table.

    Runs on the event loop; slots themselves belong to the engine's thread.
    """

    def __init__(self, engine: LanguageEngine, arena: Arena, dtype: torch.dtype) -> None:
        self._engine = engine
        self._arena = arena
        self._dtype = dtype
        self._admissions: dict[AttemptRef, asyncio.Future[None]] = {}
        self._waiters: dict[AttemptRef, int] = {}
        self._expected: set[AttemptRef] = set()
        self._ended: dict[AttemptRef, None] = {}

    @property
    def arena(self) -> Arena:
        return self._arena

    def expect(self, ref: AttemptRef) -> None:
        """The plan is here; its reservation may take a while."""
        self._expected.add(ref)
        self._admission(ref)

    def admitted(self, ref: AttemptRef) -> None:
        future = self._admission(ref)
        if not future.done():
            future.set_result(None)

    def forget(self, ref: AttemptRef) -> None:
        """The call ended: whoever still waits for it is refused."""
        self._expected.discard(ref)
        future = self._admissions.pop(ref, None)
        if future is not None and not future.done():
            future.set_exception(StaleAttempt("this attempt has ended"))
            future.exception()  # nobody may be waiting
        self._ended[ref] = None
        if len(self._ended) > MAX_EXPECTED:
            del self._ended[next(iter(self._ended))]

    async def request_slot(
        self, peer: WorkerRef, ref: AttemptRef, item_index: int, identity: bytes, num_tokens: int, num_bytes: int
    ) -> SlotGrant | HaveIt:
        if ref in self._ended:
            raise StaleAttempt("this attempt has ended")
        await self._wait_admitted(ref)
        hand = partial(self._hand, peer, ref, item_index, identity, num_tokens, num_bytes)
        give_up_at_s = asyncio.get_running_loop().time() + SHARED_WAIT_S
        while True:
            changed = asyncio.Event()
            answer = await on_engine(self._engine.call(partial(hand, _waker(changed))))
            if answer is not None:
                return answer
            try:
                # Only here: the engine's own answer, however late, may be a slot that is this peer's from then on.
                async with asyncio.timeout_at(give_up_at_s):
                    await changed.wait()
            except TimeoutError:
                break
        answer = await on_engine(self._engine.call(partial(hand, None)))
        assert answer is not None
        return answer

    async def commit_embedding(
        self,
        peer: WorkerRef,
        ref: AttemptRef,
        item_index: int,
        slot_id: int,
        generation: int,
        capability: bytes,
        num_bytes: int,
        checksum: int,
        source: EmbeddingSource,
    ) -> None:
        engine = self._engine

        def check() -> Slot:
            slot = engine.landing.check(ref, item_index, peer, slot_id, generation, capability)
            if slot.num_bytes != num_bytes:
                raise TransferRefused("the commit has another length than the slot")
            return slot

        def land(landed: torch.Tensor) -> None:
            check()  # the slot may have changed hands while its bytes were being checked
            self._land(ref, item_index, landed, source)

        def land_at_once() -> None:
            view = self._view(check())
            _check_bytes(view, checksum)
            self._land(ref, item_index, torch.frombuffer(view, dtype=torch.uint8), source)

        try:
            if num_bytes <= ONE_VISIT_BYTES and not self._is_on_device(peer):
                await on_engine(engine.call(land_at_once))
            else:
                slot = await on_engine(engine.call(check))
                landed = await self._checked(peer, slot, checksum)
                await on_engine(engine.call(partial(land, landed)))
        except TriptychError:
            engine.post(partial(engine.landing.writer_done_with, peer, slot_id))
            raise

    async def abort(self, peer: WorkerRef, ref: AttemptRef, reason: str) -> None:
        await on_engine(self._engine.call(partial(self._engine.landing.writer_finished, peer, ref)))

    async def peer_lost(self, peer: WorkerRef) -> None:
        await on_engine(self._engine.call(partial(self._fail_owed, peer)))

    async def _wait_admitted(self, ref: AttemptRef) -> None:
        """Until the plan has its reservation. The sender's own deadline bounds the wait; a plan that does not even come
        is given up here."""
        admission = self._admission(ref)
        self._waiters[ref] = self._waiters.get(ref, 0) + 1
        try:
            while True:
                try:
                    async with asyncio.timeout(PLAN_WAIT_S):
                        return await asyncio.shield(admission)
                except TimeoutError:
                    if ref not in self._expected:
                        raise DeadlineExceeded("prefill was never told of this request") from None
        finally:
            self._leave(ref)

    def _leave(self, ref: AttemptRef) -> None:
        """The last one who waited for a plan that has not come takes its entry along."""
        self._waiters[ref] -= 1
        if self._waiters[ref] == 0:
            del self._waiters[ref]
            if ref not in self._expected:
                self._admissions.pop(ref, None)

    def _admission(self, ref: AttemptRef) -> asyncio.Future[None]:
        future = self._admissions.get(ref)
        if future is None:
            if len(self._admissions) >= MAX_EXPECTED:
                raise Overloaded("too many requests wait at this prefill worker; try again later")
            future = self._admissions[ref] = asyncio.get_running_loop().create_future()
        return future

    def _hand(
        self,
        peer: WorkerRef,
        ref: AttemptRef,
        item_index: int,
        identity: bytes,
        num_tokens: int,
        num_bytes: int,
        wake: Callable[[], None] | None,
    ) -> SlotGrant | HaveIt | None:
        """None where the same embedding is on its way for another: `wake` is called when to ask again. Without `wake`
        nothing is waited for."""
        sequence = self._engine.find(ref)
        if sequence is None:
            raise StaleAttempt("this attempt has ended")
        if item_index >= len(sequence.items):
            raise TransferRefused("the plan has no such item")
        pending = sequence.items[item_index]
        item = pending.item
        if item.identity != identity or item.num_tokens != num_tokens:
            raise TransferRefused("the item is not the one in the plan")
        if num_bytes != num_tokens * self._engine.limits.row_bytes:
            raise TransferRefused("the embedding has another size than the language model takes")
        if pending.source is not None:
            return HaveIt(pending.source)
        if wake is not None and self._engine.landing.is_coming(ref, item_index):
            self._engine.landing.wake_on_change(Content.of(item), wake)
            return None
        slot = self._engine.landing.hand(ref, item_index, peer)
        return SlotGrant(slot.slot_id, slot.offset, slot.num_bytes, slot.generation, slot.capability)

    def _is_on_device(self, peer: WorkerRef) -> bool:
        device = self._arena.device
        return device is not None and device.is_written_by(peer)

    def _view(self, slot: Slot) -> memoryview:
        return self._arena.buffer[slot.offset : slot.offset + slot.num_bytes]

    async def _checked(self, peer: WorkerRef, slot: Slot, checksum: int) -> torch.Tensor:
        """The slot where the peer wrote, uint8 (num_bytes,). Raises TransferRefused when that is not what it sent."""
        if not self._is_on_device(peer):
            view = self._view(slot)
            await asyncio.to_thread(_check_bytes, view, checksum)
            return torch.frombuffer(view, dtype=torch.uint8)
        device = self._arena.device
        assert device is not None
        try:
            view = await asyncio.to_thread(device.read, slot.offset, slot.num_bytes)
        except DeviceError as error:
            raise TransferRefused(f"the device memory of the slot cannot be read ({error})") from error
        await asyncio.to_thread(_check_bytes, view, checksum)
        return device.tensor[slot.offset : slot.offset + slot.num_bytes]

    def _land(self, ref: AttemptRef, item_index: int, landed: torch.Tensor, source: EmbeddingSource) -> None:
        sequence = self._engine.find(ref)
        if sequence is None:
            raise StaleAttempt("this attempt has ended")
        rows = landed.view(self._dtype).view(sequence.items[item_index].item.num_tokens, -1)
        self._engine.land(ref, item_index, rows, source)

    def _fail_owed(self, peer: WorkerRef) -> None:
        """An encoder died: the attempts it owed embeddings to end with a retriable error."""
        for ref in {ref for ref, _ in self._engine.landing.writer_finished(peer, None)}:
            self._engine.abort(ref, EmbeddingMissing("an encoder was lost while it worked for this request"))


def _waker(event: asyncio.Event) -> Callable[[], None]:
    """Sets the event from the engine's thread."""
    loop = asyncio.get_running_loop()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(event.set)

    return wake


def _check_bytes(view: memoryview, checksum: int) -> None:
    """Raises TransferRefused when the bytes in the slot are not the ones that were written."""
    if checksum64(view) != checksum:
        raise TransferRefused("the embedding's checksum is wrong")
