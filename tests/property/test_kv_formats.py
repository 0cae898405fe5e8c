"""Which pools may be joined, and what a greeting says of them: judged by what torch says of the number formats."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.core.errors import InvalidRequest, TransferRefused, TriptychError
from triptych.core.ids import WorkerRef
from triptych.core.kv_format import Conversion, KvDtype, KvTerms, PageFormat, conversion, why_not
from triptych.transport import frames, session
from triptych.transport.session import ArenaOffer, Greeted, ReceiverSession, SenderSession, State
from triptych.transport.types import ArenaKind, Endpoint
from triptych.wire.v1 import transfer_pb2 as wire

SENDER = Endpoint(WorkerRef("prefill-0", 11), "host-1", ("shm",))
RECEIVER = Endpoint(WorkerRef("decode-0", 21), "host-1", ("shm",))
LAYOUT = b"l" * 32
SEGMENT = "triptych-kv-0123456789abcdef"
PLAIN = KvTerms(PageFormat(16, KvDtype.FLOAT32))

formats = st.builds(PageFormat, st.integers(1, 1024), st.sampled_from(KvDtype))
terms = st.builds(KvTerms, formats, st.booleans())
u32 = st.integers(0, 2**32 - 1)


def info(dtype: KvDtype) -> torch.finfo:
    return torch.finfo(getattr(torch, dtype.value))


def keeps_all(sent: KvDtype, kept: KvDtype) -> bool:
    """As precise and as wide, at both ends."""
    a, b = info(sent), info(kept)
    return b.eps <= a.eps and b.max >= a.max and b.tiny <= a.tiny


def reaches_as_far(sent: KvDtype, kept: KvDtype) -> bool:
    """Its exponents go as far up: nothing becomes infinite that is not at the very end."""
    return math.frexp(info(kept).max)[1] >= math.frexp(info(sent).max)[1]


def receiver_with(kv: KvTerms | None) -> ReceiverSession:
    return ReceiverSession(RECEIVER, lambda kind: ArenaOffer(LAYOUT, SEGMENT, 1 << 20, kv=kv))


@pytest.mark.parametrize("sent", KvDtype)
@pytest.mark.parametrize("kept", KvDtype)
def test_what_is_converted_is_what_the_other_format_can_hold(sent: KvDtype, kept: KvDtype) -> None:
    how = conversion(sent, kept)
    assert (how in (Conversion.NONE, Conversion.WIDENED)) == keeps_all(sent, kept)
    assert (how is Conversion.IMPOSSIBLE) == (not reaches_as_far(sent, kept))
    assert (how is Conversion.NONE) == (sent is kept) and sent.num_bytes == info(sent).bits // 8


@pytest.mark.parametrize("sent", [KvDtype.BFLOAT16, KvDtype.FLOAT16])
def test_widening_keeps_each_number_there_is(sent: KvDtype) -> None:
    dtype = getattr(torch, sent.value)
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = numbers[~numbers.isnan()]
    assert torch.equal(numbers.to(torch.float32).to(dtype).view(torch.int16), numbers.view(torch.int16))


@settings(report_multiple_bugs=False)
@given(terms, terms)
def test_two_sides_are_joined_if_and_only_if_no_number_suffers_unallowed(sender: KvTerms, receiver: KvTerms) -> None:
    sent, kept = sender.pages.dtype, receiver.pages.dtype
    may = keeps_all(sent, kept) or (reaches_as_far(sent, kept) and sender.may_narrow and receiver.may_narrow)
    assert (why_not(sender, receiver) is None) == may
    ours, theirs = SenderSession(SENDER, RECEIVER.ref, ArenaKind.KV, LAYOUT, sender), receiver_with(receiver)
    outcome = theirs.receive(ours.hello())
    if not may:
        assert isinstance(outcome, wire.SessionResponse) and theirs.state is State.CLOSED
        refusal = ours.welcome(outcome)
        assert isinstance(refusal, TransferRefused) and sent.value in refusal.message and kept.value in refusal.message
        return
    assert isinstance(outcome, Greeted) and outcome.greeting.kv == sender
    welcome = ours.welcome(theirs.welcome(outcome, 7))
    assert isinstance(welcome, frames.Welcome) and welcome.pages == receiver.pages


@given(st.none() | st.tuples(u32, u32), st.sampled_from(ArenaKind), st.booleans())
def test_forged_pages_in_a_greeting_are_refused(pages: tuple[int, int] | None, kind: ArenaKind, may: bool) -> None:
    check_greeting(None if pages is None else (pages[0], pages[1] - 2**31), kind, may)


def check_greeting(pages: tuple[int, int] | None, kind: ArenaKind, may: bool) -> None:
    honest = SenderSession(SENDER, RECEIVER.ref, kind, LAYOUT, PLAIN if kind is ArenaKind.KV else None).hello()
    honest.hello.ClearField("pages")
    honest.hello.may_narrow = may
    if pages is not None:
        honest.hello.pages.CopyFrom(wire.PageFormat(page_tokens=pages[0], dtype=pages[1]))  # type: ignore[arg-type]
    receiver = receiver_with(PLAIN if kind is ArenaKind.KV else None)
    outcome = receiver.receive(honest)
    is_sound = pages is not None and 1 <= pages[0] <= 1024 and pages[1] in (1, 2, 3)
    if (is_sound and kind is ArenaKind.KV) or (pages is None and not may and kind is ArenaKind.EMBEDDING):
        assert isinstance(outcome, Greeted)
    else:
        assert isinstance(outcome, wire.SessionResponse) and outcome.refused.error.code == InvalidRequest.code
        assert receiver.state is State.CLOSED


small = st.tuples(st.integers(0, 1030), st.integers(0, 5))


@settings(max_examples=200, report_multiple_bugs=False)
@given(st.none() | small, small | st.none(), st.sampled_from(ArenaKind), st.booleans())
def test_what_is_sound_is_taken_and_all_else_refused(
    hello: tuple[int, int] | None, ack: tuple[int, int] | None, kind: ArenaKind, may: bool
) -> None:
    """As above with numbers near those that are right; and the receiver's own, forged, at the sender."""
    check_greeting(hello, kind, may)
    mine = KvTerms(PLAIN.pages, may) if kind is ArenaKind.KV else None
    ours, theirs = SenderSession(SENDER, RECEIVER.ref, kind, LAYOUT, mine), receiver_with(mine)
    greeted = theirs.receive(ours.hello())
    assert isinstance(greeted, Greeted)
    frame = theirs.welcome(greeted, 7)
    frame.hello_ack.ClearField("pages")
    if ack is not None:
        frame.hello_ack.pages.CopyFrom(wire.PageFormat(page_tokens=ack[0], dtype=ack[1]))  # type: ignore[arg-type]
    welcome = ours.welcome(frame)
    fits = ack is not None and 1 <= ack[0] <= 1024 and (ack[1] == 1 or (ack[1] == 2 and may))
    if fits if kind is ArenaKind.KV else ack is None:
        assert isinstance(welcome, frames.Welcome)
    else:
        assert isinstance(welcome, TriptychError) and ours.state is State.CLOSED


def test_a_pool_that_does_not_say_how_it_lies_is_not_written_to() -> None:
    sender = SenderSession(SENDER, RECEIVER.ref, ArenaKind.KV, LAYOUT, PLAIN)
    outcome = receiver_with(None).receive(sender.hello())
    assert isinstance(outcome, wire.SessionResponse)
    refusal = sender.welcome(outcome)
    assert isinstance(refusal, TransferRefused) and "does not say" in refusal.message


@pytest.mark.parametrize(
    ("finder", "place", "how"),
    [
        (test_two_sides_are_joined_if_and_only_if_no_number_suffers_unallowed, "check_terms", lambda *_: None),
        (test_what_is_sound_is_taken_and_all_else_refused, "check_terms", lambda *_: None),
    ],
)
def test_a_build_that_looks_away_is_found(
    finder: object, place: str, how: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, place, how)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        finder()  # type: ignore[operator]
