"""Does the demo model notice? Faults planted in the running cluster change its answers.

The questions are those of `witnesses.json`. On all of them the sound system is right; with a fault at least one of its
witnesses goes wrong, and once it is gone they are right again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path

import pytest

from tests.parity import engine_faults, witnesses
from tests.parity.reference import ReferenceModel
from tests.parity.stock_faults import answer
from tests.parity.witnesses import Question, Witness
from triptych.testing.cluster import ChatRequest, InProcessCluster

ANSWER_TOKENS = 64
AT_ONCE = 8

Planted = Callable[[Witness], contextlib.AbstractContextManager[None]]

FAULTS: dict[str, Planted] = {
    "pictures swapped": lambda witness: engine_faults.pictures_swapped(),
    "embeddings reversed": lambda witness: engine_faults.embeddings_reversed(),
    "delta dropped": lambda witness: engine_faults.delta_dropped(),
    "keys exchanged": lambda witness: engine_faults.keys_exchanged(_given(witness.layer)),
    "stale page": lambda witness: engine_faults.stale_page(_given(witness.page)),
}


def _given(value: int | None) -> int:
    assert value is not None
    return value


class Asker:
    """Asks a cluster and reads the answers as text."""

    def __init__(self, cluster: InProcessCluster, reference: ReferenceModel) -> None:
        self._cluster = cluster
        self._tokenizer = reference.tokenizer
        self._stops = cluster.adapter.eos_token_ids

    async def answers(self, questions: Sequence[Question], at_once: int) -> list[str]:
        results = await self._cluster.generate_many([self._request(q) for q in questions], concurrency=at_once)
        return [self._tokenizer.decode([t for t in r.token_ids if t not in self._stops]) for r in results]

    async def with_fault(self, witness: Witness, plant: Planted) -> str:
        """The answer to a witness question with its fault planted; with its donor before it, or beside it."""
        self._cluster.clear_caches()
        pair = [witness.asked] if witness.donor is None else [witness.donor, witness.asked]
        with plant(witness):
            answers = await self.answers(pair, at_once=2 if witness.layer is not None else 1)
        self._cluster.clear_caches()  # what was computed with the fault must not be served without it
        return answers[-1]

    def _request(self, asked: Question) -> ChatRequest:
        prompt = asked.prompt
        return ChatRequest(prompt.messages, prompt.media, ANSWER_TOKENS, stop_token_ids=self._stops)


def wrong(questions: Sequence[Question], answers: Sequence[str]) -> list[str]:
    pairs = zip(questions, answers, strict=True)
    return [f"{q.question} {answer!r} instead of {q.answer!r}" for q, answer in pairs if answer != q.answer]


@pytest.fixture(scope="module")
def every_witness() -> list[Witness]:
    return witnesses.load()


def test_parity_witness_list_has_every_fault(every_witness: list[Witness]) -> None:
    assert {witness.fault for witness in every_witness} == set(FAULTS)


@pytest.mark.timeout(120)
def test_parity_witnesses_are_right_in_the_reference(
    references: dict[str, ReferenceModel], every_witness: list[Witness]
) -> None:
    """When this fails, the demo model or its pictures changed: `python -m tests.parity.find_witnesses`."""
    demo, questions = references["demo"], [witness.asked for witness in every_witness]
    stops = frozenset(demo.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    answers = [demo.tokenizer.decode(answer(demo, question.prompt, stops).tokens) for question in questions]
    assert not wrong(questions, answers)


@pytest.mark.timeout(120)
async def test_parity_sound_cluster_is_right_on_every_witness(
    references: dict[str, ReferenceModel], model_dirs: dict[str, Path], every_witness: list[Witness]
) -> None:
    questions = [witness.asked for witness in every_witness]
    async with InProcessCluster(model_dirs["demo"], "e-p-d") as cluster:
        answers = await Asker(cluster, references["demo"]).answers(questions, AT_ONCE)
    assert not wrong(questions, answers)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", FAULTS)
async def test_parity_planted_fault_shows(
    references: dict[str, ReferenceModel], model_dirs: dict[str, Path], every_witness: list[Witness], fault: str
) -> None:
    chosen = [witness for witness in every_witness if witness.fault == fault]
    questions = [witness.asked for witness in chosen]
    donors = [witness.donor for witness in chosen if witness.donor is not None]
    async with InProcessCluster(model_dirs["demo"], "e-p-d") as cluster:
        asker = Asker(cluster, references["demo"])
        assert not wrong(questions, await asker.answers(questions, AT_ONCE)), "wrong before the fault is planted"
        faulty = wrong(questions, [await asker.with_fault(witness, FAULTS[fault]) for witness in chosen])
        print(f"{fault}: {len(faulty)} of {len(chosen)} witnesses went wrong: {faulty}")
        assert faulty, "the fault does not show"
        pairs = list(chain(questions, donors))
        after = (await asker.answers(pairs, AT_ONCE))[: len(questions)]
        assert not wrong(questions, after), "still wrong after the fault is gone"
        cluster.check_integrity()
