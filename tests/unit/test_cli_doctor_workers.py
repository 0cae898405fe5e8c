"""What the doctor takes workers to be, by flags, variables and the file, and whether they can send to each other."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from services.decode.settings import DecodeSettings
from services.encoder.settings import EncoderSettings
from services.prefill.settings import PrefillSettings
from tests.unit.test_cli_doctor_model import MIB
from triptych.cli import layout
from triptych.cli.checks.finding import Status
from triptych.cli.checks.handover import handover
from triptych.cli.checks.workers import Sizes, Wanted, given_names, wanted_workers
from triptych.cli.doctor_settings import DoctorSettings
from triptych.core.errors import StartupError
from triptych.core.settings import load_settings
from triptych.core.worker import Role

# --- workers ----------------------------------------------------------------------------------------------------------


def workers(*argv: str, config: str = "", tmp_path: Path | None = None, **variables: str) -> list[Wanted]:
    environ = {f"TRIPTYCH_{name}": value for name, value in variables.items()}
    path = None
    if config:
        assert tmp_path is not None
        path = tmp_path / "cluster.toml"
        path.write_text(config)
        argv = (*argv, "--config", str(path))
    settings = load_settings(DoctorSettings, "up", argv, environ)
    return wanted_workers(settings, path, given_names(argv, environ), cores=8, has_gpu=False)


def test_defaults_are_the_services() -> None:
    for service in (EncoderSettings, PrefillSettings, DecodeSettings):
        declared = {entry.name: entry for entry in dataclasses.fields(service)}
        for ours in dataclasses.fields(Sizes):
            if ours.name in declared:
                assert ours.default == declared[ours.name].default, ours.name
                bounds = {key: value for key, value in declared[ours.name].metadata.items() if key != "help"}
                mine = DoctorSettings.__dataclass_fields__[ours.name].metadata
                assert {key: value for key, value in mine.items() if key != "help"} == bounds, ours.name


def test_each_topology_shares_what_others_write_to() -> None:
    assert {worker.name: worker.shared_bytes // MIB for worker in workers("--decodes", "2")} == {
        "encoder-0": 0,
        "prefill-0": 64,
        "decode-0": 256,
        "decode-1": 256,
    }
    assert [worker.shared_bytes for worker in workers("--topology", "mono")] == [0]


@pytest.mark.parametrize(("also", "shared_mib"), [("decode", 64), ("encoder", 0), ("", 64)])
def test_stages_that_share_a_process_share_less_memory(
    also: str, shared_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = layout.ProcessSpec("x-0", "prefill", ("--threads", "2", "--also", also))
    monkeypatch.setattr(layout, "workers", lambda *_: [spec])
    (worker,) = workers()
    assert worker.shared_bytes == shared_mib * MIB
    assert worker.roles == {Role.PREFILL, *([Role(also)] if also else [])}
    assert worker.threads == 2


def test_flag_over_variable_over_the_services_table_over_the_top(tmp_path: Path) -> None:
    config = "kv_pool_bytes = 1\n[up]\ndecodes = 2\n[decode]\nkv_pool_bytes = 2\n[encoder]\nmax_batch_items = 3\n"
    sizes = {worker.name: worker.sizes.kv_pool_bytes for worker in workers(config=config, tmp_path=tmp_path)}
    assert sizes == {"encoder-0": 1, "prefill-0": 1, "decode-0": 2, "decode-1": 2}
    told = workers(config=config, tmp_path=tmp_path, KV_POOL_BYTES="3")
    assert {worker.sizes.kv_pool_bytes for worker in told} == {3}
    told = workers("--kv-pool-bytes=4", config=config, tmp_path=tmp_path, KV_POOL_BYTES="3")
    assert {worker.sizes.kv_pool_bytes for worker in told} == {4}


def test_a_malformed_size_in_a_services_table_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"kv_pool_bytes must be a whole number, but \[decode\] of the file"):
        workers(config='[decode]\nkv_pool_bytes = "much"\n', tmp_path=tmp_path)


# --- handover ---------------------------------------------------------------------------------------------------------


HANDOVERS: list[tuple[str, str, Status, str]] = [
    ("", "e-p-d", Status.OK, "the next can take"),
    ("[prefill]\npage_tokens = 32\n", "e-p-d", Status.OK, "the next can take"),
    ('[prefill]\ndtype = "bfloat16"\n', "p-d", Status.OK, "the next can take"),
    ('[prefill]\ndtype = "bfloat16"\n', "e-p-d", Status.FAIL, "no encoder can send to prefill-0"),
    ('[decode]\ndtype = "bfloat16"\n', "p-d", Status.FAIL, "to decode-0: KV in float32 would be rounded"),
    ('[decode]\ndtype = "float16"\n', "p-d", Status.FAIL, "to decode-0: KV in float32 may not fit"),
    (
        'allow_kv_narrowing = true\n[decode]\ndtype = "bfloat16"\n',
        "p-d",
        Status.WARN,
        "KV is rounded on its way to decode-0",
    ),
    (
        'allow_kv_narrowing = true\n[decode]\ndtype = "bfloat16"\nstrict = true\n',
        "p-d",
        Status.FAIL,
        "would be rounded",
    ),
    ('[decode]\ndtype = "bfloat16"\n', "mono", Status.OK, "the next can take"),
    ('[decode]\ndtype = "bfloat16"\n', "e-pd", Status.OK, "the next can take"),
]


@pytest.mark.parametrize(("config", "topology", "status", "found"), HANDOVERS)
def test_stages_that_could_not_hand_over_are_found(
    config: str, topology: str, status: Status, found: str, tmp_path: Path
) -> None:
    finding = handover(workers("--topology", topology, config=config or "\n", tmp_path=tmp_path))
    assert finding.status is status and found in finding.found, finding
