"""The only translator between wire messages and domain values.

`x_to_proto` trusts its argument, which is ours. `x_from_proto` trusts nothing: whatever it answers is within the bounds
below, else it raises InvalidRequest (or MediaMismatch, when an item's ranges do not add up), never anything else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from triptych.core.errors import InvalidRequest
from triptych.core.expansion import check_ranges
from triptych.core.grant import Grant, GroupRegions, Region
from triptych.core.ids import CAPABILITY_BYTES, AttemptRef, WorkerRef
from triptych.core.kv_format import MAX_PAGE_TOKENS, KvDtype
from triptych.core.plan import (
    IDENTITY_BYTES,
    MAX_RETRACTIONS,
    EmbeddingSource,
    FinishReason,
    Grid,
    Item,
    ItemFormat,
    Modality,
    Plan,
    Sampling,
    Token,
    TokenLogprobs,
    TokenRange,
    Usage,
)
from triptych.core.timeline import EVENTS, TimelineEvent
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.rpc import check
from triptych.wire.v1 import common_pb2 as pb
from triptych.wire.v1 import registry_pb2 as registry_pb

# A vocabulary id is below this: sentinels begin there, so an id from the wire can never be one.
MAX_TOKEN_ID = 999_999
MAX_TOKENS = 2**20
MAX_ITEMS = 1024
MAX_RANGES = 2**16
MAX_CHOICE = 1023
MAX_ATTEMPT = 2**16
MAX_GRID = 2**16
MAX_MEDIA_BYTES = 2**34
MAX_PIXELS_PER_SIDE = 2**18
MAX_STOP_TOKENS = 1024
MAX_REPETITION_PENALTY = 10.0
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASED_TOKENS = 300
MAX_ALTERNATIVES = 20
MAX_PRIORITY = 100
MIN_LOGPROB = -9999.0
MAX_SALT_BYTES = 64
MAX_TIMEOUT_MS = 24 * 3600 * 1000
MAX_PAGES = 2**26
MAX_GROUPS = 1024
FINGERPRINT_BYTES = 32
_INT63 = 2**63 - 1
_INT64 = 2**64 - 1

_MODALITY: dict[pb.Modality, Modality] = {
    pb.MODALITY_IMAGE: Modality.IMAGE,
    pb.MODALITY_VIDEO: Modality.VIDEO,
    pb.MODALITY_AUDIO: Modality.AUDIO,
}
_FORMAT: dict[pb.ItemFormat, ItemFormat] = {
    pb.ITEM_FORMAT_NORMAL: ItemFormat.NORMAL,
    pb.ITEM_FORMAT_PROCESSOR_OUTPUT: ItemFormat.PROCESSOR_OUTPUT,
    pb.ITEM_FORMAT_PRECOMPUTED_EMBEDDING: ItemFormat.PRECOMPUTED_EMBEDDING,
}
_SOURCE: dict[pb.EmbeddingSource, EmbeddingSource] = {
    pb.EMBEDDING_SOURCE_REMOTE: EmbeddingSource.REMOTE,
    pb.EMBEDDING_SOURCE_CACHE: EmbeddingSource.CACHE,
    pb.EMBEDDING_SOURCE_RADIX: EmbeddingSource.RADIX,
    pb.EMBEDDING_SOURCE_LOCAL: EmbeddingSource.LOCAL,
}
_FINISH: dict[pb.FinishReason, FinishReason] = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_ABORT: FinishReason.ABORT,
}
_ROLE: dict[registry_pb.Role, Role] = {
    registry_pb.ROLE_ENCODER: Role.ENCODER,
    registry_pb.ROLE_PREFILL: Role.PREFILL,
    registry_pb.ROLE_DECODE: Role.DECODE,
}
_STATE: dict[registry_pb.WorkerState, WorkerState] = {
    registry_pb.WORKER_STATE_STARTING: WorkerState.STARTING,
    registry_pb.WORKER_STATE_READY: WorkerState.READY,
    registry_pb.WORKER_STATE_DRAINING: WorkerState.DRAINING,
}
_KV_DTYPE: dict[pb.KvDtype, KvDtype] = {
    pb.KV_DTYPE_FLOAT32: KvDtype.FLOAT32,
    pb.KV_DTYPE_BFLOAT16: KvDtype.BFLOAT16,
    pb.KV_DTYPE_FLOAT16: KvDtype.FLOAT16,
}
_MODALITY_TO = {domain: wire for wire, domain in _MODALITY.items()}
_FORMAT_TO = {domain: wire for wire, domain in _FORMAT.items()}
_SOURCE_TO = {domain: wire for wire, domain in _SOURCE.items()}
_FINISH_TO = {domain: wire for wire, domain in _FINISH.items()}
_KV_DTYPE_TO = {domain: wire for wire, domain in _KV_DTYPE.items()}
_ROLE_TO = {domain: wire for wire, domain in _ROLE.items()}
_STATE_TO = {domain: wire for wire, domain in _STATE.items()}


# --- names -----------------------------------------------------------------------------------------------------------


def ref_to_proto(ref: AttemptRef) -> pb.AttemptRef:
    return pb.AttemptRef(request_id=ref.request_id, choice=ref.choice, attempt=ref.attempt)


def ref_from_proto(message: pb.AttemptRef) -> AttemptRef:
    return AttemptRef(
        check.name("request_id", message.request_id),
        check.integer("choice", message.choice, 0, MAX_CHOICE),
        check.integer("attempt", message.attempt, 0, MAX_ATTEMPT),
    )


def worker_ref_from_proto(worker_id: str, epoch: int) -> WorkerRef:
    return WorkerRef(check.name("worker_id", worker_id), check.integer("epoch", epoch, 1, _INT63))


# --- plan ------------------------------------------------------------------------------------------------------------


def source_to_proto(source: EmbeddingSource) -> pb.EmbeddingSource:
    return _SOURCE_TO[source]


def source_from_proto(value: pb.EmbeddingSource) -> EmbeddingSource:
    return check.choice("source", _SOURCE, value)


def range_to_proto(run: TokenRange) -> pb.TokenRange:
    return pb.TokenRange(compact_index=run.compact_index, offset=run.offset, length=run.length)


def range_from_proto(message: pb.TokenRange) -> TokenRange:
    return TokenRange(
        check.integer("ranges.compact_index", message.compact_index, 0, MAX_TOKENS),
        check.integer("ranges.offset", message.offset, 0, 2 * MAX_TOKENS),
        check.integer("ranges.length", message.length, 1, MAX_TOKENS),
    )


def grid_to_proto(grid: Grid) -> pb.Grid:
    return pb.Grid(t=grid.t, h=grid.h, w=grid.w)


def grid_from_proto(message: pb.Grid, modality: Modality) -> Grid:
    """Pictures and videos have at least one patch each way; audio may have no grid."""
    low = 0 if modality is Modality.AUDIO else 1
    return Grid(*(check.integer(f"grid.{axis}", getattr(message, axis), low, MAX_GRID) for axis in ("t", "h", "w")))


def item_to_proto(item: Item) -> pb.Item:
    return pb.Item(
        modality=_MODALITY_TO[item.modality],
        identity=item.identity,
        num_tokens=item.num_tokens,
        ranges=[range_to_proto(run) for run in item.ranges],
        grid=grid_to_proto(item.grid),
        media_bytes=item.media_bytes,
        width_px=item.width_px,
        height_px=item.height_px,
        format=_FORMAT_TO[item.format],
    )


def item_from_proto(message: pb.Item) -> Item:
    """Checks the item by itself; `plan_from_proto` checks that its ranges lie where they say."""
    check.at_most("ranges", message.ranges, MAX_RANGES)
    modality = check.choice("modality", _MODALITY, message.modality)
    return Item(
        modality=modality,
        identity=check.exact_bytes("identity", message.identity, IDENTITY_BYTES),
        num_tokens=check.integer("num_tokens", message.num_tokens, 1, MAX_TOKENS),
        ranges=tuple(range_from_proto(run) for run in message.ranges),
        grid=grid_from_proto(message.grid, modality),
        media_bytes=check.integer("media_bytes", message.media_bytes, 0, MAX_MEDIA_BYTES),
        width_px=check.integer("width_px", message.width_px, 0, MAX_PIXELS_PER_SIDE),
        height_px=check.integer("height_px", message.height_px, 0, MAX_PIXELS_PER_SIDE),
        format=check.choice("format", _FORMAT, message.format),
    )


def sampling_to_proto(sampling: Sampling) -> pb.Sampling:
    return pb.Sampling(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        stop_token_ids=sorted(sampling.stop_token_ids),
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=[pb.LogitBias(id=token_id, bias=bias) for token_id, bias in sampling.logit_bias],
        min_tokens=sampling.min_tokens,
        eos_token_ids=sorted(sampling.eos_token_ids),
        num_logprobs=sampling.num_logprobs,
    )


def sampling_from_proto(message: pb.Sampling) -> Sampling:
    check.at_most("stop_token_ids", message.stop_token_ids, MAX_STOP_TOKENS)
    check.at_most("eos_token_ids", message.eos_token_ids, MAX_STOP_TOKENS)
    max_tokens = check.integer("max_tokens", message.max_tokens, 1, MAX_TOKENS)
    return Sampling(
        max_tokens=max_tokens,
        temperature=check.number("temperature", message.temperature, 0.0, 100.0),
        top_p=_positive("top_p", message.top_p, 1.0),
        seed=check.integer("seed", message.seed, 0, _INT64),
        stop_token_ids=frozenset(_token_ids("stop_token_ids", message.stop_token_ids)),
        top_k=check.integer("top_k", message.top_k, 1, MAX_TOKEN_ID + 1) if message.HasField("top_k") else None,
        min_p=check.number("min_p", message.min_p, 0.0, 1.0),
        repetition_penalty=_positive("repetition_penalty", message.repetition_penalty, MAX_REPETITION_PENALTY),
        presence_penalty=check.number("presence_penalty", message.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
        frequency_penalty=check.number("frequency_penalty", message.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
        logit_bias=_logit_bias(message.logit_bias),
        min_tokens=check.integer("min_tokens", message.min_tokens, 0, max_tokens),
        eos_token_ids=frozenset(_token_ids("eos_token_ids", message.eos_token_ids)),
        num_logprobs=_num_logprobs(message),
    )


def plan_to_proto(plan: Plan) -> pb.Plan:
    return pb.Plan(
        compact_ids=plan.compact_ids,
        items=[item_to_proto(item) for item in plan.items],
        sampling=sampling_to_proto(plan.sampling),
        timeout_ms=timeout_to_ms(plan.timeout_s),
        cache_salt=plan.cache_salt,
        model_fingerprint=plan.model_fingerprint,
        priority=plan.priority,
        answer_ids=plan.answer_ids,
        num_retractions=plan.num_retractions,
    )


def plan_from_proto(message: pb.Plan) -> Plan:
    check.present(message, "sampling")
    check.at_most("compact_ids", message.compact_ids, MAX_TOKENS)
    check.at_most("items", message.items, MAX_ITEMS)
    cache_salt = cache_salt_from_proto(message.cache_salt)
    compact_ids = tuple(_token_ids("compact_ids", message.compact_ids))
    items = tuple(item_from_proto(item) for item in message.items)
    check.integer("prompt length", len(compact_ids), 1, MAX_TOKENS)
    check.integer("prompt length", len(compact_ids) + sum(item.num_tokens for item in items), 1, 2 * MAX_TOKENS)
    check_ranges(compact_ids, items)
    sampling = sampling_from_proto(message.sampling)
    check.at_most("answer_ids", message.answer_ids, sampling.max_tokens - 1)
    return Plan(
        compact_ids=compact_ids,
        items=items,
        sampling=sampling,
        timeout_s=timeout_from_ms(message.timeout_ms),
        cache_salt=cache_salt,
        model_fingerprint=check.exact_bytes("model_fingerprint", message.model_fingerprint, FINGERPRINT_BYTES),
        priority=check.integer("priority", message.priority, -MAX_PRIORITY, MAX_PRIORITY),
        answer_ids=tuple(_token_ids("answer_ids", message.answer_ids)),
        num_retractions=check.integer("num_retractions", message.num_retractions, 0, MAX_RETRACTIONS),
    )


def cache_salt_from_proto(value: bytes) -> bytes:
    check.integer("cache_salt length", len(value), 0, MAX_SALT_BYTES)
    return value


def timeout_to_ms(timeout_s: float) -> int:
    """Rounded up, at least 1: what is expired is not sent at all. A whole number of milliseconds stays what it is,
    though the product of two floats may be a little above it."""
    return max(1, math.ceil(round(timeout_s * 1000, 6)))


def timeout_from_ms(timeout_ms: int) -> float:
    return check.integer("timeout_ms", timeout_ms, 1, MAX_TIMEOUT_MS) / 1000


# --- grant -----------------------------------------------------------------------------------------------------------


def region_to_proto(region: Region) -> pb.Region:
    return pb.Region(first_page=region.first_page, num_pages=region.num_pages)


def region_from_proto(message: pb.Region) -> Region:
    first = check.integer("regions.first_page", message.first_page, 0, MAX_PAGES - 1)
    return Region(first, check.integer("regions.num_pages", message.num_pages, 1, MAX_PAGES - first))


def group_to_proto(group: GroupRegions) -> pb.GroupRegions:
    return pb.GroupRegions(
        cache_group=group.cache_group, rank=group.rank, regions=[region_to_proto(region) for region in group.regions]
    )


def group_from_proto(message: pb.GroupRegions) -> GroupRegions:
    """No page twice."""
    check.at_most("regions", message.regions, MAX_RANGES)
    regions = tuple(region_from_proto(region) for region in message.regions)
    end = 0
    for region in sorted(regions, key=lambda entry: entry.first_page):
        if region.first_page < end:
            raise InvalidRequest("a page is named twice in one group", param="regions")
        end = region.first_page + region.num_pages
    return GroupRegions(
        check.integer("cache_group", message.cache_group, 0, MAX_GROUPS),
        check.integer("rank", message.rank, 0, MAX_GROUPS),
        regions,
    )


def groups_from_proto(messages: Sequence[pb.GroupRegions]) -> tuple[GroupRegions, ...]:
    check.at_most("groups", messages, MAX_GROUPS)
    groups = tuple(group_from_proto(group) for group in messages)
    if len({(group.cache_group, group.rank) for group in groups}) != len(groups):
        raise InvalidRequest("a (cache group, rank) is named twice", param="groups")
    return groups


def grant_to_proto(grant: Grant) -> pb.Grant:
    return pb.Grant(
        grant_id=grant.grant_id,
        worker_id=grant.worker_id,
        epoch=grant.epoch,
        capability=grant.capability,
        num_pages=grant.num_pages,
        generation=grant.generation,
        groups=[group_to_proto(group) for group in grant.groups],
    )


def grant_from_proto(message: pb.Grant) -> Grant:
    worker = worker_ref_from_proto(message.worker_id, message.epoch)
    return Grant(
        grant_id=check.name("grant_id", message.grant_id),
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        capability=capability_from_proto(message.capability),
        num_pages=check.integer("num_pages", message.num_pages, 0, MAX_PAGES),
        generation=check.integer("generation", message.generation, 0, _INT64),
        groups=groups_from_proto(message.groups),
    )


def capability_from_proto(value: bytes) -> bytes:
    return check.exact_bytes("capability", value, CAPABILITY_BYTES)


# --- answers ---------------------------------------------------------------------------------------------------------


def token_to_proto(token: Token) -> pb.Token:
    logprobs = None if token.logprobs is None else _logprobs_to_proto(token.logprobs)
    return pb.Token(index=token.index, id=token.id, logprobs=logprobs)


def token_from_proto(message: pb.Token) -> Token:
    return Token(
        check.integer("token.index", message.index, 0, MAX_TOKENS),
        check.integer("token.id", message.id, 0, MAX_TOKEN_ID),
        _logprobs_from_proto(message.logprobs) if message.HasField("logprobs") else None,
    )


def _logprobs_to_proto(logprobs: TokenLogprobs) -> pb.TokenLogprobs:
    top = [pb.Alternative(id=token_id, logprob=logprob) for token_id, logprob in logprobs.top]
    return pb.TokenLogprobs(logprob=logprobs.logprob, top=top)


def _logprobs_from_proto(message: pb.TokenLogprobs) -> TokenLogprobs:
    check.at_most("logprobs.top", message.top, MAX_ALTERNATIVES)
    return TokenLogprobs(
        check.number("logprobs.logprob", message.logprob, MIN_LOGPROB, 0.0),
        tuple(
            (
                check.integer("logprobs.top.id", entry.id, 0, MAX_TOKEN_ID),
                check.number("logprobs.top.logprob", entry.logprob, MIN_LOGPROB, 0.0),
            )
            for entry in message.top
        ),
    )


def usage_to_proto(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens, completion_tokens=usage.completion_tokens
    )


def usage_from_proto(message: pb.Usage) -> Usage:
    prompt = check.integer("prompt_tokens", message.prompt_tokens, 0, 2 * MAX_TOKENS)
    return Usage(
        prompt,
        check.integer("cached_tokens", message.cached_tokens, 0, prompt),
        check.integer("completion_tokens", message.completion_tokens, 0, MAX_TOKENS),
    )


def finish_reason_to_proto(reason: FinishReason | None) -> pb.FinishReason:
    """None (the answer goes on elsewhere) is FINISH_REASON_UNSPECIFIED."""
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_TO[reason]


def finish_reason_from_proto(value: pb.FinishReason) -> FinishReason:
    return check.choice("finish_reason", _FINISH, value)


def optional_finish_reason_from_proto(value: pb.FinishReason) -> FinishReason | None:
    return None if value == pb.FINISH_REASON_UNSPECIFIED else finish_reason_from_proto(value)


def event_to_proto(event: TimelineEvent) -> pb.TimelineEvent:
    return pb.TimelineEvent(
        stage=event.stage,
        event=event.event,
        start_ns=event.start_ns,
        end_ns=event.end_ns,
        num_bytes=event.num_bytes,
        num_tokens=event.num_tokens,
        worker_id=event.worker_id,
        attempt=event.attempt,
        source=pb.EMBEDDING_SOURCE_UNSPECIFIED if event.source is None else _SOURCE_TO[event.source],
        item_index=event.item_index,
    )


def event_from_proto(message: pb.TimelineEvent) -> TimelineEvent:
    events = check.choice("stage", EVENTS, message.stage)
    if message.event not in events:
        raise InvalidRequest(f"stage {message.stage} declares no such timeline event", param="event")
    start_ns = check.integer("start_ns", message.start_ns, 0, _INT63)
    return TimelineEvent(
        stage=message.stage,
        event=message.event,
        start_ns=start_ns,
        end_ns=check.integer("end_ns", message.end_ns, start_ns, _INT63),
        worker_id=check.name("worker_id", message.worker_id) if message.worker_id else "",
        attempt=check.integer("attempt", message.attempt, 0, MAX_ATTEMPT),
        num_bytes=check.integer("num_bytes", message.num_bytes, 0, _INT63),
        num_tokens=check.integer("num_tokens", message.num_tokens, 0, 2 * MAX_TOKENS),
        source=None if message.source == pb.EMBEDDING_SOURCE_UNSPECIFIED else source_from_proto(message.source),
        item_index=_item_index(message) if message.HasField("item_index") else None,
    )


# --- workers ---------------------------------------------------------------------------------------------------------


def worker_to_proto(worker: WorkerInfo) -> registry_pb.WorkerRecord:
    return registry_pb.WorkerRecord(
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        roles=sorted(_ROLE_TO[role] for role in worker.roles),
        state=_STATE_TO[worker.state],
        grpc_address=worker.grpc_address,
        metrics_address=worker.metrics_address,
        model_name=worker.model_name,
        model_fingerprint=worker.model_fingerprint,
        host_id=worker.host_id,
        transports=worker.transports,
        pid=worker.pid,
        num_pages=worker.num_pages,
        page_tokens=worker.page_tokens,
        max_sequence_tokens=worker.max_sequence_tokens,
        parameter_counts=dict(worker.parameter_counts),
        kv_layout=worker.kv_layout,
        embedding_layout=worker.embedding_layout,
        kv_dtype=pb.KV_DTYPE_UNSPECIFIED if worker.kv_dtype is None else kv_dtype_to_proto(worker.kv_dtype),
        may_narrow_kv=worker.may_narrow_kv,
        speaks_tls=worker.speaks_tls,
    )


def worker_from_proto(message: registry_pb.WorkerRecord) -> WorkerInfo:
    """`metrics_address`, `model_name`, `host_id` and the fingerprint may be empty (a worker that is starting)."""
    ref = worker_ref_from_proto(message.worker_id, message.epoch)
    for field, limit in (("roles", 8), ("transports", 16), ("parameter_counts", 16)):
        check.at_most(field, getattr(message, field), limit)
    check.integer("number of roles", len(message.roles), 1, 8)
    if message.model_fingerprint:
        check.exact_bytes("model_fingerprint", message.model_fingerprint, FINGERPRINT_BYTES)
    return WorkerInfo(
        worker_id=ref.worker_id,
        epoch=ref.epoch,
        roles=frozenset(check.choice("roles", _ROLE, role) for role in message.roles),
        state=check.choice("state", _STATE, message.state),
        grpc_address=check.address("grpc_address", message.grpc_address),
        metrics_address=check.address("metrics_address", message.metrics_address) if message.metrics_address else "",
        model_name=check.text("model_name", message.model_name, 256),
        model_fingerprint=message.model_fingerprint,
        host_id=check.text("host_id", message.host_id, 128),
        transports=tuple(check.name("transports", transport) for transport in message.transports),
        pid=message.pid,
        num_pages=check.integer("num_pages", message.num_pages, 0, MAX_PAGES),
        page_tokens=check.integer("page_tokens", message.page_tokens, 0, MAX_PAGE_TOKENS),
        max_sequence_tokens=check.integer("max_sequence_tokens", message.max_sequence_tokens, 0, 2 * MAX_TOKENS),
        parameter_counts={check.name("parameter_counts", part): n for part, n in message.parameter_counts.items()},
        kv_layout=_layout_from_proto("kv_layout", message.kv_layout),
        embedding_layout=_layout_from_proto("embedding_layout", message.embedding_layout),
        kv_dtype=kv_dtype_from_proto(message.kv_dtype) if message.kv_dtype else None,
        may_narrow_kv=message.may_narrow_kv,
        speaks_tls=message.speaks_tls,
    )


def kv_dtype_to_proto(dtype: KvDtype) -> pb.KvDtype:
    return _KV_DTYPE_TO[dtype]


def kv_dtype_from_proto(dtype: pb.KvDtype) -> KvDtype:
    return check.choice("kv_dtype", _KV_DTYPE, dtype)


def _layout_from_proto(field: str, value: bytes) -> bytes:
    return check.exact_bytes(field, value, FINGERPRINT_BYTES) if value else b""


def _token_ids(field: str, values: Sequence[int]) -> list[int]:
    ids = list(values)
    if ids and max(ids) > MAX_TOKEN_ID:
        raise InvalidRequest(f"{field} holds a number that is no token", param=field)
    return ids


def _positive(field: str, value: float, high: float) -> float:
    if not value > 0:
        raise InvalidRequest(f"{field} must be above 0", param=field)
    return check.number(field, value, 0.0, high)


def _logit_bias(entries: Sequence[pb.LogitBias]) -> tuple[tuple[int, float], ...]:
    check.at_most("logit_bias", entries, MAX_BIASED_TOKENS)
    ids = _token_ids("logit_bias", [entry.id for entry in entries])
    if any(first >= second for first, second in itertools.pairwise(ids)):
        raise InvalidRequest("logit_bias must name each token once, by ascending id", param="logit_bias")
    return tuple((entry.id, check.number("logit_bias", entry.bias, -MAX_BIAS, MAX_BIAS)) for entry in entries)


def _num_logprobs(message: pb.Sampling) -> int | None:
    if not message.HasField("num_logprobs"):
        return None
    return check.integer("num_logprobs", message.num_logprobs, 0, MAX_ALTERNATIVES)


def _item_index(message: pb.TimelineEvent) -> int:
    return check.integer("item_index", message.item_index, 0, MAX_ITEMS - 1)
