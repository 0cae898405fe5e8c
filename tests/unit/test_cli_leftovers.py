"""What a dead cluster left in the runtime folder is gone when the next one starts, and at the end."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from triptych.cli import leftovers
from triptych.core.errors import StartupError
from triptych.registry.runtime import RuntimeFolder
from triptych.registry.static import StaticRegistry


def dead_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
        left.listen()


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> RuntimeFolder:
    """Not below the test's name: the path of a socket has 107 bytes at most."""
    return RuntimeFolder(tmp_path_factory.mktemp("leftovers") / "run")


def test_sockets_of_the_dead_are_removed_at_the_start(folder: RuntimeFolder) -> None:
    sockets = folder.make_sockets_path()
    for name in ("decode-0.0123abcd.sock", "prefill-0.0123abcd.sock"):
        dead_socket(sockets / name)
    lock, swept = leftovers.take_over(folder, StaticRegistry(folder))
    assert {"socket decode-0.0123abcd.sock", "socket prefill-0.0123abcd.sock"} <= set(swept)
    assert list(sockets.iterdir()) == []
    lock.release()


def test_at_the_end_nothing_is_left(folder: RuntimeFolder) -> None:
    registry = StaticRegistry(folder)
    lock, _ = leftovers.take_over(folder, registry)
    folder.token()
    dead_socket(folder.make_sockets_path() / "decode-0.0123abcd.sock")
    leftovers.clear(folder, registry, lock)
    leftovers.remove(folder)
    assert not folder.path.exists()


def test_a_sockets_folder_that_others_can_enter_is_refused(folder: RuntimeFolder) -> None:
    folder.sockets_path.mkdir(mode=0o755)
    folder.sockets_path.chmod(0o755)
    with pytest.raises(StartupError, match="chmod 0700"):
        folder.make_sockets_path()


def test_logs_and_a_token_that_are_no_clusters_are_refused_and_stay(folder: RuntimeFolder) -> None:
    (folder.path / "logs").mkdir()
    (folder.path / "logs" / "mine").write_text("precious")
    with pytest.raises(StartupError, match="--runtime-dir a folder of its own"):
        leftovers.take_over(folder, StaticRegistry(folder))
    assert [path.name for path in folder.path.iterdir()] == ["logs"]
    assert (folder.path / "logs" / "mine").read_text() == "precious"


def test_a_token_that_is_no_clusters_is_refused_and_stays(folder: RuntimeFolder) -> None:
    (folder.path / "token").touch(mode=0o600)
    (folder.path / "token").write_text("of another service")
    with pytest.raises(StartupError, match="--runtime-dir"):
        leftovers.take_over(folder, StaticRegistry(folder))
    assert [path.name for path in folder.path.iterdir()] == ["token"]


@pytest.mark.parametrize("below", [".", "today"])
def test_logs_that_are_to_be_kept_in_the_runtime_folder_stay(below: str, folder: RuntimeFolder) -> None:
    registry, logs = StaticRegistry(folder), folder.path / "logs" / below
    for _ in range(2):
        lock, _ = leftovers.take_over(folder, registry, logs)
        (leftovers.log_folder(folder, logs) / "router.log").write_text("ready")
        leftovers.clear(folder, registry, lock, logs)
        assert (logs / "router.log").read_text() == "ready"


def test_logs_of_a_cluster_that_was_killed_are_removed(folder: RuntimeFolder) -> None:
    (leftovers.log_folder(folder, None) / "router.log").touch()
    folder.lock_path.touch(mode=0o600)
    lock, _ = leftovers.take_over(folder, StaticRegistry(folder))
    assert not (folder.path / "logs").exists()
    lock.release()


def test_a_folder_of_other_things_is_never_to_be_closed_to_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "thesis").touch()
    with pytest.raises(StartupError, match="give --runtime-dir a folder of its own") as refused:
        RuntimeFolder(tmp_path)
    assert "chmod" not in refused.value.message
    (tmp_path / "thesis").unlink()
    with pytest.raises(StartupError, match="chmod 0700"):
        RuntimeFolder(tmp_path)
