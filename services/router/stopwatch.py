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
        self._last_token_ns: dict[int, int] = {}

    def on_tokens(self, choice: int, count: int) -> None:
        """`count` tokens of one choice have come together; each counts as having taken its share of the time since its
        last. The time to the first token is that of the first choice."""
        now_ns = self._timeline.clock.monotonic_ns()
        if not self._last_token_ns:
            metrics.TTFT_SECONDS.observe((now_ns - self._arrived_ns) / _NS)
            self._timeline.add("first_token", now_ns, now_ns)
        if choice not in self._last_token_ns:
            self._last_token_ns[choice] = now_ns
            count -= 1
        for _ in range(count):
            metrics.INTER_TOKEN_SECONDS.observe((now_ns - self._last_token_ns[choice]) / count / _NS)
        self._last_token_ns[choice] = now_ns

    def on_end(self) -> None:
        now_ns = self._timeline.clock.monotonic_ns()
        metrics.REQUEST_SECONDS.observe((now_ns - self._arrived_ns) / _NS)
        self._timeline.add("finish", now_ns, now_ns)
