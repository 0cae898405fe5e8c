"""Single flight at an encoder: one computation for all who wait, whoever of them leaves."""

from __future__ import annotations

import asyncio
import dataclasses
import io
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from triptych.core.clock import SystemClock
from triptych.core.errors import Aborted, MediaInvalid, MediaMismatch, PeerLost, TriptychError
from triptych.core.plan import EmbeddingSource, Grid, Item, Modality, TokenRange
from triptych.core.timeline import Timeline
from triptych.engine.delivery import Written
from triptych.engine.encoder import EncodeEngine
from triptych.media.frames import Target
from triptych.media.picture import decode_picture, fit
from triptych.media.process import Decoded
from triptych.mm.item import MultimodalDataItem, received_item
from triptych.stages import embeddings
from triptych.stages.embeddings import EmbeddingSupply
from triptych.stages.encode_room import EncodeRoom

ROW = 8


class FakeVision:
    """A tower whose rows say which picture they are of: the colour of its first pixel."""

    dtype = torch.float32
    device = torch.device("cpu")
    row_elements = ROW
    patch_elements = 3
    num_parameters = 10

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.fails = False

    def target(self, grid: Grid) -> Target:
        return Target(grid.w, grid.h, Image.Resampling.BICUBIC)

    def patches(self, picture: npt.NDArray[np.uint8]) -> torch.Tensor:
        return torch.full((4, 3), float(picture[0, 0, 0]))

    def encode(self, pixels: list[torch.Tensor], grids: list[Grid]) -> list[torch.Tensor]:
        if self.fails:
            raise RuntimeError("a bug")
        self.batches.append(len(pixels))
        return [each[:1, :1].expand(1, ROW) for each in pixels]


class Here:
    """Decodes where it is asked."""

    def submit(self, media: bytes, target: Target) -> Future[Decoded]:
        future: Future[Decoded] = Future()
        try:
            image = decode_picture(media, 10**6)
            future.set_result(Decoded(fit(image, target), *image.size))
        except MediaInvalid as error:
            future.set_exception(error)
        return future


class Encoder:
    def __init__(self, cache_bytes: int = 10_000, room_patches: int = 1000) -> None:
        self.part = FakeVision()
        self.clock = SystemClock()
        self.engine = EncodeEngine(self.part, 1000, 8, self.clock)
        self.room = EncodeRoom(room_patches, self.clock)
        self.supply = EmbeddingSupply(self.engine, Here(), lambda *_: Grid(1, 2, 2), cache_bytes, self.room, self.clock)
        self.timeline = Timeline("encoder", "e", self.clock)

    def get(
        self, red: int, fetch: Any = None, item: Item | None = None, index: int = 0, slot: Slot | None = None
    ) -> asyncio.Task[Any]:
        """A caller that asks for the picture of that colour, and may have a slot for it."""
        wanted = item or picture_item(red)
        bring = fetch or Fetch(red)
        bring.item = wanted
        return asyncio.ensure_future(self.supply.get(wanted, index, bring, self.timeline, slot))


class Slot:
    """Takes rows as a slot's writer does; one that was revoked takes none."""

    def __init__(self, is_revoked: bool = False) -> None:
        self.is_revoked = is_revoked
        self.written: list[list[list[float]]] = []

    def write(self, rows: torch.Tensor) -> bool:
        if not self.is_revoked:
            self.written.append(rows.tolist())
        return not self.is_revoked


class Fetch:
    """Brings the media when told to, or fails."""

    item: Item

    def __init__(self, red: int, gate: asyncio.Event | None = None, error: Exception | None = None) -> None:
        self.media = png(red)
        self.gate = gate
        self.error = error
        self.count = 0

    async def __call__(self) -> MultimodalDataItem:
        self.count += 1
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return received_item(dataclasses.replace(self.item, media_bytes=len(self.media)), self.media)


def png(red: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (4, 4), (red, 0, 0)).save(out, format="PNG")
    return out.getvalue()


def picture_item(red: int, num_tokens: int = 1, grid: Grid = Grid(1, 2, 2)) -> Item:  # noqa: B008 - frozen
    return Item(Modality.IMAGE, bytes([red]) * 32, num_tokens, (TokenRange(0, 0, num_tokens),), grid)


@pytest.fixture
def encoder() -> Iterator[Encoder]:
    made = Encoder()
    made.engine.start()
    yield made
    made.engine.stop()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_first_computes_and_the_next_finds_it_cached(encoder: Encoder) -> None:
    rows, source = await encoder.get(7)
    assert rows.tolist() == [[7.0] * ROW]
    assert source is EmbeddingSource.REMOTE
    fetch = Fetch(7)
    again, source = await encoder.get(7, fetch)
    assert torch.equal(again, rows)
    assert source is EmbeddingSource.CACHE
    assert fetch.count == 0


async def test_those_who_come_meanwhile_wait_for_the_one_computation(encoder: Encoder) -> None:
    gate = asyncio.Event()
    leader = encoder.get(7, Fetch(7, gate))
    await settle()
    joined = [Fetch(7) for _ in range(5)]
    others = [encoder.get(7, fetch) for fetch in joined]
    await settle()
    gate.set()
    results = await asyncio.gather(leader, *others)
    assert all(rows.tolist() == [[7.0] * ROW] for rows, _ in results)
    assert [source for _, source in results[1:]] == [EmbeddingSource.CACHE] * 5
    assert sum(encoder.part.batches) == 1
    assert sum(fetch.count for fetch in joined) == 0


async def test_pictures_that_wait_together_share_a_pass(encoder: Encoder) -> None:
    results = await asyncio.gather(*(encoder.get(red) for red in range(1, 7)))
    assert [rows[0, 0].item() for rows, _ in results] == [1, 2, 3, 4, 5, 6]
    assert sum(encoder.part.batches) == 6


@pytest.mark.parametrize("leaves", ["cancelled", "failed"])
async def test_when_the_leader_leaves_before_it_has_the_media_another_takes_over(encoder: Encoder, leaves: str) -> None:
    gate = asyncio.Event()
    leader = encoder.get(7, Fetch(7, gate, PeerLost("the router went away")))
    await settle()
    fetches = [Fetch(7), Fetch(7)]
    others = [encoder.get(7, fetch) for fetch in fetches]
    await settle()
    if leaves == "cancelled":
        leader.cancel()
    else:
        gate.set()
    results = await asyncio.gather(*others)
    assert all(rows.tolist() == [[7.0] * ROW] for rows, _ in results)
    assert sum(fetch.count for fetch in fetches) == 1
    outcome = (await asyncio.gather(leader, return_exceptions=True))[0]
    assert isinstance(outcome, asyncio.CancelledError if leaves == "cancelled" else PeerLost)


async def test_when_the_leader_leaves_later_the_others_still_get_it(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(picture: npt.NDArray[np.uint8]) -> torch.Tensor:
        loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(5)
        return FakeVision.patches(encoder.part, picture)

    monkeypatch.setattr(encoder.part, "patches", slow)
    leader = encoder.get(7)
    await started.wait()
    other = encoder.get(7, fetch := Fetch(7))
    await settle()
    leader.cancel()
    await settle()
    go_on.set()
    rows, _ = await other
    assert rows.tolist() == [[7.0] * ROW]
    assert fetch.count == 0


async def test_when_everybody_leaves_the_computation_ends_and_the_next_begins_anew(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[Future[Any]] = []
    submitted = asyncio.Event()

    def submit(*_: Any) -> Future[Any]:
        waits.append(Future())
        submitted.set()
        return waits[0]

    with monkeypatch.context() as patched:
        patched.setattr(encoder.engine, "submit", submit)
        callers = [encoder.get(7), encoder.get(7)]
        await submitted.wait()
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        await settle()
        assert waits[0].cancelled()
        assert not encoder.supply._flights
    rows, source = await encoder.get(7)
    assert rows.tolist() == [[7.0] * ROW]
    assert source is EmbeddingSource.REMOTE


@pytest.mark.parametrize(
    ("item", "media", "error"),
    [
        (picture_item(7), b"no picture", MediaInvalid),
        (picture_item(7, grid=Grid(1, 2, 4)), png(7), MediaMismatch),
        (picture_item(7, num_tokens=2), png(7), MediaMismatch),
    ],
)
async def test_a_failure_reaches_all_who_wait_and_is_not_cached(
    encoder: Encoder, item: Item, media: bytes, error: type[TriptychError]
) -> None:
    gate = asyncio.Event()
    fetch = Fetch(7, gate)
    fetch.media = media
    callers = [encoder.get(7, fetch, item), encoder.get(7, fetch, item)]
    await settle()
    gate.set()
    outcomes = await asyncio.gather(*callers, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [error, error]
    assert not encoder.supply._flights
    rows, _ = await encoder.get(7)
    assert rows.tolist() == [[7.0] * ROW]


async def test_a_bug_in_the_tower_is_an_error_that_tells_nothing_and_the_next_pass_works(encoder: Encoder) -> None:
    encoder.part.fails = True
    with pytest.raises(TriptychError) as caught:
        await encoder.get(7)
    assert "bug" not in str(caught.value)
    encoder.part.fails = False
    assert (await encoder.get(7))[0].tolist() == [[7.0] * ROW]


async def test_a_cache_of_no_bytes_still_serves() -> None:
    encoder = Encoder(cache_bytes=0)
    encoder.engine.start()
    for _ in range(2):
        rows, source = await encoder.get(7)
        assert rows.tolist() == [[7.0] * ROW]
        assert source is EmbeddingSource.REMOTE
    encoder.engine.stop()


# --- written by the pass itself ---------------------------------------------------------------------------------------


def rows_of(red: int) -> list[list[float]]:
    return [[float(red)] * ROW]


async def test_the_pass_writes_to_all_who_wait_and_the_cache_keeps_a_copy_of_its_own(encoder: Encoder) -> None:
    gate, slots = asyncio.Event(), [Slot() for _ in range(3)]
    callers = [encoder.get(7, Fetch(7, gate), slot=slot) for slot in slots]
    without = encoder.get(7, Fetch(7, gate))
    await settle()
    gate.set()
    assert all(isinstance(rows, Written) for rows, _ in await asyncio.gather(*callers))
    assert (await without)[0].tolist() == rows_of(7)
    assert [slot.written for slot in slots] == [[rows_of(7)]] * 3
    assert encoder.part.batches == [1]
    (passed,) = [event for event in encoder.timeline.events if event.event == "encode"]
    assert {rows.start_ns for rows, _ in await asyncio.gather(*callers)} == {passed.end_ns}, "no time is lost between"
    again, source = await encoder.get(7, slot=(cached := Slot()))
    assert again.tolist() == rows_of(7) and source is EmbeddingSource.CACHE
    assert not cached.written, "what is cached is written by who asked"
    assert again.untyped_storage().nbytes() == 4 * ROW


@pytest.mark.parametrize("with_slot", [True, False])
async def test_without_a_cache_rows_are_not_copied(with_slot: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those who have no slot send them from the memory of the pass."""
    encoder, passed = Encoder(cache_bytes=0), torch.full((1, ROW), 7.0)
    monkeypatch.setattr(encoder.part, "encode", lambda *_: [passed])
    encoder.engine.start()
    try:
        rows, _ = await encoder.get(7, slot=Slot() if with_slot else None)
        assert isinstance(rows, Written) is with_slot
        assert with_slot or rows.data_ptr() == passed.data_ptr()
        await settle()
        assert not encoder.supply._flights
    finally:
        encoder.engine.stop()


@pytest.mark.parametrize("cache_bytes", [0, 10_000])
async def test_a_slot_that_was_revoked_or_left_is_not_written_and_the_others_are(cache_bytes: int) -> None:
    encoder = Encoder(cache_bytes)
    gate, revoked, left, taking = asyncio.Event(), Slot(is_revoked=True), Slot(), Slot()
    leader = encoder.get(7, Fetch(7, gate), slot=taking)
    await settle()
    first, second = encoder.get(7, slot=revoked), encoder.get(7, slot=left)
    await settle()
    second.cancel()
    await settle()
    gate.set()
    encoder.engine.start()
    try:
        assert isinstance((await leader)[0], Written)
        assert (await first)[0].tolist() == rows_of(7)
        assert (taking.written, revoked.written, left.written) == ([rows_of(7)], [], [])
    finally:
        encoder.engine.stop()


async def test_those_with_slots_go_on_while_the_copy_for_the_cache_is_made(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, go_on = asyncio.get_running_loop(), asyncio.Event()

    def slow(rows: torch.Tensor) -> torch.Tensor:
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(5)
        return rows.clone()

    monkeypatch.setattr(embeddings, "own_rows", slow)
    monkeypatch.setattr(embeddings, "INLINE_COPY_BYTES", 0)
    rows, _ = await asyncio.wait_for(encoder.get(7, slot=Slot()), 5)
    assert isinstance(rows, Written)
    joined = encoder.get(7, fetch := Fetch(7), slot=Slot())
    await settle()
    assert not joined.done()
    go_on.set()
    assert (await joined)[0].tolist() == rows_of(7)
    assert (fetch.count, encoder.part.batches) == (0, [1])
    assert (await encoder.get(7))[1] is EmbeddingSource.CACHE, "the last to leave took the copy down"


async def test_rows_that_have_no_room_on_the_host_fail_those_who_need_them_there(
    encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, slot = asyncio.Event(), Slot()

    def no_room(rows: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(embeddings, "own_rows", no_room)
        leader = encoder.get(7, Fetch(7, gate), slot=slot)
        await settle()
        other = encoder.get(7)
        await settle()
        gate.set()
        assert isinstance((await leader)[0], Written)
        with pytest.raises(RuntimeError):
            await other
    assert slot.written == [rows_of(7)] and not encoder.supply._flights
    assert (await encoder.get(7))[0].tolist() == rows_of(7)


# --- room for what is fetched and decoded -----------------------------------------------------------------------------


async def test_what_finds_no_room_is_not_fetched_and_the_short_go_first() -> None:
    encoder = Encoder(room_patches=8)
    encoder.engine.start()
    try:
        gate = asyncio.Event()
        first = encoder.get(1, Fetch(1, gate))  # 4 patches
        await settle()
        order: list[int] = []

        async def ask(red: int, patches: int) -> None:
            fetch = Fetch(red, gate)
            task = encoder.get(red, fetch, picture_item(red, grid=Grid(1, 2, patches // 2)))
            fetches[red] = fetch
            with suppress(MediaMismatch):
                await task
            order.append(red)

        fetches: dict[int, Fetch] = {}
        others = [asyncio.ensure_future(ask(red, patches)) for red, patches in ((2, 12), (3, 6), (4, 4))]
        await settle()
        assert [fetches[red].count for red in (2, 3, 4)] == [0, 0, 1]  # 4 and 4 fill the room
        assert encoder.room.num_waiting == 2
        gate.set()
        await asyncio.gather(first, *others)
        assert order == [4, 3, 2]  # one larger than the room has it to itself
        assert encoder.room.is_empty and not encoder.room.num_waiting
    finally:
        encoder.engine.stop()


@pytest.mark.parametrize("leaves", ["while it waits for room", "while it is fetched", "while it is encoded"])
async def test_room_is_given_back_whenever_a_caller_leaves(leaves: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = Encoder(room_patches=4)
    gate = asyncio.Event()
    holder = encoder.get(1, Fetch(1, gate))
    await settle()
    if leaves == "while it waits for room":
        leaver = encoder.get(2)
        await settle()
        assert encoder.room.num_waiting == 1
    else:
        leaver = holder
        if leaves == "while it is encoded":  # the engine has not started
            gate.set()
            await asyncio.sleep(0.05)
    leaver.cancel()
    await asyncio.gather(leaver, return_exceptions=True)
    gate.set()
    encoder.engine.start()
    try:
        assert (await asyncio.wait_for(encoder.get(3), 5))[0][0, 0] == 3
        await asyncio.gather(holder, return_exceptions=True)
        assert encoder.room.is_empty and not encoder.room.num_waiting
    finally:
        encoder.engine.stop()


async def test_two_that_leave_at_once_harm_nobody() -> None:
    """Room is given while the next in line has been cancelled and does not know it yet."""
    encoder = Encoder(room_patches=4)
    gate = asyncio.Event()
    holder, next_one, last = encoder.get(1, Fetch(1, gate)), encoder.get(2), encoder.get(3)
    await settle()
    encoder.engine.start()
    try:
        next_one.cancel()
        holder.cancel()
        assert (await asyncio.wait_for(last, 5))[0][0, 0] == 3
        await asyncio.gather(holder, next_one, return_exceptions=True)
        await settle()
        assert encoder.room.is_empty and not encoder.room.num_waiting
    finally:
        encoder.engine.stop()


# --- the engine's end -------------------------------------------------------------------------------------------------


def test_a_stopping_engine_refuses_what_waits_and_what_comes_later() -> None:
    engine = Encoder().engine
    pixels, grid = torch.zeros(4, 3), Grid(1, 2, 2)
    waiting, gone = engine.submit(pixels, grid), engine.submit(pixels, grid)
    gone.cancel()
    engine._inbox.put(None)
    late = engine.submit(pixels, grid)
    engine.start()
    engine.stop()
    for future in (waiting, late, engine.submit(pixels, grid)):
        error = future.exception(5)
        assert error is None or isinstance(error, Aborted)
    assert isinstance(engine.submit(pixels, grid).exception(5), Aborted)
    assert gone.cancelled()
    assert not engine.is_progressing()


def test_a_pass_larger_than_the_budget_is_split_in_order() -> None:
    encoder = Encoder()
    encoder.engine = EncodeEngine(encoder.part, 8, 8, encoder.clock)  # type: ignore[arg-type]
    futures = [encoder.engine.submit(torch.full((4, 3), float(red)), Grid(1, 2, 2)) for red in range(5)]
    encoder.engine.start()
    assert [future.result(5).rows[0, 0].item() for future in futures] == [0, 1, 2, 3, 4]
    assert encoder.part.batches == [2, 2, 1]
    encoder.engine.stop()
