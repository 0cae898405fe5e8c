"""Loads one part of a checkpoint into a module built on the meta device, tensor by tensor.

Only the part's own tensors are read. A missing or an unexpected tensor stops the start with its name: a vision class
loaded by itself through transformers would stay random without a word.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch

from triptych.core.errors import StartupError
from triptych.model.checkpoint_files import read_json
from triptych.model.weights_file import StoredTensor, WeightsFile

log = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
PROGRESS_STEPS = 10
Room = Callable[[str, torch.Size], torch.Tensor]
"""Where a tensor of that name and shape is to be read to, in the wanted dtype and contiguous."""
MIN_PROGRESS_BYTES = 64 << 20
"""Small parts are there before anybody could read about it."""


def tensor_index(model_dir: Path) -> dict[str, Path]:
    """Tensor name -> the shard that holds it. Raises StartupError naming a file that cannot be read."""
    index_path = model_dir / INDEX_FILE
    if index_path.exists():
        return _sharded_index(index_path)
    index: dict[str, Path] = {}
    for shard in sorted(model_dir.glob("*.safetensors")):
        with WeightsFile(shard) as file:
            for name in file.tensors:
                if name in index:
                    raise StartupError(f"tensor {name!r} is in {index[name].name} and in {shard.name}; remove one")
                index[name] = shard
    return index


def _sharded_index(index_path: Path) -> dict[str, Path]:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise StartupError(f"{index_path.name} has no weight_map; download the checkpoint again")
    for name, shard in weight_map.items():
        if Path(shard).name != shard:
            raise StartupError(
                f"{index_path.name} has tensor {name!r} in {shard!r}, which is no file of the checkpoint"
            )
    return {name: index_path.parent / shard for name, shard in weight_map.items()}


def select_prefix(index: Iterable[str], prefixes: Sequence[str]) -> dict[str, str]:
    """Name within the part -> name in the checkpoint, under the prefix that most of its tensors have.

    A tensor counts under the first prefix that fits it. What stands under another than the chosen one is left out, for
    `check_all_claimed` to name.
    """
    groups: dict[str, dict[str, str]] = {prefix: {} for prefix in prefixes}
    for name in index:
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        if prefix is not None:
            groups[prefix][name[len(prefix) :]] = name
    return max(groups.values(), key=len)


def check_all_claimed(index: Mapping[str, Path], claimed: Iterable[str]) -> None:
    """Raises StartupError naming a tensor that belongs to no part: the checkpoint is not what its config says."""
    unclaimed = sorted(index.keys() - set(claimed))
    if unclaimed:
        raise StartupError(
            f"the checkpoint has an unexpected tensor {unclaimed[0]!r} (and {len(unclaimed) - 1} more) "
            "that belongs to no part of the model"
        )


@dataclass(slots=True)
class LoadProgress:
    """Says in the log how far a part has come: a line each tenth, none more often than every 64 MiB, and one at the
    end."""

    part: str
    total_bytes: int
    num_bytes: int = 0
    _next_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self._next_bytes = min(self._step_bytes, self.total_bytes)

    @property
    def _step_bytes(self) -> int:
        return max(-(-self.total_bytes // PROGRESS_STEPS), MIN_PROGRESS_BYTES)

    def advance(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.num_bytes < self._next_bytes:
            return
        percent = 100 * self.num_bytes // max(1, self.total_bytes)
        figures = {"part": self.part, "percent": percent, "bytes": self.num_bytes, "of_bytes": self.total_bytes}
        log.info("loading weights", extra=figures)
        self._next_bytes = max(min(self.num_bytes + self._step_bytes, self.total_bytes), self.num_bytes + 1)


def load_part(
    module: torch.nn.Module,
    index: Mapping[str, Path],
    names: Mapping[str, str],
    dtype: torch.dtype,
    device: torch.device,
    part: str,
) -> None:
    """Fills `module` (on meta) with the named tensors. Raises as `read_part` does."""

    def room(_: str, shape: torch.Size) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    for name, tensor in read_part(shapes_of(module), index, names, room, part):
        _assign(module, name, tensor)


def shapes_of(module: torch.nn.Module) -> dict[str, torch.Size]:
    """Of what a checkpoint holds for it, in the module's order."""
    return {name: tensor.shape for name, tensor in module.state_dict().items()}


def read_part(
    wanted: Mapping[str, torch.Size],
    index: Mapping[str, Path],
    names: Mapping[str, str],
    room: Room,
    part: str,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The named tensors one after another, in the order of `wanted`, each read a piece at a time into what `room` gives
    for it: the peak is a few MiB above what that keeps, whatever the file's dtype.

    Raises StartupError that names the first tensor that is missing, unexpected, of another shape or no float.
    """
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
    with ExitStack() as opened:
        shards: dict[Path, WeightsFile] = {}
        for shard in dict.fromkeys(index[names[name]] for name in wanted):
            shards[shard] = opened.enter_context(WeightsFile(shard))
            _check_shard(shards[shard], index)
        stored = [_checked(shards[index[names[name]]], names[name], shape) for name, shape in wanted.items()]
        progress = LoadProgress(part, sum(tensor.num_bytes for tensor in stored))
        for name in wanted:
            tensor = room(name, wanted[name])
            shards[index[names[name]]].read_into(names[name], tensor, progress.advance)
            yield name, tensor


def _assign(module: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Puts `tensor` in the place of the module's own one on meta."""
    parent, _, leaf = name.rpartition(".")
    holder = module.get_submodule(parent)
    is_parameter = isinstance(getattr(holder, leaf), torch.nn.Parameter)
    setattr(holder, leaf, torch.nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)


def _check_shard(file: WeightsFile, index: Mapping[str, Path]) -> None:
    """The list of shards and the shard itself must agree."""
    for name in file.tensors:
        if index.get(name) != file.path:
            raise StartupError(
                f"{file.path.name} has an unexpected tensor {name!r} that {INDEX_FILE} does not list there"
            )


def _checked(file: WeightsFile, name: str, shape: torch.Size) -> StoredTensor:
    stored = file.tensors.get(name)
    if stored is None:
        raise StartupError(f"{file.path.name} lacks the tensor {name!r} that {INDEX_FILE} lists there")
    if stored.shape != tuple(shape):
        raise StartupError(f"tensor {name!r} has shape {stored.shape}, the config says {tuple(shape)}")
    file.check_is_float(name)
    return stored


def is_same_tensor(index: Mapping[str, Path], name: str, other: str) -> bool:
    """Are the two stored byte for byte alike? Read piece by piece."""
    with WeightsFile(index[name]) as file, WeightsFile(index[other]) as other_file:
        return file.has_same_bytes(name, other_file, other)


def check_loaded(module: torch.nn.Module, part: str) -> None:
    """Raises StartupError when a parameter or buffer was left on the meta device."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_meta:
            raise StartupError(f"the {part} part's tensor {name!r} was never filled")


def count_parameters(module: torch.nn.Module) -> int:
    """Parameters in elements, shared ones once."""
    return sum(parameter.numel() for parameter in {id(p): p for p in module.parameters()}.values())
