"""Embeddings that the tower's thread copies to a slot in the receiver's device memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from tests.unit import device_house
from tests.unit.device_house import DeviceHost, slot_of
from tests.unit.link_house import ARENA_BYTES, EMBEDDING_LAYOUT, IDENTITY, REF, eventually
from triptych.core.errors import TransferRefused
from triptych.core.plan import EmbeddingSource
from triptych.obs import metrics
from triptych.testing.fake_device import FakeDevice
from triptych.transport.layout import checksum64
from triptych.transport.link_pool import LinkPool

host, mine, pool = device_house.host, device_house.mine, device_house.pool


async def test_rows_go_from_the_towers_thread_to_the_slot_in_one_copy(
    host: DeviceHost, pool: LinkPool, mine: FakeDevice
) -> None:
    link: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    counter = metrics.EMBEDDING_TRANSFER_BYTES.labels(transport="cuda_ipc")
    before, grant, rows = counter._value.get(), await slot_of(link), torch.arange(64.0).view(8, 8).t()
    data = rows.contiguous().numpy().tobytes()
    writer = link.slot_writer(grant)
    mine.hold()
    assert await asyncio.to_thread(writer.write, rows) and not writer.write(rows)
    assert mine.num_waiting == 1 and writer.is_writing
    finishing = asyncio.create_task(writer.finish())
    await asyncio.sleep(0.05)
    assert not finishing.done()
    mine.release()
    checksum = await finishing
    assert checksum == checksum64(data) and not writer.is_writing
    await link.commit_embedding(REF, 0, grant, EmbeddingSource.REMOTE, checksum)
    assert host.embedding.landed[REF, 0].data == data
    assert counter._value.get() - before == 256
    assert not writer.write(rows) and not link._slot_writers


@pytest.mark.parametrize("how", ["abort", "sibling"])
async def test_a_slot_is_given_back_only_after_the_copy_that_the_tower_launched(
    host: DeviceHost, pool: LinkPool, mine: FakeDevice, how: str
) -> None:
    """Whether its own attempt gives up, or another item of it, whose abort speaks for all."""
    link: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    written, unwritten = [link.slot_writer(await slot_of(link, index=index)) for index in range(2)]
    mine.hold()
    assert written.write(torch.ones(8, 8))
    if how == "abort":
        giving_up = asyncio.create_task(link.abort(REF, None, "given up"))
    else:
        giving_up = asyncio.create_task(link.request_slot(REF, 2, IDENTITY, 1, ARENA_BYTES))
        await asyncio.sleep(0.05)
        giving_up.cancel()
    await asyncio.sleep(0.1)
    assert host.embedding.aborted == [] and host.embedding.slots.owned_bytes == 512
    assert not unwritten.write(torch.ones(8, 8))
    mine.release()
    await asyncio.gather(giving_up, return_exceptions=True)
    await eventually(lambda: host.embedding.slots.free_bytes == ARENA_BYTES)
    assert not link._slot_writers


async def test_a_device_that_fails_in_the_towers_thread_breaks_the_link_and_frees_nothing(
    host: DeviceHost, pool: LinkPool, mine: FakeDevice
) -> None:
    link: Any = await pool.embedding_link(host.info, EMBEDDING_LAYOUT)
    writer, other = [link.slot_writer(await slot_of(link, index=index)) for index in range(2)]
    mine.hold()
    assert writer.write(torch.ones(8, 8))
    mine.break_down()
    assert not await asyncio.to_thread(other.write, torch.ones(8, 8))
    with pytest.raises(TransferRefused):
        await writer.finish()
    await link.abort(REF, None, "given up")
    await asyncio.wait_for(link.closed.wait(), 5)
    await asyncio.sleep(0.2)
    assert host.embedding.lost == [] and host.embedding.aborted == [] and host.embedding.slots.owned_bytes == 512
    for pointer in list(mine._mapped):  # the process ends
        mine._unmap(pointer)
    device_house.unlock()
    await eventually(lambda: len(host.embedding.lost) == 1)
