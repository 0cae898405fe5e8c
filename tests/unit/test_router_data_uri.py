from __future__ import annotations

import base64
from urllib.parse import quote

import pytest

from services.router.data_uri import decode_data_uri, is_data_uri
from triptych.core.errors import MediaInvalid, PayloadTooLarge

DATA = bytes(range(256)) * 3
B64 = base64.b64encode(DATA).decode()
URL_SAFE = base64.urlsafe_b64encode(DATA).decode()
WRAPPED = "\r\n".join(B64[start : start + 76] for start in range(0, len(B64), 76))


@pytest.mark.parametrize(
    "uri",
    [
        f"data:image/png;base64,{B64}",
        f"DATA:image/png;BASE64,{B64}",
        f"data:;base64,{B64}",
        f"data:image/png;charset=utf-8;base64,{B64}",
        f'data:image/png;name="a;b.png";base64,{B64}',
        f"data:image/png; base64 ,{B64}",
        f"data:image/png;base64,{WRAPPED}",
        f"data:image/png;base64, {B64} \n",
        f"data:image/png;base64,{B64.rstrip('=')}",
        f"data:image/png;base64,{URL_SAFE}",
        f"data:image/png;base64,{quote(B64, safe='')}",
        f"data:image/png,{quote(DATA)}",
        f"data:text/html;base64,{B64}",
    ],
)
def test_every_way_of_writing_it(uri: str) -> None:
    assert is_data_uri(uri)
    assert decode_data_uri(uri, len(DATA), "p") == DATA


def test_plain_text_payload() -> None:
    assert decode_data_uri("data:,a%20b", 10, "p") == b"a b"
    assert decode_data_uri("data:,", 10, "p") == b""


@pytest.mark.parametrize(
    "uri",
    [
        "data:image/png;base64",
        "data:image/png;base64,####",
        "data:image/png;base64,AAAAA",
        "data:image/png;base64,AA=AA",
        "data:image/png;base64,é",
        "data:" + "x" * 5000 + ",AAAA",
    ],
)
def test_what_is_none(uri: str) -> None:
    with pytest.raises(MediaInvalid) as caught:
        decode_data_uri(uri, 100, "messages.0")
    assert caught.value.param == "messages.0"
    assert "data:image" not in caught.value.message


def test_the_limit_is_exact() -> None:
    uri = f"data:;base64,{B64}"
    assert len(decode_data_uri(uri, len(DATA), "p")) == len(DATA)
    with pytest.raises(PayloadTooLarge, match=str(len(DATA) - 1)):
        decode_data_uri(uri, len(DATA) - 1, "p")
    with pytest.raises(PayloadTooLarge):
        decode_data_uri("data:," + "x" * 10_000, 100, "p")
