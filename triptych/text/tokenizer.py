"""From a conversation to token ids, such that only the model's template can write special tokens.

A text from a caller may spell `<|im_end|>` or the picture placeholder. Such a text is *suspicious*: it is kept out of
the rendered prompt by a private mark, the template's own special tokens are found, the text is put back, and what lies
between the template's specials is encoded with specials treated as plain text. Everything else takes the direct way and
gives exactly the ids of `transformers`' `apply_chat_template`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from triptych.core.errors import InvalidRequest, ModalityUnsupported, StartupError
from triptych.text.messages import ChatMessage, ImagePart, TextPart
from triptych.text.model_files import optional_json, read_tokenizer
from triptych.text.template import ChatTemplate

# Private-use characters: they have no meaning of their own, and a caller's text that holds one is itself marked.
_MARK_OPEN, _MARK_CLOSE = "\ue000", "\ue001"
_MARK = re.compile(f"{_MARK_OPEN}(\\d+){_MARK_CLOSE}")


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """A prompt with one placeholder per picture.

    Attributes:
        compact_ids: token ids, the opening of the assistant's turn included.
        placeholder_indices: where in `compact_ids` the template wrote the pictures' placeholders, in order.
    """

    compact_ids: list[int]
    placeholder_indices: list[int]


class ChatTokenizer:
    """Template and tokenizer of one model. Immutable after construction; safe to use from several threads."""

    def __init__(self, model_dir: Path | str, image_placeholder_id: int | None = None) -> None:
        """Reads the tokenizer files; the placeholder's id comes from config.json (`image_token_id`) unless given. A
        model that has none takes text only: its template is given each message's texts as one string.

        Raises StartupError when a file is missing or damaged, or the template cannot be used.
        """
        directory = Path(model_dir)
        self.tokenizer = read_tokenizer(directory / "tokenizer.json")
        self._literal = read_tokenizer(directory / "tokenizer.json")
        self._literal.encode_special_tokens = True
        self._template = ChatTemplate.from_model(directory)
        if _MARK_OPEN in self._template.source:
            raise StartupError("the model's chat template uses the private-use character U+E000, which is reserved")
        self._placeholder_id = _image_token_id(directory) if image_placeholder_id is None else image_placeholder_id
        self._specials = _Specials.of(self.tokenizer)

    def check_fits(self, vocab_size: int) -> None:
        """Raises StartupError unless a question (with a picture, if the model takes any) can be asked of a model with
        `vocab_size` rows of embeddings: the placeholder is written once where the picture stands, and no token is
        beyond the last row."""
        last = max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        if last >= vocab_size:
            raise StartupError(
                f"tokenizer.json has the token {last}, and the model's last is {vocab_size - 1}: they are of "
                "different models; download the checkpoint again"
            )
        try:
            self.encode_chat(self.example())
        except InvalidRequest as error:
            kind = "a question" if self._placeholder_id is None else "a question with a picture"
            raise StartupError(
                f"{kind} cannot be asked of this model ({error.message}): config.json, "
                "tokenizer.json and chat template do not belong together"
            ) from None

    def example(self) -> list[ChatMessage]:
        """A question, with a picture if the model takes any."""
        picture = () if self._placeholder_id is None else (ImagePart(),)
        return [ChatMessage("user", (*picture, TextPart("What is this?")))]

    def encode_chat(self, messages: Sequence[ChatMessage]) -> EncodedChat:
        """The prompt's ids. CPU-bound: microseconds to milliseconds, by length.

        Raises InvalidRequest when the template refuses the conversation or leaves a picture out, ModalityUnsupported
        for a picture that the model does not take.
        """
        if self._placeholder_id is None:
            messages = [_text_alone(message) for message in messages]
        if any(self._specials.is_suspicious(text) for message in messages for text in message.texts):
            encoded = self._encode_marked(messages)
        else:
            encoded = self._encode_direct(messages)
        expected = sum(message.num_images for message in messages)
        if len(encoded.placeholder_indices) != expected:
            found = len(encoded.placeholder_indices)
            raise InvalidRequest(
                f"the model's chat template placed {found} of {expected} pictures: it does not take pictures here",
                param="messages",
            )
        return encoded

    def _encode_direct(self, messages: Sequence[ChatMessage]) -> EncodedChat:
        ids = self.tokenizer.encode(self._template.render(messages), add_special_tokens=False).ids
        return EncodedChat(ids, [index for index, token in enumerate(ids) if token == self._placeholder_id])

    def _encode_marked(self, messages: Sequence[ChatMessage]) -> EncodedChat:
        hidden: list[str] = []
        rendered = self._template.render([self._mark_message(message, hidden) for message in messages])
        ids: list[int] = []
        placeholders: list[int] = []
        for segment, special_id in self._specials.split(rendered):
            text = _MARK.sub(lambda found: hidden[int(found[1])], segment)
            if text:
                ids.extend(self._literal.encode(text, add_special_tokens=False).ids)
            if special_id is None:
                continue
            if special_id == self._placeholder_id:
                placeholders.append(len(ids))
            ids.append(special_id)
        return EncodedChat(ids, placeholders)

    def _mark_message(self, message: ChatMessage, hidden: list[str]) -> ChatMessage:
        if isinstance(message.content, str):
            return replace(message, content=self._mark_text(message.content, hidden))
        return replace(message, content=tuple(self._mark_part(part, hidden) for part in message.content))

    def _mark_part(self, part: TextPart | ImagePart, hidden: list[str]) -> TextPart | ImagePart:
        return TextPart(self._mark_text(part.text, hidden)) if isinstance(part, TextPart) else part

    def _mark_text(self, text: str, hidden: list[str]) -> str:
        """A suspicious text's inside becomes a mark; white space at its ends stays, for templates that trim."""
        if not self._specials.is_suspicious(text):
            return text
        inside = text.strip()
        hidden.append(inside)
        start = text.index(inside)
        return f"{text[:start]}{_MARK_OPEN}{len(hidden) - 1}{_MARK_CLOSE}{text[start + len(inside) :]}"


class _Specials:
    """The special tokens of a tokenizer, and where they stand or could come to stand in a text."""

    def __init__(self, tokens: dict[str, int], strips: dict[str, tuple[bool, bool]]) -> None:
        self._ids = tokens
        self._strips = strips
        by_length = sorted(tokens, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, by_length)) if by_length else r"(?!)")
        # A text that begins with the end of a special, or ends with the start of one, may complete it with a neighbour.
        self._heads = tuple({token[:size] for token in tokens for size in range(1, len(token))})
        self._tails = tuple({token[-size:] for token in tokens for size in range(1, len(token))})

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> _Specials:
        added = {key: token for key, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        ids = {token.content: key for key, token in added.items()}
        return cls(ids, {token.content: (token.lstrip, token.rstrip) for token in added.values()})

    def is_suspicious(self, text: str) -> bool:
        """Whether the text spells a special token, may complete one with a neighbour, or holds our private mark."""
        inside = text.strip()
        if not inside:
            return False
        if self._any.search(inside) or _MARK_OPEN in inside:
            return True
        if inside.endswith(self._heads) or inside.startswith(self._tails):
            return True
        return any(inside in token for token in self._ids)

    def split(self, rendered: str) -> Iterator[tuple[str, int | None]]:
        """(text before, special id) for each special the template wrote; the last has no id."""
        start, eat_left = 0, False
        for found in self._any.finditer(rendered):
            lstrip, rstrip = self._strips[found[0]]
            segment = rendered[start : found.start()]
            segment = segment.lstrip() if eat_left else segment
            yield segment.rstrip() if lstrip else segment, self._ids[found[0]]
            start, eat_left = found.end(), rstrip
        last = rendered[start:]
        yield last.lstrip() if eat_left else last, None


def _text_alone(message: ChatMessage) -> ChatMessage:
    """Templates of models of text expect a string, whether the caller sent one or parts."""
    if message.num_images:
        raise ModalityUnsupported("this model takes text only; ask without pictures", param="messages")
    return replace(message, content="\n".join(message.texts))


def _image_token_id(model_dir: Path) -> int | None:
    value = optional_json(model_dir / "config.json").get("image_token_id")
    return value if isinstance(value, int) else None
