"""Which workers of the registry this router can talk to at all."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from services.router.pipeline import Workers
from triptych.core.ids import WorkerRef
from triptych.core.worker import WorkerInfo
from triptych.rpc.tls import ClusterTls

_log = logging.getLogger(__name__)

_TODO = {
    True: "a worker speaks TLS and this router does not: it gets no requests; give the router --tls-cert, --tls-key and"
    " --tls-ca",
    False: "a worker speaks no TLS, as this router does: it gets no requests; restart it with --tls-cert, --tls-key and"
    " --tls-ca",
}


class ReachableWorkers:
    """Implements `Workers`: who speaks TLS if the router does, and not if it does not. Calls to the others could only
    fail, and each would cost some request one of its attempts."""

    def __init__(self, registry: Workers, tls: ClusterTls | None) -> None:
        self._registry = registry
        self._speaks_tls = tls is not None
        self._told: set[WorkerRef] = set()

    def workers(self) -> tuple[WorkerInfo, ...]:
        return self._among(self._registry.workers())

    def refresh(self) -> tuple[WorkerInfo, ...]:
        return self._among(self._registry.refresh())

    def warn_of_others(self, workers: Iterable[WorkerInfo]) -> None:
        """Logs each once, with what to do: else it only looks like a stage that is missing."""
        for worker in workers:
            if worker.speaks_tls is not self._speaks_tls and worker.ref not in self._told:
                self._told.add(worker.ref)
                _log.warning(_TODO[worker.speaks_tls], extra={"worker_id": worker.worker_id})

    def _among(self, workers: tuple[WorkerInfo, ...]) -> tuple[WorkerInfo, ...]:
        return tuple(worker for worker in workers if worker.speaks_tls is self._speaks_tls)
