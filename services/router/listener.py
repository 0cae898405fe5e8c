"""The socket that callers connect to."""

from __future__ import annotations

import os
import socket

from triptych.core.errors import StartupError

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Raises StartupError when the address is taken or is none of ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise StartupError(
            f"cannot listen on port {port} of {host}: {error.strerror}; choose another --port"
        ) from error


def inherited(descriptor: int) -> socket.socket:
    """One that listens already, which others may accept from, too. Raises StartupError."""
    try:
        found = socket.socket(fileno=descriptor)
        if not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise StartupError(f"the descriptor {descriptor} is no socket that listens; leave --listen-fd out")
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise StartupError(f"the descriptor {descriptor} cannot be used: {reason}; leave --listen-fd out") from error
    return found
