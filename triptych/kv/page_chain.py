"""Numbers that name the pages of a prompt, alike in every worker and router.

A page's number is a hash over its ids, chained to the number of the page before it, and the first to the root's: so it
names all that stands before it, too, and one look-up of a number is a look-up of a whole prefix.

    root (tenant salt) ── xxh3(ids 0..15) ──► n0 ── xxh3(ids 16..31) ──► n1 ──► …

The ids are those of the radix tree, with sentinels at the rows of pictures. Two prompts whose numbers are alike by
chance, or by somebody's art, are taken to the same worker and compared there id by id: it costs them time.
"""

from __future__ import annotations

import hashlib

import numpy as np
import xxhash

from triptych.core.expansion import IdArray

_ROOT_TAG = b"triptych/page-chain/v1"
_ID_BYTES = 8


def root_number(salt: bytes) -> int:
    """Where the chain of a tenant's prompts begins: 64 bits."""
    return int.from_bytes(hashlib.sha256(_ROOT_TAG + salt).digest()[:8], "big")


def next_number(above: int, key: bytes) -> int:
    """The number of the page with that key (its ids as 8-byte integers) behind the one numbered `above`."""
    return xxhash.xxh3_64_intdigest(key, above)


def page_numbers(salt: bytes, ids: IdArray, page_tokens: int) -> tuple[int, ...]:
    """One number for each full page of a prompt, the first page's first. `ids`: int64 of shape (tokens,).

    100,000 tokens in pages of 16 take some 2 ms: more than an event loop should be held.
    """
    data = np.ascontiguousarray(ids, dtype=np.int64).tobytes()
    digest, width, number = xxhash.xxh3_64_intdigest, page_tokens * _ID_BYTES, root_number(salt)
    numbers: list[int] = []
    for start in range(0, len(data) - width + 1, width):
        number = digest(data[start : start + width], number)
        numbers.append(number)
    return tuple(numbers)
