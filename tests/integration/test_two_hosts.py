"""Stages on two hosts that share a network and a folder on disk, but no memory: embeddings and KV go by ZMQ, all of it
under TLS: nobody has said that this network is trusted."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.integration.namespaces import (
    Host,
    cut_off,
    service,
    throttled,
    two_hosts,
    wait_for,
    why_not,
    why_not_cut,
)
from tests.seed import IS_FULL
from triptych.cli.bundled import bundled_model
from triptych.core.tls_files import TlsFiles

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

READY_SECONDS = 150.0
DATA_PORTS = {"encoder": 9111, "prefill": 9211, "decode": 9311}
ANSWER = "The circle is red."

ASK = """
import sys
from triptych.cli import sample
from triptych.cli.client import ChatClient, picture_part
with ChatClient(sys.argv[1]) as client:
    content = [picture_part(sample.picture_png()), {"type": "text", "text": sample.QUESTION}]
    body = {"model": client.model_name(), "messages": [{"role": "user", "content": content}], "max_tokens": 32}
    print(client.ask(body | {"temperature": 0}, timeline=False).text)
"""
ASK_NEW = """
import json, sys, time
from triptych.cli import sample
from triptych.cli.client import ChatClient, ChatFailed, picture_part
began = time.monotonic()
with ChatClient(sys.argv[1]) as client:
    content = [picture_part(sample.picture_png()), {"type": "text", "text": sample.QUESTION}]
    body = {"model": client.model_name(), "messages": [{"role": "user", "content": content}], "max_tokens": 32}
    try:
        said = client.ask(body | {"temperature": 0}, timeline=False).text
    except ChatFailed as failed:
        said = f"failed: {failed}"
print(json.dumps([said, time.monotonic() - began]))
"""
METRICS = """
import ssl, sys, urllib.request
address, cert, key, ca = sys.argv[1:]
context = ssl.create_default_context(cafile=ca)
context.check_hostname = False
context.load_cert_chain(cert, key)
print(urllib.request.urlopen(f"https://{address}/metrics", context=context, timeout=5).read().decode())
"""


@dataclass(frozen=True)
class Spread:
    """A running cluster. `here` has encoder and decode, `there` prefill and router."""

    here: Host
    there: Host
    url: str
    runtime: Path
    tls: TlsFiles

    def record(self, worker_id: str) -> dict[str, object]:
        record: dict[str, object] = json.loads((self.runtime / "workers" / f"{worker_id}.json").read_text())
        return record

    def bytes_moved(self, host: Host, worker_id: str, metric: str) -> dict[str, float]:
        """By transport, from the worker's own metrics; those above zero."""
        text = host.run(
            METRICS,
            str(self.record(worker_id)["metrics_address"]),
            *map(str, (self.tls.cert, self.tls.key, self.tls.ca)),
        )
        found = re.findall(
            rf'^triptych_{metric}_transfer_bytes_total{{transport="([^"]+)"}} (\S+)$', text, re.MULTILINE
        )
        return {transport: float(count) for transport, count in found if float(count)}


@contextlib.contextmanager
def spread(folder: Path, *more: str) -> Iterator[Spread]:
    """`more` are flags of the workers."""
    model, runtime, ready = str(bundled_model()), folder / "run", folder / "ready.json"
    files = Authority(folder).issue()
    tls = ["--tls-cert", str(files.cert), "--tls-key", str(files.key), "--tls-ca", str(files.ca)]
    with two_hosts() as (here, there), contextlib.ExitStack() as stack:
        places = {"encoder": here, "decode": here, "prefill": there}
        running = {}
        for role, host in places.items():
            flags = ["--model", model, "--runtime-dir", str(runtime), "--worker-id", f"{role}-0"]
            flags += ["--host", host.address, "--threads", "1", *tls]
            flags += ["--data-port", str(DATA_PORTS[role]), *more]
            running[role] = stack.enter_context(service(host, role, folder / f"{role}.log", *flags))
        flags = ["--model", model, "--runtime-dir", str(runtime), "--host", there.address, "--port", "0", *tls]
        running["router"] = stack.enter_context(
            service(there, "router", folder / "router.log", *flags, "--ready-file", str(ready))
        )
        url = json.loads(wait_for(ready, running, folder, READY_SECONDS))["url"]
        yield Spread(here, there, str(url), runtime, files)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spread]:
    if reason := why_not():
        pytest.skip(f"no second host can be made: {reason}")
    with spread(tmp_path_factory.mktemp("hosts")) as running:
        yield running


def test_the_answer_is_right_and_all_bytes_went_by_zmq(cluster: Spread) -> None:
    assert cluster.there.run(ASK, cluster.url).strip() == ANSWER
    assert set(cluster.bytes_moved(cluster.here, "encoder-0", "embedding")) == {"zmq"}
    assert set(cluster.bytes_moved(cluster.there, "prefill-0", "kv")) == {"zmq"}


def test_the_workers_know_that_they_share_no_memory(cluster: Spread) -> None:
    records = [cluster.record(f"{role}-0") for role in ("encoder", "decode", "prefill")]
    assert len({record["host_id"] for record in records}) == len(records)


def test_again_and_again_it_is_right(cluster: Spread) -> None:
    """From the second time on embedding and prefix come from caches, and KV still crosses."""
    before = cluster.bytes_moved(cluster.there, "prefill-0", "kv")["zmq"]
    for _ in range(3):
        assert cluster.there.run(ASK, cluster.url).strip() == ANSWER
    assert cluster.bytes_moved(cluster.there, "prefill-0", "kv")["zmq"] > before


@pytest.fixture
def breakable(cluster: Spread) -> Spread:
    if reason := why_not_cut(cluster.there):
        pytest.skip(f"the wire cannot be cut here: {reason}")
    return cluster


def ask(cluster: Spread) -> tuple[str, float]:
    """The answer, or `failed: ` and the typed error; and how long it took."""
    said, seconds = json.loads(cluster.there.run(ASK_NEW, cluster.url, timeout_s=150.0))
    return said, seconds


def test_a_slow_wire_makes_a_slow_answer_and_no_other(breakable: Spread) -> None:
    """KV crosses from there to here at a rate at which it takes seconds."""
    before = breakable.bytes_moved(breakable.there, "prefill-0", "kv")["zmq"]
    _, usual_s = ask(breakable)
    with throttled(breakable.there, "1mbit"):
        said, seconds = ask(breakable)
    assert said == ANSWER
    assert seconds > usual_s
    assert breakable.bytes_moved(breakable.there, "prefill-0", "kv")["zmq"] > before


@pytest.mark.parametrize("cut_s", [2.0, pytest.param(15.0, marks=pytest.mark.skipif(not IS_FULL, reason="slow"))])
def test_a_wire_that_is_cut_in_a_transfer_is_a_right_answer_or_a_typed_error(breakable: Spread, cut_s: float) -> None:
    """Short: TCP makes up for it. Longer than a frame may take: the link breaks, and later it is made again."""
    with throttled(breakable.there, "1mbit"), ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, breakable)
        time.sleep(1.0)
        with cut_off(breakable.here, DATA_PORTS["decode"]):
            time.sleep(cut_s)
        said, _ = asked.result(150)
    assert said == ANSWER or said.startswith("failed: "), said
    give_up_at = time.monotonic() + 60
    while (said := ask(breakable)[0]) != ANSWER:
        assert said.startswith("failed: ") and time.monotonic() < give_up_at, said
