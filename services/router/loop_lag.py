"""How long the event loop keeps a task waiting that is due: everything else that the router does waits as long."""

from __future__ import annotations

import asyncio
from typing import Final

from triptych.obs import metrics

PERIOD_S: Final = 0.1


async def watch_loop_lag() -> None:
    """Until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + PERIOD_S
        await asyncio.sleep(PERIOD_S)
        metrics.ROUTER_LOOP_LAG_SECONDS.observe(max(0.0, loop.time() - due_s))
