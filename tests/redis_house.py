"""A real redis-server for tests: on loopback, with a password, without a file of its own; stopped by its pid."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

REQUIRED = "TRIPTYCH_TEST_REDIS"
PASSWORD = "pw-of-the-redis-of-tests"
_START_S = 10.0


def redis_binary() -> str:
    """Skips the test where there is none; where TRIPTYCH_TEST_REDIS=required, as in CI, it fails."""
    found = shutil.which("redis-server")
    if found is not None:
        return found
    reason = "redis-server is not installed here (Debian: apt-get install redis-server)"
    if os.environ.get(REQUIRED) == "required":
        pytest.fail(reason)
    pytest.skip(reason)


@dataclass
class RedisServer:
    """`address` is host:port, `tls_address` the same for rediss://, where there are certificates."""

    folder: Path
    port: int
    tls_flags: tuple[str, ...]
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def start_again(self) -> None:
        self.process = _start(self.folder, self.port, self.tls_flags)


@contextmanager
def running_redis(folder: Path, *tls_flags: str) -> Iterator[RedisServer]:
    port = _free_port()
    server = RedisServer(folder, port, tls_flags, _start(folder, port, tls_flags))
    try:
        yield server
    finally:
        server.kill()


def _start(folder: Path, port: int, tls_flags: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """With TLS the port speaks nothing else."""
    listen = ["--port", "0", "--tls-port", str(port), *tls_flags] if tls_flags else ["--port", str(port)]
    command = [redis_binary(), *listen, "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", "--appendonly", "no"]
    command += ["--requirepass", PASSWORD, "--daemonize", "no"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    give_up_at = time.monotonic() + _START_S
    while not _listens(port):
        if process.poll() is not None or time.monotonic() > give_up_at:
            process.kill()
            raise AssertionError("redis-server did not start")
        time.sleep(0.02)
    return process


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
    except OSError:
        return False
    return True


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
