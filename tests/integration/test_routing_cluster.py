"""Two real workers a stage agree with the simulation in direction: less is encoded and computed than in turns."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

from services.router.placement import ClusterView, complete_paths
from services.router.routing.forecast import Share
from services.router.routing.homes import Found
from services.router.routing.prompt import Prompt
from services.router.routing.routing import Choice, Routing
from tests.integration import tiny_cluster
from tests.integration.stage_asking import asked, eventually, picture
from tests.integration.tiny_cluster import SMALL_POOL
from triptych.core.ids import new_request_id
from triptych.core.plan import Plan
from triptych.testing.cluster import InProcessCluster

model_dir = tiny_cluster.model_dir
QUESTION = "what is it, and what is beside it, and why are there two of them in one picture?"
# Numbers that take turns do not fall in with.
NUM_USERS, NUM_TURNS, NUM_PICTURES = 5, 3, 3


class RoundRobin(Routing):
    """What others do: each stage in turns, each picture at the next encoder."""

    def __init__(self) -> None:
        super().__init__()
        self._encoders = itertools.count()
        self._requests = itertools.count()

    def choose(self, view: ClusterView, prompt: Prompt, turn: int, known: Found | None = None) -> Choice:
        found = super().choose(view, prompt, turn, known).considered
        paths = complete_paths(view, has_pictures=bool(prompt.pictures))
        start = next(self._requests)
        path = paths[start % len(paths)]
        chosen = next(each for each in found if each.forecast.path == path)
        encoders = [path.encoders[next(self._encoders) % len(path.encoders)] for _ in prompt.pictures]
        shares = tuple(Share(*each) for each in zip(prompt.pictures, itertools.repeat("rendezvous"), encoders))
        blind = dataclasses.replace(chosen, forecast=dataclasses.replace(chosen.forecast, shares=shares))
        return Choice((blind,), found)


async def totals(model_dir: Path, routing: Routing | None) -> tuple[int, int]:
    """Encodes and prompt tokens computed, over users who talk in turns about a few pictures."""
    counts = {"num_encoders": 2, "num_prefills": 2, "num_decodes": 2}
    encodes = computed = 0
    async with InProcessCluster(model_dir, kv_pool_bytes=SMALL_POOL, **counts) as cluster:
        index = cluster.pipeline.routing.index
        await eventually(lambda: all(index.is_synced(worker.ref) for worker in cluster.workers))
        if routing is not None:
            cluster.pipeline.routing = routing
        plans = [
            (cluster.plan(asked(f"{user} {QUESTION}", picture(user % NUM_PICTURES), max_tokens=4)), user % NUM_PICTURES)
            for user in range(NUM_USERS)
        ]
        for _ in range(NUM_TURNS):
            for user, (plan, shown) in enumerate(plans):
                async with cluster.pipeline.answer(plan, (picture(shown),), new_request_id()) as answer:
                    ids = [t.id async for event in answer.events() if hasattr(event, "tokens") for t in event.tokens]
                encodes += sum(event.event == "encode" for event in answer.all_events())
                computed += plan.num_prompt_tokens - answer.progress.cached_tokens
                plans[user] = (next_turn(plan, ids), shown)
    return encodes, computed


def next_turn(plan: Plan, ids: list[int]) -> Plan:
    return dataclasses.replace(plan, compact_ids=(*plan.compact_ids, *ids, *range(40, 60)))


async def test_less_is_encoded_and_computed_than_in_turns(model_dir: Path) -> None:
    ours, theirs = await totals(model_dir, None), await totals(model_dir, RoundRobin())
    assert ours[0] == NUM_PICTURES < theirs[0], "each picture is encoded once"
    assert ours[1] < theirs[1]
