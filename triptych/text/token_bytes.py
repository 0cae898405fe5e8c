"""The bytes that one token stands for, which for a part of a character no text can say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


class TokenBytes:
    """Maps a token id to its bytes: those that it adds to the UTF-8 of an answer. Immutable.

    Knows the two alphabets that decoders use: byte-level (GPT-2, Radford et al. 2019: every byte is written as one
    printable character) and SentencePiece with byte fallback (`<0xE6>` is a byte, U+2581 a space). Added tokens stand
    for themselves, special ones too.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {key: token.content for key, token in tokenizer.get_added_tokens_decoder().items()}
        self._decode: Callable[[str], bytes] = (
            _from_byte_level if "ByteLevel" in _decoder_kinds(tokenizer) else _from_sentence_piece
        )

    def __call__(self, token_id: int) -> bytes:
        """Empty for an id that the tokenizer does not know (a model's vocabulary may be padded)."""
        if token_id in self._added:
            return self._added[token_id].encode()
        piece = self._tokenizer.id_to_token(token_id)
        return b"" if piece is None else self._decode(piece)


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    """The types of all parts of the tokenizer's decoder."""
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    return {part["type"] for part in [decoder, *decoder.get("decoders", [])] if "type" in part}


def _byte_level_alphabet() -> dict[str, int]:
    """Printable characters of Latin-1 stand for their own byte; the other bytes follow from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _from_byte_level(piece: str) -> bytes:
    """A character that is outside the alphabet is no byte: it stands for itself."""
    return b"".join(
        bytes([_ALPHABET[char]]) if char in _ALPHABET else char.encode("utf-8", "replace") for char in piece
    )


def _from_sentence_piece(piece: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE_MARK, " ").encode("utf-8", "replace")
