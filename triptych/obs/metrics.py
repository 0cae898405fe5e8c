"""Every metric of every process, declared here and nowhere else; `docs/metrics.md` says what to do about each.

Names carry the prefix `triptych_` and base units. Labels take few values that we choose: never a request id, a hash,
an address or anything that a caller wrote. A process exposes all of them; those of other stages stay at zero.
"""

from __future__ import annotations

import os
import ssl

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

from triptych.core.errors import StartupError
from triptych.obs.metrics_server import start_metrics_server

# A `_created` series beside each counter and histogram would double what a scrape carries and tell nothing.
disable_created_metrics()  # type: ignore[no-untyped-call]

# The library's own name for it. Set before this module is loaded.
MULTIPROCESS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"

TARGET_GROWTH = 1.15
FAR_GROWTH = 1.6


def buckets(low: float, high: float, growth: float = TARGET_GROWTH) -> tuple[float, ...]:
    """Upper bounds from `low`, each at most `growth` times the one before, ending with exactly `high`."""
    bounds = [low]
    while bounds[-1] * growth < high:
        bounds.append(float(f"{bounds[-1] * growth:.4g}"))
    return (*bounds, high)


def around(low: float, near_low: float, near_high: float, high: float) -> tuple[float, ...]:
    """Fine bounds where targets lie (`near_low` to `near_high`), coarse ones out to `low` and `high`."""
    before = buckets(low, near_low, FAR_GROWTH)[:-1]
    return (*before, *buckets(near_low, near_high), *buckets(near_high, high, FAR_GROWTH)[1:])


def _gauge(name: str, documentation: str, labels: tuple[str, ...] = ()) -> Gauge:
    """Where several processes count together, the sum of those that live."""
    return Gauge(name, documentation, labels, multiprocess_mode="livesum")


def _least_gauge(name: str, documentation: str) -> Gauge:
    """Where several processes count together, the least of those that live."""
    return Gauge(name, documentation, multiprocess_mode="livemin")


_STEP_BUCKETS = around(0.0005, 0.002, 0.5, 10.0)

# --- router -----------------------------------------------------------------------------------------------------------

REQUESTS = Counter("triptych_requests_total", "HTTP requests answered", ("endpoint", "status"))
REQUEST_ERRORS = Counter("triptych_request_errors_total", "Requests that ended in an error", ("code",))
TTFT_SECONDS = Histogram(
    "triptych_ttft_seconds",
    "From the arrival of a request to its first token",
    buckets=around(0.005, 0.02, 5.0, 120.0),
)
INTER_TOKEN_SECONDS = Histogram(
    "triptych_inter_token_seconds",
    "Between two tokens of one answer",
    buckets=around(0.0005, 0.002, 0.3, 10.0),
)
REQUEST_SECONDS = Histogram(
    "triptych_request_seconds",
    "From the arrival of a request to the end of its answer",
    buckets=around(0.01, 0.1, 30.0, 600.0),
)
ROUTER_REPLAYS = Counter("triptych_router_replays_total", "Answers given to other workers after a failure", ("when",))
ROUTER_QUEUE_DEPTH = _gauge("triptych_router_queue_depth", "Requests that wait for room in the cluster")
FOLLOW_UP_TURNS = Counter(
    "triptych_follow_up_turns_total",
    "Answers in conversations that workers have served before, by whether the same ones served them again",
    ("served",),
)
ROUTING_CHOICES = Counter(
    "triptych_routing_choices_total",
    "Why workers were chosen: one for each stage of a request, and each picture",
    ("stage", "reason"),
)
ROUTING_PASSED_OVER = Counter(
    "triptych_routing_passed_over_total", "Paths that were asked last, by what spoke against them", ("reason",)
)
ROUTING_FEEDS = _gauge("triptych_routing_feeds", "Workers that tell this router what they hold")
ROUTING_RESYNCS = Counter("triptych_routing_resyncs_total", "Feeds of workers that were begun anew")
ROUTER_INFLIGHT = _gauge("triptych_router_inflight_requests", "Requests that are being served")
PROMPT_TOKENS = Counter("triptych_prompt_tokens_total", "Prompt tokens of admitted requests, embedding rows included")
COMPLETION_TOKENS = Counter("triptych_completion_tokens_total", "Tokens answered")
MEDIA_ITEMS = Counter("triptych_media_items_total", "Pictures, videos and audio clips received", ("modality",))
MEDIA_FETCHES = Counter("triptych_media_fetches_total", "URLs of callers, by what came of them", ("result",))
MEDIA_FETCH_SECONDS = Histogram(
    "triptych_media_fetch_seconds",
    "One URL fetched, redirects and waiting included",
    buckets=around(0.005, 0.02, 2.0, 30.0),
)
MEDIA_FETCH_BYTES = Counter("triptych_media_fetch_bytes_total", "Bytes of the pictures that were fetched")

HELD_BYTES = _gauge("triptych_held_bytes", "Bodies and fetched pictures of the requests under way")
ROUTER_LOOP_LAG_SECONDS = Histogram(
    "triptych_router_event_loop_lag_seconds",
    "How much later than due the router's event loop came back to a task, ten times a second",
    buckets=around(0.0005, 0.01, 0.2, 10.0),
)
TENANT_REQUESTS = Counter("triptych_tenant_requests_total", "Chat requests that came in, by tenant", ("tenant",))
TENANT_REFUSALS = Counter(
    "triptych_tenant_refusals_total", "Chat requests beyond what their tenant may use", ("tenant", "reason")
)
AUTH_FAILURES = Counter("triptych_auth_failures_total", "Requests without a key that is known", ("reason",))
SHARED_STATE_UP = _least_gauge("triptych_shared_state_up", "1 while the Redis that routers share answers, else 0")
TENANT_TOKENS = Counter("triptych_tenant_tokens_total", "Tokens that tenants used", ("tenant", "kind"))
TENANT_PIXELS = Counter("triptych_tenant_pixels_total", "Pixels that tenants sent", ("tenant",))

# --- encoder ----------------------------------------------------------------------------------------------------------

ENCODER_ITEMS = Counter("triptych_encoder_items_total", "Items finished, by where the embedding came from", ("source",))
ENCODER_PATCHES = Counter("triptych_encoder_patches_total", "Patches that went through the vision tower")
ENCODER_EMBEDDING_TOKENS = Counter("triptych_encoder_embedding_tokens_total", "Embedding rows computed")
ENCODER_BATCH_SECONDS = Histogram(
    "triptych_encoder_batch_seconds",
    "One batch through the vision tower",
    buckets=around(0.001, 0.005, 2.0, 30.0),
)
ENCODER_BATCH_ITEMS = Histogram(
    "triptych_encoder_batch_items",
    "Items in one batch of the vision tower",
    buckets=(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 48, 64),
)
ENCODER_QUEUE_DEPTH = _gauge("triptych_encoder_queue_depth", "Pictures that wait to be encoded")
MEDIA_PICTURES = Counter(
    "triptych_media_pictures_total", "Pictures that went through a media process, by what came of them", ("result",)
)
MEDIA_SECONDS = Histogram(
    "triptych_media_picture_seconds",
    "One picture in a media process: decoded, turned and resized",
    buckets=around(0.0005, 0.002, 0.5, 30.0),
)
MEDIA_QUEUE_DEPTH = _gauge("triptych_media_queue_depth", "Pictures that wait for a media process")
MEDIA_PROCESS_STARTS = Counter("triptych_media_process_starts_total", "Media processes started")
EMBEDDING_CACHE_BYTES = _gauge("triptych_embedding_cache_bytes", "Bytes held by the embedding cache")
EMBEDDING_CACHE_REQUESTS = Counter(
    "triptych_embedding_cache_requests_total", "Look-ups in the embedding cache", ("result",)
)

# --- prefill ----------------------------------------------------------------------------------------------------------

PREFILL_TOKENS = Counter("triptych_prefill_tokens_total", "Prompt tokens, computed or taken from the cache", ("kind",))
PREFILL_QUEUE_DEPTH = _gauge("triptych_prefill_queue_depth", "Sequences that wait for a reservation")
PREFILL_RUNNING = _gauge("triptych_prefill_running_sequences", "Sequences that hold a reservation")
EMBEDDING_SOURCE = Counter(
    "triptych_embedding_source_total", "Embeddings consumed, by where they came from", ("source",)
)
LANDING_BYTES = _gauge("triptych_landing_bytes", "Bytes of the landing arena for embeddings", ("state",))
RADIX_PAGES = _gauge("triptych_radix_pages", "KV pages held by the radix tree")
RADIX_LOOKUP_TOKENS = Counter("triptych_radix_lookup_tokens_total", "Prompt tokens looked up", ("result",))
RADIX_EVICTED_PAGES = Counter("triptych_radix_evicted_pages_total", "KV pages evicted from the radix tree")

# --- decode -----------------------------------------------------------------------------------------------------------

DECODE_TOKENS = Counter("triptych_decode_tokens_total", "Tokens sampled by decode steps")
DECODE_RUNNING = _gauge("triptych_decode_running_sequences", "Sequences in the decode batch")
DECODE_WAITING_KV = _gauge("triptych_decode_waiting_kv_sequences", "Granted sequences whose KV has not come yet")
GRANTS = Counter("triptych_grants_total", "Answers to requests for KV room", ("result",))
RETRACTIONS = Counter("triptych_retractions_total", "Answers that lost their KV pages to others", ("way",))
DECODE_RETRACTED = _gauge("triptych_decode_retracted_sequences", "Sequences whose KV waits on the host for pages")
HOST_POOL_BYTES = _gauge("triptych_host_pool_bytes", "Bytes of KV that wait on the host")
KV_PAGES = _gauge("triptych_kv_pages", "Pages of the KV pool", ("state",))

# --- common -----------------------------------------------------------------------------------------------------------

STEP_SECONDS = Histogram("triptych_step_seconds", "One step of an engine", ("stage",), buckets=_STEP_BUCKETS)
STEP_TOKENS = Histogram(
    "triptych_step_tokens", "Tokens in one step of an engine", ("stage",), buckets=buckets(1, 16384, 1.4)
)
EMBEDDING_TRANSFER_BYTES = Counter(
    "triptych_embedding_transfer_bytes_total", "Bytes of embeddings written to a landing arena", ("transport",)
)
EMBEDDING_IN_FLIGHT_BYTES = _gauge(
    "triptych_embedding_in_flight_bytes", "Bytes of embeddings on their way to prefill workers and not acknowledged"
)
EMBEDDING_PARKED_ITEMS = _gauge(
    "triptych_embedding_parked_items", "Pictures with a slot that wait until their prefill worker acknowledges others"
)
KV_TRANSFER_BYTES = Counter("triptych_kv_transfer_bytes_total", "Bytes of KV written to a decode pool", ("transport",))
KV_HELD_PAGES = Counter(
    "triptych_kv_held_pages_total", "KV pages of prompts that a decode worker held already and that were not sent"
)
KV_CONVERTED_PAGES = Counter(
    "triptych_kv_converted_pages_total",
    "KV pages that were sent in another format than they were computed in",
    ("how",),
)
DATA_FRAMES_DROPPED = Counter(
    "triptych_data_frames_dropped_total", "Data frames that were not taken, by what was wrong", ("reason",)
)
FALLBACKS = Counter("triptych_fallbacks_total", "Times that a second-best way was taken", ("reason",))
FAILPOINTS = Counter("triptych_failpoints_total", "Failpoints that fired", ("name",))
TLS_EXPIRY = _least_gauge(
    "triptych_tls_expiry_timestamp_seconds",
    "When the certificate that this process shows is of no use any more, since the epoch; 0 without TLS",
)
CIRCUIT_OPENINGS = Counter(
    "triptych_circuit_openings_total", "Times that a worker was left alone for a while by one that sends", ("reason",)
)
OPEN_CIRCUITS = _gauge("triptych_open_circuits", "Workers to which this one sends nothing just now")
MODEL_PARAMETERS = _gauge("triptych_model_parameters", "Parameters loaded", ("part",))
ERRORS = Counter("triptych_errors_total", "Errors raised inside a stage", ("stage", "code"))


def exposition() -> tuple[bytes, str]:
    """All metrics of this process in Prometheus' text format, and its content type; of all processes of a router that
    has several, which count in a folder that they share."""
    if MULTIPROCESS_FOLDER not in os.environ:
        return generate_latest(), CONTENT_TYPE_LATEST
    together = CollectorRegistry()
    MultiProcessCollector(together)  # type: ignore[no-untyped-call]
    return generate_latest(together), CONTENT_TYPE_LATEST


def serve_metrics(host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
    """Serves the metrics on a daemon thread until the process ends; with `tls`, to those whom that context lets in.

    Returns the port, which the system chose if `port` is 0. Raises StartupError when it cannot be bound.
    """
    try:
        server = start_metrics_server(host, port, tls)
    except OSError as error:
        raise StartupError(
            f"the metrics cannot listen on port {port} of {host}: {error.strerror}; choose another --metrics-port"
        ) from error
    return int(server.server_port)
