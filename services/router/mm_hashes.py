"""`mm_hashes`: what a trusted caller names its pictures by, instead of the bytes that we would hash. Pure.

A hash is believed within the tenant's own names, and only there: see docs/identity.md.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_HASH = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class CallerHashes:
    """One for each picture of a request, in order, 32 bytes or empty for none; and why some were not taken."""

    hashes: tuple[bytes, ...]
    complaint: str | None = None


def caller_hashes(field: object, num_pictures: int, *, is_trusted: bool) -> CallerHashes:
    """`field`: as it stands in the body; None when it does not. A null in it leaves that picture to us."""
    nothing = (b"",) * num_pictures
    if field is None:
        return CallerHashes(nothing)
    if not is_trusted:
        return CallerHashes(nothing, "mm_hashes are for keys of a tenant with is_trusted = true")
    if not isinstance(field, list) or len(field) != num_pictures:
        return CallerHashes(nothing, f"mm_hashes must be a list with one entry for each of the {num_pictures} pictures")
    hashes = tuple(_hash_of(entry) for entry in field)
    return CallerHashes(hashes, _complaint(field, hashes))


def _hash_of(entry: object) -> bytes:
    return bytes.fromhex(entry) if isinstance(entry, str) and _HASH.fullmatch(entry) else b""


def _complaint(entries: Sequence[object], hashes: Sequence[bytes]) -> str | None:
    wrong = [index for index, entry in enumerate(entries) if entry is not None and not hashes[index]]
    if not wrong:
        return None
    return f"entry {wrong[0]} of mm_hashes is none: a hash has 64 hexadecimal digits, and null is for no hash"
