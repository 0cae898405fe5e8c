"""Routing, for the pipeline: what is known, the choice, and what was sent.

    choose ──► ask the decode workers in that order ──► sent ──► Trip: encoded, prefilled, ended
    apply, lost_feed, keep: what the workers' feeds say, whenever it comes

Nothing here waits for anything, and nothing that it believes has to be true.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from services.router.placement import ClusterView, Path, complete_paths
from services.router.routing.board import Board
from services.router.routing.forecast import Forecast, Forecaster, Share
from services.router.routing.homes import Found, Home, Homes
from services.router.routing.index import Applied, CacheIndex
from services.router.routing.outstanding import Outstanding
from services.router.routing.picker import Candidate, Picker
from services.router.routing.prompt import DEFAULT_PAGE_TOKENS, Prompt
from triptych.core.cache_feed import Change, FeedMessage, Holding
from triptych.core.ids import WorkerRef
from triptych.core.worker import WorkerInfo


@dataclass(frozen=True, slots=True)
class Choice:
    """Candidates in the order in which to ask, one for each decode worker, out of `considered`."""

    ordered: tuple[Candidate, ...]
    considered: tuple[Candidate, ...]


class Routing:
    """Owner of all that a router believes of its workers. One per router, used from one thread."""

    def __init__(self, picker: Picker | None = None) -> None:
        self.picker = picker or Picker()
        self.index = CacheIndex()
        self.homes = Homes()
        self.outstanding = Outstanding()
        self._complete = _CompletePaths()

    # -- the choice --------------------------------------------------------------------------------------------------

    def choose(self, view: ClusterView, prompt: Prompt, turn: int, known: Found | None = None) -> Choice:
        """`turn` decides between what is alike. `known`: who has the prompt or a beginning of it, where the caller
        knows better.

        Raises Unavailable when no workers can serve the request together.
        """
        paths = self._complete.of(view, has_pictures=bool(prompt.pictures))
        forecaster = self._forecaster(view, prompt, known)
        sibling = known.home if known is not None and known.account == "sibling" else None
        considered = self.picker.judge([forecaster.forecast(path) for path in paths], view.avoided, sibling)
        return Choice(tuple(self.picker.order(considered, turn)), tuple(considered))

    def shares_again(
        self, view: ClusterView, prompt: Prompt, path: Path, indices: Collection[int]
    ) -> tuple[Share, ...]:
        """Who encodes those pictures for the prefill worker of `path`, whatever was believed of them."""
        return self._forecaster(view, prompt, None).shares_again(path, indices)

    def page_sizes(self, view: ClusterView) -> frozenset[int]:
        """Of all pools: what a prompt's pages must be numbered by."""
        return frozenset(worker.page_tokens for worker in view.workers if worker.page_tokens) | {DEFAULT_PAGE_TOKENS}

    def _forecaster(self, view: ClusterView, prompt: Prompt, known: Found | None) -> Forecaster:
        return Forecaster(prompt, Board(view.workers, self.index, self.outstanding), self.index, self.homes, known)

    # -- what was sent -----------------------------------------------------------------------------------------------

    def sent(self, prompt: Prompt, forecast: Forecast) -> Trip:
        """The request is at these workers from now on."""
        path = forecast.path
        self.homes.remember(prompt, Home(path.decode.ref, path.prefill.ref))
        for share in forecast.shares:
            if share.encoder is not None:
                self.homes.sent(share.picture.number, share.encoder.ref)
        return Trip(self.outstanding, prompt, forecast)

    # -- what the workers say ----------------------------------------------------------------------------------------

    def apply(self, worker: WorkerRef, message: FeedMessage) -> Applied:
        """GAP: the feed must begin anew."""
        applied = self.index.apply(worker, message)
        if applied is Applied.DONE:
            self._unlearn(worker, message.changes)
            if message.load is not None:
                self.outstanding.heard(worker, message.load)
        return applied

    def lost_feed(self, worker: WorkerRef) -> None:
        self.index.lost_feed(worker)
        self.outstanding.forget(worker)

    def keep(self, living: Iterable[WorkerRef]) -> None:
        """Forgets what was told by all workers but those."""
        known = set(living)
        self.index.keep(known)
        self.outstanding.keep(known)

    def _unlearn(self, worker: WorkerRef, changes: Mapping[Holding, Change]) -> None:
        """What a worker has dropped is not there, whatever was sent to it."""
        for holding, change in changes.items():
            if holding is Holding.PAGE:
                self.homes.dropped_pages(worker, change.removed)
            elif holding is Holding.ENCODED:
                self.homes.dropped_pictures(worker, change.removed)


class Trip:
    """What one request still owes: its prompt to be computed, its pictures to be encoded, its room at decode. Each part
    is settled once; whoever began it ends it."""

    def __init__(self, outstanding: Outstanding, prompt: Prompt, forecast: Forecast) -> None:
        self._outstanding = outstanding
        path = forecast.path
        self._prefill, self._decode = path.prefill.ref, path.decode.ref
        self._tokens, self._room = forecast.new_tokens, prompt.num_total_tokens
        self._patches: dict[WorkerRef, int] = {}
        outstanding.add(self._prefill, tokens=self._tokens)
        outstanding.add(self._decode, sequences=1, room=self._room)
        self.encodes(forecast.shares)
        self._has_ended = False

    def encodes(self, shares: Iterable[Share]) -> None:
        """These pictures are at their encoders."""
        for share in shares:
            if share.encoder is not None and share.is_encoded:
                encoder, patches = share.encoder.ref, share.picture.num_patches
                self._outstanding.add(encoder, patches=patches)
                self._patches[encoder] = self._patches.get(encoder, 0) + patches

    def encoded(self, encoder: WorkerInfo) -> None:
        """All that this encoder had for the request, or it has failed."""
        patches = self._patches.pop(encoder.ref, 0)
        if patches:
            self._outstanding.settle(encoder.ref, patches=patches)

    def prefilled(self) -> None:
        """The first token is there."""
        if self._tokens:
            self._outstanding.settle(self._prefill, tokens=self._tokens)
            self._tokens = 0

    def ended(self) -> None:
        """However."""
        if self._has_ended:
            return
        self._has_ended = True
        self.prefilled()
        for encoder, patches in self._patches.items():
            self._outstanding.settle(encoder, patches=patches)
        self._patches.clear()
        self._outstanding.settle(self._decode, sequences=1, room=self._room)


class _CompletePaths:
    """The complete paths of a cluster, until its workers change: the registry's records are the same objects until
    then."""

    def __init__(self) -> None:
        self._view: ClusterView | None = None
        self._found: dict[bool, tuple[Path, ...]] = {}

    def of(self, view: ClusterView, *, has_pictures: bool) -> tuple[Path, ...]:
        if self._view is None or not _is_same(self._view, view):
            self._view, self._found = view, {}
        found = self._found.get(has_pictures)
        if found is None:
            found = self._found[has_pictures] = complete_paths(view, has_pictures=has_pictures)
        return found


def _is_same(one: ClusterView, other: ClusterView) -> bool:
    return (
        len(one.workers) == len(other.workers)
        and one.avoided == other.avoided
        and all(a is b for a, b in zip(one.workers, other.workers, strict=True))
    )
