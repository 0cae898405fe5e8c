"""A prefill worker and a decode worker, moved by hand: each event that may come from outside is one call.

The parts are the real ones: queue, reservation, pages, grants, landing slots. What stands between them, the step loop
and the two stages, is told here in a few lines each, and the time stands still. `World.broken` says from outside what
must hold, and `World.key` what the future depends on: two worlds of one key behave alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.property.reservation_scenario import (
    DECODE,
    DISTURBING,
    PAGE,
    PREFILL,
    ROW_BYTES,
    ROWS,
    UNIT_BYTES,
    WAY,
    Event,
    Parts,
    Place,
    Request,
    Scenario,
    sequence_of,
)
from triptych.core.errors import StaleAttempt
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import EmbeddingSource
from triptych.engine.landing import SlotState
from triptych.engine.sequence import Sequence
from triptych.kv.manager import CacheManager, SequencePages
from triptych.kv.radix import Node
from triptych.sched.admission import Ticket
from triptych.transport.slots import SlotAllocator


class World:
    """Both workers, after some events."""

    def __init__(self, scenario: Scenario, parts: Parts) -> None:
        self.scenario = scenario
        self.prefill = parts.manager(scenario.prefill_pages + 1, PAGE)
        self.decode = parts.manager(scenario.decode_pages + 1, PAGE)
        self.grants = parts.grants(DECODE, self.decode)
        self.book = SlotAllocator(scenario.arena_units * UNIT_BYTES, UNIT_BYTES)
        self.landing = parts.landing(self.book, scenario.cache_units * UNIT_BYTES)
        self.residency = parts.residency(self.prefill, self.landing, ROW_BYTES)
        self.queue = parts.queue(scenario.max_bypass)
        self.requests = [Request(sequence_of(number, shape)) for number, shape in enumerate(scenario.shapes)]
        self.num_left = scenario.max_disturbances
        self.order: tuple[Event, ...] = ()
        self.line: list[int] = []  # those in the queue, in the order in which they came
        for request in self.requests:
            self.residency.check_fits(request.sequence)

    # -- what may come now -------------------------------------------------------------------------------------------

    def events(self) -> Iterator[Event]:
        for number, request in enumerate(self.requests):
            for event in self._events(number, request):
                if event.what not in DISTURBING or self.num_left != 0:
                    yield event

    def _events(self, number: int, request: Request) -> Iterator[Event]:
        place, sequence, record = request.place, request.sequence, request.record
        if place is Place.COMING and self.decode.offer(*self._asked(request)) is not None:
            yield Event("ask", number)
        if place is Place.RUNNING:
            if sequence.handoff is None:
                yield Event("bind", number)
            for index, pending in enumerate(sequence.items):
                is_missing = pending.source is None and index not in request.slots
                if is_missing and not self.landing.is_coming(sequence.ref, index):
                    yield Event("hand", number, index)
            if sequence.num_ready > sequence.num_computed:
                yield Event("step", number)
            for index in request.slots:
                yield Event("land", number, index)
        elif place is Place.HANDING:
            yield Event("commit", number)
        elif place is Place.DECODING:
            yield Event("finish", number)
        if place is Place.ENDED and request.slots:
            yield Event("stop writing", number)
        if place is Place.ENDED and request.is_writing:
            yield Event("stop pages", number)
        if record is not None:
            yield Event("close" if place is Place.ENDED else "expire", number)
        if place not in (Place.COMING, Place.ENDED):
            yield Event("abort", number)

    # -- it comes ----------------------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """And then prefill's step loop turns."""
        self.order += (event,)
        if self.num_left is not None:
            self.num_left -= event.what in DISTURBING
        request = self.requests[event.request]
        match event.what:
            case "ask":
                self._ask(event.request, request)
            case "bind":
                self._bind(request)
            case "hand":
                writer, ref = self._encoder(request), request.sequence.ref
                request.slots[event.item] = self.landing.hand(ref, event.item, writer)
            case "land":
                self._land(request, event.item)
            case "step":
                self._step(request)
            case "commit":
                self._commit(request)
            case "finish":
                self._leave_decode(request)
            case "abort":
                self._abort(event.request, request)
            case "expire" | "close":
                assert request.record is not None
                self.grants.release(request.record.grant_id)
                request.record = None
            case "stop writing":
                self.landing.writer_finished(self._encoder(request), request.sequence.ref)
                request.slots.clear()
            case "stop pages":
                self.grants.writer_finished(request.sequence.ref, None, PREFILL)
                request.is_writing = False
        self._admit()

    def _ask(self, number: int, request: Request) -> None:
        """The router gets a grant and tells prefill."""
        sequence = request.sequence
        root, ids, tokens, spare_pages = self._asked(request)
        request.record = self.grants.issue(sequence.ref, tokens, spare_pages, root, ids)
        request.place = Place.WAITING
        self.queue.push(number, Ticket(sequence.num_known, 0, sequence.plan.priority))
        self.line.append(number)

    def _admit(self) -> None:
        for number in self.queue.admit(lambda one: self.residency.reserve(self.requests[one].sequence), 16, 0):
            winner, place = self.requests[number], self.line.index(number)
            winner.place = Place.RUNNING
            for earlier in map(self.requests.__getitem__, self.line[:place]):
                earlier.num_passed += earlier.sequence.plan.priority <= winner.sequence.plan.priority
            self.line.remove(number)

    def _bind(self, request: Request) -> None:
        try:
            self._named(request, self.grants.bind)
        except StaleAttempt:
            self._leave_prefill(request, Place.ENDED)
            return
        request.sequence.handoff, request.is_writing = WAY, True
        assert request.record is not None
        request.num_written = len(request.record.pages)

    def _land(self, request: Request, index: int) -> None:
        ref, slot = request.sequence.ref, request.slots[index]
        self.landing.check(ref, index, self._encoder(request), slot.slot_id, slot.generation, slot.capability)
        for other, item in self.landing.landed(ref, index, ROWS):
            pending = self._by_ref(other).sequence.items[item]
            pending.rows, pending.source = ROWS, EmbeddingSource.REMOTE
        del request.slots[index]

    def _step(self, request: Request) -> None:
        sequence = request.sequence
        sequence.num_computed = sequence.num_launched = sequence.num_ready
        self.residency.written(sequence)
        if sequence.num_computed == sequence.num_known:
            request.place = Place.HANDING

    def _commit(self, request: Request) -> None:
        record = request.record
        try:
            if record is None:
                raise StaleAttempt("it has expired")
            secrets = record.grant_id, record.generation, record.capability
            request.pages = self.grants.commit(request.sequence.ref, *secrets, PREFILL)
        except StaleAttempt:
            self._leave_prefill(request, Place.ENDED)
            return
        request.record, request.is_writing = None, False
        self.decode.share(request.pages, request.sequence.ids, request.sequence.num_known)
        self._leave_prefill(request, Place.DECODING)

    def _abort(self, number: int, request: Request) -> None:
        """Where the request is just now; the other worker hears of it by events of its own."""
        if request.place is Place.DECODING:
            self._leave_decode(request)
            return
        if self.queue.remove(number):
            self.line.remove(number)
        self._leave_prefill(request, Place.ENDED)

    def _leave_prefill(self, request: Request, to: Place) -> None:
        self.residency.stop_waiting(request.sequence)
        self.residency.release(request.sequence)
        request.place = to

    def _leave_decode(self, request: Request) -> None:
        assert request.pages is not None
        self.decode.release(request.pages)
        request.pages, request.place = None, Place.ENDED

    def _named(self, request: Request, bind: Any) -> None:
        record = request.record
        if record is None:
            raise StaleAttempt("it has expired")
        bind(request.sequence.ref, record.grant_id, record.capability, PREFILL)

    def _asked(self, request: Request) -> tuple[bytes, list[int], int, int]:
        """Of decode: room for the prompt and the one token of the answer whose KV is needed; with a page left for each
        that decodes."""
        sequence = request.sequence
        return sequence.plan.cache_salt, sequence.ids, sequence.num_known + 1, self._num_decoding()

    def _num_decoding(self) -> int:
        return sum(request.place is Place.DECODING for request in self.requests)

    def _encoder(self, request: Request) -> WorkerRef:
        return WorkerRef("encoder-" + request.sequence.ref.request_id, 3)

    def _by_ref(self, ref: AttemptRef) -> Request:
        return next(request for request in self.requests if request.sequence.ref == ref)

    # -- what must hold ----------------------------------------------------------------------------------------------

    def broken(self) -> Iterator[str]:
        """The promises that this state breaks, in words."""
        for part in (self.prefill, self.decode, self.landing):
            try:
                part.check_integrity()
            except AssertionError:
                yield "free + cached + owned + leased + quarantined is all there is"
        if not self._are_pages_in_one_hand():
            yield "each page is in the hands of one"
        if not self._do_writers_write_alone():
            yield "nobody gets what somebody still writes to"
        for request in self.requests:
            if request.place is Place.WAITING and self._holds_anything(request):
                yield "who waits holds nothing"
            if request.place in (Place.DECODING, Place.ENDED) and self._holds_slots(request):
                yield "who has left prefill holds nothing there"
            if request.num_passed > self.scenario.max_bypass:
                yield "nobody is passed more often than the bound"

    def broken_at_rest(self) -> Iterator[str]:
        """Where all that must come has come."""
        if any(request.place is not Place.ENDED for request in self.requests):
            yield "everybody ends"
            return
        pools = (self.prefill, self.decode)
        are_locked = any(node.locks for pool in pools for node in pool.tree.nodes())
        if any(pool.num_available != pool.num_usable for pool in pools) or len(self.grants) or are_locked:
            yield "all pages and promises come back"
        counts = self.landing.counts_bytes()
        if len(self.landing) or counts["free"] + counts["cached"] != self.book.capacity_bytes:
            yield "all landing room comes back"

    def _are_pages_in_one_hand(self) -> bool:
        at_prefill = [each.sequence.pages.owned for each in self.requests if self._held(each.sequence) is not None]
        at_decode = [each.pages.owned for each in self.requests if each.pages is not None]
        leased = [set(record.pages) for record in self.grants._records.values()]
        here, there = ({node.page for node in pool.tree.nodes()} for pool in (self.prefill, self.decode))
        return _are_apart(self.prefill, [*at_prefill, here]) and _are_apart(self.decode, [*at_decode, *leased, there])

    def _held(self, sequence: Sequence) -> SequencePages | None:
        pages = sequence.pages
        return None if pages is None or pages.is_released else pages

    def _do_writers_write_alone(self) -> bool:
        """The bytes and pages of those who write are not free, and nobody else's."""
        taken = [landing.slot for landing in self.landing._living.values()]
        taken += [entry.slot for entry in {id(each): each for each in self.landing._leased.values()}.values()]
        taken += [entry.slot for entry in self.landing._cache._idle.values()]
        free = list(zip(self.book._starts, self.book._lengths, strict=True))
        for slot in (slot for request in self.requests for slot in request.slots.values()):
            others = [(each.offset, each.num_bytes) for each in taken if each is not slot]
            if any(
                slot.offset < start + size and start < slot.offset + slot.num_bytes for start, size in free + others
            ):
                return False
        written = [record.pages for record in self.grants._records.values()]
        num_written = sum(request.num_written for request in self.requests if request.is_writing)
        return sum(map(len, written)) == num_written

    def _holds_anything(self, request: Request) -> bool:
        return request.sequence.pages is not None or self._holds_slots(request)

    def _holds_slots(self, request: Request) -> bool:
        ref = request.sequence.ref
        return any(key[0] == ref for key in (*self.landing._living, *self.landing._leased))

    # -- what it is --------------------------------------------------------------------------------------------------

    def key(self) -> object:
        """All that what comes depends on. Which page it is does not matter, only whose and in which order it goes."""
        return (
            self.num_left,
            tuple(map(self._key_of, self.requests)),
            tuple((entry.request, entry.num_passed) for entry in self.queue._waiting),
            self._key_of_tree(self.prefill),
            self._key_of_tree(self.decode),
            tuple(self.prefill.counts().values()),
            tuple(self.decode.counts().values()),
            self.decode.num_available,
            self._key_of_landing(),
        )

    def _key_of(self, request: Request) -> object:
        sequence, record = request.sequence, request.record
        held = tuple(
            None if pages is None else (len(pages.pages), len(pages.path), len(pages.owned), pages.is_released)
            for pages in (sequence.pages, request.pages)
        )
        granted = None if record is None else (record.num_pages, len(record.path), len(record.pages))
        items = tuple((pending.source, pending.rows is None) for pending in sequence.items)
        state = None if record is None else record.state if record.grant_id in self.grants._records else "gone"
        own = (
            request.place,
            request.is_writing,
            request.num_passed,
            tuple(request.slots),
            request.is_writing * request.num_written,
        )
        return own, held, granted, items, state, sequence.num_computed, sequence.handoff is None

    def _key_of_tree(self, pool: CacheManager) -> object:
        nodes = sorted((_path_of(node), node.locks) for node in pool.tree.nodes())
        return tuple(nodes), tuple(map(_path_of, pool.tree.unlocked()))

    def _key_of_landing(self) -> object:
        table, kept = self.landing, self.landing._cache
        living = sorted((key, one.slot.offset, one.state is SlotState.HANDED) for key, one in table._living.items())
        leased = sorted((key, one.slot.offset) for key, one in table._leased.items())
        late = sorted((one.key, one.slot.offset) for one in table._quarantined.values())
        named = sorted((identity, one.slot.offset) for identity, one in kept._by_identity.items())
        free = tuple(zip(self.book._starts, self.book._lengths, strict=True))
        return tuple(living), tuple(leased), tuple(late), tuple(named), tuple(kept._idle), free


def _path_of(node: Node) -> bytes:
    path = b""
    while node.parent is not None:
        path, node = node.key + path, node.parent
    return path


def _are_apart(manager: CacheManager, hands: list[set[int]]) -> bool:
    """No page is in two of them, none of them is free, and together with the free ones they are all."""
    free = set(manager._allocator._free)
    return len(free.union(*hands)) == len(free) + sum(map(len, hands)) == manager.num_usable
