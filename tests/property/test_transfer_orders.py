"""Whatever order grant, write, commit, abort, expiry, crash and late write come in: no byte has two owners; free,
cached, owned, leased and quarantined add up; and what can be seen is whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.property.promises import assert_machine_catches, steps
from tests.property.transfer_world import PAGES, ROW_BYTES, WAYS, Held, Line, World, bytes_of
from tests.seed import rotating
from tests.storm.faults import FAULTS
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.stages import landing as stages_landing
from triptych.transport import landings, servicer
from triptych.transport.landings import LandingSession
from triptych.transport.nixl_arena import Exposure, WrittenPages
from triptych.transport.servicer import Conversation
from triptych.transport.types import ArenaKind, BindAsked, SlotAsked

Patch = pytest.MonkeyPatch
MAX_LINES = 3
ways, kinds = st.sampled_from(WAYS), st.sampled_from(ArenaKind)
cuts = st.integers(0, 3 * ROW_BYTES)
picks = st.integers(0, 1 << 16)


def hurried(patch: Patch) -> None:
    """What waits for what will not come does so for no time: here nothing is ever merely late."""
    patch.setattr(landings, "STALLED_S", 0)
    patch.setattr(servicer, "MAPPING_POLL_S", 0)
    patch.setattr(servicer, "MAPPING_POLL_MAX_S", 0)
    patch.setattr(asyncio, "to_thread", at_once)


async def at_once(work: Callable[..., Any], *arguments: Any) -> Any:
    """In the place of another thread."""
    return work(*arguments)


class TransferMachine(RuleBasedStateMachine):
    plant: Callable[[Patch], None] = staticmethod(lambda patch: None)

    def __init__(self) -> None:
        super().__init__()
        self.patch = Patch()
        hurried(self.patch)
        type(self).plant(self.patch)
        self.loop = asyncio.new_event_loop()
        self.world = World()

    def run(self, *actions: Callable[[], object]) -> None:
        """On the event loop, then until nothing is left to do."""

        async def act() -> None:
            for action in actions:
                action()
            await self.world.settle()

        self.wait(act())

    def wait(self, work: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(work)

    def begin(self, wants: list[tuple[object, int]]) -> AttemptRef | None:
        async def begin() -> AttemptRef | None:
            return self.world.begin(wants)

        return self.loop.run_until_complete(begin())

    # --- whom something happens to ---

    def line_of(self, way: str, kind: ArenaKind) -> Line:
        """A writer of that kind that can still ask; a new process if there is none."""
        living = [line for line in self.world.lines if (line.way, line.kind) == (way, kind) and line.is_linked]
        if living:
            return living[-1]
        self.world.serial += 1
        writer = WorkerRef(f"writer-{self.world.serial}", self.world.serial)
        self.run(lambda: self.world.lines.append(Line(self.world, writer, way, kind)))
        return self.world.lines[-1]

    def held(self, pick: int) -> Held | None:
        all_held = [held for line in self.world.lines for held in line.held]
        return all_held[pick % len(all_held)] if all_held else None

    def ref(self, pick: int) -> AttemptRef | None:
        living = list(self.world.engine.living)
        return living[pick % len(living)] if living else None

    # --- what happens ---

    @rule(way=ways, sizes=st.lists(st.integers(1, 3), min_size=1, max_size=2), again=picks, is_known=st.booleans())
    def grant_slots(self, way: str, sizes: list[int], again: int, is_known: bool) -> None:
        """Slots for new pictures, or for one that there was before."""
        names: list[tuple[object, int]] = [(f"{self.world.serial}.{index}", size) for index, size in enumerate(sizes)]
        known = [item.content for item in self.world.table._leased.values()]
        if is_known and known:
            content = known[again % len(known)]
            names[0] = (content.identity.decode().lstrip("-"), content.num_tokens)
        line, ref = self.line_of(way, ArenaKind.EMBEDDING), self.begin(names)
        if ref is None:
            return
        for index, pending in enumerate(self.world.engine.living[ref].items):
            item = pending.item
            asked = SlotAsked(ref, index, item.identity, item.num_tokens, item.num_tokens * ROW_BYTES)
            self.run(lambda asked=asked: line.ask(asked))  # type: ignore[misc]

    @rule(way=ways, num_pages=st.integers(1, 3))
    def grant_pages(self, way: str, num_pages: int) -> None:
        line, record = self.line_of(way, ArenaKind.KV), self.world.issue(num_pages)
        if record is not None:
            self.run(lambda: line.ask(BindAsked(record.ref, record.grant_id, record.capability)))

    @rule(pick=picks, num_bytes=cuts)
    def write(self, pick: int, num_bytes: int) -> None:
        held = self.held(pick)
        if held is not None:
            held.line.write(held, num_bytes)

    @rule(pick=picks)
    def write_and_commit(self, pick: int) -> None:
        held = self.held(pick)
        if held is not None:
            held.line.write(held, len(held.data))
            self.run(lambda: held.line.commit(held))

    @rule(pick=picks)
    def commit(self, pick: int) -> None:
        """Of whatever has been written until now."""
        held = self.held(pick)
        if held is not None:
            self.run(lambda: held.line.commit(held))

    @rule(pick=picks, start=cuts, num_bytes=cuts)
    def a_frame_comes_late(self, pick: int, start: int, num_bytes: int) -> None:
        held = self.held(pick)
        if held is not None and held.line.way == "zmq-tcp":
            held.line.send(held, start, held.data[start : start + num_bytes])

    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        held = self.held(pick)
        if held is not None:
            self.run(lambda: held.line.abort(held))

    @rule(pick=picks)
    def expire(self, pick: int) -> None:
        """The receiver's request is over, of which the writer has not heard yet."""
        if (ref := self.ref(pick)) is not None:
            self.run(lambda: self.world.engine.abort(ref))
        if (held := self.held(pick)) is not None and isinstance(held.key, str):
            self.world.release_grant(held.key)

    @rule(pick=picks)
    def cancel_credits(self, pick: int) -> None:
        grants = list(self.world.granted)
        if grants:
            self.world.release_grant(grants[pick % len(grants)])

    @rule(pick=picks)
    def consume(self, pick: int) -> None:
        keys = list(self.world.table._leased)
        if keys:
            self.world.table.consumed(*keys[pick % len(keys)])

    @rule(num_pages=st.integers(1, 4))
    def compute(self, num_pages: int) -> None:
        self.world.compute(num_pages)

    @rule(pick=picks)
    def finish(self, pick: int) -> None:
        if self.world.own:
            self.world.finish(self.world.own[pick % len(self.world.own)])

    @precondition(lambda self: self.world.lines)
    @rule(pick=picks)
    def crash(self, pick: int) -> None:
        self.run(self.world.lines[pick % len(self.world.lines)].kill)

    @rule(pick=picks)
    def crash_in_a_commit(self, pick: int) -> None:
        """The commit is on its way when its sender dies."""
        held = self.held(pick)
        if held is not None:
            held.line.write(held, len(held.data))
            self.run(lambda: held.line.commit(held), held.line.kill)

    @precondition(lambda self: self.world.lines)
    @rule(pick=picks)
    def lose_the_link(self, pick: int) -> None:
        self.run(self.world.lines[pick % len(self.world.lines)].break_link)

    @precondition(lambda self: self.world.lines)
    @rule(pick=picks)
    def notice_the_loss(self, pick: int) -> None:
        line = self.world.lines[pick % len(self.world.lines)]
        if not line.is_linked:
            self.run(line.unmap)

    @rule(way=ways, kind=kinds, before=st.sampled_from(["", "lost", "aborted"]), num_bytes=cuts)
    def be_stopped_until_all_is_over(self, way: str, kind: ArenaKind, before: str, num_bytes: int) -> None:
        """Granted, stopped, expired, everything used again, and on it writes."""
        known = {id(held) for line in self.world.lines for held in line.held}
        if kind is ArenaKind.EMBEDDING:
            self.grant_slots(way, [2], 0, False)
        else:
            self.grant_pages(way, 2)
        fresh = [held for line in self.world.lines for held in line.held if id(held) not in known]
        if not fresh:
            return
        held = fresh[0]
        if before:
            self.run(held.line.break_link if before == "lost" else lambda: held.line.abort(held))
        if isinstance(held.key, str):
            self.world.release_grant(held.key)
        else:
            self.run(lambda: self.world.engine.abort(held.ref))
        self.compute(2)
        other = self.begin([(f"again {self.world.serial}", 2)])
        held.line.write(held, num_bytes)
        self.world.check()
        if other is not None:
            self.run(lambda: self.world.engine.abort(other))
        self.run(lambda: held.line.commit(held))

    # --- what always holds ---

    @invariant()
    def everything_is_right(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        try:
            self.wait(self.world.close())
        finally:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.wait(self.world.settle())
            self.loop.close()
            self.patch.undo()


TestTransfers = TransferMachine.TestCase
TestTransfers.settings = steps(40)


# --- it can fail ------------------------------------------------------------------------------------------------------


async def nothing(*_: object) -> None:
    """Stands in for what must not be forgotten."""


def _late_frames_land(patch: Patch) -> None:
    """The receiver hears of the end of a grant and goes on taking its frames."""
    patch.setattr(LandingSession, "forget", lambda session, ref, of: None)


def _a_mapping_is_not_waited_for(patch: Patch) -> None:
    patch.setattr(Conversation, "_wait_until_unmapped", nothing)


def _checksums_are_not_looked_at(patch: Patch) -> None:
    patch.setattr(stages_landing, "_check_bytes", lambda *_: None)


def _frames_are_not_counted(patch: Patch) -> None:
    """A commit is taken however many of its frames have come."""
    patch.setattr(LandingSession, "complete", nothing)


def _a_way_in_is_not_ended(patch: Patch) -> None:
    """The farewell comes at once; what a lost sender writes over the network still arrives."""
    patch.setattr(Exposure, "revoke", nothing)
    patch.setattr(Exposure, "try_revoke", nothing)


def _written_pages_are_not_looked_at(patch: Patch) -> None:
    patch.setattr(WrittenPages, "check", nothing)


PLANTED: dict[str, Callable[[Patch], None]] = {
    "slots are used again at once": FAULTS["slot quarantine skipped"].plant,
    "pages are used again at once": FAULTS["grant quarantine skipped"].plant,
    "late frames land": _late_frames_land,
    "a lost sender's mapping is not waited for": _a_mapping_is_not_waited_for,
    "checksums are not looked at": _checksums_are_not_looked_at,
    "frames are not counted": _frames_are_not_counted,
    "a lost sender's way in is not ended": _a_way_in_is_not_ended,
    "written pages are not looked at": _written_pages_are_not_looked_at,
}


@pytest.mark.parametrize("fault", rotating(list(PLANTED), 2))
def test_a_broken_receiver_is_caught(fault: str) -> None:
    assert_machine_catches(type("Broken", (TransferMachine,), {"plant": staticmethod(PLANTED[fault])}))


def test_the_truth_is_never_poison() -> None:
    assert 0xFF not in bytes_of("anything", 1 << 14) and len(set(bytes_of("a", PAGES.page_bytes))) > 1
