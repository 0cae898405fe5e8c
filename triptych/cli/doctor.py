"""`triptych doctor`: looks at everything that a cluster needs here, and says what to do about what is wrong."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from triptych.cli.bundled import bundled_model
from triptych.cli.checks import (
    checkpoint,
    device,
    fit,
    gpu,
    handover,
    host,
    network,
    nixl,
    packages,
    runtime,
    shared_memory,
    transports,
)
from triptych.cli.checks.finding import Finding, Status, guarded
from triptych.cli.checks.machine import Machine, this_machine
from triptych.cli.checks.workers import Wanted, given_names, wanted_workers
from triptych.cli.doctor_settings import DoctorSettings
from triptych.cli.doctor_view import as_json, has_colours, row, summary
from triptych.cli.settings import UpSettings
from triptych.cli.version import version
from triptych.core.settings import config_path, load_settings
from triptych.registry.runtime import default_runtime_path


@dataclass(frozen=True, slots=True)
class Patient:
    """What is looked at: a machine, and the cluster that is to run on it."""

    machine: Machine
    settings: DoctorSettings
    workers: tuple[Wanted, ...]
    metadata: packages.Metadata = field(default_factory=packages.Metadata)

    @property
    def runtime_path(self) -> Path:
        return (self.settings.runtime_dir or default_runtime_path()).absolute()


def main(argv: Sequence[str]) -> int:
    """Status 0 when nothing failed, else 1. Raises StartupError for a wrong command line, variable or file."""
    settings = load_settings(DoctorSettings, "up", argv, command="triptych doctor")
    given, config = given_names(argv, os.environ), config_path(argv, os.environ)
    if config:
        load_settings(UpSettings, "up", ["--config", str(config)], {})  # [up] must not hold what only doctor takes
    _quiet()
    machine = this_machine()
    workers = wanted_workers(settings, config, given, machine.cores, machine.has_gpu)
    return report(examine(Patient(machine, settings, tuple(workers))), as_table=not settings.json)


def report(findings: Iterator[Finding], *, as_table: bool) -> int:
    """Prints each finding as it comes, or all as JSON; the exit status."""
    colours, seen = has_colours(sys.stdout), []
    for finding in findings:
        seen.append(finding)
        if as_table:
            print(row(finding, colours), flush=True)
    print(f"\n{summary(seen)}" if as_table else as_json(seen, version()))
    return int(any(finding.status is Status.FAIL for finding in seen))


def examine(patient: Patient) -> Iterator[Finding]:
    """All checks in the order of the report. Leaves nothing behind.

    What needs an installed package is imported inside its check: on a broken installation the others still speak.
    """
    machine, settings, workers = patient.machine, patient.settings, patient.workers
    dtypes = {worker.dtype for worker in workers if worker.device == "cpu"}
    shared_bytes = sum(worker.shared_bytes for worker in workers)
    checks: dict[str, Callable[[], Finding]] = {
        "python": partial(host.python, machine),
        "system": partial(host.system, machine),
        "packages": partial(packages.packages, patient.metadata),
        "gpu": partial(gpu.torch_and_gpu, machine),
        "cores": partial(host.cores, machine, len(workers), max(worker.threads for worker in workers)),
        "bfloat16": partial(host.bfloat16, machine, dtypes),
        "memory": partial(host.memory, machine),
        "shared memory": partial(shared_memory.shared_memory, machine, shared_bytes),
        "leftovers": partial(shared_memory.leftovers, machine),
        "runtime folder": partial(runtime.runtime_folder, patient.runtime_path),
        "files": partial(runtime.files, patient.runtime_path, settings.log_dir, settings.ready_file),
        "records": partial(runtime.records, patient.runtime_path),
        "open files": partial(host.open_files, machine),
        "locked memory": partial(host.locked_memory, machine),
        "clock": partial(host.clock, machine),
        "inproc": transports.inproc,
        "shm": partial(transports.shm, machine),
        "zmq": partial(transports.zmq, settings.transport or "auto"),
        "cuda_ipc": partial(device.cuda_ipc, machine, settings.transport or "auto"),
        "nixl": partial(nixl.nixl, settings.transport or "auto"),
        "port": partial(network.api_port, settings.host, settings.port),
        "grpc": network.grpc_round_trip,
        "tls": partial(network.tls, settings.tls_files),
        handover.NAME: partial(handover.handover, workers),
    }
    for name, check in checks.items():
        yield guarded(name, check)
    yield from _examine_model(patient)


def _examine_model(patient: Patient) -> Iterator[Finding]:
    """Each step only when the one before has found what it needs: one fault is told once."""
    machine, workers = patient.machine, patient.workers
    adapter = None

    def config() -> Finding:
        nonlocal adapter
        finding, adapter = checkpoint.config(patient.settings.model or bundled_model())
        return finding

    yield guarded("model", config)
    if adapter is None:
        return
    parts = None

    def weights() -> Finding:
        nonlocal parts
        finding, parts = checkpoint.weights(adapter)
        return finding

    yield guarded("weights", weights)
    yield guarded("tokenizer", partial(checkpoint.tokenizer, adapter))
    yield guarded("KV pool", partial(fit.kv_pool, adapter, workers))
    yield guarded("landing", partial(fit.landing, adapter, workers))
    if parts is not None:
        yield guarded("model size", partial(fit.part_sizes, adapter, parts, workers))
        fitting = guarded("memory fit", partial(fit.memory_fit, machine, workers, parts))
        yield fitting
        if fitting.status is Status.OK:
            yield guarded("media memory", partial(fit.media_fit, machine, workers, parts))
        if any(worker.device == "cuda" for worker in workers):
            yield guarded("GPU fit", partial(fit.gpu_fit, machine, workers, parts))


def _quiet() -> None:
    """Libraries have things to say that are no finding, and JSON must stay JSON."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # or it tells at times that our own server has gone
