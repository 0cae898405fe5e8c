"""What the timed fakes know of time and caches: pure, so that a test can follow it.

A fake stage is one machine that does one thing at a time. What a cache holds costs nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Pace:
    """How long stages take. `step_s` is the time between two decode steps, which all answers of a worker share.

    With `prefill_token_s` prefill computes what its prefix cache does not hold; with `encode_s` each picture that no
    cache holds takes so long at its encoder. `cached_tokens` and `cached_pictures` bound what one worker remembers; 0
    is nothing.
    """

    prefill_s: float = 0.005
    prefill_token_s: float = 0.0
    encode_s: float = 0.0
    step_s: float = 0.004
    cached_tokens: int = 0
    cached_pictures: int = 0


class PrefixCache:
    """Blocks of prompts by the hash of all that comes before and in them; the least recently used go first."""

    def __init__(self, max_tokens: int) -> None:
        self._max_blocks = max_tokens // BLOCK_TOKENS
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, ids: Sequence[int]) -> int:
        """How many tokens of the beginning it holds; never all, because the last has to be computed."""
        count = 0
        for number in _chain(ids):
            if number not in self._blocks:
                break
            count += BLOCK_TOKENS
        return min(count, len(ids) - 1)

    def keep(self, ids: Sequence[int]) -> None:
        for number in _chain(ids):
            self._blocks[number] = None
            self._blocks.move_to_end(number)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)


class PictureCache:
    """Identities of pictures; the least recently used go first."""

    def __init__(self, max_pictures: int) -> None:
        self._max_pictures = max_pictures
        self._known: OrderedDict[bytes, None] = OrderedDict()

    def has(self, identity: bytes) -> bool:
        return identity in self._known

    def keep(self, identity: bytes) -> None:
        self._known[identity] = None
        self._known.move_to_end(identity)
        while len(self._known) > self._max_pictures:
            self._known.popitem(last=False)


def _chain(ids: Sequence[int]) -> list[int]:
    numbers: list[int] = []
    before = 0
    for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        before = hash((before, *ids[start : start + BLOCK_TOKENS]))
        numbers.append(before)
    return numbers


def next_step_s(now_s: float, step_s: float) -> float:
    """When the decode step after `now_s` ends: steps go by a clock that all answers of a worker share."""
    return (math.floor(now_s / step_s) + 1) * step_s
