"""A cluster that may move bytes by the host's sockets only, and what its dead leave."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.launching import Launcher, launched, segments, wait_gone
from tests.integration.test_cluster import ANSWER, READY_SECONDS, _ask, _is_mapped_by
from triptych.core.errors import TriptychError

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

RECOVERY_SECONDS = 90.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """Its path is short enough for sockets; pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="triptych-") as name:
        yield Path(name)


def sockets(launcher: Launcher) -> dict[str, str]:
    """By worker."""
    return {path.name.split(".")[0]: path.name for path in (launcher.runtime / "sockets").glob("*.sock")}


def answers_again(url: str) -> bool:
    give_up_at = time.monotonic() + RECOVERY_SECONDS
    while time.monotonic() < give_up_at:
        try:
            return bool(_ask(url).text == ANSWER)
        except TriptychError:
            time.sleep(0.5)
    return False


def test_workers_killed_on_either_side_leave_no_socket_and_the_answers_stay_right(folder: Path) -> None:
    with launched(folder, "--transport", "zmq-ipc") as launcher:
        ready = launcher.wait_ready(READY_SECONDS)
        assert _ask(ready["url"]).text == ANSWER
        first = sockets(launcher)
        assert set(first) == {"prefill-0", "decode-0"}
        assert not {name for name in segments() if _is_mapped_by(name, ready["pids"].values())}
        os.kill(ready["pids"]["prefill-0"], signal.SIGKILL)  # receives embeddings, sends KV
        assert answers_again(ready["url"])
        second = sockets(launcher)
        assert set(second) == set(first) and second["prefill-0"] != first["prefill-0"]
        launcher.signal_and_wait(signal.SIGKILL)
    assert wait_gone(ready["pids"]) == {}
    assert sockets(launcher)
    with launched(folder, "--transport", "zmq-ipc") as launcher:
        ready = launcher.wait_ready(READY_SECONDS)
        assert not set(sockets(launcher).values()) & set(second.values())
        assert _ask(ready["url"]).text == ANSWER
        launcher.signal_and_wait(signal.SIGINT)
    assert not launcher.runtime.exists()
