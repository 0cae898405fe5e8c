"""Which encoder encodes a picture: the one that its identity points to, unless that one has too much to do.

Rendezvous hashing: each encoder draws a number for the picture, and the highest wins. So the same picture meets the
same cache, whatever router asks; when an encoder leaves only its own pictures move, and when one comes it only takes.
The load is bounded: an encoder whose patches, with this picture's, would be more than LOAD_FACTOR times its even share
(and more than SLACK_S of work) is passed over for the next in the picture's own order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import xxhash

LOAD_FACTOR: Final = 1.25
SLACK_S: Final = 0.02
"""Of the tower's work: with less than that waiting nobody is passed over."""


@dataclass(frozen=True, slots=True)
class EncoderLoad:
    """`waiting_patches` of pictures that it has and has not encoded."""

    worker_id: str
    waiting_patches: float
    patches_per_s: float


def weight(identity: bytes, worker_id: str) -> int:
    """What the encoder draws for the picture."""
    return xxhash.xxh3_64_intdigest(identity + worker_id.encode())


def bound_patches(encoder: EncoderLoad, num_patches: int, total_patches: float, num_encoders: int) -> float:
    """The most that the encoder may have, this picture included."""
    even = LOAD_FACTOR * (total_patches + num_patches) / num_encoders
    return max(even, num_patches + SLACK_S * encoder.patches_per_s)


def choose_encoder(identity: bytes, num_patches: int, encoders: Sequence[EncoderLoad]) -> int:
    """The index of the first encoder, in the picture's order, that stays within its bound; of the least loaded where
    none does. `encoders` is not empty."""
    if len(encoders) == 1:
        return 0
    total = sum(encoder.waiting_patches for encoder in encoders)
    for index in in_order(identity, encoders):
        encoder = encoders[index]
        if encoder.waiting_patches + num_patches <= bound_patches(encoder, num_patches, total, len(encoders)):
            return index
    return min(range(len(encoders)), key=lambda index: encoders[index].waiting_patches)


def in_order(identity: bytes, encoders: Sequence[EncoderLoad]) -> list[int]:
    """Indices, the picture's first choice first."""
    return sorted(range(len(encoders)), key=lambda index: weight(identity, encoders[index].worker_id), reverse=True)
