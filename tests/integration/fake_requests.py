"""Plans for fake workers, and what is heard of their answers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from services.router.pipeline import Answer, Batch, Pipeline
from triptych.core.plan import FinishReason, Grid, Item, Modality, Plan, Sampling, TokenRange
from triptych.core.worker import Role

E, P, D = [Role.ENCODER], [Role.PREFILL], [Role.DECODE]


def item(number: int, media: bytes) -> Item:
    ranges = (TokenRange(number, number * 4, 4),)
    identity = hashlib.sha256(media).digest()
    return Item(Modality.IMAGE, identity, 4, ranges, Grid(1, 4, 4), len(media), 56, 56)


def plan_of(media: Sequence[bytes] = (), max_tokens: int = 5, timeout_s: float = 10.0) -> Plan:
    items = tuple(item(number, one) for number, one in enumerate(media))
    return Plan(tuple([7] * len(media) + [1, 2, 3]), items, Sampling(max_tokens, seed=1), timeout_s)


async def collect(answer: Answer) -> tuple[list[int], FinishReason]:
    ids: list[int] = []
    async for event in answer.events():
        if isinstance(event, Batch):
            assert [token.index for token in event.tokens] == list(range(len(ids), len(ids) + len(event.tokens)))
            ids += [token.id for token in event.tokens]
        else:
            return ids, event.finish_reason
    raise AssertionError("no end")


async def ask(pipeline: Pipeline, plan: Plan, media: Sequence[bytes] = (), name: str = "req-1") -> list[int]:
    async with pipeline.answer(plan, media, name) as answer:
        return (await collect(answer))[0]


def expected(count: int) -> list[int]:
    return [100 + index for index in range(count)]
