"""Peers that take nothing any more are left alone for a while, and then tried by one.

    CLOSED ── it took no data, or did not answer, in time ──► OPEN ── the pause is over ──► HALF_OPEN: one may try
       ▲                                                        ▲                               │        │
       └──────────────────────── it answered ───────────────────│───────────────────────────────┘        │
                                                                └── it did not: twice the pause ─────────┘

While a circuit is open whoever wants to send there is refused at once, with a typed error that lets the router try
another worker, instead of waiting for the same timeout as the one before.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from triptych.core.errors import DeadlineExceeded, PeerLost
from triptych.core.ids import WorkerRef
from triptych.obs import metrics

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0
PROBE_TIMEOUT_S: Final = 15.0
"""A probe of which nobody hears is over then. Longer than a connection or a frame may take."""
ASLEEP_S: Final = 1.0
"""A timer that comes later than this by so much says more of this process than of its peers."""

_log = logging.getLogger(__name__)


class CircuitState(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Circuit:
    """The way to one peer. Pure: times come from outside, in seconds of any one clock."""

    def __init__(self) -> None:
        self.state = CircuitState.CLOSED
        self._pause_s = FIRST_PAUSE_S
        self._until_s = 0.0

    def would_admit(self, now_s: float) -> bool:
        """Whether somebody may try; changes nothing."""
        return self.state is CircuitState.CLOSED or now_s >= self._until_s

    def admits(self, now_s: float) -> bool:
        """Whether the caller may try. After a pause that is the one probe, and the state HALF_OPEN."""
        if not self.would_admit(now_s):
            return False
        if self.state is not CircuitState.CLOSED:
            self.state, self._until_s = CircuitState.HALF_OPEN, now_s + PROBE_TIMEOUT_S
        return True

    def failed(self, now_s: float) -> None:
        """The peer took nothing, or did not answer. While it is open already, that is no news."""
        if self.state is CircuitState.OPEN:
            return
        if self.state is CircuitState.HALF_OPEN:
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self.state, self._until_s = CircuitState.OPEN, now_s + self._pause_s


class Circuits:
    """Owner of this process's circuits, one for each peer that has ever failed. Runs on the event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._circuits: dict[WorkerRef, Circuit] = {}

    def check(self, peer: WorkerRef) -> None:
        """Raises PeerLost while the peer's circuit is open, or another is trying it."""
        circuit = self._circuits.get(peer)
        if circuit is not None and not circuit.admits(self._clock()):
            raise PeerLost("a worker has stopped taking data and is left alone for a while")

    def failed(self, peer: WorkerRef, reason: str) -> None:
        """`reason` is one of few words, a metric's label."""
        circuit = self._circuits.setdefault(peer, Circuit())
        if circuit.state is CircuitState.OPEN:
            return
        if circuit.state is CircuitState.CLOSED:
            metrics.OPEN_CIRCUITS.inc()
        circuit.failed(self._clock())
        metrics.CIRCUIT_OPENINGS.labels(reason).inc()
        _log.warning("nothing is sent to a worker for a while", extra={"worker": peer.worker_id, "reason": reason})

    def is_tried(self, peer: WorkerRef) -> bool:
        """Whether the peer has failed and not answered since."""
        return peer in self._circuits

    def answered(self, peer: WorkerRef) -> None:
        """The peer is there and takes what is sent: whatever was is forgotten."""
        if self._circuits.pop(peer, None) is not None:
            metrics.OPEN_CIRCUITS.dec()
            _log.info("a worker takes data again", extra={"worker": peer.worker_id})

    def forget_former(self, peer: WorkerRef) -> None:
        """Whoever had the peer's name before it is gone."""
        self._forget(known for known in self._circuits if known.worker_id == peer.worker_id and known != peer)

    def keep_only(self, living: Collection[WorkerRef]) -> None:
        """All others are gone: nobody will ever try them again."""
        self._forget(known for known in self._circuits if known not in living)

    def close(self) -> None:
        self._forget(self._circuits)

    def _forget(self, gone: Iterable[WorkerRef]) -> None:
        for peer in list(gone):
            del self._circuits[peer]
            metrics.OPEN_CIRCUITS.dec()


@contextmanager
def out_of_time(tell: Callable[[], None], timeout_s: float) -> Iterator[None]:
    """Around what has `timeout_s`: calls `tell` when that was not enough. Unless it has been over for long: whoever was
    stopped, or asleep, finds all its timers run down, and nobody else is to blame."""
    began_s = time.monotonic()
    try:
        yield
    except DeadlineExceeded:
        if time.monotonic() - began_s < timeout_s + ASLEEP_S:
            tell()
        raise
