"""What `reservation_world.py` begins with: requests, the room that they contend for, and the parts under test."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, cast

import numpy as np
import torch

from triptych.core.clock import SystemClock
from triptych.core.ids import AttemptRef, WorkerRef
from triptych.core.plan import Grid, Item, Modality, Plan, Sampling, TokenRange
from triptych.core.timeline import Timeline
from triptych.engine.landing import LandingTable
from triptych.engine.residency import Residency
from triptych.engine.sequence import Handoff, Sequence, SequenceSink
from triptych.kv.grants import GrantRecord, GrantTable
from triptych.kv.manager import CacheManager, SequencePages
from triptych.sched.admission import AdmissionQueue
from triptych.transport.slots import Slot

PAGE = 2
ROW_BYTES = 32
UNIT_BYTES = 64
"""A small picture's room, and the arena's alignment."""
ROWS = torch.zeros(1)
PREFILL, DECODE = WorkerRef("prefill-0", 1), WorkerRef("decode-0", 2)


class Shape(NamedTuple):
    """A prompt, one character after the other: a small letter is a picture of one page and one unit, a capital one of
    two; a digit is a token of text. Equal letters are the same picture."""

    prompt: str
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Parts:
    """What the world is made of; tests put broken ones in."""

    queue: type[AdmissionQueue[int]] = AdmissionQueue
    residency: type[Residency] = Residency
    manager: type[CacheManager] = CacheManager
    grants: type[GrantTable] = GrantTable
    landing: type[LandingTable] = LandingTable


@dataclass(frozen=True, slots=True)
class Scenario:
    """Requests, and the room that they contend for: pages of either pool, units of the arena and of what it keeps.
    `max_disturbances` bounds how many there are in one order; None is no bound."""

    shapes: tuple[Shape, ...]
    prefill_pages: int
    decode_pages: int
    arena_units: int
    cache_units: int = 0
    max_bypass: int = 1
    max_disturbances: int | None = None


class Place(enum.Enum):
    COMING = "coming"
    WAITING = "waiting"
    RUNNING = "running"
    HANDING = "handing off"
    DECODING = "decoding"
    ENDED = "ended"


class Event(NamedTuple):
    what: str
    request: int
    item: int = -1


DISTURBING = frozenset({"abort", "expire"})
"""What need not come. All else comes some time: whoever writes stops, and whoever runs ends."""


@dataclass(slots=True, eq=False)
class Request:
    """`slots` are those that an encoder may write to; `record` is the grant for as long as prefill or decode knows it,
    `is_writing` while prefill may write to its pages, of which
    there are `num_written`."""

    sequence: Sequence
    place: Place = Place.COMING
    record: GrantRecord | None = None
    is_writing: bool = False
    num_written: int = 0
    pages: SequencePages | None = None
    slots: dict[int, Slot] = field(default_factory=dict)
    num_passed: int = 0

    @property
    def is_prefilling(self) -> bool:
        return self.place in (Place.RUNNING, Place.HANDING)


class _Way:
    """Where prefill's pages go to."""

    is_congested = False


WAY = cast(Handoff, _Way())


@cache
def plan_of(shape: Shape) -> tuple[Plan, tuple[int, ...]]:
    compact: list[int] = []
    ids: list[int] = []
    items: list[Item] = []
    for letter in shape.prompt:
        if letter.isdigit():
            ids.append(int(letter))
        else:
            rows = PAGE * (2 if letter.isupper() else 1)
            run = TokenRange(len(compact), len(ids), rows)
            items.append(Item(Modality.IMAGE, letter.encode() * 32, rows, (run,), Grid(1, 1, rows)))
            ids += [100 * ord(letter) + row for row in range(rows)]
        compact.append(ids[-1])
    return Plan(tuple(compact), tuple(items), Sampling(2), 60.0, priority=shape.priority), tuple(ids)


TIMELINE = Timeline("prefill", "prefill-0", SystemClock())


def sequence_of(number: int, shape: Shape) -> Sequence:
    plan, ids = plan_of(shape)
    positions = np.zeros((1, len(ids)), dtype=np.int64)
    sink = cast(SequenceSink, None)
    made = Sequence(AttemptRef(f"req-{number}"), plan, list(ids), positions, 0, sink, TIMELINE, TIMELINE)
    made.num_prompt, made.needs_handoff = len(ids), True
    return made
