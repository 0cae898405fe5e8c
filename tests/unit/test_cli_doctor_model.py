"""The doctor's checks of a checkpoint, against what the loaders really load, and of what fits."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from services.decode.settings import DecodeSettings
from services.encoder.settings import EncoderSettings
from services.prefill.settings import PrefillSettings
from tests.unit.demo_dir import demo_model_dir
from tests.unit.fake_machine import GIB, machine_at
from tests.unit.spoiling import change_json, change_tensors
from tests.unit.stock_parts import load_stock_language
from triptych.cli import layout
from triptych.cli.checks import checkpoint, fit
from triptych.cli.checks.checkpoint import Parts
from triptych.cli.checks.finding import Status
from triptych.cli.checks.handover import handover
from triptych.cli.checks.machine import Gpu, TorchFacts
from triptych.cli.checks.workers import Sizes, Wanted, given_names, wanted_workers
from triptych.cli.doctor_settings import DoctorSettings
from triptych.core.errors import StartupError
from triptych.core.settings import load_settings
from triptych.core.worker import Role
from triptych.kv.allocator import PageAllocator
from triptych.media.frames import Limits, Target
from triptych.media.process import Confinement, MediaProcess, seconds_from_now
from triptych.model.adapters.base import Adapter
from triptych.model.registry import adapter_for
from triptych.stages.language import pool_shape
from triptych.stages.media import media_limits
from triptych.stages.settings import LanguageSettings, VisionSettings

MIB = 2**20
CPU = torch.device("cpu")


def shard(model_dir: Path) -> dict[str, str]:
    """Two shards and their list, which is returned."""
    tensors = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-{index % 2 + 1:05}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        save_file({name: tensors[name].clone() for name in names if weight_map[name] == file}, model_dir / file)
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


# --- config -----------------------------------------------------------------------------------------------------------


def test_a_good_config(tiny_model_dir: Path) -> None:
    finding, adapter = checkpoint.config(tiny_model_dir)
    assert finding.status is Status.OK and adapter is not None
    assert "Qwen2_5_VLForConditionalGeneration" in finding.found


@pytest.mark.parametrize("spoil", ["architecture", "config", "weights", "processor", "nothing there"])
def test_what_cannot_be_served_is_named(spoil: str, model_dir: Path) -> None:
    config = model_dir / "config.json"
    if spoil == "architecture":
        change_json(config, lambda value: value.update(architectures=["BloomForCausalLM"]))
    elif spoil == "config":
        config.write_text("{")
    elif spoil == "weights":
        (model_dir / "model.safetensors").unlink()
    elif spoil == "processor":
        (model_dir / "preprocessor_config.json").unlink()
    else:
        shutil.rmtree(model_dir)
    finding, adapter = checkpoint.config(model_dir)
    assert finding.status is Status.FAIL and adapter is None
    named = {"architecture": "BloomForCausalLM", "weights": ".safetensors", "processor": "preprocessor_config.json"}
    assert named.get(spoil, "config.json") in finding.found
    assert "Qwen2_5_VLForConditionalGeneration" in str(finding.todo)


# --- weights ----------------------------------------------------------------------------------------------------------


def loaded_parts(adapter: Adapter, dtype: torch.dtype = torch.float32) -> tuple[Parts, Any, Any]:
    vision, language = adapter.load_vision(dtype, CPU), load_stock_language(adapter.model_dir, dtype)
    return Parts(vision.num_parameters, language.num_parameters), vision, language


@pytest.mark.parametrize("kind", ["tiny, head of its own", "demo, tied head"])
def test_the_parts_are_what_the_loaders_load(kind: str, tiny_model_dir: Path) -> None:
    adapter = adapter_for(tiny_model_dir if kind.startswith("tiny") else demo_model_dir())
    finding, parts = checkpoint.weights(adapter)
    assert finding.status is Status.OK
    assert parts == loaded_parts(adapter)[0]


def weights_of(model_dir: Path) -> checkpoint.Finding:
    return checkpoint.weights(adapter_for(model_dir))[0]


def test_shards_and_older_names_are_complete_too(tiny_model_dir: Path, model_dir: Path) -> None:
    _, whole = checkpoint.weights(adapter_for(tiny_model_dir))
    renames = (("model.", "model.language_model."), ("visual.", "model.visual."))

    def newer(name: str) -> str:
        return next((new + name.removeprefix(old) for old, new in renames if name.startswith(old)), name)

    change_tensors(model_dir, lambda tensors: {newer(name): tensor for name, tensor in tensors.items()})
    shard(model_dir)
    finding, parts = checkpoint.weights(adapter_for(model_dir))
    assert (finding.status, parts) == (Status.OK, whole)
    assert "in 2 files" in finding.found


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "visual.blocks.0.norm1.weight", "lm_head.weight"],
)
def test_a_missing_tensor_is_named(name: str, model_dir: Path) -> None:
    change_tensors(model_dir, lambda tensors: {n: t for n, t in tensors.items() if n != name})
    finding = weights_of(model_dir)
    assert finding.status is Status.FAIL
    assert name.removeprefix("model.") in finding.found
    assert finding.todo == checkpoint.AGAIN
    with pytest.raises(StartupError):  # and a worker would not have started
        loaded_parts(adapter_for(model_dir))


def test_a_tensor_of_another_shape_is_named_with_both(model_dir: Path) -> None:
    change_tensors(model_dir, lambda tensors: {**tensors, "model.norm.weight": torch.zeros(3)})
    finding = weights_of(model_dir)
    assert finding.status is Status.FAIL
    assert "norm.weight has the shape (3,), by config.json it is (64,)" in finding.found


def test_a_tensor_of_no_architecture_is_named(model_dir: Path) -> None:
    change_tensors(model_dir, lambda tensors: {**tensors, "visual.extra": torch.zeros(3)})
    finding = weights_of(model_dir)
    assert finding.status is Status.FAIL and "visual.extra" in finding.found
    with pytest.raises(StartupError, match=r"visual\.extra"):  # no worker starts with it
        loaded_parts(adapter_for(model_dir))


def test_a_tensor_that_is_stored_as_whole_numbers_is_named(model_dir: Path) -> None:
    name = "model.norm.weight"
    change_tensors(model_dir, lambda tensors: {**tensors, name: tensors[name].to(torch.int32)})
    finding = weights_of(model_dir)
    assert finding.status is Status.FAIL and name in finding.found
    with pytest.raises(StartupError, match=name):
        loaded_parts(adapter_for(model_dir))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("text_config", "hidden_act"), "wat"),
        (("text_config", "attention_dropout"), "wat"),
        (("text_config", "num_hidden_layers"), 10**9),
        (("vision_config", "depth"), 10**9),
        (("tie_word_embeddings",), True),
        (("model_type",), "wat"),
        (("auto_map",), {"AutoConfig": "evil.Config"}),
    ],
)
def test_it_says_of_a_config_what_a_worker_says(model_dir: Path, place: tuple[str, ...], value: object) -> None:
    def change(config: dict[str, Any]) -> None:
        *outer, field = place
        table = config
        for name in outer:
            table = table[name]
        table[field] = value
        if field == "num_hidden_layers":
            table["layer_types"] = None

    change_json(model_dir / "config.json", change)
    finding = weights_of(model_dir)
    try:
        loaded_parts(adapter_for(model_dir))
        expected = Status.OK
    except StartupError:
        expected = Status.FAIL
    assert finding.status is expected, finding.found
    assert str(model_dir) not in finding.found


@pytest.mark.parametrize("keep", [0, 5, 1000, -1])
def test_a_file_cut_short_is_named(keep: int, model_dir: Path) -> None:
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    finding = weights_of(model_dir)
    assert finding.status is Status.FAIL and "model.safetensors" in finding.found


def test_a_missing_shard_is_named(model_dir: Path) -> None:
    shard(model_dir)
    (model_dir / "model-00002-of-00002.safetensors").unlink()
    finding = weights_of(model_dir)
    assert finding.status is Status.FAIL and "model-00002-of-00002.safetensors" in finding.found


def test_a_list_of_shards_that_promises_too_much_is_named(model_dir: Path) -> None:
    weight_map = shard(model_dir)
    index = {"weight_map": {**weight_map, "visual.ghost": "model-00001-of-00002.safetensors"}}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    finding = weights_of(model_dir)
    assert finding.status is Status.FAIL
    assert "visual.ghost" in finding.found and "model-00001-of-00002.safetensors" in finding.found


# --- tokenizer --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", ["missing", "damaged", "no template", "broken template", "no pictures", ""])
def test_tokenizer_and_template(spoil: str, model_dir: Path) -> None:
    template = model_dir / "chat_template.jinja"
    if spoil == "missing":
        (model_dir / "tokenizer.json").unlink()
    elif spoil == "damaged":
        (model_dir / "tokenizer.json").write_text('{"version": "1.0"')
    elif spoil == "no template":
        template.unlink()
        change_json(model_dir / "tokenizer_config.json", lambda value: value.pop("chat_template", None))
    elif spoil == "broken template":
        template.write_text("{% for %}")
    elif spoil == "no pictures":
        template.write_text("{{ messages | length }}")
    finding = checkpoint.tokenizer(adapter_for(model_dir))
    assert finding.status is (Status.FAIL if spoil else Status.OK)
    named = {"missing": "tokenizer.json", "no pictures": "pictures", "": "638 tokens"}
    assert named.get(spoil, "template" if "template" in spoil else "") in finding.found


# --- workers ----------------------------------------------------------------------------------------------------------


def workers(*argv: str, config: str = "", tmp_path: Path | None = None, **variables: str) -> list[Wanted]:
    environ = {f"TRIPTYCH_{name}": value for name, value in variables.items()}
    path = None
    if config:
        assert tmp_path is not None
        path = tmp_path / "cluster.toml"
        path.write_text(config)
        argv = (*argv, "--config", str(path))
    settings = load_settings(DoctorSettings, "up", argv, environ)
    return wanted_workers(settings, path, given_names(argv, environ), cores=8, has_gpu=False)


def test_defaults_are_the_services() -> None:
    for service in (EncoderSettings, PrefillSettings, DecodeSettings):
        declared = {entry.name: entry for entry in dataclasses.fields(service)}
        for ours in dataclasses.fields(Sizes):
            if ours.name in declared:
                assert ours.default == declared[ours.name].default, ours.name
                bounds = {key: value for key, value in declared[ours.name].metadata.items() if key != "help"}
                mine = DoctorSettings.__dataclass_fields__[ours.name].metadata
                assert {key: value for key, value in mine.items() if key != "help"} == bounds, ours.name


def test_each_topology_shares_what_others_write_to() -> None:
    assert {worker.name: worker.shared_bytes // MIB for worker in workers("--decodes", "2")} == {
        "encoder-0": 0,
        "prefill-0": 64,
        "decode-0": 256,
        "decode-1": 256,
    }
    assert [worker.shared_bytes for worker in workers("--topology", "mono")] == [0]


@pytest.mark.parametrize(("also", "shared_mib"), [("decode", 64), ("encoder", 0), ("", 64)])
def test_stages_that_share_a_process_share_less_memory(
    also: str, shared_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = layout.ProcessSpec("x-0", "prefill", ("--threads", "2", "--also", also))
    monkeypatch.setattr(layout, "workers", lambda *_: [spec])
    (worker,) = workers()
    assert worker.shared_bytes == shared_mib * MIB
    assert worker.roles == {Role.PREFILL, *([Role(also)] if also else [])}
    assert worker.threads == 2


def test_flag_over_variable_over_the_services_table_over_the_top(tmp_path: Path) -> None:
    config = "kv_pool_bytes = 1\n[up]\ndecodes = 2\n[decode]\nkv_pool_bytes = 2\n[encoder]\nmax_batch_items = 3\n"
    sizes = {worker.name: worker.sizes.kv_pool_bytes for worker in workers(config=config, tmp_path=tmp_path)}
    assert sizes == {"encoder-0": 1, "prefill-0": 1, "decode-0": 2, "decode-1": 2}
    told = workers(config=config, tmp_path=tmp_path, KV_POOL_BYTES="3")
    assert {worker.sizes.kv_pool_bytes for worker in told} == {3}
    told = workers("--kv-pool-bytes=4", config=config, tmp_path=tmp_path, KV_POOL_BYTES="3")
    assert {worker.sizes.kv_pool_bytes for worker in told} == {4}


def test_a_malformed_size_in_a_services_table_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"kv_pool_bytes must be a whole number, but \[decode\] of the file"):
        workers(config='[decode]\nkv_pool_bytes = "much"\n', tmp_path=tmp_path)


# --- handover ---------------------------------------------------------------------------------------------------------

HANDOVERS: list[tuple[str, str, Status, str]] = [
    ("", "e-p-d", Status.OK, "the next can take"),
    ("[prefill]\npage_tokens = 32\n", "e-p-d", Status.OK, "the next can take"),
    ('[prefill]\ndtype = "bfloat16"\n', "p-d", Status.OK, "the next can take"),
    ('[prefill]\ndtype = "bfloat16"\n', "e-p-d", Status.FAIL, "no encoder can send to prefill-0"),
    ('[decode]\ndtype = "bfloat16"\n', "p-d", Status.FAIL, "to decode-0: KV in float32 would be rounded"),
    ('[decode]\ndtype = "float16"\n', "p-d", Status.FAIL, "to decode-0: KV in float32 may not fit"),
    (
        'allow_kv_narrowing = true\n[decode]\ndtype = "bfloat16"\n',
        "p-d",
        Status.WARN,
        "KV is rounded on its way to decode-0",
    ),
    (
        'allow_kv_narrowing = true\n[decode]\ndtype = "bfloat16"\nstrict = true\n',
        "p-d",
        Status.FAIL,
        "would be rounded",
    ),
    ('[decode]\ndtype = "bfloat16"\n', "mono", Status.OK, "the next can take"),
    ('[decode]\ndtype = "bfloat16"\n', "e-pd", Status.OK, "the next can take"),
]


@pytest.mark.parametrize(("config", "topology", "status", "found"), HANDOVERS)
def test_stages_that_could_not_hand_over_are_found(
    config: str, topology: str, status: Status, found: str, tmp_path: Path
) -> None:
    finding = handover(workers("--topology", topology, config=config or "\n", tmp_path=tmp_path))
    assert finding.status is status and found in finding.found, finding


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
