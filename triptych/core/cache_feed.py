"""What a worker tells the routers of its caches and its load, as values.

A feed is a snapshot and then deltas, numbered without gaps. Whoever misses one has to ask for a snapshot again; until
it comes he knows less, and requests are served all the same: nothing but speed depends on what a router believes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Holding(enum.Enum):
    """What a number in the feed is the number of.

    PAGE: a page of KV in the radix tree (`kv/page_chain.py`). LANDED: an embedding in a prefill worker's landing arena;
    ENCODED: one in an encoder's cache (both by `number_of`).
    """

    PAGE = "page"
    LANDED = "landed"
    ENCODED = "encoded"


@dataclass(frozen=True, slots=True)
class Change:
    """Numbers that are held from now on, and numbers that are not any more; none stands in both."""

    stored: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()


class FeedKind(enum.Enum):
    """SNAPSHOT begins anew: what was known of the worker before is void. PART goes on with it, under the same sequence.
    DELTA is what changed since the sequence before."""

    SNAPSHOT = "snapshot"
    PART = "part"
    DELTA = "delta"


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker has to do, and how fast it has been of late.

    Attributes:
        waiting_tokens: of prompts that are here, not computed yet.
        waiting_patches: of pictures that wait for the tower.
        free_pages: that a new sequence could get; None where there is no pool, or nobody has told.
        num_decoding: sequences in the decode batch.
        tokens_per_s: prompt tokens computed per second of steps; None until some were.
        patches_per_s: patches per second of vision passes; None until there was one.
    """

    waiting_tokens: int = 0
    waiting_patches: int = 0
    free_pages: int | None = None
    num_decoding: int = 0
    tokens_per_s: float | None = None
    patches_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class FeedMessage:
    """`epoch` is the worker process's. `load` is None where it has not changed."""

    epoch: int
    sequence: int
    kind: FeedKind
    changes: Mapping[Holding, Change] = field(default_factory=dict)
    load: WorkerLoad | None = None


def number_of(identity: bytes) -> int:
    """The short name of an item's embedding: the first 8 bytes of its identity."""
    return int.from_bytes(identity[:8], "big")
