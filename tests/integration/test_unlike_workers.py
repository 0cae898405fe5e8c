"""Workers of one cluster that cannot all send to each other: every request takes a path that can be gone to its end."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

from tests.integration.test_cancellation import asked
from tests.parity.checkpoints import DEFAULT_SEED, DEMO_DIR, make_tiny_qwen2_5_vl
from tests.unlike import Differences, UnlikeCluster
from triptych.core.errors import Unavailable
from triptych.testing.cluster import InProcessCluster
from triptych.testing.holdings import until_idle

NUM_REQUESTS = 16


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    base = Path(os.environ.get("DEMO_MODEL_DIR") or DEMO_DIR)
    return make_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny-qwen2-5-vl"), DEFAULT_SEED, base)


UNLIKE: dict[str, Differences] = {
    "pages": {"prefill-1": {"page_tokens": 8}, "decode-1": {"page_tokens": 24}},
    "a decode worker whose pages nobody has": {"decode-1": {"page_tokens": 8}},
    "transports": {
        "prefill-0": {"transport": "shm"},
        "decode-0": {"transport": "shm"},
        "prefill-1": {"transport": "zmq-tcp"},
        "decode-1": {"transport": "zmq-tcp"},
        "encoder-0": {"transport": "shm"},
    },
    "dtypes": {"encoder-1": {"dtype": "bfloat16"}, "prefill-1": {"dtype": "bfloat16"}},
    "a decode worker that would have to round": {"decode-1": {"dtype": "bfloat16"}},
}
TWO_OF_EACH = {"num_encoders": 2, "num_prefills": 2, "num_decodes": 2}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("differences", UNLIKE.values(), ids=UNLIKE)
async def test_no_request_is_sent_where_it_cannot_go_on(model_dir: Path, differences: Differences, seed: int) -> None:
    rng = random.Random(seed)
    requests = [asked(rng) for _ in range(NUM_REQUESTS)]
    async with InProcessCluster(model_dir, "mono") as mono:
        alone = await mono.generate_many(requests)
    async with UnlikeCluster(model_dir, "e-p-d", differences, **TWO_OF_EACH) as cluster:
        together = await cluster.generate_many(requests, concurrency=4)
        assert [result.token_ids for result in together] == [result.token_ids for result in alone]
        assert {event.attempt for result in together for event in result.timeline} == {0}, "none had to be repeated"
        await until_idle(cluster.workers)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "differences",
    [{"decode": {"dtype": "bfloat16"}}, {"decode": {"dtype": "bfloat16", "allow_kv_narrowing": True}}],
    ids=["nobody allows it", "one side does not"],
)
async def test_where_none_can_go_on_the_answer_says_what_is_wrong(model_dir: Path, differences: Differences) -> None:
    async with UnlikeCluster(model_dir, "e-p-d", differences) as cluster:
        with pytest.raises(Unavailable, match=r"cannot send to each other.*--allow-kv-narrowing"):
            await cluster.generate(asked(random.Random(1)))
