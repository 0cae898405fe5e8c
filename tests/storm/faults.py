"""Faults planted in the engine, each through one narrow seam: what a bug there would do. A storm must find each.

Each is a context manager; on leaving, the engine is sound again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from triptych.core.expansion import IdArray
from triptych.engine import handoff, loop, slices, step
from triptych.engine.landing import LandingTable, SlotState
from triptych.engine.parking import Parking
from triptych.engine.residency import Residency
from triptych.engine.sequence import Sequence as EngineSequence
from triptych.kv import grants
from triptych.kv.manager import CacheManager, SequencePages
from triptych.kv.radix import Node, RadixTree
from triptych.mm.embedding_cache import CacheKey
from triptych.model.runner import EmbeddingSpan
from triptych.stages import sequences

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class Fault:
    """`needs_camp`: it shows only where several workers meet."""

    plant: Callable[[Patch], None]
    needs_camp: bool = False

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            self.plant(patch)
            yield


def _eviction_ignores_a_lock(patch: Patch) -> None:
    """The last page of a path is not kept from being evicted."""
    sound_lock, sound_unlock = RadixTree.lock, RadixTree.unlock
    patch.setattr(RadixTree, "lock", lambda tree, nodes: sound_lock(tree, nodes[:-1] if len(nodes) > 1 else nodes))
    patch.setattr(RadixTree, "unlock", lambda tree, nodes: sound_unlock(tree, [n for n in nodes if n.locks]))


def _lock_not_returned(patch: Patch) -> None:
    sound = RadixTree.unlock
    patch.setattr(RadixTree, "unlock", lambda tree, nodes: sound(tree, nodes[1:]))


def _page_freed_under_a_step(patch: Patch) -> None:
    patch.setattr(step.Step, "names", lambda self, sequence: False)


def _sample_of_another(patch: Patch) -> None:
    """A step that was launched before its ids were known takes them from the first sequence of the step before."""
    patch.setattr(step, "_places", lambda pieces: {id(piece.sequence): 0 for piece in pieces})


def _slot_returned_too_early(patch: Patch) -> None:
    """A landing slot is given back when the first chunk has read from it."""
    sound_written, sound_consumed = Residency.written, LandingTable.consumed

    def written(residency: Residency, sequence: EngineSequence) -> None:
        sound_written(residency, sequence)
        for index, pending in enumerate(sequence.items):
            if pending.rows is not None and pending.item.offset < sequence.num_computed:
                residency._landing.consumed(sequence.ref, index)

    def consumed(landing: LandingTable, ref: Any, item_index: int) -> None:
        if (ref, item_index) in landing._leased:
            sound_consumed(landing, ref, item_index)

    patch.setattr(Residency, "written", written)
    patch.setattr(LandingTable, "consumed", consumed)


def _slot_not_returned(patch: Patch) -> None:
    patch.setattr(LandingTable, "consumed", lambda landing, ref, index: landing._leased.pop((ref, index)))


def _slot_quarantine_skipped(patch: Patch) -> None:
    """Who may still write to the slot of an attempt that ended is not waited for."""
    sound = LandingTable.stop_waiting

    def stop_waiting(landing: LandingTable, ref: Any) -> None:
        for key, slot in landing._living.items():
            if key[0] == ref and slot.state is SlotState.HANDED:
                slot.state = SlotState.RESERVED
        sound(landing, ref)

    patch.setattr(LandingTable, "stop_waiting", stop_waiting)


def _look_alikes_swapped(patch: Patch) -> None:
    """Embeddings are kept under the size of their picture."""
    sound = CacheKey.of
    patch.setattr(CacheKey, "of", lambda item, dtype: sound(item, dtype)._replace(identity=bytes(32)))


def _chunk_boundary_dropped(patch: Patch) -> None:
    """A chunk that begins within a picture begins with the picture's first row."""
    sound = slices.embedding_spans

    def spans(sequence: EngineSequence, start: int, end: int) -> tuple[EmbeddingSpan, ...]:
        changed = []
        for span in sound(sequence, start, end):
            whole = next(p.rows for p in sequence.items if p.rows is not None and _shares_memory(p.rows, span.rows))
            changed.append(EmbeddingSpan(span.row, whole[: span.rows.shape[0]]))
        return tuple(changed)

    patch.setattr(slices, "embedding_spans", spans)


def _shares_memory(whole: Any, part: Any) -> bool:
    first, last = whole.data_ptr(), whole.data_ptr() + whole.numel() * whole.element_size()
    return bool(first <= part.data_ptr() < last)


def _positions_begin_anew(patch: Patch) -> None:
    """What follows a prompt forgets how far its pictures set back the positions."""
    sound = EngineSequence.slice_positions

    def positions(sequence: EngineSequence, count: int) -> IdArray:
        if sequence.num_launched < sequence.num_prompt:
            return sound(sequence, count)
        return sound(sequence, count) - sequence.position_delta

    patch.setattr(EngineSequence, "slice_positions", positions)


def _radix_matches_one_page_too_many(patch: Patch) -> None:
    """Behind the pages that fit, any page goes."""
    sound = RadixTree.match

    def match(tree: RadixTree, root: bytes, ids: Sequence[int], max_tokens: int) -> list[Node]:
        path = sound(tree, root, ids, max_tokens)
        further = next(iter(path[-1].children()), None) if path else None
        has_room = (len(path) + 1) * tree.page_tokens <= max_tokens
        return [*path, further] if further is not None and has_room else path

    patch.setattr(RadixTree, "match", match)


def _pages_shared_before_they_are_written(patch: Patch) -> None:
    sound = CacheManager.share

    def share(manager: CacheManager, pages: SequencePages, ids: Sequence[int], num_written: int) -> None:
        sound(manager, pages, ids, min(num_written + manager.page_tokens, len(ids)))

    patch.setattr(CacheManager, "share", share)


def _token_emitted_twice(patch: Patch) -> None:
    """The token after a picture's prompt, say, goes out twice."""
    sound = loop.LanguageEngine._sampled

    def sampled(engine: loop.LanguageEngine, sequence: EngineSequence, token: Any, was_decoding: bool) -> None:
        if token.index == 3:
            sequence.sink.tokens([token])
        sound(engine, sequence, token, was_decoding)

    patch.setattr(loop.LanguageEngine, "_sampled", sampled)


def _goes_on_after_the_end(patch: Patch) -> None:
    """What was computed beyond the end of an answer is applied."""
    patch.setattr(loop, "TERMINAL", frozenset())


def _retraction_loses_a_token(patch: Patch) -> None:
    """What comes back from the host has forgotten its last token."""
    sound = Parking.unpark

    def unpark(parking: Parking, spare_pages: int) -> EngineSequence | None:
        sequence = sound(parking, spare_pages)
        if sequence is not None:
            sequence.ids[-1] = sequence.ids[-2]
        return sequence

    patch.setattr(Parking, "unpark", unpark)


def _retraction_restores_other_pages(patch: Patch) -> None:
    """Of what waited on the host the first pages are loaded, and not those that the cache does not hold."""

    def load(parking: Parking, parked: Any) -> None:
        pages = parked.sequence.pages
        first, end = len(pages.path), parked.saved.shape[2]
        if first < end:
            parking._store.load_pages(parked.saved[:, :, : end - first], pages.pages[first:end])

    patch.setattr(Parking, "_load", load)


def _replay_takes_wrong_positions(patch: Patch) -> None:
    """An answer that is taken up again forgets how far pictures set back its positions."""
    sound = sequences.with_answer
    patch.setattr(sequences, "with_answer", lambda positions, delta, num_tokens: sound(positions, 0, num_tokens))


def _host_pool_not_returned(patch: Patch) -> None:
    sound = Parking._count
    patch.setattr(Parking, "_count", lambda parking, num_bytes: sound(parking, max(0, num_bytes)))


def _last_page_stays_behind(patch: Patch) -> None:
    """The partly filled page at a prompt's end does not travel to decode."""
    sound = handoff.push_pages

    def push(sequence: EngineSequence, manager: CacheManager) -> int:
        if sequence.num_computed >= sequence.num_prompt and sequence.num_prompt % manager.page_tokens:
            return 0
        return sound(sequence, manager)

    patch.setattr(loop, "push_pages", push)


def _grant_not_returned(patch: Patch) -> None:
    """A grant whose caller left before its pages were named stays."""
    patch.setattr(grants.GrantTable, "release", lambda table, grant_id: None)


def _grant_quarantine_skipped(patch: Patch) -> None:
    """Pages that a prefill worker may still write to are given to others as soon as their caller has left."""
    sound = grants.GrantTable.release

    def release(table: grants.GrantTable, grant_id: str) -> None:
        record = table._records.get(grant_id)
        if record is not None and record.state is grants.GrantState.BOUND:
            table._end_writing(record)
        else:
            sound(table, grant_id)

    patch.setattr(grants.GrantTable, "release", release)


FAULTS: dict[str, Fault] = {
    "eviction ignores a lock": Fault(_eviction_ignores_a_lock),
    "lock not returned": Fault(_lock_not_returned),
    "page freed under a step": Fault(_page_freed_under_a_step),
    "sample of another": Fault(_sample_of_another),
    "slot returned too early": Fault(_slot_returned_too_early),
    "slot not returned": Fault(_slot_not_returned),
    "slot quarantine skipped": Fault(_slot_quarantine_skipped),
    "look-alikes swapped": Fault(_look_alikes_swapped),
    "chunk boundary dropped": Fault(_chunk_boundary_dropped),
    "positions begin anew": Fault(_positions_begin_anew),
    "radix matches one page too many": Fault(_radix_matches_one_page_too_many),
    "pages shared before they are written": Fault(_pages_shared_before_they_are_written),
    "token emitted twice": Fault(_token_emitted_twice),
    "goes on after the end": Fault(_goes_on_after_the_end),
    "retraction loses a token": Fault(_retraction_loses_a_token),
    "retraction restores other pages": Fault(_retraction_restores_other_pages),
    "replay takes wrong positions": Fault(_replay_takes_wrong_positions),
    "host pool not returned": Fault(_host_pool_not_returned),
    "last page stays behind": Fault(_last_page_stays_behind, needs_camp=True),
    "grant quarantine skipped": Fault(_grant_quarantine_skipped),
    "grant not returned": Fault(_grant_not_returned, needs_camp=True),
}
