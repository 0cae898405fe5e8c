"""A whole cluster in one process: the real stages, real gRPC on loopback and real shared memory, plus what no outside
client can see: the logits. For tests, benchmarks and experiments."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.router.chat_request import ChatRequest as ApiRequest
from services.router.chat_request import SamplingOptions
from services.router.feeds import Feeds
from services.router.image_header import read_image_header
from services.router.media import Media
from services.router.pipeline import Batch, Done, Pipeline
from services.router.planner import Planner, SamplingDefaults
from services.router.queue import AdmissionQueue
from services.router.tasks import unwrapped_group
from triptych.core.clock import SystemClock
from triptych.core.ids import AttemptRef, new_request_id
from triptych.core.plan import FinishReason, Plan, Token
from triptych.core.timeline import TimelineEvent
from triptych.core.tls_files import TlsFiles
from triptych.core.topology import kinds_of
from triptych.core.worker import Role
from triptych.model.adapters.base import Adapter
from triptych.model.registry import adapter_for
from triptych.registry.runtime import RuntimeFolder
from triptych.registry.static import StaticRegistry
from triptych.rpc.client import ChannelPool
from triptych.rpc.tls import load_tls
from triptych.stages.settings import LanguageSettings, VisionSettings, WorkerSettings
from triptych.stages.worker import Worker, WorkerPlan
from triptych.text.messages import ChatMessage, ImagePart, TextPart
from triptych.text.tokenizer import ChatTokenizer
from triptych.transport.device import Driver
from triptych.transport.nixl_api import NixlDriver

Topology = str
"""`e-p-d`, `e-pd`, `p-d`, `mono`, or several joined by `+`; `core/topology.py` has them."""

MAX_PIXELS = 100_000_000
TIMEOUT_S = 120.0
NO_OPTIONS = SamplingOptions()


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A conversation with `{"type": "image"}` parts for pictures, whose encoded bytes are `media`, in order."""

    messages: Sequence[Mapping[str, Any]]
    media: tuple[bytes, ...] = ()
    max_tokens: int = 32
    stop_token_ids: frozenset[int] = frozenset()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    options: SamplingOptions = NO_OPTIONS


@dataclass(frozen=True, slots=True)
class ChatResult:
    """What came back: `tokens`, and their ids alone. `logits` is float32 (tokens, vocabulary), row i the one that token
    i was chosen from; empty unless captured."""

    token_ids: list[int]
    logits: npt.NDArray[np.float32]
    cached_tokens: int
    finish_reason: FinishReason
    timeline: tuple[TimelineEvent, ...]
    tokens: tuple[Token, ...] = ()


class LogitsTap:
    """Collects logits by request, from whichever engine sampled."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[int, npt.NDArray[np.float32]]] = defaultdict(dict)

    def __call__(self, ref: AttemptRef, index: int, logits: torch.Tensor) -> None:
        self._rows[ref.request_id][index] = logits.detach().float().cpu().numpy().copy()

    def take(self, request_id: str, count: int) -> npt.NDArray[np.float32]:
        rows = self._rows.pop(request_id, {})
        return np.stack([rows[index] for index in range(count)]) if rows else np.zeros((0, 0), dtype=np.float32)


class InProcessCluster:
    """Owner of its workers, a temporary runtime folder and the router's pipeline. An async context manager.

    The counts are those of `triptych up`: `num_prefills` also counts `pd` and `ep` workers. `driver_of` gives a worker,
    by its id, a device that is none (`fake_device.py`), `nixl` all of them a network (`fake_nixl.py`). Unlike there,
    what is given back is poisoned (`triptych/stages/poison.py`).
    """

    def __init__(
        self,
        model_dir: Path,
        topology: Topology = "e-p-d",
        *,
        chunk_tokens: int = 512,
        capture_logits: bool = False,
        dtype: str = "float32",
        kv_pool_bytes: int = 64 << 20,
        host_pool_bytes: int = 64 << 20,
        landing_bytes: int = 16 << 20,
        num_prefills: int = 1,
        num_decodes: int = 1,
        num_encoders: int = 1,
        num_monos: int = 1,
        transport: str | None = None,
        tls: TlsFiles | None = None,
        driver_of: Callable[[str], Driver | None] = lambda _: None,
        poison_freed: bool = True,
        in_flight_bytes: int | None = None,
        nixl: NixlDriver | None = None,
    ) -> None:
        self.adapter: Adapter = adapter_for(Path(model_dir))
        self._tap = LogitsTap() if capture_logits else None
        self._kinds = kinds_of(topology)
        self._dtype = dtype
        self._transport = transport or "auto"
        self._tls = tls
        self._driver_of = driver_of
        self._vision = VisionSettings()
        if in_flight_bytes is not None:
            self._vision = VisionSettings(embedding_in_flight_bytes=in_flight_bytes)
        self._nixl = nixl
        self._language: dict[str, Any] = {
            "chunk_tokens": chunk_tokens,
            "kv_pool_bytes": kv_pool_bytes,
            "host_pool_bytes": host_pool_bytes,
            "landing_bytes": landing_bytes,
            "min_partial_tokens": min(64, chunk_tokens),
            "poison_freed": poison_freed,
        }
        self._counts = {
            "encoders": num_encoders,
            "prefills": num_prefills,
            "decodes": num_decodes,
            "monos": num_monos,
        }
        self._exit = AsyncExitStack()
        self.workers: list[Worker] = []

    async def __aenter__(self) -> InProcessCluster:
        folder = Path(self._exit.enter_context(tempfile.TemporaryDirectory(prefix="triptych-test-")))
        self._runtime = RuntimeFolder(folder / "run")
        for plan in self._plans():
            worker = Worker(plan, observer=self._tap, driver=self._driver_of(plan.common.worker_id), nixl=self._nixl)
            await worker.start()
            self.workers.append(worker)
            self._exit.push_async_callback(worker.stop)
        registry = StaticRegistry(self._runtime)
        registry.refresh()
        channels = ChannelPool(self._runtime.token(), load_tls(self._tls))
        self._exit.push_async_callback(channels.close)
        self.pipeline = Pipeline(registry, channels, AdmissionQueue(1024), SystemClock())
        feeds = asyncio.create_task(Feeds(registry, channels, self.pipeline.routing).run())
        self._exit.push_async_callback(_ended, feeds)
        tokenizer = ChatTokenizer(self.adapter.model_dir, self.adapter.image_placeholder_id)
        self.planner = Planner(self.adapter, tokenizer, SamplingDefaults(0.0, 1.0))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit.aclose()

    async def generate_many(self, requests: Sequence[ChatRequest], concurrency: int = 1) -> list[ChatResult]:
        """All answers, in order of the requests, at most `concurrency` at a time."""
        gate = asyncio.Semaphore(concurrency)

        async def one(request: ChatRequest) -> ChatResult:
            async with gate:
                return await self.generate(request)

        with unwrapped_group():
            async with asyncio.TaskGroup() as group:
                asked = [group.create_task(one(request)) for request in requests]
        return [task.result() for task in asked]

    async def generate(self, request: ChatRequest) -> ChatResult:
        plan, request_id = self.plan(request), new_request_id()
        tokens: list[Token] = []
        reason = FinishReason.ABORT
        async with self.pipeline.answer(plan, request.media, request_id) as answer:
            async for event in answer.events():
                if isinstance(event, Batch):
                    tokens += event.tokens
                elif isinstance(event, Done):
                    reason = event.finish_reason
            timeline, cached = tuple(answer.all_events()), answer.progress.cached_tokens
        logits = self._tap.take(request_id, len(tokens)) if self._tap else np.zeros((0, 0), dtype=np.float32)
        return ChatResult([token.id for token in tokens], logits, cached, reason, timeline, tuple(tokens))

    def plan(self, request: ChatRequest) -> Plan:
        """The router's own planner, with the request's stop tokens in place of the model's."""
        media = [Media(data, read_image_header(data, MAX_PIXELS, "media")) for data in request.media]
        messages = tuple(_message(message) for message in request.messages)
        api = ApiRequest(
            model=None,
            messages=messages,
            media=(),
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            seed=request.seed,
            stop=(),
            stream=False,
            include_usage=False,
            ignored=(),
            options=request.options,
        )
        plan = self.planner.plan(api, media, self.adapter.max_sequence_tokens, TIMEOUT_S)
        stops = request.stop_token_ids | frozenset(request.options.stop_token_ids)
        return dataclasses.replace(plan, sampling=dataclasses.replace(plan.sampling, stop_token_ids=stops))

    def clear_caches(self) -> None:
        """Empties the radix trees and the caches of embeddings. Only between requests."""
        self.clear_language_caches()
        for worker in self.workers:
            if worker.supply is not None:
                worker.supply.clear()

    def clear_language_caches(self) -> None:
        """Empties the radix trees and the caches of what has landed; encoders keep theirs. Only between requests."""
        for worker in self.workers:
            if worker.language_engine is not None:
                worker.language_engine.call(worker.language_engine.manager.clear_cache).result(10.0)
                worker.language_engine.call(worker.language_engine.landing.clear_cache).result(10.0)

    def check_integrity(self) -> None:
        """Raises AssertionError when a worker has lost a page or counts one twice."""
        for worker in self.workers:
            if worker.language_engine is not None:
                worker.language_engine.call(worker.language_engine.manager.check_integrity).result(10.0)
                worker.language_engine.call(worker.language_engine.landing.check_integrity).result(10.0)

    def _plans(self) -> list[WorkerPlan]:
        names = {f"{kind.name}-{i}": kind for kind in self._kinds for i in range(self._counts[kind.count])}
        return [self._plan_of(name, kind.roles) for name, kind in names.items()]

    def _plan_of(self, worker_id: str, roles: frozenset[Role]) -> WorkerPlan:
        vision, language = self._vision, LanguageSettings(**self._language)
        return WorkerPlan(
            self._common(worker_id),
            vision=vision if Role.ENCODER in roles else None,
            prefill=language if Role.PREFILL in roles else None,
            decode=language if Role.DECODE in roles else None,
        )

    def _common(self, worker_id: str) -> WorkerSettings:
        return WorkerSettings(
            model=self.adapter.model_dir,
            worker_id=worker_id,
            runtime_dir=self._runtime.path,
            dtype=self._dtype,
            device="cpu",
            transport=self._transport,
            tls_cert=None if self._tls is None else self._tls.cert,
            tls_key=None if self._tls is None else self._tls.key,
            tls_ca=None if self._tls is None else self._tls.ca,
        )


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _message(message: Mapping[str, Any]) -> ChatMessage:
    content = message["content"]
    if isinstance(content, str):
        return ChatMessage(message["role"], content)
    parts = [TextPart(part["text"]) if part["type"] == "text" else ImagePart() for part in content]
    return ChatMessage(message["role"], tuple(parts))
