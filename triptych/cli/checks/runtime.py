"""The runtime folder, and the records in it. Creates nothing."""

from __future__ import annotations

import os
from pathlib import Path

from triptych.cli.checks.finding import Finding, fail, ok, warn
from triptych.core.errors import StartupError
from triptych.core.ready_file import check_ready_file
from triptych.registry.runtime import check_private

# sun_path holds 108 bytes, the closing zero among them; the longest socket's own name gets what is left over.
SOCKET_PATH_BYTES = 107
SOCKET_NAME_BYTES = 48


def runtime_folder(path: Path) -> Finding:
    found = f"{path}, private to this user" if os.path.lexists(path) else f"{path}, to be made at the first start"
    fault = _fault(path) if os.path.lexists(path) else _fault_above(path)
    if fault is not None:
        return fault
    most_bytes = SOCKET_PATH_BYTES - SOCKET_NAME_BYTES - 1
    if len(os.fsencode(path)) > most_bytes:
        todo = f"give a shorter --runtime-dir, of at most {most_bytes} bytes"
        return warn("runtime folder", f"{found}; too long for the sockets of some transports", todo)
    return ok("runtime folder", found)


def files(path: Path, log_dir: Path | None, ready_file: Path | None) -> Finding:
    """What else `triptych up` is to write: its logs, and the ready file. `path` is the runtime folder."""
    from triptych.cli.leftovers import check_logs

    check_logs(path, log_dir)
    if log_dir is not None and _fault_above(log_dir.absolute() / "router.log"):
        return fail("files", f"{log_dir} cannot be written to", "give --log-dir a folder of yours")
    if ready_file is not None:
        check_ready_file(ready_file)
    shown = [f"logs in {log_dir}, kept" if log_dir else "logs in the runtime folder, which end with the cluster"]
    return ok("files", ", ".join([*shown, f"ready file {ready_file}"] if ready_file else shown))


def records(path: Path) -> Finding:
    """Of workers that died without a word."""
    from triptych.registry.static import find_dead_workers

    dead = find_dead_workers(path / "workers")
    if not dead:
        return ok("records", "none of dead workers")
    todo = "nothing: the next triptych up in this folder removes them"
    return warn("records", f"of dead workers in {path}: {', '.join(dead)}", todo)


def _fault(path: Path) -> Finding | None:
    """Of a folder that is there."""
    try:
        for folder in (path, path / "workers"):
            if os.path.lexists(folder):
                check_private(folder, "folder", "0700")
        if os.path.lexists(path / "token"):
            check_private(path / "token", "file", "0600")
    except StartupError as error:
        return fail("runtime folder", error.message, f"do that, or give another --runtime-dir than {path}")
    if not os.access(path, os.W_OK | os.X_OK):
        return fail("runtime folder", f"{path} cannot be written to", f"run: chmod 0700 {path}")
    return None


def _fault_above(path: Path) -> Finding | None:
    """Of the folder in which it would be made."""
    above = next((folder for folder in path.parents if folder.exists()), Path("/"))
    if above.is_dir() and os.access(above, os.W_OK | os.X_OK):
        return None
    todo = "give a --runtime-dir in a folder of yours, or set XDG_RUNTIME_DIR to one"
    return fail("runtime folder", f"{path} cannot be made: {above} is not to be written to", todo)
