"""Engines that take the pages of a sequence away after a given token of its answer, and spoil what was in them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import pytest

from triptych.core.plan import Token
from triptych.engine.loop import LanguageEngine
from triptych.engine.parking import Parking
from triptych.engine.sequence import Sequence
from triptych.testing.cluster import InProcessCluster

WAYS = ("retract", "retract_for_replay")


class Forcing:
    """Each answer that begins gets the next of `steps`: it is retracted once, when it has that many tokens. After every
    second time nothing is cached any more at any worker, so that what was retracted finds nothing of itself."""

    def __init__(self, way: str, steps: Iterable[int]) -> None:
        self.num_forced = 0
        self._way = way
        self._steps = iter(steps)
        self._step_of: dict[tuple[str, int], int] = {}
        self._engines: list[LanguageEngine] = []

    def look(self, engine: LanguageEngine, sequence: Sequence) -> None:
        key = sequence.ref.sequence_key
        if key not in self._step_of:
            self._step_of[key] = next(self._steps)
        if sequence.num_sampled != self._step_of[key] or not getattr(engine, self._way)(sequence.ref):
            return
        self._step_of[key] = 0
        self.num_forced += 1
        if self.num_forced % 2:
            for each in self._engines:
                each.post(lambda manager=each.manager: manager.clear_cache() and None)  # type: ignore[misc]

    def force(self, monkeypatch: pytest.MonkeyPatch, cluster: InProcessCluster) -> None:
        """Has all engines look after every token of an answer."""
        engines = [worker.language_engine for worker in cluster.workers]
        self._engines = [engine for engine in engines if engine is not None]
        sampled, adopt, park = LanguageEngine._sampled, LanguageEngine.adopt, Parking.park

        def after_sampling(engine: LanguageEngine, sequence: Sequence, token: Token, was_decoding: bool) -> None:
            sampled(engine, sequence, token, was_decoding)
            if not sequence.needs_handoff:
                self.look(engine, sequence)

        def after_adoption(engine: LanguageEngine, sequence: Sequence, token: Token) -> None:
            adopt(engine, sequence, token)
            self.look(engine, sequence)

        def and_spoil(parking: Parking, sequence: Sequence, now_ns: int) -> bool:
            is_parked = park(parking, sequence, now_ns)
            spoil_free_pages(parking)
            return is_parked

        monkeypatch.setattr(LanguageEngine, "_sampled", after_sampling)
        monkeypatch.setattr(LanguageEngine, "adopt", after_adoption)
        monkeypatch.setattr(Parking, "park", and_spoil)


def spoil_free_pages(parking: Parking) -> None:
    """What nobody holds and no cache names becomes no numbers at all."""
    is_free = parking._manager._allocator._is_free
    pages = [page for page, free in zip(count(), is_free, strict=False) if free]
    parking._store.pool[:, :, pages] = float("nan")  # type: ignore[attr-defined]
