"""The encoder's step loop."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from triptych.core.clock import ManualClock, SystemClock
from triptych.core.errors import Aborted, TriptychError
from triptych.core.plan import Grid
from triptych.engine.delivery import Delivery
from triptych.engine.encoder import EncodeEngine
from triptych.media.frames import Target

POISON = -1.0


class FakeTower:
    """Rows hold the picture's first value; a pass that holds a poisoned picture fails whole."""

    dtype = torch.float32
    device = torch.device("cpu")
    row_elements = 2
    num_parameters = 0

    def target(self, grid: Grid) -> Target:
        raise NotImplementedError

    def patches(self, picture: npt.NDArray[np.uint8]) -> torch.Tensor:
        raise NotImplementedError

    def encode(self, pixels: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
        if any(float(one[0, 0]) == POISON for one in pixels):
            raise RuntimeError("a kernel failed")
        return [
            torch.full((grid.h * grid.w // 4, 2), float(one[0, 0])) for one, grid in zip(pixels, grids, strict=True)
        ]


def test_a_picture_that_breaks_the_tower_fails_alone() -> None:
    engine = EncodeEngine(FakeTower(), max_patches=1000, max_items=8, clock=SystemClock())
    grid = Grid(1, 2, 4)
    futures = [engine.submit(torch.full((8, 3), value), grid) for value in (1.0, POISON, 3.0)]
    engine.start()  # after all three wait, so that they share the first pass
    try:
        assert futures[0].result(5).rows.tolist() == [[1.0, 1.0]] * 2
        assert futures[2].result(5).rows.tolist() == [[3.0, 3.0]] * 2
        with pytest.raises(TriptychError, match="internal"):
            futures[1].result(5)
    finally:
        engine.stop()


class ShortTower(FakeTower):
    """Forgets the last picture of a pass of several."""

    def encode(self, pixels: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
        return super().encode(pixels, grids)[: max(1, len(pixels) - 1)]


class Slot:
    """Takes rows as a slot's writer does."""

    def __init__(self, takes: bool = True) -> None:
        self.takes = takes
        self.written: list[list[list[float]]] = []

    def write(self, rows: torch.Tensor) -> bool:
        if self.takes:
            self.written.append(rows.tolist())
        return self.takes


def delivery_to(*slots: Slot) -> Delivery:
    delivery = Delivery()
    for slot in slots:
        delivery.join(slot)
    return delivery


def test_the_pass_itself_writes_to_the_slots_that_are_there_when_it_ends() -> None:
    engine = EncodeEngine(FakeTower(), max_patches=1000, max_items=8, clock=SystemClock())
    taking, other, revoked, left, late = Slot(), Slot(), Slot(takes=False), Slot(), Slot()
    delivery = delivery_to(taking, left, revoked, other)
    future = engine.submit(torch.full((8, 3), 7.0), Grid(1, 2, 4), delivery)
    delivery.leave(left)
    engine.start()
    try:
        assert future.result(5).delivered == {taking, other}
        delivery.join(late)
        assert delivery.deliver(torch.zeros(1)) == frozenset()
    finally:
        engine.stop()
    assert taking.written == other.written == [[[7.0, 7.0]] * 2]
    assert revoked.written == left.written == late.written == []


def test_a_pass_that_comes_out_short_is_written_once_and_right_and_the_next_one_runs() -> None:
    """The thread that nobody could replace must not end with it: all who wait, now and later, would wait for ever."""
    engine = EncodeEngine(ShortTower(), max_patches=1000, max_items=8, clock=SystemClock())
    grid, slots = Grid(1, 2, 4), [Slot() for _ in range(3)]
    futures = [
        engine.submit(torch.full((8, 3), value), grid, delivery_to(slot))
        for value, slot in zip((1.0, 2.0, 3.0), slots, strict=True)
    ]
    engine.start()
    try:
        for value, future, slot in zip((1.0, 2.0, 3.0), futures, slots, strict=True):
            assert future.result(5).rows.tolist() == [[value, value]] * 2
            assert slot.written == [[[value, value]] * 2]
        assert engine.submit(torch.full((8, 3), 4.0), grid).result(5).rows.tolist() == [[4.0, 4.0]] * 2
        assert engine.is_progressing()
    finally:
        engine.stop()


def test_who_waits_is_refused_when_the_thread_ends_with_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EncodeEngine(FakeTower(), max_patches=1000, max_items=8, clock=SystemClock())
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def broken() -> list[object]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(engine, "_take_batch", broken)
    before = engine.submit(torch.full((8, 3), 1.0), Grid(1, 2, 4))
    engine.start()
    with pytest.raises(Aborted):
        before.result(5)
    with pytest.raises(Aborted):
        engine.submit(torch.full((8, 3), 1.0), Grid(1, 2, 4)).result(5)
    assert not engine.is_progressing()


class RecordingTower(FakeTower):
    """Remembers the patches of each pass."""

    def __init__(self) -> None:
        self.passes: list[list[int]] = []

    def encode(self, pixels: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
        self.passes.append([grid.h * grid.w for grid in grids])
        return super().encode(pixels, grids)


@pytest.mark.parametrize(
    ("waited_s", "passes"),
    [
        (0.0, [[8, 8, 16], [400]]),
        (30.0, [[400], [8, 8, 16]]),  # overdue by now, and larger than a pass
    ],
)
def test_small_pictures_go_first_until_a_large_one_has_waited_long_enough(
    waited_s: float, passes: list[list[int]]
) -> None:
    clock, tower = ManualClock(), RecordingTower()
    engine = EncodeEngine(tower, max_patches=100, max_items=8, clock=clock)
    futures = [engine.submit(torch.full((400, 3), 5.0), Grid(1, 20, 20))]
    clock.advance_s(waited_s)
    for rows, value in ((2, 1.0), (2, 2.0), (4, 3.0)):
        futures.append(engine.submit(torch.full((rows * 4, 3), value), Grid(1, rows, 4)))
    engine.start()  # after all wait, so that they meet
    try:
        values = [float(future.result(5).rows[0, 0]) for future in futures]
    finally:
        engine.stop()
    assert tower.passes == passes
    assert values == [5.0, 1.0, 2.0, 3.0]
