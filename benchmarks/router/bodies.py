"""The requests of a load: JSON bodies that differ from each other in a few bytes, made at the price of a copy."""

from __future__ import annotations

import base64
import io
import os
from dataclasses import dataclass

import orjson
from PIL import Image

PICTURE_BYTES = 150_000
"""As base64 in a data URI 200,000 characters."""
_SIDE_PX = 448
_SLOT = "AAAAAAAA"
_QUESTION = (
    "Here is a report on the harbour of a small town, and a question about it. In spring the fishing boats leave before"
    " sunrise and come back around noon; the market opens when the first of them has made fast. In summer visitors fill"
    " the quay until late in the evening, and the ferry to the islands goes every hour instead of twice a day. Storms"
    " are rare until October. Then the harbour master closes the outer basin, boats are moved to the inner one, and who"
    " comes late has to anchor behind the mole. Last year a new crane was put up beside the old warehouse, where the"
    " shipyard repairs nets and hulls in winter. The town has asked whether it should keep the warehouse, which needs"
    " a new roof, or build a hall for the market in its place. What would you advise, and for which reasons? Answer in"
    " a few sentences, weigh the cost against the use of it in each season, and name one thing that should be found out"
    " before anything is decided. Do not repeat the report. "
)


@dataclass(frozen=True, slots=True)
class Bodies:
    """`make(number)` is the body of request `number`; those with other numbers are other prompts or pictures."""

    before: bytes
    after: bytes

    def make(self, number: int) -> bytes:
        return self.before + base64.b16encode(number.to_bytes(4, "big")) + self.after

    @classmethod
    def text(cls, model: str, max_tokens: int, *, stream: bool) -> Bodies:
        return cls._of([{"type": "text", "text": f"Report {_SLOT}. {_QUESTION}"}], model, max_tokens, stream=stream)

    @classmethod
    def picture(cls, model: str, max_tokens: int, *, stream: bool) -> Bodies:
        picture = base64.b64encode(noise_jpeg(PICTURE_BYTES)).decode()
        uri = f"data:image/jpeg;base64,{picture[: -len(_SLOT)]}{_SLOT}"
        parts: list[dict[str, object]] = [
            {"type": "image_url", "image_url": {"url": uri}},
            {"type": "text", "text": "What is in the picture?"},
        ]
        return cls._of(parts, model, max_tokens, stream=stream)

    @classmethod
    def plain(cls, num_bytes: int) -> Bodies:
        return cls(b"x" * (num_bytes - len(_SLOT)), b"")

    @classmethod
    def _of(cls, parts: list[dict[str, object]], model: str, max_tokens: int, *, stream: bool) -> Bodies:
        body: dict[str, object] = {
            "model": model,
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        before, after = orjson.dumps(body).rsplit(_SLOT.encode(), 1)
        return cls(before, after)


def noise_jpeg(num_bytes: int) -> bytes:
    """A JPEG of exactly so many bytes: noise as far as it fits, then a tail that decoders pass over, and that the
    number of a request is written into."""
    picture = Image.frombytes("RGB", (_SIDE_PX, _SIDE_PX), os.urandom(3 * _SIDE_PX * _SIDE_PX))
    for quality in range(75, 10, -5):
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=quality)
        if len(file.getvalue()) <= num_bytes - 64:
            return file.getvalue().ljust(num_bytes, b"\0")
    raise AssertionError("noise of this size always fits at some quality")
