"""Who chooses: the product's own routing, and what others do. The workers keep the same caches under all of them, and a
prefill worker that holds KV or embedding is never sent it, whoever chose it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from services.router.placement import ClusterView
from services.router.routing.outstanding import Outstanding
from services.router.routing.prompt import Prompt
from services.router.routing.routing import Routing
from triptych.core.cache_feed import FeedMessage
from triptych.core.ids import WorkerRef
from triptych.core.plan import Plan
from triptych.core.worker import Role, WorkerInfo


@dataclass(slots=True)
class Placed:
    """Where a request goes. `encoders` by the picture's identity; one that is missing is asked of nobody until prefill
    says that it needs it. The rest tells the policy what has ended."""

    prefill: WorkerInfo
    decode: WorkerInfo
    encoders: dict[bytes, WorkerInfo]
    again: Callable[[Iterable[bytes]], dict[bytes, WorkerInfo]]
    encoded: Callable[[WorkerInfo], None]
    prefilled: Callable[[], None]
    ended: Callable[[], None]


class Policy(Protocol):
    def place(self, plan: Plan) -> Placed: ...

    def hear(self, worker: WorkerRef, message: FeedMessage) -> None:
        """What a worker's feed says."""
        ...


class Triptych:
    """The router's own code: `services/router/routing`."""

    def __init__(self, workers: Sequence[WorkerInfo], seed: int) -> None:
        self._routing = Routing()
        self._view = ClusterView(tuple(workers))
        self._turns = itertools.count(seed)

    def place(self, plan: Plan) -> Placed:
        prompt = Prompt.of(plan, {16})
        choice = self._routing.choose(self._view, prompt, next(self._turns))
        forecast = choice.ordered[0].forecast
        trip = self._routing.sent(prompt, forecast)
        encoders = {share.picture.identity: share.encoder for share in forecast.shares if share.encoder is not None}

        def again(identities: Iterable[bytes]) -> dict[bytes, WorkerInfo]:
            wanted = set(identities)
            indices = {index for index, item in enumerate(plan.items) if item.identity in wanted}
            shares = self._routing.shares_again(self._view, prompt, forecast.path, indices)
            trip.encodes(shares)
            return {share.picture.identity: share.encoder for share in shares if share.encoder is not None}

        path = forecast.path
        return Placed(path.prefill, path.decode, encoders, again, trip.encoded, trip.prefilled, trip.ended)

    def hear(self, worker: WorkerRef, message: FeedMessage) -> None:
        self._routing.apply(worker, message)


class _Blind:
    """Chooses each worker by `_pick`, whatever it holds."""

    def __init__(self, workers: Sequence[WorkerInfo], seed: int) -> None:
        self._by_role = {role: [worker for worker in workers if role in worker.roles] for role in Role}
        self._rng = random.Random(seed)
        self._turns = {role: itertools.count(seed) for role in Role}
        self.outstanding = Outstanding()

    def place(self, plan: Plan) -> Placed:
        prefill, decode = self._pick(Role.PREFILL), self._pick(Role.DECODE)
        tokens = plan.num_prompt_tokens
        self.outstanding.add(prefill.ref, tokens=tokens)
        self.outstanding.add(decode.ref, sequences=1)
        patches: dict[WorkerRef, int] = {}
        encoders: dict[bytes, WorkerInfo] = {}
        for item in plan.items:
            encoder = encoders[item.identity] = self._pick(Role.ENCODER)
            count = item.grid.h * item.grid.w
            patches[encoder.ref] = patches.get(encoder.ref, 0) + count
            self.outstanding.add(encoder.ref, patches=count)

        def encoded(encoder: WorkerInfo) -> None:
            self.outstanding.settle(encoder.ref, patches=patches.pop(encoder.ref, 0))

        def ended() -> None:
            self.outstanding.settle(decode.ref, sequences=1)
            for ref, count in patches.items():
                self.outstanding.settle(ref, patches=count)

        return Placed(
            prefill,
            decode,
            encoders,
            lambda identities: {identity: encoders[identity] for identity in identities},
            encoded,
            lambda: self.outstanding.settle(prefill.ref, tokens=tokens),
            ended,
        )

    def hear(self, worker: WorkerRef, message: FeedMessage) -> None:
        """Listens to nobody."""

    def _pick(self, role: Role) -> WorkerInfo:
        raise NotImplementedError


class RoundRobin(_Blind):
    def _pick(self, role: Role) -> WorkerInfo:
        workers = self._by_role[role]
        return workers[next(self._turns[role]) % len(workers)]


class Random(_Blind):
    def _pick(self, role: Role) -> WorkerInfo:
        return self._rng.choice(self._by_role[role])


class LeastLoaded(_Blind):
    """By outstanding tokens, patches or sequences; at random among equals."""

    def _pick(self, role: Role) -> WorkerInfo:
        workers = self._by_role[role]
        loads = [self._load(role, worker) for worker in workers]
        least = min(loads)
        return self._rng.choice([worker for worker, load in zip(workers, loads, strict=True) if load == least])

    def _load(self, role: Role, worker: WorkerInfo) -> int:
        debts = self.outstanding.of(worker.ref)
        return {Role.PREFILL: debts.tokens, Role.ENCODER: debts.patches, Role.DECODE: debts.sequences}[role]


OURS: Final = "triptych"
POLICIES: Final[dict[str, Callable[[Sequence[WorkerInfo], int], Policy]]] = {
    OURS: Triptych,
    "round_robin": RoundRobin,
    "random": Random,
    "least_loaded": LeastLoaded,
}
