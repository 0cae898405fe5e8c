"""TLS between workers: who is let in, who is called, and what stops a start."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.certificates import Authority
from triptych.core.errors import StartupError
from triptych.core.tls_files import TlsFiles
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.obs import metrics
from triptych.rpc import server
from triptych.rpc import tls as tls_module
from triptych.rpc.client import ChannelPool, health_stub, registry_stub
from triptych.rpc.server import RpcServer, add_describe
from triptych.rpc.tls import TARGET_NAME_OPTIONS, ClusterTls, load_tls
from triptych.wire.v1 import registry_pb2

TOKEN = "a-token-for-tests"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder)


@pytest.fixture(scope="module")
def files(authority: Authority) -> TlsFiles:
    return authority.issue()


@pytest.fixture(scope="module")
def strangers(folder: Path) -> TlsFiles:
    """Of another authority."""
    return Authority(folder, "other").issue("stranger")


def loaded(files: TlsFiles) -> ClusterTls:
    found = load_tls(files)
    assert found is not None
    return found


@pytest.fixture
async def info(files: TlsFiles) -> AsyncIterator[WorkerInfo]:
    """A serving worker; it listens beyond loopback, without --insecure-network."""
    worker = RpcServer("0.0.0.0", 0, token=TOKEN, tls=loaded(files))
    record = WorkerInfo("decode-0", 1, frozenset({Role.DECODE}), WorkerState.READY, "")
    add_describe(worker, lambda: record)
    record = replace(record, grpc_address=f"127.0.0.1:{await worker.start()}")
    await worker.set_serving(True)
    yield record
    await worker.stop(0)


async def health(credentials: grpc.ChannelCredentials | None, info: WorkerInfo) -> int:
    """Of a caller who says whatever it is told to. Health needs no token, so only TLS stands in its way."""
    options = [*TARGET_NAME_OPTIONS, ("grpc.enable_retries", 0)]
    if credentials is None:
        channel = grpc.aio.insecure_channel(info.grpc_address)
    else:
        channel = grpc.aio.secure_channel(info.grpc_address, credentials, options)
    async with channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        return int(answer.status)


async def test_workers_of_one_cluster_reach_each_other_by_address(info: WorkerInfo, files: TlsFiles) -> None:
    channels = ChannelPool(TOKEN, loaded(files))
    answer = await registry_stub(channels, info).Describe(registry_pb2.DescribeRequest(), timeout=5)
    assert answer.worker.worker_id == "decode-0"
    checked = await health_stub(channels, info).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert checked.status == health_pb2.HealthCheckResponse.SERVING
    await channels.close()


async def test_the_token_is_asked_for_under_tls_too(info: WorkerInfo, files: TlsFiles) -> None:
    channels = ChannelPool("another-token", loaded(files))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await registry_stub(channels, info).Describe(registry_pb2.DescribeRequest(), timeout=5)
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await channels.close()


async def test_strangers_are_not_even_told_the_health(
    info: WorkerInfo, files: TlsFiles, strangers: TlsFiles, authority: Authority
) -> None:
    ca = files.ca.read_bytes()
    expired = authority.issue("expired", days=-1)
    namesake = authority.issue("collector", names="DNS:metrics.example.org")
    refused = {
        "plain": None,
        "without a certificate": grpc.ssl_channel_credentials(ca),
        "of another authority": _credentials(ca, strangers),
        "expired": _credentials(ca, expired),
    }
    for who, credentials in refused.items():
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await health(credentials, info)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE, who
    with pytest.raises(grpc.aio.AioRpcError, match=r"does not name triptych\.internal") as raised:
        await health(_credentials(ca, namesake), info)
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert await health(_credentials(ca, files), info) == health_pb2.HealthCheckResponse.SERVING


def _credentials(ca: bytes, files: TlsFiles) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(ca, files.key.read_bytes(), files.cert.read_bytes())


async def test_a_certificate_for_something_else_calls_nothing_even_with_the_token(
    info: WorkerInfo, files: TlsFiles, authority: Authority
) -> None:
    """Of the same authority: of who collects the metrics, say."""
    other = authority.issue("elsewhere", names="DNS:metrics.example.org,DNS:triptych.internal.example.org")
    tls = replace(loaded(files), certificate=other.cert.read_bytes(), key=other.key.read_bytes())
    channels = ChannelPool(TOKEN, tls)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await registry_stub(channels, info).Describe(registry_pb2.DescribeRequest(), timeout=5)
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    watching = health_stub(channels, info).Watch(health_pb2.HealthCheckRequest(), timeout=5)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await watching.read()
    assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await channels.close()


@pytest.mark.parametrize("has_tls", [True, False])
async def test_who_connects_and_says_nothing_is_hung_up_on(
    has_tls: bool, files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC's own patience is two minutes, and each holds a socket of the worker's for it."""
    impatient = [(key, 500 if key.endswith("handshake_timeout_ms") else value) for key, value in server.SERVER_OPTIONS]
    assert impatient != server.SERVER_OPTIONS
    monkeypatch.setattr(server, "SERVER_OPTIONS", impatient)
    worker = RpcServer("127.0.0.1", 0, token=TOKEN, tls=loaded(files) if has_tls else None)
    reader, writer = await asyncio.open_connection("127.0.0.1", await worker.start())
    async with asyncio.timeout(8):
        with suppress(ConnectionError):
            while await reader.read(1024):
                pass
    writer.close()
    await worker.stop(0)


@pytest.mark.parametrize("who", ["stranger", "namesake", "plain"])
async def test_a_server_that_is_not_the_clusters_never_hears_the_token(
    who: str, files: TlsFiles, strangers: TlsFiles, authority: Authority
) -> None:
    """`namesake`: of the same authority, for another purpose."""
    heard: list[object] = []

    class Listening(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
        async def intercept_service(self, continuation, details):  # type: ignore[no-untyped-def]
            heard.append(details.invocation_metadata)
            return await continuation(details)

    listener = grpc.aio.server(interceptors=[Listening()])
    if who == "plain":
        port = listener.add_insecure_port("127.0.0.1:0")
    else:
        shown = strangers if who == "stranger" else authority.issue("namesake", names="DNS:127.0.0.1,IP:127.0.0.1")
        pair = (shown.key.read_bytes(), shown.cert.read_bytes())
        port = listener.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    await listener.start()
    info = WorkerInfo("decode-0", 1, frozenset({Role.DECODE}), WorkerState.READY, f"127.0.0.1:{port}")
    channels = ChannelPool(TOKEN, loaded(files))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await registry_stub(channels, info).Describe(registry_pb2.DescribeRequest(), timeout=5)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert heard == []
    await channels.close()
    await listener.stop(0)


async def test_beyond_loopback_tls_needs_the_token_too(files: TlsFiles) -> None:
    with pytest.raises(StartupError, match="without a cluster token"):
        RpcServer("0.0.0.0", 0, token=None, tls=loaded(files))


# --- what stops a start -----------------------------------------------------------------------------------------------


def test_no_files_are_no_tls() -> None:
    assert load_tls(None) is None


def test_the_key_is_not_shown(files: TlsFiles) -> None:
    assert "PRIVATE" not in repr(loaded(files))


def _spoiled(what: str, files: TlsFiles, authority: Authority, strangers: TlsFiles, folder: Path) -> TlsFiles:
    junk = folder / "junk.pem"
    junk.write_text("no PEM")
    junk.chmod(0o600)
    if what == "open":
        issued = authority.issue("open")
        issued.key.chmod(0o640)
        return issued
    return {
        "expired": lambda: authority.issue("old", days=-1),
        "another name": lambda: authority.issue("named", names="DNS:example.org,IP:127.0.0.1"),
        "wildcard": lambda: authority.issue("wild", names="DNS:*.internal"),
        "another authority": lambda: replace(files, ca=strangers.ca),
        "another key": lambda: replace(files, key=strangers.key),
        "no certificate": lambda: replace(files, cert=junk),
        "no key": lambda: replace(files, key=junk),
        "no authority": lambda: replace(files, ca=junk),
        "missing": lambda: replace(files, cert=folder / "nowhere.pem"),
        "key missing": lambda: replace(files, key=folder / "nowhere.key"),
        "ed25519": lambda: authority.issue("ed", key=("-newkey", "ed25519")),
        "ed448": lambda: authority.issue("ed448", key=("-newkey", "ed448")),
        "P-521": lambda: authority.issue("p521", key=_curve("secp521r1")),
        "RSA-PSS": lambda: authority.issue("pss", key=("-newkey", "rsa-pss", "-pkeyopt", "rsa_keygen_bits:2048")),
        "short": lambda: authority.issue("short", key=("-newkey", "rsa:1024")),
    }[what]()


def _curve(name: str) -> tuple[str, ...]:
    return ("-newkey", "ec", "-pkeyopt", f"ec_paramgen_curve:{name}")


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("expired", "has expired"),
        ("another name", "does not name triptych.internal: make it with subjectAltName=DNS:triptych.internal"),
        ("wildcard", "does not name triptych.internal"),
        ("another authority", "was not signed by the authority of --tls-ca"),
        ("another key", "not that of the certificate"),
        ("no certificate", "are not a certificate and its key"),
        ("no key", "are not a certificate and its key"),
        ("no authority", "--tls-ca holds no certificate"),
        ("missing", "cannot be read: No such file"),
        ("key missing", "cannot be read: No such file"),
        ("open", "is open to other users; run: chmod 0600"),
        ("ed25519", "gRPC cannot use the certificate of --tls-cert with its key, .* take EC P-256, or RSA"),
        ("ed448", "gRPC cannot use the certificate"),
        ("P-521", "gRPC cannot use the certificate"),
        ("RSA-PSS", "gRPC cannot use the certificate"),
        ("short", "is too weak: take EC P-256, or RSA of 2048"),
    ],
)
def test_files_that_could_not_serve_stop_the_start(
    what: str, sentence: str, files: TlsFiles, authority: Authority, strangers: TlsFiles, folder: Path
) -> None:
    with pytest.raises(StartupError, match=sentence):
        load_tls(_spoiled(what, files, authority, strangers, folder))


@pytest.mark.parametrize("key", [_curve("secp384r1"), ("-newkey", "rsa:2048"), ("-newkey", "ed25519")])
def test_keys_that_grpc_takes_start(key: tuple[str, ...], authority: Authority, tmp_path: Path) -> None:
    """An authority may have any that OpenSSL and gRPC can check a signature of."""
    if key[1] != "ed25519":
        loaded(authority.issue(f"of-{key[-1].rpartition(':')[2]}", key=key))
    loaded(Authority(tmp_path, "signer", key=key).issue())


@pytest.mark.parametrize(
    ("owner", "mode", "is_taken"),
    [(0, 0o440, True), (0, 0o400, True), (0, 0o460, False), (0, 0o444, False), (1234, 0o400, False), (99, 0o600, True)],
)
def test_a_key_that_root_hands_to_a_group_is_private_and_another_users_is_not(
    owner: int, mode: int, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that secrets can be mounted in containers that do not run as root."""
    monkeypatch.setattr(tls_module.os, "getuid", lambda: 99)
    monkeypatch.setattr(
        tls_module.os, "stat", lambda _: os.stat_result((stat.S_IFREG | mode, 1, 1, 1, owner, *[0] * 5))
    )
    if is_taken:
        tls_module._check_private(Path("key"))
        return
    with pytest.raises(StartupError, match=r"open to other users|belongs to another user"):
        tls_module._check_private(Path("key"))


def test_an_end_that_is_near_is_told(files: TlsFiles, caplog: pytest.LogCaptureFixture) -> None:
    """The certificates here live a day."""
    with caplog.at_level(logging.WARNING):
        tls = loaded(files)
    assert "expires soon" in caplog.text
    caplog.clear()
    tls_module._warn_of_the_end(replace(tls, expires_at=tls.expires_at + 60 * 86400))
    assert not caplog.text
    tls_module._warn_of_the_end(replace(tls, expires_at=0.0))
    assert "has expired" in caplog.text


async def test_a_process_that_outlives_its_certificate_is_told_each_day(
    files: TlsFiles, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_module, "WARN_EVERY_S", 0.01)
    tls = loaded(files)
    assert metrics.TLS_EXPIRY._value.get() == tls.expires_at
    caplog.clear()
    telling = asyncio.create_task(tls_module.tell_of_the_end(tls))
    async with asyncio.timeout(10):
        while caplog.text.count("expires soon") < 2:  # noqa: ASYNC110 - a log tells nobody
            await asyncio.sleep(0.01)
    telling.cancel()
    await tls_module.tell_of_the_end(None)


def test_the_authoritys_end_counts_too(tmp_path: Path) -> None:
    files = Authority(tmp_path, days=1).issue(days=300)
    assert loaded(files).expires_at < time.time() + 2 * 86400
