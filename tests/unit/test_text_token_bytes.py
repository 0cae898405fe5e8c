"""The bytes of single tokens: put together they are the text that was tokenized, whatever a token cuts in two."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from tests.unit.demo_dir import demo_model_dir
from triptych.text.token_bytes import TokenBytes

PIECES = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "\u2581a", "ab", "é", "\u2581日"]


def byte_level() -> Tokenizer:
    return Tokenizer.from_file(str(demo_model_dir() / "tokenizer.json"))


def sentence_piece() -> Tokenizer:
    """As Llama's: spaces are marked, and what the vocabulary lacks falls back to bytes."""
    vocabulary = {piece: number for number, piece in enumerate(PIECES)}
    merges = [("\u2581", "a"), ("a", "b"), ("\u2581", "日")]
    vocabulary["日"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


_TOKENIZERS = {"byte level": byte_level(), "sentence piece": sentence_piece()}


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=40) | st.text(alphabet="ab é日👩\u200d\n", max_size=40), st.sampled_from(sorted(_TOKENIZERS)))
def test_the_bytes_of_a_texts_tokens_are_the_texts_bytes(text: str, kind: str) -> None:
    tokenizer = _TOKENIZERS[kind]
    if any(token.content in text for token in tokenizer.get_added_tokens_decoder().values()) or "\u2581" in text:
        return
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    expected = tokenizer.normalizer.normalize_str(text) if tokenizer.normalizer else text
    if kind == "sentence piece":
        expected = text
    assert b"".join(map(TokenBytes(tokenizer), ids)) == expected.encode()


def test_a_part_of_a_character_is_told_exactly() -> None:
    tokenizer = byte_level()
    found = [TokenBytes(tokenizer)(token) for token in tokenizer.encode("👩", add_special_tokens=False).ids]
    assert len(found) > 1, "this tokenizer cuts the character"
    assert b"".join(found) == "👩".encode()


def test_every_token_of_a_whole_text_is_what_the_tokenizer_decodes() -> None:
    for tokenizer in _TOKENIZERS.values():
        of = TokenBytes(tokenizer)
        for token_id in range(tokenizer.get_vocab_size()):
            text = tokenizer.decode([token_id], skip_special_tokens=False)
            if "\ufffd" not in text:
                assert of(token_id).decode() == text


def test_special_and_unknown_tokens() -> None:
    tokenizer = byte_level()
    of = TokenBytes(tokenizer)
    assert of(tokenizer.token_to_id("<|im_end|>")) == b"<|im_end|>"
    assert of(tokenizer.get_vocab_size() + 5) == b""
