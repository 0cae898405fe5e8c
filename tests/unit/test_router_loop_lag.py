"""The router's watch over its own event loop."""

from __future__ import annotations

import asyncio
import time

from services.router.loop_lag import PERIOD_S, watch_loop_lag
from triptych.obs import metrics


async def test_what_blocks_the_loop_is_seen() -> None:
    total = metrics.ROUTER_LOOP_LAG_SECONDS._sum
    watch = asyncio.create_task(watch_loop_lag())
    await asyncio.sleep(PERIOD_S / 2)
    before = total.get()
    time.sleep(4 * PERIOD_S)  # noqa: ASYNC251 - the fault itself
    await asyncio.sleep(PERIOD_S)
    assert total.get() - before >= 3 * PERIOD_S
    watch.cancel()
