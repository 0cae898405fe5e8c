"""The shapes of OpenAI's answers, and ours for the timeline. Pure: values in, JSON-ready dictionaries out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triptych.core.errors import (
    AttemptError,
    CapacityError,
    DeadlineExceeded,
    Forbidden,
    Overloaded,
    RequestError,
    TriptychError,
    Unauthenticated,
)
from triptych.core.plan import Token, Usage
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

    def completion(self, choices: list[Json], usage: Usage) -> Json:
        """`choices` as `choice_json` makes them, in order."""
        return {**self._open("chat.completion", choices), "usage": usage_json(usage)}

    def chunk(self, index: int, delta: Json, finish_reason: str | None, logprobs: Json | None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._open("chat.completion.chunk", [choice])

    def usage_chunk(self, usage: Usage) -> Json:
        return {**self.bare_chunk(), "usage": usage_json(usage)}

    def bare_chunk(self) -> Json:
        """Says nothing of any choice."""
        return self._open("chat.completion.chunk", [])


def choice_json(index: int, text: str, finish_reason: str, logprobs: Json | None) -> Json:
    message = {"role": "assistant", "content": text, "refusal": None}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}


def logprobs_json(tokens: Iterable[Token], token_bytes: Callable[[int], bytes]) -> Json:
    """`choices[].logprobs`. A token that is only a part of a character has U+FFFD as its text and its true bytes.

    Raises TriptychError when a worker left the log probabilities out.
    """
    return {"content": [_token_json(token, token_bytes) for token in tokens], "refusal": None}


def _token_json(token: Token, token_bytes: Callable[[int], bytes]) -> Json:
    if token.logprobs is None:
        raise TriptychError("a worker left out the log probabilities that were asked for")
    top = [_logprob_json(token_bytes(token_id), logprob) for token_id, logprob in token.logprobs.top]
    return {**_logprob_json(token_bytes(token.id), token.logprobs.logprob), "top_logprobs": top}


def _logprob_json(content: bytes, logprob: float) -> Json:
    return {"token": content.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(content)}


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
        case Forbidden():
            return "permission_error"
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
