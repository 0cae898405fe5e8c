"""`triptych doctor` as a command, its checks that use this machine, and the rest of the command line."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.demo_dir import demo_model_dir
from tests.unit.fake_machine import machine_at
from triptych.cli import doctor, doctor_view, main
from triptych.cli.checks import host, network, transports
from triptych.cli.checks.finding import Finding, Status, fail, guarded, ok, size, warn
from triptych.cli.checks.machine import this_machine
from triptych.cli.doctor_settings import DoctorSettings
from triptych.core import environment
from triptych.core.errors import StartupError
from triptych.transport.shm import SHM_DIRECTORY

CHECKS = """python system packages gpu cores bfloat16 memory|shared memory|leftovers|runtime folder|files records
open files|locked memory|clock inproc shm zmq cuda_ipc nixl port grpc tls handover model weights tokenizer
KV pool|landing|model size|memory fit|media memory"""
FINDINGS = [ok("clock", "monotonic"), warn("port", "8000 is taken", "take another"), fail("shm", "no\nroom", "mend")]


@pytest.fixture
def runtime_dir(tmp_path: Path) -> str:
    return str(tmp_path / "r")


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "triptych.cli", *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)


# --- the command ------------------------------------------------------------------------------------------------------


def test_this_machine_can_serve_the_bundled_model(runtime_dir: str) -> None:
    before = set(SHM_DIRECTORY.iterdir())
    done = run("doctor", "--json", "--model", str(demo_model_dir()), "--runtime-dir", runtime_dir)
    report = json.loads(done.stdout)
    assert done.returncode == 0, report
    assert report["ok"] is True
    names = [check["name"] for check in report["checks"]]
    assert names == [name.strip() for line in CHECKS.split("\n") for part in line.split("|") for name in _names(part)]
    assert not [check for check in report["checks"] if check["status"] == "fail"]
    assert not Path(runtime_dir).exists()
    assert not {path for path in set(SHM_DIRECTORY.iterdir()) - before if "doctor" in path.name}


def _names(part: str) -> list[str]:
    """Names of two words stand alone between bars."""
    words = part.split()
    two = {"shared memory", "runtime folder", "open files", "locked memory", "KV pool", "model size", "memory fit"}
    two.add("media memory")
    return [part.strip()] if part.strip() in two else words


def test_a_failure_has_status_1_and_names_the_fault(runtime_dir: str, tmp_path: Path) -> None:
    done = run("doctor", "--model", str(tmp_path), "--runtime-dir", runtime_dir)
    assert done.returncode == 1
    assert f"{tmp_path.name}/config.json is missing" in done.stdout
    assert "1 failed: a cluster cannot run like this" in done.stdout
    assert done.stderr == ""
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("blocked", [["torch"], ["grpc"], ["numpy", "torch", "transformers", "google.protobuf", "zmq"]])
def test_a_broken_installation_is_a_report_and_no_traceback(blocked: list[str], runtime_dir: str) -> None:
    """`None` in sys.modules is how Python says that a module cannot be imported."""
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked!r})); from triptych.cli import main; "
    command = [
        sys.executable,
        "-c",
        f"{code} sys.argv[1:] = ['doctor', '--json', *sys.argv[1:]]; sys.exit(main.entry())",
    ]
    command += ["--model", str(demo_model_dir()), "--runtime-dir", runtime_dir]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert (done.returncode, done.stderr) == (1, "")
    failed = {check["name"]: check for check in json.loads(done.stdout)["checks"] if check["status"] == "fail"}
    assert failed["gpu" if "torch" in blocked else "grpc"]
    assert all(check["todo"] for check in failed.values())
    assert any(blocked[0] in check["found"] for check in failed.values())


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--kv-pool-bytes", "much"], "kv_pool_bytes must be a whole number"),
        (
            ["--modle", "x"],
            r"triptych doctor does not know '--modle' \(did you mean --model\?\); triptych doctor",
        ),
        (["--topology", "ring"], "ring"),
    ],
)
def test_a_wrong_command_line_is_a_sentence(argv: list[str], sentence: str) -> None:
    with pytest.raises(StartupError, match=sentence):
        doctor.main(argv)


def test_a_file_that_up_would_refuse_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[up]\nkv_pool_bytes = 4096\n")
    with pytest.raises(StartupError, match=r"\[up\] in c.toml sets 'kv_pool_bytes', which is no setting"):
        doctor.main(["--config", str(tmp_path / "c.toml")])


def test_its_settings_are_known_to_all_services() -> None:
    assert set(DoctorSettings.__dataclass_fields__) <= environment.SETTING_NAMES


# --- the report -------------------------------------------------------------------------------------------------------


def test_table_and_json_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.report(iter(FINDINGS), as_table=True) == 1
    rows = capsys.readouterr().out.splitlines()
    assert doctor.report(iter(FINDINGS), as_table=False) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    told = [line for check in report["checks"] for line in _lines(check)]
    assert [row.split() for row in rows[: len(told)]] == told
    assert rows[-1] == "1 ok, 1 to look at, 1 failed: a cluster cannot run like this"


def _lines(check: dict[str, str]) -> list[list[str]]:
    line = f"{check['status']} {check['name']} {check['found']}".split()
    return [line, f"-> {check['todo']}".split()] if check["todo"] else [line]


def test_warnings_alone_have_status_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.report(iter(FINDINGS[:2]), as_table=True) == 0
    assert capsys.readouterr().out.endswith("1 ok, 1 to look at, 0 failed: a cluster can run here\n")
    assert doctor.report(iter(FINDINGS[:2]), as_table=False) == 0


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert doctor_view.has_colours(_Terminal())
    assert not doctor_view.has_colours(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not doctor_view.has_colours(_Terminal())
    assert "\x1b[31;1mfail\x1b[0m" in doctor_view.row(FINDINGS[2], colours=True)
    assert "\x1b" not in doctor_view.row(FINDINGS[2], colours=False)


def test_a_check_that_breaks_is_a_failure_that_says_so() -> None:
    def broken() -> Finding:
        raise ZeroDivisionError("division by zero")

    def refused() -> Finding:
        raise StartupError("mount /proc")

    assert guarded("a", broken).found == "the check itself broke: ZeroDivisionError: division by zero"
    assert (guarded("b", refused).status, guarded("b", refused).found) == (Status.FAIL, "mount /proc")


def test_a_text_that_the_terminal_cannot_show_is_no_traceback(tmp_path: Path) -> None:
    code = "from triptych.cli import doctor, main; from triptych.cli.checks.finding import ok; "
    code += "main.run = lambda _: doctor.report(iter([ok('x', 'caf\\u00e9 \\udcff')]), as_table=True)\n"
    code += "raise SystemExit(main.entry())"
    environ = {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(main.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"caf\xe9 \udcff" in done.stdout


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (5 * 2**20, "5.0 MiB"), (3 * 2**30, "3.0 GiB")],
)
def test_sizes_in_words(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


# --- transports and network, really used ------------------------------------------------------------------------------


def test_transports_of_this_machine() -> None:
    machine = this_machine()
    for finding in (transports.inproc(), transports.shm(machine), transports.zmq("auto")):
        assert finding.status is Status.OK, finding
    assert not list(SHM_DIRECTORY.glob("triptych-doctor-*"))


def test_a_peer_that_cannot_map_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = machine_at(tmp_path)
    assert transports.shm(machine).status is Status.OK
    monkeypatch.setattr(sys, "executable", "/bin/false")
    finding = transports.shm(machine)
    assert finding.status is Status.FAIL and finding.todo
    assert not list(machine.shm.iterdir())


def test_zmq_that_is_missing_or_cannot_talk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "ipc path" in str(transports._zmq_fault(f"ipc://{tmp_path}/{'x' * 200}"))
    with monkeypatch.context() as broken:
        broken.setattr(transports, "_zmq_fault", lambda address: "no")
        assert transports.zmq("auto").status is transports.zmq("zmq-tcp").status is Status.FAIL
        assert transports.zmq("shm").status is Status.WARN
    monkeypatch.setitem(sys.modules, "zmq", None)
    finding = transports.zmq("auto")
    assert finding.status is Status.FAIL and "pip install" in str(finding.todo)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_ports(taken_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert network.api_port("127.0.0.1", 0).status is Status.OK
    taken = network.api_port("127.0.0.1", taken_port)
    assert taken.status is Status.FAIL and "--port" in str(taken.todo)
    monkeypatch.setattr(network, "DEFAULT_PORT", taken_port)
    standard = network.api_port("127.0.0.1", None)
    assert standard.status is Status.WARN and "prints it" in str(standard.todo)
    elsewhere = guarded("port", lambda: network.api_port("192.0.2.1", 8000))
    assert elsewhere.status is Status.FAIL
    nowhere = guarded("port", lambda: network.api_port("192.0.2.1", None))
    assert nowhere.status is Status.FAIL and "--host" in nowhere.found


def test_grpc_answers_on_loopback() -> None:
    assert network.grpc_round_trip().status is Status.OK


def test_a_clock_that_jumps_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([5, 4] * 500)
    machine = this_machine()
    monkeypatch.setattr(host.time, "monotonic_ns", lambda: next(readings))
    assert host.clock(machine).status is Status.FAIL


# --- the rest of the command line -------------------------------------------------------------------------------------


def test_the_version_is_the_installed_one() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("triptych ")
    assert done.stdout.split()[1][0].isdigit()


def test_python_dash_m_triptych_is_the_command() -> None:
    def said(*argv: str) -> tuple[int, str, str]:
        command = [sys.executable, "-m", "triptych", *argv]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
        return done.returncode, done.stdout, done.stderr

    ours = run("--version")
    assert said("--version") == (0, ours.stdout, "")
    assert said("--help")[1] == run("--help").stdout
    assert said("upp") == (1, "", run("upp").stderr)


@pytest.mark.parametrize(("encoding", "mark"), [("latin-1", "\\u25cf"), ("utf-8", "●")])
def test_a_terminal_that_has_not_our_signs_ends_no_command(encoding: str, mark: str) -> None:
    code = (
        "from triptych.cli import display, main; main.run = lambda _: display.make_display().update({'a': 'ready'})\n"
    )
    code += "raise SystemExit(main.entry())"
    environ = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, check=False, timeout=50)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.decode(encoding).split()[:3] == [mark, "a", "ready"]


def test_a_mistyped_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    for typed, meant in (("doctr", "doctor"), ("sever", "serve"), ("upp", "up")):
        with pytest.raises(StartupError, match=rf"no command '{typed}' \(did you mean {meant}\?\); it has up, chat"):
            main.run([typed])
    with pytest.raises(StartupError, match="no command 'xyzzy'; it has up, chat"):
        main.run(["xyzzy"])
    assert main.run([]) == 0
    usage = capsys.readouterr().out
    assert all(f"  {name}" in usage for name in main.COMMANDS)


@pytest.mark.parametrize(
    "command",
    [["up"], ["chat"], ["doctor"], ["serve"], *(["serve", role] for role in ("router", "encoder", "decode", "mono"))],
)
def test_usage_says_what_was_typed(command: list[str]) -> None:
    done = run(*command, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: triptych {' '.join(command)} ")


@pytest.mark.parametrize("role", ["router", "encoder", "prefill", "decode", "mono"])
def test_log_flags_are_told_alike(role: str) -> None:
    text = " ".join(run("serve", role, "--help").stdout.split())
    assert "--log-level debug|info|warning|error least level that is logged (default: info)" in text
    assert "--log-format text|json how a record is written (default: text)" in text
    wrong = run("serve", role, "--log-level", "loud", "--model", "m", *(["--worker-id", "x-0"] * (role != "router")))
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert "log_level must be one of debug, info, warning, error" in wrong.stderr
    unknown = run("serve", role, "--lgo-level", "info")
    assert unknown.stderr.startswith(
        f"error: triptych serve {role} does not know '--lgo-level' (did you mean --log-level"
    )


GOING_SERVER = """
import asyncio
from triptych.cli import doctor
doctor._quiet()
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from triptych.rpc.server import RpcServer

async def main():
    server = RpcServer("127.0.0.1", 0, token="0" * 64)
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        await server.stop(0.0)
        print((await watch.code()).name)

asyncio.run(main())
"""


def test_grpc_says_nothing_of_a_server_that_goes_before_its_channel() -> None:
    done = subprocess.run([sys.executable, "-c", GOING_SERVER], capture_output=True, text=True, check=True, timeout=50)
    assert done.stdout == "UNAVAILABLE\n" and "goaway" not in done.stderr.lower()
