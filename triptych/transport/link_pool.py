"""One link per (receiver process, arena), made once, shared by all who send there, dropped when it breaks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from triptych.core.errors import DeadlineExceeded, PeerLost, TransferRefused
from triptych.core.ids import WorkerRef
from triptych.core.kv_format import Conversion, KvTerms, conversion
from triptych.core.worker import WorkerInfo
from triptych.obs import metrics
from triptych.rpc.client import TransferStub
from triptych.transport.circuit import Circuits, out_of_time
from triptych.transport.curve import CurveKeys
from triptych.transport.device import Driver
from triptych.transport.device_arena import DeviceImports
from triptych.transport.in_flight import DEFAULT_IN_FLIGHT_BYTES, InFlightLimit
from triptych.transport.inproc import InprocLink
from triptych.transport.link import EmbeddingLink, KvLink
from triptych.transport.names import INPROC
from triptych.transport.nixl_api import NixlDriver
from triptych.transport.receiver import Receivers
from triptych.transport.receiver_link import CONNECT_TIMEOUT_S, PeerEvents, ReceiverLink
from triptych.transport.session import choose_transport
from triptych.transport.types import ArenaKind, Endpoint
from triptych.transport.ways import DataSockets, WayBlocked, Ways, host_of

_log = logging.getLogger(__name__)

AnyLink = ReceiverLink | InprocLink
Key = tuple[WorkerRef, ArenaKind]


class LinkPool:
    """Owner of this process's outgoing links, and of what is known of peers that failed (`circuit.py`).

    Args:
        me: this process.
        stub_of: `functools.partial(transfer_stub, channels)`; dials a worker from the registry.
        receivers: what this process can land itself, for receivers that turn out to be this process.
        strict: a second-best transport is an error.
        new_keys: makes each link its keys, where what goes by TCP must be encrypted.
        driver: of the device that this process computes on, when `me` offers `cuda_ipc`.
        kv: how the pages lie that this process sends from; without it there are no links for KV.
        in_flight_bytes: of embeddings, on their way to one receiver at a time.
        nixl: the library, when `me` offers `nixl`.
    """

    def __init__(
        self,
        me: Endpoint,
        stub_of: Callable[[WorkerInfo], TransferStub],
        receivers: Receivers | None = None,
        *,
        strict: bool = False,
        new_keys: Callable[[], CurveKeys | None] = lambda: None,
        driver: Driver | None = None,
        kv: KvTerms | None = None,
        in_flight_bytes: int = DEFAULT_IN_FLIGHT_BYTES,
        nixl: NixlDriver | None = None,
    ) -> None:
        self._me = me
        self._kv = kv
        self._in_flight_bytes = in_flight_bytes
        self._new_keys = new_keys
        self._strict = strict
        self._sockets = DataSockets()
        self._imports = None if driver is None else DeviceImports(driver)
        self._nixl = nixl
        self._stub_of = stub_of
        self._receivers = receivers or Receivers()
        self._links: dict[Key, asyncio.Task[AnyLink]] = {}
        self._circuits = Circuits()
        self._closing: set[asyncio.Task[None]] = set()

    async def embedding_link(
        self, receiver: WorkerInfo, layout_fingerprint: bytes, *, timeout_s: float = CONNECT_TIMEOUT_S
    ) -> EmbeddingLink:
        """A ready link. Raises TransferRefused, PeerLost or DeadlineExceeded; the next call tries anew."""
        return await self._get(receiver, ArenaKind.EMBEDDING, layout_fingerprint, timeout_s)

    async def kv_link(
        self, receiver: WorkerInfo, layout_fingerprint: bytes, *, timeout_s: float = CONNECT_TIMEOUT_S
    ) -> KvLink:
        """A ready link. Raises TransferRefused, PeerLost or DeadlineExceeded; the next call tries anew."""
        return await self._get(receiver, ArenaKind.KV, layout_fingerprint, timeout_s)

    def keep_only(self, living: Collection[WorkerRef]) -> frozenset[WorkerRef]:
        """All other workers have left: forgets what broke with them, and answers who still is in use, since one that
        leaves ends what it has begun."""
        for key in [key for key in self._links if key[0] not in living]:
            self._drop_broken(key)
        self._circuits.keep_only(living)
        return frozenset(ref for ref, _ in self._links)

    async def close(self) -> None:
        """Closes every link; what waits on one fails with PeerLost."""
        for key in list(self._links):
            self._drop(key)
        await asyncio.gather(*self._closing, return_exceptions=True)
        self._sockets.close()
        self._circuits.close()

    async def _get(self, receiver: WorkerInfo, kind: ArenaKind, layout: bytes, timeout_s: float) -> AnyLink:
        key = (receiver.ref, kind)
        self._circuits.check(receiver.ref)
        self._drop_broken(key)
        if key not in self._links:
            self._drop_older(key)
            connecting = asyncio.create_task(self._connect(receiver, kind, layout), name="transfer-connect")
            connecting.add_done_callback(lambda task: self._forget_failed(key, task))
            self._links[key] = connecting
        return await _shared(self._links[key], timeout_s)

    async def _connect(self, receiver: WorkerInfo, kind: ArenaKind, layout: bytes) -> AnyLink:
        link = await self._connected(receiver, kind, layout)
        self._note_narrowing(link, kind, receiver)
        return link

    async def _connected(self, receiver: WorkerInfo, kind: ArenaKind, layout: bytes) -> AnyLink:
        terms = self._terms(kind)
        if choose_transport(self._me, Endpoint.of(receiver)) == INPROC:
            return InprocLink(self._me.ref, self._receivers, kind, layout, terms, self._new_limit())
        offered = tuple(transport for transport in self._me.transports if transport != INPROC)
        peer = receiver.ref
        events = PeerEvents(partial(self._circuits.answered, peer), partial(self._circuits.failed, peer))
        while True:
            me = replace(self._me, transports=offered)
            link = ReceiverLink(me, peer, kind, layout, terms, events, self._new_limit())
            try:
                with self._tried(peer):
                    await link.connect(self._stub_of(receiver), self._ways(receiver))
                return link
            except WayBlocked as blocked:
                offered = self._without(offered, blocked, receiver)

    def _new_limit(self) -> InFlightLimit:
        """Of one link: it ends with it, also with one that was only tried."""
        return InFlightLimit(self._in_flight_bytes)

    def _terms(self, kind: ArenaKind) -> KvTerms | None:
        return self._kv if kind is ArenaKind.KV else None

    def _note_narrowing(self, link: AnyLink, kind: ArenaKind, receiver: WorkerInfo) -> None:
        """Both sides have allowed it; nothing is silent all the same."""
        terms = self._terms(kind)
        if terms is None:
            return
        sent, kept = terms.pages.dtype, link.page_format.dtype
        if conversion(sent, kept) is Conversion.NARROWED:
            metrics.FALLBACKS.labels("kv_narrowed").inc()
            _log.warning(
                "KV is rounded on its way to a decode worker",
                extra={"worker": receiver.worker_id, "sent": sent.value, "kept": kept.value},
            )

    def _ways(self, receiver: WorkerInfo) -> Ways:
        keys = self._new_keys()
        return Ways(self._sockets, host_of(receiver.grpc_address), keys, self._imports, self._nixl, self._strict)

    @contextmanager
    def _tried(self, peer: WorkerRef) -> Iterator[None]:
        """Around a greeting: what it says of the peer. One that is refused outright is there."""
        try:
            with out_of_time(lambda: self._circuits.failed(peer, "unreachable"), CONNECT_TIMEOUT_S):
                yield
        except PeerLost:
            if self._circuits.is_tried(peer):
                self._circuits.failed(peer, "unreachable")
            raise
        except (TransferRefused, WayBlocked):
            self._circuits.answered(peer)
            raise
        self._circuits.answered(peer)

    def _without(self, offered: tuple[str, ...], blocked: WayBlocked, receiver: WorkerInfo) -> tuple[str, ...]:
        """What is left to try. Raises TransferRefused when that is nothing, or must be nothing."""
        left = tuple(transport for transport in offered if transport != blocked.transport)
        is_left = any(transport in receiver.transports for transport in left)
        if self._strict or not is_left:
            raise TransferRefused(f"{blocked.transport} to another worker does not work: {blocked.error.message}")
        metrics.FALLBACKS.labels(f"transport_{blocked.transport.replace('-', '_')}").inc()
        _log.warning(
            "a transport does not work, the next best is tried",
            extra={"transport": blocked.transport, "worker": receiver.worker_id, "reason": blocked.error.message},
        )
        return left

    def _forget_failed(self, key: Key, task: asyncio.Task[AnyLink]) -> None:
        if _has_failed(task) and self._links.get(key) is task:
            del self._links[key]

    def _drop_broken(self, key: Key) -> None:
        task = self._links.get(key)
        if task is not None and task.done() and (_has_failed(task) or task.result().closed.is_set()):
            self._drop(key)

    def _drop_older(self, key: Key) -> None:
        """A worker that was born again leaves links to its former self."""
        ref, kind = key
        for old in [k for k in self._links if k[0].worker_id == ref.worker_id and k[1] is kind]:
            self._drop(old)
        self._circuits.forget_former(ref)

    def _drop(self, key: Key) -> None:
        closing = asyncio.create_task(self._close_link(self._links.pop(key)), name="transfer-link-close")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    @staticmethod
    async def _close_link(task: asyncio.Task[AnyLink]) -> None:
        if not task.done():
            task.cancel()
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if not isinstance(result, BaseException):
            await result.close()


def _has_failed(task: asyncio.Task[AnyLink]) -> bool:
    return task.cancelled() or (task.done() and task.exception() is not None)


async def _shared(connecting: asyncio.Task[AnyLink], timeout_s: float) -> AnyLink:
    """Waits with others. Whoever gives up must not take the link from the rest, hence the shield."""
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.shield(connecting)
    except TimeoutError:
        raise DeadlineExceeded("no link to the other worker could be made in time") from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if connecting.cancelled() and (task is None or not task.cancelling()):
            raise PeerLost("the link was closed while it was being made") from None
        raise
