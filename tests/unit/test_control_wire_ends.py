"""What a frame's taker raises ends the connection, in whichever turn of the loop the frame was taken."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import pytest

from triptych.transport.control_wire import FRAMES_A_TURN, FrameWire


@pytest.mark.parametrize("bad", [0, FRAMES_A_TURN - 1, FRAMES_A_TURN, 3 * FRAMES_A_TURN + 1])
async def test_a_frame_that_its_taker_cannot_bear_ends_the_connection(tmp_path: Path, bad: int) -> None:
    taken: list[bytes] = []
    lost = asyncio.Event()
    ignored: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: ignored.append(context))

    def take(frame: bytes) -> None:
        taken.append(frame)
        if len(taken) == bad + 1:
            raise ValueError("no such frame")

    path = tmp_path / "s"
    server = await loop.create_unix_server(lambda: FrameWire(take, lost.set), str(path))
    _, writer = await asyncio.open_unix_connection(str(path))
    writer.write(struct.pack("<I1s", 1, b"x") * (4 * FRAMES_A_TURN))
    try:
        await asyncio.wait_for(lost.wait(), 5)
    finally:
        writer.close()
        server.close()
        loop.set_exception_handler(None)
    assert len(taken) == bad + 1
