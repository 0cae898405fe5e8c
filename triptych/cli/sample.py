"""A request that works as it stands, as a curl command: a small picture drawn here, or a question alone."""

from __future__ import annotations

import base64
import io
import json

from PIL import Image, ImageDraw

QUESTION = "What colour is the circle?"
TEXT_QUESTION = "What is the capital of France?"


def picture_png() -> bytes:
    """A red circle on grey, 84 x 84 pixels, in few bytes."""
    canvas = Image.new("RGB", (84, 84), (130, 130, 130))
    ImageDraw.Draw(canvas).ellipse((16, 16, 68, 68), fill=(222, 40, 38))
    buffer = io.BytesIO()
    canvas.quantize(8).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def data_uri(content: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode('ascii')}"


def curl(url: str, model_name: str) -> str:
    """One command for a shell, with a picture."""
    picture = {"type": "image_url", "image_url": {"url": data_uri(picture_png(), "image/png")}}
    return _command(url, model_name, [picture, {"type": "text", "text": QUESTION}])


def text_curl(url: str, model_name: str) -> str:
    """The same for a model that takes text only."""
    return _command(url, model_name, TEXT_QUESTION)


def _command(url: str, model_name: str, content: object) -> str:
    body = json.dumps({"model": model_name, "messages": [{"role": "user", "content": content}]})
    escaped = body.replace("'", "'\\''")
    return f"curl -s {url}/v1/chat/completions -w '\\n' -H 'content-type: application/json' -d '{escaped}'"
