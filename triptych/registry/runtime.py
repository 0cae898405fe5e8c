"""The runtime folder: what the processes of one cluster on one host find each other by.

cluster.lock           held by the launcher while its cluster lives
token                  the cluster token, which calls between workers carry
workers/<id>.json      a worker's record
workers/<id>.lock      held by that worker while it lives
sockets/<id>.*.sock    where that worker takes data frames (transport zmq-ipc)
logs/                  the launcher's, while its cluster lives, unless it was told to keep them elsewhere
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from triptych.core.errors import StartupError

TOKEN_BYTES = 32
LOGS = "logs"
# All that clusters put into it. Whatever else is there belongs to somebody.
_OURS = frozenset({"cluster.lock", "token", "workers", "sockets", LOGS})


def default_runtime_path(environ: Mapping[str, str] | None = None) -> Path:
    """`$XDG_RUNTIME_DIR/triptych`, or `/tmp/triptych-UID` without that variable."""
    base = (os.environ if environ is None else environ).get("XDG_RUNTIME_DIR")
    return Path(base) / "triptych" if base else Path(f"/tmp/triptych-{os.getuid()}")


class RuntimeFolder:
    """A folder of mode 0700 that belongs to this user. Whoever can read it is one trust domain with the cluster."""

    def __init__(self, path: Path | None = None) -> None:
        """Creates the folder where there is none. Raises StartupError when it cannot be trusted or made."""
        self.path = (path or default_runtime_path()).absolute()
        self.workers_path = self.path / "workers"
        self.sockets_path = self.path / "sockets"
        self.lock_path = self.path / "cluster.lock"
        self._token: str | None = None
        _make_private(self.path)
        _make_private(self.workers_path)

    def restore(self) -> bool:
        """Makes again what was removed while the cluster lives (temporary folders get cleaned): the folders, and the
        token that this process knows. True when something was missing. Raises StartupError when it cannot be made."""
        is_whole = self.workers_path.is_dir() and (self._token is None or (self.path / "token").exists())
        if is_whole:
            return False
        _make_private(self.path)
        _make_private(self.workers_path)
        if self._token is not None:
            _create_once(self.path / "token", self._token)
        return True

    def make_sockets_path(self) -> Path:
        """The folder for sockets, there when this returns. Raises StartupError when it cannot be trusted or made."""
        _make_private(self.sockets_path)
        return self.sockets_path

    def token(self) -> str:
        """The cluster token, 64 hexadecimal digits; the first caller mints it. Raises StartupError if it is exposed."""
        path = self.path / "token"
        if not path.exists():
            _create_once(path, secrets.token_hex(TOKEN_BYTES))
        check_private(path, "file", "0600")
        text = path.read_text(encoding="ascii").strip()
        if len(text) != 2 * TOKEN_BYTES:
            raise StartupError(
                f"the cluster token {path} is damaged; stop the cluster and remove that file, "
                "or choose another place with --runtime-dir"
            )
        self._token = text
        return text


def _make_private(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(
            f"the runtime folder {path} cannot be made ({error.strerror}); choose another with --runtime-dir"
        ) from error
    check_private(path, "folder", "0700")


def holds_other_things(path: Path) -> bool:
    """Whether the folder at `path` has in it what no cluster put there."""
    return not _OURS.issuperset(os.listdir(path))


def check_private(path: Path, what: str, mode: str) -> None:
    """Refuses (StartupError) a link, somebody else's, and one that group or others can enter."""
    found = os.lstat(path)
    right_kind = stat.S_ISDIR(found.st_mode) if what == "folder" else stat.S_ISREG(found.st_mode)
    if not right_kind:
        raise StartupError(f"{path} is not a {what}; remove it or choose another place with --runtime-dir")
    if found.st_uid != os.getuid():
        raise StartupError(f"the {what} {path} belongs to another user; choose another place with --runtime-dir")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise StartupError(f"the {what} {path} is open to other users; {_remedy(path, mode)}")


def _remedy(path: Path, mode: str) -> str:
    """Not `chmod` for what others may need open, like /tmp or a home."""
    is_shared = path.name not in ("workers", "sockets") and path.is_dir() and holds_other_things(path)
    return "give --runtime-dir a folder of its own" if is_shared else f"run: chmod {mode} {path}"


def _create_once(path: Path, text: str) -> None:
    """Writes the file whole, or leaves the one that another process wrote first."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text)
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
