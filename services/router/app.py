"""Composition root: settings to running parts, and their orderly end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import warnings
from collections.abc import AsyncIterator, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import FrameType

import orjson
import uvicorn
from fastapi import FastAPI
from PIL import Image

from services.router.admission.door import Door, Failures, LocalFailures
from services.router.admission.key_file import is_open_to_others, load_keyring
from services.router.admission.keyring import Keyring
from services.router.admission.meter import LocalMeter, Meter
from services.router.admission.shared_meter import SharedFailures, SharedMeter
from services.router.admission.shared_state import connect
from services.router.byte_budget import ByteBudget
from services.router.chat_service import ChatLimits, ChatService
from services.router.drain import Drain
from services.router.feeds import Feeds
from services.router.fetch import FetchLimits, UrlFetcher
from services.router.fetch_rules import FetchRules
from services.router.headers import HttpProtocol
from services.router.listener import inherited, listen
from services.router.loop_lag import watch_loop_lag
from services.router.media import MediaLimits, MediaReader
from services.router.openai_api import build_api
from services.router.pipeline import Pipeline, Workers
from services.router.placement import ClusterView
from services.router.planner import Planner, SamplingDefaults
from services.router.queue import AdmissionQueue
from services.router.reach import ReachableWorkers
from services.router.resolver import Resolver
from services.router.routing.routing import Routing
from services.router.settings import RouterSettings, share_of
from services.router.supervisor import tell_of_listening
from services.router.tasks import owned_task, unwrapped_group
from triptych.core.clock import Clock, SystemClock
from triptych.core.ids import WorkerRef
from triptych.core.ready_file import check_ready_file, write_ready_file
from triptych.core.worker import Role, WorkerInfo
from triptych.model.adapters.base import Adapter
from triptych.model.registry import adapter_for
from triptych.registry.runtime import RuntimeFolder
from triptych.registry.static import StaticRegistry
from triptych.rpc.client import ChannelPool
from triptych.rpc.line_client import LinedChannels
from triptych.rpc.tls import load_tls, tell_of_the_end
from triptych.text.detokenizer import IncrementalDetokenizer
from triptych.text.token_bytes import TokenBytes
from triptych.text.tokenizer import ChatTokenizer
from triptych.transport.layout import host_id

# Threads for what would block the event loop: base64, headers, hashing, tokenizing.
WORK_THREADS = 4
# What is left of connections after the requests have ended, or had their time.
SHUTDOWN_GRACE_S = 5
# Who wraps a command may pass a signal on both to it and to its group: that is one wish, told twice.
ECHO_S = 0.5

_log = logging.getLogger(__name__)


class Model:
    """What the router knows of the model: its adapter's pure half, its tokenizer, its defaults."""

    def __init__(self, model_dir: Path) -> None:
        self.adapter: Adapter = adapter_for(model_dir)
        self.tokenizer = ChatTokenizer(model_dir, self.adapter.image_placeholder_id)
        self.tokenizer.check_fits(self.adapter.vocab_size)
        self.planner = Planner(self.adapter, self.tokenizer, SamplingDefaults.from_model(model_dir))
        self.token_bytes = TokenBytes(self.tokenizer.tokenizer)

    def new_detokenizer(self) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self.tokenizer.tokenizer)


class Cluster:
    """The registry as this router's model sees it."""

    def __init__(self, registry: Workers, adapter: Adapter) -> None:
        self.registry = registry
        self.routing = Routing()
        self._adapter = adapter
        self._strangers: set[WorkerRef] = set()

    def view(self) -> ClusterView:
        return ClusterView.of(self.registry.workers(), self._adapter.fingerprint)

    def missing_roles(self) -> tuple[Role, ...]:
        """A model of text alone needs no encoder."""
        missing = self.view().missing_roles()
        return tuple(role for role in missing if role is not Role.ENCODER or self._adapter.modalities)

    def warn_of_strangers(self, workers: Iterable[WorkerInfo]) -> None:
        """Logs each worker whose weights are not this router's model: it gets no request, which else only looks like a
        stage that is missing."""
        for worker in workers:
            if worker.model_fingerprint not in (b"", self._adapter.fingerprint) and worker.ref not in self._strangers:
                self._strangers.add(worker.ref)
                _log.warning(
                    "a worker serves other weights than the router and gets no requests; restart it with this model",
                    extra={"worker_id": worker.worker_id, "model": worker.model_name},
                )

    def context_tokens(self) -> int:
        return self.view().context_tokens(self._adapter.max_sequence_tokens)


@asynccontextmanager
async def router_app(
    settings: RouterSettings, model: Model, cluster: Cluster, channels: ChannelPool, drain: Drain | None = None
) -> AsyncIterator[FastAPI]:
    """The ASGI application; closes what it owns when the block ends. Raises StartupError."""
    clock = SystemClock()
    keyring = _keyring(settings)
    max_queue = share_of(settings.max_queue, settings.workers)
    async with _reading(settings) as (reader, executor), _counting(settings, clock) as (meter, failures):
        door = Door(keyring, failures) if keyring else None
        chat = ChatService(
            model_name=model.adapter.model_name,
            modalities=model.adapter.modalities,
            limits=ChatLimits(settings.max_body_bytes, settings.request_timeout_s, settings.strict),
            reader=reader,
            planner=model.planner,
            pipeline=Pipeline(cluster.registry, channels, AdmissionQueue(max_queue), clock, cluster.routing),
            executor=executor,
            clock=clock,
            new_detokenizer=model.new_detokenizer,
            token_bytes=model.token_bytes,
            context_tokens=cluster.context_tokens,
        )
        budget = ByteBudget(share_of(settings.max_held_bytes, settings.workers))
        yield build_api(chat, cluster.missing_roles, budget, door, meter, drain)


@asynccontextmanager
async def _reading(settings: RouterSettings) -> AsyncIterator[tuple[MediaReader, Executor]]:
    """What reads media, and the threads in which it does. Raises StartupError for a list that names no places."""
    limits = MediaLimits(
        max_items=settings.max_media_items,
        max_bytes=settings.max_media_bytes,
        max_pixels=settings.max_pixels,
        max_request_bytes=settings.max_request_media_bytes,
        fetch_s=settings.fetch_request_timeout_s,
    )
    rules = FetchRules.parse(settings.fetch_only, settings.fetch_allow, settings.fetch_deny)
    resolver = Resolver()
    fetcher = UrlFetcher(rules, FetchLimits(settings.max_media_bytes, settings.fetch_timeout_s), resolver)
    try:
        with _work_threads() as executor:
            yield MediaReader(limits, executor, fetcher if settings.allow_url_fetch else None), executor
    finally:
        await fetcher.close()
        resolver.close()


@asynccontextmanager
async def _counting(settings: RouterSettings, clock: Clock) -> AsyncIterator[tuple[Meter, Failures]]:
    """Where limits are kept: in this process, or in a Redis for all routers. Raises StartupError."""
    meter = LocalMeter(clock, settings.workers)
    failures = LocalFailures(share_of(settings.failed_keys_per_minute, settings.workers), clock)
    if settings.redis_url is None:
        yield meter, failures
        return
    state = connect(settings.redis_url, settings.redis_password_file, settings.redis_ca, settings.redis_timeout_s)
    prefix = settings.redis_prefix
    shared = SharedMeter(state, meter, prefix)
    try:
        async with owned_task(state.probe_forever()), owned_task(shared.renew_forever(state.came_back)):
            yield shared, SharedFailures(state, failures, prefix, settings.failed_keys_per_minute)
    finally:
        state.close()


def _keyring(settings: RouterSettings) -> Keyring | None:
    """Raises StartupError."""
    path = settings.api_keys_file
    keyring = load_keyring(path, settings.api_keys)
    if path is not None and is_open_to_others(path):
        _log.warning("every user of this machine can read the keys file; chmod o-r it", extra={"file": path.name})
    if keyring is not None:
        _log.info("callers need an API key", extra={"num_tenants": len(keyring.tenants)})
    return keyring


async def serve(settings: RouterSettings) -> None:
    """Until SIGINT or SIGTERM, and then until the requests under way have ended. Raises StartupError."""
    # Pillow warns of each oddity in metadata, and anybody may send a million of them.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    # Beyond our own limit a picture is refused, so Pillow's softer warning must not pass silently.
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    if settings.ready_file is not None:
        check_ready_file(settings.ready_file)
    tls = load_tls(settings.tls_files)
    model = Model(settings.model)
    folder = RuntimeFolder(settings.runtime_dir)
    registry, channels = StaticRegistry(folder), LinedChannels(folder.token(), tls, host_id())
    reachable = ReachableWorkers(registry, channels, tls)
    cluster = Cluster(reachable, model.adapter)
    with _listener(settings) as listener, unwrapped_group():
        drain = Drain()
        async with router_app(settings, model, cluster, channels, drain) as app:
            server = _Server(
                drain,
                uvicorn.Config(
                    app,
                    http=HttpProtocol,
                    log_config=None,
                    access_log=False,
                    # What a header says of the caller's address anybody on this machine could say.
                    proxy_headers=False,
                    server_header=False,
                    timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
                ),
            )
            async with asyncio.TaskGroup() as group:
                beside = [
                    group.create_task(watch_loop_lag()),
                    group.create_task(registry.run()),
                    group.create_task(tell_of_the_end(tls)),
                    group.create_task(_tend_workers(registry, cluster, channels)),
                    group.create_task(reachable.run(registry)),
                    group.create_task(Feeds(reachable, channels, cluster.routing).run()),
                    group.create_task(_announce(settings, server, cluster, reachable, listener)),
                    group.create_task(_stop_when_drained(server, drain, settings.drain_timeout_s)),
                ]
                await server.serve(sockets=[listener])
                for task in beside:
                    task.cancel()
        await channels.close()


class _Server(uvicorn.Server):
    """The first signal begins to drain, a later one ends the server. It ends quietly, where uvicorn would raise the
    signal again and skip our own cleaning up."""

    def __init__(self, drain: Drain, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self._drain = drain
        self._stop_at_s = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        now_s = asyncio.get_running_loop().time()
        if not self._drain.has_begun:
            self._stop_at_s = now_s
            self._drain.begin()
        elif now_s - self._stop_at_s >= ECHO_S:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


async def _stop_when_drained(server: _Server, drain: Drain, timeout_s: float) -> None:
    num_left = await drain.finished(timeout_s)
    if num_left:
        _log.warning("requests that did not end in time are cut off", extra={"num_requests": num_left})
    server.should_exit = True


async def _announce(
    settings: RouterSettings,
    server: _Server,
    cluster: Cluster,
    reachable: ReachableWorkers,
    listener: socket.socket,
) -> None:
    """Says where the API is: in the log when it listens, in the ready file when every stage can serve."""
    await server.listening.wait()
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    _log.info("the API listens", extra={"url": url})
    if settings.supervisor_pid is not None:
        tell_of_listening(settings.supervisor_pid)
    while cluster.missing_roles():
        await reachable.changed()
    _log.info("every stage is ready", extra={"url": url})
    if settings.ready_file is not None:
        write_ready_file(settings.ready_file, orjson.dumps({"url": url}) + b"\n")


async def _tend_workers(registry: StaticRegistry, cluster: Cluster, channels: ChannelPool) -> None:
    """Closes the channels of workers that left; names those that can never serve here."""
    known = registry.workers()
    while True:
        cluster.warn_of_strangers(known)
        now = await registry.changed()
        await channels.keep_only({worker.ref for worker in now})
        known = now


def _listener(settings: RouterSettings) -> socket.socket:
    """Raises StartupError."""
    if settings.listen_fd is None:
        return listen(settings.host, settings.port)
    return inherited(settings.listen_fd)


@contextmanager
def _work_threads() -> Iterator[Executor]:
    executor = ThreadPoolExecutor(WORK_THREADS, thread_name_prefix="router-work")
    try:
        yield executor
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
