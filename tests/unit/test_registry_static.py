"""Membership through files: what readers see, and what the dead leave."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from triptych.core.errors import StartupError
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.registry.lock import FileLock, is_held
from triptych.registry.runtime import RuntimeFolder, default_runtime_path
from triptych.registry.static import POLL_SECONDS, StaticRegistry

WORKER = WorkerInfo(
    worker_id="prefill-0",
    epoch=2**62,
    roles=frozenset({Role.PREFILL, Role.DECODE}),
    state=WorkerState.STARTING,
    grpc_address="127.0.0.1:8201",
    metrics_address="127.0.0.1:9402",
    model_name="demo-vl",
    model_fingerprint=bytes(range(32)),
    host_id="host",
    transports=("shm", "zmq"),
    pid=17,
    num_pages=100,
    page_tokens=16,
    max_sequence_tokens=1600,
    parameter_counts={"language": 2_300_000},
)

ANNOUNCER = """
import sys, time
from pathlib import Path
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.registry.runtime import RuntimeFolder
from triptych.registry.static import StaticRegistry

registry = StaticRegistry(RuntimeFolder(Path(sys.argv[1])))
registry.announce(WorkerInfo("decode-0", 5, frozenset({Role.DECODE}), WorkerState.READY, "127.0.0.1:8301"))
print("announced", flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> RuntimeFolder:
    return RuntimeFolder(tmp_path / "run")


def _left_in(folder: RuntimeFolder) -> list[str]:
    return sorted(path.name for path in folder.workers_path.iterdir())


def test_a_record_survives_the_round_trip(folder: RuntimeFolder) -> None:
    writer = StaticRegistry(folder)
    writer.announce(WORKER)
    assert StaticRegistry(folder).workers() == (WORKER,)
    writer.withdraw()
    writer.withdraw()
    assert StaticRegistry(folder).workers() == ()
    assert _left_in(folder) == []


def test_a_change_of_state_is_seen_and_workers_is_a_cached_view(folder: RuntimeFolder) -> None:
    writer, reader = StaticRegistry(folder), StaticRegistry(folder)
    writer.announce(WORKER)
    assert reader.workers()[0].state is WorkerState.STARTING
    writer.set_state(WorkerState.READY)
    assert reader.workers()[0].state is WorkerState.STARTING
    assert reader.refresh()[0].state is WorkerState.READY
    assert reader.workers() == (dataclasses.replace(WORKER, state=WorkerState.READY),)
    writer.withdraw()


async def test_all_who_wait_wake_on_a_change(folder: RuntimeFolder) -> None:
    writer, reader = StaticRegistry(folder), StaticRegistry(folder)
    reader.refresh()
    async with asyncio.TaskGroup() as tasks:
        polling = tasks.create_task(reader.run())
        waiting = [tasks.create_task(reader.changed()) for _ in range(2)]
        await asyncio.sleep(0)
        writer.announce(WORKER)
        assert await asyncio.gather(*waiting) == [(WORKER,), (WORKER,)]
        polling.cancel()
    writer.withdraw()


def test_one_id_belongs_to_one_living_process(folder: RuntimeFolder) -> None:
    first, second = StaticRegistry(folder), StaticRegistry(folder)
    first.announce(WORKER)
    with pytest.raises(StartupError, match="already runs"):
        second.announce(WORKER)
    first.withdraw()
    second.announce(WORKER)
    second.withdraw()


@pytest.mark.parametrize("worker_id", ["", "../escape", "Encoder", "a/b", "a" * 64])
def test_an_id_that_is_no_plain_name_is_refused(folder: RuntimeFolder, worker_id: str) -> None:
    with pytest.raises(StartupError, match="lower-case"):
        StaticRegistry(folder).announce(dataclasses.replace(WORKER, worker_id=worker_id))


def test_the_killed_are_gone_at_once_and_the_sweep_removes_only_their_files(folder: RuntimeFolder) -> None:
    alive = StaticRegistry(folder)
    alive.announce(WORKER)
    child = subprocess.Popen([sys.executable, "-c", ANNOUNCER, str(folder.path)], stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "announced\n"
        reader = StaticRegistry(folder)
        assert [worker.worker_id for worker in reader.workers()] == ["decode-0", "prefill-0"]
        assert reader.sweep() == []
        os.kill(child.pid, signal.SIGKILL)
    assert [worker.worker_id for worker in reader.refresh()] == ["prefill-0"]
    assert "decode-0.json" in _left_in(folder)
    assert reader.sweep() == ["decode-0"]
    assert _left_in(folder) == ["prefill-0.json", "prefill-0.lock"]
    alive.withdraw()


def test_a_damaged_record_is_passed_over(folder: RuntimeFolder, caplog: pytest.LogCaptureFixture) -> None:
    lock = FileLock.acquire(folder.workers_path / "bad-0.lock")
    assert lock is not None
    (folder.workers_path / "bad-0.json").write_text("{")
    assert StaticRegistry(folder).workers() == ()
    assert "cannot be read" in caplog.text
    lock.release()


def test_a_lock_is_held_until_it_is_released(tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    assert not is_held(path)
    lock = FileLock.acquire(path)
    assert lock is not None
    assert is_held(path)
    lock.release()
    assert not path.exists()


def test_the_token_is_minted_once_and_private(folder: RuntimeFolder) -> None:
    token = folder.token()
    assert len(token) == 64
    assert RuntimeFolder(folder.path).token() == token
    assert (folder.path / "token").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in folder.path.iterdir()) == ["token", "workers"]


def test_a_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o700)
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(StartupError, match="chmod 0700"):
        RuntimeFolder(tmp_path / "open")


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(StartupError, match="not a folder"):
        RuntimeFolder(tmp_path / "link")


def test_an_exposed_token_is_refused(folder: RuntimeFolder) -> None:
    folder.token()
    (folder.path / "token").chmod(0o644)
    with pytest.raises(StartupError, match="chmod 0600"):
        folder.token()


def test_the_default_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_runtime_path({"XDG_RUNTIME_DIR": "/run/user/7"}) == Path("/run/user/7/triptych")
    assert default_runtime_path({}) == Path(f"/tmp/triptych-{os.getuid()}")


@contextlib.contextmanager
def _no_descriptor_left() -> Iterator[None]:
    """Within the block this process can open no file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.close(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_reader_without_descriptors_keeps_its_last_view_and_goes_on_later(folder: RuntimeFolder) -> None:
    writer, reader = StaticRegistry(folder), StaticRegistry(folder)
    writer.announce(WORKER)
    reading = asyncio.create_task(reader.run())
    await asyncio.sleep(0)
    with _no_descriptor_left():
        assert reader.refresh() == reader.workers() == (WORKER,)
        assert StaticRegistry(folder).refresh() == ()
        await asyncio.sleep(2 * POLL_SECONDS)
    assert not reading.done(), "the folder is still read"
    changed = dataclasses.replace(WORKER, state=WorkerState.READY)
    writer.announce(changed)
    assert reader.refresh() == (changed,)
    reading.cancel()
    writer.withdraw()
    assert reader.refresh() == ()


def test_a_lock_that_cannot_be_opened_hides_its_worker_and_no_other(folder: RuntimeFolder) -> None:
    writer, reader = StaticRegistry(folder), StaticRegistry(folder)
    writer.announce(WORKER)
    (folder.workers_path / "decode-9.json").write_text("{}")
    (folder.workers_path / "decode-9.lock").symlink_to(folder.workers_path / "prefill-0.lock")
    assert reader.refresh() == (WORKER,)


@contextlib.asynccontextmanager
async def running(registry: StaticRegistry) -> AsyncIterator[None]:
    task = asyncio.create_task(registry.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - files tell nobody
            await asyncio.sleep(POLL_SECONDS / 5)


@pytest.mark.parametrize("what", ["", "workers", "workers/prefill-0.json", "workers/prefill-0.lock"])
async def test_what_is_removed_while_the_worker_lives_comes_back(folder: RuntimeFolder, what: str) -> None:
    """Folders for temporary files get cleaned."""
    token = folder.token()
    registry, reader = StaticRegistry(folder), StaticRegistry(RuntimeFolder(folder.path))
    registry.announce(WORKER)
    gone = folder.path / what
    async with running(registry):
        await until(lambda: reader.refresh() == (WORKER,))
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        await until(lambda: reader.refresh() == (WORKER,))
        assert RuntimeFolder(folder.path).token() == token
        with pytest.raises(StartupError, match="already runs"):
            reader.announce(WORKER)
        registry.withdraw()
        assert reader.refresh() == ()
    assert list(folder.workers_path.iterdir()) == []


async def test_a_name_that_another_took_meanwhile_is_left_to_it(folder: RuntimeFolder) -> None:
    registry, other = StaticRegistry(folder), StaticRegistry(RuntimeFolder(folder.path))
    registry.announce(WORKER)
    shutil.rmtree(folder.workers_path)
    newer = dataclasses.replace(WORKER, epoch=7)
    folder.restore()
    other.announce(newer)
    async with running(registry):
        await asyncio.sleep(POLL_SECONDS * 2)
        assert other.refresh() == (newer,)
        other.withdraw()
        await until(lambda: other.refresh() == (WORKER,))
    registry.withdraw()


async def test_a_router_that_announces_nothing_keeps_the_token(folder: RuntimeFolder) -> None:
    token = folder.token()
    async with running(StaticRegistry(folder)):
        shutil.rmtree(folder.path)
        await until(lambda: (folder.path / "token").exists())
    assert RuntimeFolder(folder.path).token() == token
