"""What a prompt costs the radix cache with a million tokens in it, against ten thousand.

    python benchmarks/radix_cost.py [--json FILE]

An operation is all that the cache does for one prompt: match, lock, take pages (evicting as many, the pool is full),
insert what is new, unlock. Three kinds of prompts, of 512 cached tokens and 64 new ones: `even`, all cached prompts
in turn; `hot`, sixteen in turn; `new`, of which nothing is cached. A cached prompt comes again before it is evicted, so
that both sizes do the same work. The two take turns, each first every other time, and a ratio is the median over rounds
of the round's medians: what else the machine does meets both alike. Prompts are made from their numbers, outside the
clock, so that ids come fresh as from a tokenizer and no table of prompts is in cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from triptych.kv.manager import CacheManager

PAGE_TOKENS = 16
PROMPT_TOKENS, NEW_TOKENS = 512, 64
VOCABULARY = 150_000
NUM_HOT = 16


def prompt(number: int, num_tokens: int) -> list[int]:
    """The same ids for the same number."""
    ids: list[int] = np.random.default_rng(number).integers(0, VOCABULARY, num_tokens).tolist()
    return ids


@dataclass
class Arm:
    """A full cache of so many tokens."""

    manager: CacheManager
    num_prompts: int
    num_served: int = 0

    @classmethod
    def holding(cls, num_tokens: int) -> Arm:
        num_prompts = num_tokens // (PROMPT_TOKENS + NEW_TOKENS)
        arm = cls(CacheManager(num_tokens // PAGE_TOKENS + 1, PAGE_TOKENS), num_prompts)
        for _ in range(2 * num_prompts):  # once for the prompts, once more for as many tails as there is room for
            arm.serve(even(arm))
        return arm

    def serve(self, ids: list[int]) -> float:
        """Seconds that one prompt takes."""
        start = time.perf_counter()
        pages = self.manager.reserve(b"", ids, len(ids))
        assert pages is not None
        self.manager.share(pages, ids, len(ids))
        self.manager.release(pages)
        return time.perf_counter() - start

    def known(self, num_prompts: int) -> list[int]:
        """One of the first so many prompts, in turn, and what nobody has asked yet."""
        return prompt(self.num_served % num_prompts, PROMPT_TOKENS) + self.fresh(NEW_TOKENS)

    def fresh(self, num_tokens: int) -> list[int]:
        self.num_served += 1
        return prompt((1 << 40) + self.num_served, num_tokens)

    def round(self, choose: Callable[[Arm], list[int]], count: int) -> float:
        """Median seconds over `count` prompts."""
        return statistics.median(self.serve(choose(self)) for _ in range(count))


def even(arm: Arm) -> list[int]:
    return arm.known(arm.num_prompts)


def hot(arm: Arm) -> list[int]:
    return arm.known(NUM_HOT)


def new(arm: Arm) -> list[int]:
    return arm.fresh(PROMPT_TOKENS + NEW_TOKENS)


def compare(small: Arm, large: Arm, choose: Callable[[Arm], list[int]], rounds: int, count: int) -> dict[str, float]:
    seconds: dict[int, list[float]] = {id(small): [], id(large): []}
    for number in range(rounds):
        for arm in (small, large) if number % 2 else (large, small):
            seconds[id(arm)].append(arm.round(choose, count))
    pairs = zip(seconds[id(small)], seconds[id(large)], strict=True)
    return {
        "ratio": round(statistics.median(high / low for low, high in pairs), 3),
        "microseconds_10k": round(1e6 * statistics.median(seconds[id(small)]), 2),
        "microseconds_1m": round(1e6 * statistics.median(seconds[id(large)]), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="cost of a prompt in the radix cache, 1M against 10k cached tokens")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=40, help="prompts of a round")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    small, large = Arm.holding(10_240), Arm.holding(1_024_000)
    figures = {
        choose.__name__: compare(small, large, choose, options.rounds, options.prompts) for choose in (even, hot, new)
    }
    text = json.dumps({"radix_cost_1m_vs_10k": figures}, indent=2)
    if options.json is not None:
        options.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
