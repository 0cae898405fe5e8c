"""Linear layers as they are fastest here: oneDNN with its weights packed once, or torch's own.

On a CPU a decode step reads every weight for a handful of rows. torch's own product lays the weights out anew for every
call of more than one row; packed ones are read as they lie. benchmarks/runner_steps.py compares.

oneDNN compiles a product for each number of rows that it meets, and keeps it: over the chunks of many prompts that
comes to hundreds of megabytes. So what it keeps is bounded here, before its first product; both caches drop what was
used the longest ago, and the few numbers of rows of decode steps stay.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

KEPT_PRODUCTS = "256"
for _name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(_name, KEPT_PRODUCTS)

Product = Callable[[torch.Tensor], torch.Tensor]
PACKED_DTYPES = (torch.float32, torch.bfloat16)


class Linear:
    """x W^T + b over (rows, inputs), and the same with what is added to it or multiplied with it right away.

    `bias` may be set later, for those who read it later. `num_parameters` counts the weight.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """(outputs, inputs) and (outputs,), which the caller gives away."""
        self.weight, self.bias = weight, bias
        self.num_parameters = weight.numel()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(rows, self.weight, self.bias)

    def silu(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(self(rows))

    def plus(self, rows: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self(rows).add_(other)

    def times(self, rows: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return self(rows).mul_(other)


class PackedLinear(Linear):
    """The same through oneDNN. What it keeps is a copy in a layout of oneDNN's own; nothing but its products can read
    it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(torch.ops.mkldnn._reorder_linear_weight(weight), bias)
        self.num_parameters = weight.numel()
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._with_other = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._product(rows, self.weight, self.bias, "none", [], "")
        return out

    def silu(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._product(rows, self.weight, self.bias, "swish", [], "")
        return out

    def plus(self, rows: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._with_other(rows, other, self.weight, self.bias, "add")
        return out

    def times(self, rows: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._with_other(rows, other, self.weight, self.bias, "mul")
        return out


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN computes in that precision on this machine."""
    if device.type != "cpu" or dtype not in PACKED_DTYPES or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Packed where that can be."""
    kind = PackedLinear if can_pack(weight.dtype, weight.device) else Linear
    return kind(weight, bias)
