"""Names of items: whatever tells two apart tells their names apart, between tenants, salts and ways of naming."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.plan import Grid, ItemFormat, Modality
from triptych.mm import identity as names
from triptych.mm.identity import caller_identity, item_identity, tenant_salt, tensor_identity
from triptych.mm.tensor import TensorValue

MODEL: dict[str, Any] = {
    "model_fingerprint": b"m" * 32,
    "vision_dtype": "float32",
    "processor_version": "A/1",
    "processing_key": b"{}",
    "modality": Modality.IMAGE,
}


class Named(NamedTuple):
    """All that a name is made of here: whose it is, how it is named, and by what."""

    tenant: str
    cache_salt: str
    kind: str
    data: bytes
    grid: Grid
    num_tokens: int


def name_of(one: Named) -> bytes:
    salt = tenant_salt(one.tenant, one.cache_salt)
    if one.kind == "bytes":
        return item_identity(**MODEL, tenant_salt=salt, media=one.data)
    if one.kind == "caller":
        sizes: dict[str, Any] = {"grid": one.grid, "num_tokens": one.num_tokens}
        return caller_identity(**MODEL, tenant_salt=salt, **sizes, caller_hash=one.data)
    tensor = TensorValue.from_array(np.frombuffer(one.data, np.float32).reshape(1, -1))
    kind = ItemFormat.PRECOMPUTED_EMBEDDING
    return tensor_identity(**MODEL, tenant_salt=salt, format=kind, grid=one.grid, tensor=tensor)


def told_apart(one: Named) -> Named:
    """What of it counts: the sizes of encoded media follow from their bytes, tokens of a tensor from its shape."""
    if one.kind == "bytes":
        return one._replace(grid=Grid(0, 0, 0), num_tokens=0)
    return one if one.kind == "caller" else one._replace(num_tokens=0)


# Few letters, and lengths that shift: what two careless encodings would put side by side.
words = st.text(alphabet="ab:\0/", max_size=3)
hashes = st.sampled_from([b"\0" * 32, b"h" * 32, hashlib.sha256(b"picture").digest()])
named = st.builds(
    Named,
    words,
    words,
    st.sampled_from(["bytes", "caller", "tensor"]),
    hashes,
    st.sampled_from([Grid(1, 4, 6), Grid(1, 6, 4), Grid(4, 1, 6)]),
    st.sampled_from([6, 24]),
)


@given(st.lists(named, min_size=2, max_size=12))
def test_two_have_one_name_only_when_they_are_the_same(items: Sequence[Named]) -> None:
    for one, other in itertools.combinations(items, 2):
        assert (name_of(one) == name_of(other)) == (told_apart(one) == told_apart(other)), (one, other)


@given(named, named)
def test_nobody_names_anything_of_another_tenants(one: Named, other: Named) -> None:
    if one.tenant != other.tenant:
        assert name_of(one) != name_of(other)


def _no_lengths(parts: Sequence[bytes | memoryview]) -> bytes:
    return hashlib.sha256(b"".join(bytes(part) for part in parts)).digest()


def _no_tag(parts: Sequence[bytes | memoryview]) -> bytes:
    return hashlib.sha256(repr([bytes(part) for part in parts][1:]).encode()).digest()


def _no_salt(parts: Sequence[bytes | memoryview]) -> bytes:
    kept = [bytes(part) for part in parts]
    return hashlib.sha256(repr(kept[:6] + kept[7:]).encode()).digest()


A, B = (Named(tenant, "", "caller", b"h" * 32, Grid(1, 4, 6), 6) for tenant in "ab")


@pytest.mark.parametrize(
    ("fault", "one", "other"),
    [
        (_no_lengths, A._replace(tenant="a", cache_salt="b"), A._replace(tenant="ab")),
        (_no_tag, A._replace(kind="bytes", data=b"x"), None),
        (_no_salt, A, B),
    ],
)
def test_careless_derivations_are_seen_to_collide(
    fault: Callable[..., bytes], one: Named, other: Named | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same comparison with each part left out that keeps names apart."""
    monkeypatch.setattr(names, "_digest", lambda parts: fault(list(parts)))
    if other is not None:
        assert name_of(one) == name_of(other)
        return
    salt = b"s"  # bytes that hold what a caller's name is made of
    sizes = (1).to_bytes(8, "big") + (4).to_bytes(8, "big") + (6).to_bytes(8, "big") * 2
    theirs = caller_identity(**MODEL, tenant_salt=salt, grid=A.grid, num_tokens=6, caller_hash=b"h" * 32)
    plain = [MODEL["model_fingerprint"], b"float32", b"A/1", b"image", MODEL["processing_key"], salt]
    assert theirs == fault([b"triptych/item-identity/v1", *plain, sizes, b"h" * 32])
