"""Room for KV at a decode worker, as the three stages talk about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Region:
    """A run of consecutive pages in the granting worker's pool."""

    first_page: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class GroupRegions:
    """The pages of one cache group on one tensor-parallel rank."""

    cache_group: int
    rank: int
    regions: tuple[Region, ...]

    @property
    def pages(self) -> list[int]:
        return [page for run in self.regions for page in range(run.first_page, run.first_page + run.num_pages)]


@dataclass(frozen=True, slots=True)
class Grant:
    """First a counted credit of `num_pages`; `groups` is empty until the pages are bound. A worker that prefills too
    grants 0 pages: it reserves prompt and answer together, later.

    The capability (16 random bytes) must be shown by whoever binds, writes and commits. `generation` changes each time
    the pages are reused, and guards the commit. `num_held_tokens`, known with the pages, is how much of the prompt the
    worker's cache holds: `groups` begin behind it, and nobody writes before.
    """

    grant_id: str
    worker_id: str
    epoch: int
    capability: bytes
    num_pages: int
    generation: int
    groups: tuple[GroupRegions, ...] = ()
    num_held_tokens: int = 0


def regions_of(pages: list[int]) -> tuple[Region, ...]:
    """Runs of consecutive page numbers, in the order given."""
    runs: list[Region] = []
    for page in pages:
        if runs and page == runs[-1].first_page + runs[-1].num_pages:
            runs[-1] = Region(runs[-1].first_page, runs[-1].num_pages + 1)
        else:
            runs.append(Region(page, 1))
    return tuple(runs)
