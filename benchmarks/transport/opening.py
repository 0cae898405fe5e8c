"""The arms of a run: a receiving process for each way, and what sends to it from here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np

from benchmarks.transport.arms import Arm, Linked, Links, Memcpy, not_summed, summed_up
from benchmarks.transport.cells import MEMCPY, OURS, Wanted, room_bytes, summed, transport_of
from benchmarks.transport.child import Absent, Child
from benchmarks.transport.others import SENDERS, NotMoved
from benchmarks.transport.results import Results
from triptych.core.errors import TriptychError
from triptych.transport.names import INPROC

START_SECONDS = 30.0


async def open_arms(
    wanted: Wanted, folder: Path, stack: AsyncExitStack, timeout_s: float, results: Results
) -> dict[str, Arm]:
    """Those that can be had; why the others cannot goes to `results`. All end with the stack."""
    names, source, links = wanted.arms, made_up(room_bytes(wanted.sizes)), Links()
    children = await _start(names, folder, len(source), stack, min(START_SECONDS, timeout_s), results)
    stack.push_async_callback(links.close)
    arms: dict[str, Arm] = {MEMCPY: Memcpy(source)} if MEMCPY in names else {}
    for kind in _kinds(names):
        try:
            arms |= await _arms_of(kind, children, links, source, stack)
        except (Absent, NotMoved, ImportError, TriptychError, RuntimeError) as error:
            _note(kind, names, str(error), results)
    return {name: arms[name] for name in names if name in arms}


def made_up(num_bytes: int) -> memoryview:
    """What is sent: no two parts of it alike."""
    numbers = np.random.default_rng(1).integers(0, 256, num_bytes, dtype=np.uint8)
    return numbers.data


def _kinds(names: Iterable[str]) -> list[str]:
    """Ways that need more than a copy, each once."""
    return list(dict.fromkeys(transport_of(name) for name in names if name != MEMCPY))


async def _start(
    names: Sequence[str], folder: Path, room: int, stack: AsyncExitStack, timeout_s: float, results: Results
) -> dict[str, Child]:
    """All processes at once: nothing is measured meanwhile."""
    kinds = [kind for kind in _kinds(names) if kind != INPROC]
    starts = (Child.start(kind, folder, room, timeout_s) for kind in kinds)
    started = await asyncio.gather(*starts, return_exceptions=True)
    children: dict[str, Child] = {}
    for kind, child in zip(kinds, started, strict=True):
        if isinstance(child, Child):
            stack.push_async_callback(child.stop)
            children[kind] = child
        elif isinstance(child, Absent):
            _note(kind, names, str(child), results)
        else:
            raise child
    return children


async def _arms_of(
    kind: str, children: dict[str, Child], links: Links, source: memoryview, stack: AsyncExitStack
) -> dict[str, Arm]:
    if kind == INPROC:
        link = await links.within(len(source))
    elif kind not in children:
        return {}  # noted already
    elif kind in OURS:
        link = await links.to_child(kind, children[kind])
    else:
        arm = SENDERS[kind](children[kind].where, source)
        stack.callback(arm.close)
        return {kind: arm}
    return {kind: Linked(link, source, not_summed), summed(kind): Linked(link, source, summed_up)}


def _note(kind: str, names: Iterable[str], why: str, results: Results) -> None:
    for name in names:
        if name != MEMCPY and transport_of(name) == kind:
            results.missing[name] = why
