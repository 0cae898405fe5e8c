"""`python -m benchmarks.engine`, `benchmarks.transport` and `benchmarks.router` as programs: in little time, and with
TRIPTYCH_VERIFY=full in as much as they need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.engine.budget import CLOSING_SECONDS
from tests.seed import IS_FULL

REPOSITORY = Path(__file__).resolve().parents[2]
KEY = "encodes_per_unique_picture"
SECONDS = 180.0 if IS_FULL else CLOSING_SECONDS + 0.5

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240 if IS_FULL else 60)]


def test_one_figure_is_measured_or_null_with_a_reason(tmp_path: Path) -> None:
    folder, temporary = tmp_path / "results", tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-P", "-m", "benchmarks.engine", "--only", KEY, "--seconds", str(SECONDS)]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(temporary)}
    done = subprocess.run(
        [*command, "--threads", "1", "--out", str(folder)], env=environ, capture_output=True, text=True, check=True
    )
    written = json.loads((folder / "engine.json").read_text())
    assert f"{KEY}: {written[KEY]}" in done.stdout
    assert KEY in (folder / "engine.md").read_text()
    if IS_FULL:
        assert (written[KEY], written["notes"]) == (1.0, {})
    else:
        assert written[KEY] is None and "it was not ready after" in written["notes"][KEY]
    assert list(temporary.glob("triptych*")) == [], "the cluster that was started has gone, and its folder with it"


@pytest.mark.parametrize("key", ["shm_round_trip_us_64kib", *(["kv_hidden_share_throttled"] if IS_FULL else [])])
def test_a_transport_is_measured_between_two_processes(tmp_path: Path, key: str) -> None:
    folder, temporary = tmp_path / "results", tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-P", "-m", "benchmarks.transport", "--quick", "--only", key, "--seconds", "115"]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(temporary)}
    done = subprocess.run(
        [*command, "--json", "--out", str(folder)], env=environ, capture_output=True, text=True, check=True
    )
    said, written = json.loads(done.stdout), json.loads((folder / "transport.json").read_text())
    assert said == written
    assert (written["notes"], written["missing"]) == ({}, [])
    assert 0 < written[key] < 1e6
    assert (folder / "transport.png").stat().st_size > 0 and key in (folder / "transport.md").read_text()
    assert list(temporary.glob("triptych*")) == [], "what was started has gone, and its folder with it"


@pytest.mark.parametrize("key", ["cpu_ms_per_picture_request", *(["added_p99_ms"] if IS_FULL else [])])
def test_the_router_is_measured_before_timed_fakes(tmp_path: Path, key: str) -> None:
    folder, temporary = tmp_path / "results", tmp_path / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-P", "-m", "benchmarks.router", "--quick", "--only", key]
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(temporary)}
    done = subprocess.run(
        [*command, "--json", "--out", str(folder)], env=environ, capture_output=True, text=True, check=True
    )
    said, written = json.loads(done.stdout), json.loads((folder / "router.json").read_text())
    assert said == written
    assert written["notes"] == {} and 0 < written[key] < 1e4
    assert key in (folder / "router.md").read_text()
    assert list(temporary.glob("triptych*")) == [], "what was started has gone, and its folder with it"
