"""What is on the pictures: no two corners are alike, so that every turn and every mistaken row shows."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw

SIZE = (84, 60)


def drawn(size: tuple[int, int] = SIZE) -> Image.Image:
    """RGB: a gradient, a red disc at the upper left, a green bar at the lower right."""
    width, height = size
    rows, columns = np.mgrid[0:height, 0:width]
    planes = (columns * 255 // max(1, width - 1), rows * 255 // max(1, height - 1), (columns * 3 + rows * 7) % 256)
    image = Image.fromarray(np.stack(planes, axis=-1).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    pen.ellipse((width // 10, height // 10, width // 3, height // 2), fill=(230, 20, 30))
    pen.rectangle((width * 2 // 3, height * 3 // 4, width * 9 // 10, height * 9 // 10), fill=(10, 200, 40))
    return image


def noise(size: tuple[int, int], seed: int) -> Image.Image:
    """RGB, incompressible."""
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(values)


def mask(size: tuple[int, int] = SIZE) -> Image.Image:
    """L: how opaque; from nothing at the left to everything at the right."""
    row = np.linspace(0, 255, size[0]).astype(np.uint8)
    return Image.fromarray(np.broadcast_to(row, (size[1], size[0])).copy())


def on_white(rgba: Image.Image) -> Image.Image:
    """By the formula, in whole numbers, half up: Pillow may differ by one."""
    values = np.asarray(rgba.convert("RGBA")).astype(np.int64)
    alpha = values[..., 3:]
    return Image.fromarray(((values[..., :3] * alpha + 255 * (255 - alpha) + 127) // 255).astype(np.uint8))
