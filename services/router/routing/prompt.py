"""A plan, as far as routing goes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from triptych.core.cache_feed import number_of
from triptych.core.expansion import expand
from triptych.core.plan import Item, Plan
from triptych.kv.page_chain import page_numbers, root_number
from triptych.mm.sentinels import item_sentinels

DEFAULT_PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Picture:
    """An item of the plan. `end` is the place behind its last row in the expanded prompt; `number` as in the feeds."""

    index: int
    identity: bytes
    number: int
    num_patches: int
    end: int

    @classmethod
    def of(cls, index: int, item: Item) -> Picture:
        num_patches = item.grid.t * item.grid.h * item.grid.w
        return cls(index, item.identity, number_of(item.identity), num_patches, item.end)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is asked.

    Attributes:
        num_tokens: of the prompt, and of a replay's answer so far.
        num_total_tokens: with the longest answer.
        root: names the tenant's caches.
        pages: the numbers of the prompt's pages, by the tokens of a page; pools may be cut unlike.
        session: whatever conversation the caller says that this belongs to.
    """

    num_tokens: int
    num_total_tokens: int
    root: int
    pages: Mapping[int, tuple[int, ...]]
    pictures: tuple[Picture, ...] = ()
    session: str | None = None

    @classmethod
    def of(cls, plan: Plan, page_sizes: Collection[int], session: str | None = None) -> Prompt:
        """Takes milliseconds for 100,000 tokens: call it off the event loop."""
        ids = expand(plan.compact_ids, plan.items, [item_sentinels(i.identity, i.num_tokens) for i in plan.items])
        pages = {size: page_numbers(plan.cache_salt, ids, size) for size in {*page_sizes, DEFAULT_PAGE_TOKENS}}
        return cls(
            num_tokens=plan.num_known_tokens,
            num_total_tokens=plan.num_total_tokens,
            root=root_number(plan.cache_salt),
            pages=pages,
            pictures=tuple(Picture.of(index, item) for index, item in enumerate(plan.items)),
            session=session,
        )

    def numbers(self, page_tokens: int) -> tuple[int, ...]:
        """Of its full pages. Empty for a size that was not foreseen."""
        return self.pages.get(page_tokens, ())

    def num_reusable(self, page_tokens: int) -> int:
        """Pages that may be found cached: the last token's is computed in any case, because its logits are needed."""
        return max(self.num_tokens - 1, 0) // page_tokens
