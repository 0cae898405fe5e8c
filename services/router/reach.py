"""Which workers of the registry this router can talk to.

    in the registry ── speaks TLS as the router does? ── answers with its own name? ──► gets requests
                                '──────── no: named in the log, once ──────'──► asked again each second

A record says only that a worker lives. With a certificate of another authority, another token, or an address that
cannot be reached from here, every call to it would fail, and take an attempt of some request with it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import grpc

from services.router.pipeline import Workers
from services.router.tasks import unwrapped_group
from triptych.core.ids import WorkerRef
from triptych.core.worker import WorkerInfo
from triptych.registry.static import StaticRegistry
from triptych.rpc.client import ChannelPool, registry_stub
from triptych.rpc.tls import ClusterTls
from triptych.wire.v1 import registry_pb2

GREETING_TIMEOUT_S: Final = 5.0
GREET_AGAIN_S: Final = 1.0

_log = logging.getLogger(__name__)

_OTHER_TLS = {
    True: "it speaks TLS and this router does not: give the router --tls-cert, --tls-key and --tls-ca",
    False: "it speaks no TLS, as this router does: restart it with --tls-cert, --tls-key and --tls-ca",
}
_UNREACHABLE = {
    True: "no TLS connection to it can be made: is its certificate of the same authority, and its --host an address"
    " that this host reaches?",
    False: "no connection to it can be made: is its --host an address that this host reaches?",
}
_REFUSED: Final = "it refuses this router: has it the same runtime folder, and so the same token?"
_SOMEBODY_ELSE: Final = "another process answers at its address"


class ReachableWorkers:
    """Implements `Workers`: those of the registry that have answered this router once. `run` does the asking."""

    def __init__(self, registry: Workers, channels: ChannelPool, tls: ClusterTls | None) -> None:
        self._registry = registry
        self._channels = channels
        self._speaks_tls = tls is not None
        self._told: set[WorkerRef] = set()
        self._asked: set[WorkerRef] = set()
        self._answered: set[WorkerRef] = set()
        self._wake = asyncio.Event()

    def workers(self) -> tuple[WorkerInfo, ...]:
        return self._among(self._registry.workers())

    def refresh(self) -> tuple[WorkerInfo, ...]:
        return self._among(self._registry.refresh())

    async def changed(self) -> None:
        """Waits until another worker has answered."""
        await self._wake.wait()

    async def run(self, registry: StaticRegistry) -> None:
        """Until cancelled: greets whoever comes. `registry` tells of changes."""
        with unwrapped_group():
            async with asyncio.TaskGroup() as group:
                while True:
                    workers = self._registry.workers()
                    self._forget_all_but({worker.ref for worker in workers})
                    for worker in workers:
                        if worker.ref not in self._asked:
                            self._asked.add(worker.ref)
                            group.create_task(self._greet(worker))
                    await registry.changed()

    async def _greet(self, worker: WorkerInfo) -> None:
        if worker.speaks_tls is not self._speaks_tls:
            self._tell(worker, _OTHER_TLS[worker.speaks_tls])
            return
        while worker.ref in self._asked:
            fault = await self._fault_of(worker)
            if fault is None:
                self._answered.add(worker.ref)
                self._wake.set()
                self._wake = asyncio.Event()
                return
            if worker.ref in self._asked:  # it may have left meanwhile
                self._tell(worker, fault)
            await asyncio.sleep(GREET_AGAIN_S)

    async def _fault_of(self, worker: WorkerInfo) -> str | None:
        """What keeps requests from it; None when it answers as itself."""
        try:
            stub = registry_stub(self._channels, worker)
            answer = await stub.Describe(registry_pb2.DescribeRequest(), timeout=GREETING_TIMEOUT_S)
            is_itself = (answer.worker.worker_id, answer.worker.epoch) == (worker.worker_id, worker.epoch)
            return None if is_itself else _SOMEBODY_ELSE
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                return _REFUSED
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return _UNREACHABLE[self._speaks_tls]
            return f"it does not answer ({error.code().name.lower()})"
        except grpc.aio.UsageError:  # it has left, and its channel was closed
            return _SOMEBODY_ELSE

    def _tell(self, worker: WorkerInfo, fault: str) -> None:
        """Once: else it only looks like a stage that is missing."""
        if worker.ref not in self._told:
            self._told.add(worker.ref)
            _log.warning("a worker gets no requests: %s", fault, extra={"worker_id": worker.worker_id})

    def _forget_all_but(self, living: set[WorkerRef]) -> None:
        for known in (self._told, self._asked, self._answered):
            known &= living

    def _among(self, workers: tuple[WorkerInfo, ...]) -> tuple[WorkerInfo, ...]:
        return tuple(worker for worker in workers if worker.ref in self._answered)
