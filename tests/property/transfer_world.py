"""The receiving side of the data plane as it is, in a world where everything else is a model: processes that write
(by a mapping, or in frames), whose links break, who are killed or come late; and an engine that uses memory again at
once.

Real are the conversations, both landing tables, both allocators, the grants, the landings of frames. The truth is what
each grant's bytes must be: what can be seen of an embedding or of KV is all of that, or nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from triptych.core.errors import NoRoom, PeerLost, TriptychError
from triptych.core.grant import Grant
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.kv_format import KvDtype, KvTerms, PageFormat
from triptych.core.plan import EmbeddingSource, Grid, Token
from triptych.engine.landed_cache import Content
from triptych.engine.landing import LandingTable, Wanted
from triptych.kv.grants import GrantRecord, GrantTable
from triptych.kv.manager import CacheManager, SequencePages
from triptych.kv.pages import PageLayout
from triptych.stages.landing import EmbeddingLanding
from triptych.stages.poison import POISON_BYTE, poisoned_slots
from triptych.testing.fake_nixl import FakeNetwork, FakeNixl
from triptych.transport import frames
from triptych.transport.data_frame import BadFrame, DataHeader, PayloadKind, pack, unpack
from triptych.transport.landings import LandingSession
from triptych.transport.layout import checksum64
from triptych.transport.nixl_api import NixlError, NixlSource
from triptych.transport.nixl_carrier import cut_runs, page_runs
from triptych.transport.pages import scatter
from triptych.transport.receiver import Receivers
from triptych.transport.servicer import Conversation
from triptych.transport.session import Greeted, SenderSession
from triptych.transport.slots import SlotAllocator
from triptych.transport.types import (
    AbortAsked,
    Arena,
    ArenaKind,
    Asked,
    BindAsked,
    Bound,
    DataAddress,
    EmbeddingCommitted,
    Endpoint,
    KvCommitted,
    SlotAsked,
    SlotGrant,
)
from triptych.wire.v1 import transfer_pb2 as wire

ROW_BYTES = 32
ARENA_BYTES, CACHE_BYTES = 6 * 64, 2 * 64
NUM_PAGES, PAGE_TOKENS = 8, 4
PAGES = PageLayout(num_planes=2, cell_bytes=16, format=PageFormat(PAGE_TOKENS, KvDtype.FLOAT32))
LAYOUT = b"l" * 32
RECEIVER = WorkerRef("receiver", 1)
WAYS = ("shm", "nixl", "zmq-tcp")
TURNS = 25
"""Of the event loop, until everything that was asked has been carried out."""


def bytes_of(name: object, num_bytes: int) -> bytes:
    """What a grant's bytes must be: other ones for each name, and nowhere poison."""
    return bytes(1 + byte % 250 for byte in random.Random(str(name)).randbytes(num_bytes))


@dataclass
class Pending:
    item: Content
    rows: torch.Tensor | None = None
    source: EmbeddingSource | None = None


@dataclass
class Living:
    items: list[Pending]


class Engine:
    """What `EmbeddingLanding` needs of an engine, whose thread is this one."""

    def __init__(self, landing: LandingTable) -> None:
        self.landing = landing
        self.limits = SimpleNamespace(row_bytes=ROW_BYTES)
        self.living: dict[AttemptRef, Living] = {}
        self.forget: Callable[[AttemptRef], None] = lambda ref: None

    def call(self, action: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(action())
        except Exception as error:
            future.set_exception(error)
        return future

    def post(self, action: Callable[[], Any]) -> None:
        action()

    def find(self, ref: AttemptRef) -> Living | None:
        return self.living.get(ref)

    def land(self, ref: AttemptRef, item_index: int, rows: torch.Tensor, source: EmbeddingSource) -> None:
        for other, index in self.landing.landed(ref, item_index, rows):
            pending = self.living[other].items[index]
            pending.rows, pending.source = rows, source

    def abort(self, ref: AttemptRef, error: TriptychError | None = None) -> None:
        """Its time is over, its client has left, or who was to write for it is lost."""
        if self.living.pop(ref, None) is not None:
            self.landing.abandon(ref)
            self.forget(ref)


class PageLanding:
    """The half of the decode stage that senders meet."""

    def __init__(self, grants: GrantTable, arena: Arena) -> None:
        self.arena = arena
        self.grants = grants
        self.adopted: dict[str, SequencePages] = {}

    async def bind(self, peer: WorkerRef, ref: AttemptRef, grant_id: str, capability: bytes) -> Grant:
        return self.grants.grant_of(self.grants.bind(ref, grant_id, capability, peer))

    async def commit_kv(
        self,
        peer: WorkerRef,
        ref: AttemptRef,
        grant_id: str,
        generation: int,
        capability: bytes,
        num_tokens: int,
        num_bytes: int,
        first_token: Token,
        position_delta: int,
    ) -> None:
        self.adopted[grant_id] = self.grants.commit(ref, grant_id, generation, capability, peer)

    async def abort(self, peer: WorkerRef, ref: AttemptRef, grant_id: str | None, reason: str) -> None:
        self.grants.writer_finished(ref, grant_id, peer)

    async def peer_lost(self, peer: WorkerRef) -> None:
        self.grants.writer_lost(peer)


class Mappings:
    """Which peers have an arena mapped: what the kernel would know."""

    name = "triptych-test-0123456789abcdef"

    def __init__(self) -> None:
        self.living: set[int] = set()

    def is_mapped_as(self, mapping_id: int) -> bool:
        return mapping_id in self.living


class DataPort:
    """A data port without its socket."""

    address = DataAddress(port=1)

    def __init__(self) -> None:
        self.sessions: dict[int, LandingSession] = {}

    def open_session(self, session_id: int, curve_key: bytes) -> LandingSession:
        return self.sessions.setdefault(session_id, LandingSession(b"k" * 16))

    def close_session(self, session_id: int) -> None:
        session = self.sessions.pop(session_id, None)
        if session is not None:
            session.close()


@dataclass(eq=False)
class Held:
    """A grant as its writer remembers it, for ever. `is_closed`: it has said that it writes no more."""

    line: Line
    ref: AttemptRef
    key: int | str
    ticket: int
    grant: SlotGrant | Bound
    capability: bytes
    data: bytes
    num_sent: int = 0
    is_closed: bool = False

    @property
    def pages(self) -> list[int]:
        assert isinstance(self.grant, Bound)
        return [page for group in self.grant.groups for page in group.pages]


class Line:
    """One writer's session with one arena."""

    def __init__(self, world: World, writer: WorkerRef, way: str, kind: ArenaKind) -> None:
        self.world, self.writer, self.way, self.kind = world, writer, way, kind
        self.is_alive = True
        self.held: list[Held] = []
        self._asked: dict[int, Asked] = {}
        terms = KvTerms(PAGES.format) if kind is ArenaKind.KV else None
        self._sender = SenderSession(Endpoint(writer, "host", (way,)), RECEIVER, kind, LAYOUT, terms)
        nixl = FakeNixl(world.network)
        self._talk = Conversation(world.me, world.receivers, world.port, self._hear, nixl)  # type: ignore[arg-type]
        self._life = asyncio.create_task(self._talk.live())
        self._welcomed = False
        self.mapping_id = 0
        self._key = b""
        greeted = self._talk.take(self._sender.hello())
        assert isinstance(greeted, Greeted) and greeted.transport == way
        self._nixl: NixlSource | None = None
        self._welcoming = asyncio.create_task(self._welcome(greeted))

    async def _welcome(self, greeted: Greeted) -> None:
        self._talk.welcome(greeted, await self._talk.expose(greeted))

    @property
    def is_linked(self) -> bool:
        return self.is_alive and not self._talk.is_over

    @property
    def is_mapped(self) -> bool:
        return self.mapping_id in self.world.mappings.living

    def ask(self, asked: Asked) -> None:
        with suppress(PeerLost, NoRoom):
            sequence, frame = self._sender.ask(asked)
            self._asked[sequence] = asked
            self._talk.take(wire.SessionRequest.FromString(frame.SerializeToString()))

    def break_link(self) -> None:
        """The stream ends; what is mapped stays so, until the writer notices."""
        self._sender.close()
        self._talk.end()

    def unmap(self) -> None:
        self.world.mappings.living.discard(self.mapping_id)
        self.is_alive = False

    def kill(self) -> None:
        """The process is gone, and with it its mappings; frames of its may still be under way."""
        self.break_link()
        self.unmap()

    async def gone(self) -> None:
        self.kill()
        await self._life

    def write(self, held: Held, num_bytes: int) -> None:
        start, piece = held.num_sent, held.data[held.num_sent : held.num_sent + num_bytes]
        if self.way == "zmq-tcp":
            self.send(held, start, piece)
            held.num_sent += len(piece)
        elif self.way == "nixl" and self.is_alive and not held.is_closed:
            self.write_over_the_network(held, start, piece)
            held.num_sent += len(piece)
        elif self.is_mapped and not held.is_closed:
            self.world.write(held, start, piece)
            held.num_sent += len(piece)

    def write_over_the_network(self, held: Held, start: int, piece: bytes) -> None:
        """To where its former owner thinks that it may, as long as the receiver lets it in."""
        assert self._nixl is not None
        if isinstance(held.grant, SlotGrant):
            runs = np.array([[held.grant.offset, held.grant.num_bytes]])
        else:
            cells = [page_runs(PAGES, NUM_PAGES, [page]) for page in held.pages]
            runs = np.concatenate(cells)
        self._nixl.staging[: len(piece)] = piece
        with suppress(NixlError):
            if piece:
                self._nixl.write(0, cut_runs(runs, start, start + len(piece))).is_done()

    def send(self, held: Held, start: int, piece: bytes) -> None:
        """A frame, which finds its grant or not."""
        kind = PayloadKind.SLOT if self.kind is ArenaKind.EMBEDDING else PayloadKind.PAGES
        generation = held.grant.generation
        header = DataHeader(
            kind, self.mapping_id, self._key, held.ticket, held.capability, generation, start, len(piece)
        )
        session = self.world.port.sessions.get(self.mapping_id)
        if session is not None and piece:
            raw = pack(header, memoryview(piece))
            with suppress(BadFrame):
                session.take(unpack(memoryview(raw), memoryview(piece)), memoryview(piece))

    def commit(self, held: Held) -> None:
        is_whole = held.num_sent == len(held.data)
        if self.kind is ArenaKind.KV and self.way == "shm" and not is_whole:
            return  # such a commit would be a bug of ours: the thread that writes is the one that says so
        held.is_closed = True
        checksum = checksum64(held.data)
        if isinstance(held.grant, SlotGrant):
            assert isinstance(held.key, int)
            shown = (held.grant.slot_id, held.grant.generation, held.capability, len(held.data), checksum)
            self.ask(EmbeddingCommitted(held.ref, held.key, *shown, EmbeddingSource.REMOTE))
        else:
            assert isinstance(held.key, str)
            shown_kv = (held.grant.generation, held.capability, 1, len(held.data), Token(0, 1), 0)
            self.ask(KvCommitted(held.ref, held.key, *shown_kv, None if self.way == "shm" else checksum))

    def abort(self, held: Held) -> None:
        """It ends all that this line has of the attempt."""
        for each in self.held:
            each.is_closed |= each.ref == held.ref
        self.ask(AbortAsked(held.ref, None, "given up"))

    async def _hear(self, frame: wire.SessionResponse) -> None:
        if not self._welcomed:
            welcome = self._sender.welcome(frame)
            assert isinstance(welcome, frames.Welcome), welcome
            self._welcomed, self.mapping_id, self._key = True, welcome.mapping_id, welcome.data.session_key
            if self.way == "shm":
                self.world.mappings.living.add(self.mapping_id)
            if welcome.nixl is not None:
                self._nixl = FakeNixl(self.world.network).connect(welcome.nixl, self._sender.arena_bytes, ARENA_BYTES)
            return
        answered = self._sender.receive(frame)
        if answered is None or isinstance(answered.answer, TriptychError):
            return
        self._take(answered.sequence, self._asked.pop(answered.sequence), answered.answer)

    def _take(self, ticket: int, asked: Asked, answer: object) -> None:
        if isinstance(asked, SlotAsked) and isinstance(answer, SlotGrant):
            data = bytes_of(asked.identity, asked.num_bytes)
            self.held.append(Held(self, asked.ref, asked.item_index, ticket, answer, answer.capability, data))
        elif isinstance(asked, BindAsked) and isinstance(answer, Bound):
            num_bytes = sum(len(group.pages) for group in answer.groups) * PAGES.page_bytes
            data = bytes_of(asked.grant_id, num_bytes)
            self.held.append(Held(self, asked.ref, asked.grant_id, ticket, answer, asked.capability, data))


@dataclass(eq=False)
class Own:
    """Pages that the engine itself computes: nobody else writes there."""

    pages: SequencePages
    name: int


@dataclass
class World:
    """Owner of the receiver's memory, and of the truth about it."""

    mappings: Mappings = field(default_factory=Mappings)
    port: DataPort = field(default_factory=DataPort)
    network: FakeNetwork = field(default_factory=FakeNetwork)
    lines: list[Line] = field(default_factory=list)
    own: list[Own] = field(default_factory=list)
    granted: dict[str, GrantRecord] = field(default_factory=dict)
    serial: int = 0

    def __post_init__(self) -> None:
        self.arena = memoryview(bytearray(ARENA_BYTES))
        self.pool = np.full((PAGES.num_planes, NUM_PAGES, PAGES.cell_bytes), POISON_BYTE, dtype=np.uint8)
        self.book = SlotAllocator(ARENA_BYTES, 64, poisoned_slots(self.arena))
        self.table = LandingTable(self.book, CACHE_BYTES)
        self.manager = CacheManager(NUM_PAGES, PAGE_TOKENS, self._poison_pages)
        self.engine = Engine(self.table)
        shared = (LAYOUT, self.arena, self.mappings)
        landing_arena = Arena(ArenaKind.EMBEDDING, *shared, is_open=True)  # type: ignore[arg-type]
        pool_bytes = memoryview(self.pool.reshape(-1))  # type: ignore[arg-type]
        kv_arena = Arena(ArenaKind.KV, LAYOUT, pool_bytes, self.mappings, PAGES, is_open=True)  # type: ignore[arg-type]
        self.landing = EmbeddingLanding(self.engine, landing_arena, torch.uint8)  # type: ignore[arg-type]
        self.engine.forget = self.landing.forget
        self.kv = PageLanding(GrantTable(RECEIVER, self.manager), kv_arena)
        self.receivers = Receivers(self.landing, self.kv)
        self.me = Endpoint(RECEIVER, "host", WAYS)

    # --- what happens at the receiver ---

    def begin(self, wants: Sequence[tuple[object, int]]) -> AttemptRef | None:
        """A sequence that needs embeddings, by (name, rows); None where there is no room."""
        self.serial += 1
        ref = AttemptRef(f"req-{self.serial}")
        contents = [Content(str(name).encode().rjust(32, b"-"), rows, Grid(1, 1, rows)) for name, rows in wants]
        wanted = {index: Wanted(content, content.num_tokens * ROW_BYTES) for index, content in enumerate(contents)}
        if not self.table.try_reserve(ref, wanted):
            return None
        self.engine.living[ref] = Living([Pending(content) for content in contents])
        for index, pending in enumerate(self.engine.living[ref].items):
            pending.rows = self.table.rows(ref, index)
            pending.source = None if pending.rows is None else EmbeddingSource.CACHE
        self.landing.expect(ref)
        self.landing.admitted(ref)
        return ref

    def issue(self, num_pages: int) -> GrantRecord | None:
        self.serial += 1
        try:
            record = self.kv.grants.issue(AttemptRef(f"req-{self.serial}"), num_pages * PAGE_TOKENS)
        except NoRoom:
            return None
        self.granted[record.grant_id] = record
        return record

    def release_grant(self, grant_id: str) -> None:
        """The call ends: before its KV came, or after."""
        self.kv.grants.release(grant_id)
        pages = self.kv.adopted.pop(grant_id, None)
        if pages is not None:
            self.manager.release(pages)

    def compute(self, num_pages: int) -> Own | None:
        """A sequence of the engine's own, whose full pages others may find."""
        self.serial += 1
        ids = [self.serial] * (num_pages * PAGE_TOKENS + 1)
        pages = self.manager.reserve(b"", ids, num_pages * PAGE_TOKENS)
        if pages is None:
            return None
        own = Own(pages, self.serial)
        self.own.append(own)
        for page in pages.pages:
            self.pool[:, page] = np.frombuffer(self.page_of(page), np.uint8).reshape(PAGES.num_planes, -1)
        self.manager.share(pages, ids, (num_pages - 1) * PAGE_TOKENS)
        return own

    def finish(self, own: Own) -> None:
        self.own.remove(own)
        self.manager.release(own.pages)

    # --- memory ---

    @staticmethod
    def page_of(page: int) -> bytes:
        """What the engine itself writes to a page."""
        return bytes_of(f"page {page}", PAGES.page_bytes)

    def write(self, held: Held, start: int, piece: bytes) -> None:
        """By a mapping: wherever its former owner thinks that it may."""
        if isinstance(held.grant, SlotGrant):
            at = held.grant.offset + start
            self.arena[at : at + len(piece)] = piece
        else:
            scatter(self.pool, np.array(held.pages), start, np.frombuffer(piece, np.uint8))

    def _poison_pages(self, pages: Sequence[int]) -> None:
        self.pool[:, list(pages)] = POISON_BYTE

    # --- what always holds ---

    def check(self) -> None:
        self.table.check_integrity()
        self.manager.check_integrity()
        self._check_slots()
        self._check_pages()

    def _check_slots(self) -> None:
        entries = [*self.table._leased.values(), *self.table._cache._idle.values()]
        for entry in entries:
            expected = bytes_of(entry.content.identity, entry.content.num_tokens * ROW_BYTES)
            assert entry.rows.numpy().tobytes() == expected, "an embedding is seen that is not whole, or not its own"
        for start, length in zip(self.book._starts, self.book._lengths, strict=True):
            assert set(self.arena[start : start + length]) == {POISON_BYTE}, "somebody wrote to free bytes"

    def _check_pages(self) -> None:
        for grant_id, pages in self.kv.adopted.items():
            stream = self.pool[:, pages.pages].transpose(1, 0, 2).tobytes()
            assert stream == bytes_of(grant_id, len(stream)), "KV is seen that is not whole, or not its own"
        computed = {page for own in self.own for page in own.pages.pages} | {n.page for n in self.manager.tree.nodes()}
        for page in computed:
            assert self.pool[:, page].tobytes() == self.page_of(page), "somebody wrote to pages of the engine's own"
        free = self.manager._allocator._free
        assert (self.pool[:, free] == POISON_BYTE).all(), "somebody wrote to a free page"

    async def settle(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Everybody is gone: all is free again."""
        for line in self.lines:
            line.kill()
        await asyncio.gather(*(line.gone() for line in self.lines))
        for ref in list(self.engine.living):
            self.engine.abort(ref)
        for grant_id in self.granted:
            self.release_grant(grant_id)
        for own in list(self.own):
            self.finish(own)
        self.table.clear_cache()
        self.manager.clear_cache()
        self.check()
        assert self.table.counts_bytes()["free"] == ARENA_BYTES, self.table.counts_bytes()
        assert self.manager.counts()["free"] == self.manager.num_usable, self.manager.counts()
        assert not self.network.arenas and not self.network.violations
        assert len(self.kv.grants) == 0 and not self.port.sessions and not self.landing._admissions
