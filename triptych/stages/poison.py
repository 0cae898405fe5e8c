"""Memory that was given back is overwritten with what is no number, when `--poison-freed` asks for it: whoever still
reads it says so in its answer, and whoever still writes to it removes the poison, which a test can look for.

For tests: it costs a pass over all that is freed. What is called here runs where memory is given back, on the engine's
thread, before anybody else can have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import torch

from triptych.kv.allocator import RESERVED_PAGES

POISON_BYTE: Final = 0xFF
"""A run of it is a NaN in float32, bfloat16 and float16 alike."""


def poisoned_pages(pool: torch.Tensor) -> Callable[[Sequence[int]], None]:
    """Poisons the pool, (layers, 2, pages, ...), which nobody uses yet; returns what does it to pages given back."""
    pool[:, :, RESERVED_PAGES:] = math.nan

    def poison(pages: Sequence[int]) -> None:
        pool[:, :, list(pages)] = math.nan

    return poison


def poisoned_slots(arena: memoryview) -> Callable[[int, int], None]:
    """The same for an arena of slots: what is returned takes offset and length in bytes."""
    memory = np.frombuffer(arena, dtype=np.uint8)
    memory[:] = POISON_BYTE

    def poison(offset: int, num_bytes: int) -> None:
        memory[offset : offset + num_bytes] = POISON_BYTE

    return poison
