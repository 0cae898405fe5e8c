"""Which processes `triptych up` would start, with which flags."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from triptych.cli import layout
from triptych.cli.bundled import bundled_model
from triptych.cli.layout import ProcessSpec
from triptych.cli.settings import UpSettings
from triptych.core.errors import StartupError

MODEL, RUNTIME = Path("/m"), Path("/r")


def _flag(spec: ProcessSpec, name: str) -> str:
    return spec.flags[spec.flags.index(name) + 1]


def test_each_stage_has_its_processes_ports_and_share_of_the_cores() -> None:
    settings = UpSettings(encoders=2, prefills=1, decodes=1)
    specs = layout.workers(settings, MODEL, RUNTIME, 16, lambda host, port: True)
    assert [(spec.name, _flag(spec, "--port"), _flag(spec, "--metrics-port")) for spec in specs] == [
        ("encoder-0", "8101", "9401"),
        ("encoder-1", "8102", "9402"),
        ("prefill-0", "8201", "9403"),
        ("decode-0", "8301", "9404"),
    ]
    assert {_flag(spec, "--threads") for spec in specs} == {"4"}
    assert {_flag(spec, "--host") for spec in specs} == {"127.0.0.1"}


def test_a_taken_standard_port_is_left_to_the_worker() -> None:
    specs = layout.workers(UpSettings(), MODEL, RUNTIME, 1, lambda host, port: port not in (8201, 9401))
    assert [(_flag(spec, "--port"), _flag(spec, "--metrics-port")) for spec in specs] == [
        ("8101", "0"),
        ("0", "9402"),
        ("8301", "9403"),
    ]
    assert {_flag(spec, "--threads") for spec in specs} == {"1"}


def test_with_port_0_no_port_is_standard() -> None:
    specs = layout.workers(UpSettings(port=0), MODEL, RUNTIME, 1, lambda host, port: True)
    assert {_flag(spec, "--port") for spec in specs} == {_flag(spec, "--metrics-port") for spec in specs} == {"0"}


def test_the_transport_is_passed_on_only_when_it_is_given() -> None:
    """A flag would win over what a worker's own table in the file says."""
    for transport in (None, "zmq-tcp"):
        specs = layout.workers(UpSettings(transport=transport), MODEL, RUNTIME, 1, lambda host, port: True)
        given = {_flag(spec, "--transport") if "--transport" in spec.flags else None for spec in specs}
        assert given == {transport}


def test_mono_is_one_worker_and_takes_no_counts() -> None:
    settings = UpSettings(topology="mono", threads=3)
    (spec,) = layout.workers(settings, MODEL, RUNTIME, 8, lambda host, port: True)
    assert (spec.name, spec.role, _flag(spec, "--threads")) == ("mono-0", "mono", "3")
    with pytest.raises(ValueError, match="e-p-d"):
        UpSettings(topology="mono", encoders=2)


def test_an_api_port_that_was_asked_for_and_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(StartupError, match="is taken"):
            layout.api_port(UpSettings(port=taken))
    assert layout.api_port(UpSettings(port=0)) > 0


@pytest.mark.parametrize("port", [None, 0, 8000])
def test_a_host_that_is_not_of_this_machine_is_an_error(port: int | None) -> None:
    with pytest.raises(StartupError, match=r"nothing can listen at --host 192\.0\.2\.1"):
        layout.api_port(UpSettings(host="192.0.2.1", port=port))


def test_the_router_listens_where_it_is_told() -> None:
    spec = layout.router(UpSettings(host="0.0.0.0"), MODEL, RUNTIME, 9)
    assert (_flag(spec, "--host"), _flag(spec, "--port"), _flag(spec, "--model")) == ("0.0.0.0", "9", "/m")


def test_the_bundled_model_is_found() -> None:
    assert (bundled_model() / "config.json").is_file()
