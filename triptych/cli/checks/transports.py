"""Whether each transport works here, by using it."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from triptych.cli.checks.finding import Finding, fail, ok, warn
from triptych.cli.checks.machine import Machine
from triptych.cli.checks.shm_peer import PATTERN
from triptych.transport.shm import SharedSegment

PEER_TIMEOUT_S = 30.0
ZMQ_TIMEOUT_MS = 5_000
_SEGMENT_BYTES = 1 << 20
_MAPPING_ID = 7


def inproc() -> Finding:
    """What stages of one process use needs nothing of the machine, only that the data plane can be imported."""
    importlib.import_module("triptych.transport.inproc")
    return ok("inproc", "within a process, always there")


def shm(machine: Machine) -> Finding:
    """Another process maps a segment of ours and writes to it; its lock must be seen, and seen to end with it."""
    segment = SharedSegment.create(_SEGMENT_BYTES, "doctor", directory=machine.shm)
    try:
        with _peer(segment, machine.shm) as (said, errors):
            if said != "written":
                return fail("shm", f"another process cannot map a segment: {errors[-200:] or said}", _SHM_TODO)
            if bytes(segment.buffer) != PATTERN * (_SEGMENT_BYTES // len(PATTERN)):
                return fail("shm", "what another process wrote to a segment did not arrive", _SHM_TODO)
            seen = segment.is_mapped_as(_MAPPING_ID)
        if not seen or segment.is_mapped_as(_MAPPING_ID):
            return fail("shm", "the kernel's locks do not tell whether another process has a segment mapped", _SHM_TODO)
    finally:
        segment.close()
    return ok("shm", "two processes of this user wrote, read and locked a segment")


def zmq(transport: str) -> Finding:
    """`transport` is the setting: unless it is shm, every worker that receives listens here when it starts."""
    try:
        import zmq as library
    except ImportError as error:
        return fail("zmq", f"cannot be imported ({error})", "run: pip install --force-reinstall pyzmq")
    with tempfile.TemporaryDirectory(prefix="triptych-doctor-") as folder:
        addresses = {"tcp": "tcp://127.0.0.1:*", "ipc": f"ipc://{folder}/probe"}
        broken = [f"{kind} ({reason})" for kind, address in addresses.items() if (reason := _zmq_fault(address))]
    found = f"ZeroMQ {library.zmq_version()}, pyzmq {library.__version__}"
    if broken:
        problem = f"{found}: no round trip by {', '.join(broken)}"
        todo = "allow sockets on 127.0.0.1 and in the temporary folder (a sandbox or a firewall?)"
        if transport == "shm":
            return warn("zmq", problem, f"{todo}; with --transport shm nothing needs them")
        return fail("zmq", problem, f"{todo}, or use --transport shm")
    return ok("zmq", f"{found}: round trips by tcp and ipc")


_SHM_TODO = "let all workers run as one user, in one container or with one /dev/shm (docker run --ipc), on Linux 3.15+"


@contextlib.contextmanager
def _peer(segment: SharedSegment, directory: Path) -> Iterator[tuple[str, str]]:
    """What the peer said, and what it complained of; it lives until the end of the block."""
    arguments = [segment.name, str(segment.num_bytes), str(_MAPPING_ID), str(directory)]
    process = subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.shm_peer", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        try:
            said = process.stdout.readline().strip()
            yield said, "" if said else process.stderr.read().strip()
            process.stdin.close()
            process.wait(PEER_TIMEOUT_S)
        finally:
            process.kill()


def _zmq_fault(address: str) -> str | None:
    """Why a message there and back did not arrive; None when it did."""
    import zmq as library

    with library.Context() as context, context.socket(library.PAIR) as one, context.socket(library.PAIR) as other:
        for socket in (one, other):
            socket.setsockopt(library.LINGER, 0)
            socket.setsockopt(library.RCVTIMEO, ZMQ_TIMEOUT_MS)
            socket.setsockopt(library.SNDTIMEO, ZMQ_TIMEOUT_MS)
        try:
            one.bind(address)
            other.connect(one.getsockopt_string(library.LAST_ENDPOINT))
            other.send(PATTERN)
            one.send(one.recv())
            return None if other.recv() == PATTERN else "another message came back"
        except library.ZMQError as error:
            return str(error)
