"""A conversation as the chat template reads it. Pictures are only marked here; their bytes travel apart, in order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextPart:
    text: str


@dataclass(frozen=True, slots=True)
class ImagePart:
    """The place of the next picture."""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn: a plain string, or parts where the caller sent parts (templates may treat the two differently)."""

    role: str
    content: str | tuple[TextPart | ImagePart, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        if isinstance(self.content, str):
            return (self.content,)
        return tuple(part.text for part in self.content if isinstance(part, TextPart))

    @property
    def num_images(self) -> int:
        if isinstance(self.content, str):
            return 0
        return sum(isinstance(part, ImagePart) for part in self.content)
