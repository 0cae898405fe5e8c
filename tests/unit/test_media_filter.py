"""A media process that somebody has taken over: what can it still reach? Each is tried by a process that is confined as
they are, and by one that lacks a part."""

from __future__ import annotations

import io
import json
import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from triptych.core.errors import StartupError
from triptych.media import process
from triptych.media.filter import _MACHINES
from triptych.media.frames import Limits, MalformedFrame, Target, pack_ready, unpack_ready
from triptych.media.picture import decode_picture, fit
from triptych.media.process import Confinement, MediaProcess
from triptych.media.rehearsal import LATE_PLUGINS, rehearse
from triptych.obs import metrics
from triptych.stages.media import check_filter

TAKEN_OVER = """
import ctypes, json, os, platform, resource, signal, socket, subprocess, sys
from triptych.media import child, filter

parts, folder, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
machine = filter._MACHINES[platform.machine()]
machine.calls.update((f"hole {number}", int(number)) for number in sys.argv[4:])
listening = socket.create_server(("127.0.0.1", 0))
mine = open(folder + "/mine", "w")
if "filter" not in parts:
    child.forbid_system_calls = lambda: False
limit = resource.setrlimit
if "limits" not in parts:
    resource.setrlimit = lambda kind, values: kind == resource.RLIMIT_CPU and limit(kind, values)
if parts:
    child._confine(1 << 30)

def told(attempt):
    try:
        attempt()
    except BaseException as error:
        return type(error).__name__
    return "done"

def start_another():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)

def raise_limits():
    limit(resource.RLIMIT_NOFILE, (64, 64))

def trace():
    if ctypes.CDLL(None, use_errno=True).ptrace(0, 0, 0, 0):  # let its parent trace it: harmless, where it is allowed
        raise OSError

attempts = {
    "open a file": lambda: os.close(os.open(folder + "/secret", os.O_RDONLY)),
    "open a connection": lambda: socket.socket().connect(("127.0.0.1", port)),
    "look up a name": lambda: socket.getaddrinfo("localhost", 80),
    "open a datagram socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close(),
    "listen on a socket": lambda: listening.listen(5),
    "remove a file": lambda: os.unlink(folder + "/victim"),
    "signal another": lambda: os.kill(os.getppid(), 0),
    "start a process": start_another,
    "run a program": lambda: subprocess.run(["/bin/true"], check=True),
    "more limits": raise_limits,
    "take part in tracing": trace,
    "signal itself": lambda: signal.pthread_kill(__import__("threading").get_ident(), 0),
    "limit its time": lambda: limit(resource.RLIMIT_CPU, (100, resource.RLIM_INFINITY)),
    "take memory": lambda: bytearray(1 << 24),
    "be told what it says": lambda: os.write(mine.fileno(), b""),
}
said = {name: told(attempt) for name, attempt in attempts.items()}
os.write(1, json.dumps(said).encode())
"""
HARMLESS = {"signal itself", "limit its time", "take memory", "be told what it says"}
# What limits alone prevent: whatever needs another file descriptor.
BY_LIMITS = {"open a file", "open a connection", "open a datagram socket", "run a program"}


def attempted(parts: str, folder: Path, *holes: int) -> dict[str, str]:
    (folder / "secret").write_text("sesame")
    (folder / "victim").write_text("here")
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", TAKEN_OVER, parts, str(folder), str(server.getsockname()[1])]
        command += [str(number) for number in holes]
        said = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    found: dict[str, str] = json.loads(said)
    return found


def test_what_is_confined_reaches_nothing(tmp_path: Path) -> None:
    said = attempted("filter+limits", tmp_path)
    assert {name for name, how in said.items() if how == "done"} == HARMLESS
    assert (tmp_path / "victim").exists()


def test_the_filter_alone_is_enough(tmp_path: Path) -> None:
    """Whoever is root may raise his limits."""
    said = attempted("filter", tmp_path)
    assert {name for name, how in said.items() if how == "done"} == HARMLESS


def test_limits_alone_keep_it_from_files_and_from_the_network(tmp_path: Path) -> None:
    """Where the kernel has no filters."""
    said = attempted("limits", tmp_path)
    assert not {name for name in BY_LIMITS if said[name] == "done"}
    assert {name for name in HARMLESS if said[name] == "done"} == HARMLESS


def test_what_is_not_confined_reaches_it_all(tmp_path: Path) -> None:
    said = attempted("", tmp_path)
    missing = {name for name, how in said.items() if how != "done"} - {"more limits"}
    assert missing == set()
    assert not (tmp_path / "victim").exists()


HOLES: dict[str, tuple[set[str], dict[str, tuple[int, ...]]]] = {
    "openat": ({"open a file"}, {"x86_64": (257,), "aarch64": (56,)}),
    "socket": ({"open a datagram socket"}, {"x86_64": (41,), "aarch64": (198,)}),
    "socket and connect": (
        {"open a datagram socket", "open a connection"},
        {"x86_64": (41, 42), "aarch64": (198, 203)},
    ),
    "listen": ({"listen on a socket"}, {"x86_64": (50,), "aarch64": (201,)}),
    "unlink": ({"remove a file"}, {"x86_64": (87,), "aarch64": (35,)}),
    "kill": ({"signal another"}, {"x86_64": (62,), "aarch64": (129,)}),
    "ptrace": ({"take part in tracing"}, {"x86_64": (101,), "aarch64": (117,)}),
}


@pytest.mark.parametrize("name", HOLES)
def test_a_filter_with_a_hole_is_found(name: str, tmp_path: Path) -> None:
    found, holes = HOLES[name]
    said = attempted("filter", tmp_path, *holes[platform.machine()])
    assert {each for each, how in said.items() if how == "done"} == HARMLESS | found


def test_media_processes_run_like_that() -> None:
    worker = MediaProcess(Confinement(1 << 28, 0))
    try:
        media = _encoded(Image.new("RGB", (9, 9)), "PNG")
        worker.decode(media, Target(9, 9, 3), Limits(100, 20), time.monotonic() + 30)
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{worker.pid}/status").read_text().splitlines())
        assert status["Seccomp"] == "2" and status["NoNewPrivs"] == "1"
        limits = Path(f"/proc/{worker.pid}/limits").read_text()
        assert next(line for line in limits.splitlines() if line.startswith("Max open files")).split()[3:5] == [
            "0",
            "0",
        ]
        assert len(os.listdir(f"/proc/{worker.pid}/fd")) <= 4
    finally:
        assert worker.end() == 0


def test_a_kernel_without_filters_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "unpack_ready", lambda said: unpack_ready(said) and False)
    counted = metrics.FALLBACKS.labels("media_process_unfiltered")._value
    before = counted.get()
    worker = MediaProcess(Confinement(1 << 28, 0))
    try:
        media = _encoded(Image.new("RGB", (9, 9)), "PNG")
        for _ in range(2):
            worker.decode(media, Target(9, 9, 3), Limits(100, 20), time.monotonic() + 30)
        assert counted.get() == before + 1
    finally:
        worker.end()


def test_a_strict_worker_does_not_start_without_the_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = Confinement(1 << 28, 0)
    check_filter(allowed)
    with monkeypatch.context() as patched:
        patched.setattr(process, "unpack_ready", lambda said: unpack_ready(said) and False)
        with pytest.raises(StartupError, match="filters no system calls"):
            check_filter(allowed)
    monkeypatch.setattr(process, "sys", SimpleNamespace(executable="/bin/false"))
    with pytest.raises(StartupError, match="does not start"):
        check_filter(allowed)


def test_what_a_process_says_when_it_has_started() -> None:
    assert unpack_ready(pack_ready(True)) is True
    assert unpack_ready(pack_ready(False)) is False
    for spoilt in (b"TPMS\x01\x02", b"TPMS\x02\x01", b"TPMX\x01\x01"):
        with pytest.raises(MalformedFrame):
            unpack_ready(spoilt)


def test_each_machine_has_all_that_is_looked_at_and_no_number_twice() -> None:
    for machine in _MACHINES.values():
        assert {"clone", "clone3", "prlimit64", "tgkill", "read", "mmap", "futex", "exit_group"} <= machine.calls.keys()
        assert len(set(machine.calls.values())) == len(machine.calls)
        assert not {"open", "openat", "socket", "connect", "execve", "fork", "kill", "ptrace"} & machine.calls.keys()


# --- what is needed late ----------------------------------------------------------------------------------------------


def test_the_rehearsal_succeeds_and_knows_the_late_plugins() -> None:
    rehearse()
    assert {module.__name__.rpartition(".")[2] for module in LATE_PLUGINS} == {"MpoImagePlugin", "TiffImagePlugin"}


@pytest.mark.parametrize("size", [(600, 40), (1200, 900)])
@pytest.mark.parametrize("kind", ["WEBP", "JPEG", "PNG", "GIF", "BMP", "MPO"])
def test_pictures_that_take_threads_and_late_parts_decode_as_they_do_outside(kind: str, size: tuple[int, int]) -> None:
    """libwebp decodes wide pictures with a thread."""
    media, target = _encoded(Image.effect_noise(size, 80.0).convert("RGB"), kind), Target(56, 28, 3)
    worker = MediaProcess(Confinement(1 << 28, 0))
    try:
        decoded = worker.decode(media, target, Limits(10**8, 20), time.monotonic() + 30)
    finally:
        worker.end()
    assert np.array_equal(decoded.pixels, fit(decode_picture(media, 10**8), target))


def _encoded(image: Image.Image, kind: str) -> bytes:
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()
