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
    """Encoded bytes, unchanged, and what their header says."""

    data: bytes
    header: ImageHeader


@dataclass(frozen=True, slots=True)
class MediaLimits:
    max_items: int
    max_bytes: int
    max_pixels: int


class Fetch(Protocol):
    async def __call__(self, url: str, param: str) -> bytes:
        """The body behind an http(s) address. Raises MediaInvalid or PayloadTooLarge."""
        ...


class MediaReader:
    """Reads the media of requests. Blocking work runs in `executor`, whose threads bound it."""

    def __init__(self, limits: MediaLimits, executor: Executor, fetch: Fetch | None = None) -> None:
        """Without `fetch`, addresses are refused. Sets Pillow's own guard, which is global, to our limit."""
        self._limits = limits
        self._executor = executor
        self._fetch = fetch
        Image.MAX_IMAGE_PIXELS = limits.max_pixels

    async def read_all(self, references: Sequence[MediaReference]) -> list[Media]:
        """In order. Raises the first RequestError of any item and stops reading the others."""
        if len(references) > self._limits.max_items:
            raise InvalidRequest(
                f"{len(references)} pictures were sent; at most {self._limits.max_items} are taken in one request",
                param="messages",
            )
        with unwrapped_group():
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._read(reference)) for reference in references]
        return [task.result() for task in tasks]

    async def _read(self, reference: MediaReference) -> Media:
        if is_data_uri(reference.uri):
            return await self._off_loop(self._from_data_uri, reference)
        if reference.uri[:8].lower().startswith(("http://", "https://")):
            return await self._from_address(reference)
        raise MediaInvalid("image_url takes a data: URI or an http(s) URL", param=reference.param)

    def _from_data_uri(self, reference: MediaReference) -> Media:
        data = decode_data_uri(reference.uri, self._limits.max_bytes, reference.param)
        return self._inspect(data, reference.param)

    async def _from_address(self, reference: MediaReference) -> Media:
        if self._fetch is None:
            raise MediaInvalid(
                "this server does not fetch URLs; send the picture as a data: URI, "
                "or start the router with --allow-url-fetch (triptych up: with TRIPTYCH_ALLOW_URL_FETCH=true)",
                param=reference.param,
            )
        data = await self._fetch(reference.uri, reference.param)
        return await self._off_loop(self._inspect, data, reference.param)

    def _inspect(self, data: bytes, param: str) -> Media:
        return Media(data, read_image_header(data, self._limits.max_pixels, param))

    async def _off_loop(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: work(*args, **kwargs))
