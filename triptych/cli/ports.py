"""Ports of this host that a launcher hands out. Two launchers that start at the same moment never hand out the same."""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Callable

from triptych.core.errors import StartupError

# Whether (host, port) is the caller's now. It stays so for as long as whoever answered says.
TakePort = Callable[[str, int], bool]
_TRIES = 64


class HeldPorts:
    """Owns, until `close` or its process's end, every port that it gave away, also while a worker that had it is dead.

    It holds two sockets of each, and listens on neither:
      - of the port itself, with SO_REUSEADDR, as our servers have it: they can listen there, and the kernel gives the
        port to nobody who asks for any free one;
      - of a name of Linux's abstract namespace, which one process has at a time. Without it two launchers could both
        find a port free before either's worker listens there.
    """

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def take(self, host: str, port: int) -> bool:
        """False if a server listens there, or another launcher has taken the port for one that will."""
        name = _name_socket(host, port)
        if name is None:
            return False
        bound = _bound(host, port)
        if bound is None:
            name.close()
            return False
        self._held += [name, bound]
        return True

    def take_any(self, host: str) -> int:
        """A free port, taken. Raises StartupError if the host is no address of this machine."""
        for _ in range(_TRIES):
            if self.take(host, port := free_port(host)):
                return port
        raise StartupError(f"no port of {host} is free")

    def close(self) -> None:
        """Gives all back. May be called twice."""
        while self._held:
            self._held.pop().close()


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now. Takes nothing."""
    bound = _bound(host, port)
    if bound is not None:
        bound.close()
    return bound is not None


def free_port(host: str) -> int:
    """A port that is free now; it is not taken. Raises StartupError if the host is no address of this machine."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError as error:
            raise StartupError(f"nothing can listen at --host {host}: {error.strerror}") from error
        return int(probe.getsockname()[1])


def _bound(host: str, port: int) -> socket.socket | None:
    bound = socket.socket(_family(host), socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        return None
    return bound


def _name_socket(host: str, port: int) -> socket.socket | None:
    """None while another holds the name. Where there can be no such name, a socket without, which keeps nobody out."""
    held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    if sys.platform != "linux":
        return held
    try:
        held.bind(f"\0triptych-port-{port}-{host}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            held.close()
            return None
    return held


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
