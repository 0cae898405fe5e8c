"""Multimodal rotary positions (M-RoPE; Qwen2-VL, arXiv:2409.12191, section 2.1) on the host, from sizes alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from triptych.core.plan import Item

PositionArray = npt.NDArray[np.int64]


def mrope_positions(num_tokens: int, items: Sequence[Item], merge_size: int) -> tuple[PositionArray, int]:
    """Positions of a prompt.

    Text counts up on all three axes. A still picture's rows share one temporal position and count rows and columns of
    its merged grid from there; the text after it goes on from the larger side.

    Args:
        num_tokens: length of the expanded prompt.
        items: in prompt order, each with a single range (the family writes no row breaks).
        merge_size: patches merged per side.

    Returns:
        int64 of shape (3, num_tokens), and the delta: position of the next token minus its index.
    """
    positions = np.empty((3, num_tokens), dtype=np.int64)
    index, position = 0, 0
    for item in items:
        text = item.offset - index
        positions[:, index : item.offset] = position + np.arange(text)
        position += text
        rows, cols = item.grid.h // merge_size, item.grid.w // merge_size
        span = positions[:, item.offset : item.end].reshape(3, item.grid.t, rows, cols)
        span[0] = position + np.arange(item.grid.t)[:, None, None]
        span[1] = position + np.arange(rows)[None, :, None]
        span[2] = position + np.arange(cols)[None, None, :]
        index = item.end
        position += max(item.grid.t, rows, cols)
    positions[:, index:] = position + np.arange(num_tokens - index)
    return positions, position - index
