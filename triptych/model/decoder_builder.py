"""Makes our decoder's layers of a checkpoint's tensors: each is packed when it has come, and not kept beside that."""

from __future__ import annotations

import mmap
from collections.abc import Mapping

import torch

from triptych.model.linear import Linear, can_pack, make_linear
from triptych.model.own_language import Layer

QUERIES = ("q_proj", "k_proj", "v_proj")


class Places:
    """Where weights are read that are packed next: the same memory for one after another.

    A mapping of its own, which goes back to the system whole. What the allocator took and gave back for each weight
    would leave holes between the packed ones, each a little too small for the next: half as much again.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, num_elements: int) -> None:
        self._dtype, self._device = dtype, device
        self._scratch: torch.Tensor | None = None
        if can_pack(dtype, device):
            self._scratch = torch.frombuffer(mmap.mmap(-1, num_elements * dtype.itemsize), dtype=dtype)

    def of(self, begin: int, shape: torch.Size) -> torch.Tensor:
        """From element `begin` on; where nothing is packed, memory that the tensor may keep."""
        if self._scratch is None:
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        return self._scratch[begin : begin + shape.numel()].view(shape)


class DecoderBuilder:
    """Args:
    shapes: of all tensors of the text model, by name.

    Attributes:
        others: the tensors that are of no layer.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype, device: torch.device) -> None:
        self.others: dict[str, torch.Tensor] = {}
        self._dtype, self._device = dtype, device
        self._layers: dict[int, _LayerParts] = {}
        of_linears = {name: shape for name, shape in shapes.items() if _is_linear(name)}
        self._widths = {name: shape[0] for name, shape in of_linears.items()}
        largest = max((shape.numel() for shape in of_linears.values()), default=0)
        self._queries_rows = sum(self._widths.get(f"layers.0.self_attn.{which}.weight", 0) for which in QUERIES)
        hidden = next(iter(of_linears.values()))[1]
        self._single = Places(dtype, device, largest)
        self._fused = Places(dtype, device, self._queries_rows * hidden)
        self._fusing: torch.Tensor | None = None

    def room(self, name: str, shape: torch.Size) -> torch.Tensor:
        """Where to read it."""
        if not _is_linear(name):
            return torch.empty(shape, dtype=self._dtype, device=self._device)
        which = name.rsplit(".", 2)[1]
        if which not in QUERIES:
            return self._single.of(0, shape)
        if which == QUERIES[0]:
            self._fusing = self._fused.of(0, torch.Size((self._queries_rows, shape[1])))
        assert self._fusing is not None, "queries come first"
        layer = name.rsplit(".", 2)[0]
        first = sum(self._widths[f"{layer}.{before}.weight"] for before in QUERIES[: QUERIES.index(which)])
        return self._fusing[first : first + shape[0]]

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """It was read."""
        if not name.startswith("layers."):
            self.others[name] = tensor
            return
        _, number, within = name.split(".", 2)
        parts = self._layers.setdefault(int(number), _LayerParts())
        if not _is_linear(name):
            parts.small[within] = tensor
            return
        which = within.split(".")[1]
        if which not in QUERIES:
            parts.linears[which] = make_linear(tensor)
        elif which == QUERIES[-1]:
            assert self._fusing is not None
            parts.linears["qkv"] = make_linear(self._fusing)

    def layers(self) -> tuple[Layer, ...]:
        """All of them, when everything has come."""
        return tuple(self._layers[number].layer() for number in sorted(self._layers))


class _LayerParts:
    """What has come of a layer: packed weights, and norms and biases by their names."""

    def __init__(self) -> None:
        self.linears: dict[str, Linear] = {}
        self.small: dict[str, torch.Tensor] = {}

    def layer(self) -> Layer:
        small, linears = self.small, self.linears
        biases = [small[name] for which in QUERIES if (name := f"self_attn.{which}.bias") in small]
        linears["qkv"].bias = torch.cat(biases) if biases else None
        linears["o_proj"].bias = small.get("self_attn.o_proj.bias")
        for name in ("gate_proj", "up_proj", "down_proj"):
            linears[name].bias = small.get(f"mlp.{name}.bias")
        norms = [small[name] for which in "qk" if (name := f"self_attn.{which}_norm.weight") in small]
        return Layer(
            attention_norm=small["input_layernorm.weight"],
            qkv=linears["qkv"],
            head_norms=(norms[0], norms[1]) if norms else None,
            out=linears["o_proj"],
            mlp_norm=small["post_attention_layernorm.weight"],
            gate=linears["gate_proj"],
            up=linears["up_proj"],
            down=linears["down_proj"],
        )


def _is_linear(name: str) -> bool:
    return name.startswith("layers.") and name.endswith("_proj.weight")
