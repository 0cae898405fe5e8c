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
def folder(tmp_path: Path) -> RuntimeFolder:
    return RuntimeFolder(tmp_path / "run")


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
