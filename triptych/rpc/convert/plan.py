"""Plans: items, ranges, sampling."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from triptych.core.errors import InvalidRequest
from triptych.core.expansion import check_ranges
from triptych.core.plan import (
    CALLER_HASH_BYTES,
    IDENTITY_BYTES,
    MAX_RETRACTIONS,
    Grid,
    Item,
    ItemFormat,
    Modality,
    Plan,
    Sampling,
    TokenRange,
)
from triptych.rpc import check
from triptych.rpc.convert.limits import (
    FINGERPRINT_BYTES,
    INT64,
    MAX_ALTERNATIVES,
    MAX_BIAS,
    MAX_BIASED_TOKENS,
    MAX_GRID,
    MAX_ITEMS,
    MAX_MEDIA_BYTES,
    MAX_PENALTY,
    MAX_PIXELS_PER_SIDE,
    MAX_PRIORITY,
    MAX_RANGES,
    MAX_REPETITION_PENALTY,
    MAX_STOP_TOKENS,
    MAX_TOKEN_ID,
    MAX_TOKENS,
)
from triptych.rpc.convert.names import cache_salt_from_proto, timeout_from_ms, timeout_to_ms, token_ids
from triptych.wire.v1 import common_pb2 as pb

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
_MODALITY_TO = {domain: wire for wire, domain in _MODALITY.items()}
_FORMAT_TO = {domain: wire for wire, domain in _FORMAT.items()}


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
        caller_hash=item.caller_hash,
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
        caller_hash=_caller_hash_from_proto(message),
    )


def _caller_hash_from_proto(message: pb.Item) -> bytes:
    if message.caller_hash and message.format != pb.ITEM_FORMAT_NORMAL:
        raise InvalidRequest("a caller's hash can only name encoded media", param="caller_hash")
    return check.exact_bytes("caller_hash", message.caller_hash, CALLER_HASH_BYTES) if message.caller_hash else b""


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
        seed=check.integer("seed", message.seed, 0, INT64),
        stop_token_ids=frozenset(token_ids("stop_token_ids", message.stop_token_ids)),
        top_k=check.integer("top_k", message.top_k, 1, MAX_TOKEN_ID + 1) if message.HasField("top_k") else None,
        min_p=check.number("min_p", message.min_p, 0.0, 1.0),
        repetition_penalty=_positive("repetition_penalty", message.repetition_penalty, MAX_REPETITION_PENALTY),
        presence_penalty=check.number("presence_penalty", message.presence_penalty, -MAX_PENALTY, MAX_PENALTY),
        frequency_penalty=check.number("frequency_penalty", message.frequency_penalty, -MAX_PENALTY, MAX_PENALTY),
        logit_bias=_logit_bias(message.logit_bias),
        min_tokens=check.integer("min_tokens", message.min_tokens, 0, max_tokens),
        eos_token_ids=frozenset(token_ids("eos_token_ids", message.eos_token_ids)),
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
    compact_ids = tuple(token_ids("compact_ids", message.compact_ids))
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
        answer_ids=tuple(token_ids("answer_ids", message.answer_ids)),
        num_retractions=check.integer("num_retractions", message.num_retractions, 0, MAX_RETRACTIONS),
    )


def _positive(field: str, value: float, high: float) -> float:
    if not value > 0:
        raise InvalidRequest(f"{field} must be above 0", param=field)
    return check.number(field, value, 0.0, high)


def _logit_bias(entries: Sequence[pb.LogitBias]) -> tuple[tuple[int, float], ...]:
    check.at_most("logit_bias", entries, MAX_BIASED_TOKENS)
    ids = token_ids("logit_bias", [entry.id for entry in entries])
    if any(first >= second for first, second in itertools.pairwise(ids)):
        raise InvalidRequest("logit_bias must name each token once, by ascending id", param="logit_bias")
    return tuple((entry.id, check.number("logit_bias", entry.bias, -MAX_BIAS, MAX_BIAS)) for entry in entries)


def _num_logprobs(message: pb.Sampling) -> int | None:
    if not message.HasField("num_logprobs"):
        return None
    return check.integer("num_logprobs", message.num_logprobs, 0, MAX_ALTERNATIVES)
