"""What the parity matrix is made of, and which part of it one run takes."""

from __future__ import annotations

import itertools
import os
import random
from dataclasses import dataclass

from tests.parity.prompts import FAMILY, Prompt, make_prompts

PROMPTS_SEED = 20_260
PROMPTS = 200
MODELS = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "demo")
TOPOLOGIES = ("mono", "e-p-d", "e-pd", "p-d")
TRANSPORTS = ("shm", "zmq")
CONCURRENCIES = (1, 8)
CHUNKS = (16, 64, 512)
HEATS = ("cold", "warm")

FAMILIES_A_CELL = 13
"""52 prompts. Six combos differ only in transport and chunk: together they ask every prompt."""

SAMPLED_COMBOS_A_MODEL = 3
SAMPLED_FAMILIES = 2


@dataclass(frozen=True, slots=True)
class Combo:
    """One cluster; it is asked with empty caches and then again, which makes two cells of the matrix."""

    model: str
    topology: str
    transport: str
    concurrency: int
    chunk_tokens: int

    @property
    def name(self) -> str:
        pace = "alone" if self.concurrency == 1 else f"{self.concurrency}-at-a-time"
        return f"{self.model}/{self.topology}/{self.transport}/{pace}/chunk-{self.chunk_tokens}"

    @property
    def families(self) -> tuple[int, ...]:
        """Numbers of the prompt families that a full run asks here."""
        turn = TRANSPORTS.index(self.transport) * len(CHUNKS) + CHUNKS.index(self.chunk_tokens)
        start = turn * FAMILIES_A_CELL
        return tuple((start + i) % (PROMPTS // FAMILY) for i in range(FAMILIES_A_CELL))


ALL_COMBOS = tuple(Combo(*parts) for parts in itertools.product(MODELS, TOPOLOGIES, TRANSPORTS, CONCURRENCIES, CHUNKS))


@dataclass(frozen=True, slots=True)
class Shard:
    """Every `count`-th combo from `index` on: several processes share a full run."""

    index: int
    count: int

    @classmethod
    def from_environment(cls) -> Shard:
        """`TRIPTYCH_PARITY_SHARD=1/2`, counted from 1."""
        index, count = os.environ.get("TRIPTYCH_PARITY_SHARD", "1/1").split("/")
        return cls(int(index) - 1, int(count))

    def combos(self) -> tuple[Combo, ...]:
        return ALL_COMBOS[self.index :: self.count]


def sampled_combos(seed: int) -> tuple[Combo, ...]:
    """A few of each model, other ones with each seed."""
    rng = random.Random(f"combos/{seed}")
    chosen = [rng.sample([c for c in ALL_COMBOS if c.model == model], SAMPLED_COMBOS_A_MODEL) for model in MODELS]
    return tuple(combo for combos in chosen for combo in combos)


def prompts_of(families: tuple[int, ...]) -> list[Prompt]:
    """Whole families, so that what resembles each other stays together."""
    every = make_prompts(PROMPTS_SEED, PROMPTS)
    return [prompt for family in families for prompt in every[family * FAMILY : (family + 1) * FAMILY]]


def sampled_families(seed: int, count: int) -> tuple[int, ...]:
    return tuple(sorted(random.Random(seed).sample(range(PROMPTS // FAMILY), count)))
