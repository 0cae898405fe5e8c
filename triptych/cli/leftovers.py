"""What a cluster must not leave: takes the runtime folder over from the dead, and empties it at the end."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

from triptych.core.errors import StartupError
from triptych.registry.lock import FileLock
from triptych.registry.runtime import LOGS, RuntimeFolder
from triptych.registry.static import StaticRegistry
from triptych.transport.shm import sweep_dead_segments

# The kernel kills the workers of a killed launcher, but not before it returns.
_DYING_SECONDS = 5.0


def take_over(
    folder: RuntimeFolder, registry: StaticRegistry, log_dir: Path | None = None
) -> tuple[FileLock, list[str]]:
    """The folder's lock, and the names of what dead clusters had left and is now removed. `log_dir` stays, wherever.

    Raises StartupError while another cluster, or a worker started by hand, lives in the folder, and for logs or a token
    in it that are no cluster's: at the end they would be removed.
    """
    try:
        check_logs(folder.path, log_dir)
        folder.token()
    except StartupError:
        _remove_if_empty(folder.workers_path)
        raise
    lock = FileLock.acquire(folder.lock_path)
    if lock is None:
        raise StartupError(
            f"a cluster already runs in {folder.path}; stop it first (Ctrl-C where it was started), "
            "or give this one another --runtime-dir"
        )
    try:
        _wait_for_the_dying(folder, registry)
    except StartupError:
        lock.release()
        raise
    swept = [f"worker {worker_id}" for worker_id in registry.sweep()]
    swept += _remove_sockets(folder)
    _remove_logs(folder, log_dir)
    return lock, swept + [f"segment {name}" for name in sweep_dead_segments()]


def is_users_own(path: Path | None) -> bool:
    """Whether the user made that folder, and no cluster that was killed has left it. To be asked before a RuntimeFolder
    is made of it."""
    return path is not None and path.is_dir() and not (path / "workers").exists()


def check_logs(runtime: Path, log_dir: Path | None) -> None:
    """Raises StartupError for a folder of logs that no cluster left: the lock goes last, so its logs lie beside it."""
    logs = runtime / LOGS
    if logs.exists() and not (runtime / "cluster.lock").exists() and not _is_kept(logs, log_dir):
        raise StartupError(
            f"{logs} is not a cluster's, and would be removed at its end; give --runtime-dir a folder of its own, "
            "or --log-dir to keep logs there"
        )


def clear(folder: RuntimeFolder, registry: StaticRegistry, lock: FileLock, log_dir: Path | None = None) -> None:
    """Removes everything of a cluster whose processes have ended, but the logs that were to be kept."""
    registry.sweep()
    sweep_dead_segments()
    _remove_logs(folder, log_dir)
    if not registry.refresh():
        _remove_sockets(folder)
        (folder.path / "token").unlink(missing_ok=True)
    lock.release()
    for path in (folder.workers_path, folder.sockets_path):
        _remove_if_empty(path)


def remove(folder: RuntimeFolder) -> None:
    """Removes the folder that was made for a cluster, if nothing else is in it."""
    _remove_if_empty(folder.path)


def _remove_logs(folder: RuntimeFolder, log_dir: Path | None) -> None:
    if not _is_kept(folder.path / LOGS, log_dir):
        shutil.rmtree(folder.path / LOGS, ignore_errors=True)


def _is_kept(logs: Path, log_dir: Path | None) -> bool:
    """Whether the folder to keep is `logs`, or lies in it."""
    return log_dir is not None and log_dir.resolve().is_relative_to(logs.resolve())


def _remove_sockets(folder: RuntimeFolder) -> list[str]:
    """While no worker lives in the folder."""
    paths = sorted(folder.sockets_path.glob("*.sock"))
    for path in paths:
        path.unlink(missing_ok=True)
    return [f"socket {path.name}" for path in paths]


def log_folder(folder: RuntimeFolder, wanted: Path | None) -> Path:
    """Where the processes log. Raises StartupError when it cannot be made."""
    path = wanted or folder.path / LOGS
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"the log folder {path} cannot be made: {error.strerror}") from error
    return path


def _wait_for_the_dying(folder: RuntimeFolder, registry: StaticRegistry) -> None:
    give_up_at = time.monotonic() + _DYING_SECONDS
    while living := registry.refresh():
        if time.monotonic() > give_up_at:
            names = ", ".join(worker.worker_id for worker in living)
            raise StartupError(
                f"workers already run in {folder.path}: {names}; stop them, or give this cluster another --runtime-dir"
            )
        time.sleep(0.05)


def _remove_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rmdir()
