"""The body of POST /v1/chat/completions: what it may hold, and the request that the rest of the router works on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from services.router.chat_messages import parse_messages
from services.router.media import MediaReference
from triptych.core.errors import InvalidRequest
from triptych.text.messages import ChatMessage

MAX_STOPS = 16
MAX_STOP_CHARS = 256
_INT31 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request, checked. None means that the caller left it to the model's defaults."""

    model: str | None
    messages: tuple[ChatMessage, ...]
    media: tuple[MediaReference, ...]
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    ignored: tuple[str, ...]


def _as_stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"may hold at most {MAX_STOPS} strings of at most {MAX_STOP_CHARS} characters")
    return tuple(stop for stop in stops if stop)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None


class ChatCompletionBody(BaseModel):
    """As in OpenAI's API. Other parameters: see README.md."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: Annotated[str, Field(max_length=512)] | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=4096)]
    max_tokens: Annotated[int, Field(ge=1, le=_INT31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=_INT31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_as_stops, json_schema_input_type=str | list[str] | None)] = ()
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None


def parse_chat_request(body: object) -> ChatRequest:
    """From decoded JSON. Raises InvalidRequest or ModalityUnsupported, naming the parameter."""
    try:
        parsed = ChatCompletionBody.model_validate(body)
    except ValidationError as error:
        raise _first_problem(error) from None
    if parsed.n not in (None, 1):
        raise InvalidRequest("n other than 1 is not supported yet", param="n")
    ignored = _check_others(parsed.model_extra or {})
    messages, media = parse_messages(parsed.messages)
    return ChatRequest(
        model=parsed.model,
        messages=messages,
        media=media,
        max_tokens=parsed.max_completion_tokens or parsed.max_tokens,
        temperature=parsed.temperature,
        top_p=parsed.top_p,
        seed=parsed.seed,
        stop=parsed.stop,
        stream=bool(parsed.stream),
        include_usage=bool(parsed.stream_options and parsed.stream_options.include_usage),
        ignored=ignored,
    )


def _one_of(*neutral: object) -> Callable[[object], bool]:
    return lambda value: not value or value in neutral


def _is_text_format(value: object) -> bool:
    return not value or (isinstance(value, Mapping) and value.get("type") == "text")


# Parameters that would change the answer and cannot be served yet -> whether a value asks for nothing.
_NOT_YET: dict[str, Callable[[object], bool]] = {
    "tools": _one_of(),
    "tool_choice": _one_of("none", "auto"),
    "functions": _one_of(),
    "function_call": _one_of("none", "auto"),
    "response_format": _is_text_format,
    "logprobs": _one_of(),
    "top_logprobs": _one_of(),
    "logit_bias": _one_of(),
    "frequency_penalty": _one_of(),
    "presence_penalty": _one_of(),
    "repetition_penalty": _one_of(1),
    "top_k": _one_of(-1),
    "min_p": _one_of(),
    "min_tokens": _one_of(),
    "best_of": _one_of(1),
    "modalities": _one_of(["text"]),
    "audio": _one_of(),
    "prediction": _one_of(),
    "web_search_options": _one_of(),
}

# Parameters that do not touch the answer: accepted, without effect.
_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "store",
        "verbosity",
    }
)


def _check_others(extra: Mapping[str, object]) -> tuple[str, ...]:
    """The names that mean nothing to us. Raises InvalidRequest for what would change the answer."""
    for name, value in extra.items():
        if name in _NOT_YET and not _NOT_YET[name](value):
            raise InvalidRequest(f"{name} is not supported yet", param=name)
    return tuple(name for name in extra if name not in _NOT_YET and name not in _WITHOUT_EFFECT)


def _first_problem(error: ValidationError) -> InvalidRequest:
    """Where and what, never the value."""
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(step) for step in problem["loc"] if not str(step).startswith(("function-", "constrained-")))
    message = problem["msg"].removeprefix("Value error, ")
    return InvalidRequest(f"{where or 'the body'}: {message}", param=where or None)
