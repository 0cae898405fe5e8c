"""TLS between workers: who is let in, who is called, and what stops a start."""

from __future__ import annotations

import logging
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
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
    server = RpcServer("0.0.0.0", 0, token=TOKEN, tls=loaded(files))
    record = WorkerInfo("decode-0", 1, frozenset({Role.DECODE}), WorkerState.READY, "")
    add_describe(server, lambda: record)
    record = replace(record, grpc_address=f"127.0.0.1:{await server.start()}")
    await server.set_serving(True)
    yield record
    await server.stop(0)


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
    assert await health(_credentials(ca, files), info) == health_pb2.HealthCheckResponse.SERVING


def _credentials(ca: bytes, files: TlsFiles) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(ca, files.key.read_bytes(), files.cert.read_bytes())


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

    server = grpc.aio.server(interceptors=[Listening()])
    if who == "plain":
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        shown = strangers if who == "stranger" else authority.issue("namesake", names="DNS:127.0.0.1,IP:127.0.0.1")
        pair = (shown.key.read_bytes(), shown.cert.read_bytes())
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    await server.start()
    info = WorkerInfo("decode-0", 1, frozenset({Role.DECODE}), WorkerState.READY, f"127.0.0.1:{port}")
    channels = ChannelPool(TOKEN, loaded(files))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await registry_stub(channels, info).Describe(registry_pb2.DescribeRequest(), timeout=5)
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert heard == []
    await channels.close()
    await server.stop(0)


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
        "another authority": lambda: replace(files, ca=strangers.ca),
        "another key": lambda: replace(files, key=strangers.key),
        "no certificate": lambda: replace(files, cert=junk),
        "no key": lambda: replace(files, key=junk),
        "no authority": lambda: replace(files, ca=junk),
        "missing": lambda: replace(files, cert=folder / "nowhere.pem"),
        "key missing": lambda: replace(files, key=folder / "nowhere.key"),
        "ed25519": lambda: authority.issue("ed", key=("-newkey", "ed25519")),
    }[what]()


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("expired", "has expired"),
        ("another name", "does not name triptych.internal: make it with subjectAltName=DNS:triptych.internal"),
        ("another authority", "was not signed by the authority of --tls-ca"),
        ("another key", "not that of the certificate"),
        ("no certificate", "--tls-cert holds no certificate"),
        ("no key", "not that of the certificate"),
        ("no authority", "--tls-ca holds no certificate"),
        ("missing", "cannot be read: No such file"),
        ("key missing", "cannot be read: No such file"),
        ("open", "is open to other users; run: chmod 0600"),
        ("ed25519", "take EC P-256 or RSA"),
    ],
)
def test_files_that_could_not_serve_stop_the_start(
    what: str, sentence: str, files: TlsFiles, authority: Authority, strangers: TlsFiles, folder: Path
) -> None:
    with pytest.raises(StartupError, match=sentence):
        load_tls(_spoiled(what, files, authority, strangers, folder))


def test_an_end_that_is_near_is_told(files: TlsFiles, caplog: pytest.LogCaptureFixture) -> None:
    """The certificates here live a day."""
    with caplog.at_level(logging.WARNING):
        tls = loaded(files)
    assert "expires soon" in caplog.text
    caplog.clear()
    tls_module._warn_of_the_end(replace(tls, expires_at=tls.expires_at + 60 * 86400))
    assert not caplog.text


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_are_for_those_with_a_certificate_and_who_says_nothing_holds_up_nobody(files: TlsFiles) -> None:
    port = metrics.serve_metrics("127.0.0.1", 0, loaded(files).https)
    client = ssl.create_default_context(cafile=str(files.ca))
    client.check_hostname = False
    url = f"https://127.0.0.1:{port}/metrics"
    with socket.create_connection(("127.0.0.1", port)):  # says nothing
        with pytest.raises((OSError, ssl.SSLError)):
            urllib.request.urlopen(url, context=client, timeout=5).read()
        with pytest.raises((OSError, urllib.error.URLError, ConnectionError)):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read()
        client.load_cert_chain(files.cert, files.key)
        with urllib.request.urlopen(url, context=client, timeout=5) as answer:
            assert b"triptych_fallbacks_total" in answer.read()


def test_a_taken_metrics_port_is_a_sentence_under_tls_too(files: TlsFiles) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(StartupError, match="--metrics-port"):
        metrics.serve_metrics("127.0.0.1", other.getsockname()[1], loaded(files).https)
