"""The process of one receiving end: says where it is, and ends with its standard input.

python -m benchmarks.transport.peer KIND FOLDER ROOM_BYTES
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import uvloop

from benchmarks.transport.cells import OURS
from benchmarks.transport.landing import receiver
from benchmarks.transport.receivers import RECEIVERS
from triptych.transport.nixl_api import NixlError

WORD = "benchmark-peer "
"""Begins the one line that the other process reads; libraries may print others."""


def main(argv: Sequence[str]) -> int:
    kind, folder, room_bytes = argv[0], Path(argv[1]), int(argv[2])
    if kind in OURS:
        try:
            uvloop.run(_serve_ours(kind, folder, room_bytes))
        except NixlError as error:
            say({"absent": str(error)})
        return 0
    try:
        where = RECEIVERS[kind](folder, room_bytes)
    except ImportError as error:
        say({"absent": f"it is not installed: {error}"})
        return 0
    say(where)
    sys.stdin.read()
    os._exit(0)  # threads of libraries need no farewell


async def _serve_ours(transport: str, folder: Path, room_bytes: int) -> None:
    async with receiver(transport, folder, room_bytes) as info:
        say({"worker_id": info.worker_id, "epoch": info.epoch, "address": info.grpc_address})
        await asyncio.to_thread(sys.stdin.read)


def say(where: Mapping[str, object]) -> None:
    print(WORD + json.dumps(where), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
