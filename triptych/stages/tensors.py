"""Tensors from trusted callers, as the encoder's part takes them, and rows that are to stay. Each function reads every
element: not for the event loop."""

from __future__ import annotations

import torch

from triptych.core.errors import InvalidRequest
from triptych.mm.tensor import TensorDtype, TensorValue

_TORCH = {
    TensorDtype.FLOAT32: torch.float32,
    TensorDtype.BFLOAT16: torch.bfloat16,
    TensorDtype.FLOAT16: torch.float16,
}


def as_patches(tensor: TensorValue, patch_elements: int) -> torch.Tensor:
    """(patches, patch_elements) float32 on the host, as `VisionPart.preprocess` answers them; what has 16 bits is
    widened exactly. Raises InvalidRequest for another width, an infinity or a NaN."""
    return _checked(tensor, patch_elements, "patch").to(torch.float32)


def as_rows(tensor: TensorValue, row_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """(num_tokens, row_elements) of `dtype` on the host, in storage of its own.

    What comes in another format is rounded to the nearest value of `dtype`, or widened exactly. Raises InvalidRequest
    for another width, an infinity or a NaN, and for a value that is too large for `dtype`.
    """
    rows = _checked(tensor, row_elements, "row").to(dtype)
    if not torch.isfinite(rows).all():
        name = str(dtype).removeprefix("torch.")
        raise InvalidRequest(f"the embedding holds values too large for {name}, which this worker computes in")
    return rows


def host_rows(rows: torch.Tensor) -> torch.Tensor:
    """On the host and contiguous, without a copy where they are so already: for what is sent and not kept."""
    return rows.to("cpu").contiguous()


def own_rows(rows: torch.Tensor) -> torch.Tensor:
    """On the host, in storage of their own: one picture kept in a cache must not keep the memory of its whole pass."""
    return rows.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _checked(tensor: TensorValue, width: int, what: str) -> torch.Tensor:
    if len(tensor.shape) != 2 or tensor.shape[1] != width:
        raise InvalidRequest(
            f"the tensor has the shape {list(tensor.shape)}; a {what} of this model has {width} elements"
        )
    if not tensor.is_finite():
        raise InvalidRequest("the tensor holds an infinity or a NaN")
    # A copy: torch takes no memory that it must not write to, and cache entries own their storage.
    return torch.frombuffer(bytearray(tensor.data), dtype=_TORCH[tensor.dtype]).view(tensor.shape)
