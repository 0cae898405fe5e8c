"""The doctor's checks of what fits: pools, landing arenas, weights, media processes and GPUs."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.unit.fake_machine import GIB, machine_at
from tests.unit.test_cli_doctor_model import MIB, loaded_parts
from tests.unit.test_cli_doctor_workers import workers
from triptych.cli.checks import fit
from triptych.cli.checks.checkpoint import Parts
from triptych.cli.checks.finding import Status
from triptych.cli.checks.machine import Gpu, TorchFacts
from triptych.cli.checks.workers import Wanted, wanted_workers
from triptych.cli.doctor_settings import DoctorSettings
from triptych.core.errors import StartupError
from triptych.core.settings import load_settings
from triptych.kv.allocator import PageAllocator
from triptych.media.frames import Limits, Target
from triptych.media.process import Confinement, MediaProcess, seconds_from_now
from triptych.model.adapters.base import Adapter
from triptych.model.registry import adapter_for
from triptych.stages.language import pool_shape
from triptych.stages.media import media_limits
from triptych.stages.settings import LanguageSettings, VisionSettings

# --- fit --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tiny_model_dir: Path) -> Adapter:
    return adapter_for(tiny_model_dir)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_pool_bytes", [100_000, 12_345_678])
def test_the_pool_holds_what_the_workers_pool_holds(adapter: Adapter, dtype: str, kv_pool_bytes: int) -> None:
    shape = pool_shape(adapter, LanguageSettings(kv_pool_bytes=kv_pool_bytes), getattr(torch, dtype))
    usable = PageAllocator(shape.num_pages).num_usable * shape.page_tokens
    for worker in workers("--dtype", dtype, "--kv-pool-bytes", str(kv_pool_bytes))[1:]:
        assert fit.pool_tokens(adapter, worker) == usable
        assert fit.token_bytes(adapter, dtype) * 16 == shape.page_bytes(getattr(torch, dtype))


def suggested(todo: str | None) -> str:
    """The variable that a finding says to set, as TRIPTYCH_NAME=VALUE."""
    found = re.search(r"\((TRIPTYCH_\w+)=(\w+)\)", str(todo))
    assert found, todo
    return f"{found[1]}={found[2]}"


def with_suggestion(todo: str | None) -> list[Wanted]:
    name, value = suggested(todo).removeprefix("TRIPTYCH_").split("=")
    return workers(**{name: value})


def test_a_pool_too_small_to_start_or_for_a_picture(adapter: Adapter) -> None:
    tiny = fit.kv_pool(adapter, workers("--kv-pool-bytes", "1000"))
    assert tiny.status is Status.FAIL
    with pytest.raises(StartupError):
        pool_shape(adapter, LanguageSettings(kv_pool_bytes=1000), torch.float32)
    starts = fit.kv_pool(adapter, with_suggestion(tiny.todo))
    assert starts.status is Status.WARN and "less than the largest picture" in starts.found
    assert fit.kv_pool(adapter, with_suggestion(starts.todo)).status is Status.OK


def test_a_landing_too_small_for_a_picture(adapter: Adapter) -> None:
    assert fit.landing(adapter, workers()).status is Status.OK
    small = fit.landing(adapter, workers("--landing-bytes", "4096"))
    assert small.status is Status.WARN
    # the landing arena has a smallest size of its own, so the value is looked at, not set
    tokens = adapter.image_layout(10_000, 10_000).num_tokens
    assert suggested(small.todo) == f"TRIPTYCH_LANDING_BYTES={tokens * adapter.hidden_size * 4}"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_a_worker_are_the_loaded_bytes(adapter: Adapter, dtype: str) -> None:
    parts, vision, language = loaded_parts(adapter, getattr(torch, dtype))
    held = {
        "encoder-0": sum(p.nbytes for p in vision.model.parameters()),
        "prefill-0": sum(p.nbytes for p in language.model.parameters()) + language.head.nbytes,
    }
    needs = {worker.name: fit.need_of(worker, parts, 0) for worker in workers("--dtype", dtype)}
    assert needs["encoder-0"].weights == held["encoder-0"]
    assert needs["prefill-0"].weights == needs["decode-0"].weights == held["prefill-0"]
    assert needs["prefill-0"].host == held["prefill-0"] + (256 + 64) * MIB
    assert needs["decode-0"].host == held["prefill-0"] + (256 + 256) * MIB
    (mono,) = [fit.need_of(worker, parts, 0) for worker in workers("--dtype", dtype, "--topology", "mono")]
    assert mono.weights == held["encoder-0"] + held["prefill-0"]


SEVEN_BILLION = Parts(vision=676_000_000, language=7_616_000_000)


def test_a_model_that_does_not_fit_says_which_worker_by_how_much_and_what_to_lower(tmp_path: Path) -> None:
    small = machine_at(tmp_path / "small", memory_gib=16.0)
    finding = fit.memory_fit(small, workers(), SEVEN_BILLION)
    assert finding.status is Status.FAIL
    needed = 4 * SEVEN_BILLION.language + (256 + 256 + 256) * MIB  # of the larger of the language workers
    excess = (needed - 16 * GIB) / GIB
    assert f"decode-0 alone is {excess:.1f} GiB too large" in finding.found
    assert "smaller --model" in str(finding.todo)


@pytest.mark.parametrize(
    ("memory_gib", "start", "remedy", "argv"),
    [
        (63.0, ["--kv-pool-bytes", str(2 * GIB)], "kv_pool_bytes to 1073741824", ["--kv-pool-bytes", str(GIB)]),
        (40.0, [], "dtype to bfloat16", ["--dtype", "bfloat16"]),
        (18.0, ["--dtype", "bfloat16"], "--topology mono, which", ["--dtype", "bfloat16", "--topology", "mono"]),
        (18.0, [], "--topology mono and set dtype", ["--topology", "mono", "--dtype", "bfloat16"]),
    ],
)
def test_the_remedy_that_is_named_works(
    memory_gib: float, start: list[str], remedy: str, argv: list[str], tmp_path: Path
) -> None:
    """The first that helps of: smaller pools, half the precision, one process, both."""
    machine = machine_at(tmp_path, memory_gib=memory_gib)
    finding = fit.memory_fit(machine, workers(*start), SEVEN_BILLION)
    assert finding.status is Status.FAIL
    assert remedy in str(finding.todo)
    assert fit.memory_fit(machine, workers(*argv), SEVEN_BILLION).status is Status.OK


def test_pools_that_do_not_fit_are_given_a_size_that_does(tmp_path: Path) -> None:
    machine = machine_at(tmp_path, memory_gib=8.0)
    parts = Parts(10_000_000, 100_000_000)
    finding = fit.memory_fit(machine, workers(KV_POOL_BYTES=str(4 * GIB)), parts)
    assert finding.status is Status.FAIL and "largest is decode-0" in finding.found
    assert "kv_pool_bytes" in str(finding.todo)
    assert fit.memory_fit(machine, with_suggestion(finding.todo), parts).status is Status.OK


# --- media processes --------------------------------------------------------------------------------------------------


SMALL = Parts(1_000_000, 1_000_000)


def left_gib(tmp_path: Path, gib: float, *argv: str, **variables: str) -> tuple[fit.Finding, list[Wanted]]:
    """What is said of a machine that has so much more than the workers take."""
    wanted = workers(*argv, **variables)
    machine = machine_at(tmp_path)
    idle = fit.process_bytes(machine)
    taken = sum(fit.need_of(worker, SMALL, idle).host for worker in wanted)
    return fit.media_fit(machine_at(tmp_path, memory_gib=taken / GIB + gib), wanted, SMALL), wanted


@pytest.mark.parametrize("asked", [0, 1, 7])
def test_media_processes_are_those_that_a_worker_starts(asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    started = media_limits(VisionSettings(media_processes=asked)).processes
    told = workers("--encoders", "2", "--topology", "e-p-d+mono", MEDIA_PROCESSES=str(asked))
    assert [worker.media_processes for worker in told] == [started, started, 0, 0, started]


def test_a_media_process_that_waits_takes_no_more_than_is_counted() -> None:
    process = MediaProcess(Confinement(1 << 28, 0))
    try:
        picture = io.BytesIO()
        Image.new("RGB", (64, 48)).save(picture, "PNG")
        process.decode(picture.getvalue(), Target(28, 28, 3), Limits(10_000, 5), seconds_from_now(20))
        status = Path(f"/proc/{process.pid}/status").read_text()
    finally:
        process.end()
    resident = int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) << 10
    assert fit.IDLE_MEDIA_BYTES / 4 < resident <= fit.IDLE_MEDIA_BYTES


def test_waiting_media_processes_are_part_of_what_a_worker_takes() -> None:
    few, many = (fit.need_of(workers(MEDIA_PROCESSES=count)[0], SMALL, 0).host for count in ("1", "11"))
    assert many - few == 10 * fit.IDLE_MEDIA_BYTES


@pytest.mark.parametrize(
    ("gib", "argv", "remedy"),
    [
        (8.5, (), ""),
        (7.0, (), "media_processes to 3"),
        (1.5, (), "media_memory_bytes"),
        (5.0, ("--encoders", "2"), "1"),
    ],
)
def test_the_largest_pictures_at_once(gib: float, argv: tuple[str, ...], remedy: str, tmp_path: Path) -> None:
    finding, _ = left_gib(tmp_path, gib, *argv)
    assert finding.status is (Status.WARN if remedy else Status.OK), finding.found
    if remedy:
        assert remedy in str(finding.todo)
        name, value = suggested(finding.todo).removeprefix("TRIPTYCH_").split("=")
        assert left_gib(tmp_path, gib, *argv, **{name: value})[0].status is Status.OK


def test_too_little_even_for_small_pictures_says_so(tmp_path: Path) -> None:
    finding, _ = left_gib(tmp_path, 0.1)
    assert finding.status is Status.WARN and "send small pictures" in str(finding.todo)


def test_text_alone_needs_no_media_processes(tmp_path: Path) -> None:
    wanted = [worker for worker in workers() if not worker.has_vision]
    assert fit.media_fit(machine_at(tmp_path), wanted, SMALL).status is Status.OK


def test_what_may_stay_in_the_landing_arena_is_told(adapter: Adapter) -> None:
    assert "up to 64.0 MiB keep what has landed" in fit.landing(adapter, workers()).found
    assert "up to 8.0 MiB" in fit.landing(adapter, workers("--landed-cache-bytes", str(8 * MIB))).found


def test_a_limit_of_the_group_counts(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": str(GIB)}
    parts = Parts(1_000_000, 1_000_000)
    assert fit.memory_fit(machine_at(tmp_path / "free"), workers(), parts).status is Status.OK
    assert fit.memory_fit(machine_at(tmp_path / "limited", files), workers(), parts).status is Status.FAIL


def on_gpus(tmp_path: Path, free_gib: Sequence[int], config: str = "") -> fit.Finding:
    """The finding for the large model in bfloat16, on GPUs with that much free memory."""
    gpus = tuple(Gpu("card", 80 * GIB, free * GIB, (9, 0)) for free in free_gib)
    machine = dataclasses.replace(machine_at(tmp_path), torch=TorchFacts("2.13.0", "13.0", gpus))
    (tmp_path / "cluster.toml").write_text(config)
    settings = load_settings(DoctorSettings, "up", [], {})
    wanted = wanted_workers(settings, tmp_path / "cluster.toml", frozenset(), cores=8, has_gpu=bool(gpus))
    assert {worker.dtype for worker in wanted} == {"bfloat16"}
    assert fit.memory_fit(machine, wanted, SEVEN_BILLION).status is Status.OK  # the host holds no weights
    return fit.gpu_fit(machine, wanted, SEVEN_BILLION)


def test_a_gpu_holds_weights_and_pools(tmp_path: Path) -> None:
    assert on_gpus(tmp_path, [40]).status is Status.OK
    finding = on_gpus(tmp_path, [24])
    assert finding.status is Status.FAIL
    total = 2 * (SEVEN_BILLION.vision + 2 * SEVEN_BILLION.language) + 2 * 256 * MIB
    assert f"together {(total - 24 * GIB) / GIB:.1f} GiB more than the 24.0 GiB of GPU 0" in finding.found


def test_workers_on_gpus_of_their_own(tmp_path: Path) -> None:
    config = '[decode]\ndevice = "cuda:1"\n'
    assert on_gpus(tmp_path, [24, 16], config).status is Status.OK
    small = on_gpus(tmp_path, [24, 10], config)
    assert small.status is Status.FAIL and "of GPU 1 available; decode-0 alone" in small.found
    lacking = on_gpus(tmp_path, [24], config)
    assert lacking.status is Status.FAIL and "decode-0: device cuda:1, but torch can use 1 GPU" in lacking.found


def test_a_device_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cpu, cuda, cuda:N or auto, not 'tpu'"):
        workers("--device", "tpu")
    nowhere = fit.gpu_fit(machine_at(tmp_path), workers("--device", "cuda"), SEVEN_BILLION)
    assert nowhere.status is Status.FAIL and "torch can use 0 GPUs" in nowhere.found
