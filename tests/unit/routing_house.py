"""Routing without a cluster: prompts made of numbers, and who would be asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from services.router.placement import ClusterView, Path
from services.router.routing.homes import Found, Home
from services.router.routing.picker import Candidate
from services.router.routing.prompt import Picture, Prompt
from services.router.routing.routing import Routing
from triptych.core.plan import Item
from triptych.core.worker import WorkerInfo
from triptych.kv.page_chain import root_number

NUM_TOKENS = 40


def prompt_of(
    items: Mapping[int, Item] | None = None, num_tokens: int = NUM_TOKENS, pages: Sequence[int] = (), session: str = ""
) -> Prompt:
    """`pages` are the numbers of its pages of 16."""
    pictures = tuple(Picture.of(index, item) for index, item in (items or {}).items())
    return Prompt(num_tokens, num_tokens + 8, root_number(b""), {16: tuple(pages)}, pictures, session or None)


def candidates(
    view: ClusterView, items: Mapping[int, Item], turn: int, home: Home | None = None, routing: Routing | None = None
) -> tuple[Candidate, ...]:
    known = None if home is None else Found(home, NUM_TOKENS - 1)
    return (routing or Routing()).choose(view, prompt_of(items), turn, known).ordered


def paths(
    view: ClusterView, items: Mapping[int, Item], turn: int, home: Home | None = None, routing: Routing | None = None
) -> tuple[Path, ...]:
    """In the order in which they are asked."""
    return tuple(each.forecast.path for each in candidates(view, items, turn, home, routing))


def encoder_shares(candidate: Candidate) -> dict[int, WorkerInfo]:
    """Which encoder gets each picture, by its index."""
    return {share.picture.index: share.encoder for share in candidate.forecast.shares if share.encoder is not None}
