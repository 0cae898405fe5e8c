"""The tensors of a KV pool, and the copies into another one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from triptych.core.kv_format import KvDtype, PageFormat
from triptych.kv.pages import PageLayout, TokenRun


@dataclass(frozen=True, slots=True)
class PoolShape:
    """Shape of a pool: (layers, 2, pages, kv_heads, page_tokens, head_dim); index 0 of the second axis is K.

    A head's tokens of a page lie together: attention reads them so."""

    num_layers: int
    num_pages: int
    page_tokens: int
    num_kv_heads: int
    head_dim: int

    @property
    def dims(self) -> tuple[int, int, int, int, int, int]:
        return (self.num_layers, 2, self.num_pages, self.num_kv_heads, self.page_tokens, self.head_dim)

    def page_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one page over all layers."""
        return self.num_layers * 2 * self.page_tokens * self.num_kv_heads * self.head_dim * dtype.itemsize

    def pool_bytes(self, dtype: torch.dtype) -> int:
        return self.num_pages * self.page_bytes(dtype)

    def layout(self, dtype: torch.dtype) -> PageLayout:
        """The same pool as bytes."""
        num_planes = self.num_layers * 2
        return PageLayout(num_planes, self.page_bytes(dtype) // num_planes, self.format(dtype))

    def format(self, dtype: torch.dtype) -> PageFormat:
        return PageFormat(self.page_tokens, KvDtype(str(dtype).removeprefix("torch.")))

    def with_pages(self, num_pages: int) -> PoolShape:
        return PoolShape(self.num_layers, num_pages, self.page_tokens, self.num_kv_heads, self.head_dim)


def view_pool(buffer: memoryview, shape: PoolShape, dtype: torch.dtype) -> torch.Tensor:
    """A pool over host memory (a mapped segment). The buffer must outlive the tensor. Raises ValueError when it is too
    small."""
    num_bytes = shape.pool_bytes(dtype)
    if len(buffer) < num_bytes:
        raise ValueError(f"a pool of {num_bytes} bytes does not fit {len(buffer)}")
    return torch.frombuffer(buffer, dtype=dtype, count=num_bytes // dtype.itemsize).view(shape.dims)


def copy_pages(
    source: torch.Tensor, source_pages: Sequence[int], target: torch.Tensor, target_pages: Sequence[int]
) -> int:
    """Copies whole pages over all layers with one gather and one scatter; returns the bytes moved.

    Source and target may live on different devices.
    """
    assert len(source_pages) == len(target_pages)
    if not source_pages:
        return 0
    gathered = source[:, :, torch.tensor(source_pages, device=source.device)]
    target[:, :, torch.tensor(target_pages, device=target.device)] = gathered.to(target.device)
    return gathered.numel() * gathered.element_size()


def _in_order(cells: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same, contiguous, in that number format: in one pass, or none."""
    if cells.dtype == dtype and cells.is_contiguous():
        return cells
    return torch.empty(cells.shape, dtype=dtype, device=cells.device).copy_(cells)


class PoolPages:
    """Implements `PageSource` and `TokenSource`: a pool on any device, gathered as bytes of the host.

    Args:
        pool: contiguous, (layers, 2, pages, kv_heads, page_tokens, head_dim).
    """

    def __init__(self, pool: torch.Tensor) -> None:
        layers, _, *sizes = pool.shape
        shape = PoolShape(layers, sizes[0], sizes[2], sizes[1], sizes[3])
        self._shape = shape
        self._planes = pool.view(2 * layers, shape.num_pages, -1)
        self.layout = shape.layout(pool.dtype)
        self.host_planes = None if pool.device.type != "cpu" else self._planes.view(torch.uint8).numpy()

    def gather(self, pages: Sequence[int]) -> npt.NDArray[np.uint8]:
        """A copy of those pages, (pages, planes, cell bytes), contiguous: one gather on the pool's device."""
        array: npt.NDArray[np.uint8] = self.gather_cells(pages).cpu().numpy()
        return array

    def gather_cells(self, pages: Sequence[int]) -> torch.Tensor:
        """The same as uint8 on the pool's device. On a GPU it is enqueued only: the host does not wait for it."""
        index = self._on_device(torch.tensor(list(pages)))
        return self._planes.transpose(0, 1)[index].contiguous().view(torch.uint8)

    def gather_tokens(self, run: TokenRun, form: PageFormat) -> torch.Tensor:
        """The tokens of a run in pages of another format: uint8 (pages, planes, cell bytes), enqueued only, too. The
        rest of the last page holds anything.

        What both sides cut alike is copied as one unit:

            here    [ 0 1 2 3 4 5 | 6 7 8 9 10 11 ]      pages of 6
            there   [ 0 1 2 3 | 4 5 6 7 | 8 9 10 11 ]    pages of 4, units of 2
        """
        shape, num_planes = self._shape, self._planes.shape[0]
        unit = math.gcd(shape.page_tokens, form.page_tokens)
        assert run.first % unit == 0, "a run begins at a border of the receiver's pages"
        here, there = shape.page_tokens // unit, form.page_tokens // unit
        num_pages = -(-run.num_tokens // form.page_tokens)
        # What is behind the run's last page here fills up the last page there.
        numbers = torch.arange(num_pages * there).add(run.first // unit).clamp(max=len(run.pages) * here - 1)
        page = self._on_device(torch.tensor(list(run.pages))[numbers // here])
        heads, unit_size = shape.num_kv_heads, unit * shape.head_dim
        pool = self._planes.view(num_planes, shape.num_pages, heads, here, unit_size).permute(1, 3, 0, 2, 4)
        units = pool[page, self._on_device(numbers % here)].view(num_pages, there, num_planes, heads, unit_size)
        cells = _in_order(units.permute(0, 2, 3, 1, 4), getattr(torch, form.dtype.value))
        return cells.view(num_pages, num_planes, -1).view(torch.uint8)

    def _on_device(self, index: torch.Tensor) -> torch.Tensor:
        return index.pin_memory().to(self._planes.device, non_blocking=True) if self._planes.is_cuda else index
