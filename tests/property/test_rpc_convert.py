"""Wire <-> domain: what is ours comes back equal; what is mutated comes back checked, or as a TriptychError."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.core.cache_feed import Change, FeedKind, FeedMessage, Holding, WorkerLoad
from triptych.core.errors import InvalidRequest, MediaMismatch, TriptychError
from triptych.core.expansion import check_ranges
from triptych.core.grant import Grant, GroupRegions, Region
from triptych.core.ids import AttemptRef
from triptych.core.kv_format import KvDtype
from triptych.core.plan import (
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
from triptych.rpc import convert
from triptych.wire.v1 import common_pb2 as pb
from triptych.wire.v1 import feed_pb2 as feed_pb
from triptych.wire.v1 import registry_pb2 as registry_pb

names = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,40}", fullmatch=True)
epochs = st.integers(1, 2**63 - 1)
token_ids = st.integers(0, 999_999)
refs = st.builds(AttemptRef, names, st.integers(0, 1023), st.integers(0, 2**16))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Items whose ranges lie where they say."""
    compact_ids: list[int] = draw(st.lists(token_ids, min_size=1, max_size=4))
    items: list[Item] = []
    grown = 0
    for _ in range(draw(st.integers(0, 3))):
        ranges = []
        for length in draw(st.lists(st.integers(1, 50), min_size=1, max_size=3)):
            ranges.append(TokenRange(len(compact_ids), len(compact_ids) + grown, length))
            grown += length - 1
            compact_ids += [7, *draw(st.lists(token_ids, max_size=3))]
        items.append(
            Item(
                draw(st.sampled_from(Modality)),
                draw(st.binary(min_size=32, max_size=32)),
                sum(run.length for run in ranges),
                tuple(ranges),
                draw(st.builds(Grid, *[st.integers(1, 2**16)] * 3)),
                draw(st.integers(0, 2**34)),
                draw(st.integers(0, 2**18)),
                draw(st.integers(0, 2**18)),
                format_ := draw(st.sampled_from(ItemFormat)),
                draw(st.sampled_from([b"", b"h" * 32])) if format_ is ItemFormat.NORMAL else b"",
            )
        )
    return Plan(
        tuple(compact_ids),
        tuple(items),
        draw(samplings),
        draw(st.integers(1, 86_400_000)) / 1000,
        draw(st.binary(max_size=64)),
        draw(st.binary(min_size=32, max_size=32)),
        draw(st.integers(-100, 100)),
        tuple(draw(st.lists(token_ids, max_size=5))),
        draw(st.integers(0, 3)),
    )


biases = st.dictionaries(token_ids, st.floats(-100, 100), max_size=5)
samplings = st.builds(
    Sampling,
    st.integers(100, 2**20),
    st.floats(0, 100),
    st.floats(0, 1, exclude_min=True),
    st.integers(0, 2**64 - 1),
    st.frozensets(token_ids, max_size=8),
    st.none() | st.integers(1, 1_000_000),
    st.floats(0, 1),
    st.floats(0, 10, exclude_min=True),
    st.floats(-2, 2),
    st.floats(-2, 2),
    biases.map(lambda bias: tuple(sorted(bias.items()))),
    st.integers(0, 100),
    st.frozensets(token_ids, max_size=4),
    st.none() | st.integers(0, 20),
)
groups = st.lists(st.integers(1, 9), max_size=4).map(
    lambda runs: (GroupRegions(0, 0, tuple(Region(100 * n, run) for n, run in enumerate(runs))),)
)
grants = st.builds(
    Grant,
    names,
    names,
    epochs,
    st.binary(min_size=16, max_size=16),
    st.integers(1, 2**26),
    st.integers(0, 2**64 - 1),
    st.just(()) | groups,
)
some_logprobs = st.floats(-9999, 0)
token_logprobs = st.builds(
    TokenLogprobs, some_logprobs, st.lists(st.tuples(token_ids, some_logprobs), max_size=20).map(tuple)
)
tokens = st.builds(Token, st.integers(0, 2**20), token_ids, st.none() | token_logprobs)
usages = st.integers(0, 2**20).flatmap(
    lambda prompt: st.builds(Usage, st.just(prompt), st.integers(0, prompt), st.integers(0, 2**20))
)
events = st.sampled_from([(stage, event) for stage, known in EVENTS.items() for event in known]).flatmap(
    lambda pair: st.builds(
        TimelineEvent,
        st.just(pair[0]),
        st.just(pair[1]),
        st.integers(0, 2**62),
        st.integers(2**62, 2**63 - 1),
        st.just("") | names,
        st.integers(0, 2**16),
        st.integers(0, 2**63 - 1),
        st.integers(0, 2**21),
        st.none() | st.sampled_from(EmbeddingSource),
        st.none() | st.integers(0, 1023),
    )
)
addresses = st.sampled_from(["127.0.0.1:8101", "[::1]:80", "worker-1.example:65535"])
workers = st.builds(
    WorkerInfo,
    names,
    epochs,
    st.frozensets(st.sampled_from(Role), min_size=1),
    st.sampled_from(WorkerState),
    addresses,
    st.just("") | addresses,
    st.sampled_from(["", "demo-vl", "Qwen/Qwen2.5-VL"]),
    st.just(b"") | st.binary(min_size=32, max_size=32),
    st.just("") | names,
    st.lists(names, max_size=3).map(tuple),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**26),
    st.integers(0, 1024),
    st.integers(0, 2**21),
    st.dictionaries(names, st.integers(0, 2**64 - 1), max_size=3),
    st.just(b"") | st.binary(min_size=32, max_size=32),
    st.just(b"") | st.binary(min_size=32, max_size=32),
    st.none() | st.sampled_from(KvDtype),
    st.booleans(),
)

KINDS: list[tuple[str, st.SearchStrategy[Any], Callable[[Any], Message], Callable[[Any], Any]]] = [
    ("ref", refs, convert.ref_to_proto, convert.ref_from_proto),
    ("plan", plans(), convert.plan_to_proto, convert.plan_from_proto),
    ("sampling", samplings, convert.sampling_to_proto, convert.sampling_from_proto),
    ("grant", grants, convert.grant_to_proto, convert.grant_from_proto),
    ("token", tokens, convert.token_to_proto, convert.token_from_proto),
    ("usage", usages, convert.usage_to_proto, convert.usage_from_proto),
    ("event", events, convert.event_to_proto, convert.event_from_proto),
    ("worker", workers, convert.worker_to_proto, convert.worker_from_proto),
]
kinds = pytest.mark.parametrize(("values", "to", "back"), [kind[1:] for kind in KINDS], ids=[kind[0] for kind in KINDS])


@kinds
@given(data=st.data())
def test_round_trip(
    values: st.SearchStrategy[Any], to: Callable[[Any], Message], back: Callable[[Any], Any], data: st.DataObject
) -> None:
    value = data.draw(values)
    message = to(value)
    assert back(type(message).FromString(message.SerializeToString())) == value


@kinds
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_mutated_messages_parse_or_raise_ours(
    values: st.SearchStrategy[Any], to: Callable[[Any], Message], back: Callable[[Any], Any], data: st.DataObject
) -> None:
    message = to(data.draw(values))
    raw = bytearray(message.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        mutated = type(message).FromString(bytes(raw))
    except DecodeError:
        return
    try:
        value = back(mutated)
    except TriptychError:
        return
    assert back(to(value)) == value  # whatever is let in is within the bounds
    if isinstance(value, Plan):
        check_ranges(value.compact_ids, value.items)
        how = value.sampling
        assert math.isfinite(how.temperature) and 0 < how.top_p <= 1 and 0 <= how.min_p <= 1
        assert 0 < how.repetition_penalty <= 10 and abs(how.presence_penalty) <= 2 >= abs(how.frequency_penalty)
        assert how.min_tokens <= how.max_tokens and (how.top_k is None or how.top_k >= 1)


PLAN = Plan(
    (1, 2, 3),
    (Item(Modality.IMAGE, b"i" * 32, 4, (TokenRange(1, 1, 4),), Grid(1, 4, 4), 10, 56, 56),),
    Sampling(5),
    1.0,
    b"",
    b"m" * 32,
)


def edited(edit: Callable[[pb.Plan], object]) -> pb.Plan:
    message = convert.plan_to_proto(PLAN)
    edit(message)
    return message


@pytest.mark.parametrize(
    ("field", "edit"),
    [
        ("max_tokens", lambda m: setattr(m.sampling, "max_tokens", 0)),
        ("max_tokens", lambda m: setattr(m.sampling, "max_tokens", 2**20 + 1)),
        ("max_tokens", lambda m: setattr(m.sampling, "max_tokens", 2**31)),
        ("temperature", lambda m: setattr(m.sampling, "temperature", math.nan)),
        ("temperature", lambda m: setattr(m.sampling, "temperature", math.inf)),
        ("temperature", lambda m: setattr(m.sampling, "temperature", -0.1)),
        ("temperature", lambda m: setattr(m.sampling, "temperature", 100.1)),
        *[
            (field, lambda m, field=field, value=value: setattr(m.sampling, field, value))
            for field, low, high in [
                ("min_p", 0.0, 1.0),
                ("repetition_penalty", 0.0, 10.0),
                ("presence_penalty", -2.0, 2.0),
                ("frequency_penalty", -2.0, 2.0),
            ]
            for value in (low - 0.1, high + 0.1, 2.0**31, math.nan, math.inf, -math.inf)
        ],
        ("repetition_penalty", lambda m: m.sampling.ClearField("repetition_penalty")),
        *[
            (field, lambda m, field=field, value=value: setattr(m.sampling, field, value))
            for field, wrong in [
                ("top_k", (0, 1_000_001, 2**31)),
                ("min_tokens", (6, 2**31)),
                ("num_logprobs", (21, 2**31)),
            ]
            for value in wrong
        ],
        *[
            ("logit_bias", lambda m, entry=entry: m.sampling.logit_bias.append(entry))
            for entry in [
                *[pb.LogitBias(id=1, bias=bias) for bias in (100.1, -100.1, math.nan, math.inf)],
                *[pb.LogitBias(id=number) for number in (1_000_000, 2**31)],
            ]
        ],
        ("logit_bias", lambda m: m.sampling.logit_bias.extend([pb.LogitBias(id=2), pb.LogitBias(id=1)])),
        ("logit_bias", lambda m: m.sampling.logit_bias.extend([pb.LogitBias(id=2)] * 2)),
        ("logit_bias", lambda m: m.sampling.logit_bias.extend([pb.LogitBias(id=n) for n in range(301)])),
        ("eos_token_ids", lambda m: m.sampling.eos_token_ids.extend(range(1025))),
        ("eos_token_ids", lambda m: m.sampling.eos_token_ids.append(1_000_000)),
        ("top_p", lambda m: setattr(m.sampling, "top_p", 0)),
        ("top_p", lambda m: setattr(m.sampling, "top_p", 1.01)),
        ("top_p", lambda m: setattr(m.sampling, "top_p", math.nan)),
        ("sampling", lambda m: m.ClearField("sampling")),
        ("timeout_ms", lambda m: setattr(m, "timeout_ms", 0)),
        ("timeout_ms", lambda m: setattr(m, "timeout_ms", 2**63)),
        ("identity", lambda m: setattr(m.items[0], "identity", b"i" * 31)),
        ("modality", lambda m: setattr(m.items[0], "modality", 0)),
        ("modality", lambda m: setattr(m.items[0], "modality", 99)),
        ("format", lambda m: setattr(m.items[0], "format", 0)),
        ("format", lambda m: setattr(m.items[0], "format", 4)),
        ("caller_hash", lambda m: setattr(m.items[0], "caller_hash", b"h" * 31)),
        ("caller_hash", lambda m: setattr(m.items[0], "caller_hash", b"h" * 33)),
        ("caller_hash", lambda m: (setattr(m.items[0], "caller_hash", b"h" * 32), setattr(m.items[0], "format", 2))),
        ("grid.h", lambda m: setattr(m.items[0].grid, "h", 0)),
        ("model_fingerprint", lambda m: setattr(m, "model_fingerprint", b"")),
        *[("priority", lambda m, value=value: setattr(m, "priority", value)) for value in (-101, 101, 2**31 - 1)],
        ("cache_salt length", lambda m: setattr(m, "cache_salt", b"s" * 65)),
        ("compact_ids", lambda m: m.compact_ids.append(1_000_000)),
        ("compact_ids", lambda m: m.compact_ids.append(2**32 - 1)),
        ("stop_token_ids", lambda m: m.sampling.stop_token_ids.extend(range(1025))),
        ("items", lambda m: m.items.extend([m.items[0]] * 1024)),
        ("prompt length", lambda m: (m.ClearField("compact_ids"), m.ClearField("items"))),
    ],
)
def test_each_bound_names_its_field(field: str, edit: Callable[[pb.Plan], object]) -> None:
    with pytest.raises(InvalidRequest) as raised:
        convert.plan_from_proto(edited(edit))
    assert raised.value.param == field


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: setattr(m.items[0], "num_tokens", 5),
        lambda m: setattr(m.items[0].ranges[0], "offset", 2),
        lambda m: setattr(m.items[0].ranges[0], "compact_index", 3),
        lambda m: m.items[0].ClearField("ranges"),
        lambda m: m.items.extend([m.items[0]]),
    ],
)
def test_ranges_that_do_not_add_up_are_a_mismatch(edit: Callable[[pb.Plan], object]) -> None:
    with pytest.raises(MediaMismatch):
        convert.plan_from_proto(edited(edit))


@pytest.mark.parametrize(
    ("timeout_s", "timeout_ms"), [(1045.525, 1045525), (1.0001, 1001), (1e-9, 1), (86_400.0, 86_400_000)]
)
def test_a_whole_number_of_milliseconds_stays_one(timeout_s: float, timeout_ms: int) -> None:
    assert convert.timeout_to_ms(timeout_s) == timeout_ms


@given(st.integers(1, 86_400_000))
def test_milliseconds_come_back(timeout_ms: int) -> None:
    assert convert.timeout_to_ms(convert.timeout_from_ms(timeout_ms)) == timeout_ms


def test_grants_and_workers_are_bounded_too() -> None:
    grant = convert.grant_to_proto(Grant("grant-1", "decode-1", 1, b"c" * 16, 4, 1))
    twice = GroupRegions(0, 0, (Region(0, 4), Region(3, 1)))
    for edit in (
        lambda m: setattr(m, "capability", b"c" * 15),
        lambda m: setattr(m, "epoch", 0),
        lambda m: setattr(m, "num_pages", 2**26 + 1),
        lambda m: m.groups.append(convert.group_to_proto(twice)),
        lambda m: m.groups.extend([pb.GroupRegions()] * 2),
    ):
        bad = pb.Grant.FromString(grant.SerializeToString())
        edit(bad)
        with pytest.raises(InvalidRequest):
            convert.grant_from_proto(bad)
    worker = WorkerInfo("w", 1, frozenset({Role.DECODE}), WorkerState.READY, "127.0.0.1:1")
    for change in (
        {"grpc_address": "nowhere"},
        {"grpc_address": "h:0"},
        {"roles": frozenset()},
        {"epoch": 0},
        {"page_tokens": 1025},
    ):
        with pytest.raises(InvalidRequest):
            convert.worker_from_proto(convert.worker_to_proto(replace(worker, **change)))
    with pytest.raises(InvalidRequest):
        convert.worker_from_proto(registry_pb.WorkerRecord())
    odd = convert.worker_to_proto(worker)
    odd.kv_dtype = 4  # type: ignore[assignment]
    with pytest.raises(InvalidRequest):
        convert.worker_from_proto(odd)


@pytest.mark.parametrize("value", [0.1, -9999.1, math.nan, math.inf, -math.inf])
def test_log_probabilities_are_bounded(value: float) -> None:
    for told in (pb.TokenLogprobs(logprob=value), pb.TokenLogprobs(top=[pb.Alternative(id=1, logprob=value)])):
        with pytest.raises(InvalidRequest):
            convert.token_from_proto(pb.Token(logprobs=told))
    many = pb.TokenLogprobs(top=[pb.Alternative(id=1)] * 21)
    with pytest.raises(InvalidRequest):
        convert.token_from_proto(pb.Token(logprobs=many))


def test_finish_reasons() -> None:
    for reason in (None, *FinishReason):
        assert convert.optional_finish_reason_from_proto(convert.finish_reason_to_proto(reason)) is reason
    with pytest.raises(InvalidRequest):
        convert.finish_reason_from_proto(pb.FINISH_REASON_UNSPECIFIED)
    with pytest.raises(InvalidRequest):
        convert.source_from_proto(pb.EMBEDDING_SOURCE_UNSPECIFIED)


# --- feeds ------------------------------------------------------------------------------------------------------------

numbers = st.lists(st.integers(0, 2**64 - 1), max_size=5).map(tuple)
rates = st.none() | st.floats(1e-3, 1e9)
counts = st.integers(0, 2**40)
loads = st.builds(WorkerLoad, counts, counts, st.none() | st.integers(0, 2**20), st.integers(0, 2**20), rates, rates)
feeds = st.builds(
    FeedMessage,
    epochs,
    counts,
    st.sampled_from(FeedKind),
    st.dictionaries(st.sampled_from(Holding), st.builds(Change, numbers, numbers)),
    st.none() | loads,
)


@given(feeds)
def test_a_feed_comes_back_equal(message: FeedMessage) -> None:
    assert convert.feed_from_proto(convert.feed_to_proto(message)) == message


@given(st.binary(max_size=200))
def test_a_feed_of_any_bytes_is_checked(data: bytes) -> None:
    message = feed_pb.WatchResponse()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return
    try:
        found = convert.feed_from_proto(message)
    except InvalidRequest:
        return
    assert found.epoch >= 1 and found.kind in FeedKind


def test_a_feed_without_end_is_refused() -> None:
    change = feed_pb.HoldingChange(holding=feed_pb.HOLDING_PAGE, stored=range(10_001))
    message = feed_pb.WatchResponse(epoch=1, kind=feed_pb.FEED_KIND_DELTA, changes=[change])
    with pytest.raises(InvalidRequest, match="10000"):
        convert.feed_from_proto(message)
