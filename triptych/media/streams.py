"""Whole frames over a stream socket, blocking."""

from __future__ import annotations

import socket
import time


def read_exactly(stream: socket.socket, num_bytes: int, give_up_at: float | None = None) -> bytearray:
    """Raises EOFError when the other side is gone, TimeoutError after `give_up_at` (monotonic seconds)."""
    data = bytearray(num_bytes)
    view, filled = memoryview(data), 0
    while filled < num_bytes:
        _limit(stream, give_up_at)
        count = stream.recv_into(view[filled:])
        if not count:
            raise EOFError
        filled += count
    return data


def write_all(stream: socket.socket, data: bytes | memoryview, give_up_at: float | None = None) -> None:
    """Raises OSError when the other side is gone, TimeoutError after `give_up_at` (monotonic seconds)."""
    left = memoryview(data).cast("B")
    while left:
        _limit(stream, give_up_at)
        left = left[stream.send(left) :]


def _limit(stream: socket.socket, give_up_at: float | None) -> None:
    if give_up_at is not None:
        left_s = give_up_at - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        stream.settimeout(left_s)
