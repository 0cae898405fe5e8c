"""The timeline record: what every stage did for a request, and when.

Every stage appends to its own `Timeline` and returns it in the last message of its call; the router merges them.
Tracing, debugging pages and benchmarks all read this one record.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from triptych.core.clock import Clock
from triptych.core.plan import EmbeddingSource

STAGES = ("router", "encoder", "prefill", "decode")

# stage -> the events it may record
EVENTS: dict[str, tuple[str, ...]] = {
    "router": ("parse", "plan", "queue", "dispatch", "first_token", "finish"),
    "encoder": (
        "slot_wait",
        "in_flight_wait",
        "fetch",
        "preprocess",
        "encode",
        "write",
        "cache_hit",
        "radix_hit",
        "landed_hit",
    ),
    "prefill": ("queue", "bind", "embedding_wait", "chunk", "first_token", "kv_write", "kv_commit"),
    "decode": ("grant", "kv_wait", "first_step", "retracted", "finish"),
}


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One row. Times are CLOCK_MONOTONIC nanoseconds of the worker's host; `start_ns == end_ns` marks a moment."""

    stage: str
    event: str
    start_ns: int
    end_ns: int
    worker_id: str = ""
    attempt: int = 0
    num_bytes: int = 0
    num_tokens: int = 0
    source: EmbeddingSource | None = None
    item_index: int | None = None


@dataclass(slots=True)
class Timeline:
    """Collects one stage's rows for one attempt. Owned by whoever handles the attempt; not thread-safe by itself,
    but `list.append` is atomic, so an engine thread may add rows while the stage reads them at the end."""

    stage: str
    worker_id: str
    clock: Clock
    attempt: int = 0
    events: list[TimelineEvent] = field(default_factory=list)

    def add(
        self,
        event: str,
        start_ns: int,
        end_ns: int | None = None,
        *,
        num_bytes: int = 0,
        num_tokens: int = 0,
        source: EmbeddingSource | None = None,
        item_index: int | None = None,
    ) -> None:
        """Appends a row; without `end_ns` it ends now. Raises ValueError for an event that the stage never declared."""
        if event not in EVENTS[self.stage]:
            raise ValueError(f"stage {self.stage} declares no timeline event {event!r}")
        end = self.clock.monotonic_ns() if end_ns is None else end_ns
        self.events.append(
            TimelineEvent(
                self.stage,
                event,
                start_ns,
                end,
                self.worker_id,
                self.attempt,
                num_bytes,
                num_tokens,
                source,
                item_index,
            )
        )

    @contextmanager
    def span(self, event: str, *, num_tokens: int = 0, item_index: int | None = None) -> Iterator[None]:
        start_ns = self.clock.monotonic_ns()
        try:
            yield
        finally:
            self.add(event, start_ns, num_tokens=num_tokens, item_index=item_index)
