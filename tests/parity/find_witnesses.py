"""Searches the questions that react to planted faults, and writes `witnesses.json`.

    python -m tests.parity.find_witnesses [--per-fault 4] [--tries 300]

Only the stock model is asked, with the faults of `stock_faults` planted in it.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice

from scripts.demo_model.questions import Turn, about_picture, about_pictures, pick_turns
from scripts.demo_model.scenes import evaluation_seed, make_scene
from tests.parity import stock_faults
from tests.parity.checkpoints import DEMO_DIR
from tests.parity.reference import ReferenceModel, one_thread
from tests.parity.stock_faults import PAGE_TOKENS, CacheFault, Fault, answer, keys_of_another, stale_page
from tests.parity.witnesses import RUN, Question, Witness, save

MODEL_FAULTS: dict[str, Fault] = {
    "pictures swapped": stock_faults.pictures_swapped,
    "embeddings reversed": stock_faults.embeddings_reversed,
    "delta dropped": stock_faults.delta_dropped,
}
KEYS, STALE = "keys exchanged", "stale page"
ANSWER_TOKENS = 64
SURE = 2.0
"""Least distance, in logits, from the chosen token to the runner-up over a whole answer."""


class Searcher:
    """Asks the stock model, with and without faults."""

    def __init__(self, reference: ReferenceModel) -> None:
        self.reference = reference
        self.stops = frozenset(reference.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
        self.layers = reference.model.config.text_config.num_hidden_layers

    def text(self, tokens: list[int]) -> str:
        return str(self.reference.tokenizer.decode(tokens))

    def is_right(self, asked: Question) -> bool:
        """And sure of it, so that the question outlives another precision and small changes of the weights."""
        given = answer(self.reference, asked.prompt, self.stops)
        return self.text(given.tokens) == asked.answer and given.margin >= SURE

    def reactions(self, asked: Question, donor: Question, faults: set[str]) -> Iterator[Witness]:
        """Those of `faults` that make the answer to `asked` wrong."""
        for name, fault in MODEL_FAULTS.items():
            if name in faults and self._is_wrong_with(fault, asked):
                yield Witness(name, asked)
        if KEYS in faults:
            tries = (Witness(KEYS, asked, donor, layer=layer) for layer in range(self.layers))
            yield from islice((w for w in tries if self._is_wrong_over(keys_of_another(_given(w.layer)), w)), 1)
        if STALE in faults:
            pages = range(self._shared_pages(asked, donor))
            tries = (Witness(STALE, asked, donor, page=page) for page in pages)
            yield from islice((w for w in tries if self._is_wrong_over(stale_page(_given(w.page)), w)), 1)

    def _is_wrong_over(self, corrupt: CacheFault, witness: Witness) -> bool:
        assert witness.donor is not None
        asked, donor = witness.asked, witness.donor
        given = answer(self.reference, asked.prompt, self.stops, donor=donor.prompt, corrupt=corrupt)
        return self.text(given.tokens) != asked.answer

    def _is_wrong_with(self, fault: Fault, asked: Question) -> bool:
        with fault(self.reference):
            tokens = list(self.reference.generate_now(asked.prompt, ANSWER_TOKENS).tokens)
        ends = [i for i, token in enumerate(tokens) if token in self.stops]
        return self.text(tokens[: ends[0]] if ends else tokens) != asked.answer

    def _shared_pages(self, asked: Question, donor: Question) -> int:
        lengths = [self.reference.inputs(q.prompt)["input_ids"].shape[1] for q in (asked, donor)]
        return min(lengths) // PAGE_TOKENS


def _given(value: int | None) -> int:
    assert value is not None
    return value


def questions() -> Iterator[tuple[Question, Question]]:
    """Pairs (asked, donor) in a fixed order; half of those asked are about two pictures."""
    rng, index = random.Random(RUN), 0
    while True:
        scenes = tuple(range(index, index + 1 + index // 3 % 2))
        yield _question(rng, scenes), _question(rng, (index + 2,))
        index += 3


def _question(rng: random.Random, indexes: tuple[int, ...]) -> Question:
    scenes = [make_scene(evaluation_seed(RUN, i)) for i in indexes]
    turns: list[Turn] = about_picture(scenes[0]) if len(scenes) == 1 else about_pictures(scenes)
    turn = pick_turns(rng, turns, 1)[0]
    return Question(indexes, turn.question, turn.answer)


def find(searcher: Searcher, per_fault: int, tries: int) -> list[Witness]:
    """`per_fault` witnesses for each fault, from the first `tries` questions."""
    found: list[Witness] = []
    for asked, donor in islice(questions(), tries):
        counts = Counter(witness.fault for witness in found)
        wanted = {fault for fault in (*MODEL_FAULTS, KEYS, STALE) if counts[fault] < per_fault}
        if not wanted:
            break
        if searcher.is_right(asked):
            found += searcher.reactions(asked, donor, wanted)
    return sorted(found, key=lambda witness: witness.fault)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--per-fault", type=int, default=4)
    parser.add_argument("--tries", type=int, default=300)
    options = parser.parse_args()
    with one_thread():
        found = find(Searcher(ReferenceModel(DEMO_DIR)), options.per_fault, options.tries)
    save(found)
    for fault, count in Counter(witness.fault for witness in found).items():
        print(f"{fault}: {count}")


if __name__ == "__main__":
    main()
