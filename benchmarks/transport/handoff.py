"""What of a request's transfers was felt, from its timeline. Pure.

    encoder:  encode ──┐ write ─────┐
    prefill:  ░░░░░░░░░░░░░░░░░░░░░░│ chunk ── chunk ──┐ kv_commit ──┐
    decode:                                            ░░░░░░░░░░░░░░│ first_step
                       └─ embedding ┘                  └──── KV ─────┘

A stage is idle while nothing of the request is computed there. Idle time in which an embedding is on its way to prefill
counts, also where another picture is still in the tower; and all the time from the end of the last chunk to the commit
at decode.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
Span = tuple[int, int]
NS_PER_MS = 1e6


@dataclass(frozen=True, slots=True)
class Exposed:
    """Milliseconds of one request.

    Attributes:
        embedding_ms: prefill idle, an embedding on its way.
        kv_ms: decode idle, the prompt computed and its KV not there yet.
        grant_ms: encoders waiting for a slot, the longest of the pictures; not a part of `total_ms`, as no bytes wait.
    """

    embedding_ms: float
    kv_ms: float
    grant_ms: float

    @property
    def total_ms(self) -> float:
        return self.embedding_ms + self.kv_ms


def exposed(rows: Sequence[Row]) -> Exposed:
    """Raises ValueError when the answer was not made by three stages that handed over."""
    chunks = spans(rows, "prefill", "chunk")
    waits = [end - start for start, end in spans(rows, "encoder", "slot_wait")]
    embedding_ns = total_ns(without(merged(_on_their_way(rows)), merged(chunks)))
    return Exposed(embedding_ns / NS_PER_MS, _kv_ns(rows) / NS_PER_MS, max(waits, default=0) / NS_PER_MS)


@dataclass(frozen=True, slots=True)
class KvTime:
    """One prompt's KV. Milliseconds.

    Attributes:
        computing_ms: prefill at work on the prompt.
        under_way_ms: from the first byte on its way to the commit at decode.
        exposed_ms: of that, after the last chunk.
    """

    num_bytes: int
    computing_ms: float
    under_way_ms: float
    exposed_ms: float

    def hidden_share(self, bytes_per_s: float) -> float:
        """Of the time that the link needs for these bytes, the part that nobody waited for: 0 to 1."""
        return max(0.0, 1 - self.exposed_ms / (1e3 * self.num_bytes / bytes_per_s))


def kv_time(rows: Sequence[Row]) -> KvTime:
    """Raises ValueError when no KV was handed over."""
    (arrived,) = _rows(rows, "decode", "kv_wait") or _nothing("decode got no KV")
    writes = spans(rows, "prefill", "kv_write") or _nothing("prefill wrote no KV")
    under_way_ns = arrived["end_ns"] - min(start for start, _ in writes)
    computing_ns = total_ns(merged(spans(rows, "prefill", "chunk")))
    return KvTime(arrived["bytes"], computing_ns / NS_PER_MS, under_way_ns / NS_PER_MS, _kv_ns(rows) / NS_PER_MS)


def spans(rows: Iterable[Row], stage: str, event: str) -> list[Span]:
    return [(row["start_ns"], row["end_ns"]) for row in _rows(rows, stage, event)]


def merged(found: Iterable[Span]) -> list[Span]:
    """The same time, in order and without overlaps."""
    whole: list[Span] = []
    for start, end in sorted(found):
        if whole and start <= whole[-1][1]:
            whole[-1] = (whole[-1][0], max(end, whole[-1][1]))
        else:
            whole.append((start, end))
    return whole


def without(found: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """Both merged: what of the first is in none of the second."""
    left: list[Span] = []
    for begin, end in found:
        at = begin
        for hole_start, hole_end in holes:
            if hole_end <= at or hole_start >= end:
                continue
            if hole_start > at:
                left.append((at, hole_start))
            at = max(at, hole_end)
        if at < end:
            left.append((at, end))
    return left


def total_ns(found: Iterable[Span]) -> int:
    return sum(end - start for start, end in found)


def _on_their_way(rows: Sequence[Row]) -> list[Span]:
    """From the first byte of each embedding to its landing, which prefill knows before the encoder does."""
    landed = {row["item"]: row["end_ns"] for row in _rows(rows, "prefill", "embedding_wait")}
    return [
        (row["start_ns"], max(row["start_ns"], min(row["end_ns"], landed.get(row["item"], row["end_ns"]))))
        for row in _rows(rows, "encoder", "write")
    ]


def _kv_ns(rows: Sequence[Row]) -> int:
    chunks = spans(rows, "prefill", "chunk") or _nothing("prefill computed nothing")
    arrivals = spans(rows, "decode", "kv_wait") or _nothing("decode got no KV")
    return max(0, max(end for _, end in arrivals) - max(end for _, end in chunks))


def _rows(rows: Iterable[Row], stage: str, event: str) -> list[Row]:
    return [row for row in rows if (row["stage"], row["event"]) == (stage, event)]


def _nothing(why: str) -> Any:
    raise ValueError(f"the timeline tells of no handover: {why}")
