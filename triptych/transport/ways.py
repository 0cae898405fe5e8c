"""From a receiver's welcome to the carrier that it allows: a mapping, or a data socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeVar

import zmq.asyncio

from triptych.core.errors import TransferRefused, TriptychError
from triptych.obs import metrics
from triptych.transport.carrier import Carrier, MemoryCarrier
from triptych.transport.control_wire import FrameWire, knock
from triptych.transport.curve import CurveKeys
from triptych.transport.device_arena import DeviceImports, ImportedArena
from triptych.transport.device_carrier import DeviceCarrier
from triptych.transport.frames import Welcome
from triptych.transport.names import CUDA_IPC, NIXL, SHM, ZMQ_IPC, ZMQ_TCP
from triptych.transport.nixl_api import NixlDriver, NixlError, NixlSource
from triptych.transport.nixl_carrier import STAGING_BYTES, NixlCarrier
from triptych.transport.shm import SharedSegment
from triptych.transport.zmq_carrier import ZmqCarrier
from triptych.transport.zmq_gate import Admission, CurveAdmission, PlainAdmission

CONTROL_FALLBACK: Final = "control_socket"

_log = logging.getLogger(__name__)


class WayBlocked(Exception):
    """The transport that both ends agreed on does not work between them; another may."""

    def __init__(self, transport: str, error: TransferRefused) -> None:
        super().__init__(error.message)
        self.transport = transport
        self.error = error


class DataSockets:
    """Owner of the ZMQ context of this process's sending sockets, made when the first is needed."""

    def __init__(self) -> None:
        self._context: zmq.asyncio.Context | None = None

    @property
    def context(self) -> zmq.asyncio.Context:
        if self._context is None:
            self._context = zmq.asyncio.Context()
        return self._context

    def close(self) -> None:
        """After all links."""
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None


@dataclass(frozen=True, slots=True)
class Ways:
    """How one receiver's arena can be reached. `host` is the receiver's, from the registry: an address from anywhere
    else is never dialled. `keys` are this link's own, where what goes by TCP must be encrypted; `imports` is
    None when this process has no device to write from, `nixl` when it has not that library. `strict`: a
    second-best way is an error."""

    sockets: DataSockets
    host: str
    keys: CurveKeys | None = None
    imports: DeviceImports | None = None
    nixl: NixlDriver | None = None
    strict: bool = False

    @property
    def curve_key(self) -> bytes:
        """The public key for the greeting."""
        return b"" if self.keys is None else self.keys.public

    async def open(self, welcome: Welcome, broken: Callable[[TriptychError], None]) -> Carrier:
        """Raises TransferRefused when it cannot be. `broken` is called when it stops working later."""
        if welcome.transport == SHM:
            segment = SharedSegment.open(welcome.segment_name, welcome.segment_bytes, mapping_id=welcome.mapping_id)
            segment.populate_soon()
            return MemoryCarrier(SHM, segment.buffer, segment)
        if welcome.transport == CUDA_IPC:
            return DeviceCarrier(await _taken(partial(self._import, welcome)), broken)
        if welcome.transport == NIXL:
            source = await _taken(partial(self._connect_nixl, welcome))
            return NixlCarrier(source, welcome.segment_bytes, broken)
        if welcome.transport not in (ZMQ_IPC, ZMQ_TCP) or not welcome.data.session_key:
            raise TransferRefused("the receiver chose a transport that is not known here")
        carrier = ZmqCarrier(
            self.sockets.context,
            self._endpoint(welcome),
            welcome.mapping_id,
            welcome.data.session_key,
            welcome.segment_bytes,
            broken,
            self._admission(welcome),
        )
        await carrier.connect()
        return carrier

    async def join(self, welcome: Welcome) -> FrameWire | None:
        """The receiver's control socket, if it has one that can be reached: else the stream serves. Raises
        TransferRefused where that is not good enough."""
        if not welcome.control.socket_path:
            return None
        try:
            return await knock(welcome.control.socket_path, welcome.mapping_id, welcome.control.key)
        except TransferRefused as error:
            if self.strict:
                raise
            metrics.FALLBACKS.labels(CONTROL_FALLBACK).inc()
            _log.warning("control frames go by gRPC, which is slower", extra={"reason": error.message})
            return None

    def _admission(self, welcome: Welcome) -> Admission:
        """Who could be told to send in clear what must not be would be downgraded by whoever tells."""
        if welcome.transport == ZMQ_IPC:
            return PlainAdmission(welcome.mapping_id, welcome.data.session_key)
        if (self.keys is None) != (not welcome.data.curve_key):
            raise TransferRefused("one of the two workers encrypts its data connections and the other does not")
        if self.keys is None:
            return PlainAdmission(welcome.mapping_id, welcome.data.session_key)
        return CurveAdmission(self.keys, welcome.data.curve_key)

    def _import(self, welcome: Welcome) -> ImportedArena:
        """The driver takes its time: not for the event loop."""
        if self.imports is None or welcome.device is None:
            raise TransferRefused("the receiver chose device memory, and named none or there is no device here")
        return ImportedArena.open(self.imports, welcome.device, welcome.segment_bytes, welcome.mapping_id)

    def _connect_nixl(self, welcome: Welcome) -> NixlSource:
        if self.nixl is None or welcome.nixl is None:
            raise TransferRefused("there is no NIXL here, or the receiver cannot show its memory by it")
        try:
            return self.nixl.connect(welcome.nixl, welcome.segment_bytes, STAGING_BYTES)
        except NixlError as error:
            raise TransferRefused(f"the receiver's memory cannot be reached by NIXL ({error})") from error

    def _endpoint(self, welcome: Welcome) -> str:
        data = welcome.data
        if welcome.transport == ZMQ_IPC and data.socket_path:
            return f"ipc://{data.socket_path}"
        if welcome.transport == ZMQ_TCP and data.port:
            return f"tcp://{self.host}:{data.port}"
        raise TransferRefused("the receiver named no data socket")


class _Closable(Protocol):
    def close(self) -> None: ...


_T = TypeVar("_T", bound=_Closable)


async def _taken(take: Callable[[], _T]) -> _T:
    """In a thread. Whoever gives up meanwhile leaves nothing open."""
    taking = asyncio.create_task(asyncio.to_thread(take))
    try:
        return await asyncio.shield(taking)
    except asyncio.CancelledError:
        taking.add_done_callback(_close_unwanted)
        raise


def _close_unwanted(taking: asyncio.Task[_T]) -> None:
    if not taking.cancelled() and taking.exception() is None:
        taking.result().close()


def host_of(grpc_address: str) -> str:
    """`host` of host:port, with the brackets of an IPv6 address."""
    return grpc_address.rpartition(":")[0]
