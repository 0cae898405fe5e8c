"""What a sequence adds to a step, with the embeddings that fall into it."""

from __future__ import annotations

from triptych.engine.sequence import Sequence
from triptych.model.runner import EmbeddingSpan, RunSlice


def build_slice(sequence: Sequence, count: int, place_before: int | None = None) -> RunSlice:
    """The next `count` tokens. The last one that is prefilled and every later one want a sample. `place_before`: the
    sequence's place in the step under way, None when it has none."""
    assert sequence.pages is not None
    start = sequence.num_launched
    wants_sample = start + count >= sequence.num_known
    follows = place_before if sequence.is_awaiting_sample else None
    return RunSlice(
        ids=sequence.slice_ids(count),
        positions=sequence.slice_positions(count),
        pages=sequence.pages.pages,
        start=start,
        embeddings=embedding_spans(sequence, start, start + count),
        sample=sequence.sample_row() if wants_sample else None,
        follows=follows,
    )


def embedding_spans(sequence: Sequence, start: int, end: int) -> tuple[EmbeddingSpan, ...]:
    """Landed embedding rows that lie in [start, end) of the prompt, by range."""
    spans: list[EmbeddingSpan] = []
    for pending in sequence.items:
        if pending.rows is None or pending.item.end <= start or pending.item.offset >= end:
            continue
        row = 0
        for run in pending.item.ranges:
            low, high = max(run.offset, start), min(run.end, end)
            if low < high:
                first = row + low - run.offset
                spans.append(EmbeddingSpan(low - start, pending.rows[first : first + high - low]))
            row += run.length
    return tuple(spans)
