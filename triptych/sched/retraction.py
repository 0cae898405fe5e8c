"""How much KV room an answer gets before it is needed, and who gives way when there is none: pure decisions.

A reservation covers what is there already and some pages of answer to come (`tokens_to_hold`); the rest is taken page
by page as the answer grows. So a pool holds more answers at once than if each had its longest possible one set aside,
and now and then it runs out. Then the *most junior* of those that decode loses its place (`most_junior`): its KV waits
in host memory, or the router replays the request.

**Bounds.**

1. Nobody is retracted for want of pages more than `MAX_RETRACTIONS` times: each time it comes back with twice the
   headroom, and after the last with room for its whole answer. It needs nothing from anybody then and goes before all
   that were retracted less often, so it is never chosen again.
2. Somebody always goes on: the only one that decodes is never chosen, and what no empty pool could hold was refused at
   the door.
3. Whoever waits for its place comes back before anybody new gets in (`triptych.engine.loop`), in order of seniority and
   without being passed. So it waits for those that were there already, and they all end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triptych.core.plan import MAX_RETRACTIONS

HEADROOM_PAGES = 4
"""What an answer may grow by before it needs a page that is not its own yet."""

_Seniority = tuple[bool, int, int, int]


@dataclass(frozen=True, slots=True)
class Standing:
    """What the policy may know of a sequence that decodes.

    Attributes:
        priority: the lower, the more urgent.
        num_retractions: how often it has lost its place, here or at another worker.
        num_replays: how many of them were before it came to this worker.
        arrival: counts those that came to this worker.
    """

    priority: int
    num_retractions: int
    num_replays: int
    arrival: int

    @property
    def seniority(self) -> _Seniority:
        """What to sort by, the most senior first: those that were retracted as often as anybody may be, then by
        priority; among equals those that are here again, then by arrival."""
        return self.num_retractions < MAX_RETRACTIONS, self.priority, -self.num_replays, self.arrival


def most_junior(standings: Sequence[Standing]) -> int | None:
    """Index of who loses its place; None when at most one decodes."""
    if len(standings) < 2:
        return None
    return max(range(len(standings)), key=lambda index: standings[index].seniority)


def tokens_to_hold(num_known: int, num_most: int, num_retractions: int, page_tokens: int) -> int:
    """Tokens to reserve KV room for.

    Args:
        num_known: tokens whose ids are known: the prompt, and the answer so far.
        num_most: what the longest possible answer needs; the KV of its last token is never needed.
        num_retractions: of this request, everywhere.
    """
    if num_retractions >= MAX_RETRACTIONS:
        return num_most
    return min(num_most, num_known + (HEADROOM_PAGES << num_retractions) * page_tokens)
