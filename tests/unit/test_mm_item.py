"""Items with their data: one of two kinds, as the format says, and nothing that contradicts the item."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
import pytest

from triptych.core.errors import InvalidRequest, MediaMismatch, RequestError
from triptych.core.plan import Grid, Item, ItemFormat, Modality, TokenRange
from triptych.mm.item import MultimodalDataItem, check_announced_bytes, received_item
from triptych.mm.tensor import HEADER_BYTES, MAX_TENSOR_BYTES, TensorValue

MEDIA = b"\x89PNG..."
PATCHES = TensorValue.from_array(np.ones((16, 6), np.float32))
ROWS = TensorValue.from_array(np.ones((4, 8), np.float32))
IDENTITY = bytes(range(32))
DATA: dict[ItemFormat, dict[str, Any]] = {
    ItemFormat.NORMAL: {"feature": MEDIA},
    ItemFormat.PROCESSOR_OUTPUT: {"feature": PATCHES},
    ItemFormat.PRECOMPUTED_EMBEDDING: {"precomputed_embedding": ROWS},
}


def item(format_: ItemFormat, *runs: TokenRange, num_bytes: int | None = None, num_tokens: int = 4) -> Item:
    sizes = {
        ItemFormat.NORMAL: len(MEDIA),
        ItemFormat.PROCESSOR_OUTPUT: PATCHES.frame_bytes,
        ItemFormat.PRECOMPUTED_EMBEDDING: ROWS.frame_bytes,
    }
    return Item(
        modality=Modality.IMAGE,
        identity=IDENTITY,
        num_tokens=num_tokens,
        ranges=runs or (TokenRange(3, 3, 4),),
        grid=Grid(1, 4, 4),
        media_bytes=sizes[format_] if num_bytes is None else num_bytes,
        format=format_,
    )


@pytest.mark.parametrize("format_", ItemFormat)
def test_what_an_item_says_is_what_the_plan_says_of_it(format_: ItemFormat) -> None:
    plan_item = item(format_)
    held = MultimodalDataItem(plan_item, **DATA[format_])
    assert (held.modality, held.format, held.identity) == (Modality.IMAGE, format_, IDENTITY)
    assert held.ranges == plan_item.ranges
    assert held.hash == int.from_bytes(IDENTITY[:8], "big")
    words = hashlib.sha256(b"triptych/sentinel/v1" + IDENTITY).digest()
    assert held.pad_values == tuple(
        1_000_000 + int.from_bytes(words[start : start + 8], "big") % 2**62 for start in (0, 8, 16, 24)
    )
    assert received_item(plan_item, held.wire_bytes()) == held
    assert len(held.wire_bytes()) == plan_item.media_bytes


@pytest.mark.parametrize("format_", ItemFormat)
@pytest.mark.parametrize(
    "data",
    [
        pytest.param({}, id="neither"),
        pytest.param({"feature": MEDIA, "precomputed_embedding": ROWS}, id="both"),
        pytest.param({"feature": PATCHES, "precomputed_embedding": ROWS}, id="both tensors"),
        *(pytest.param(data, id=format_.value) for format_, data in DATA.items()),
    ],
)
def test_exactly_the_kind_of_data_that_the_format_says(format_: ItemFormat, data: dict[str, Any]) -> None:
    if data == DATA[format_]:
        MultimodalDataItem(item(format_), **data)
        return
    with pytest.raises(InvalidRequest):
        MultimodalDataItem(item(format_), **data)


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([TokenRange(3, 3, 0), TokenRange(4, 4, 4)], id="an empty range"),
        pytest.param([TokenRange(3, 3, -1), TokenRange(4, 4, 5)], id="a negative range"),
        pytest.param([TokenRange(4, 6, 2), TokenRange(3, 3, 2)], id="not in order"),
        pytest.param([TokenRange(3, 3, 3), TokenRange(4, 5, 1)], id="overlapping"),
        pytest.param([TokenRange(3, 3, 2), TokenRange(3, 5, 2)], id="one placeholder for two"),
        pytest.param([TokenRange(3, 3, 3)], id="one token short"),
        pytest.param([TokenRange(3, 3, 5)], id="one token over"),
        pytest.param([TokenRange(-1, -1, 4)], id="before the prompt"),
    ],
)
@pytest.mark.parametrize("format_", ItemFormat)
def test_ranges_that_cannot_be_are_refused(format_: ItemFormat, runs: list[TokenRange]) -> None:
    with pytest.raises(MediaMismatch):
        MultimodalDataItem(item(format_, *runs), **DATA[format_])


def test_several_ranges_in_order_are_taken() -> None:
    runs = (TokenRange(3, 3, 2), TokenRange(5, 6, 1), TokenRange(6, 7, 1))
    assert MultimodalDataItem(item(ItemFormat.NORMAL, *runs), MEDIA).ranges == runs


@pytest.mark.parametrize(
    ("format_", "shape"),
    [
        (ItemFormat.PROCESSOR_OUTPUT, (15, 6)),
        (ItemFormat.PROCESSOR_OUTPUT, (17, 6)),
        (ItemFormat.PROCESSOR_OUTPUT, (16,)),
        (ItemFormat.PROCESSOR_OUTPUT, (1, 16, 6)),
        (ItemFormat.PROCESSOR_OUTPUT, (4, 6)),
        (ItemFormat.PRECOMPUTED_EMBEDDING, (3, 8)),
        (ItemFormat.PRECOMPUTED_EMBEDDING, (8, 4)),
        (ItemFormat.PRECOMPUTED_EMBEDDING, (32,)),
        (ItemFormat.PRECOMPUTED_EMBEDDING, (1, 4, 8)),
        (ItemFormat.PRECOMPUTED_EMBEDDING, (16, 8)),
    ],
)
def test_tensors_of_another_shape_than_the_item_are_refused(format_: ItemFormat, shape: tuple[int, ...]) -> None:
    tensor = TensorValue.from_array(np.zeros(shape, np.float32))
    with pytest.raises(InvalidRequest, match="shape"):
        received_item(item(format_, num_bytes=tensor.frame_bytes), tensor.to_frame())


@pytest.mark.parametrize("format_", ItemFormat)
def test_other_bytes_than_were_announced_are_refused(format_: ItemFormat) -> None:
    data = MultimodalDataItem(item(format_), **DATA[format_]).wire_bytes()
    for wrong in (data[:-1], data + b"\0", b""):
        with pytest.raises(RequestError):
            received_item(item(format_), wrong)
    for off in (-1, 1):
        with pytest.raises(MediaMismatch):
            MultimodalDataItem(item(format_, num_bytes=len(data) + off), **DATA[format_])


@pytest.mark.parametrize("elements", [8, 3584])
def test_announced_bytes_are_bounded_by_what_the_tensor_can_have(elements: int) -> None:
    most = HEADER_BYTES + 4 * elements * 4
    for right in (HEADER_BYTES + 1, HEADER_BYTES + 4 * elements * 2, most):
        check_announced_bytes(item(ItemFormat.PRECOMPUTED_EMBEDDING, num_bytes=right), elements)
    for wrong in (0, HEADER_BYTES, most + 1, 2**34):
        with pytest.raises(InvalidRequest, match="announced"):
            check_announced_bytes(item(ItemFormat.PRECOMPUTED_EMBEDDING, num_bytes=wrong), elements)
    huge = item(ItemFormat.PRECOMPUTED_EMBEDDING, num_bytes=HEADER_BYTES + MAX_TENSOR_BYTES + 1, num_tokens=2**20)
    with pytest.raises(InvalidRequest, match="announced"):
        check_announced_bytes(huge, 3584)


def test_an_item_is_frozen_with_all_that_it_holds() -> None:
    held = MultimodalDataItem(item(ItemFormat.PRECOMPUTED_EMBEDDING), precomputed_embedding=ROWS)
    for target, name in ((held, "feature"), (held.item, "identity"), (held.ranges[0], "offset"), (ROWS, "data")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(target, name, None)
    assert isinstance(held.ranges, tuple) and isinstance(held.identity, bytes)
    assert hash(held) == hash(received_item(held.item, held.wire_bytes()))
