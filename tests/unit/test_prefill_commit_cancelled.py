"""A prefill call that is cancelled in the turn in which its commit leaves takes the commit back."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

from triptych.core.plan import Token
from triptych.stages.prefill import _PrefillRun


def _called(_: object) -> Future[None]:
    answer: Future[None] = Future()
    answer.set_result(None)
    return answer


async def test_a_call_cancelled_as_its_commit_leaves_leaves_no_commit_behind() -> None:
    is_over = asyncio.Event()
    was_over_at_abort: list[bool] = []

    class Run(_PrefillRun):
        async def _commit(self, token: Token, num_bytes: int) -> None:
            caller.cancel()
            try:
                await asyncio.Event().wait()
            finally:
                is_over.set()

    class Link:
        async def abort(self, *_: object) -> None:
            was_over_at_abort.append(is_over.is_set())

    parts = SimpleNamespace(
        worker=SimpleNamespace(worker_id="p"),
        clock=SimpleNamespace(monotonic_ns=lambda: 0),
        engine=SimpleNamespace(call=_called, abort=lambda *_: None),
    )
    grant = SimpleNamespace(worker_id="d", epoch=1, grant_id=1)
    run = Run(cast(Any, parts), cast(Any, SimpleNamespace(attempt=1)), cast(Any, None), cast(Any, grant))
    run._link = cast(Any, Link())
    caller = asyncio.create_task(run._start_commit(cast(Any, None), 1))
    await asyncio.gather(caller, return_exceptions=True)
    assert caller.cancelled()
    await run._release()
    assert was_over_at_abort == [True]
