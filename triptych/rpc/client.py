"""Channels and stubs to other workers. Addresses come from the registry's records only."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final, Protocol, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from triptych.core.ids import WorkerRef
from triptych.core.worker import WorkerInfo
from triptych.rpc.server import MAX_MESSAGE_BYTES, TOKEN_METADATA_KEY
from triptych.rpc.tls import TARGET_NAME_OPTIONS, ClusterTls
from triptych.wire.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    encoder_pb2,
    encoder_pb2_grpc,
    feed_pb2,
    feed_pb2_grpc,
    lines_pb2,
    lines_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    registry_pb2,
    registry_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
)

Metadata = tuple[tuple[str, str], ...]

PING_TIMEOUT_MS: Final = 10_000

CHANNEL_OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),  # without it a ping may go unanswered for a minute
    # How long a new connection may take: the system of a frozen worker accepts it, and nobody greets.
    ("grpc.min_reconnect_backoff_ms", 4_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.enable_http_proxy", 0),  # an http_proxy in the environment is not for workers
    ("grpc.use_local_subchannel_pool", 1),  # a reborn worker gets a fresh connection, not one in back-off
]


class ChannelPool:
    """Owns one channel per worker process. `keep_only` and `forget` close those to processes that are gone: until then
    each goes on dialling an address where nobody lives, or somebody else.

    `tls`: with it nothing is said, the token least of all, to what shows no certificate of the cluster.
    """

    def __init__(self, token: str | None, tls: ClusterTls | None = None) -> None:
        self._token = token
        self._tls = tls
        self._channels: dict[WorkerRef, grpc.aio.Channel] = {}

    def channel(self, worker: WorkerInfo) -> grpc.aio.Channel:
        """Without the token: pass `metadata()` with each call, or use the stubs below, which do."""
        if worker.ref not in self._channels:
            self._channels[worker.ref] = self._dial(worker.grpc_address)
        return self._channels[worker.ref]

    def _dial(self, address: str) -> grpc.aio.Channel:
        if self._tls is None:
            return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        options = [*CHANNEL_OPTIONS, *TARGET_NAME_OPTIONS]
        return grpc.aio.secure_channel(address, self._tls.channel_credentials(), options=options)

    def metadata(self) -> Metadata:
        """What every call must carry."""
        return () if self._token is None else ((TOKEN_METADATA_KEY, self._token),)

    async def forget(self, worker_id: str) -> None:
        """Closes the channels to a worker that left, whichever its process. Calls on them fail."""
        await self._close(ref for ref in self._channels if ref.worker_id == worker_id)

    async def keep_only(self, living: Collection[WorkerRef]) -> None:
        """Closes the channels to all other processes. Calls on them fail."""
        await self._close(ref for ref in self._channels if ref not in living)

    async def close(self) -> None:
        await self._close(self._channels)

    async def _close(self, gone: Iterable[WorkerRef]) -> None:
        for channel in [self._channels.pop(ref) for ref in list(gone)]:
            await channel.close(None)


# The generated stubs carry no types. These say what they are.


class EncoderStub(Protocol):
    Encode: grpc.aio.StreamStreamMultiCallable[encoder_pb2.EncodeRequest, encoder_pb2.EncodeResponse]


class PrefillStub(Protocol):
    Prefill: grpc.aio.UnaryStreamMultiCallable[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]


class DecodeStub(Protocol):
    Generate: grpc.aio.UnaryStreamMultiCallable[decode_pb2.GenerateRequest, decode_pb2.GenerateResponse]


class TransferStub(Protocol):
    Session: grpc.aio.StreamStreamMultiCallable[transfer_pb2.SessionRequest, transfer_pb2.SessionResponse]


class RegistryStub(Protocol):
    Describe: grpc.aio.UnaryUnaryMultiCallable[registry_pb2.DescribeRequest, registry_pb2.DescribeResponse]


class CacheFeedStub(Protocol):
    Watch: grpc.aio.UnaryStreamMultiCallable[feed_pb2.WatchRequest, feed_pb2.WatchResponse]


class LinesStub(Protocol):
    Hold: grpc.aio.UnaryStreamMultiCallable[lines_pb2.HoldRequest, lines_pb2.HoldResponse]


class HealthStub(Protocol):
    Check: grpc.aio.UnaryUnaryMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
    Watch: grpc.aio.UnaryStreamMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]


def encoder_stub(channels: ChannelPool, worker: WorkerInfo) -> EncoderStub:
    return cast(EncoderStub, _stub(encoder_pb2_grpc.EncoderStub, channels, worker))


def prefill_stub(channels: ChannelPool, worker: WorkerInfo) -> PrefillStub:
    return cast(PrefillStub, _stub(prefill_pb2_grpc.PrefillStub, channels, worker))


def decode_stub(channels: ChannelPool, worker: WorkerInfo) -> DecodeStub:
    return cast(DecodeStub, _stub(decode_pb2_grpc.DecodeStub, channels, worker))


def transfer_stub(channels: ChannelPool, worker: WorkerInfo) -> TransferStub:
    return cast(TransferStub, _stub(transfer_pb2_grpc.TransferStub, channels, worker))


def registry_stub(channels: ChannelPool, worker: WorkerInfo) -> RegistryStub:
    return cast(RegistryStub, _stub(registry_pb2_grpc.WorkerRegistryStub, channels, worker))


def cache_feed_stub(channels: ChannelPool, worker: WorkerInfo) -> CacheFeedStub:
    return cast(CacheFeedStub, _stub(feed_pb2_grpc.CacheFeedStub, channels, worker))


def lines_stub(channels: ChannelPool, worker: WorkerInfo) -> LinesStub:
    return cast(LinesStub, _stub(lines_pb2_grpc.LinesStub, channels, worker))


def health_stub(channels: ChannelPool, worker: WorkerInfo) -> HealthStub:
    return cast(HealthStub, _stub(health_pb2_grpc.HealthStub, channels, worker))


def _stub(generated: Callable[[Any], object], channels: ChannelPool, worker: WorkerInfo) -> object:
    return generated(_WithMetadata(channels.channel(worker), channels.metadata()))


class _WithMetadata:
    """The part of a channel that generated stubs use; each call carries the metadata.

    Not client interceptors: those wrap streaming calls in objects that cancel and half-close differently.
    """

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata) -> None:
        self._channel = channel
        self._metadata = metadata

    def unary_unary(self, *args: Any, **kwargs: Any) -> object:
        return self._bind(self._channel.unary_unary(*args, **kwargs))

    def unary_stream(self, *args: Any, **kwargs: Any) -> object:
        return self._bind(self._channel.unary_stream(*args, **kwargs))

    def stream_unary(self, *args: Any, **kwargs: Any) -> object:
        return self._bind(self._channel.stream_unary(*args, **kwargs))

    def stream_stream(self, *args: Any, **kwargs: Any) -> object:
        return self._bind(self._channel.stream_stream(*args, **kwargs))

    def _bind(self, call: Callable[..., object]) -> object:
        return functools.partial(call, metadata=self._metadata)
