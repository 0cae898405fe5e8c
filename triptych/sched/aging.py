"""Shortest first without starvation: what has waited counts as if it were shorter, and at last it is overdue.

Shortest remaining work first gives the least mean waiting time (Schrage, "A Proof of the Optimality of the Shortest
Remaining Processing Time Discipline", Operations Research 16, 1968) and starves what is large. Here a size shrinks as
its owner waits, and after a time that is proportional to the size the owner is *overdue*: the policies give the
overdue, in the order in which they became so, a share that nobody else can take. Whoever arrives after that moment
becomes overdue later, and so never comes before it. The bounds in the policies rest on this.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Aging:
    """`units_per_s` are of the policy's sizes: tokens, or patches. Both are above 0."""

    patience_s: float
    units_per_s: float

    def rank(self, size: int, waited_s: float) -> float:
        """What to sort by: the least goes first. A later arrival goes before another only where it is shorter by more
        than what the other has aged."""
        return size - self.units_per_s * waited_s

    def lateness_s(self, size: int, waited_s: float) -> float:
        """For how long it has been overdue; below 0 it is not yet. `size` must stay the same while it waits."""
        return waited_s - self.patience_s - size / self.units_per_s
