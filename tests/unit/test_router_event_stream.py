"""Events are the same bytes however many go in one write."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.choices import Piece
from services.router.event_stream import END, EventStream
from services.router.responses import Envelope
from triptych.core.plan import FinishReason, Token, Usage

ENVELOPE = Envelope("chatcmpl-1", 1, 'a "model" with \\ and {"content":""}')


def stream(with_usage: bool = False) -> EventStream:
    return EventStream(ENVELOPE, with_usage=with_usage, logprobs=lambda tokens: None)


def piece(text: str, choice: int = 0, reason: FinishReason | None = None) -> Piece:
    return Piece(choice, text, (Token(0, 7),), reason)


pieces = st.lists(st.builds(piece, st.text(), st.integers(0, 2)), max_size=12)


@given(pieces, st.booleans(), st.data())
def test_cutting_pieces_into_writes_changes_no_byte(every: list[Piece], with_usage: bool, data: st.DataObject) -> None:
    one_by_one, gathered = stream(with_usage), stream(with_usage)
    expected = b"".join(one_by_one.pieces([each]) for each in every)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(every)), max_size=4)))
    bounds = [0, *cuts, len(every)]
    written = [gathered.pieces(every[start:end]) for start, end in itertools.pairwise(bounds)]
    assert b"".join(written) == expected


@given(pieces, st.booleans())
def test_each_event_is_what_openai_says(every: list[Piece], with_usage: bool) -> None:
    sent = stream(with_usage).pieces([*every, piece("", 0, FinishReason.STOP)])
    events: list[dict[str, Any]] = [json.loads(event.removeprefix(b"data: ")) for event in sent.split(b"\n\n")[:-1]]
    texts: dict[int, str] = {}
    for event in events:
        assert (event["object"], event["model"]) == ("chat.completion.chunk", ENVELOPE.model)
        assert ("usage" in event) is with_usage
        (choice,) = event["choices"]
        assert choice["logprobs"] is None
        if choice["index"] not in texts:
            assert choice["delta"] == {"role": "assistant", "content": ""}, "the first says who speaks"
            texts[choice["index"]] = ""
        texts[choice["index"]] += choice["delta"].get("content", "")
    said = {index: "".join(one.text for one in every if one.choice == index) for index in texts}
    assert texts == said
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(("with_usage", "told"), [(True, {}), (False, {}), (False, {"triptych": {}})])
def test_the_end_comes_last(with_usage: bool, told: dict[str, Any]) -> None:
    closing = stream(with_usage).closing(Usage(1, 0, 2), told)
    assert closing.endswith(END)
    assert closing.count(b"data: ") == 1 + (with_usage or bool(told))
