"""`triptych up` with stub services: what it starts, what it refuses, and that it leaves nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import urllib.request
from pathlib import Path

import pytest

from tests.integration.launching import Launcher, files_in, launched, living, segments, wait_gone

READY_SECONDS = 30.0


@pytest.fixture
def model(tmp_path: Path) -> str:
    """What passes for a checkpoint as long as nobody loads it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return str(tmp_path / "model")


def _new_segments(before: set[str]) -> set[str]:
    return segments("stub") - before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_leaves_nothing(number: signal.Signals, model: str, tmp_path: Path) -> None:
    before = segments("stub")
    with launched(tmp_path, "--model", model, "--encoders", "2", stubs=True) as launcher:
        ready = launcher.wait_ready(READY_SECONDS)
        assert list(ready["pids"]) == ["encoder-0", "encoder-1", "prefill-0", "decode-0", "router"]
        assert urllib.request.urlopen(f"{ready['url']}/ready", timeout=5).status == 200
        assert len(_new_segments(before)) == 4
        status, output = launcher.signal_and_wait(number)
    assert status == 0, output
    assert living(ready["pids"]) == {}
    assert _new_segments(before) == set()
    assert not launcher.runtime.exists()
    assert not launcher.ready_file.exists()
    assert f"curl -s {ready['url']}/v1/chat/completions" in output


def test_killing_the_launcher_kills_its_processes_and_the_next_start_sweeps(model: str, tmp_path: Path) -> None:
    before = segments("stub")
    with launched(tmp_path, "--model", model, stubs=True) as launcher:
        old = launcher.wait_ready(READY_SECONDS)["pids"]
        launcher.signal_and_wait(signal.SIGKILL)
    assert wait_gone(old) == {}
    orphaned = _new_segments(before)
    assert len(orphaned) == 3
    assert "workers/decode-0.json" in files_in(launcher.runtime)
    with launched(tmp_path, "--model", model, stubs=True) as launcher:
        launcher.wait_ready(READY_SECONDS)
        assert not orphaned & segments("stub")
        _, output = launcher.signal_and_wait(signal.SIGINT)
    assert "removed what an earlier cluster left: worker decode-0, worker encoder-0, worker prefill-0" in output
    assert _new_segments(before) == set()
    assert not launcher.runtime.exists()


def test_a_second_cluster_in_the_same_folder_is_refused(model: str, tmp_path: Path) -> None:
    with launched(tmp_path, "--model", model, stubs=True) as launcher:
        launcher.wait_ready(READY_SECONDS)
        (tmp_path / "second").mkdir()
        with launched(
            tmp_path / "second", "--model", model, "--runtime-dir", str(launcher.runtime), stubs=True
        ) as second:
            output = second.process.communicate(timeout=READY_SECONDS)[0]
        assert second.process.returncode == 1
        assert output.startswith("error: a cluster already runs in")
        assert "Traceback" not in output
        assert launcher.process.poll() is None


def test_clusters_that_start_at_the_same_moment_share_no_port(model: str, tmp_path: Path) -> None:
    """On the standard ports: each of the three wants all of them, and none has a server yet when the others look."""
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders:
        folder.mkdir()
    with contextlib.ExitStack() as stack:
        launchers = [stack.enter_context(launched(folder, "--model", model, stubs=True, port=())) for folder in folders]
        all_ready = [launcher.wait_ready(READY_SECONDS) for launcher in launchers]
    addresses = [address for ready in all_ready for worker in ready["workers"].values() for address in worker.values()]
    addresses += [ready["url"].removeprefix("http://") for ready in all_ready]
    assert len(set(addresses)) == len(addresses) == 3 * (3 * 2 + 1)


def test_a_worker_that_dies_while_starting_stops_the_start_with_its_log(model: str, tmp_path: Path) -> None:
    with launched(tmp_path, "--model", model, stubs=True, environ={"STUB_CRASH": "prefill-0"}) as launcher:
        output = launcher.process.communicate(timeout=READY_SECONDS)[0]
    assert launcher.process.returncode == 1
    assert "error: prefill-0 ended with status 1 while starting. Its last lines:" in output
    assert "this stub was told to crash" in output
    assert "Traceback" not in output
    assert not launcher.runtime.exists()


def test_a_worker_that_dies_later_is_started_again(model: str, tmp_path: Path) -> None:
    before = segments("stub")
    with launched(tmp_path, "--model", model, stubs=True) as launcher:
        ready = launcher.wait_ready(READY_SECONDS)
        os.kill(ready["pids"]["encoder-0"], signal.SIGKILL)
        _wait_announced(launcher, "encoder-0", not_pid=ready["pids"]["encoder-0"])
        assert len(_new_segments(before)) == 3, "one for each living worker, none of the dead one"
        time.sleep(1.0)  # the launcher looks twenty times a second
        status, output = launcher.signal_and_wait(signal.SIGINT)
    assert status == 0
    assert "encoder-0 was ended by SIGKILL; starting it again in 0.5 s" in output
    assert "encoder-0 is ready again" in output
    assert living(ready["pids"]) == {}


def test_a_worker_that_will_not_stop_is_killed_at_the_second_interrupt(model: str, tmp_path: Path) -> None:
    with launched(tmp_path, "--model", model, stubs=True, environ={"STUB_STUBBORN": "decode-0"}) as launcher:
        ready = launcher.wait_ready(READY_SECONDS)
        launcher.process.send_signal(signal.SIGINT)
        assert "decode-0" in wait_gone(ready["pids"], timeout_s=1.0)
        status, output = launcher.signal_and_wait(signal.SIGINT)
    assert status == 0
    assert "decode-0 did not stop in time and was killed" in output
    assert living(ready["pids"]) == {}
    assert not launcher.runtime.exists()


def test_a_runtime_folder_that_the_user_made_stays_and_what_the_file_says_in_vain_is_told(
    model: str, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "cluster.toml").write_text("[prefill]\nport = 9000\nalso = ['decode']\n")
    with launched(tmp_path, "--model", model, "--config", str(tmp_path / "cluster.toml"), stubs=True) as launcher:
        launcher.wait_ready(READY_SECONDS)
        status, output = launcher.signal_and_wait(signal.SIGINT)
    assert status == 0, output
    assert list(launcher.runtime.iterdir()) == []
    for name in ("also", "port"):
        assert f"[prefill] sets {name} in the file, which triptych up decides itself: it is ignored" in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--topology", "e-d"), "'e-d' is not known; use e-p-d, e-pd, p-d, mono"),
        (("--topology", "e-pd", "--decodes", "2"), "--decodes counts workers that the topology e-pd does not have"),
    ],
)
def test_a_topology_or_count_that_cannot_be_is_a_sentence(
    flags: tuple[str, ...], message: str, model: str, tmp_path: Path
) -> None:
    with launched(tmp_path, "--model", model, *flags, stubs=True) as launcher:
        output = launcher.process.communicate(timeout=READY_SECONDS)[0]
    assert launcher.process.returncode == 1
    assert message in output
    assert "Traceback" not in output


def test_a_cluster_of_mixed_pools_has_the_workers_of_both(model: str, tmp_path: Path) -> None:
    flags = ("--topology", "e-pd+p-d", "--prefills", "2")
    with launched(tmp_path, "--model", model, *flags, stubs=True) as launcher:
        ready = launcher.wait_ready(READY_SECONDS)
        launcher.signal_and_wait(signal.SIGINT)
    assert list(ready["pids"]) == ["encoder-0", "pd-0", "pd-1", "ep-0", "ep-1", "decode-0", "router"]


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with launched(tmp_path, "--model", str(tmp_path), stubs=True) as launcher:
        output = launcher.process.communicate(timeout=READY_SECONDS)[0]
    assert launcher.process.returncode == 1
    assert "is no model: it has no config.json" in output


def _wait_announced(launcher: Launcher, worker_id: str, not_pid: int) -> None:
    record = launcher.runtime / "workers" / f"{worker_id}.json"
    give_up_at = time.monotonic() + READY_SECONDS
    while time.monotonic() < give_up_at:
        text = record.read_text() if record.exists() else ""
        if "READY" in text and f'"pid": {not_pid}' not in text:
            return
        time.sleep(0.05)
    raise AssertionError(f"{worker_id} was not started again")
