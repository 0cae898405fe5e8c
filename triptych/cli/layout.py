"""Which processes make a cluster, with which flags. Pure, but for the ports, which it takes from whoever has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from triptych.cli.ports import HeldPorts, TakePort, free_port
from triptych.cli.settings import DEFAULT_PORT, UpSettings
from triptych.core.address import is_loopback
from triptych.core.errors import StartupError
from triptych.core.topology import WorkerKind, kinds_of
from triptych.core.worker import Role

LOOPBACK = "127.0.0.1"
# By service.
FIRST_PORT = {"encoder": 8101, "prefill": 8201, "decode": 8301, "mono": 8401}
FIRST_METRICS_PORT = 9401
# A thread that spins for its fellows takes the core that one of them waits for, at each of the hundreds of products of
# a step: ten times as long is common then. Sleeping costs a wake-up instead, which is why it is not the default.
PATIENT = (("OMP_WAIT_POLICY", "passive"),)


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to start: `python -m services.ROLE FLAGS`; the launcher's environment wins over `variables`."""

    name: str
    role: str
    flags: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()


def api_port(settings: UpSettings, ports: HeldPorts) -> int:
    """The port that was asked for, or a free one; taken. Raises StartupError if the one asked for is another's."""
    if settings.port:
        if not ports.take(settings.host, settings.port):
            free_port(settings.host)  # tells a wrong host from a taken port
            raise StartupError(
                f"port {settings.port} is taken; stop what listens there, or give another --port (0 takes a free one)"
            )
        return settings.port
    if settings.port is None and ports.take(settings.host, DEFAULT_PORT):
        return DEFAULT_PORT
    return ports.take_any(settings.host)


def notices(settings: UpSettings, port: int, cores: int) -> list[str]:
    """What whoever starts the cluster should know of the API's address."""
    said = []
    if settings.port is None and port != DEFAULT_PORT:
        said.append(f"port {DEFAULT_PORT} is taken; the API listens on {port} (--port chooses one)")
    if not is_loopback(settings.host):
        said.append("without API keys the API asks nobody who they are: let only those reach it who may use it")
    if are_crowded(settings, cores):
        threads, workers = settings.threads, len(_wanted(settings))
        said.append(
            f"{workers} workers with {threads} threads each share {cores} cores; without --threads each has its part"
        )
    return said


def workers(settings: UpSettings, model: Path, runtime: Path, cores: int, take_port: TakePort) -> list[ProcessSpec]:
    """All workers. A standard port that cannot be taken becomes 0: the worker takes a free one and announces it.

    With `--port 0` none is standard, so that clusters that start at the same time cannot meet.
    """
    if settings.port == 0:
        take_port = _take_none
    wanted = _wanted(settings)
    threads = threads_of_each(settings, cores)
    waiting = PATIENT if are_crowded(settings, cores) else ()
    specs: list[ProcessSpec] = []
    for position, (kind, index) in enumerate(wanted):
        name = f"{kind.name}-{index}"
        port = FIRST_PORT[kind.service] + sum(spec.role == kind.service for spec in specs)
        metrics_port = FIRST_METRICS_PORT + position
        flags = {
            "--worker-id": name,
            "--model": str(model),
            "--runtime-dir": str(runtime),
            "--host": LOOPBACK,
            "--port": str(port if take_port(LOOPBACK, port) else 0),
            "--metrics-port": str(metrics_port if take_port(LOOPBACK, metrics_port) else 0),
            "--threads": str(threads),
        }
        if kind.roles == {Role.ENCODER}:
            flags["--nice"] = str(settings.encoder_nice)
        if settings.transport is not None:
            flags["--transport"] = settings.transport
        if kind.service == "prefill":
            flags["--also"] = ",".join(kind.also)  # even if empty: the topology decides, not the file
        specs.append(ProcessSpec(name, kind.service, _flat(flags | _tls_flags(settings)), waiting))
    return specs


def threads_of_each(settings: UpSettings, cores: int) -> int:
    """Of each worker: what was asked for, or its part of the cores."""
    return settings.threads or max(1, cores // len(_wanted(settings)))


def are_crowded(settings: UpSettings, cores: int) -> bool:
    """Whether the workers have more threads than there are cores for."""
    return threads_of_each(settings, cores) * len(_wanted(settings)) > max(cores, len(_wanted(settings)))


def _take_none(_host: str, _port: int) -> bool:
    return False


def router(settings: UpSettings, model: Path, runtime: Path, port: int) -> ProcessSpec:
    flags = {"--model": str(model), "--runtime-dir": str(runtime), "--host": settings.host, "--port": str(port)}
    flags["--drain-timeout-s"] = str(settings.drain_timeout_s)
    return ProcessSpec("router", "router", _flat(flags | _tls_flags(settings)))


def overridden(specs: Sequence[ProcessSpec], tables: Mapping[str, Mapping[str, object]]) -> list[str]:
    """A sentence for each setting in a service's table of the file that the launcher's own flags override."""
    ours = {spec.role: {flag.removeprefix("--").replace("-", "_") for flag in spec.flags[::2]} for spec in specs}
    return [
        f"[{role}] sets {name} in the file, which triptych up decides itself: it is ignored"
        for role, names in ours.items()
        for name in sorted(names & set(tables.get(role, {})))
    ]


def _tls_flags(settings: UpSettings) -> dict[str, str]:
    """One set of files for all. Absolute: a process may have another working folder."""
    files = settings.tls_files
    if files is None:
        return {}
    named = {"--tls-cert": files.cert, "--tls-key": files.key, "--tls-ca": files.ca}
    return {flag: str(path.absolute()) for flag, path in named.items()}


def _wanted(settings: UpSettings) -> list[tuple[WorkerKind, int]]:
    """Each worker: its kind, and its number among its like."""
    counts = settings.counts
    return [(kind, index) for kind in kinds_of(settings.topology) for index in range(counts[kind.count])]


def _flat(flags: dict[str, str]) -> tuple[str, ...]:
    return tuple(part for pair in flags.items() for part in pair)
