"""Who asks what, and when: conversations about pictures, most of which have been seen before."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

from triptych.core.plan import Grid, Item, Modality, Plan, Sampling, TokenRange

PLACEHOLDER_ID = 7
NUM_SYSTEM_TOKENS = 48
SIDES = (16, 16, 24, 32)
"""Patches along a picture's side; four patches are one token, as with the bundled model."""


@dataclass(frozen=True, slots=True)
class Workload:
    """`reuse` of the pictures have been asked about before, by whomever; `think_s` is the mean time from an answer to
    the next question of the same user. With `shares_nothing` no prompt begins like another: each turn is a conversation
    of its own, with no system prompt in common."""

    name: str
    num_users: int = 30
    num_turns: int = 8
    reuse: float = 0.8
    think_s: float = 2.0
    answer_tokens: tuple[int, int] = (24, 64)
    question_tokens: tuple[int, int] = (20, 60)
    shares_nothing: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """A question after everything that was said before it. `answer_ids` are what will be answered."""

    plan: Plan
    answer_ids: tuple[int, ...]
    think_s: float


class Album:
    """All pictures of a run."""

    def __init__(self, rng: random.Random, reuse: float) -> None:
        self._rng = rng
        self._reuse = reuse
        self.seen: list[tuple[bytes, Grid]] = []

    def next(self) -> tuple[bytes, Grid]:
        """One that was seen before, or another."""
        if self.seen and self._rng.random() < self._reuse:
            return self._rng.choice(self.seen)
        side = self._rng.choice(SIDES)
        identity = hashlib.sha256(b"%d" % self._rng.getrandbits(62)).digest()
        self.seen.append((identity, Grid(1, side, side)))
        return self.seen[-1]


class User:
    """One conversation, turn by turn."""

    def __init__(self, workload: Workload, rng: random.Random, album: Album) -> None:
        self._workload = workload
        self._rng = rng
        self._album = album
        self._ids: list[int] = list(range(1000, 1000 + NUM_SYSTEM_TOKENS))
        self._items: list[Item] = []

    def turns(self) -> Iterator[Turn]:
        for _ in range(self._workload.num_turns):
            yield self._turn()

    def _turn(self) -> Turn:
        if self._workload.shares_nothing:
            self._ids, self._items = [], []
            self._say(self._workload.question_tokens)
        self._show(*self._album.next())
        self._say(self._workload.question_tokens)
        answer = self._words(self._workload.answer_tokens)
        plan = Plan(tuple(self._ids), tuple(self._items), Sampling(len(answer)), 600.0)
        self._ids += answer
        return Turn(plan, tuple(answer), self._rng.expovariate(1 / self._workload.think_s))

    def _show(self, identity: bytes, grid: Grid) -> None:
        num_tokens = grid.h * grid.w // 4
        offset = len(self._ids) + sum(item.num_tokens - 1 for item in self._items)
        run = TokenRange(len(self._ids), offset, num_tokens)
        self._items.append(Item(Modality.IMAGE, identity, num_tokens, (run,), grid))
        self._ids.append(PLACEHOLDER_ID)

    def _say(self, between: tuple[int, int]) -> None:
        self._ids += self._words(between)

    def _words(self, between: tuple[int, int]) -> list[int]:
        return [self._rng.randrange(2000, 9000) for _ in range(self._rng.randint(*between))]
