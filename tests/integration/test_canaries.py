"""Pickles that would leave a trace, sent to everything that listens and written to everything that is read: refused or
ignored, never unpickled, and the next request answers rightly. Beside it, builds that do unpickle are found."""

from __future__ import annotations

import asyncio
import pickle
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from tests.canary import Canary, listening
from tests.integration import tiny_cluster
from tests.integration.tiny_cluster import MAX_TOKENS
from tests.parity.prompts import draw_picture
from triptych.core.worker import WorkerInfo
from triptych.registry import static
from triptych.rpc import check, client
from triptych.rpc.client import ChannelPool
from triptych.testing.cluster import ChatRequest, InProcessCluster
from triptych.transport import receiver_link
from triptych.transport.control_port import ControlPort
from triptych.transport.zmq_port import DataPort
from triptych.wire.v1 import decode_pb2, encoder_pb2, prefill_pb2, registry_pb2, transfer_pb2

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]
model_dir = tiny_cluster.model_dir

GENERATE, SESSION = "/triptych.wire.v1.Decode/Generate", "/triptych.wire.v1.Transfer/Session"
REQUESTS: dict[str, type[Message]] = {
    GENERATE: decode_pb2.GenerateRequest,
    "/triptych.wire.v1.Prefill/Prefill": prefill_pb2.PrefillRequest,
    "/triptych.wire.v1.Encoder/Encode": encoder_pb2.EncodeRequest,
    SESSION: transfer_pb2.SessionRequest,
    "/triptych.wire.v1.WorkerRegistry/Describe": registry_pb2.DescribeRequest,
}
PATIENCE_S = 0.5
ASKED = ChatRequest(
    [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}],
    (draw_picture(1, (84, 56)),),
    max_tokens=MAX_TOKENS,
)

Spoken = dict[str, list[list[bytes]]]
"""By method: the messages of each call that was made."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def heard(model_dir: Path) -> AsyncIterator[tuple[InProcessCluster, Spoken, list[int]]]:
    """A cluster, all that its processes said to each other for one request, and the right answer."""
    spoken: Spoken = defaultdict(list)
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            patch.setattr(client._WithMetadata, kind, _recorded_kind(kind, spoken))
        patch.setattr(receiver_link.ReceiverLink, "_say", _recorded_say(spoken))
        async with InProcessCluster(model_dir, kv_pool_bytes=tiny_cluster.SMALL_POOL, chunk_tokens=48) as cluster:
            truth = (await cluster.generate(ASKED)).token_ids
            yield cluster, {method: list(calls) for method, calls in spoken.items()}, truth


def _recorded_kind(kind: str, spoken: Spoken) -> Any:
    def make(self: Any, method: str, request_serializer: Any, response_deserializer: Any, **options: Any) -> Any:
        said: list[bytes] = []
        spoken[method].append(said)

        def serialize(message: Message) -> bytes:
            raw: bytes = request_serializer(message)
            said.append(raw)
            return raw

        return self._bind(getattr(self._channel, kind)(method, serialize, response_deserializer, **options))

    return make


def _recorded_say(spoken: Spoken) -> Any:
    """What goes by the control socket after the greeting, as if it went by the stream."""
    say, calls = receiver_link.ReceiverLink._say, dict[int, list[bytes]]()

    def heard_say(self: receiver_link.ReceiverLink, frame: transfer_pb2.SessionRequest) -> bool:
        if id(self) not in calls:
            hello = self._session.__class__(
                self._session.me, self._session.receiver, self._session.kind, self._session.layout_fingerprint
            ).hello()
            calls[id(self)] = [hello.SerializeToString()]
            spoken[SESSION].insert(0, calls[id(self)])
        calls[id(self)].append(frame.SerializeToString())
        return say(self, frame)

    return heard_say


@pytest.fixture
def canary(tmp_path: Path) -> Canary:
    return Canary(tmp_path / "trace")


async def still_right(cluster: InProcessCluster, truth: list[int]) -> None:
    """With all caches emptied, so that everything is computed and sent again."""
    cluster.clear_caches()
    assert (await cluster.generate(ASKED)).token_ids == truth
    cluster.check_integrity()


def infos(cluster: InProcessCluster) -> list[WorkerInfo]:
    found = [worker.info for worker in cluster.workers]
    assert all(found)
    return [info for info in found if info is not None]


# --- gRPC -------------------------------------------------------------------------------------------------------------


def text_fields(message: Message, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all fields of bytes or text, set or not, of the messages that are there."""
    for field in message.DESCRIPTOR.fields:
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            if field.message_type.GetOptions().map_entry:
                continue
            if field.is_repeated:
                for index, part in enumerate(getattr(message, field.name)):
                    yield from text_fields(part, (*above, (field.name, index)))
            elif message.HasField(field.name):
                yield from text_fields(getattr(message, field.name), (*above, (field.name, None)))
        elif field.type in (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_STRING):
            yield (*above, (field, None))


def spoiled(message: Message, path: tuple[Any, ...], canary: Canary) -> bytes:
    copy = type(message)()
    copy.CopyFrom(message)
    target: Any = copy
    for name, index in path[:-1]:
        target = getattr(target, name) if index is None else getattr(target, name)[index]
    field = path[-1][0]
    bird: Any = canary.raw if field.type == FieldDescriptor.TYPE_BYTES else canary.text
    if field.is_repeated:
        getattr(target, field.name).append(bird)
    else:
        setattr(target, field.name, bird)
    return copy.SerializeToString()


def streams(method: str, calls: list[list[bytes]], canary: Canary) -> Iterator[list[bytes]]:
    """Every message of the calls with the canary in one field, behind the ones that came before it; and the canary
    itself in place of a message."""
    kind = REQUESTS[method]
    yield [canary.raw]
    yield [canary.text.encode()]
    for call in calls:
        for place, raw in enumerate(call):
            message = kind.FromString(raw)
            for path in text_fields(message):
                yield [*map(_renamed(kind), call[:place]), spoiled(message, path, canary)]


def _renamed(kind: type[Message]) -> Callable[[bytes], bytes]:
    """A session in the name of a worker that has one already would only end that."""

    def rename(raw: bytes) -> bytes:
        message = kind.FromString(raw)
        if isinstance(message, transfer_pb2.SessionRequest) and message.WhichOneof("kind") == "hello":
            message.hello.worker_id = "stranger-0"
        return message.SerializeToString()

    return rename


async def call_raw(channels: ChannelPool, info: WorkerInfo, method: str, messages: list[bytes]) -> str:
    """How it ended: the status, or `open` if it did not in time."""

    async def sent() -> AsyncIterator[bytes]:
        for message in messages:
            yield message
        await asyncio.sleep(PATIENCE_S)

    token = channels.metadata()
    channel = channels.channel(info)
    if method.endswith("Describe"):
        call: Any = channel.unary_unary(method, None, None)(messages[-1], metadata=token, timeout=PATIENCE_S)
        waiting = _ended(call)
    elif method.endswith(("Session", "Encode")):
        waiting = _drained(channel.stream_stream(method, None, None)(sent(), metadata=token, timeout=2 * PATIENCE_S))
    else:
        call = channel.unary_stream(method, None, None)(messages[-1], metadata=token, timeout=PATIENCE_S)
        waiting = _drained(call)
    try:
        await waiting
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


async def _ended(call: Any) -> None:
    await call


async def _drained(call: Any) -> None:
    async for _ in call:
        pass


async def fly_by_grpc(
    cluster: InProcessCluster, spoken: Spoken, canary: Canary, methods: Iterable[str] = REQUESTS
) -> dict[str, int]:
    """How many calls ended with which status."""
    ends: dict[str, int] = defaultdict(int)
    channels = cluster.pipeline._channels
    flights = [
        call_raw(channels, info, method, messages)
        for method in methods
        for messages in streams(method, spoken.get(method, [])[:3], canary)
        for info in infos(cluster)
    ]
    for start in range(0, len(flights), 64):
        for end in await asyncio.gather(*flights[start : start + 64]):
            ends[end] += 1
    return dict(ends)


async def test_a_canary_in_any_field_of_any_call_is_not_unpickled(
    heard: tuple[InProcessCluster, Spoken, list[int]], canary: Canary
) -> None:
    cluster, spoken, truth = heard
    asked = {_kind(raw) for call in spoken[SESSION] for raw in call}
    assert asked >= {"hello", "slot_request", "bind_request", "commit"}
    assert {method for method, calls in spoken.items() if any(calls)} >= set(REQUESTS) - {
        "/triptych.wire.v1.WorkerRegistry/Describe"
    }
    with listening() as looked_up:
        ends = await fly_by_grpc(cluster, spoken, canary)
        await still_right(cluster, truth)
    assert not canary.sung() and looked_up == []
    # Sessions refuse within the stream, and workers do not serve each other's methods.
    assert ends["INVALID_ARGUMENT"] > 25 and "INTERNAL" not in ends and "UNKNOWN" not in ends, ends


def _kind(raw: bytes) -> str | None:
    return transfer_pb2.SessionRequest.FromString(raw).WhichOneof("kind")


# --- sockets ----------------------------------------------------------------------------------------------------------


async def fly_by_sockets(cluster: InProcessCluster, canary: Canary) -> None:
    """Raw bytes, and ZMQ without and with a wrong password, to each port and each socket in the runtime folder."""
    ports = data_ports(cluster)
    assert len(ports) == 2
    addresses = [port.address for port in ports]
    tcp = [int(info.grpc_address.rpartition(":")[2]) for info in infos(cluster)]
    tcp += [int(info.metrics_address.rpartition(":")[2]) for info in infos(cluster)]
    tcp += [address.port for address in addresses]
    http = b"GET /" + canary.text.encode().replace(b"\n", b"%0a") + b" HTTP/1.1\r\nHost: x\r\nCookie: "
    post = b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(canary.raw)
    for port in tcp:
        for raw in (canary.raw, canary.raw * 100, http + canary.text.encode() + b"\r\n\r\n", post + canary.raw):
            await _send_raw(await asyncio.open_connection("127.0.0.1", port), raw)
    doors = [str(port._path) for port in control_ports(cluster)]
    assert len(doors) == 2
    for path in doors + [address.socket_path for address in addresses]:
        for raw in (canary.raw, len(canary.raw).to_bytes(4, "little") + canary.raw):
            await _send_raw(await asyncio.open_unix_connection(path), raw)
    for endpoint in [f"tcp://127.0.0.1:{port}" for port in tcp] + [f"ipc://{a.socket_path}" for a in addresses]:
        await _send_zmq(endpoint, canary)


def data_ports(cluster: InProcessCluster) -> list[DataPort]:
    found = [worker._transfer._data_port for worker in cluster.workers if worker._transfer is not None]
    return [port for port in found if port is not None]


def control_ports(cluster: InProcessCluster) -> list[ControlPort]:
    found = [worker._transfer._control_port for worker in cluster.workers if worker._transfer is not None]
    return [port for port in found if port is not None]


async def _send_raw(streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], raw: bytes) -> None:
    reader, writer = streams
    try:
        writer.write(raw)
        await writer.drain()
        async with asyncio.timeout(0.2):
            while await reader.read(65536):
                pass
    except (TimeoutError, OSError):
        pass
    finally:
        writer.close()


async def _send_zmq(endpoint: str, canary: Canary) -> None:
    context = zmq.asyncio.Context()
    for kind in (zmq.PUSH, zmq.DEALER):
        socket = context.socket(kind)
        socket.linger, socket.sndtimeo = 0, 50
        socket.plain_username, socket.plain_password = canary.text.encode()[:255], canary.raw[:255]
        socket.connect(endpoint)
        try:
            await socket.send_multipart([canary.raw, canary.raw])
        except zmq.Again:
            pass
        finally:
            socket.close(0)
    context.destroy(linger=0)


async def test_a_canary_to_any_port_or_socket_is_not_unpickled(
    heard: tuple[InProcessCluster, Spoken, list[int]], canary: Canary
) -> None:
    cluster, _, truth = heard
    with listening() as looked_up:
        await fly_by_sockets(cluster, canary)
        await still_right(cluster, truth)
    assert not canary.sung() and looked_up == []


# --- memory and files -------------------------------------------------------------------------------------------------


async def test_a_canary_in_free_shared_memory_changes_nothing(
    heard: tuple[InProcessCluster, Spoken, list[int]], canary: Canary
) -> None:
    """Whoever maps a segment may write anywhere in it: here over all that nobody owns, between two requests."""
    cluster, _, truth = heard
    cluster.clear_caches()
    with listening() as looked_up:
        for worker in cluster.workers:
            for arena in _arenas(worker):
                bird = canary.raw * (len(arena) // len(canary.raw))
                arena[: len(bird)] = bird
        await still_right(cluster, truth)
    assert not canary.sung() and looked_up == []


def _arenas(worker: Any) -> list[memoryview]:
    receivers = worker._transfer._receivers
    return [receiver.arena.buffer for receiver in (receivers.embedding, receivers.kv) if receiver is not None]


def lay_in_folder(cluster: InProcessCluster, canary: Canary) -> list[Path]:
    """Records of workers that seem to live, and what looks like a socket or a lock."""
    folder = cluster._runtime
    laid = []
    for name, content in {"evil-0": canary.raw, "evil-1": canary.text.encode()}.items():
        laid += [folder.workers_path / f"{name}.json", folder.workers_path / f"{name}.pkl"]
        laid += [folder.sockets_path / f"{name}.0123abcd.sock", folder.path / f"{name}.pickle"]
        for path in laid[-4:]:
            path.write_bytes(content)
    return laid


async def test_a_canary_in_the_runtime_folder_is_not_unpickled(
    heard: tuple[InProcessCluster, Spoken, list[int]], canary: Canary
) -> None:
    cluster, _, truth = heard
    laid = lay_in_folder(cluster, canary)
    locks = [static.FileLock.acquire(path.with_suffix(".lock")) for path in laid if path.suffix == ".json"]
    assert all(locks)
    try:
        with listening() as looked_up:
            known = {info.worker_id for info in static.StaticRegistry(cluster._runtime).refresh()}
            await still_right(cluster, truth)
        assert known == {info.worker_id for info in infos(cluster)}
        assert not canary.sung() and looked_up == []
    finally:
        for lock in locks:
            if lock is not None:
                lock.release()
        for path in laid:
            path.unlink(missing_ok=True)


# --- builds that must be found ----------------------------------------------------------------------------------------


def _unpickle(raw: object) -> None:
    try:
        pickle.loads(raw.encode() if isinstance(raw, str) else bytes(raw))  # type: ignore[call-overload]
    except Exception:
        return


@pytest.mark.parametrize("place", ["bytes field", "text field", "record"])
async def test_a_build_that_unpickles_is_found(
    heard: tuple[InProcessCluster, Spoken, list[int]], canary: Canary, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, spoken, _ = heard

    def broken(target: Any, name: str, at: int) -> None:
        sound = getattr(target, name)

        def unpickling(*arguments: Any) -> Any:
            _unpickle(arguments[at])
            return sound(*arguments)

        monkeypatch.setattr(target, name, unpickling)

    with listening() as looked_up:
        if place == "record":
            broken(static, "from_json", 0)
            laid = lay_in_folder(cluster, canary)
            lock = static.FileLock.acquire(laid[4].with_suffix(".lock"))
            assert lock is not None
            static.StaticRegistry(cluster._runtime).refresh()
            lock.release()
            for path in laid:
                path.unlink(missing_ok=True)
        else:
            broken(check, "exact_bytes" if place == "bytes field" else "name", 1)
            await fly_by_grpc(cluster, spoken, canary, [GENERATE])
    assert canary.sung() and any("mkdir" in name for name in looked_up)
