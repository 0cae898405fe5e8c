"""The model's chat template, rendered in Jinja's immutable sandbox with the names that `transformers` gives templates.

Only the template that ships with the model is ever rendered; a caller cannot send one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from triptych.core.errors import InvalidRequest, StartupError
from triptych.text.messages import ChatMessage, ImagePart, TextPart
from triptych.text.model_files import optional_json, optional_text

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """Renders conversations to prompt text, the opening of the assistant's turn included."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises StartupError when the template cannot be compiled."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _compile(source)
        except (TemplateError, RecursionError) as error:
            raise StartupError(f"the model's chat template cannot be compiled: {error}") from None

    @classmethod
    def from_model(cls, model_dir: Path) -> ChatTemplate:
        """From `chat_template.jinja`, or from `chat_template` in `tokenizer_config.json`.

        Raises StartupError when the model has none, and names a file that is there and cannot be read.
        """
        config = optional_json(model_dir / "tokenizer_config.json")
        text = optional_text(model_dir / "chat_template.jinja")
        source = config.get("chat_template") if text is None else text
        if not isinstance(source, str):
            raise StartupError("the model has no chat template: add chat_template.jinja to its folder")
        return cls(source, special_token_texts(config))

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """Raises InvalidRequest when the template refuses the conversation (order of roles, an unknown part)."""
        try:
            return self._template.render(
                messages=[_as_mapping(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except Exception as error:  # a template computes: it may divide by zero, nest without end, or count too far
            reason = str(error) if isinstance(error, _Refused) else "it cannot render these messages"
            raise InvalidRequest(
                f"the model's chat template refuses the conversation: {reason}", param="messages"
            ) from None


def special_token_texts(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens of a tokenizer_config.json, as the texts that templates read (`bos_token`, ...)."""
    texts: dict[str, str] = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = tokenizer_config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            texts[name] = text
    return texts


class _Refused(TemplateError):
    """The template called `raise_exception`."""


def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _as_mapping(message: ChatMessage) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": message.role, "content": message.content}
    return {"role": message.role, "content": [_part_as_mapping(part) for part in message.content]}


def _part_as_mapping(part: TextPart | ImagePart) -> dict[str, str]:
    return {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    # Jinja's own filter escapes HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
