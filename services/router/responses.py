"""The shapes of OpenAI's answers, and ours for the timeline. Pure: values in, JSON-ready dictionaries out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triptych.core.errors import (
    AttemptError,
    CapacityError,
    DeadlineExceeded,
    Overloaded,
    RequestError,
    TriptychError,
    Unauthenticated,
)
from triptych.core.plan import Usage
from triptych.core.timeline import TimelineEvent
from triptych.core.worker import Role

Json = dict[str, Any]

INTERNAL_MESSAGE = "an internal error; the server's log has it"


@dataclass(frozen=True, slots=True)
class Envelope:
    """What all messages of one answer share. `created` is in Unix seconds."""

    completion_id: str
    created: int
    model: str

    def _open(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.completion_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def completion(self, text: str, finish_reason: str, usage: Usage) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
        return {**self._open("chat.completion", [choice]), "usage": usage_json(usage)}

    def chunk(self, delta: Json, finish_reason: str | None = None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return self._open("chat.completion.chunk", [choice])

    def usage_chunk(self, usage: Usage) -> Json:
        return {**self._open("chat.completion.chunk", []), "usage": usage_json(usage)}


def usage_json(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def timeline_json(events: Iterable[TimelineEvent], workers: Mapping[Role, Sequence[str]]) -> Json:
    """`workers`: which served each stage, by stage."""
    served = {role.value: list(names) for role, names in workers.items()}
    return {"timeline": [_event_json(event) for event in events], "workers": served}


def _event_json(event: TimelineEvent) -> Json:
    return {
        "stage": event.stage,
        "event": event.event,
        "start_ns": event.start_ns,
        "end_ns": event.end_ns,
        "duration_ms": round((event.end_ns - event.start_ns) / 1e6, 3),
        "bytes": event.num_bytes,
        "tokens": event.num_tokens,
        "worker": event.worker_id,
        "attempt": event.attempt,
        "source": event.source.value if event.source else None,
        "item": event.item_index,
    }


def error_json(error: TriptychError) -> Json:
    kind = _error_type(error)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def _error_type(error: TriptychError) -> str:
    match error:
        case Unauthenticated():
            return "authentication_error"
        case RequestError():
            return "invalid_request_error"
        case Overloaded():
            return "rate_limit_error"
        case DeadlineExceeded():
            return "timeout_error"
        case CapacityError() | AttemptError():
            return "service_unavailable_error"
    return "server_error"


def model_json(model: str, created: int) -> Json:
    return {"id": model, "object": "model", "created": created, "owned_by": "triptych"}
