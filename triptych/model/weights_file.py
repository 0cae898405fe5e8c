"""Reads tensors of a `.safetensors` file into memory of their own, a bounded piece at a time.

    8 bytes        header length n, unsigned little-endian
    n bytes        JSON: name -> {"dtype", "shape", "data_offsets": [begin, end)}, relative to what follows
    the rest       the tensors' bytes, little-endian, row by row

(The format is described at https://github.com/huggingface/safetensors.) The library maps the file instead. Mapped pages
count as the process's memory as long as a tensor uses any of them, so a conversion to another dtype would hold both
copies of all weights at once; and a mapped file that is replaced while the worker serves changes the weights under it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from triptych.core.errors import StartupError

FLOAT_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PIECE_BYTES = 4 << 20
MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8

Advance = Callable[[int], None]
"""Told how many bytes of the file were read since the last time."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is. `dtype` is the format's name for it; `begin` counts from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        count = 1
        for side in self.shape:
            count *= side
        return count


class WeightsFile:
    """A file whose header was read and found to be in order; a context manager that closes it.

    Raises StartupError, with the file's name, when it is missing, cut short or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # One for all: what is taken and given back for each tensor leaves holes between the tensors that stay.
        self._piece = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        self._file = _open(path)
        try:
            self.tensors = _read_header(self._file, path)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> WeightsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def check_is_float(self, name: str) -> None:
        """Raises StartupError naming a tensor that is not stored in a floating-point format that can be served."""
        if self.tensors[name].dtype not in FLOAT_DTYPES:
            raise StartupError(
                f"tensor {name!r} in {self.path.name} is stored as {self.tensors[name].dtype}; "
                f"weights can be {', '.join(FLOAT_DTYPES)}, so convert the checkpoint first"
            )

    def read(self, name: str, dtype: torch.dtype, device: torch.device, advance: Advance) -> torch.Tensor:
        """A tensor of `dtype` on `device` with storage of its own. Raises as `read_into` does."""
        self.check_is_float(name)
        filled = torch.empty(self.tensors[name].shape, dtype=dtype, device=device)
        self.read_into(name, filled, advance)
        return filled

    def read_into(self, name: str, filled: torch.Tensor, advance: Advance) -> None:
        """Fills a contiguous tensor of the stored one's shape, in the dtype that it has.

        Raises StartupError as `check_is_float` does, and for a number that is none or does not fit into `dtype`: every
        answer would be nonsense without a word.
        """
        self.check_is_float(name)
        stored = self.tensors[name]
        flat, file_dtype = filled.view(-1), FLOAT_DTYPES[stored.dtype]
        self._file.seek(stored.begin)
        is_direct = file_dtype == filled.dtype and filled.device.type == "cpu"
        piece = self._piece.view(file_dtype)
        step = len(piece)
        for first in range(0, stored.num_elements, step):
            part = flat[first : first + step]
            target = part if is_direct else piece[: len(part)]
            self._read_into(target)
            if not is_direct:
                part.copy_(target)
            self._check_finite(name, part)
            advance(len(part) * file_dtype.itemsize)

    def _check_finite(self, name: str, part: torch.Tensor) -> None:
        # A minimum or maximum passes a NaN on, and needs no memory where a mask of the finite ones does.
        least, largest = torch.aminmax(part)
        if not (torch.isfinite(least) and torch.isfinite(largest)):
            format_name = str(part.dtype).removeprefix("torch.")
            raise StartupError(
                f"tensor {name!r} in {self.path.name} has a number that is not finite in {format_name}; "
                "download the checkpoint again, or give a --dtype with a wider range"
            )

    def has_same_bytes(self, name: str, other_file: WeightsFile, other: str) -> bool:
        """Is a tensor of this file stored byte for byte as one of another?"""
        mine, theirs = self.tensors.get(name), other_file.tensors.get(other)
        if mine is None or theirs is None or (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            return False
        for first in range(0, mine.num_bytes, PIECE_BYTES):
            count = min(PIECE_BYTES, mine.num_bytes - first)
            self._file.seek(mine.begin + first)
            other_file._file.seek(theirs.begin + first)
            if self._file.read(count) != other_file._file.read(count):
                return False
        return True

    def _read_into(self, target: torch.Tensor) -> None:
        """Bytes as they stand in the file; numpy has no bfloat16, but bytes are bytes."""
        view: Any = target.view(torch.uint8).numpy().data
        if self._file.readinto(view) != len(view):  # type: ignore[attr-defined]
            raise _damaged(self.path)


def _open(path: Path) -> BinaryIO:
    if sys.byteorder != "little":
        raise StartupError("weights are stored little-endian, and this machine is not")
    try:
        return path.open("rb")
    except OSError as error:
        raise StartupError(f"{path.name} cannot be read ({error.strerror}); download the checkpoint again") from None


def _read_header(file: BinaryIO, path: Path) -> dict[str, StoredTensor]:
    """Every tensor's place, each within the file and none over another."""
    size = file.seek(0, 2)
    file.seek(0)
    num_header = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    first = _LENGTH_BYTES + num_header
    if size < _LENGTH_BYTES or num_header > min(size - _LENGTH_BYTES, MAX_HEADER_BYTES):
        raise _damaged(path)
    try:
        header: dict[str, Any] = json.loads(file.read(num_header))
        stored = {name: _stored(entry, first) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _damaged(path) from None
    end = first
    for tensor in sorted(stored.values(), key=lambda tensor: (tensor.begin, tensor.num_bytes)):
        if tensor.begin < end or tensor.begin + tensor.num_bytes > size:
            raise _damaged(path)
        end = tensor.begin + tensor.num_bytes
    _check_sizes(stored, path)
    return stored


def _stored(entry: Mapping[str, Any], first: int) -> StoredTensor:
    """Raises one of several errors for an entry that is no such thing."""
    begin, end = entry["data_offsets"]
    numbers = (begin, end, *entry["shape"])
    if any(type(number) is not int or number < 0 for number in numbers) or end < begin:
        raise ValueError("not a place in a file")
    return StoredTensor(str(entry["dtype"]), tuple(entry["shape"]), first + begin, end - begin)


def _check_sizes(stored: Mapping[str, StoredTensor], path: Path) -> None:
    for name, tensor in stored.items():
        dtype = FLOAT_DTYPES.get(tensor.dtype)
        if dtype is not None and tensor.num_elements * dtype.itemsize != tensor.num_bytes:
            raise StartupError(f"tensor {name!r} in {path.name} has not as many bytes as its shape; download it again")


def _damaged(path: Path) -> StartupError:
    return StartupError(f"{path.name} is damaged or cut short; download the checkpoint again")
