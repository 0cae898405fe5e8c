"""Tokens, usage and timelines."""

from __future__ import annotations

from triptych.core.errors import InvalidRequest
from triptych.core.plan import (
    FinishReason,
    Token,
    TokenLogprobs,
    Usage,
)
from triptych.core.timeline import EVENTS, TimelineEvent
from triptych.rpc import check
from triptych.rpc.convert.limits import (
    INT63,
    MAX_ALTERNATIVES,
    MAX_ATTEMPT,
    MAX_ITEMS,
    MAX_TOKEN_ID,
    MAX_TOKENS,
    MIN_LOGPROB,
)
from triptych.rpc.convert.names import _SOURCE_TO, source_from_proto
from triptych.wire.v1 import common_pb2 as pb

_FINISH: dict[pb.FinishReason, FinishReason] = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_ABORT: FinishReason.ABORT,
}
_FINISH_TO = {domain: wire for wire, domain in _FINISH.items()}


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
    start_ns = check.integer("start_ns", message.start_ns, 0, INT63)
    return TimelineEvent(
        stage=message.stage,
        event=message.event,
        start_ns=start_ns,
        end_ns=check.integer("end_ns", message.end_ns, start_ns, INT63),
        worker_id=check.name("worker_id", message.worker_id) if message.worker_id else "",
        attempt=check.integer("attempt", message.attempt, 0, MAX_ATTEMPT),
        num_bytes=check.integer("num_bytes", message.num_bytes, 0, INT63),
        num_tokens=check.integer("num_tokens", message.num_tokens, 0, 2 * MAX_TOKENS),
        source=None if message.source == pb.EMBEDDING_SOURCE_UNSPECIFIED else source_from_proto(message.source),
        item_index=_item_index(message) if message.HasField("item_index") else None,
    )


def _item_index(message: pb.TimelineEvent) -> int:
    return check.integer("item_index", message.item_index, 0, MAX_ITEMS - 1)
