"""A cluster under TLS, from end to end: as processes by the launcher, and in one process by every transport."""

from __future__ import annotations

import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.certificates import Authority
from tests.integration import tiny_cluster
from tests.integration.launching import Launcher, launched
from tests.integration.test_cluster import ANSWER, READY_SECONDS, _ask
from tests.integration.tiny_cluster import MAX_TOKENS, SMALL_POOL
from tests.parity.prompts import draw_picture
from triptych.obs import metrics
from triptych.registry.lock import FileLock
from triptych.testing.cluster import ChatRequest, InProcessCluster

model_dir = tiny_cluster.model_dir
ASKED = ChatRequest(
    [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}],
    (draw_picture(1, (84, 56)),),
    max_tokens=MAX_TOKENS,
)


async def test_the_answer_is_the_same_by_every_transport(model_dir: Path, tmp_path: Path) -> None:
    files = Authority(tmp_path).issue()
    async with InProcessCluster(model_dir, kv_pool_bytes=SMALL_POOL) as cluster:
        truth = (await cluster.generate(ASKED)).token_ids
    for transport in ("auto", "zmq-tcp"):
        sent = metrics.KV_TRANSFER_BYTES.labels("zmq" if transport == "zmq-tcp" else "shm")
        before = sent._value.get()
        async with InProcessCluster(model_dir, kv_pool_bytes=SMALL_POOL, transport=transport, tls=files) as cluster:
            assert (await cluster.generate(ASKED)).token_ids == truth
        assert sent._value.get() > before


@pytest.mark.cluster
@pytest.mark.timeout(240)
def test_a_cluster_by_the_launcher_refuses_who_has_no_certificate(tmp_path: Path) -> None:
    files = Authority(tmp_path).issue()
    flags = ["--tls-cert", str(files.cert), "--tls-key", str(files.key), "--tls-ca", str(files.ca)]
    with launched(tmp_path, "--transport", "zmq-tcp", *flags) as launcher:
        ready = launcher.wait_ready(READY_SECONDS)
        assert _ask(ready["url"]).text == ANSWER
        client = ssl.create_default_context(cafile=str(files.ca))
        client.check_hostname = False
        client.load_cert_chain(files.cert, files.key)
        for worker in ready["workers"].values():
            with grpc.insecure_channel(worker["grpc_address"]) as channel, pytest.raises(grpc.RpcError) as refused:
                health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            with pytest.raises((ConnectionError, http.client.HTTPException, urllib.error.URLError)):
                urllib.request.urlopen(f"http://{worker['metrics_address']}/metrics", timeout=5)
            url = f"https://{worker['metrics_address']}/metrics"
            with urllib.request.urlopen(url, context=client, timeout=5) as answer:
                assert b"triptych_" in answer.read()
        _check_that_workers_without_tls_cost_nobody_an_answer(launcher, ready)


def _check_that_workers_without_tls_cost_nobody_an_answer(launcher: Launcher, ready: dict[str, Any]) -> None:
    """One of each kind joins that was started without the flags."""
    folder, locks = launcher.runtime / "workers", []
    for worker_id in ready["workers"]:
        record = json.loads((folder / f"{worker_id}.json").read_text())
        assert record.pop("speaks_tls") is True
        path = folder / f"{worker_id}x.json"
        locks.append(FileLock.acquire(path.with_suffix(".lock")))
        path.write_text(json.dumps(record | {"worker_id": f"{worker_id}x", "grpc_address": "127.0.0.1:1"}))
    log, give_up_at = launcher.runtime / "logs" / "router.log", time.monotonic() + 20
    while log.read_text().count("it speaks no TLS, as this router does") < len(locks):
        assert time.monotonic() < give_up_at, log.read_text()
        time.sleep(0.05)
    assert [_ask(ready["url"]).text for _ in range(6)] == [ANSWER] * 6
    for lock in locks:
        assert lock is not None
        lock.release()


@pytest.mark.cluster
def test_the_launcher_tells_a_certificate_that_has_expired(tmp_path: Path) -> None:
    files = Authority(tmp_path).issue(days=-1)
    flags = ["--tls-cert", str(files.cert), "--tls-key", str(files.key), "--tls-ca", str(files.ca)]
    with launched(tmp_path, *flags) as launcher, pytest.raises(AssertionError, match="has expired"):
        launcher.wait_ready(30)
    with launched(tmp_path, *flags[:4]) as launcher, pytest.raises(AssertionError, match="--tls-ca is missing"):
        launcher.wait_ready(30)
