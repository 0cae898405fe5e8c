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
from tests.parity.stock_faults import PAGE_TOKENS, Fault, answer_ids, keys_of_another, stale_page
from tests.parity.witnesses import RUN, Question, Witness, save

MODEL_FAULTS: dict[str, Fault] = {
    "pictures swapped": stock_faults.pictures_swapped,
    "embeddings reversed": stock_faults.embeddings_reversed,
    "delta dropped": stock_faults.delta_dropped,
}
KEYS, STALE = "keys exchanged", "stale page"
ANSWER_TOKENS = 64


class Searcher:
    """Asks the stock model, with and without faults."""

    def __init__(self, reference: ReferenceModel) -> None:
        self.reference = reference
        self.stops = frozenset(reference.tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
        self.layers = reference.model.config.text_config.num_hidden_layers

    def text(self, tokens: list[int]) -> str:
        return str(self.reference.tokenizer.decode(tokens))

    def is_right(self, asked: Question) -> bool:
        return self.text(answer_ids(self.reference, asked.prompt, self.stops)) == asked.answer

    def reactions(self, asked: Question, donor: Question) -> Iterator[Witness]:
        """Every fault that makes the answer to `asked` wrong."""
        for name, fault in MODEL_FAULTS.items():
            if self._is_wrong_with(fault, asked):
                yield Witness(name, asked)
        for layer in range(self.layers):
            tokens = answer_ids(
                self.reference, asked.prompt, self.stops, donor=donor.prompt, corrupt=keys_of_another(layer)
            )
            if self.text(tokens) != asked.answer:
                yield Witness(KEYS, asked, donor, layer=layer)
                break
        for page in range(self._shared_pages(asked, donor)):
            tokens = answer_ids(self.reference, asked.prompt, self.stops, donor=donor.prompt, corrupt=stale_page(page))
            if self.text(tokens) != asked.answer:
                yield Witness(STALE, asked, donor, page=page)
                break

    def _is_wrong_with(self, fault: Fault, asked: Question) -> bool:
        with fault(self.reference):
            tokens = list(self.reference.generate_now(asked.prompt, ANSWER_TOKENS).tokens)
        ends = [i for i, token in enumerate(tokens) if token in self.stops]
        return self.text(tokens[: ends[0]] if ends else tokens) != asked.answer

    def _shared_pages(self, asked: Question, donor: Question) -> int:
        lengths = [self.reference.inputs(q.prompt)["input_ids"].shape[1] for q in (asked, donor)]
        return min(lengths) // PAGE_TOKENS


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
    wanted = {*MODEL_FAULTS, KEYS, STALE}
    for asked, donor in islice(questions(), tries):
        if not searcher.is_right(asked):
            continue
        counts = Counter(witness.fault for witness in found)
        if all(counts[fault] >= per_fault for fault in wanted):
            break
        found += [w for w in searcher.reactions(asked, donor) if counts[w.fault] < per_fault]
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
