"""From a reference in a request to encoded bytes and their size in pixels, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

from PIL import Image

from services.router.data_uri import decode_data_uri, is_data_uri
from services.router.image_header import ImageHeader, read_image_header
from services.router.media_allowance import MediaAllowance
from services.router.tasks import unwrapped_group
from triptych.core.errors import InvalidRequest, MediaInvalid

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class MediaReference:
    """A picture as the request names it: a data URI or an address. `param` is where it stands in the request."""

    uri: str
    param: str


@dataclass(frozen=True, slots=True)
class Media:
    """Encoded bytes, unchanged, and what their header says. `caller_hash`: see `mm_hashes.py`; empty for none."""

    data: bytes
    header: ImageHeader
    caller_hash: bytes = b""


@dataclass(frozen=True, slots=True)
class MediaLimits:
    """Of one request: items, bytes of all of them, seconds of fetching; and of one item: bytes and pixels."""

    max_items: int
    max_bytes: int
    max_pixels: int
    max_request_bytes: int
    fetch_s: float


class Fetch(Protocol):
    async def __call__(self, url: str, allowance: MediaAllowance, param: str) -> bytes:
        """The body behind an http(s) address, counted while it comes. Raises MediaInvalid, PayloadTooLarge or
        Overloaded."""
        ...


class MediaReader:
    """Reads the media of requests. Blocking work runs in `executor`, whose threads bound it."""

    def __init__(self, limits: MediaLimits, executor: Executor, fetch: Fetch | None = None) -> None:
        """Without `fetch`, addresses are refused. Sets Pillow's own guard, which is global, to our limit."""
        self._limits = limits
        self._executor = executor
        self._fetch = fetch
        Image.MAX_IMAGE_PIXELS = limits.max_pixels

    async def read_all(self, references: Sequence[MediaReference], hold: Callable[[int], None]) -> list[Media]:
        """In order. `hold(n)` is told of the bytes that are fetched. Raises the first RequestError of any item, or what
        `hold` raises, and stops reading the others."""
        if len(references) > self._limits.max_items:
            raise InvalidRequest(
                f"{len(references)} pictures were sent; at most {self._limits.max_items} are taken in one request",
                param="messages",
            )
        allowance = MediaAllowance(self._limits.max_request_bytes, self._limits.fetch_s, hold)
        with unwrapped_group():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._read(reference, allowance)) for reference in references]
        return [task.result() for task in tasks]

    async def _read(self, reference: MediaReference, allowance: MediaAllowance) -> Media:
        if is_data_uri(reference.uri):
            media = await self._off_loop(self._from_data_uri, reference)
            allowance.count(len(media.data), reference.param)
            return media
        if reference.uri[:8].lower().startswith(("http://", "https://")):
            return await self._from_address(reference, allowance)
        raise MediaInvalid("image_url takes a data: URI or an http(s) URL", param=reference.param)

    def _from_data_uri(self, reference: MediaReference) -> Media:
        data = decode_data_uri(reference.uri, self._limits.max_bytes, reference.param)
        return self._inspect(data, reference.param)

    async def _from_address(self, reference: MediaReference, allowance: MediaAllowance) -> Media:
        if self._fetch is None:
            raise MediaInvalid(
                "this server does not fetch URLs; send the picture as a data: URI", param=reference.param
            )
        data = await self._fetch(reference.uri, allowance, reference.param)
        return await self._off_loop(self._inspect, data, reference.param)

    def _inspect(self, data: bytes, param: str) -> Media:
        return Media(data, read_image_header(data, self._limits.max_pixels, param))

    async def _off_loop(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: work(*args, **kwargs))
