"""Clients of a cluster of processes that hang up at any moment: every worker's own metrics say that nothing is left."""

from __future__ import annotations

import asyncio
import base64
import random
import re
import time
import urllib.request
from typing import Any

import httpx
import pytest

from tests.parity.prompts import draw_picture
from tests.seed import IS_FULL
from triptych.cli import sample

NUM_LEAVING = 1_000 if IS_FULL else 60
AT_ONCE = 12
LONGEST_STAY_S = 0.6
PATIENCE_S = 20.0
AT_REST = re.compile(
    r"triptych_(?:kv_pages\{state=\"(?:owned|leased|quarantined)\"\}"
    r"|landing_bytes\{state=\"(?:owned|quarantined)\"\}"
    r"|encoder_queue_depth|media_queue_depth|prefill_queue_depth|prefill_running_sequences"
    r"|decode_running_sequences|decode_waiting_kv_sequences|decode_retracted_sequences|host_pool_bytes"
    r"|open_circuits|router_queue_depth|router_inflight_requests) (\S+)"
)
MIN_LINES = 11
"""Of which the pattern above speaks, in each process: were a metric renamed, it would look at nothing."""


def held(address: str) -> list[str]:
    """What a process still holds, in its own words."""
    text = urllib.request.urlopen(f"http://{address}/metrics", timeout=5).read().decode()
    lines = [match for line in text.splitlines() if (match := AT_REST.fullmatch(line))]
    assert len(lines) >= MIN_LINES, lines
    return [match[0] for match in lines if float(match[1])]


def shows_pages(address: str) -> bool:
    return 'triptych_kv_pages{state="leased"}' in urllib.request.urlopen(f"http://{address}/metrics").read().decode()


def body(model: str, dice: random.Random) -> dict[str, Any]:
    """Text that is new and up to two pictures of twenty, streamed."""
    content: list[dict[str, Any]] = [{"type": "text", "text": f"{dice.random()}: {sample.QUESTION}"}]
    for _ in range(dice.choice((0, 1, 2))):
        picture = base64.b64encode(draw_picture(dice.randrange(20), (112, 84))).decode()
        content.append({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}})
    return {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 64,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }


async def leave(client: httpx.AsyncClient, asked: dict[str, Any], stay_s: float) -> bool:
    """Whether it left before the answer's end."""
    try:
        async with asyncio.timeout(stay_s):
            async with client.stream("POST", "/v1/chat/completions", json=asked) as response:
                assert response.status_code == 200, "a refusal is not left"
                async for _ in response.aiter_bytes():
                    pass
    except TimeoutError:
        return True
    return False


async def ask(client: httpx.AsyncClient, asked: dict[str, Any]) -> str:
    answer = await client.post("/v1/chat/completions", json={**asked, "stream": False})
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.cluster
@pytest.mark.timeout(900)
async def test_clients_that_hang_up_leave_nothing_in_any_process(cluster_ready: dict[str, Any], seed: int) -> None:
    dice, gate = random.Random(seed), asyncio.Semaphore(AT_ONCE)
    url = cluster_ready["url"]
    addresses = {name: worker["metrics_address"] for name, worker in cluster_ready["workers"].items()}
    addresses["router"] = url.removeprefix("http://")
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        truth_of = body(model, random.Random(1))
        truth = await ask(client, truth_of)

        async def one(asked: dict[str, Any], stay_s: float) -> bool:
            async with gate:
                return await leave(client, asked, stay_s)

        asked = [(body(model, dice), dice.random() * LONGEST_STAY_S) for _ in range(NUM_LEAVING)]
        left = await asyncio.gather(*(one(*each) for each in asked))
        assert sum(left) >= NUM_LEAVING // 3, "hardly anybody left"
        give_up_at_s = time.monotonic() + PATIENCE_S
        assert await asyncio.to_thread(shows_pages, addresses["decode-0"])
        while found := {n: lines for n, a in addresses.items() if (lines := await asyncio.to_thread(held, a))}:
            assert time.monotonic() < give_up_at_s, found
            await asyncio.sleep(0.1)
        assert await ask(client, truth_of) == truth
