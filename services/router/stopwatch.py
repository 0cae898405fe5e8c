"""The times that a caller feels, measured at the router."""

from __future__ import annotations

from triptych.core.timeline import Timeline
from triptych.obs import metrics

_NS = 1e9


class Stopwatch:
    """One request, from its arrival. Feeds the latency histograms and the router's moments of the timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._arrived_ns = timeline.clock.monotonic_ns()
        self._last_token_ns: int | None = None

    def on_tokens(self, count: int) -> None:
        """`count` tokens have come together; each counts as having taken its share of the time since the last."""
        now_ns = self._timeline.clock.monotonic_ns()
        if self._last_token_ns is None:
            metrics.TTFT_SECONDS.observe((now_ns - self._arrived_ns) / _NS)
            self._timeline.add("first_token", now_ns, now_ns)
            count -= 1
            self._last_token_ns = now_ns
        for _ in range(count):
            metrics.INTER_TOKEN_SECONDS.observe((now_ns - self._last_token_ns) / count / _NS)
        self._last_token_ns = now_ns

    def on_end(self) -> None:
        now_ns = self._timeline.clock.monotonic_ns()
        metrics.REQUEST_SECONDS.observe((now_ns - self._arrived_ns) / _NS)
        self._timeline.add("finish", now_ns, now_ns)
