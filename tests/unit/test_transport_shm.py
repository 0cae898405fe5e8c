"""Shared segments: exclusive, checked, swept when their owner is dead, and never a SIGBUS."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from triptych.core.errors import StartupError, TransferRefused
from triptych.transport.shm import SHM_DIRECTORY, SharedSegment, sweep_dead_segments

SIZE = 3 * 4096 + 5

OWNER = """
import sys, time
from triptych.transport.shm import SharedSegment
segment = SharedSegment.create(8192, "owner")
segment.buffer[:4] = b"live"
print(segment.name, flush=True)
time.sleep(60)
"""

PEER = """
import sys, time
from triptych.transport.shm import SharedSegment
peer = SharedSegment.open(sys.argv[1], int(sys.argv[2]), mapping_id=int(sys.argv[3]))
peer.buffer[:4] = b"peer"
print("mapped", flush=True)
time.sleep(60)
"""


def start(code: str, *args: str) -> tuple[subprocess.Popen[str], str]:
    child = subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    return child, child.stdout.readline().strip()


def end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    assert child.stdout is not None
    child.stdout.close()


def test_owner_and_peer_share_bytes() -> None:
    segment = SharedSegment.create(SIZE, "test")
    peer = SharedSegment.open(segment.name, SIZE)
    peer.buffer[SIZE - 2 :] = b"ok"
    assert bytes(segment.buffer[SIZE - 2 :]) == b"ok"
    status = os.stat(SHM_DIRECTORY / segment.name)
    assert status.st_mode & 0o777 == 0o600 and status.st_size == SIZE and status.st_blocks * 512 >= SIZE
    peer.close()
    assert (SHM_DIRECTORY / segment.name).exists()
    segment.close()
    segment.close()
    assert not (SHM_DIRECTORY / segment.name).exists()
    with pytest.raises(ValueError, match="released"):
        _ = segment.buffer


def test_a_view_outlives_close() -> None:
    segment = SharedSegment.create(SIZE, "test")
    view = segment.buffer[10:20]
    segment.close()
    view[:] = b"0123456789"
    assert bytes(view) == b"0123456789"


def test_the_owner_knows_how_long_a_peer_has_it_mapped() -> None:
    segment = SharedSegment.create(SIZE, "test")
    peer = SharedSegment.open(segment.name, SIZE, mapping_id=7)
    view = peer.buffer[:1]
    assert segment.is_mapped_as(7) and not segment.is_mapped_as(8)
    peer.close()
    assert segment.is_mapped_as(7)  # the view can still be written
    view.release()
    del view
    assert not segment.is_mapped_as(7)
    segment.close()


def resident_bytes(name: str) -> list[int]:
    """Of each mapping of that segment in this process: what its page table has."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    heads = [at for at, line in enumerate(lines) if line.endswith(name)]
    found = [next(line for line in lines[at:] if line.startswith("Rss:")) for at in heads]
    return [1024 * int(line.split()[1]) for line in found]


def eventually(holds: Callable[[], bool]) -> bool:
    give_up_at_s = time.monotonic() + 20
    while not holds() and time.monotonic() < give_up_at_s:
        time.sleep(0.01)
    return holds()


def test_a_peer_has_its_pages_at_hand_before_it_writes() -> None:
    size = 40 << 20
    segment = SharedSegment.create(size, "test")
    peer = SharedSegment.open(segment.name, size)
    assert size not in resident_bytes(segment.name)
    peer.populate_soon()
    assert eventually(lambda: size in resident_bytes(segment.name))
    assert bytes(segment.buffer[:4]) == bytes(4)
    peer.close()
    segment.close()


def test_a_peer_that_closes_at_once_does_not_wait_for_its_pages_and_leaves_no_mapping() -> None:
    size = 256 << 20
    segment = SharedSegment.create(size, "test")
    for mapping_id in range(1, 6):
        peer = SharedSegment.open(segment.name, size, mapping_id=mapping_id)
        peer.populate_soon()
        peer.close()
    assert eventually(lambda: not segment.is_mapped())
    segment.close()


def test_a_killed_peer_is_no_longer_mapped() -> None:
    segment = SharedSegment.create(8192, "test")
    child, _ = start(PEER, segment.name, "8192", "42")
    try:
        assert segment.is_mapped_as(42)
    finally:
        end(child)
    assert not segment.is_mapped_as(42)
    segment.close()


def test_sweep_takes_what_a_killed_owner_left_and_nothing_else() -> None:
    mine = SharedSegment.create(4096, "mine")
    dead, dead_name = start(OWNER)
    alive, alive_name = start(OWNER)
    try:
        os.kill(dead.pid, signal.SIGKILL)
        dead.wait()
        swept = sweep_dead_segments()
        assert dead_name in swept and alive_name not in swept and mine.name not in swept
        assert (SHM_DIRECTORY / alive_name).exists() and not (SHM_DIRECTORY / dead_name).exists()
    finally:
        end(dead)
        end(alive)
        mine.close()
    assert alive_name in sweep_dead_segments()


def test_sweepers_never_take_a_segment_that_is_being_created(tmp_path: Path) -> None:
    stop = threading.Event()

    def sweep() -> None:
        while not stop.is_set():
            sweep_dead_segments(directory=tmp_path)

    sweepers = [threading.Thread(target=sweep) for _ in range(2)]
    for sweeper in sweepers:
        sweeper.start()
    try:
        for _ in range(200):
            segment = SharedSegment.create(4096, "race", directory=tmp_path)
            assert (tmp_path / segment.name).exists()
            SharedSegment.open(segment.name, 4096, directory=tmp_path).close()
            segment.close()
    finally:
        stop.set()
        for sweeper in sweepers:
            sweeper.join()


def test_more_than_there_is_is_refused_with_a_sentence_and_leaves_nothing() -> None:
    before = set(os.listdir(SHM_DIRECTORY))
    room = os.statvfs(SHM_DIRECTORY)
    with pytest.raises(StartupError, match=r"MiB of shared memory, but /dev/shm is .* free: make it larger"):
        SharedSegment.create(2 * room.f_blocks * room.f_frsize, "huge")
    assert {name for name in set(os.listdir(SHM_DIRECTORY)) - before if "-huge-" in name} == set()


@pytest.mark.parametrize("kind", ["", "Upper", "with-dash", "../up", "x" * 17])
def test_a_kind_that_is_no_name_is_refused(kind: str) -> None:
    with pytest.raises(StartupError, match="cannot name a shared segment"):
        SharedSegment.create(4096, kind)


def test_no_bytes_are_refused() -> None:
    with pytest.raises(StartupError, match="at least one byte"):
        SharedSegment.create(0, "test")


@pytest.mark.parametrize(
    "name", ["", "passwd", "../etc/passwd", "triptych-kv-0123456789abcdeF", "triptych-kv-0/1", "/x"]
)
def test_names_that_are_not_ours_are_refused(name: str) -> None:
    with pytest.raises(TransferRefused, match="no shared segment of ours"):
        SharedSegment.open(name, 4096)


def test_forged_files_are_refused_before_they_are_mapped(tmp_path: Path) -> None:
    def forge(tail: str) -> Path:
        return tmp_path / f"triptych-kv-{tail:0>16}"

    with pytest.raises(TransferRefused, match="cannot be opened"):
        SharedSegment.open(forge("0").name, 4096, directory=tmp_path)
    target = tmp_path / "target"
    target.write_bytes(b"x" * 4096)
    forge("1").symlink_to(target)
    with pytest.raises(TransferRefused, match="cannot be opened"):
        SharedSegment.open(forge("1").name, 4096, directory=tmp_path)
    forge("2").write_bytes(b"x" * 4096)
    forge("2").chmod(0o644)
    with pytest.raises(TransferRefused, match="someone else"):
        SharedSegment.open(forge("2").name, 4096, directory=tmp_path)
    os.mkfifo(forge("3"), 0o600)
    with pytest.raises(TransferRefused, match="someone else"):
        SharedSegment.open(forge("3").name, 4096, directory=tmp_path)


def test_a_file_with_holes_or_of_another_size_is_refused_so_no_sigbus_can_come() -> None:
    segment = SharedSegment.create(8192, "test")
    for wrong in (4096, 8191, 8193, 1 << 40, 0):
        with pytest.raises(TransferRefused, match="another size"):
            SharedSegment.open(segment.name, wrong)
    segment.close()
    sparse = SHM_DIRECTORY / "triptych-sparse-0123456789abcdef"
    fd = os.open(sparse, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(fd, 8192)
        with pytest.raises(TransferRefused, match="another size"):
            SharedSegment.open(sparse.name, 8192)
    finally:
        sparse.unlink()
        os.close(fd)
