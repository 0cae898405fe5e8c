"""What one request may still take in media: bytes in all, fetches at a time, seconds of fetching."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from triptych.core.errors import PayloadTooLarge

MAX_FETCHES_AT_A_TIME: Final = 4


class MediaAllowance:
    """Of one request; made when its media are about to be read.

    `hold(n)` takes bytes from what the router holds for all requests and raises Overloaded when there are none left.
    """

    def __init__(self, max_bytes: int, fetch_s: float, hold: Callable[[int], None]) -> None:
        self._max_bytes = max_bytes
        self._left_bytes = max_bytes
        self._hold = hold
        self._turns = asyncio.Semaphore(MAX_FETCHES_AT_A_TIME)
        self.fetch_until = asyncio.get_running_loop().time() + fetch_s

    @property
    def turn(self) -> asyncio.Semaphore:
        """To be held while one URL is fetched."""
        return self._turns

    def count(self, num_bytes: int, param: str) -> None:
        """Bytes that came with the body, which is held already. Raises PayloadTooLarge."""
        self._left_bytes -= num_bytes
        if self._left_bytes < 0:
            raise PayloadTooLarge(
                f"all media of a request together may have at most {self._max_bytes} bytes", param=param
            )

    def count_fetched(self, num_bytes: int, param: str) -> None:
        """Raises PayloadTooLarge or Overloaded."""
        self.count(num_bytes, param)
        self._hold(num_bytes)
