"""Watches over the processes of one cluster: start, readiness, death, stop. Owns the children."""

from __future__ import annotations

import http.client
import time
from collections.abc import Sequence
from dataclasses import dataclass

from triptych.cli.display import Display
from triptych.cli.process import Child, ending, stop_all
from triptych.cli.signals import StopSignals
from triptych.core.errors import StartupError
from triptych.core.worker import WorkerInfo, WorkerState
from triptych.registry.static import StaticRegistry
from triptych.transport.shm import sweep_dead_segments

POLL_SECONDS = 0.05
GRACE_SECONDS = 10.0
PATIENCE_SECONDS = 1.0
FIRST_BACKOFF_SECONDS = 0.5
LAST_BACKOFF_SECONDS = 30.0
# A process that lived this long has shown that it can: its next death starts the back-off anew.
SETTLED_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class ApiAddress:
    host: str
    port: int

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host  # noqa: S104
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    def is_ready(self) -> bool:
        """Whether `/health/ready`, which asks for no key, answers 200 within a second."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=1.0)
        try:
            connection.request("GET", "/health/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


class Supervisor:
    """`start`, then `watch` until told to stop, then `stop`, which must always be called.

    Args:
        workers: the stages' processes; ready when the registry says so.
        router: ready when its `/health/ready` answers.
        signals: asked several times a second whether to stop.
    """

    def __init__(
        self,
        workers: Sequence[Child],
        router: Child,
        registry: StaticRegistry,
        api: ApiAddress,
        display: Display,
        signals: StopSignals,
    ) -> None:
        self._workers = list(workers)
        self._router = router
        self._registry = registry
        self.api = api
        self._display = display
        self._signals = signals
        self._restart_at: dict[str, float] = {}
        self._recovering: set[str] = set()

    @property
    def children(self) -> list[Child]:
        return [*self._workers, self._router]

    def start(self, timeout_seconds: float) -> bool:
        """True when all are ready, False when told to stop before. Raises StartupError with the log of what failed."""
        for child in self.children:
            child.start()
        give_up_at = time.monotonic() + timeout_seconds
        while not self._signals.stop_wanted:
            states = self._states()
            self._display.update(states)
            self._refuse_dead()
            if all(state == "ready" for state in states.values()):
                return True
            if time.monotonic() > give_up_at:
                raise self._too_slow(states, timeout_seconds)
            time.sleep(POLL_SECONDS)
        return False

    def watch(self) -> None:
        """Starts again what dies, later each time, until told to stop."""
        while not self._signals.stop_wanted:
            for child in self.children:
                self._tend(child)
            self._report_recovered()
            time.sleep(POLL_SECONDS)

    def stop(self, drain_seconds: float) -> None:
        """Leaves no process of ours. The router goes first, and the workers serve until what it has under way has
        ended, or `drain_seconds` have passed: without them those requests would fail."""
        self._stop_router(drain_seconds)
        for name in stop_all(self.children, GRACE_SECONDS, lambda: self._signals.hurry_wanted):
            self._display.say(f"{name} did not stop in time and was killed")

    def _stop_router(self, drain_seconds: float) -> None:
        self._router.ask_to_stop()
        began_at, is_told = time.monotonic(), False
        while self._router.is_running() and not self._signals.hurry_wanted:
            waited = time.monotonic() - began_at
            if waited > drain_seconds + GRACE_SECONDS:
                return
            if waited > PATIENCE_SECONDS and not is_told:
                self._display.say("requests under way end first; Ctrl-C ends them now")
                is_told = True
            time.sleep(0.02)

    def living_workers(self) -> tuple[WorkerInfo, ...]:
        return self._registry.refresh()

    def _states(self) -> dict[str, str]:
        records = {worker.worker_id: worker for worker in self._registry.refresh()}
        states = {child.spec.name: _worker_state(child, records.get(child.spec.name)) for child in self._workers}
        workers_ready = all(state == "ready" for state in states.values())
        states["router"] = "loading"
        if self._router.exit_status() is not None:
            states["router"] = "failed"
        elif workers_ready and self.api.is_ready():
            states["router"] = "ready"
        return states

    def _too_slow(self, states: dict[str, str], timeout_seconds: float) -> StartupError:
        waiting = [child for child in self.children if states[child.spec.name] != "ready"]
        names = ", ".join(child.spec.name for child in waiting)
        return StartupError(
            f"{names} did not become ready in {timeout_seconds:.0f} s (--startup-timeout allows more)"
            f"{_log_of(waiting[0])}"
        )

    def _refuse_dead(self) -> None:
        for child in self.children:
            status = child.exit_status()
            if status is not None:
                raise StartupError(f"{child.spec.name} {ending(status)} while starting{_log_of(child)}")

    def _tend(self, child: Child) -> None:
        name, status = child.spec.name, child.exit_status()
        if status is None:
            return
        if name not in self._restart_at:
            child.kill()  # what it left in its process group
            sweep_dead_segments()  # and in shared memory, which a worker that keeps dying would fill
            if time.monotonic() - child.started_at > SETTLED_SECONDS:
                child.restarts = 0
            delay = min(FIRST_BACKOFF_SECONDS * 2**child.restarts, LAST_BACKOFF_SECONDS)
            self._restart_at[name] = time.monotonic() + delay
            self._display.say(f"{name} {ending(status)}; starting it again in {delay:.1f} s{_log_of(child)}")
        elif time.monotonic() >= self._restart_at[name]:
            del self._restart_at[name]
            child.restarts += 1
            child.start()
            self._recovering.add(name)

    def _report_recovered(self) -> None:
        """Says when what was started again is ready."""
        if not self._recovering:
            return
        states = self._states()
        for name in [name for name in self._recovering if states.get(name) == "ready"]:
            self._recovering.discard(name)
            self._display.say(f"{name} is ready again")


def _worker_state(child: Child, record: WorkerInfo | None) -> str:
    if child.exit_status() is not None:
        return "failed"
    if record is None or record.pid not in (0, child.pid):
        return "starting"
    return "ready" if record.state is WorkerState.READY else "loading"


def _log_of(child: Child) -> str:
    tail = child.tail()
    return ". Its last lines:\n" + "\n".join(f"    {line}" for line in tail) if tail else ", without a word"
