"""The metrics port: whom TLS lets in, and what strangers can take of the process."""

from __future__ import annotations

import socket
import ssl
import threading
import urllib.error
import urllib.request
from contextlib import suppress

import pytest

from tests.certificates import Authority
from triptych.core.errors import StartupError
from triptych.core.tls_files import TlsFiles
from triptych.obs import metrics, metrics_server
from triptych.rpc.tls import ClusterTls, load_tls


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def files(authority: Authority) -> TlsFiles:
    return authority.issue()


def loaded(files: TlsFiles) -> ClusterTls:
    found = load_tls(files)
    assert found is not None
    return found


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


def test_metrics_need_no_more_than_the_authority(files: TlsFiles, authority: Authority) -> None:
    """Who collects them gets a certificate that opens nothing else."""
    port = metrics.serve_metrics("127.0.0.1", 0, loaded(files).https)
    collector = authority.issue("prometheus", names="DNS:prometheus.example.org")
    client = ssl.create_default_context(cafile=str(files.ca))
    client.check_hostname = False
    client.load_cert_chain(collector.cert, collector.key)
    with urllib.request.urlopen(f"https://127.0.0.1:{port}/metrics", context=client, timeout=5) as answer:
        assert b"triptych_fallbacks_total" in answer.read()


@pytest.mark.parametrize("has_tls", [True, False])
def test_a_crowd_at_the_metrics_port_takes_few_threads_and_goes(
    has_tls: bool, files: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "MAX_CALLS", 4)
    monkeypatch.setattr(metrics_server._Handler, "timeout", 1.0)
    port = metrics.serve_metrics("127.0.0.1", 0, loaded(files).https if has_tls else None)
    before = threading.active_count()
    crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(16)]
    for stranger in crowd:  # all are hung up on: the last at once, the first when they have said nothing for long
        stranger.settimeout(20)
        with suppress(ConnectionError):
            while stranger.recv(1024):
                assert threading.active_count() <= before + 4
        stranger.close()
    assert threading.active_count() <= before + 4
    client = ssl.create_default_context(cafile=str(files.ca)) if has_tls else None
    if client is not None:
        client.check_hostname = False
        client.load_cert_chain(files.cert, files.key)
    url = f"{'https' if has_tls else 'http'}://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(url, context=client, timeout=5) as answer:
        assert b"triptych_fallbacks_total" in answer.read()


def test_a_taken_metrics_port_is_a_sentence_under_tls_too(files: TlsFiles) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(StartupError, match="--metrics-port"):
        metrics.serve_metrics("127.0.0.1", other.getsockname()[1], loaded(files).https)
