"""Which waiting pictures share the next pass of the vision tower: by a budget in patches."""

from __future__ import annotations

from collections.abc import Sequence


def plan_batch(patches: Sequence[int], max_patches: int, max_items: int) -> int:
    """How many of the waiting items, in order of arrival, go into the next pass: at least one, then as many as fit."""
    total, count = 0, 0
    for item_patches in patches[:max_items]:
        if count and total + item_patches > max_patches:
            break
        total += item_patches
        count += 1
    return count
