"""A worker process put together: whatever roles it has, one server, one registry record, one way to stop.

`services/*` run one of these per process; tests run several in one.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from triptych.core.cache_feed import Holding, WorkerLoad, number_of
from triptych.core.clock import Clock, SystemClock
from triptych.core.errors import StartupError
from triptych.core.ids import WorkerRef, new_epoch
from triptych.core.kv_format import KvDtype, KvTerms, PageFormat
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.engine.encoder import EncodeEngine
from triptych.engine.loop import LanguageEngine, LogitsObserver
from triptych.kv.grants import GrantTable
from triptych.kv.journal import Journal
from triptych.kv.pages import PageLayout
from triptych.kv.pool import PoolPages, PoolShape, copy_pages, view_pool
from triptych.media.pool import MediaPool
from triptych.model.adapters.base import Adapter
from triptych.model.registry import adapter_for
from triptych.obs import metrics
from triptych.registry.runtime import RuntimeFolder
from triptych.registry.static import StaticRegistry
from triptych.rpc.client import ChannelPool, transfer_stub
from triptych.rpc.line_frames import Method
from triptych.rpc.line_server import LineMethod, generate_method, prefill_method, serve_lines
from triptych.rpc.server import RpcServer, add_describe
from triptych.rpc.tls import ClusterTls, load_tls, tell_of_the_end
from triptych.stages.data_port import open_control_port, open_data_port, open_line_port
from triptych.stages.decode import DecodeParts, DecodeStage
from triptych.stages.device_memory import is_device_only, offers_device, open_driver, without_device
from triptych.stages.embeddings import EmbeddingSupply
from triptych.stages.encode_room import EncodeRoom
from triptych.stages.encoder import EncoderStage
from triptych.stages.feed import FeedStage
from triptych.stages.landing import EmbeddingLanding
from triptych.stages.language import ComputeChoice, build_engine, choose_compute, pool_shape
from triptych.stages.links import RegistryLinks, tend_peers
from triptych.stages.media import check_filter, media_limits
from triptych.stages.nixl_library import offers_nixl, open_nixl, without_nixl
from triptych.stages.poison import poisoned_slots
from triptych.stages.prefill import PrefillParts, PrefillStage
from triptych.stages.settings import LanguageSettings, VisionSettings, WorkerSettings
from triptych.stages.tasks import Background
from triptych.transport.curve import CurveKeys
from triptych.transport.device import Driver
from triptych.transport.device_arena import DeviceArena
from triptych.transport.layout import embedding_layout_fingerprint, host_id, kv_layout_fingerprint
from triptych.transport.link_pool import LinkPool
from triptych.transport.names import SHM, TRANSPORT_CHOICES
from triptych.transport.nixl_api import NixlDriver
from triptych.transport.receiver import Receivers
from triptych.transport.servicer import TransferServicer
from triptych.transport.shm import SharedSegment
from triptych.transport.slots import SlotAllocator
from triptych.transport.types import Arena, ArenaKind, Endpoint
from triptych.wire.v1 import decode_pb2_grpc, encoder_pb2_grpc, feed_pb2_grpc, prefill_pb2_grpc, transfer_pb2_grpc

log = logging.getLogger(__name__)

# On a CPU larger passes are no faster (12 ms for 256 patches alone, 12 ms each in fours, 16 ms each in sixty-fours, of
# the bundled tower on one core), and a small one lets others have the core sooner.
AUTO_BATCH_PATCHES = {"cpu": 1024, "cuda": 16384}
# Of pictures fetched or decoded while others are in the tower: enough that it never waits for them.
ROOM_PASSES = 4

# Together well under the time that a launcher or an orchestrator waits before it kills.
STOP_GRACE_S = 3.0
BACKGROUND_GRACE_S = 1.5
ENGINE_GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What to run: roles with their settings. Prefill and decode in one process share one engine and one pool.
    `takes_media`: whether prompts may hold anything besides text."""

    common: WorkerSettings
    vision: VisionSettings | None = None
    prefill: LanguageSettings | None = None
    decode: LanguageSettings | None = None
    takes_media: bool = True

    def for_model(self, adapter: Adapter) -> WorkerPlan:
        """What is left of it for a model: of one of text alone, no tower and no room for embeddings.

        Raises StartupError when that is nothing."""
        if adapter.modalities:
            return self
        if self.language is None:
            raise StartupError(f"{adapter.model_name} takes text only and needs no encoder; use --topology mono or p-d")
        return replace(self, vision=None, takes_media=False)

    @property
    def roles(self) -> frozenset[Role]:
        parts = ((Role.ENCODER, self.vision), (Role.PREFILL, self.prefill), (Role.DECODE, self.decode))
        return frozenset(role for role, settings in parts if settings is not None)

    @property
    def language(self) -> LanguageSettings | None:
        return self.prefill or self.decode

    @property
    def decodes_locally(self) -> bool:
        """Whether what it decodes was prefilled in this process, always: then the answer's room is reserved with the
        prompt's, and no other process writes to the pool."""
        return self.prefill is not None and self.decode is not None

    @property
    def lands_embeddings_of_others(self) -> bool:
        """Whether encoders in other processes write to its landing arena. A prefill worker with a vision tower of its
        own is sent no pictures by others."""
        return self.prefill is not None and self.vision is None and self.takes_media

    @property
    def lands_kv_of_others(self) -> bool:
        return self.decode is not None and not self.decodes_locally


class _Engine(Protocol):
    def start(self) -> None: ...
    def stop(self, timeout_s: float) -> None: ...
    def is_progressing(self) -> bool: ...


class Worker:
    """Owner of everything that one worker holds; `stop` gives it all back.

    `driver` and `nixl` are for tests: a device and a network that are none.
    Raises StartupError from `start` when settings, model or machine cannot work.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        observer: LogitsObserver | None = None,
        clock: Clock | None = None,
        driver: Driver | None = None,
        nixl: NixlDriver | None = None,
    ) -> None:
        self._nixl = nixl
        self._plan = plan
        self._observer = observer
        self._clock = clock or SystemClock()
        self._driver = driver
        self._exit = AsyncExitStack()
        self._background = Background()
        self._engines: list[_Engine] = []
        self._line_methods: dict[int, LineMethod] = {}
        self.ref = WorkerRef(plan.common.worker_id, new_epoch())
        self._journal = Journal(self.ref.epoch)
        self._transfer: TransferServicer | None = None
        self.media_pool: MediaPool | None = None
        self.supply: EmbeddingSupply | None = None
        self.language_engine: LanguageEngine | None = None
        self.landing: EmbeddingLanding | None = None
        self.decode_stage: DecodeStage | None = None
        self.link_pool: LinkPool | None = None
        self.info: WorkerInfo | None = None

    async def start(self) -> None:
        """Loads, listens, and appears in the registry as READY."""
        common = self._plan.common
        self._tls: ClusterTls | None = load_tls(common.tls_files)
        folder = RuntimeFolder(common.runtime_dir)
        self._registry = StaticRegistry(folder)
        compute = choose_compute(common.device, common.dtype)
        self._exit.callback(_gauges_at_rest)
        for part in ("vision", "language"):
            metrics.MODEL_PARAMETERS.labels(part).set(0)
        if common.threads:
            torch.set_num_threads(common.threads)
        adapter = await asyncio.to_thread(adapter_for, common.model)
        self._plan = self._plan.for_model(adapter)
        token = folder.token()
        self._server = RpcServer(
            common.host,
            common.port,
            token=token,
            tls=self._tls,
            insecure_network=common.insecure_network,
            progress=lambda: all(engine.is_progressing() for engine in self._engines),
        )
        try:
            self._channels = ChannelPool(token, self._tls)
            await self._build(adapter, compute, self._channels)
            await self._open(adapter)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Drains: out of the registry first, then calls, engines, links and memory, in that order. Idempotent."""
        self._registry.withdraw()
        if self._transfer is not None:
            await self._transfer.close()
        await self._server.stop(STOP_GRACE_S)
        await self._background.close(BACKGROUND_GRACE_S)
        await self._exit.aclose()

    # -- assembly ----------------------------------------------------------------------------------------------------

    async def _build(self, adapter: Adapter, compute: ComputeChoice, channels: ChannelPool) -> None:
        receivers = Receivers()
        self._transports, data_port, control_port = TRANSPORT_CHOICES[self._plan.common.transport], None, None
        if self._plan.lands_embeddings_of_others or self._plan.lands_kv_of_others:
            self._transports, data_port = await open_data_port(self._plan.common, self._exit)
            control_port = await open_control_port(self._plan.common, self._transports, self._exit)
        self._choose_driver(compute)
        await self._choose_nixl()
        endpoint, self._kv = Endpoint(self.ref, host_id(), self._transports), self._kv_terms(compute)
        vision = self._plan.vision or VisionSettings()
        pool = self.link_pool = LinkPool(
            endpoint,
            partial(transfer_stub, channels),
            receivers,
            strict=self._plan.common.strict,
            new_keys=_no_keys if self._tls is None else CurveKeys.make,
            driver=self._driver,
            kv=self._kv,
            in_flight_bytes=vision.embedding_in_flight_bytes,
            nixl=self._nixl,
        )
        language, kv = self._plan.language, adapter.kv_shape
        links = self._links = RegistryLinks(
            self._registry,
            pool,
            embedding_layout_fingerprint(
                compute.dtype_name, adapter.hidden_size, 1 + adapter.num_embedding_levels, adapter.fingerprint
            ),
            kv_layout_fingerprint(kv.num_layers, kv.num_kv_heads, kv.head_dim, adapter.fingerprint),
        )
        self._exit.push_async_callback(channels.close)
        if language is not None:
            await self._build_language(adapter, compute, language, links, receivers)
        if self._plan.vision is not None:
            await self._build_vision(adapter, compute, self._plan.vision, links)
        self._exit.push_async_callback(pool.close)
        self._transfer = TransferServicer(endpoint, receivers, data_port, nixl=self._nixl, control_port=control_port)
        self._server.add(transfer_pb2_grpc.add_TransferServicer_to_server, self._transfer)

    def _kv_terms(self, compute: ComputeChoice) -> KvTerms | None:
        """None without a pool."""
        language = self._plan.language
        if language is None:
            return None
        may_narrow = language.allow_kv_narrowing and not self._plan.common.strict
        return KvTerms(PageFormat(language.page_tokens, KvDtype(compute.dtype_name)), may_narrow)

    def _choose_driver(self, compute: ComputeChoice) -> None:
        """A worker with a driver offers device memory, and no other does."""
        if not offers_device(self._plan.common):
            self._driver = None
        elif self._driver is None:
            self._driver = open_driver(self._plan.common, compute)
        if self._driver is None:
            self._transports = without_device(self._transports)

    async def _choose_nixl(self) -> None:
        if not offers_nixl(self._plan.common):
            self._nixl = None
        elif self._nixl is None:
            self._nixl = await asyncio.to_thread(open_nixl, self._plan.common)
        if self._nixl is None:
            self._transports = without_nixl(self._transports)

    async def _build_vision(
        self, adapter: Adapter, compute: ComputeChoice, settings: VisionSettings, links: RegistryLinks
    ) -> None:
        limits = media_limits(settings)
        if self._plan.common.strict:
            await asyncio.to_thread(check_filter, limits.confinement)
        pictures = self.media_pool = MediaPool(limits, self._clock)
        self._run_engine(pictures)
        part = await asyncio.to_thread(adapter.load_vision, compute.dtype, compute.device)
        metrics.MODEL_PARAMETERS.labels("vision").set(part.num_parameters)
        max_patches = settings.max_batch_patches or AUTO_BATCH_PATCHES.get(compute.device.type, 16384)
        engine = EncodeEngine(part, max_patches, settings.max_batch_items, self._clock)
        self.supply = EmbeddingSupply(
            engine,
            pictures,
            lambda width_px, height_px: adapter.image_layout(width_px, height_px).grid,
            settings.embedding_cache_bytes,
            EncodeRoom(ROOM_PASSES * max_patches, self._clock),
            self._clock,
            self._tell_encoded,
        )
        self._run_engine(engine)
        stage = EncoderStage(
            self.supply, adapter, self.ref, links, self._clock, self._background, settings.max_media_bytes
        )
        self._server.add(encoder_pb2_grpc.add_EncoderServicer_to_server, stage)

    async def _build_language(
        self,
        adapter: Adapter,
        compute: ComputeChoice,
        settings: LanguageSettings,
        links: RegistryLinks,
        receivers: Receivers,
    ) -> None:
        self._shape = pool_shape(adapter, settings, compute.dtype)
        tensor, kv_arena = self._make_pool(self._shape, compute, links.kv_layout)
        arena = self._make_landing(settings, links) if self._plan.prefill is not None else None
        spoil = None
        if (
            settings.poison_freed and arena is not None and arena.buffer.nbytes
        ):  # memory of a device alone is left as is
            spoil = poisoned_slots(arena.buffer)
        slots = SlotAllocator(settings.landing_bytes, on_free=spoil)
        stage_name = "prefill" if self._plan.prefill is not None else "decode"
        engine = await asyncio.to_thread(
            build_engine,
            adapter,
            settings,
            compute,
            tensor,
            slots,
            self._clock,
            stage_name,
            self._observer,
            self._journal,
        )
        self.language_engine = engine
        self._run_engine(engine)
        if self._plan.decode is not None:
            self.decode_stage = self._build_decode(adapter, engine, compute, tensor, kv_arena, receivers)
        if arena is not None:
            landing = self.landing = EmbeddingLanding(engine, arena, compute.dtype)
            receivers.embedding = landing
            local = self.decode_stage
            parts = PrefillParts(
                engine, adapter, self.ref, PoolPages(tensor), landing, links, self._clock, self._background, local
            )
            prefill_stage = PrefillStage(parts)
            self._server.add(prefill_pb2_grpc.add_PrefillServicer_to_server, prefill_stage)
            self._line_methods[Method.PREFILL] = prefill_method(prefill_stage)

    def _build_decode(
        self,
        adapter: Adapter,
        engine: LanguageEngine,
        compute: ComputeChoice,
        tensor: torch.Tensor,
        arena: Arena | None,
        receivers: Receivers,
    ) -> DecodeStage:
        land_pages = None
        if arena is not None and arena.buffer.nbytes and (arena.device or not _is_host_memory(compute)):
            mirror = view_pool(arena.buffer, self._shape, compute.dtype)
            land_pages = partial(_land_pages, mirror, tensor)
        grants = GrantTable(self.ref, engine.manager)
        is_local = self._plan.decodes_locally
        stage = DecodeStage(
            DecodeParts(engine, adapter, self.ref, grants, self._clock, self._background, is_local, arena, land_pages)
        )
        if arena is not None:
            receivers.kv = stage
        self._server.add(decode_pb2_grpc.add_DecodeServicer_to_server, stage)
        self._line_methods[Method.GENERATE] = generate_method(stage)
        return stage

    def _make_pool(self, shape: PoolShape, compute: ComputeChoice, layout: bytes) -> tuple[torch.Tensor, Arena | None]:
        """The pool tensor, and where others write KV the arena for it: its device memory is the pool itself, its host
        memory the pool itself on a CPU and else a mirror of it."""
        if not self._plan.lands_kv_of_others:
            return _new_pool(shape, compute), None
        arena = self._open_arena(
            ArenaKind.KV, layout, shape.pool_bytes(compute.dtype), "--kv-pool-bytes", shape.layout(compute.dtype)
        )
        arena = replace(arena, may_narrow=self._kv is not None and self._kv.may_narrow)
        if arena.device is not None:
            return arena.device.tensor.view(compute.dtype).view(shape.dims), arena
        if _is_host_memory(compute):
            return view_pool(arena.buffer, shape, compute.dtype), arena
        return _new_pool(shape, compute), arena

    def _make_landing(self, settings: LanguageSettings, links: RegistryLinks) -> Arena:
        if not self._plan.lands_embeddings_of_others:
            with _enough_memory("--landing-bytes", settings.landing_bytes):
                buffer = memoryview(bytearray(settings.landing_bytes))
            return Arena(ArenaKind.EMBEDDING, links.embedding_layout, buffer)
        return self._open_arena(ArenaKind.EMBEDDING, links.embedding_layout, settings.landing_bytes, "--landing-bytes")

    def _open_arena(
        self, kind: ArenaKind, layout: bytes, num_bytes: int, flag: str, pages: PageLayout | None = None
    ) -> Arena:
        """Memory that other processes write to: of the device where there is one, and of the host unless that is all
        they may use; the latter shared unless they may only send frames."""
        device = self._open_device(num_bytes, flag)
        if device is not None and is_device_only(self._transports):
            return replace(Arena.unshared(kind, layout, memoryview(b""), pages), device=device)
        return replace(self._open_host_arena(kind, layout, num_bytes, flag, pages), device=device)

    def _open_device(self, num_bytes: int, flag: str) -> DeviceArena | None:
        if self._driver is None:
            return None
        device = DeviceArena.create(self._driver, num_bytes, flag)
        self._exit.push_async_callback(device.close)
        return device

    def _open_host_arena(
        self, kind: ArenaKind, layout: bytes, num_bytes: int, flag: str, pages: PageLayout | None
    ) -> Arena:
        if SHM not in self._transports:
            with _enough_memory(flag, num_bytes):
                return Arena.unshared(kind, layout, memoryview(bytearray(num_bytes)), pages)
        segment = SharedSegment.create(num_bytes, "kv" if kind is ArenaKind.KV else "landing")
        self._exit.callback(segment.close)
        return Arena.shared(kind, layout, segment, pages)

    def _run_engine(self, engine: _Engine) -> None:
        self._engines.append(engine)
        engine.start()
        self._exit.push_async_callback(asyncio.to_thread, engine.stop, ENGINE_GRACE_S)

    async def _offer_lines(self) -> None:
        """To routers of this host, for the stages that they call with every request. Encoders take megabytes by calls
        of their own, which nobody else's tokens wait behind."""
        if not self._line_methods:
            return
        port = await open_line_port(self._plan.common, self._exit)
        if port is not None:
            serve_lines(self._server, port, self._line_methods)

    async def _open(self, adapter: Adapter) -> None:
        common = self._plan.common
        assert self.link_pool is not None, "it was built"
        await self._offer_lines()
        add_describe(self._server, self._describe)
        feed = FeedStage(self._journal, self._load)
        self._server.add(feed_pb2_grpc.add_CacheFeedServicer_to_server, feed)
        port = await self._server.start()
        https = None if self._tls is None else self._tls.https
        metrics_port = metrics.serve_metrics(common.host, common.metrics_port, https)
        beside_it = {
            "registry": self._registry.run(),
            "feed": feed.run(),
            "peers": tend_peers(self._registry, self.link_pool, self._channels),
            "tls-end": tell_of_the_end(self._tls),
        }
        for name, beside in beside_it.items():
            self._exit.callback(asyncio.create_task(beside, name=name).cancel)
        language = self._plan.language
        self.info = WorkerInfo(
            worker_id=self.ref.worker_id,
            epoch=self.ref.epoch,
            roles=self._plan.roles,
            state=WorkerState.READY,
            grpc_address=f"{common.host}:{port}",
            metrics_address=f"{common.host}:{metrics_port}",
            model_name=adapter.model_name,
            model_fingerprint=adapter.fingerprint,
            host_id=host_id(),
            transports=self._transports,
            pid=os.getpid(),
            num_pages=self._shape.num_pages if language is not None else 0,
            page_tokens=self._kv.pages.page_tokens if self._kv is not None else 0,
            max_sequence_tokens=adapter.max_sequence_tokens if language is not None else 0,
            parameter_counts=self._parameter_counts(),
            kv_layout=self._links.kv_layout if language is not None else b"",
            embedding_layout=self._links.embedding_layout,
            kv_dtype=self._kv.pages.dtype if self._kv is not None else None,
            may_narrow_kv=self._kv is not None and self._kv.may_narrow,
            speaks_tls=self._tls is not None,
        )
        await self._server.set_serving(True)
        self._registry.announce(self.info)
        log.info("ready", extra={"worker_id": self.ref.worker_id, "port": port, "metrics_port": metrics_port})

    def _load(self) -> WorkerLoad:
        """What routers are told, of all that this process does."""
        engine, supply = self.language_engine, self.supply
        load = WorkerLoad() if engine is None else engine.load
        if supply is None:
            return load
        return replace(load, waiting_patches=supply.waiting_patches, patches_per_s=supply.patches_per_s)

    def _tell_encoded(self, identity: bytes, is_cached: bool) -> None:
        tell = self._journal.stored if is_cached else self._journal.removed
        tell(Holding.ENCODED, number_of(identity))

    def _parameter_counts(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        if self.language_engine is not None:
            counts["language"] = self.language_engine.num_parameters
        if self.supply is not None:
            counts["vision"] = self.supply.num_parameters
        return counts

    def _describe(self) -> WorkerInfo:
        assert self.info is not None
        return self.info


def _no_keys() -> None:
    """For links that encrypt nothing."""


def _gauges_at_rest() -> None:
    """What is shown of a worker's life as a whole; its engines see to what they show."""
    metrics.EMBEDDING_CACHE_BYTES.set(0)
    for part in ("vision", "language"):
        metrics.MODEL_PARAMETERS.labels(part).set(0)


def _is_host_memory(compute: ComputeChoice) -> bool:
    """Whether the pool that is computed with can itself be the arena that others write to."""
    return compute.device.type == "cpu"


def _new_pool(shape: PoolShape, compute: ComputeChoice) -> torch.Tensor:
    with _enough_memory("--kv-pool-bytes", shape.pool_bytes(compute.dtype)):
        return torch.zeros(shape.dims, dtype=compute.dtype, device=compute.device)


@contextmanager
def _enough_memory(flag: str, num_bytes: int) -> Iterator[None]:
    """torch says RuntimeError when there is none, Python MemoryError."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        raise StartupError(f"there is no memory for the {num_bytes} bytes of {flag}; ask for less") from error


def _land_pages(mirror: torch.Tensor, pool: torch.Tensor, pages: list[int]) -> None:
    copy_pages(mirror, pages, pool, pages)
