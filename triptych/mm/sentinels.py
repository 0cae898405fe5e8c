"""Sentinels: what stands for an embedding row in id sequences.

Each item contributes four 62-bit words derived from its identity, tiled by offset within the item. Sequences with other
pictures are then other sequences, and the radix tree needs no special case. A sentinel is never a vocabulary id.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import numpy.typing as npt

SENTINEL_BASE = 1_000_000
"""First value that may be a sentinel; a larger vocabulary is refused at start."""

_SENTINEL_TAG = b"triptych/sentinel/v1"
_WORD_MODULUS = 1 << 62


def sentinel_words(identity: bytes) -> tuple[int, int, int, int]:
    """Four sentinels in [SENTINEL_BASE, SENTINEL_BASE + 2**62)."""
    words = struct.unpack(">4Q", hashlib.sha256(_SENTINEL_TAG + identity).digest())
    a, b, c, d = (SENTINEL_BASE + word % _WORD_MODULUS for word in words)
    return (a, b, c, d)


def item_sentinels(identity: bytes, num_tokens: int) -> npt.NDArray[np.int64]:
    """int64 of shape (num_tokens,): v0 v1 v2 v3 v0 …"""
    words = np.array(sentinel_words(identity), dtype=np.int64)
    return np.resize(words, num_tokens)
