"""`triptych up`: a cluster on this machine, from start to stop."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from triptych.cli import layout, leftovers, sample
from triptych.cli.bundled import bundled_model
from triptych.cli.display import Display, make_display
from triptych.cli.ports import HeldPorts
from triptych.cli.process import Child
from triptych.cli.settings import UpSettings, check_model
from triptych.cli.signals import StopSignals
from triptych.cli.supervisor import ApiAddress, Supervisor
from triptych.core.environment import CONFIG_VARIABLE
from triptych.core.ready_file import check_ready_file, write_ready_file
from triptych.core.settings import config_path, config_tables, load_settings
from triptych.core.worker import Role
from triptych.registry.runtime import RuntimeFolder
from triptych.registry.static import StaticRegistry
from triptych.rpc.tls import load_tls


def main(argv: Sequence[str]) -> int:
    """Runs until Ctrl-C, SIGTERM or SIGHUP (status 0). Raises StartupError when the cluster cannot start."""
    settings = load_settings(UpSettings, "up", argv, command="triptych up")
    if config := config_path(argv, os.environ):
        os.environ[CONFIG_VARIABLE] = str(config)  # for the children
    model = check_model(settings.model or bundled_model())
    load_tls(settings.tls_files)  # told here once, and not in the log of each process
    if settings.ready_file:
        check_ready_file(settings.ready_file)
    signals = StopSignals()
    keeps_folder = leftovers.is_users_own(settings.runtime_dir)
    folder = RuntimeFolder(settings.runtime_dir)
    registry = StaticRegistry(folder)
    display = make_display()
    lock, swept = leftovers.take_over(folder, registry, settings.log_dir)
    if swept:
        display.say(f"removed what an earlier cluster left: {', '.join(swept)}")
    supervisor, ports = None, HeldPorts()
    try:
        supervisor = _assemble(settings, model, folder, registry, display, signals, ports)
        _run(supervisor, settings, folder, display)
    finally:
        if supervisor is not None:
            supervisor.stop(settings.drain_timeout_s)
        ports.close()
        if settings.ready_file:
            settings.ready_file.unlink(missing_ok=True)
        leftovers.clear(folder, registry, lock, settings.log_dir)
        if not keeps_folder:
            leftovers.remove(folder)
    display.say("stopped")
    return 0


def _assemble(
    settings: UpSettings,
    model: Path,
    folder: RuntimeFolder,
    registry: StaticRegistry,
    display: Display,
    signals: StopSignals,
    ports: HeldPorts,
) -> Supervisor:
    port = layout.api_port(settings, ports)
    cores = len(os.sched_getaffinity(0))
    for notice in layout.notices(settings, port, cores):
        display.say(notice)
    logs = leftovers.log_folder(folder, settings.log_dir)
    specs = layout.workers(settings, model, folder.path, cores, ports.take)
    router_spec = layout.router(settings, model, folder.path, port)
    if config := config_path((), os.environ):
        for warning in layout.overridden([*specs, router_spec], config_tables(config)):
            display.say(warning)
    workers = [Child(spec, logs / f"{spec.name}.log") for spec in specs]
    router = Child(router_spec, logs / "router.log")
    return Supervisor(workers, router, registry, ApiAddress(settings.host, port), display, signals)


def _run(supervisor: Supervisor, settings: UpSettings, folder: RuntimeFolder, display: Display) -> None:
    display.say(f"starting {len(supervisor.children)} processes; Ctrl-C stops them")
    if not supervisor.start(settings.startup_timeout):
        return
    living, url = supervisor.living_workers(), supervisor.api.url
    model_name = next((worker.model_name for worker in living if worker.model_name), "default")
    curl = sample.curl if any(Role.ENCODER in worker.roles for worker in living) else sample.text_curl
    display.say(f"\nready: {url}\n\ntry it:\n\n{curl(url, model_name)}\n")
    if settings.ready_file:
        _write_ready_file(settings.ready_file, supervisor, folder)
    supervisor.watch()
    display.say("stopping")


def _write_ready_file(path: Path, supervisor: Supervisor, folder: RuntimeFolder) -> None:
    ready = {
        "url": supervisor.api.url,
        "launcher_pid": os.getpid(),
        "runtime_dir": str(folder.path),
        "pids": {child.spec.name: child.pid for child in supervisor.children},
        "workers": {
            worker.worker_id: {"grpc_address": worker.grpc_address, "metrics_address": worker.metrics_address}
            for worker in supervisor.living_workers()
        },
    }
    write_ready_file(path, json.dumps(ready, indent=2).encode())
