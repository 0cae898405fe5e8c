"""Every number, list and text that a caller or a peer may send has a bound: they are found by walking the schema of the
body and the descriptors of the messages, so that a new one cannot be forgotten."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from services.router import chat_request
from services.router.chat_request import ChatCompletionBody
from tests.unit import router_house
from tests.unit.router_house import Api, error_of
from triptych.core.errors import InvalidRequest, MediaMismatch
from triptych.core.plan import EmbeddingSource, Grid, Item, Modality, Plan, Sampling, TokenRange
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.rpc import convert
from triptych.wire.v1 import common_pb2 as pb

model, api = router_house.model, router_house.api

# --- HTTP -------------------------------------------------------------------------------------------------------------


class Leaf(NamedTuple):
    """One number, text or list of the body; `written(text)` is the JSON of its parameter with that text there."""

    param: str
    schema: Mapping[str, Any]
    written: Callable[[str], str]


def leaves(param: str, schema: Mapping[str, Any], written: Callable[[str], str]) -> Iterator[Leaf]:
    for option in schema.get("anyOf", [schema]):
        kind = option.get("type")
        if kind in ("integer", "number", "string", "array"):
            yield Leaf(param, option, written)
        if kind == "array" and option.get("items"):
            yield from leaves(param, option["items"], lambda text: written(f"[{text}]"))
        if kind == "object" and isinstance(option.get("additionalProperties"), dict):
            yield from leaves(param, option["additionalProperties"], lambda text: written(f'{{"1": {text}}}'))


def body_leaves() -> list[Leaf]:
    properties = ChatCompletionBody.model_json_schema()["properties"]
    return [leaf for name, schema in properties.items() for leaf in leaves(name, schema, lambda text: text)]


NUMBERS = [leaf for leaf in body_leaves() if leaf.schema["type"] in ("integer", "number")]
# Bounded in other ways: each string of `stop` and their number by a test of its own, `mm_hashes` by the pictures.
BOUNDED_OTHERWISE = {"stop", "mm_hashes"}


def beyond(schema: Mapping[str, Any]) -> list[str]:
    """What lies outside, as JSON: a step beyond each end, and what no number of ours is."""
    high = schema["exclusiveMaximum"] if "exclusiveMaximum" in schema else schema["maximum"] + 1
    low = schema["exclusiveMinimum"] if "exclusiveMinimum" in schema else schema["minimum"] - 1
    wrong = [high, low, *(number for number in (2**31, 2**53, 2**63, 2**64) if number >= high), -(2**63) - 1]
    texts = [str(number) for number in wrong] + ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "1" * 400]
    return [*texts, "true", '"1"', "[]", "{}", *(["1.5"] if schema["type"] == "integer" else [])]


def test_the_walk_finds_what_a_caller_may_send() -> None:
    found = {leaf.param for leaf in NUMBERS}
    assert found >= {"n", "max_tokens", "temperature", "seed", "logit_bias", "stop_token_ids", "timeout_s", "priority"}
    assert len(found) >= 18


@pytest.mark.parametrize("leaf", NUMBERS, ids=lambda leaf: leaf.param)
async def test_each_number_is_400_beyond_its_bounds(leaf: Leaf, api: Api) -> None:
    assert {"maximum", "exclusiveMaximum"} & set(leaf.schema), "it has no upper bound"
    assert {"minimum", "exclusiveMinimum"} & set(leaf.schema), "it has no lower bound"
    for text in beyond(leaf.schema):
        refused = await post(api, leaf, text)
        error = error_of(refused, 400)
        assert error["param"] is None or error["param"].split(".")[0] == leaf.param, text
    assert api.pipeline.plans == []
    assert (await api.chat()).status_code == 200


async def post(api: Api, leaf: Leaf, text: str) -> Any:
    messages = '[{"role": "user", "content": "x"}]'
    body = f'{{"messages": {messages}, {json.dumps(leaf.param)}: {leaf.written(text)}}}'
    return await api.client.post("/v1/chat/completions", content=body)


async def test_each_text_and_list_is_400_beyond_its_length(api: Api) -> None:
    others = [leaf for leaf in body_leaves() if leaf.schema["type"] in ("string", "array")]
    for leaf in others:
        if leaf.param in BOUNDED_OTHERWISE:
            continue
        if leaf.schema["type"] == "string":
            text = json.dumps("x" * (leaf.schema["maxLength"] + 1))
        else:
            entry = "{}" if leaf.param == "messages" else "1"
            text = "[" + ", ".join([entry] * (leaf.schema["maxItems"] + 1)) + "]"
        body = f'{{"messages": [{{"role": "user", "content": "x"}}], {json.dumps(leaf.param)}: {text}}}'
        if leaf.param == "messages":
            body = f'{{"messages": {text}}}'
        assert error_of(await api.client.post("/v1/chat/completions", content=body), 400)["param"] == leaf.param
    for stop in (["x"] * 17, ["x" * 257], "x" * 257):
        assert error_of(await api.chat(stop=stop), 400)["param"] == "stop"
    bias = {str(token_id): 1 for token_id in range(301)}
    assert error_of(await api.chat(logit_bias=bias), 400)["param"] == "logit_bias"


async def test_a_number_without_a_bound_would_be_found(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    unbounded = Leaf("n", {"type": "integer", "minimum": 1}, lambda text: text)
    with pytest.raises(AssertionError, match="no upper bound"):
        await test_each_number_is_400_beyond_its_bounds(unbounded, api)
    lax = ChatCompletionBody.model_construct()

    def takes_all(body: dict[str, Any]) -> ChatCompletionBody:
        return lax.model_copy(update={"messages": body["messages"], "n": 1})

    monkeypatch.setattr(chat_request.ChatCompletionBody, "model_validate", takes_all)
    with pytest.raises(AssertionError):
        await test_each_number_is_400_beyond_its_bounds(NUMBERS[0], api)


# --- gRPC -------------------------------------------------------------------------------------------------------------

_PLAN = Plan(
    (1, 2, 3),
    (Item(Modality.IMAGE, b"i" * 32, 4, (TokenRange(1, 1, 4),), Grid(1, 4, 4), 10, 56, 56),),
    Sampling(
        5, logit_bias=((1, 1.0),), stop_token_ids=frozenset({4}), eos_token_ids=frozenset({4}), top_k=3, num_logprobs=2
    ),
    1.0,
    b"s",
    b"m" * 32,
    answer_ids=(7,),
)
_GRANT = pb.Grant(
    grant_id="grant-1",
    worker_id="decode-1",
    epoch=1,
    capability=b"c" * 16,
    num_pages=4,
    generation=1,
    groups=[pb.GroupRegions(regions=[pb.Region(first_page=1, num_pages=2)])],
)
_TOKEN = pb.Token(index=1, id=2, logprobs=pb.TokenLogprobs(logprob=-1.0, top=[pb.Alternative(id=1, logprob=-1.0)]))
_EVENT = pb.TimelineEvent(
    stage="encoder",
    event="encode",
    start_ns=1,
    end_ns=2,
    source=convert.source_to_proto(EmbeddingSource.REMOTE),
    item_index=0,
)
_WORKER = WorkerInfo("worker-1", 1, frozenset({Role.DECODE}), WorkerState.READY, "127.0.0.1:8101")

# With those that may have any value: a seed, a count of reuses, and a number that the kernel gives.
MESSAGES: dict[str, tuple[Message, Callable[[Any], object], set[str]]] = {
    "plan": (convert.plan_to_proto(_PLAN), convert.plan_from_proto, {"sampling.seed"}),
    "ref": (pb.AttemptRef(request_id="req-1", choice=1, attempt=1), convert.ref_from_proto, set()),
    "grant": (_GRANT, convert.grant_from_proto, {"generation"}),
    "token": (_TOKEN, convert.token_from_proto, set()),
    "usage": (pb.Usage(prompt_tokens=3, cached_tokens=1, completion_tokens=1), convert.usage_from_proto, set()),
    "event": (_EVENT, convert.event_from_proto, set()),
    "worker": (convert.worker_to_proto(_WORKER), convert.worker_from_proto, {"pid"}),
}
_EXTREMES: dict[int, tuple[float, ...]] = {
    FieldDescriptor.CPPTYPE_UINT32: (2**32 - 1, 2**31),
    FieldDescriptor.CPPTYPE_UINT64: (2**64 - 1,),
    FieldDescriptor.CPPTYPE_INT32: (2**31 - 1, -(2**31)),
    FieldDescriptor.CPPTYPE_INT64: (2**63 - 1, -(2**63)),
    FieldDescriptor.CPPTYPE_DOUBLE: (float("nan"), float("inf"), float("-inf"), 1e308, -1e308),
    FieldDescriptor.CPPTYPE_FLOAT: (float("nan"), float("inf"), float("-inf"), 3e38, -3e38),
    FieldDescriptor.CPPTYPE_ENUM: (99, 2**31 - 1),
}


def edits(message: Message, before: str = "") -> Iterator[tuple[str, FieldDescriptor, Message]]:
    """Each number of a message, and the part of it that holds it."""
    for field in message.DESCRIPTOR.fields:
        path = f"{before}{field.name}"
        value = getattr(message, field.name)
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            if field.message_type.GetOptions().map_entry:
                continue
            for inner in value if field.is_repeated else [value] * message.HasField(field.name):
                yield from edits(inner, f"{path}.")
        elif field.cpp_type in _EXTREMES:
            yield path, field, message


def set_to(holder: Message, field: FieldDescriptor, value: Any) -> None:
    if field.is_repeated:
        getattr(holder, field.name).append(value)
    else:
        setattr(holder, field.name, value)


def unbounded_in(message: Message, back: Callable[[Any], object]) -> set[str]:
    """Paths at which some extreme value is taken."""
    back(message)
    found = set()
    for number, (path, field, _) in enumerate(edits(message)):
        for value in _EXTREMES[field.cpp_type]:
            changed = type(message).FromString(message.SerializeToString())
            _, same, holder = list(edits(changed))[number]
            set_to(holder, same, value)
            try:
                back(changed)
            except (InvalidRequest, MediaMismatch):
                continue
            found.add(path)
    return found


@pytest.mark.parametrize("name", MESSAGES)
def test_each_number_of_a_message_is_refused_at_its_extremes(name: str) -> None:
    message, back, free = MESSAGES[name]
    assert unbounded_in(message, back) == free


def test_the_walk_reaches_into_every_part_of_a_plan() -> None:
    paths = {path for path, _, _ in edits(MESSAGES["plan"][0])}
    assert paths >= {
        *("items.ranges.length", "items.grid.w", "items.width_px", "sampling.min_p", "sampling.logit_bias.bias"),
        *("timeout_ms", "priority", "answer_ids", "num_retractions", "compact_ids", "sampling.num_logprobs"),
    }


def test_a_bound_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.rpc.check.integer", lambda field, value, low, high: value)
    assert unbounded_in(*MESSAGES["usage"][:2])
