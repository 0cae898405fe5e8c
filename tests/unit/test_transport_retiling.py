"""Links between pools of other page sizes and number formats, over every transport that there is here."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit import device_house, link_house
from tests.unit.link_house import EVENTS, KV_LAYOUT, PAGES, REF, SENDER, TRANSPORTS, Host, sender_by
from triptych.core.errors import TransferRefused
from triptych.core.grant import Grant
from triptych.core.kv_format import KvDtype, KvTerms, PageFormat
from triptych.core.plan import Token
from triptych.kv.pool import PoolPages
from triptych.obs import metrics
from triptych.testing.fake_device import FakeDevice
from triptych.testing.receivers import FakeKvReceiver
from triptych.transport.link import KvLink
from triptych.transport.retiling import RetilingHandoff, open_handoff

host = link_house.host

NUM_TOKENS, NUM_HELD = 9, 2
CREDIT = Grant("grant-1", "prefill-1", 21, b"c" * 16, 4, 0)
FORMATS = {
    "smaller pages": PageFormat(1, KvDtype.FLOAT32),
    "pages that share no border": PageFormat(3, KvDtype.FLOAT32),
    "larger pages": PageFormat(8, KvDtype.FLOAT32),
    "bfloat16": PageFormat(PAGES.format.page_tokens, KvDtype.BFLOAT16),
    "bfloat16 in larger pages": PageFormat(6, KvDtype.BFLOAT16),
}


class Sender:
    """A prompt in a pool of that format: `dense` is (planes, tokens, elements of a token)."""

    def __init__(self, form: PageFormat, seed: int) -> None:
        dtype = getattr(torch, form.dtype.value)
        torch.manual_seed(seed)
        num_pages = -(-NUM_TOKENS // form.page_tokens)
        self.pages = list(range(num_pages, 0, -1))
        self.dense = torch.randn(4, NUM_TOKENS, 2).to(dtype)
        pool = torch.zeros(2, 2, num_pages + 1, 2, form.page_tokens, 1, dtype=dtype)
        for token in range(NUM_TOKENS):
            page, within = divmod(token, form.page_tokens)
            pool[:, :, self.pages[page], :, within, 0] = self.dense[:, token].view(2, 2, 2)
        self.source = PoolPages(pool)

    async def send(self, link: KvLink, receiver: FakeKvReceiver) -> int:
        """The whole prompt, page by page; returns what was sent, in bytes."""
        receiver.credits["grant-1"], receiver.num_held_tokens = CREDIT, NUM_HELD
        bound = await link.bind_kv(REF, CREDIT)
        handoff, moved = open_handoff(link, bound, self.source, NUM_TOKENS, EVENTS), 0
        assert isinstance(handoff, RetilingHandoff) and not handoff.is_congested
        begin = NUM_HELD // self.source.layout.format.page_tokens
        for number, page in enumerate(self.pages[begin:]):
            moved += await asyncio.to_thread(handoff.copy, [page], number)
        await link.commit_kv(REF, bound, NUM_TOKENS, moved, Token(0, 5), 0)
        return moved

    def check(self, arena: memoryview) -> None:
        """The receiver's pages, in order behind what it held: float32 (planes, pages, heads, 2 tokens, 1)."""
        landed = torch.from_numpy(np.frombuffer(arena, dtype=np.float32).copy()).view(4, -1, 2, 2)
        tokens = landed[:, :4].permute(0, 1, 3, 2).reshape(4, 8, 2)[:, : NUM_TOKENS - NUM_HELD]
        assert torch.equal(tokens, self.dense[:, NUM_HELD:].float())


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
async def test_a_prompt_lands_in_pages_of_the_receivers(
    host: Host, transport: str, form: PageFormat, seed: int
) -> None:
    pool, sender = host.pool(sender_by(transport, host), KvTerms(form)), Sender(form, seed)
    link = await pool.kv_link(host.info, KV_LAYOUT)
    assert link.page_format == PAGES.format and link.transport == transport.split("-")[0]
    assert await sender.send(link, host.kv) == 4 * PAGES.page_bytes == host.kv.landed["grant-1"].num_bytes
    sender.check(host.kv.arena.buffer)
    await pool.close()


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
async def test_a_prompt_lands_in_device_memory_too(tmp_path: Path, form: PageFormat, seed: int) -> None:
    mine, sender = FakeDevice(tmp_path), Sender(form, seed)
    async with device_house.running(tmp_path) as far:
        pool = far.pool(mine, kv=KvTerms(form))
        link = await pool.kv_link(far.info, KV_LAYOUT)
        await sender.send(link, far.kv)
        assert link.transport == "cuda_ipc"
        sender.check(far.kv.arena.buffer)
        await pool.close()
    mine.close()


async def test_a_source_of_another_format_is_not_sent_as_it_is(host: Host, seed: int) -> None:
    form = FORMATS["pages that share no border"]
    pool, sender = host.pool(SENDER, KvTerms(form)), Sender(form, seed)
    link = await pool.kv_link(host.info, KV_LAYOUT)
    host.kv.credits["grant-1"] = CREDIT
    with pytest.raises(TransferRefused, match="another format"):
        link.page_writer(await link.bind_kv(REF, CREDIT), sender.source, EVENTS)
    await pool.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_numbers_are_rounded_only_where_both_sides_allow_it(host: Host, transport: str, seed: int) -> None:
    """The receiver keeps bfloat16 here; what it lands is torch's own rounding."""
    form = PageFormat(3, KvDtype.FLOAT32)
    arena = host.kv.arena
    narrow = replace(PAGES, cell_bytes=8, format=PageFormat(2, KvDtype.BFLOAT16))
    for theirs, ours in ((False, False), (True, False), (False, True)):
        host.kv.arena = replace(arena, pages=narrow, may_narrow=theirs)
        pool = host.pool(sender_by(transport, host), KvTerms(form, ours))
        with pytest.raises(TransferRefused, match=r"float32 would be rounded to bfloat16.*--allow-kv-narrowing"):
            await pool.kv_link(host.info, KV_LAYOUT)
        await pool.close()
    counter = metrics.FALLBACKS.labels("kv_narrowed")
    before = counter._value.get()
    host.kv.arena = replace(arena, pages=narrow, may_narrow=True)
    pool, sender = host.pool(sender_by(transport, host), KvTerms(form, may_narrow=True)), Sender(form, seed)
    link = await pool.kv_link(host.info, KV_LAYOUT)
    await sender.send(link, host.kv)
    landed = torch.from_numpy(np.frombuffer(arena.buffer, dtype=np.int16).copy()).view(torch.bfloat16).view(4, -1, 2, 2)
    tokens = landed[:, :4].permute(0, 1, 3, 2).reshape(4, 8, 2)[:, : NUM_TOKENS - NUM_HELD]
    assert torch.equal(tokens, sender.dense[:, NUM_HELD:].to(torch.bfloat16))
    assert counter._value.get() == before + 1
    await pool.close()
