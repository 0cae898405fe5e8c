"""Workers that fail again and again are left alone for a while, then tried by one request.

    CLOSED ── NUM_FAILURES in a row ──► OPEN ── the pause is over ──► HALF_OPEN: one may try
       ▲                                 ▲                               │        │
       └───────────── it did its part ───│───────────────────────────────┘        │
                                         └── it did not: twice the pause ─────────┘

Left alone means avoided: where there is no other worker it is asked all the same, since an answer late is better than
none. One try that fails avoids the worker for that answer alone; the circuit is for all that come after.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from triptych.obs import metrics
from triptych.transport.circuit import Circuit, CircuitState

NUM_FAILURES: Final = 3

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Record:
    num_failures: int = 0
    circuit: Circuit = field(default_factory=Circuit)


class Breakers:
    """Owner of the router's circuits, one for each worker that has failed since it last did its part. Workers are known
    by their ids: one that was started again may fail like the one before. Runs on the event loop.

    Args:
        clock: seconds, of any one clock.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._records: dict[str, _Record] = {}

    def avoided(self) -> frozenset[str]:
        now_s = self._clock()
        return frozenset(name for name, record in self._records.items() if not record.circuit.would_admit(now_s))

    def asked(self, worker_id: str) -> None:
        """Somebody gives it work: after a pause, that is the probe."""
        record = self._records.get(worker_id)
        if record is not None:
            record.circuit.admits(self._clock())

    def failed(self, worker_ids: Iterable[str]) -> None:
        for name in worker_ids:
            record = self._records.setdefault(name, _Record())
            record.num_failures += 1
            if record.num_failures >= NUM_FAILURES and record.circuit.state is not CircuitState.OPEN:
                record.circuit.failed(self._clock())
                _log.warning("a worker fails again and again and is left alone for a while", extra={"worker": name})
                metrics.CIRCUIT_OPENINGS.labels("failing").inc()

    def served(self, worker_ids: Iterable[str]) -> None:
        """They did their part of an answer."""
        for name in worker_ids:
            self._records.pop(name, None)

    def keep(self, worker_ids: Iterable[str]) -> None:
        """Forgets all workers but those: what has left the cluster takes no memory."""
        for name in self._records.keys() - set(worker_ids):
            del self._records[name]
