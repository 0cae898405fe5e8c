"""What `triptych doctor` says of NIXL: whether it works, and whether anybody asked for it."""

from __future__ import annotations

import importlib.util

import pytest

from triptych.cli.checks import nixl
from triptych.cli.checks.finding import Status
from triptych.testing.fake_nixl import FakeNetwork, FakeNixl
from triptych.transport import nixl_driver
from triptych.transport.nixl_api import NixlError

STATUS_WITHOUT = {"auto": Status.OK, "shm": Status.OK, "auto+nixl": Status.WARN, "nixl": Status.FAIL}


@pytest.mark.parametrize("transport", STATUS_WITHOUT)
def test_a_library_that_does_not_work_matters_where_it_is_asked_for(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(host: str) -> None:
        raise NixlError("it is not installed here: pip install 'triptych[nixl]'")

    monkeypatch.setattr(nixl_driver, "UcxDriver", missing)
    finding = nixl.nixl(transport)
    assert finding.status is STATUS_WITHOUT[transport] and "pip install 'triptych[nixl]'" in finding.found
    assert bool(finding.todo) == (finding.status is not Status.OK)


def test_it_is_tried_by_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    network = FakeNetwork()
    monkeypatch.setattr(nixl_driver, "UcxDriver", lambda host: FakeNixl(network))
    for transport in STATUS_WITHOUT:
        assert nixl.nixl(transport).status is Status.OK
    assert network.num_writes == len(STATUS_WITHOUT) and not network.arenas and network.num_open_sources == 0
    network.refuses_to_connect = True
    assert nixl.nixl("nixl").status is Status.FAIL and not network.arenas
    network.refuses_to_connect, network.is_held = False, True
    monkeypatch.setattr(nixl, "_TIMEOUT_S", 0.01)
    assert "did not end" in nixl.nixl("nixl").found and network.num_open_sources == 0


def test_what_does_not_arrive_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    network = FakeNetwork()
    monkeypatch.setattr(network, "arenas", _Elsewhere())
    assert nixl.fault_of(FakeNixl(network)) == "what was written did not arrive"


class _Elsewhere(dict[bytes, memoryview]):
    """Writes go to memory that nobody looks at."""

    def __setitem__(self, name: bytes, arena: memoryview) -> None:
        super().__setitem__(name, memoryview(bytearray(len(arena))))


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="the extra `nixl` is not installed here")
def test_the_library_writes_over_loopback() -> None:
    assert nixl.nixl("nixl").status is Status.OK
