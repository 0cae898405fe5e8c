"""A cluster of processes that fetches pictures from a server of the tests, asked by both ways, and watched."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.integration.launching import Launcher, launched
from tests.picture_server import PictureServer, body, picture_server
from tests.unit.demo_dir import demo_model_dir

READY_S = 120.0
ASK_S = 60.0
QUESTION = {"type": "text", "text": "What is it?"}


@dataclass(frozen=True, slots=True)
class Reply:
    """`told`: the tokens of an answer with their log probabilities, and those of the second best."""

    status: int
    code: str
    message: str
    headers: Mapping[str, str]
    told: tuple[tuple[str, float], ...]
    cached_tokens: int

    def is_like(self, other: Reply) -> bool:
        """The numbers of another batch, or of cached KV, may differ in their last digits."""
        same = [token for token, _ in self.told] == [token for token, _ in other.told]
        return same and all(abs(a[1] - b[1]) < 2e-3 for a, b in zip(self.told, other.told, strict=True))


@dataclass(frozen=True, slots=True)
class MediaCluster:
    url: str
    pids: Mapping[str, int]
    launcher: Launcher
    server: PictureServer

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
        async with httpx.AsyncClient(base_url=self.url, timeout=ASK_S, limits=limits, trust_env=False) as http:
            yield Client(http)

    def offer(self, path: str, data: bytes, content_type: str) -> str:
        """The address where it is to be had from now on."""
        self.server.answers[path] = body(data, content_type)
        return self.server.url(path)

    def pids_of_records(self) -> dict[str, int]:
        """Of the workers as they have announced themselves, so that one that was started again shows."""
        found = {}
        for path in sorted((self.launcher.runtime / "workers").glob("*.json")):
            match = re.search(r'"pid": *(\d+)', path.read_text())
            assert match is not None
            found[path.stem] = int(match[1])
        return found

    def media_pids(self) -> set[int]:
        """The encoder's processes that decode."""
        tasks = Path(f"/proc/{self.pids['encoder-0']}/task").iterdir()
        return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}

    def resident_bytes(self, name: str, most: bool = False) -> int:
        """Of a process now, or the most that it ever had."""
        status = Path(f"/proc/{self.pids[name]}/status").read_text()
        match = re.search(rf"{'VmHWM' if most else 'VmRSS'}:\s+(\d+) kB", status)
        assert match is not None
        return int(match[1]) * 1024

    async def metric(self, name: str) -> dict[str, float]:
        """The values of a family, by their labels."""
        async with httpx.AsyncClient(base_url=self.url, timeout=ASK_S, trust_env=False) as http:
            text = (await http.get("/metrics")).text
        rows = re.findall(rf"^{name}(\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        return {labels: float(value) for labels, value in rows}


@dataclass(frozen=True, slots=True)
class Client:
    http: httpx.AsyncClient

    async def ask(self, uri: str, salt: str, **fields: Any) -> Reply:
        """About one picture; `salt` keeps its caches apart from others'."""
        content = [{"type": "image_url", "image_url": {"url": uri}}, QUESTION]
        asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0}
        asked |= {"logprobs": True, "top_logprobs": 2, "cache_salt": salt} | fields
        return reply(await self.http.post("/v1/chat/completions", json=asked))


def reply(response: httpx.Response) -> Reply:
    found = response.json()
    if response.status_code != 200:
        error = found["error"]
        return Reply(response.status_code, error["code"], error["message"], response.headers, (), 0)
    tokens = found["choices"][0]["logprobs"]["content"]
    told = tuple((top["token"], top["logprob"]) for token in tokens for top in token["top_logprobs"])
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Reply(200, "", "", response.headers, told, cached)


def data_uri(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


@contextmanager
def media_cluster(folder: Path, **environ: str) -> Iterator[MediaCluster]:
    """One worker of each stage; the router may fetch from the server of the tests and from nowhere else here."""
    with picture_server() as server:
        allowed = {"TRIPTYCH_FETCH_ALLOW": f"127.0.0.1:{server.port}", **environ}
        flags = ("--model", str(demo_model_dir()), "--topology", "e-p-d")
        with launched(folder, *flags, environ=allowed) as launcher:
            ready = launcher.wait_ready(READY_S)
            yield MediaCluster(ready["url"], ready["pids"], launcher, server)


async def each(number: int, work: list[Any]) -> list[Any]:
    """The results of coroutines, so many at a time, in order."""
    gate = asyncio.Semaphore(number)

    async def one(coroutine: Any) -> Any:
        async with gate:
            return await coroutine

    return await asyncio.gather(*(one(coroutine) for coroutine in work))
