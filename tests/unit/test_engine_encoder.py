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


class HeavyTower(FakeTower):
    """What comes of a poisoned picture has no room on the host."""

    def encode(self, pixels: Sequence[torch.Tensor], grids: Sequence[Grid]) -> list[torch.Tensor]:
        return [
            torch.empty(1, 1, dtype=torch.float64).expand(1 << 40, 1 << 8) if float(one[0, 0]) == POISON else rows
            for one, rows in zip(pixels, super().encode([one.abs() for one in pixels], grids), strict=True)
        ]


@pytest.mark.parametrize(("tower", "middle"), [(ShortTower(), 2.0), (HeavyTower(), POISON)])
def test_what_follows_a_pass_may_fail_too_and_the_next_pass_runs(tower: FakeTower, middle: float) -> None:
    """The thread that nobody could replace must not end with it: all who wait, now and later, would wait for ever."""
    engine = EncodeEngine(tower, max_patches=1000, max_items=8, clock=SystemClock())
    grid = Grid(1, 2, 4)
    futures = [engine.submit(torch.full((8, 3), value), grid) for value in (1.0, middle, 3.0)]
    engine.start()
    try:
        assert futures[0].result(5).rows.tolist() == [[1.0, 1.0]] * 2
        assert futures[2].result(5).rows.tolist() == [[3.0, 3.0]] * 2
        if middle == POISON:
            with pytest.raises(TriptychError, match="internal"):
                futures[1].result(5)
        else:
            assert futures[1].result(5).rows.tolist() == [[middle, middle]] * 2
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
