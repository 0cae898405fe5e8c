"""In what two KV pools of one model may differ, and which differences the sending side converts."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

MAX_PAGE_TOKENS: Final = 1024


class KvDtype(enum.Enum):
    """The number format of a pool; the value is torch's name for it."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def num_bytes(self) -> int:
        return 4 if self is KvDtype.FLOAT32 else 2


@dataclass(frozen=True, slots=True)
class PageFormat:
    """How a pool of a given model is cut into pages, and what its numbers are."""

    page_tokens: int
    dtype: KvDtype


@dataclass(frozen=True, slots=True)
class KvTerms:
    """What each side says of its pool before KV moves. `may_narrow`: numbers may be rounded on their way from it or
    to it."""

    pages: PageFormat
    may_narrow: bool = False


class Conversion(enum.Enum):
    """What happens to the numbers on their way into another pool."""

    NONE = "none"
    WIDENED = "widened"
    NARROWED = "narrowed"
    IMPOSSIBLE = "impossible"


_CONVERSIONS: Final[dict[tuple[KvDtype, KvDtype], Conversion]] = {
    (KvDtype.BFLOAT16, KvDtype.FLOAT32): Conversion.WIDENED,
    (KvDtype.FLOAT16, KvDtype.FLOAT32): Conversion.WIDENED,
    (KvDtype.FLOAT32, KvDtype.BFLOAT16): Conversion.NARROWED,
    (KvDtype.FLOAT16, KvDtype.BFLOAT16): Conversion.NARROWED,
}


def conversion(sender: KvDtype, receiver: KvDtype) -> Conversion:
    """Widening keeps every number as it is, narrowing rounds. From what reaches further (all but float16 itself) to
    float16 nothing is converted: large numbers would become infinite."""
    if sender is receiver:
        return Conversion.NONE
    return _CONVERSIONS.get((sender, receiver), Conversion.IMPOSSIBLE)


def why_not(sender: KvTerms, receiver: KvTerms) -> str | None:
    """Why KV cannot go from one pool to the other, in a sentence; None when it can. Pages of any size can."""
    theirs, ours = sender.pages.dtype, receiver.pages.dtype
    how = conversion(theirs, ours)
    if how is Conversion.IMPOSSIBLE:
        return f"KV in {theirs.value} may not fit into {ours.value}: give both workers one --dtype"
    if how is Conversion.NARROWED and not (sender.may_narrow and receiver.may_narrow):
        return (
            f"KV in {theirs.value} would be rounded to {ours.value}: give both workers one --dtype, or both"
            " --allow-kv-narrowing and neither --strict"
        )
    return None
