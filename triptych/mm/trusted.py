"""For trusted callers, who hold the cluster token and bring tensors of their own: from a processor's ids and data to
the plan and the bytes that the pipeline takes. docs/items.md shows it in use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from triptych.core.expansion import Ids
from triptych.core.plan import Grid, Item, ItemFormat, Modality, Plan, Sampling
from triptych.mm.item import Feature, MultimodalDataItem, received_item
from triptych.mm.placeholders import ItemRuns, place_by_token
from triptych.mm.tensor import TensorValue


class ModelIdentity(Protocol):
    """The part of a model's adapter that names items."""

    @property
    def fingerprint(self) -> bytes: ...
    def placeholder_id(self, modality: Modality) -> int: ...
    def identity(self, modality: Modality, media: bytes, tenant_salt: bytes = b"") -> bytes: ...
    def tensor_identity(
        self,
        modality: Modality,
        format: ItemFormat,  # noqa: A002 - the field's name everywhere
        grid: Grid,
        tensor: TensorValue,
        tenant_salt: bytes = b"",
    ) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ItemData:
    """An item that has no place in a prompt yet.

    Attributes:
        grid: its patches before merging, as the processor names them.
        run_lengths: needed only where items stand side by side with nothing between them.
    """

    format: ItemFormat
    grid: Grid
    data: Feature
    modality: Modality = Modality.IMAGE
    run_lengths: tuple[int, ...] | None = None

    def identity(self, model: ModelIdentity, tenant_salt: bytes = b"") -> bytes:
        """32 bytes; the encoder computes them again from what it gets."""
        if isinstance(self.data, bytes):
            return model.identity(self.modality, self.data, tenant_salt)
        return model.tensor_identity(self.modality, self.format, self.grid, self.data, tenant_salt)

    def wire_bytes(self) -> bytes:
        return self.data if isinstance(self.data, bytes) else self.data.to_frame()


@dataclass(frozen=True, slots=True)
class TrustedRequest:
    """A plan and its items' data. `media` is what the router's pipeline takes beside the plan."""

    plan: Plan
    items: tuple[MultimodalDataItem, ...]

    @property
    def media(self) -> tuple[bytes, ...]:
        return tuple(item.wire_bytes() for item in self.items)


def trusted_request(
    model: ModelIdentity,
    input_ids: Ids,
    data: Sequence[ItemData],
    sampling: Sampling,
    timeout_s: float,
    tenant_salt: bytes = b"",
) -> TrustedRequest:
    """The request for a prompt as a stock processor gives it.

    Args:
        input_ids: the full prompt: one placeholder token for every embedding row.
        data: in the order of the prompt.

    Raises:
        MediaMismatch: placeholders and items do not belong together.
        InvalidRequest: a tensor has another shape than its item needs.
    """
    tokens = {model.placeholder_id(one.modality): one.modality for one in data}
    placement = place_by_token(input_ids, tokens, [ItemRuns(one.modality, one.run_lengths) for one in data])
    items = []
    for one, ranges in zip(data, placement.ranges, strict=True):
        wire = one.wire_bytes()
        num_tokens = sum(run.length for run in ranges)
        identity = one.identity(model, tenant_salt)
        item = Item(one.modality, identity, num_tokens, ranges, one.grid, len(wire), format=one.format)
        items.append(received_item(item, wire))
    plan = Plan(
        compact_ids=placement.compact_ids,
        items=tuple(item.item for item in items),
        sampling=sampling,
        timeout_s=timeout_s,
        cache_salt=tenant_salt,
        model_fingerprint=model.fingerprint,
    )
    return TrustedRequest(plan, tuple(items))
