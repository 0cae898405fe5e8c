"""Which processes `triptych up` would start, with which flags."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

import pytest

from triptych.cli import layout
from triptych.cli.bundled import bundled_model
from triptych.cli.layout import ProcessSpec
from triptych.cli.ports import HeldPorts
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


def test_mono_is_one_worker_and_takes_no_other_counts() -> None:
    settings = UpSettings(topology="mono", threads=3)
    (spec,) = layout.workers(settings, MODEL, RUNTIME, 8, lambda host, port: True)
    assert (spec.name, spec.role, _flag(spec, "--threads")) == ("mono-0", "mono", "3")
    with pytest.raises(ValueError, match=r"topology mono does not have; it belongs to e-p-d and e-pd"):
        UpSettings(topology="mono", encoders=2)


@pytest.mark.parametrize(
    ("settings", "workers"),
    [
        (
            UpSettings(topology="e-pd", encoders=2, prefills=2),
            [
                "encoder-0 encoder - 8101",
                "encoder-1 encoder - 8102",
                "pd-0 prefill decode 8201",
                "pd-1 prefill decode 8202",
            ],
        ),
        (
            UpSettings(topology="p-d", decodes=2),
            ["ep-0 prefill encoder 8201", "decode-0 decode - 8301", "decode-1 decode - 8302"],
        ),
        (
            UpSettings(topology="e-p-d+mono", monos=2),
            [
                "encoder-0 encoder - 8101",
                "prefill-0 prefill  8201",
                "decode-0 decode - 8301",
                "mono-0 mono - 8401",
                "mono-1 mono - 8402",
            ],
        ),
        (
            UpSettings(topology="p-d+e-pd+e-p-d"),
            [
                "encoder-0 encoder - 8101",
                "prefill-0 prefill  8201",
                "pd-0 prefill decode 8202",
                "ep-0 prefill encoder 8203",
                "decode-0 decode - 8301",
            ],
        ),
    ],
)
def test_stages_that_share_a_process_and_pools_that_are_mixed(settings: UpSettings, workers: list[str]) -> None:
    """A bare prefill worker is told so: `also` in a file is not for the topology to obey."""
    specs = layout.workers(settings, MODEL, RUNTIME, 16, lambda host, port: True)
    also = [_flag(spec, "--also") if "--also" in spec.flags else "-" for spec in specs]
    found = [
        f"{spec.name} {spec.role} {other} {_flag(spec, '--port')}" for spec, other in zip(specs, also, strict=True)
    ]
    assert found == workers
    assert {_flag(spec, "--threads") for spec in specs} == {str(16 // len(specs))}
    assert len({_flag(spec, "--metrics-port") for spec in specs}) == len(specs)


@pytest.mark.parametrize(
    ("topology", "counts", "message"),
    [
        ("e-d", {}, "'e-d' is not known; use e-p-d, e-pd, p-d, mono, or several joined by"),
        ("e-p-d+", {}, "'' is not known"),
        ("mono+mono", {}, "names mono twice"),
        ("e-pd", {"decodes": 2}, "--decodes counts workers that the topology e-pd does not have.*e-p-d and p-d"),
        ("p-d", {"encoders": 3}, "--encoders counts workers.*e-p-d and e-pd"),
        ("e-p-d", {"monos": 2}, "--monos counts workers.*belongs to mono"),
    ],
)
def test_a_topology_that_is_none_or_a_count_without_meaning_is_an_error(
    topology: str, counts: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        UpSettings(topology=topology, **counts)


def test_what_a_file_says_about_a_process_and_the_launcher_overrides_is_named() -> None:
    settings = UpSettings()
    specs = layout.workers(settings, MODEL, RUNTIME, 4, lambda host, port: True)
    specs.append(layout.router(settings, MODEL, RUNTIME, 8000))
    tables = {
        "prefill": {"port": 9000, "chunk_tokens": 64, "also": ["decode"]},
        "router": {"port": 80, "max_queue": 3},
        "mono": {"port": 1},
    }
    assert [warning.split(" in the file")[0] for warning in layout.overridden(specs, tables)] == [
        "[prefill] sets also",
        "[prefill] sets port",
        "[router] sets port",
    ]


def test_whoever_starts_it_hears_of_another_port_and_of_an_open_door() -> None:
    assert layout.notices(UpSettings(), 8000, 8) == []
    assert layout.notices(UpSettings(port=0), 40000, 8) == []
    (moved,) = layout.notices(UpSettings(), 40000, 8)
    assert "8000 is taken" in moved and "40000" in moved
    for host in ("0.0.0.0", "::", "192.168.0.7"):
        (open_door,) = layout.notices(UpSettings(host=host), 8000, 8)
        assert "who they are" in open_door


def test_an_api_port_that_was_asked_for_and_is_taken_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, closing(HeldPorts()) as ports:
        taken = server.getsockname()[1]
        with pytest.raises(StartupError, match="is taken"):
            layout.api_port(UpSettings(port=taken), ports)
        assert layout.api_port(UpSettings(port=0), ports) > 0


@pytest.mark.parametrize("port", [None, 0, 8000])
def test_a_host_that_is_not_of_this_machine_is_an_error(port: int | None) -> None:
    with pytest.raises(StartupError, match=r"nothing can listen at --host 192\.0\.2\.1"):
        layout.api_port(UpSettings(host="192.0.2.1", port=port), HeldPorts())


def test_the_router_listens_where_it_is_told() -> None:
    spec = layout.router(UpSettings(host="0.0.0.0"), MODEL, RUNTIME, 9)
    assert (_flag(spec, "--host"), _flag(spec, "--port"), _flag(spec, "--model")) == ("0.0.0.0", "9", "/m")


def test_the_bundled_model_is_found() -> None:
    assert (bundled_model() / "config.json").is_file()


def test_encoders_stand_back_for_workers_with_a_language_model() -> None:
    settings = UpSettings(topology="e-p-d+mono", encoders=2, encoder_nice=7)
    specs = layout.workers(settings, MODEL, RUNTIME, 8, lambda host, port: True)
    assert {spec.name for spec in specs if "--nice" in spec.flags} == {"encoder-0", "encoder-1"}
    assert {_flag(spec, "--nice") for spec in specs if "--nice" in spec.flags} == {"7"}


def _workers(settings: UpSettings, cores: int) -> list[ProcessSpec]:
    return layout.workers(settings, Path("m"), Path("r"), cores, lambda *_: True)


def test_more_threads_than_cores_do_not_spin_for_each_other() -> None:
    crowded = UpSettings(topology="e-p-d", threads=2)
    assert {spec.variables for spec in _workers(crowded, 4)} == {(("OMP_WAIT_POLICY", "passive"),)}
    (said,) = layout.notices(crowded, 8000, 4)
    assert "3 workers with 2 threads each share 4 cores" in said


@pytest.mark.parametrize(("threads", "cores"), [(0, 1), (0, 2), (0, 16), (1, 1), (2, 6)])
def test_threads_that_have_their_cores_wait_as_they_like(threads: int, cores: int) -> None:
    settings = UpSettings(topology="e-p-d", threads=threads)
    assert {spec.variables for spec in _workers(settings, cores)} == {()}
    assert layout.notices(settings, 8000, cores) == []


def test_every_process_gets_the_clusters_certificate_and_without_one_none() -> None:
    settings = UpSettings(tls_cert=Path("/t/c.pem"), tls_key=Path("/t/k.pem"), tls_ca=Path("relative/ca.pem"))
    for specs, is_given in ((_all_specs(settings), True), (_all_specs(UpSettings()), False)):
        for spec in specs:
            flags = dict(zip(spec.flags[::2], spec.flags[1::2], strict=True))
            assert ("--tls-cert" in flags) == is_given
            if is_given:
                assert (flags["--tls-cert"], flags["--tls-key"]) == ("/t/c.pem", "/t/k.pem")
                assert flags["--tls-ca"] == str(Path("relative/ca.pem").absolute())


def _all_specs(settings: UpSettings) -> list[layout.ProcessSpec]:
    workers = layout.workers(settings, MODEL, RUNTIME, 1, lambda host, port: True)
    return [*workers, layout.router(settings, MODEL, RUNTIME, 8000)]
