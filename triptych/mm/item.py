"""Items together with their data: what a caller, the router and an encoder hold.

`core.plan.Item` says what every stage must know of an item: modality, identity, format, ranges, grid. It travels with
the plan and holds no data. `MultimodalDataItem` is that same Item plus its data; all it says of the item it reads from
there, so nothing is said twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from triptych.core.errors import InvalidRequest, MediaMismatch
from triptych.core.expansion import check_own_ranges
from triptych.core.plan import Grid, Item, ItemFormat, Modality, TokenRange
from triptych.mm.identity import item_hash
from triptych.mm.sentinels import sentinel_words
from triptych.mm.tensor import HEADER_BYTES, MAX_TENSOR_BYTES, TensorDtype, TensorValue

Feature = bytes | TensorValue
"""Encoded media, or the patches that the family's processor made of them: (patches, patch elements)."""

# The widest element that is accepted.
_MAX_ITEMSIZE = TensorDtype.FLOAT32.itemsize


@dataclass(frozen=True, slots=True)
class MultimodalDataItem:
    """An item and its data. Exactly one of `feature` and `precomputed_embedding` is there, as the format says:

    | format                | `feature`                          | `precomputed_embedding`     |
    |-----------------------|------------------------------------|-----------------------------|
    | NORMAL                | encoded media, bytes               | None                        |
    | PROCESSOR_OUTPUT      | tensor (patches, patch elements)   | None                        |
    | PRECOMPUTED_EMBEDDING | None                               | tensor (num_tokens, row)    |

    Raises:
        InvalidRequest: data of another kind than the format says, both or neither, or of another shape than the item.
        MediaMismatch: the ranges are empty, out of order, overlap or do not add up to `num_tokens`.
    """

    item: Item
    feature: Feature | None = None
    precomputed_embedding: TensorValue | None = None

    def __post_init__(self) -> None:
        check_own_ranges(self.item, "the item")
        _check_data(self.item.format, self.feature, self.precomputed_embedding)
        _check_sizes(self.item, self.data)

    @property
    def modality(self) -> Modality:
        return self.item.modality

    @property
    def format(self) -> ItemFormat:
        return self.item.format

    @property
    def identity(self) -> bytes:
        """32 bytes."""
        return self.item.identity

    @property
    def hash(self) -> int:
        """The identity's first 64 bits."""
        return item_hash(self.item.identity)

    @property
    def pad_values(self) -> tuple[int, int, int, int]:
        """The four sentinels that fill the item's rows by turns."""
        return sentinel_words(self.item.identity)

    @property
    def ranges(self) -> tuple[TokenRange, ...]:
        """Where the rows stand in the prompt ("offsets")."""
        return self.item.ranges

    @property
    def data(self) -> Feature:
        found = self.feature if self.precomputed_embedding is None else self.precomputed_embedding
        assert found is not None
        return found

    def wire_bytes(self) -> bytes:
        """The data as they follow on NEED_BYTES: encoded media as they are, a tensor as a frame."""
        return self.data if isinstance(self.data, bytes) else self.data.to_frame()


def received_item(item: Item, data: bytes) -> MultimodalDataItem:
    """The item with the bytes that came for it. Raises InvalidRequest or MediaMismatch when they do not fit it."""
    match item.format:
        case ItemFormat.NORMAL:
            return MultimodalDataItem(item, feature=data)
        case ItemFormat.PROCESSOR_OUTPUT:
            return MultimodalDataItem(item, feature=TensorValue.from_frame(data))
        case ItemFormat.PRECOMPUTED_EMBEDDING:
            return MultimodalDataItem(item, precomputed_embedding=TensorValue.from_frame(data))


def check_announced_bytes(item: Item, elements_per_row: int) -> None:
    """Refuses, before a byte has come, a tensor that cannot have the size that `media_bytes` says.

    `elements_per_row`: elements of a patch, or of an embedding row. Raises InvalidRequest.
    """
    most = HEADER_BYTES + num_rows(item) * elements_per_row * _MAX_ITEMSIZE
    if not HEADER_BYTES < item.media_bytes <= min(most, HEADER_BYTES + MAX_TENSOR_BYTES):
        raise InvalidRequest(
            f"{item.media_bytes} bytes were announced; "
            f"{num_rows(item)} rows of {elements_per_row} elements have at most {most}"
        )


def num_rows(item: Item) -> int:
    """Rows of the item's tensor: one a patch, or one a token."""
    return grid_patches(item.grid) if item.format is ItemFormat.PROCESSOR_OUTPUT else item.num_tokens


def grid_patches(grid: Grid) -> int:
    return grid.t * grid.h * grid.w


def _check_data(format_: ItemFormat, feature: Feature | None, embedding: TensorValue | None) -> None:
    if (feature is None) == (embedding is None):
        raise InvalidRequest("an item has either a feature or a precomputed embedding, never both and never neither")
    if (format_ is ItemFormat.PRECOMPUTED_EMBEDDING) != (embedding is not None):
        raise InvalidRequest(f"an item of format {format_.value} cannot hold this kind of data")
    if (format_ is ItemFormat.NORMAL) != isinstance(feature, bytes):
        raise InvalidRequest(f"an item of format {format_.value} cannot hold this kind of feature")


def _check_sizes(item: Item, data: Feature) -> None:
    if isinstance(data, bytes):
        if len(data) != item.media_bytes:
            raise MediaMismatch(f"the media have {len(data)} bytes; {item.media_bytes} were announced")
        return
    if data.frame_bytes != item.media_bytes:
        raise MediaMismatch(f"the tensor's frame has {data.frame_bytes} bytes; {item.media_bytes} were announced")
    if len(data.shape) != 2 or data.shape[0] != num_rows(item):
        raise InvalidRequest(
            f"the tensor has the shape {list(data.shape)}; this item needs two dimensions and {num_rows(item)} rows"
        )
