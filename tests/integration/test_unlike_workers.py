"""Workers of one cluster that cannot all send to each other: every request takes a path that can be gone to its end."""

from __future__ import annotations

import dataclasses
import os
import random
from pathlib import Path

import pytest
import torch

from tests.integration.test_cancellation import asked
from tests.parity.checkpoints import DEFAULT_SEED, DEMO_DIR, make_tiny_qwen2_5_vl
from triptych.core.errors import Unavailable
from triptych.core.worker import Role
from triptych.stages.worker import WorkerPlan
from triptych.testing.cluster import InProcessCluster
from triptych.testing.holdings import until_idle

NUM_REQUESTS = 16


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    base = Path(os.environ.get("DEMO_MODEL_DIR") or DEMO_DIR)
    return make_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny-qwen2-5-vl"), DEFAULT_SEED, base)


class UnlikeCluster(InProcessCluster):
    """`e-p-d` with two of each stage; `pages`, `transports` and `dtypes` name the workers that differ."""

    def __init__(
        self, model_dir: Path, pages: dict[str, int], transports: dict[str, str], dtypes: dict[str, str]
    ) -> None:
        super().__init__(model_dir, num_encoders=2, num_prefills=2, num_decodes=2)
        self._pages, self._transports, self._dtypes = pages, transports, dtypes

    def _plan_of(self, worker_id: str, roles: frozenset[Role]) -> WorkerPlan:
        plan = super()._plan_of(worker_id, roles)
        common = dataclasses.replace(
            plan.common,
            transport=self._transports.get(worker_id, plan.common.transport),
            dtype=self._dtypes.get(worker_id, plan.common.dtype),
        )
        language = plan.language
        if language is not None:
            language = dataclasses.replace(language, page_tokens=self._pages.get(worker_id, language.page_tokens))
        return dataclasses.replace(
            plan,
            common=common,
            prefill=language if plan.prefill is not None else None,
            decode=language if plan.decode is not None else None,
        )


Differences = tuple[dict[str, int], dict[str, str], dict[str, str]]

UNLIKE: dict[str, Differences] = {
    "pages": ({"prefill-1": 8, "decode-1": 8}, {}, {}),
    "a decode worker that nobody can hand over to": ({"decode-1": 8}, {}, {}),
    "transports": (
        {},
        {"prefill-0": "shm", "decode-0": "shm", "prefill-1": "zmq-tcp", "decode-1": "zmq-tcp", "encoder-0": "shm"},
        {},
    ),
    "dtypes": ({}, {}, {"encoder-1": "bfloat16", "prefill-1": "bfloat16"}),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("differences", UNLIKE.values(), ids=UNLIKE)
async def test_no_request_is_sent_where_it_cannot_go_on(model_dir: Path, differences: Differences, seed: int) -> None:
    rng = random.Random(seed)
    requests = [asked(rng) for _ in range(NUM_REQUESTS)]
    async with InProcessCluster(model_dir, "mono") as mono:
        alone = await mono.generate_many(requests)
    async with UnlikeCluster(model_dir, *differences) as cluster:
        together = await cluster.generate_many(requests, concurrency=4)
        assert [result.token_ids for result in together] == [result.token_ids for result in alone]
        assert {event.attempt for result in together for event in result.timeline} == {0}, "none had to be repeated"
        await until_idle(cluster.workers)


@pytest.mark.timeout(120)
async def test_where_none_can_go_on_the_answer_says_what_is_wrong(model_dir: Path) -> None:
    pages = {"prefill-0": 8, "prefill-1": 8}
    async with UnlikeCluster(model_dir, pages, {}, {}) as cluster:
        with pytest.raises(Unavailable, match="cannot send to each other"):
            await cluster.generate(asked(random.Random(1)))
