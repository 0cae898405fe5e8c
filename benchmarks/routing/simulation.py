"""One run in virtual time: users who ask, a policy that chooses, workers that take their time, feeds that come late."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from benchmarks.routing.clock import Timeline
from benchmarks.routing.load import Album, Turn, User, Workload
from benchmarks.routing.policies import POLICIES, Placed, Policy
from benchmarks.routing.workers import Decode, Encoder, Prefill, Rates, Sizes, Task
from triptych.core.ids import WorkerRef

NUM_REPLICAS = 3
FEED_S = 0.05
"""From one message of a feed to the next; as the workers' own (`stages/feed.py`)."""
HOP_S = 0.001


@dataclass(slots=True)
class Outcome:
    """Of one run."""

    ttfts_s: list[float] = field(default_factory=list)
    num_encodes: int = 0
    num_pictures: int = 0
    new_tokens: int = 0
    end_s: float = 0.0

    @property
    def ttft_p50_s(self) -> float:
        return sorted(self.ttfts_s)[len(self.ttfts_s) // 2]

    @property
    def ttft_mean_s(self) -> float:
        return sum(self.ttfts_s) / len(self.ttfts_s)

    @property
    def encodes_per_unique_picture(self) -> float:
        return self.num_encodes / self.num_pictures

    @property
    def requests_per_s(self) -> float:
        return len(self.ttfts_s) / self.end_s


class Simulation:
    def __init__(
        self,
        policy: str,
        workload: Workload,
        seed: int,
        rates: Rates | None = None,
        sizes: Sizes | None = None,
        num_replicas: int = NUM_REPLICAS,
    ) -> None:
        self._clock, self._rng = Timeline(), random.Random(seed)
        rates, sizes = rates or Rates(), sizes or Sizes()
        count = range(num_replicas)
        self._encoders = {f"e-{n}": Encoder(f"e-{n}", self._clock, rates, sizes) for n in count}
        self._prefills = {f"p-{n}": Prefill(f"p-{n}", self._clock, rates, sizes) for n in count}
        self._decodes = {f"d-{n}": Decode(f"d-{n}", self._clock, rates, sizes) for n in count}
        everybody: list[Encoder | Prefill | Decode] = [
            *self._encoders.values(),
            *self._prefills.values(),
            *self._decodes.values(),
        ]
        self._workers = everybody
        self._policy: Policy = POLICIES[policy]([worker.info for worker in everybody], seed)
        self._album = Album(random.Random(seed), workload.reuse)
        self._workload = workload
        self._num_left = workload.num_users * workload.num_turns
        self._sequences: dict[WorkerRef, int] = {}
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """The same for the same seed."""
        for number in range(self._workload.num_users):
            user = User(self._workload, random.Random(self._rng.getrandbits(62) + number), self._album)
            self._clock.after(self._rng.uniform(0, self._workload.think_s), partial(self._ask_next, user.turns()))
        self._publish()
        self._clock.run()
        outcome = self.outcome
        outcome.num_encodes = sum(encoder.num_encoded for encoder in self._encoders.values())
        outcome.num_pictures = len(self._album.seen)
        return outcome

    # -- feeds ---------------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        for worker in self._workers:
            ref, journal = worker.info.ref, worker.journal
            journal.cut(worker.load())
            known = self._sequences.get(ref)
            messages = journal.snapshot() if known is None else journal.since(known)
            for message in journal.snapshot() if messages is None else messages:
                self._clock.after(HOP_S, partial(self._policy.hear, ref, message))
            self._sequences[ref] = journal.sequence
        if self._num_left:
            self._clock.after(FEED_S, self._publish)

    # -- one request ---------------------------------------------------------------------------------------------------

    def _ask_next(self, turns: Iterator[Turn]) -> None:
        turn = next(turns, None)
        if turn is not None:
            _Request(self, turn, turns).begin()

    def answered(self, turn: Turn, turns: Iterator[Turn]) -> None:
        self._num_left -= 1
        self.outcome.end_s = self._clock.now_s
        self._clock.after(turn.think_s, partial(self._ask_next, turns))

    @property
    def clock(self) -> Timeline:
        return self._clock

    def place(self, turn: Turn) -> Placed:
        return self._policy.place(turn.plan)

    def workers_of(self, placed: Placed) -> tuple[Prefill, Decode]:
        return self._prefills[placed.prefill.worker_id], self._decodes[placed.decode.worker_id]

    def encoder(self, name: str) -> Encoder:
        return self._encoders[name]


class _Request:
    """One question on its way."""

    def __init__(self, world: Simulation, turn: Turn, turns: Iterator[Turn]) -> None:
        self._world = world
        self._turn = turn
        self._turns = turns
        self._task = Task.of(turn.plan, world.clock.now_s)
        self._placed = world.place(turn)
        self._prefill, self._decode = world.workers_of(self._placed)
        self._left: dict[str, int] = {}

    def begin(self) -> None:
        self._world.clock.after(HOP_S, self._arrive)

    def _arrive(self) -> None:
        task, placed = self._task, self._placed
        lacking = self._prefill.lacking(task)
        task.missing = lacking & placed.encoders.keys()
        task.withheld = {item.identity for item in task.plan.items} - placed.encoders.keys()
        for encoder in {worker.worker_id: worker for worker in placed.encoders.values()}.values():
            if not any(placed.encoders[one].worker_id == encoder.worker_id for one in task.missing):
                placed.encoded(encoder)  # prefill has told it that nothing is needed
        self._encode({identity: placed.encoders[identity].worker_id for identity in sorted(task.missing)})
        self._prefill.submit(task, self._first_token, self._admitted)

    def _admitted(self, lost: set[bytes]) -> None:
        found = self._placed.again(sorted(lost))
        self._encode({identity: worker.worker_id for identity, worker in found.items()})

    def _encode(self, by_identity: dict[bytes, str]) -> None:
        items = {item.identity: item for item in self._task.plan.items}
        for name in by_identity.values():
            self._left[name] = self._left.get(name, 0) + 1
        for identity, name in by_identity.items():
            self._world.encoder(name).encode(items[identity], partial(self._landed, identity, name))

    def _landed(self, identity: bytes, name: str) -> None:
        self._left[name] -= 1
        if not self._left[name]:
            self._placed.encoded(self._world.encoder(name).info)
        self._prefill.land(self._task, identity)

    def _first_token(self) -> None:
        self._placed.prefilled()
        self._world.outcome.ttfts_s.append(self._world.clock.now_s - self._task.arrived_s)
        self._decode.answer(self._task, self._turn.answer_ids, self._ended)

    def _ended(self) -> None:
        self._placed.ended()
        self._world.answered(self._turn, self._turns)
