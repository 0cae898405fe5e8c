"""The `messages` of a request: roles, texts and the pictures between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.router.media import MediaReference
from triptych.core.errors import InvalidRequest, ModalityUnsupported
from triptych.text.messages import ChatMessage, ImagePart, TextPart

# Of all messages together. A body of 64 MiB has room for millions, which would keep the event loop for seconds.
MAX_PARTS = 16_384

# `developer` is OpenAI's newer name for `system`.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_OTHER_MODALITIES = {
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
    "video_url": "video",
    "video": "video",
    "file": "file",
}
# Other servers' names for tensors in a request. Ours come over gRPC, from holders of the cluster token (docs/items.md).
_TENSOR_KINDS = frozenset(
    {"image_embeds", "video_embeds", "audio_embeds", "precomputed_embedding", "processor_output", "tensor"}
)
_TENSOR_FIELDS = frozenset({"feature", "precomputed_embeddings", "pixel_values", "image_embeds"})


def parse_messages(
    messages: Sequence[dict[str, Any]],
) -> tuple[tuple[ChatMessage, ...], tuple[MediaReference, ...]]:
    """The conversation, and its pictures in the order in which they stand there.

    Raises InvalidRequest or ModalityUnsupported, naming the message.
    """
    _check_num_parts(messages)
    media: list[MediaReference] = []
    parsed = tuple(_parse_message(message, f"messages.{index}", media) for index, message in enumerate(messages))
    return parsed, tuple(media)


def _check_num_parts(messages: Sequence[dict[str, Any]]) -> None:
    contents = [message.get("content") for message in messages]
    if sum(len(content) for content in contents if isinstance(content, list)) > MAX_PARTS:
        raise InvalidRequest(f"all messages together may have at most {MAX_PARTS} parts", param="messages")


def _parse_message(message: dict[str, Any], where: str, media: list[MediaReference]) -> ChatMessage:
    role = message.get("role")
    if role in ("tool", "function") or message.get("tool_calls") or message.get("function_call"):
        raise InvalidRequest("tool calls are not supported yet", param=where)
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest("role must be system, developer, user or assistant", param=f"{where}.role")
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    if isinstance(content, str):
        return ChatMessage(_ROLES[role], content)
    if not isinstance(content, list) or not content:
        raise InvalidRequest("content must be a string or a list of parts", param=f"{where}.content")
    parts = [_parse_part(part, f"{where}.content.{index}", media) for index, part in enumerate(content)]
    return ChatMessage(_ROLES[role], tuple(parts))


def _parse_part(part: object, where: str, media: list[MediaReference]) -> TextPart | ImagePart:
    if not isinstance(part, dict):
        raise InvalidRequest("a part must be an object with a type", param=where)
    kind = part.get("type")
    if kind == "text":
        if not isinstance(part.get("text"), str):
            raise InvalidRequest("a text part needs its text", param=f"{where}.text")
        return TextPart(part["text"])
    if kind == "image_url":
        media.append(MediaReference(_image_uri(part.get("image_url"), f"{where}.image_url"), f"{where}.image_url"))
        return ImagePart()
    if isinstance(kind, str) and kind in _TENSOR_KINDS:
        raise _no_tensors(where)
    if isinstance(kind, str) and kind in _OTHER_MODALITIES:
        raise ModalityUnsupported(f"{_OTHER_MODALITIES[kind]} input is not served yet", param=where)
    raise InvalidRequest("the type of a part must be text or image_url", param=f"{where}.type")


def _image_uri(value: object, where: str) -> str:
    if isinstance(value, dict) and (
        not _TENSOR_FIELDS.isdisjoint(value) or str(value.get("format")).lower() in _TENSOR_KINDS
    ):
        raise _no_tensors(where)
    uri = value.get("url") if isinstance(value, dict) else value
    if not isinstance(uri, str):
        raise InvalidRequest("image_url needs a url", param=where)
    return uri.strip()


def _no_tensors(where: str) -> InvalidRequest:
    return InvalidRequest("precomputed inputs are not taken over HTTP; send the picture itself", param=where)
