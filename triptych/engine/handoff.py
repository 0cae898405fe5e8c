"""A prompt's KV on its way from prefill to the decode worker's pool."""

from __future__ import annotations

from triptych.engine.sequence import Sequence
from triptych.kv.manager import CacheManager


def push_pages(sequence: Sequence, manager: CacheManager) -> int:
    """Copies the pages that filled up since the last time, and at the prompt's end the partial one; none of those that
    the decode worker holds. Returns the bytes moved: 0 when nothing is new or nobody waits for it."""
    if sequence.handoff is None or sequence.pages is None:
        return 0
    is_whole = sequence.num_computed >= sequence.num_known
    end = manager.pages_for(sequence.num_computed) if is_whole else sequence.num_computed // manager.page_tokens
    first = sequence.num_pushed_pages
    if end <= first:
        return 0
    moved = sequence.handoff.copy(sequence.pages.pages[first:end], first - sequence.num_held_pages)
    sequence.num_pushed_pages, sequence.num_pushed_bytes = end, sequence.num_pushed_bytes + moved
    return moved
