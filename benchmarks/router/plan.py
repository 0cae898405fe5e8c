"""The order of a run: in each round every cell once, those that are compared side by side."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.router import keys
from benchmarks.router.client import ECHO, PICTURE, TEXT, Job
from benchmarks.router.processes import StartFailed, cpu_s
from benchmarks.router.results import Figures, Results, percentile
from benchmarks.router.stage import Client, Loaded, LoadFailed, Router, running_client, running_echo, running_router
from benchmarks.router.timing import Pace
from benchmarks.routing import compare
from benchmarks.routing.policies import OURS

FAILURES = (StartFailed, LoadFailed, OSError)
MAX_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured. CPU cells have few clients, so that each token of an answer comes alone, which is what
    costs most; `saturating_clients` keep the router busy all the time. `seeds` of the runs in virtual time."""

    rounds: int
    requests: int
    seconds: float
    seeds: int
    clients: int = 8
    saturating_clients: int = 48


FULL, QUICK = Size(5, 150, 4.0, compare.NUM_SEEDS), Size(1, 32, 1.0, 2)


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says. `json`: a file, `-` for standard output, or None."""

    quick: bool
    only: str | None
    model: Path
    out: Path
    json: str | None
    workers: int
    elsewhere: bool

    @property
    def size(self) -> Size:
        return QUICK if self.quick else FULL

    def wants(self, *names: str) -> bool:
        return self.only is None or self.only in names


def run_all(options: Options) -> Results:
    results = Results()
    if options.wants(*keys.ROUTING):
        results.routing = placed(options.size.seeds)
    if not options.wants(*keys.OVERHEAD):
        return results
    with tempfile.TemporaryDirectory(prefix="triptych-bench-") as folder:
        try:
            _measure(options, Path(folder), results)
        except FAILURES as error:
            _note(keys.OVERHEAD, error, results)
    return results


def placed(num_seeds: int) -> dict[str, float]:
    """How requests are placed: the product's own picker in virtual time, over the same seeds as the others."""
    print(f"placing, {num_seeds} seeds in virtual time:", flush=True)
    outcomes = compare.run_all(compare.BUSY, num_seeds)
    return {
        keys.VS_TURNS: 1 / compare.ratio(outcomes, "round_robin", compare.ttft_p50).mean,
        keys.VS_LEAST: 1 / compare.ratio(outcomes, "least_loaded", compare.ttft_p50).mean,
        keys.ENCODES: statistics.fmean(map(compare.encodes, outcomes[OURS])),
    }


def _measure(options: Options, folder: Path, results: Results) -> None:
    flags = ("--workers", str(options.workers)) if options.workers > 1 else ()
    with ExitStack() as stack:
        client = stack.enter_context(running_client(folder))
        router = stack.enter_context(
            running_router(folder / "cluster", options.model, Pace(), flags=flags, is_elsewhere=options.elsewhere)
        )
        echo, echo_url = stack.enter_context(running_echo(folder))
        results.calls = router.calls
        rounds = Rounds(options.size, client, router, results)
        rounds.warm_up()
        for number in range(options.size.rounds):
            print(f"round {number + 1}:", flush=True)
            if options.wants(keys.CPU_TEXT, keys.CPU_PICTURE):
                rounds.cpu(options)
            if options.wants(keys.ADDED_P99):
                rounds.added(number)
            if options.wants(keys.ECHO_RATIO):
                rounds.saturated(echo_url, lambda: cpu_s(echo.pid))


class Rounds:
    """Measures cells of one router, one after the other."""

    def __init__(self, size: Size, client: Client, router: Router, results: Results) -> None:
        self._size = size
        self._client = client
        self._router = router
        self._results = results

    def warm_up(self) -> None:
        """Caches, connections and the interpreter's own: not measured."""
        for kind in (TEXT, PICTURE):
            for stream in (True, False):
                self._client.load(self._job(kind, 4 * self._size.clients, stream=stream))

    def cpu(self, options: Options) -> None:
        if options.wants(keys.CPU_TEXT):
            self._cell(keys.TEXT, self._job(TEXT, stream=True))
            self._cell(keys.TEXT_WHOLE, self._job(TEXT, stream=False))
        if options.wants(keys.CPU_PICTURE):
            self._cell(keys.PICTURE, self._job(PICTURE, stream=True))
            self._cell(keys.PICTURE_WHOLE, self._job(PICTURE, stream=False))

    def added(self, number: int) -> None:
        """Either is first in every second round."""
        router, size = self._router, self._size
        job = self._job(TEXT, stream=True, clients=4)
        alone = Job(
            TEXT, router.url, size.requests, 4, max_tokens=MAX_TOKENS, fakes=dict(router.addresses), token=router.token
        )
        arms = [(keys.ROUTED, job), (keys.DIRECT, alone)]
        for arm, asked in arms if number % 2 else reversed(arms):
            loaded = self._client.load(asked)
            self._results.first_ms.setdefault(arm, []).extend(1e3 * value for value in loaded.first_s)

    def saturated(self, echo_url: str, echo_cpu_s: Callable[[], float]) -> None:
        clients, seconds = self._size.saturating_clients, self._size.seconds
        self._cell(keys.ECHO, Job(ECHO, echo_url, 0, clients, seconds=seconds), echo_cpu_s)
        self._cell(keys.SATURATED, self._job(PICTURE, stream=False, clients=clients, seconds=seconds))

    def _job(
        self,
        kind: str,
        requests: int | None = None,
        *,
        stream: bool,
        clients: int | None = None,
        seconds: float | None = None,
    ) -> Job:
        size = self._size
        return Job(
            kind,
            self._router.url,
            requests or size.requests,
            clients or size.clients,
            stream,
            seconds,
            self._router.model,
            MAX_TOKENS,
        )

    def _cell(self, name: str, job: Job, server_cpu_s: Callable[[], float] | None = None) -> None:
        used_s = server_cpu_s or self._router.cpu_s
        before_s = used_s()
        loaded = self._client.load(job)
        figures = figures_of(loaded, used_s() - before_s)
        self._results.keep(name, figures)
        print(f"  {name}: {figures.cpu_ms:.2f} ms CPU, {figures.req_per_s:.0f} requests/s", flush=True)


def figures_of(loaded: Loaded, server_cpu_s: float) -> Figures:
    first_ms = [1e3 * value for value in loaded.first_s]
    return Figures(
        cpu_ms=1e3 * server_cpu_s / loaded.num_requests,
        req_per_s=loaded.num_requests / loaded.wall_s,
        first_p50_ms=percentile(first_ms, 0.5),
        first_p99_ms=percentile(first_ms, 0.99),
        server_cores=server_cpu_s / loaded.wall_s,
        client_cores=loaded.cpu_s / loaded.wall_s,
        reads=loaded.num_reads / loaded.num_requests,
        requests=loaded.num_requests,
    )


def _note(names: tuple[str, ...], error: Exception, results: Results) -> None:
    for name in names:
        results.notes.setdefault(name, f"{type(error).__name__}: {error}"[:500])
    print(f"  none: {results.notes[names[0]]}", flush=True)
