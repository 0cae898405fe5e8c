"""The body of POST /v1/chat/completions: what it may hold, and the request that the rest of the router works on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

from services.router.chat_messages import parse_messages
from services.router.media import MediaReference
from triptych.core.errors import InvalidRequest
from triptych.rpc.convert import (
    MAX_ALTERNATIVES,
    MAX_BIAS,
    MAX_BIASED_TOKENS,
    MAX_PENALTY,
    MAX_PRIORITY,
    MAX_REPETITION_PENALTY,
    MAX_TOKEN_ID,
)
from triptych.text.messages import ChatMessage

MAX_CHOICES = 16
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 64
MAX_SALT_CHARS = 256
MAX_TIMEOUT_S = 86_400.0
_INT31 = 2**31 - 1
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """What a caller may say about sampling beyond temperature, top_p and seed. None leaves it to the model's defaults.

    Attributes:
        top_k: 0 is no limit, whatever the model's default.
        logit_bias: (token id, bias), by ascending id.
        num_logprobs: None is no log probabilities; else how many alternatives to tell.
    """

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    num_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request, checked. None means that the caller left it to the model's defaults. `mm_hashes`: as it came."""

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
    options: SamplingOptions = SamplingOptions()
    num_choices: int = 1
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None
    mm_hashes: object = None


def _as_stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"may hold at most {MAX_STOPS} strings of at most {MAX_STOP_CHARS} characters")
    return tuple(stop for stop in stops if stop)


def _as_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict) or not all(_TOKEN_ID.fullmatch(key) for key in value):
        raise ValueError("must map token ids, written as strings of digits, to numbers")
    if len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"may name at most {MAX_BIASED_TOKENS} tokens")
    if not all(type(bias) in (int, float) and -MAX_BIAS <= bias <= MAX_BIAS for bias in value.values()):
        raise ValueError(f"each bias must be a number between {-MAX_BIAS:g} and {MAX_BIAS:g}")
    return tuple(sorted((int(key), float(bias)) for key, bias in value.items()))


_Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None


class ChatCompletionBody(BaseModel):
    """As in OpenAI's API, and vLLM's for what OpenAI's does not have. Other parameters: see docs/sampling.md."""

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
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None
    logit_bias: Annotated[
        tuple[tuple[int, float], ...], BeforeValidator(_as_bias, json_schema_input_type=dict[str, _Bias] | None)
    ] = ()
    presence_penalty: Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY, allow_inf_nan=False)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=MAX_REPETITION_PENALTY, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_INT31)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    timeout_s: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    # Only for trusted callers, and what is wrong with it is no error (`mm_hashes.py`).
    mm_hashes: Annotated[object, WithJsonSchema({"type": "array", "items": {"type": ["string", "null"]}})] = None
    stop_token_ids: (
        Annotated[list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]], Field(max_length=MAX_STOP_TOKENS)] | None
    ) = None
    user: Annotated[str, Field(max_length=512)] | None = None


def parse_chat_request(body: object) -> ChatRequest:
    """From decoded JSON. Raises InvalidRequest or ModalityUnsupported, naming the parameter."""
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    try:
        parsed = ChatCompletionBody.model_validate(body)
    except ValidationError as error:
        raise _first_problem(error) from None
    num_choices = parsed.n or 1
    if parsed.best_of not in (None, num_choices):
        raise InvalidRequest("best_of is only supported with the value of n", param="best_of")
    max_tokens = parsed.max_completion_tokens or parsed.max_tokens
    ignored = _check_others(parsed.model_extra or {})
    messages, media = parse_messages(parsed.messages)
    return ChatRequest(
        model=parsed.model,
        messages=messages,
        media=media,
        max_tokens=max_tokens,
        temperature=parsed.temperature,
        top_p=parsed.top_p,
        seed=parsed.seed,
        stop=parsed.stop,
        stream=bool(parsed.stream),
        include_usage=bool(parsed.stream_options and parsed.stream_options.include_usage),
        ignored=ignored,
        options=_options(parsed, max_tokens),
        num_choices=num_choices,
        priority=parsed.priority or 0,
        cache_salt=parsed.cache_salt or "",
        timeout_s=parsed.timeout_s,
        mm_hashes=parsed.mm_hashes,
    )


def _options(parsed: ChatCompletionBody, max_tokens: int | None) -> SamplingOptions:
    """Raises InvalidRequest for what does not go together."""
    min_tokens = parsed.min_tokens or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens must be at most max_tokens, {max_tokens}", param="min_tokens")
    if parsed.top_logprobs and not parsed.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return SamplingOptions(
        top_k=None if parsed.top_k is None else max(0, parsed.top_k),
        min_p=parsed.min_p,
        repetition_penalty=parsed.repetition_penalty,
        presence_penalty=parsed.presence_penalty or 0.0,
        frequency_penalty=parsed.frequency_penalty or 0.0,
        logit_bias=parsed.logit_bias,
        stop_token_ids=tuple(parsed.stop_token_ids or ()),
        min_tokens=min_tokens,
        ignore_eos=bool(parsed.ignore_eos),
        num_logprobs=(parsed.top_logprobs or 0) if parsed.logprobs else None,
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
    # Pydantic's own words for these name our classes.
    is_no_object = problem["type"] in ("model_type", "model_attributes_type")
    message = "must be an object" if is_no_object else problem["msg"].removeprefix("Value error, ")
    return InvalidRequest(f"{where or 'the body'}: {message}", param=where or None)
