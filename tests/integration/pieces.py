"""The pieces of batches, one by one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from services.router.choices import Piece


async def each(batches: AsyncIterator[Sequence[Piece]]) -> AsyncIterator[Piece]:
    async for batch in batches:
        for piece in batch:
            yield piece
