"""Two hosts on one machine: network namespaces joined by a wire, each process with a /dev/shm of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.integration.launching import POISONED, REPOSITORY

STOP_SECONDS = 20.0


@dataclass(frozen=True)
class Host:
    """A namespace and its address on the wire."""

    namespace: str
    address: str

    def command(self, *command: str) -> list[str]:
        """`command` as a process of this host. The process that is started becomes it."""
        inside = 'mount -t tmpfs -o size=1g,mode=1777 tmpfs /dev/shm && exec "$@"'
        return ["ip", "netns", "exec", self.namespace, "unshare", "-m", "sh", "-c", inside, "sh", *command]

    def run(self, script: str, *arguments: str, timeout_s: float = 60.0) -> str:
        """What a Python script says that runs there."""
        command = self.command(sys.executable, "-c", script, *arguments)
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0, done.stderr
        return done.stdout


def environment() -> dict[str, str]:
    return {**os.environ, **POISONED, "PYTHONPATH": str(REPOSITORY)}


def why_not() -> str | None:
    """What is missing here to make hosts; None when nothing is."""
    for tool in ("ip", "unshare", "mount"):
        if shutil.which(tool) is None:
            return f"the command `{tool}` is missing (packages iproute2, util-linux, mount)"
    name = f"tri-{secrets.token_hex(3)}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    try:
        if made.returncode:
            return f"network namespaces need root here (CAP_SYS_ADMIN): {made.stderr.strip()}"
        probe = subprocess.run(Host(name, "").command("true"), capture_output=True, text=True)
        return f"a namespace cannot mount its own /dev/shm: {probe.stderr.strip()}" if probe.returncode else None
    finally:
        if not made.returncode:
            subprocess.run(["ip", "netns", "del", name], check=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Gone at the end, whatever happened. The wire's addresses are of a network that nobody routes."""
    token = secrets.token_hex(3)
    number = secrets.randbelow(250)
    hosts = tuple(Host(f"tri-{token}-{side}", f"10.213.{number}.{n}") for n, side in enumerate("ab", start=1))
    wires = [f"tri{token}{side}" for side in "ab"]
    with contextlib.ExitStack() as stack:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            stack.callback(_ip, "netns", "del", host.namespace)
        _ip(
            "link",
            "add",
            wires[0],
            "netns",
            hosts[0].namespace,
            "type",
            "veth",
            "peer",
            wires[1],
            "netns",
            hosts[1].namespace,
        )
        for host, wire in zip(hosts, wires, strict=True):
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", wire)
            _ip("-n", host.namespace, "link", "set", wire, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield hosts[0], hosts[1]


@contextlib.contextmanager
def service(host: Host, role: str, log: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m services.ROLE` on that host; not running any more at the end."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            host.command(sys.executable, "-m", f"services.{role}", *flags),
            cwd=log.parent,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        process.kill()
        process.wait()


def wait_for(path: Path, running: dict[str, subprocess.Popen[bytes]], logs: Path, timeout_s: float) -> str:
    """What is in the file, once it is there. Raises AssertionError with the logs when a process ended before."""
    give_up_at = time.monotonic() + timeout_s
    while not path.exists():
        dead = [name for name, process in running.items() if process.poll() is not None]
        if dead or time.monotonic() > give_up_at:
            said = "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')}" for log in sorted(logs.glob("*.log")))
            raise AssertionError(f"the cluster did not get ready; ended: {dead}\n{said}")
        time.sleep(0.1)
    return path.read_text()


@contextlib.contextmanager
def throttled(host: Host, rate: str) -> Iterator[None]:
    """What this host sends goes out no faster than that, like `4mbit`."""
    (wire,) = [name for name in _inside(host, "ls", "/sys/class/net").split() if name.startswith("tri")]
    shaped = ("tbf", "rate", rate, "burst", "32kb", "latency", "1s")
    _inside(host, "tc", "qdisc", "add", "dev", wire, "root", *shaped)
    try:
        yield
    finally:
        _inside(host, "tc", "qdisc", "del", "dev", wire, "root")


@contextlib.contextmanager
def cut_off(host: Host, port: int) -> Iterator[None]:
    """What comes to that TCP port of the host is dropped, without a word to anybody."""
    rule = ("INPUT", "-p", "tcp", "--dport", str(port), "-j", "DROP")
    _inside(host, "iptables", "-I", *rule)
    try:
        yield
    finally:
        _inside(host, "iptables", "-D", *rule)


@contextlib.contextmanager
def unplugged(host: Host) -> Iterator[None]:
    """Whatever comes to it from the other is dropped, without a word to anybody."""
    rule = ("INPUT", "!", "-i", "lo", "-j", "DROP")
    _inside(host, "iptables", "-I", *rule)
    try:
        yield
    finally:
        _inside(host, "iptables", "-D", *rule)


def why_not_cut(host: Host) -> str | None:
    """What is missing to throttle and cut its link; None when nothing is."""
    for tool in ("tc", "iptables"):
        if shutil.which(tool) is None:
            return f"the command `{tool}` is missing (packages iproute2, iptables)"
    for probe in (throttled(host, "100mbit"), cut_off(host, 1)):
        try:
            with probe:
                pass
        except subprocess.CalledProcessError as error:
            return f"the kernel does not let us: {error.stderr.strip()}"
    return None


def _inside(host: Host, *command: str) -> str:
    whole = ["ip", "netns", "exec", host.namespace, *command]
    return subprocess.run(whole, check=True, capture_output=True, text=True).stdout


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
