"""Stages on two hosts that write to each other's memory by NIXL, over a wire. Nothing here runs where the extra `nixl`
is not installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from subprocess import PIPE

import pytest

from tests.integration.namespaces import environment, throttled, two_hosts, unplugged, why_not, why_not_cut
from tests.integration.test_two_hosts import ANSWER, Spread, ask, spread
from triptych.transport.nixl_driver import CONNECT_TIMEOUT_S

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="the extra `nixl` is not installed here"),
]

CONNECT = """
import sys, time
from triptych.transport.nixl_api import NixlAddress, NixlError
from triptych.transport.nixl_driver import UcxDriver
driver, address = UcxDriver(sys.argv[1]), NixlAddress(bytes.fromhex(sys.argv[2]), int(sys.argv[3]))
began = time.monotonic()
try:
    driver.connect(address, 4096, 4096).close()
    print("connected")
except NixlError as error:
    print("refused", error)
print(time.monotonic() - began)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spread]:
    if reason := why_not():
        pytest.skip(f"no second host can be made: {reason}")
    with spread(tmp_path_factory.mktemp("hosts"), "--transport", "auto+nixl", "--insecure-network") as running:
        yield running


def test_the_answer_is_right_and_all_bytes_went_by_nixl(cluster: Spread) -> None:
    assert ask(cluster)[0] == ANSWER
    assert set(cluster.bytes_moved(cluster.here, "encoder-0", "embedding")) == {"nixl"}
    assert set(cluster.bytes_moved(cluster.there, "prefill-0", "kv")) == {"nixl"}


def test_a_wire_that_is_slow_and_cut_is_a_right_answer_or_a_typed_error(cluster: Spread) -> None:
    """KV takes seconds, and for some of them nothing at all comes through."""
    if reason := why_not_cut(cluster.there):
        pytest.skip(f"the wire cannot be cut here: {reason}")
    before = cluster.bytes_moved(cluster.there, "prefill-0", "kv")["nixl"]
    with throttled(cluster.there, "1mbit"), ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, cluster)
        time.sleep(1.0)
        with unplugged(cluster.here):
            time.sleep(2.0)
        said, _ = asked.result(150)
    assert said == ANSWER or said.startswith("failed: "), said
    give_up_at = time.monotonic() + 60
    while (said := ask(cluster)[0]) != ANSWER:
        assert said.startswith("failed: ") and time.monotonic() < give_up_at, said
    assert cluster.bytes_moved(cluster.there, "prefill-0", "kv")["nixl"] > before


def test_a_port_that_a_firewall_swallows_is_refused_within_seconds() -> None:
    """The library's own patience is that of TCP, which is minutes."""
    if reason := why_not():
        pytest.skip(f"no second host can be made: {reason}")
    with two_hosts() as (here, there):
        if reason := why_not_cut(here):
            pytest.skip(f"the wire cannot be cut here: {reason}")
        target = here.command(sys.executable, "-m", "tests.integration.nixl_peer", f"{here.address}:0", "target")
        with subprocess.Popen(target, env=environment(), stdin=PIPE, stdout=PIPE, text=True) as process:
            assert process.stdin is not None and process.stdout is not None
            metadata, base = process.stdout.readline().split()
            with unplugged(here):
                said, seconds = there.run(CONNECT, there.address, metadata, base).splitlines()
            assert said == "refused the peer does not answer" and float(seconds) < 3 * CONNECT_TIMEOUT_S
            assert there.run(CONNECT, there.address, metadata, base).startswith("connected")
