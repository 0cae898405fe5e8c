"""The way to a Redis that routers share, and what becomes of it when it does not answer: nobody waits for it.

up ── no answer in time, connection lost ──► down: nobody asks it
▲                                              │ every PROBE_S one PING
└──────────────── it answered ─────────────────┘
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from services.router.admission import shared_scripts as scripts
from services.router.admission.redis_link import Argument, RedisAddress, RedisLink, RedisRefused, Reply, parse_address
from triptych.core.errors import StartupError
from triptych.obs import metrics

PROBE_S: Final = 0.5
LOG_PAUSE_S: Final = 10.0

_log = logging.getLogger(__name__)

Answer = tuple[int, str, float]
"""What a script says: 0 or `scripts.LIMITED`, which limit, and seconds until it is none."""


class SharedLost(Exception):
    """It cannot be asked just now: decide here."""


class Shared(Protocol):
    """Where scripts run for all routers."""

    async def run(self, script: str, keys: Sequence[str], args: Sequence[str | int | float]) -> Answer:
        """Raises SharedLost, at the latest when the time for it is over."""
        ...


class SharedState:
    """Owner of the connection to one Redis. Nothing that it logs or raises holds its address or password."""

    def __init__(self, address: RedisAddress, timeout_s: float, now_s: Callable[[], float] = time.monotonic) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._now_s = now_s
        self._link: RedisLink | None = None
        self._opening = asyncio.Lock()
        self._is_up = True
        self._refusal_logged_s = float("-inf")
        self.came_back = asyncio.Event()
        metrics.SHARED_STATE_UP.set(1)

    @property
    def is_up(self) -> bool:
        return self._is_up

    async def run(self, script: str, keys: Sequence[str], args: Sequence[str | int | float]) -> Answer:
        if not self._is_up:
            raise SharedLost
        try:
            async with asyncio.timeout(self._timeout_s):
                return _checked(await self._evaluate(await self._linked(), script, [len(keys), *keys, *args]))
        except (TimeoutError, OSError, EOFError) as error:
            self._went_down(error)
        except RedisRefused as error:
            if error.kind == "NOAUTH":
                self._went_down(error)
            else:
                self._was_refused(error.kind)
        except (ValueError, TypeError, LookupError) as error:  # it lives, and says what no script of ours does
            self._was_refused(type(error).__name__)
        raise SharedLost

    async def probe_forever(self) -> None:
        """Asks it again while it is down."""
        while True:
            await asyncio.sleep(PROBE_S)
            if not self._is_up and await self._answers():
                self._is_up = True
                metrics.SHARED_STATE_UP.set(1)
                self.came_back.set()
                _log.info("the Redis that routers share answers again: limits hold over all of them")

    def close(self) -> None:
        if self._link is not None:
            self._link.abort()

    async def _linked(self) -> RedisLink:
        async with self._opening:
            if self._link is None or self._link.is_lost:
                self._link = await self._open()
            return self._link

    async def _open(self) -> RedisLink:
        try:
            return await RedisLink.open(self._address)
        except RedisRefused as error:  # the password, or the database
            raise ConnectionRefusedError from error

    async def _evaluate(self, link: RedisLink, script: str, args: Sequence[Argument]) -> Reply:
        try:
            return await link.ask("EVALSHA", _sha(script), *args)
        except RedisRefused as error:
            if error.kind != "NOSCRIPT":
                raise
            return await link.ask("EVAL", script, *args)

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(self._timeout_s):
                await (await self._linked()).ask("PING")
        except (TimeoutError, OSError, EOFError, ValueError, RedisRefused):
            self.close()
            return False
        return True

    def _went_down(self, error: Exception) -> None:
        """Those who wait hear it at once, and one line says it."""
        self.close()
        if not self._is_up:
            return
        self._is_up = False
        metrics.SHARED_STATE_UP.set(0)
        _log.warning(
            "the Redis that routers share does not answer: each router keeps limits by itself",
            extra={"reason": type(error).__name__},
        )

    def _was_refused(self, reason: str) -> None:
        now_s = self._now_s()
        if now_s - self._refusal_logged_s >= LOG_PAUSE_S:
            self._refusal_logged_s = now_s
            _log.warning(
                "the Redis that routers share refuses what they ask: this router decides by itself",
                extra={"reason": reason},
            )


@functools.cache
def _sha(script: str) -> str:
    """What Redis knows a script by."""
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()


def connect(url: str, password_file: Path | None, ca_file: Path | None, timeout_s: float) -> SharedState:
    """Connects when it is first asked. Raises StartupError, which never holds the URL."""
    password = None if password_file is None else _password(password_file)
    try:
        return SharedState(parse_address(url, password, ca_file), timeout_s)
    except ssl.SSLError:
        raise StartupError("the file of redis_ca holds no certificate") from None
    except OSError:
        raise StartupError("the file of redis_ca cannot be read") from None
    except ValueError:
        raise StartupError(
            "redis_url is no URL of a Redis: redis:// or rediss://USER:PASSWORD@HOST:PORT/DATABASE, or unix:///PATH"
        ) from None


def _password(path: Path) -> str:
    try:
        password = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise StartupError("the file of redis_password_file cannot be read as text") from None
    if not password:
        raise StartupError("the file of redis_password_file is empty")
    return password


def _checked(answer: Reply) -> Answer:
    """Of what came from outside. Raises ValueError, TypeError or LookupError for what no script of ours says."""
    match answer:
        case [0]:
            return 0, "", 0.0
        case [scripts.LIMITED, bytes(name), int(wait_ms)]:
            return scripts.LIMITED, name.decode("ascii"), wait_ms / 1000
    raise TypeError("no answer of a script")
