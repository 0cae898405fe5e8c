"""Loads one part of a checkpoint into a module built on the meta device, tensor by tensor.

Only the part's own tensors are read. A missing or an unexpected tensor stops the start with its name: a vision class
loaded by itself through transformers would stay random without a word.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from triptych.core.errors import StartupError


def tensor_index(model_dir: Path) -> dict[str, Path]:
    """Tensor name -> the shard that holds it. Raises StartupError naming a file that cannot be read."""
    index_path = model_dir / "model.safetensors.index.json"
    if index_path.exists():
        return _sharded_index(index_path)
    index: dict[str, Path] = {}
    for shard in sorted(model_dir.glob("*.safetensors")):
        with opened_shard(shard) as file:
            index.update(dict.fromkeys(file.keys(), shard))
    return index


def _sharded_index(index_path: Path) -> dict[str, Path]:
    try:
        weight_map: dict[str, str] = json.loads(index_path.read_text())["weight_map"]
        return {name: index_path.parent / shard for name, shard in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise StartupError(f"{index_path.name} is damaged; download the checkpoint again") from None


@contextmanager
def opened_shard(shard: Path, device: str = "cpu") -> Iterator[Any]:
    """The shard, open for reading; StartupError, with its name, when it is missing or damaged."""
    try:
        with safe_open(shard, framework="pt", device=device) as file:
            yield file
    except (OSError, SafetensorError):
        raise StartupError(f"{shard.name} is missing or damaged; download the checkpoint again") from None


def select_prefix(index: Mapping[str, Path], prefixes: Iterable[str]) -> dict[str, str]:
    """Name within the part -> name in the checkpoint, for the first prefix under which the checkpoint has tensors."""
    for prefix in prefixes:
        found = {name[len(prefix) :]: name for name in index if name.startswith(prefix)}
        if found:
            return found
    return {}


def load_part(
    module: torch.nn.Module,
    index: Mapping[str, Path],
    names: Mapping[str, str],
    dtype: torch.dtype,
    device: torch.device,
    part: str,
) -> None:
    """Fills `module` (on meta) with the named tensors, one at a time, so the peak is one tensor above the part's size.

    Raises StartupError that names the first missing, unexpected or wrongly shaped tensor.
    """
    wanted = dict(module.state_dict())
    missing, unexpected = sorted(wanted.keys() - names.keys()), sorted(names.keys() - wanted.keys())
    if missing:
        raise StartupError(
            f"the {part} part of the checkpoint lacks the tensor {missing[0]!r} (and {len(missing) - 1} more)"
        )
    if unexpected:
        raise StartupError(
            f"the {part} part of the checkpoint has an unexpected tensor {names[unexpected[0]]!r} "
            f"(and {len(unexpected) - 1} more)"
        )
    by_shard: dict[Path, list[str]] = {}
    for name in wanted:
        by_shard.setdefault(index[names[name]], []).append(name)
    for shard, local_names in by_shard.items():
        with opened_shard(shard, str(device)) as file:
            for name in local_names:
                tensor: torch.Tensor = file.get_tensor(names[name])
                if tensor.shape != wanted[name].shape:
                    raise StartupError(
                        f"tensor {names[name]!r} has shape {tuple(tensor.shape)}, "
                        f"the config says {tuple(wanted[name].shape)}"
                    )
                module.load_state_dict({name: tensor.to(dtype)}, strict=False, assign=True)


def check_loaded(module: torch.nn.Module, part: str) -> None:
    """Raises StartupError when a parameter or buffer was left on the meta device."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_meta:
            raise StartupError(f"the {part} part's tensor {name!r} was never filled")


def count_parameters(module: torch.nn.Module) -> int:
    """Parameters in elements, shared ones once."""
    return sum(parameter.numel() for parameter in {id(p): p for p in module.parameters()}.values())
