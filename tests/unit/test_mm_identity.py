"""Identities, hashes and sentinels: distinct where they must be, and published for others to check."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from triptych.core.plan import Grid, ItemFormat, Modality
from triptych.mm.identity import caller_identity, item_hash, item_identity, tensor_identity
from triptych.mm.sentinels import SENTINEL_BASE, item_sentinels, sentinel_words
from triptych.mm.tensor import TensorValue

DOCUMENT = Path(__file__).parents[2] / "docs" / "identity.md"

FIELDS: dict[str, Any] = {
    "model_fingerprint": bytes(32),
    "vision_dtype": "float32",
    "processor_version": "Some_Architecture/1",
    "modality": Modality.IMAGE,
    "processing_key": b'{"patch_size": 14}',
    "tenant_salt": b"salt",
    "media": b"\x89PNG...",
}

# --- published vectors ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Vector:
    fields: dict[str, bytes]
    identity: bytes
    hash: int
    sentinels: tuple[int, ...]


def read_vectors() -> list[Vector]:
    """From the document's fenced blocks of `name = value` lines."""
    vectors = []
    for block in re.findall(r"```vector\n(.*?)```", DOCUMENT.read_text(), re.DOTALL):
        rows = dict(re.findall(r"^(\w+) *= *(.*?) *$", block, re.MULTILINE))
        fields = {name: bytes.fromhex(rows[name]) for name in FIELDS}
        words = tuple(int(word) for word in rows["sentinels"].split())
        vectors.append(Vector(fields, bytes.fromhex(rows["identity"]), int(rows["hash"]), words))
    return vectors


def test_the_document_publishes_vectors() -> None:
    assert len(read_vectors()) >= 4
    assert len({vector.identity for vector in read_vectors()}) == len(read_vectors())


@pytest.mark.parametrize("vector", read_vectors())
def test_our_code_gives_the_published_vectors(vector: Vector) -> None:
    raw = vector.fields
    identity = item_identity(
        model_fingerprint=raw["model_fingerprint"],
        vision_dtype=raw["vision_dtype"].decode(),
        processor_version=raw["processor_version"].decode(),
        modality=Modality(raw["modality"].decode()),
        processing_key=raw["processing_key"],
        tenant_salt=raw["tenant_salt"],
        media=raw["media"],
    )
    assert identity == vector.identity
    assert item_hash(identity) == vector.hash
    assert sentinel_words(identity) == vector.sentinels


@pytest.mark.parametrize("vector", read_vectors())
def test_the_published_vectors_follow_from_the_text_alone(vector: Vector) -> None:
    """The document's description in a few lines, without our code."""
    parts = [b"triptych/item-identity/v1", *vector.fields.values()]
    identity = hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()
    assert identity == vector.identity
    assert int(identity.hex()[:16], 16) == vector.hash
    words = hashlib.sha256(b"triptych/sentinel/v1" + identity).hexdigest()
    expected = [1_000_000 + int(words[start : start + 16], 16) % 2**62 for start in (0, 16, 32, 48)]
    assert list(vector.sentinels) == expected


# --- published vectors of tensors -------------------------------------------------------------------------------------


def read_tensor_vectors() -> list[dict[str, str]]:
    blocks = re.findall(r"```tensor-vector\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    return [dict(re.findall(r"^(\w+) *= *(.*?) *$", block, re.MULTILINE)) for block in blocks]


def text_of(value: str) -> str:
    return bytes.fromhex(value).decode()


def numbers(value: str) -> tuple[int, ...]:
    return tuple(int(word) for word in value.split())


def test_the_document_publishes_vectors_of_tensors() -> None:
    assert len(read_tensor_vectors()) >= 6
    assert len({vector["identity"] for vector in read_tensor_vectors()}) == len(read_tensor_vectors())


@pytest.mark.parametrize("vector", read_tensor_vectors())
def test_our_code_gives_the_published_vectors_of_tensors(vector: dict[str, str]) -> None:
    tensor = TensorValue.from_bytes(text_of(vector["dtype"]), numbers(vector["shape"]), bytes.fromhex(vector["data"]))
    found = tensor_identity(
        model_fingerprint=bytes.fromhex(vector["model_fingerprint"]),
        vision_dtype=text_of(vector["vision_dtype"]),
        processor_version=text_of(vector["processor_version"]),
        modality=Modality(text_of(vector["modality"])),
        processing_key=bytes.fromhex(vector["processing_key"]),
        tenant_salt=bytes.fromhex(vector["tenant_salt"]),
        format=ItemFormat(text_of(vector["format"])),
        grid=Grid(*numbers(vector["grid"])),
        tensor=tensor,
    )
    assert found.hex() == vector["identity"]
    assert item_hash(found) == int(vector["hash"])
    assert sentinel_words(found) == numbers(vector["sentinels"])


@pytest.mark.parametrize("vector", read_tensor_vectors())
def test_the_published_vectors_of_tensors_follow_from_the_text_alone(vector: dict[str, str]) -> None:
    """The document's description in a few lines, without our code."""
    plain = ("model_fingerprint", "vision_dtype", "processor_version", "modality", "processing_key", "tenant_salt")
    sizes = [b"".join(n.to_bytes(8, "big") for n in numbers(vector[name])) for name in ("shape", "grid")]
    parts = [b"triptych/tensor-identity/v1", *(bytes.fromhex(vector[name]) for name in (*plain, "format", "dtype"))]
    parts += [*sizes, bytes.fromhex(vector["data"])]
    assert len(parts) == 12
    found = hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()
    assert found.hex() == vector["identity"]
    assert int(vector["identity"][:16], 16) == int(vector["hash"])
    words = hashlib.sha256(b"triptych/sentinel/v1" + found).hexdigest()
    expected = [1_000_000 + int(words[start : start + 16], 16) % 2**62 for start in (0, 16, 32, 48)]
    assert list(numbers(vector["sentinels"])) == expected


# --- published vectors of callers' hashes -----------------------------------------------------------------------------


def read_caller_vectors() -> list[dict[str, str]]:
    blocks = re.findall(r"```caller-vector\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    return [dict(re.findall(r"^(\w+) *= *(.*?) *$", block, re.MULTILINE)) for block in blocks]


def test_the_document_publishes_vectors_of_callers_hashes() -> None:
    assert len({vector["identity"] for vector in read_caller_vectors()}) == len(read_caller_vectors()) >= 3


@pytest.mark.parametrize("vector", read_caller_vectors())
def test_our_code_gives_the_published_vectors_of_callers_hashes(vector: dict[str, str]) -> None:
    found = caller_identity(
        model_fingerprint=bytes.fromhex(vector["model_fingerprint"]),
        vision_dtype=text_of(vector["vision_dtype"]),
        processor_version=text_of(vector["processor_version"]),
        modality=Modality(text_of(vector["modality"])),
        processing_key=bytes.fromhex(vector["processing_key"]),
        tenant_salt=bytes.fromhex(vector["tenant_salt"]),
        grid=Grid(*numbers(vector["grid"])),
        num_tokens=int(vector["num_tokens"]),
        caller_hash=bytes.fromhex(vector["caller_hash"]),
    )
    assert found.hex() == vector["identity"]
    assert item_hash(found) == int(vector["hash"])
    assert sentinel_words(found) == numbers(vector["sentinels"])


@pytest.mark.parametrize("vector", read_caller_vectors())
def test_the_published_vectors_of_callers_hashes_follow_from_the_text_alone(vector: dict[str, str]) -> None:
    plain = ("model_fingerprint", "vision_dtype", "processor_version", "modality", "processing_key", "tenant_salt")
    sizes = (*numbers(vector["grid"]), int(vector["num_tokens"]))
    parts = [b"triptych/caller-identity/v1", *(bytes.fromhex(vector[name]) for name in plain)]
    parts += [b"".join(n.to_bytes(8, "big") for n in sizes), bytes.fromhex(vector["caller_hash"])]
    assert len(parts) == 9
    found = hashlib.sha256(b"".join(len(part).to_bytes(8, "big") + part for part in parts)).digest()
    assert found.hex() == vector["identity"]


# --- identity ---------------------------------------------------------------------------------------------------------


def identity(**changed: Any) -> bytes:
    return item_identity(**{**FIELDS, **changed})


def encoded(mode: str, size: tuple[int, int], fill: object = 0, **saved: Any) -> bytes:
    out = io.BytesIO()
    Image.new(mode, size, fill).save(out, format="PNG", **saved)
    return out.getvalue()


def palettes(*colours: list[int]) -> list[bytes]:
    """Pictures with the same indices and other palettes."""
    blobs = []
    for colour in colours:
        picture = Image.new("P", (20, 20), 1)
        picture.putpalette([0, 0, 0, *colour])
        out = io.BytesIO()
        picture.save(out, format="PNG")
        blobs.append(out.getvalue())
    return blobs


def test_everything_that_changes_the_embedding_changes_the_identity() -> None:
    variants = [
        identity(),
        identity(model_fingerprint=bytes(31) + b"\1"),
        identity(vision_dtype="bfloat16"),
        identity(processor_version="Some_Architecture/2"),
        identity(modality=Modality.VIDEO),
        identity(modality=Modality.AUDIO),
        identity(processing_key=b'{"patch_size": 16}'),
        identity(tenant_salt=b"other"),
        identity(tenant_salt=b""),
        identity(media=b"\x89PNG.. ."),
        identity(media=b""),
    ]
    assert len(set(variants)) == len(variants)
    assert len({item_hash(each) for each in variants}) == len(variants)


def test_pictures_that_hash_alike_by_their_pixels_alone_are_told_apart() -> None:
    media = [
        encoded("RGB", (30, 100)),
        encoded("RGB", (100, 30)),
        encoded("L", (30, 100)),
        encoded("L", (100, 30)),
        encoded("RGBA", (30, 100)),
        *palettes([255, 0, 0], [0, 0, 255]),
    ]
    assert len({identity(media=blob) for blob in media}) == len(media)


def test_equal_inputs_have_equal_identities() -> None:
    assert identity() == identity()
    assert len(identity()) == 32


def test_moving_a_boundary_between_two_fields_changes_the_identity() -> None:
    variable = ("model_fingerprint", "vision_dtype", "processor_version", "processing_key", "tenant_salt", "media")
    for left, right in itertools.pairwise(variable):
        seen = set()
        for cut in range(5):
            whole = b"abcd" if left not in ("vision_dtype", "processor_version") else "abcd"
            head: Any = whole[:cut]
            tail: Any = whole[cut:]
            if right in ("vision_dtype", "processor_version"):
                tail = tail if isinstance(tail, str) else tail.decode()
            else:
                tail = tail if isinstance(tail, bytes) else tail.encode()
            seen.add(identity(**{left: head, right: tail}))
        assert len(seen) == 5, (left, right)


def tensor_id(**changed: Any) -> bytes:
    fields = {name: value for name, value in FIELDS.items() if name != "media"}
    tensor = changed.pop("tensor", TensorValue.from_array(np.zeros((30, 100), np.float32)))
    more = {"format": ItemFormat.PRECOMPUTED_EMBEDDING, "grid": Grid(1, 4, 30), "tensor": tensor}
    return tensor_identity(**{**fields, **more, **changed})


def test_tensors_are_told_apart_by_shape_number_format_grid_and_kind() -> None:
    zeros = bytes(30 * 100 * 4)
    variants = [
        tensor_id(),
        tensor_id(tensor=TensorValue.from_array(np.zeros((100, 30), np.float32))),
        tensor_id(tensor=TensorValue.from_array(np.zeros((3000,), np.float32))),
        tensor_id(tensor=TensorValue.from_array(np.zeros((1, 30, 100), np.float32))),
        tensor_id(tensor=TensorValue.from_array(np.zeros((30, 200), np.float16))),
        tensor_id(tensor=TensorValue.from_bytes("bfloat16", (30, 200), zeros)),
        tensor_id(grid=Grid(1, 30, 4)),
        tensor_id(format=ItemFormat.PROCESSOR_OUTPUT),
        tensor_id(modality=Modality.VIDEO),
        tensor_id(tenant_salt=b"other"),
        tensor_id(model_fingerprint=bytes(31) + b"\1"),
        tensor_id(processing_key=b"{}"),
        tensor_id(vision_dtype="bfloat16"),
        tensor_id(processor_version="Some_Architecture/2"),
        identity(media=zeros),
    ]
    assert len(set(variants)) == len(variants)
    for each in variants:
        assert max(sentinel_words(each)) < 2**63


def test_negative_zero_is_another_tensor() -> None:
    """Bytes are hashed, not numbers: equal numbers with other bytes cost a second embedding, never a wrong one."""
    assert tensor_id(tensor=TensorValue.from_array(np.full((30, 100), -0.0, np.float32))) != tensor_id()


def test_a_field_that_contains_another_fields_encoding_does_not_collide() -> None:
    inner = len(b"x").to_bytes(8, "big") + b"x"
    assert identity(tenant_salt=b"", media=inner) != identity(tenant_salt=inner, media=b"")


@pytest.mark.parametrize("length", [0, 8, 31, 33])
def test_a_hash_is_made_of_whole_identities_only(length: int) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        item_hash(bytes(length))


# --- sentinels --------------------------------------------------------------------------------------------------------


def test_sentinels_are_never_vocabulary_ids_and_fit_a_signed_64_bit_integer() -> None:
    words = [word for number in range(5_000) for word in sentinel_words(hashlib.sha256(b"%d" % number).digest())]
    assert min(words) >= SENTINEL_BASE == 1_000_000
    assert max(words) < SENTINEL_BASE + 2**62
    assert len(set(words)) == len(words)


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 1000])
def test_sentinels_are_tiled_by_offset(num_tokens: int) -> None:
    words, filled = sentinel_words(identity()), item_sentinels(identity(), num_tokens)
    assert filled.dtype == np.int64
    assert filled.tolist() == [words[offset % 4] for offset in range(num_tokens)]


def test_all_four_sentinels_tell_items_apart() -> None:
    for position in range(4):
        assert len({sentinel_words(identity(media=b"%d" % number))[position] for number in range(200)}) == 200
