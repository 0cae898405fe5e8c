"""The real driver of `nixl`: host memory, by the UCX backend of NVIDIA's library, which is an optional extra.

An agent of NIXL is one end of the network: addresses, connections, registered memory. Each end of each link has one of
its own, so that ending it ends all that it stands for (docs/adr/0013-nixl.md says why). By the library's lower binding
and not by its Python class: with the class the thread that drives an agent never sleeps.
"""

from __future__ import annotations

import importlib
import logging
import mmap
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np

from triptych.core.address import is_loopback
from triptych.transport.nixl_api import NixlAddress, NixlError, Runs, check_runs

BACKEND: Final = "UCX"
# The kernel's and shared memory's ways write into another process without it: nothing there could revoke that.
_UNREVOKABLE: Final = frozenset({"all", "sm", "shm", "mm", "cma", "knem", "xpmem", "posix", "sysv"})
# And without the last, whoever connects to a port that a firewall swallows waits for minutes.
_WAYS: Final = "TLS=^sm,TCP_CONN_NB=y"
_LOOPBACK_DEVICE: Final = "lo"
# The driving thread sleeps until a socket or a card has something, and looks by itself this often.
WAKE_US: Final = 10_000
_NO_DEVICE: Final = 0
# Both write to standard output by themselves, addresses too. What is wrong they say to us as well.
_QUIET: Final = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}
# As long as ZMQ waits for a connection; well below what a link has.
CONNECT_TIMEOUT_S: Final = 4.0
_LOOK_S: Final = 0.001


class UcxDriver:
    """Implements `NixlDriver`.

    Args:
        host: what this worker listens on. On loopback agents listen there and nowhere else; else UCX chooses among the
            machine's devices (`UCX_NET_DEVICES`).
    """

    def __init__(self, host: str, environment: Mapping[str, str] = os.environ) -> None:
        """Raises NixlError when the library is not here or does not work."""
        self._config = engine_config(host, environment)
        self._library = _load()
        self.expose(memoryview(bytearray(mmap.PAGESIZE))).revoke()

    def expose(self, arena: memoryview) -> UcxTarget:
        with _agent_of(self._library, self._config) as agent:
            return UcxTarget(agent, arena)

    def connect(self, address: NixlAddress, arena_bytes: int, staging_bytes: int) -> UcxSource:
        with _agent_of(self._library, self._config) as agent:
            return UcxSource(agent, address, arena_bytes, staging_bytes)


class Agent:
    """One agent with its backend. Ends with `end`: its connections, its thread, and all memory that it registered."""

    def __init__(self, library: Any, config: str) -> None:
        self.library = library
        settings = library.nixlAgentConfig()
        settings.useProgThread = True
        settings.pthrDelay = WAKE_US
        settings.useListenThread = False
        settings.syncMode = library.NIXL_THREAD_SYNC_STRICT  # set up and ended by other threads than it is used by
        self.handle = library.nixlAgent(secrets.token_hex(16), settings)
        self.backends = [self.handle.createBackend(BACKEND, {"engine_config": config})]
        self._registered: list[Any] = []
        self._requests: set[int] = set()

    def register(self, address: int, num_bytes: int) -> None:
        memory = self.library.nixlRegDList(self.library.DRAM_SEG, [(address, num_bytes, _NO_DEVICE, "")])
        self.handle.registerMem(memory, self.backends)
        self._registered.append(memory)

    def begin_write(self, peer: str, here: Runs, there: Runs) -> tuple[int, bool]:
        """The request, and whether it is done."""
        return self._begin(self.library.NIXL_WRITE, peer, here, there)

    def reach(self, peer: str, here: int, there: int) -> None:
        """Reads a byte of the peer's memory. A connection is made by the first that is asked of it, and a peer that
        cannot be reached should be known before anything depends on it. Raises NixlError when it does not answer."""
        byte = (_descriptors(np.array([at]), np.array([1])) for at in (here, there))
        request, is_done = self._begin(self.library.NIXL_READ, peer, *byte)
        give_up_at_s = time.monotonic() + CONNECT_TIMEOUT_S
        while not is_done:
            if time.monotonic() > give_up_at_s:
                raise NixlError("the peer does not answer")
            time.sleep(_LOOK_S)
            is_done = self.is_done(request)

    def _begin(self, what: Any, peer: str, here: Runs, there: Runs) -> tuple[int, bool]:
        library = self.library
        lists = (library.nixlXferDList(library.DRAM_SEG, descriptors) for descriptors in (here, there))
        request = self.handle.createXferReq(what, *lists, peer, "", self.backends)
        self._requests.add(request)
        return request, self._release_if_done(request, self.handle.postXferReq(request))

    def is_done(self, request: int) -> bool:
        return self._release_if_done(request, self.handle.getXferStatus(request))

    def end(self) -> None:
        """The library's own ends when nobody holds it any more, whatever it says to being asked to let go before."""
        for request in self._requests:
            with suppress(Exception):
                self.handle.releaseXferReq(request)
        for memory in self._registered:
            with suppress(Exception):
                self.handle.deregisterMem(memory, self.backends)
        self._requests.clear()
        self._registered.clear()
        del self.handle

    def _release_if_done(self, request: int, status: Any) -> bool:
        """The backend flushes behind each write, so what is done is in the receiver's memory and not only sent."""
        if status == self.library.NIXL_IN_PROG:
            return False
        self._requests.discard(request)
        self.handle.releaseXferReq(request)
        return True


class UcxTarget:
    """Implements `NixlTarget`. The arena must live until `revoke` has returned."""

    def __init__(self, agent: Agent, arena: memoryview) -> None:
        self._agent: Agent | None = agent
        self._arena = arena
        base = _address_of(arena)
        agent.register(base, arena.nbytes)
        self.address = NixlAddress(agent.handle.getLocalMD(), base)

    def revoke(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.end()


class UcxSource:
    """Implements `NixlSource`."""

    def __init__(self, agent: Agent, address: NixlAddress, arena_bytes: int, staging_bytes: int) -> None:
        self._agent: Agent | None = agent
        self._memory = mmap.mmap(-1, staging_bytes)
        self._here = _address_of(memoryview(self._memory))
        self._there, self._arena_bytes = address.base, arena_bytes
        agent.register(self._here, staging_bytes)
        self._peer = agent.handle.loadRemoteMD(address.metadata).decode()
        agent.reach(self._peer, self._here, self._there)

    @property
    def staging(self) -> memoryview:
        return memoryview(self._memory)

    def write(self, start: int, runs: Runs) -> UcxTransfer:
        if self._agent is None:
            raise NixlError("the link is closed")
        check_runs(runs, self._arena_bytes)
        lengths = runs[:, 1]
        begins = self._here + start + np.cumsum(lengths) - lengths
        with _told():
            return UcxTransfer(
                self._agent, self._peer, _descriptors(begins, lengths), _descriptors(self._there + runs[:, 0], lengths)
            )

    def close(self) -> None:
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.end()


class UcxTransfer:
    """Implements `NixlTransfer`."""

    def __init__(self, agent: Agent, peer: str, here: Runs, there: Runs) -> None:
        self._agent = agent
        self._request, self._is_done = agent.begin_write(peer, here, there)

    def is_done(self) -> bool:
        if not self._is_done:
            with _told():
                self._is_done = self._agent.is_done(self._request)
        return self._is_done


def engine_config(host: str, environment: Mapping[str, str]) -> str:
    """What UCX is told. Its own variables win over that, so they must not undo it. Raises NixlError when they do."""
    ways = environment.get("UCX_TLS", "^sm")
    if ways != "^sm" and (ways.startswith("^") or _UNREVOKABLE & set(ways.lower().split(","))):
        raise NixlError(
            "UCX_TLS lets UCX write from process to process by shared memory or by the kernel, which cannot be revoked;"
            " leave it unset, or name network transports only"
        )
    if not is_loopback(host):
        return _WAYS
    if environment.get("UCX_NET_DEVICES", _LOOPBACK_DEVICE) != _LOOPBACK_DEVICE:
        raise NixlError("UCX_NET_DEVICES names other devices than loopback, where this worker listens; leave it unset")
    return f"{_WAYS},NET_DEVICES={_LOOPBACK_DEVICE}"


def _load() -> Any:
    """The library's lower binding; what importing it does to this process's logging is undone."""
    for name, level in _QUIET.items():
        os.environ.setdefault(name, level)
    raises = logging.raiseExceptions
    try:
        return importlib.import_module("nixl._bindings")
    except ImportError as error:
        missing = getattr(error, "name", None) or "a library"
        raise NixlError(f"it is not installed here ({missing} is missing): pip install 'triptych[nixl]'") from error
    finally:
        logging.raiseExceptions = raises
        theirs = logging.getLogger("nixl")
        theirs.handlers.clear()
        theirs.propagate = True


@contextmanager
def _agent_of(library: Any, config: str) -> Iterator[Agent]:
    """For whoever takes it over; it ends when that fails."""
    with _told():
        agent = Agent(library, config)
        try:
            yield agent
        except BaseException:
            agent.end()
            raise


@contextmanager
def _told() -> Iterator[None]:
    """The library's errors have no base of their own. What they say may hold addresses; their names do not."""
    try:
        yield
    except NixlError:
        raise
    except Exception as error:
        raise NixlError(type(error).__name__) from error


def _address_of(memory: memoryview) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


def _descriptors(begins: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any]) -> Runs:
    """(runs, 3) as the library takes them: address, length, device."""
    return np.ascontiguousarray(np.stack((begins, lengths, np.zeros_like(lengths)), axis=1), dtype=np.int64)
