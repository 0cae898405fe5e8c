"""Membership without a service: one JSON file a worker, in the runtime folder.

A worker's record counts only while the worker holds the lock beside it, so a worker that was killed is gone at once
for readers, and `sweep` removes what it left.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import re
from pathlib import Path

from triptych.core.errors import StartupError
from triptych.core.worker import WorkerInfo, WorkerState
from triptych.registry.lock import FileLock, is_held
from triptych.registry.records import from_json, to_json
from triptych.registry.runtime import RuntimeFolder

POLL_SECONDS = 0.25

_WORKER_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_log = logging.getLogger(__name__)


class StaticRegistry:
    """Owns the records and locks of the workers that this process announced; reads everyone's."""

    def __init__(self, folder: RuntimeFolder) -> None:
        self._folder = folder
        self._mine: dict[str, tuple[WorkerInfo, FileLock]] = {}
        self._view: tuple[WorkerInfo, ...] | None = None
        self._parsed: dict[Path, tuple[tuple[int, int], WorkerInfo]] = {}
        self._wake = asyncio.Event()
        self._unreadable: set[str] = set()

    def announce(self, worker: WorkerInfo) -> None:
        """Publishes the record, or replaces the one published before under this id.

        Raises StartupError when a living process uses the id, or when it is not a name like `encoder-0`.
        """
        if not _WORKER_ID.fullmatch(worker.worker_id):
            raise StartupError(
                f"worker id {worker.worker_id!r} must be lower-case letters, digits and hyphens, like encoder-0"
            )
        if worker.worker_id in self._mine:
            lock = self._mine[worker.worker_id][1]
        else:
            lock = self._lock(worker.worker_id)
        self._mine[worker.worker_id] = (worker, lock)
        _write_atomically(self._record_path(worker.worker_id), to_json(worker))

    def set_state(self, state: WorkerState) -> None:
        """Publishes a new state for all workers that this process announced."""
        for worker, _ in list(self._mine.values()):
            self.announce(dataclasses.replace(worker, state=state))

    def withdraw(self) -> None:
        """Removes all that this process announced. May be called twice."""
        for worker_id, (_, lock) in self._mine.items():
            self._record_path(worker_id).unlink(missing_ok=True)
            lock.release()
        self._mine.clear()

    def workers(self) -> tuple[WorkerInfo, ...]:
        """The living workers by id, as last read: by `run`, by `refresh`, or by the first call of this."""
        return self.refresh() if self._view is None else self._view

    def refresh(self) -> tuple[WorkerInfo, ...]:
        """Reads the folder now, and wakes those who wait for a change if there was one.

        Never raises: what cannot be read just now (this process has no file descriptor left, say) stays as it was last
        seen, for no news of a worker is not the news that it has died.
        """
        try:
            paths = sorted(self._folder.workers_path.glob("*.json"))
        except OSError as error:
            self._note_unreadable(self._folder.workers_path.name, error)
            return self._view or ()
        self._unreadable.discard(self._folder.workers_path.name)
        found = [worker for path in paths if (worker := self._living(path)) is not None]
        if self._view != tuple(found):
            self._view = tuple(found)
            self._wake.set()
            self._wake = asyncio.Event()
        return self._view

    async def changed(self) -> tuple[WorkerInfo, ...]:
        """Waits until the view differs from what it is now. Needs `run` in a task beside it."""
        await self._wake.wait()
        return self.workers()

    async def run(self) -> None:
        """Keeps the view fresh until cancelled, and what this process announced in its place."""
        while True:
            self._restore()
            self.refresh()
            await asyncio.sleep(POLL_SECONDS)

    def sweep(self) -> list[str]:
        """Removes the files of workers that no longer live; returns their ids."""
        stems = {path.stem for pattern in ("*.json", "*.lock") for path in self._folder.workers_path.glob(pattern)}
        return [worker_id for worker_id in sorted(stems) if self._remove_if_dead(worker_id)]

    def _restore(self) -> None:
        """A folder for temporary files may be cleaned while the cluster lives. Never raises."""
        name = self._folder.path.name
        try:
            if self._folder.restore():
                _log.warning("the runtime folder was removed while the cluster runs, and is made again")
            for worker, lock in list(self._mine.values()):
                if not lock.is_in_place:
                    self._mine[worker.worker_id] = (worker, self._lock(worker.worker_id))
                    lock.forget()
                    self.announce(worker)
                elif not self._record_path(worker.worker_id).exists():
                    self.announce(worker)
        except (OSError, StartupError) as error:
            self._note_unreadable(name, error)
        else:
            self._unreadable.discard(name)

    def _remove_if_dead(self, worker_id: str) -> bool:
        lock_path = self._record_path(worker_id).with_suffix(".lock")
        if is_held(lock_path):
            return False
        lock = FileLock.acquire(lock_path)
        if lock is None:
            return False
        self._record_path(worker_id).unlink(missing_ok=True)
        for draft in self._folder.workers_path.glob(f".{worker_id}.json.*"):
            draft.unlink(missing_ok=True)
        lock.release()
        return True

    def _lock(self, worker_id: str) -> FileLock:
        lock = FileLock.acquire(self._record_path(worker_id).with_suffix(".lock"))
        if lock is None:
            raise StartupError(
                f"a worker named {worker_id} already runs in {self._folder.path}; "
                "give this one another --worker-id, or another --runtime-dir"
            )
        return lock

    def _record_path(self, worker_id: str) -> Path:
        return self._folder.workers_path / f"{worker_id}.json"

    def _living(self, path: Path) -> WorkerInfo | None:
        """The record's worker, as last seen when neither record nor lock can be read; None when it does not live."""
        try:
            worker = self._read(path) if is_held(path.with_suffix(".lock")) else None
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self._note_unreadable(path.name, error)
            last_seen = self._parsed.get(path)
            return last_seen[1] if last_seen is not None and isinstance(error, OSError) else None
        self._unreadable.discard(path.name)
        return worker

    def _read(self, path: Path) -> WorkerInfo:
        """The record, parsed again only when the file is another one. Raises OSError or ValueError."""
        found = path.stat()
        version = (found.st_ino, found.st_mtime_ns)
        if path not in self._parsed or self._parsed[path][0] != version:
            self._parsed[path] = (version, from_json(path.read_text(encoding="utf-8")))
        return self._parsed[path][1]

    def _note_unreadable(self, name: str, error: Exception) -> None:
        """Once for each time that it becomes so: the folder is read several times a second."""
        if name not in self._unreadable:
            self._unreadable.add(name)
            reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else "it is not what it should be"
            _log.warning("part of the registry cannot be read or written", extra={"record": name, "reason": reason})


def find_dead_workers(workers_path: Path) -> list[str]:
    """The ids that `sweep` would remove: those with a file in the folder and without a living process."""
    stems = {path.stem for pattern in ("*.json", "*.lock") for path in workers_path.glob(pattern)}
    return [worker_id for worker_id in sorted(stems) if not is_held(workers_path / f"{worker_id}.lock")]


def _write_atomically(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    draft.replace(path)
