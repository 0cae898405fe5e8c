"""What a sequence holds on its worker: KV pages and landing slots, taken all at once and given back once.

Owned by the step loop and used on its thread only.
"""

from __future__ import annotations

from triptych.core.errors import RequestTooLarge
from triptych.core.plan import EmbeddingSource, Item
from triptych.engine.landed_cache import Content
from triptych.engine.landing import LandingTable, Wanted
from triptych.engine.sequence import PendingItem, Sequence
from triptych.kv.manager import CacheManager
from triptych.obs import metrics
from triptych.sched.retraction import tokens_to_hold


class Residency:
    """Takes and frees what sequences need. `row_bytes` is one embedding row, all its levels."""

    def __init__(self, manager: CacheManager, landing: LandingTable, row_bytes: int) -> None:
        self._manager = manager
        self._landing = landing
        self._row_bytes = row_bytes

    def check_fits(self, sequence: Sequence) -> None:
        """Raises RequestTooLarge for what an empty worker could not hold: it must not wait for room."""
        self.check_pages_fit(sequence)
        if not self._landing.can_ever_hold([self._slot_bytes(item) for item in sequence.plan.items]):
            raise RequestTooLarge("the pictures of this request do not fit the worker's landing arena; send fewer")

    def check_pages_fit(self, sequence: Sequence) -> None:
        """The same for its pages alone."""
        num_tokens, manager = self._most_tokens(sequence), self._manager
        is_too_large = manager.pages_for(num_tokens) > manager.num_usable
        if is_too_large and sequence.needs_handoff and sequence.plan.answer_ids:
            # No retry helps while the pools are as they are, so it is the caller who hears what does.
            most = manager.num_usable * manager.page_tokens
            raise RequestTooLarge(
                "the answer lost its place or its worker, and with what there is of it the prompt no longer "
                f"fits a prefill worker, which holds {most} tokens. Lower max_tokens to "
                f"{most - sequence.num_prompt + 1} or give prefill workers a larger KV pool (--kv-pool-bytes)"
            )
        if is_too_large:
            raise RequestTooLarge(
                f"the request needs KV room for {num_tokens} tokens; a worker holds "
                f"{manager.num_usable * manager.page_tokens}. Shorten the prompt or lower max_tokens"
            )

    def reserve(self, sequence: Sequence, spare_pages: int = 0) -> bool:
        """All uncached pages (and `spare_pages` left for those that decode) and the embeddings of all items behind the
        cached prefix, landed or room for them to land; or nothing.

        Pages are looked at first and taken last: making room, here or there, costs what is cached.
        """
        salt, num_tokens = sequence.plan.cache_salt, self._tokens_to_hold(sequence)
        cached_tokens = self._manager.offer(salt, sequence.ids, num_tokens, spare_pages)
        if cached_tokens is None:
            return False
        if not self._landing.try_reserve(sequence.ref, self._wanted(sequence, cached_tokens)):
            return False
        pages = self._manager.reserve(salt, sequence.ids, num_tokens, spare_pages)
        assert pages is not None and pages.cached_tokens == cached_tokens, "nothing came between"
        sequence.pages = pages
        sequence.items = [self._pending(sequence, index, cached_tokens) for index in range(len(sequence.plan.items))]
        sequence.num_computed = sequence.num_launched = pages.cached_tokens
        metrics.PREFILL_TOKENS.labels("cached").inc(pages.cached_tokens)
        metrics.RADIX_LOOKUP_TOKENS.labels("hit").inc(pages.cached_tokens)
        metrics.RADIX_LOOKUP_TOKENS.labels("miss").inc(sequence.num_known - pages.cached_tokens)
        return True

    def _wanted(self, sequence: Sequence, cached_tokens: int) -> dict[int, Wanted]:
        return {
            index: Wanted(Content.of(item), self._slot_bytes(item))
            for index, item in enumerate(sequence.plan.items)
            if item.end > cached_tokens
        }

    def _pending(self, sequence: Sequence, index: int, cached_tokens: int) -> PendingItem:
        """The item as it stands after the reservation: covered by cached KV, landed before, or missing."""
        item = sequence.plan.items[index]
        rows = self._landing.rows(sequence.ref, index)
        source = None
        if item.end <= cached_tokens:
            source = EmbeddingSource.RADIX
        elif rows is not None:
            source = EmbeddingSource.CACHE
        if source is not None:
            metrics.EMBEDDING_SOURCE.labels(source.value).inc()
        return PendingItem(item, source, rows)

    def written(self, sequence: Sequence) -> None:
        """A chunk of the prompt is computed: its full pages serve others, its embeddings are needed no more."""
        self._share(sequence)
        for item_index, pending in enumerate(sequence.items):
            if pending.rows is not None and pending.item.end <= sequence.num_computed:
                pending.rows = None
                self._landing.consumed(sequence.ref, item_index)

    def adopted(self, sequence: Sequence) -> None:
        """Another worker has written the prompt: its full pages serve those whose prompts begin alike."""
        self._share(sequence)

    def answered(self, sequence: Sequence) -> None:
        """The answer is whole: a follow-up turn will want its pages."""
        self._share(sequence)

    def grow(self, sequence: Sequence) -> bool:
        """Room for the sequence's next token. False when no page is left."""
        return sequence.pages is not None and self._manager.extend(sequence.pages, sequence.num_launched + 1)

    def vacate(self, sequence: Sequence) -> None:
        """The sequence goes on later: its pages serve whoever needs them. What others may use stays cached until
        then."""
        assert sequence.pages is not None
        self.answered(sequence)
        self._manager.release(sequence.pages)
        sequence.pages = None

    def return_to(self, sequence: Sequence, spare_pages: int) -> bool:
        """Pages again, after `vacate`: those of the cached prefix hold its KV, the others are blank."""
        salt, num_tokens = sequence.plan.cache_salt, self._tokens_to_hold(sequence)
        sequence.pages = self._manager.reserve(salt, sequence.ids, num_tokens, spare_pages)
        return sequence.pages is not None

    def stop_waiting(self, sequence: Sequence) -> None:
        """The sequence has ended; a step under way may still read what has landed for it."""
        self._landing.stop_waiting(sequence.ref)

    def release(self, sequence: Sequence) -> None:
        """No step that runs or will run names the sequence."""
        self._landing.abandon(sequence.ref)
        if sequence.pages is not None:
            self._manager.release(sequence.pages)

    def _share(self, sequence: Sequence) -> None:
        if sequence.pages is not None:
            self._manager.share(sequence.pages, sequence.ids, sequence.num_computed)

    def _tokens_to_hold(self, sequence: Sequence) -> int:
        """What is known, and when the answer is decoded here some of what is to come."""
        if sequence.needs_handoff:
            return self._most_tokens(sequence)
        retractions = sequence.standing.num_retractions
        return tokens_to_hold(len(sequence.ids), self._most_tokens(sequence), retractions, self._manager.page_tokens)

    def _most_tokens(self, sequence: Sequence) -> int:
        """The prompt, and the longest answer when it is decoded here (the last token's KV is never needed)."""
        if sequence.needs_handoff:
            return len(sequence.ids)
        return sequence.num_prompt + sequence.plan.sampling.max_tokens - 1

    def _slot_bytes(self, item: Item) -> int:
        return item.num_tokens * self._row_bytes
