"""The encoder's step loop."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from PIL import Image

from triptych.core.clock import SystemClock
from triptych.core.errors import TriptychError
from triptych.core.plan import Grid
from triptych.engine.encoder import EncodeEngine

POISON = -1.0


class FakeTower:
    """Rows hold the picture's first value; a pass that holds a poisoned picture fails whole."""

    dtype = torch.float32
    device = torch.device("cpu")
    row_elements = 2
    num_parameters = 0

    def preprocess(self, image: Image.Image) -> tuple[torch.Tensor, Grid]:
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
