"""The doctor's checks of a machine, on machines that are made up and, where the kernel must be asked, on this one."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from tests.unit.fake_machine import GIB, MEMINFO, machine_at
from triptych.cli.checks import gpu, host, packages, runtime, shared_memory
from triptych.cli.checks.cgroup import cpu_quota, memory_limit
from triptych.cli.checks.finding import Status, guarded
from triptych.cli.checks.machine import Gpu, Machine, TorchFacts, this_machine
from triptych.transport.shm import SharedSegment, sweep_dead_segments

REPOSITORY = Path(__file__).parents[2]


# --- interpreter and system -------------------------------------------------------------------------------------------


def test_an_old_python_and_another_system_are_failures(tmp_path: Path) -> None:
    machine = machine_at(tmp_path)
    assert host.python(machine).status is Status.OK
    old = host.python(dataclasses.replace(machine, python=(3, 10, 12)))
    assert (old.status, old.found) == (Status.FAIL, "3.10.12")
    assert "Python 3.11 or later" in str(old.todo)
    assert host.system(machine).status is Status.OK
    assert host.system(dataclasses.replace(machine, system="Darwin")).status is Status.FAIL


def test_the_oldest_python_is_the_projects() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=" + ".".join(map(str, host.OLDEST_PYTHON))


# --- control groups ---------------------------------------------------------------------------------------------------

V2 = {"proc/self/cgroup": "0::/a/b\n"}
V1 = {"proc/self/cgroup": "9:memory:/a\n3:cpu,cpuacct:/a\n2:cpuset:/\n0::/\n"}
CPU, MEMORY = "sys/fs/cgroup/{}/cpu.max", "sys/fs/cgroup/{}/memory.max"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None),
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "150000 100000"}, 1.5),
        (V2 | {"sys/fs/cgroup/a/b/cpu.max": "max 100000", "sys/fs/cgroup/a/cpu.max": "50000 100000"}, 0.5),
        # in a container the group's path is the host's, and only the mount's root is there
        ({"proc/self/cgroup": "0::/docker/123\n", "sys/fs/cgroup/cpu.max": "200000 100000"}, 2.0),
        (V1 | {"sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "-1"}, None),
        (
            V1
            | {
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000",
            },
            3.0,
        ),
        (
            V1
            | {
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "25000",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "50000",
            },
            0.5,
        ),
    ],
)
def test_the_least_quota_on_the_way_up_counts(files: dict[str, str], quota: float | None, tmp_path: Path) -> None:
    assert cpu_quota(machine_at(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("files", "free_gib"),
    [
        ({}, None),
        (V2 | {"sys/fs/cgroup/a/b/memory.max": "max"}, None),
        (V2 | {"sys/fs/cgroup/a/b/memory.max": str(4 * GIB), "sys/fs/cgroup/a/b/memory.current": str(GIB)}, 3),
        (
            V2
            | {
                "sys/fs/cgroup/a/b/memory.max": str(4 * GIB),
                "sys/fs/cgroup/a/b/memory.current": str(3 * GIB),
                "sys/fs/cgroup/a/b/memory.stat": f"anon 5\ninactive_file {2 * GIB}\n",
            },
            3,
        ),
        (V2 | {"sys/fs/cgroup/a/b/memory.max": str(4 * GIB), "sys/fs/cgroup/a/memory.max": str(2 * GIB)}, 2),
        (V1 | {"sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9223372036854771712"}, None),
        (
            V1
            | {
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(4 * GIB),
                "sys/fs/cgroup/memory/a/memory.usage_in_bytes": str(2 * GIB),
                "sys/fs/cgroup/memory/a/memory.stat": f"cache 1\ntotal_inactive_file {GIB}\n",
            },
            3,
        ),
    ],
)
def test_the_group_that_leaves_least_memory_counts(files: dict[str, str], free_gib: int | None, tmp_path: Path) -> None:
    machine = machine_at(tmp_path, files)
    limit = memory_limit(machine)
    assert (None if limit is None else limit.free_bytes) == (None if free_gib is None else free_gib * GIB)
    assert host.available_bytes(machine) == (64 if free_gib is None else free_gib) * GIB


def test_threads_beyond_a_quota_are_named_with_the_flag_that_mends_it(tmp_path: Path) -> None:
    roomy = machine_at(tmp_path / "roomy")
    assert host.cores(roomy, num_workers=3, threads=2).status is Status.OK
    tight = machine_at(tmp_path / "tight", V2 | {"sys/fs/cgroup/a/b/cpu.max": "300000 100000"})
    finding = host.cores(tight, num_workers=3, threads=2)
    assert finding.status is Status.WARN
    assert "8 cores, of which a quota leaves 3" in finding.found
    assert "--threads 1" in str(finding.todo)
    assert host.cores(tight, num_workers=3, threads=1).status is Status.OK


def test_memory_says_what_there_is_and_what_the_group_may_use(tmp_path: Path) -> None:
    files = V2 | {"sys/fs/cgroup/a/b/memory.max": str(4 * GIB), "sys/fs/cgroup/a/b/memory.current": str(GIB)}
    assert host.memory(machine_at(tmp_path / "a", files)).found == (
        "3.0 GiB available of 64.0 GiB; this control group may use 4.0 GiB, 3.0 GiB more than now"
    )
    assert host.memory(machine_at(tmp_path / "b", {"proc/meminfo": ""})).status is Status.WARN


def test_memory_of_this_machine_is_the_kernels() -> None:
    total = host.memory(this_machine()).found.split(" of ")[1].split(";")[0]
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert float(total.split()[0]) == pytest.approx(pages / GIB, rel=0.05)


# --- small ones -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cpuinfo", "native"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16\n", True),
        ("flags\t\t: fpu avx2 amx_bf16\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("flags\t\t: fpu avx2 avx512f\n", False),
        ("", False),
    ],
)
def test_bfloat16_is_told_by_the_cpus_flags(cpuinfo: str, native: bool, tmp_path: Path) -> None:
    machine = machine_at(tmp_path, {"proc/cpuinfo": cpuinfo})
    assert host.bfloat16(machine, {"float32"}).status is Status.OK
    finding = host.bfloat16(machine, {"bfloat16"})
    assert finding.status is (Status.OK if native else Status.WARN)
    assert native or "float32" in str(finding.todo)


def test_few_open_files_are_named_with_the_command(tmp_path: Path) -> None:
    machine = machine_at(tmp_path)
    assert host.open_files(machine).status is Status.OK
    assert host.open_files(dataclasses.replace(machine, open_files=(None, None))).status is Status.OK
    few = host.open_files(dataclasses.replace(machine, open_files=(256, 4096)))
    assert (few.status, few.todo) == (Status.WARN, "run `ulimit -n 1024` before triptych up")
    assert "hard limit 512" in str(host.open_files(dataclasses.replace(machine, open_files=(256, 512))).todo)
    assert host.locked_memory(machine).status is Status.OK


def test_this_machines_clock_is_monotonic() -> None:
    assert host.clock(this_machine()).status is Status.OK


# --- packages ---------------------------------------------------------------------------------------------------------


def metadata(versions: dict[str, str], requires: list[str] | None = None) -> packages.Metadata:
    """This project's own requirements as they stand in pyproject.toml, unless others are given."""
    if requires is None:
        requires = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]

    def version(name: str) -> str:
        if name in versions:
            return versions[name]
        if versions.get("*"):
            return packages.Metadata().version(name)
        raise PackageNotFoundError(name)

    return packages.Metadata(version, lambda _name: requires)


def test_installed_packages_are_within_the_declared_bounds() -> None:
    finding = packages.packages(metadata({"*": "as installed"}))
    assert finding.status is Status.OK, finding
    assert f"torch {packages.Metadata().version('torch')}" in finding.found


@pytest.mark.parametrize("wrong", ["2.12.1", "2.14.0", "3.0"])
def test_a_version_out_of_bounds_is_named_with_the_command(wrong: str) -> None:
    finding = packages.packages(metadata({"*": "as installed", "torch": wrong}))
    assert finding.status is Status.FAIL
    assert f"torch {wrong} (wanted <2.14,>=2.13)" in finding.found
    assert finding.todo == 'run: pip install "torch<2.14,>=2.13"'


def test_missing_packages_local_versions_and_extras(tmp_path: Path) -> None:
    needs = ["torch>=2.13,<2.14", "grpcio>=1.85,<2", 'pytest>=9; extra == "dev"', 'nothing>=1; python_version < "3"']
    fine = packages.packages(metadata({"torch": "2.13.0+cpu", "grpcio": "1.85.3"}, needs))
    assert fine.status is Status.OK
    lacking = packages.packages(metadata({"torch": "2.13.0+cpu"}, needs))
    assert (lacking.status, lacking.found) == (Status.FAIL, "grpcio missing (wanted <2,>=1.85)")


def test_an_installation_without_metadata_is_a_failure() -> None:
    def none(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    finding = packages.packages(packages.Metadata(requires=none))
    assert finding.status is Status.FAIL
    assert "pip install -e ." in str(finding.todo)


# --- GPU --------------------------------------------------------------------------------------------------------------

DRIVER = {
    "dev/nvidia0": "",
    "dev/nvidiactl": "",
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Thu\nGCC version: 12",
}
OPEN_DRIVER = DRIVER | {
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build"
}
H200 = Gpu("NVIDIA H200", 140 * GIB, 139 * GIB, (9, 0))


def test_no_gpu_is_fine(tmp_path: Path) -> None:
    finding = gpu.torch_and_gpu(machine_at(tmp_path))
    assert (finding.status, finding.found) == (Status.OK, "none: CPU only (torch 2.13.0+cpu)")


@pytest.mark.parametrize(("files", "driver"), [(DRIVER, "570.86.10"), (OPEN_DRIVER, "575.57.08")])
def test_a_gpu_that_torch_was_not_built_for(files: dict[str, str], driver: str, tmp_path: Path) -> None:
    finding = gpu.torch_and_gpu(machine_at(tmp_path, files))
    assert finding.status is Status.WARN
    assert f"1 NVIDIA device file (driver {driver})" in finding.found and "built for the CPU" in finding.found
    assert "pip install" in str(finding.todo)


def test_a_gpu_that_torch_does_not_find(tmp_path: Path) -> None:
    machine = dataclasses.replace(machine_at(tmp_path, DRIVER), torch=TorchFacts("2.13.0", "13.0", ()))
    finding = gpu.torch_and_gpu(machine)
    assert finding.status is Status.WARN
    assert "CUDA 13.0" in str(finding.todo)


def test_a_gpu_that_works_and_one_too_old(tmp_path: Path) -> None:
    machine = machine_at(tmp_path, DRIVER)
    new = gpu.torch_and_gpu(dataclasses.replace(machine, torch=TorchFacts("2.13.0", "13.0", (H200,))))
    assert new.status is Status.OK
    assert new.found == (
        "NVIDIA H200 (139.0 GiB of 140.0 GiB free, compute 9.0); driver 570.86.10, torch 2.13.0 for CUDA 13.0"
    )
    old = dataclasses.replace(H200, name="Tesla T4", capability=(7, 5))
    finding = gpu.torch_and_gpu(dataclasses.replace(machine, torch=TorchFacts("2.13.0", "13.0", (old,))))
    assert finding.status is Status.WARN and "Tesla T4" in str(finding.todo)


def test_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    broken = dataclasses.replace(machine_at(tmp_path), torch=None, torch_error="OSError: libcudart.so.13")
    finding = gpu.torch_and_gpu(broken)
    assert finding.status is Status.FAIL and "libcudart.so.13" in finding.found


# --- shared memory ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """One MiB of /dev/shm: mounted where this user may mount, told to the check where not."""
    machine = machine_at(tmp_path)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(machine.shm)], capture_output=True, check=False
    )
    if mounted.returncode:
        room = os.statvfs_result((4096, 4096, 256, 256, 256, 1000, 1000, 1000, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda _path: room)
    yield machine
    if not mounted.returncode:
        subprocess.run(["umount", str(machine.shm)], check=True)


def test_a_small_shm_is_a_failure_with_the_size_to_give_it(small_shm: Machine) -> None:
    assert shared_memory.shared_memory(small_shm, 512 * 1024).status is Status.OK
    finding = shared_memory.shared_memory(small_shm, 320 * 2**20)
    assert finding.status is Status.FAIL
    assert "/dev/shm is 1.0 MiB with 1.0 MiB free; this topology shares 320.0 MiB" in finding.found
    assert "--shm-size=320m" in str(finding.todo) and "kv_pool_bytes" in str(finding.todo)
    assert not list(small_shm.shm.iterdir())


def test_room_that_is_promised_and_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(_fd: int, _offset: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    machine = machine_at(tmp_path)
    finding = shared_memory.shared_memory(machine, 2**20)
    assert finding.status is Status.FAIL and "1.0 MiB of shared memory" in finding.found
    assert not list(machine.shm.iterdir())


def test_shared_memory_counts_as_memory(tmp_path: Path) -> None:
    files = V2 | {"sys/fs/cgroup/a/b/memory.max": str(2**20)}
    finding = shared_memory.shared_memory(machine_at(tmp_path, files), 2 * 2**20)
    assert finding.status is Status.FAIL
    assert "only 1.0 MiB of memory" in finding.found


def test_no_shm_at_all(tmp_path: Path) -> None:
    machine = machine_at(tmp_path)
    machine.shm.rmdir()
    assert shared_memory.shared_memory(machine, 1).status is Status.FAIL
    assert shared_memory.leftovers(machine).status is Status.OK


DYING = """
import os, sys
from pathlib import Path
from triptych.transport.shm import SharedSegment
print(SharedSegment.create(8192, "kv", directory=Path(sys.argv[1])).name, flush=True)
os.kill(os.getpid(), 9)
"""


def test_leftovers_are_those_that_a_sweep_removes_and_stay(tmp_path: Path) -> None:
    machine = machine_at(tmp_path)
    assert shared_memory.leftovers(machine).status is Status.OK
    command = [sys.executable, "-c", DYING, str(machine.shm)]
    died = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert died.returncode == -signal.SIGKILL
    living = SharedSegment.create(4096, "kv", directory=machine.shm)
    finding = shared_memory.leftovers(machine)
    assert finding.status is Status.WARN
    assert finding.found == f"1 segment of dead workers, 8.0 KiB: {died.stdout.strip()}"
    assert f"rm /dev/shm/{died.stdout.strip()}" in str(finding.todo)
    assert sweep_dead_segments(directory=machine.shm) == [died.stdout.strip()]
    assert [path.name for path in machine.shm.iterdir()] == [living.name]
    living.close()


# --- runtime folder ---------------------------------------------------------------------------------------------------


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="triptych-") as folder:
        yield Path(folder)


def test_a_folder_to_be_made_is_not_made(short: Path) -> None:
    assert runtime.runtime_folder(short / "a" / "b").status is Status.OK
    assert not list(short.iterdir())


def test_a_folder_that_cannot_be_made(short: Path) -> None:
    (short / "file").touch()
    finding = runtime.runtime_folder(short / "file" / "run")
    assert finding.status is Status.FAIL and "--runtime-dir" in str(finding.todo)


@pytest.mark.parametrize("spoil", ["open", "link", "token"])
def test_a_folder_that_others_can_enter(spoil: str, short: Path) -> None:
    folder = short / "run"
    folder.mkdir(mode=0o700)
    (folder / "token").touch(mode=0o600)
    assert runtime.runtime_folder(folder).status is Status.OK
    if spoil == "open":
        folder.chmod(0o755)
    elif spoil == "token":
        (folder / "token").chmod(0o644)
    else:
        (short / "link").symlink_to(folder)
        folder = short / "link"
    finding = runtime.runtime_folder(folder)
    assert finding.status is Status.FAIL
    assert spoil == "link" or "chmod" in finding.found


def test_files_that_up_could_not_write(short: Path) -> None:
    run = short / "run"
    assert runtime.files(run, None, None).status is Status.OK
    assert runtime.files(run, short / "logs", short / "ready").status is Status.OK
    (short / "file").touch()
    assert runtime.files(run, short / "file" / "logs", None).status is Status.FAIL
    assert guarded("files", lambda: runtime.files(run, None, short / "no" / "ready")).status is Status.FAIL
    (run / "logs").mkdir(parents=True)
    assert guarded("files", lambda: runtime.files(run, None, None)).status is Status.FAIL
    assert runtime.files(run, run / "logs", None).status is Status.OK


def test_a_path_too_long_for_sockets() -> None:
    finding = runtime.runtime_folder(Path("/tmp") / ("x" * 80))
    assert finding.status is Status.WARN and "at most 58 bytes" in str(finding.todo)


ANNOUNCING = """
import os, sys
from pathlib import Path
from triptych.core.worker import Role, WorkerInfo, WorkerState
from triptych.registry.runtime import RuntimeFolder
from triptych.registry.static import StaticRegistry
registry = StaticRegistry(RuntimeFolder(Path(sys.argv[1])))
registry.announce(WorkerInfo(sys.argv[2], 1, frozenset({Role.DECODE}), WorkerState.READY, "127.0.0.1:1"))
print("announced", flush=True)
sys.stdin.read(1)
os.kill(os.getpid(), 9)
"""


def test_records_of_the_dead_are_told_from_those_of_the_living(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert runtime.records(folder).status is Status.OK
    command = [sys.executable, "-c", ANNOUNCING, str(folder)]
    with subprocess.Popen([*command, "decode-1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as living:
        assert living.stdout is not None and living.stdout.readline() == "announced\n"
        subprocess.run([*command, "decode-0"], input="x", capture_output=True, text=True, check=False)
        finding = runtime.records(folder)
        assert finding.status is Status.WARN
        assert "decode-0" in finding.found and "decode-1" not in finding.found
        assert (folder / "workers" / "decode-0.json").exists()
        living.kill()


def test_meminfo_is_read_in_the_kernels_units(tmp_path: Path) -> None:
    machine = machine_at(tmp_path, {"proc/meminfo": MEMINFO.format(total=2048, available=1024)})
    assert machine.kib_field("proc/meminfo", "MemTotal") == 2048 * 1024
    assert machine.kib_field("proc/meminfo", "Nothing") is None
