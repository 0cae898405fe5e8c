"""The reader of weights against the library that defines the format; what it must refuse; shards and their list."""

from __future__ import annotations

import contextlib
import json
import logging
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from triptych.core.errors import StartupError
from triptych.model import loader, weights_file
from triptych.model.loader import LoadProgress
from triptych.model.registry import adapter_for
from triptych.model.weights_file import FLOAT_DTYPES, WeightsFile

CPU = torch.device("cpu")
SHAPES = [(), (1,), (0,), (3, 0, 2), (7,), (5, 11), (2, 3, 4, 5), (300, 17)]
Tensors = dict[str, torch.Tensor]


def random_tensors(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"{name}.{index}": torch.randn(shape, generator=generator).to(dtype)
        for name, dtype in FLOAT_DTYPES.items()
        for index, shape in enumerate(SHAPES)
    }


@pytest.mark.parametrize("piece_bytes", [8, 64, 1000, 4 << 20])
def test_tensors_are_those_of_the_library(
    seed: int, tmp_path: Path, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_file, "PIECE_BYTES", piece_bytes // 8 * 8)
    path = tmp_path / "model.safetensors"
    save_file(random_tensors(seed), path, {"format": "pt"})
    expected = load_file(path)
    with WeightsFile(path) as file:
        assert file.tensors.keys() == expected.keys()
        for dtype in FLOAT_DTYPES.values():
            for name in random.Random(seed).sample(sorted(expected), len(expected)):
                counted: list[int] = []
                ours = file.read(name, dtype, CPU, counted.append)
                assert ours.dtype == dtype
                assert ours.shape == expected[name].shape
                assert torch.equal(ours, expected[name].to(dtype)), name
                assert sum(counted) == file.tensors[name].num_bytes


@pytest.mark.parametrize("stored", FLOAT_DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_number_that_is_not_finite_is_named(
    tmp_path: Path, stored: str, value: float, dtype: torch.dtype, seed: int
) -> None:
    path = tmp_path / "model.safetensors"
    tensor = torch.ones(5000, dtype=FLOAT_DTYPES[stored])
    tensor[random.Random(seed).randrange(5000)] = value
    save_file({"good": torch.ones(5000), "bad": tensor}, path)
    with WeightsFile(path) as file:
        file.read("good", dtype, CPU, lambda _: None)
        with pytest.raises(StartupError, match=r"'bad' in model\.safetensors has a number that is not finite"):
            file.read("bad", dtype, CPU, lambda _: None)


def test_a_number_that_does_not_fit_the_format_is_named(tmp_path: Path) -> None:
    save_file({"wide": torch.tensor([1.0, 70_000.0])}, tmp_path / "model.safetensors")
    with WeightsFile(tmp_path / "model.safetensors") as file:
        file.read("wide", torch.bfloat16, CPU, lambda _: None)
        with pytest.raises(StartupError, match=r"float16.*--dtype"):
            file.read("wide", torch.float16, CPU, lambda _: None)


def test_a_tensor_that_was_read_does_not_change_with_its_file(tmp_path: Path) -> None:
    """A mapped file does not keep its promise when a new checkpoint is copied over it."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1000)}, path)
    with WeightsFile(path) as file:
        held = file.read("a", torch.float32, CPU, lambda _: None)
    with path.open("r+b") as file:
        file.seek(-4000, 2)
        file.write(bytes(4000))
    assert torch.equal(held, torch.ones(1000))


@pytest.mark.parametrize(
    ("dtype", "shown"),
    [(torch.int8, "I8"), (torch.int64, "I64"), (torch.bool, "BOOL"), (torch.float8_e4m3fn, "F8_E4M3")],
)
@pytest.mark.parametrize("name", ["model.norm.weight", "visual.merger.ln_q.weight", "lm_head.weight"])
def test_a_tensor_that_is_no_float_is_named(model_dir: Path, name: str, dtype: torch.dtype, shown: str) -> None:
    change_tensors(model_dir, lambda tensors: tensors | {name: tensors[name].to(dtype)})
    message = refusal(model_dir)
    assert name in message
    assert shown in message


# --- damaged files ----------------------------------------------------------------------------------------------------


def with_header(path: Path, header: object, num_data: int = 16) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(num_data))


def entry(begin: Any = 0, end: Any = 16, shape: Any = (4,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header",
    [
        pytest.param({"a": entry(end=20, shape=[5])}, id="beyond the end of the file"),
        pytest.param({"a": entry(), "b": entry()}, id="one over the other"),
        pytest.param({"a": entry(end=8), "b": entry(4, 16)}, id="overlap"),
        pytest.param({"a": entry(begin=-4, end=12)}, id="before the data"),
        pytest.param({"a": entry(begin=8, end=0)}, id="ends before it begins"),
        pytest.param({"a": entry(end=12)}, id="too few bytes for its shape"),
        pytest.param({"a": entry(shape=[-4])}, id="negative side"),
        pytest.param({"a": entry(shape=[2**40, 2**40])}, id="enormous shape"),
        pytest.param({"a": entry(shape=["4"])}, id="a side that is a text"),
        pytest.param({"a": entry(begin=True)}, id="an offset that is a truth value"),
        pytest.param({"a": entry(end=16.0)}, id="an offset with a fraction"),
        pytest.param({"a": {"dtype": "F32", "shape": [4]}}, id="no offsets"),
        pytest.param({"a": [1, 2]}, id="no object"),
        pytest.param([1, 2], id="a list"),
        pytest.param(b"{", id="cut JSON"),
        pytest.param(b"[" * 100_000, id="deeply nested"),
        pytest.param(b"\xff\xfe", id="no text"),
    ],
)
def test_a_header_that_cannot_be_is_refused(tmp_path: Path, header: object) -> None:
    path = tmp_path / "model.safetensors"
    with_header(path, header)
    with pytest.raises(StartupError, match=r"model\.safetensors"):
        WeightsFile(path)


@pytest.mark.parametrize("content", [b"", b"\0\0\0", struct.pack("<Q", 2**63), struct.pack("<Q", 10) + b"{}"])
def test_a_file_without_a_whole_header_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(StartupError, match=r"model\.safetensors"):
        WeightsFile(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_whatever_is_done_to_a_file_it_is_refused_or_has_its_tensors(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "fuzzed.safetensors"
    save_file({"a": torch.ones(8), "b": torch.ones(3, 3)}, path)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    with contextlib.suppress(StartupError), WeightsFile(path) as file:
        for name, stored in file.tensors.items():
            assert file.read(name, torch.float32, CPU, lambda _: None).numel() == stored.num_elements


# --- shards -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def model_dir(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "spoiled"))


@pytest.fixture
def sharded_dir(model_dir: Path) -> Path:
    """In two shards: the tower and the rest."""
    tensors = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    shards = {name: VISION_SHARD if name.startswith("visual.") else LANGUAGE_SHARD for name in tensors}
    for shard in (VISION_SHARD, LANGUAGE_SHARD):
        save_file({name: tensor for name, tensor in tensors.items() if shards[name] == shard}, model_dir / shard)
    (model_dir / loader.INDEX_FILE).write_text(json.dumps({"weight_map": shards}))
    return model_dir


VISION_SHARD, LANGUAGE_SHARD = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NORM = "model.norm.weight"


def change_tensors(model_dir: Path, change: Callable[[Tensors], Tensors], file: str = "model.safetensors") -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(model_dir / file).items()}
    save_file(change(tensors), model_dir / file, {"format": "pt"})


def change_map(model_dir: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((model_dir / loader.INDEX_FILE).read_text())
    change(index["weight_map"])
    (model_dir / loader.INDEX_FILE).write_text(json.dumps(index))


def load_both(model_dir: Path) -> None:
    adapter = adapter_for(model_dir)
    adapter.load_vision(torch.float32, CPU)
    adapter.load_language(torch.float32, CPU)


def refusal(model_dir: Path) -> str:
    with pytest.raises(StartupError) as caught:
        load_both(model_dir)
    assert str(model_dir.parent) not in caught.value.message
    return caught.value.message


def test_a_tensor_that_the_list_has_and_its_shard_has_not_is_named(sharded_dir: Path) -> None:
    change_tensors(sharded_dir, lambda tensors: {n: t for n, t in tensors.items() if n != NORM}, LANGUAGE_SHARD)
    message = refusal(sharded_dir)
    assert NORM in message
    assert LANGUAGE_SHARD in message


def test_a_tensor_that_a_shard_has_and_the_list_has_not_is_named(sharded_dir: Path) -> None:
    change_tensors(sharded_dir, lambda tensors: {**tensors, "model.extra": torch.zeros(1)}, LANGUAGE_SHARD)
    assert "model.extra" in refusal(sharded_dir)


def test_a_tensor_that_the_list_has_in_another_shard_is_named(sharded_dir: Path) -> None:
    change_map(sharded_dir, lambda shards: shards.update({NORM: VISION_SHARD}))
    assert NORM in refusal(sharded_dir)


@pytest.mark.parametrize("shard", ["../other.safetensors", "/etc/passwd", "sub/model.safetensors", ""])
def test_a_list_that_leads_out_of_the_folder_is_refused(sharded_dir: Path, shard: str) -> None:
    change_map(sharded_dir, lambda shards: shards.update({NORM: shard}))
    assert NORM in refusal(sharded_dir)


@pytest.mark.parametrize(("part", "shard"), [("vision", LANGUAGE_SHARD), ("language", VISION_SHARD)])
def test_a_stage_reads_no_shard_of_another(
    sharded_dir: Path, part: str, shard: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(weights_file, "_open", lambda path: opened.append(path.name) or path.open("rb"))
    adapter = adapter_for(sharded_dir)
    (adapter.load_vision if part == "vision" else adapter.load_language)(torch.float32, CPU)
    assert opened
    assert shard not in opened


def test_a_tensor_in_two_files_without_a_list_is_named(model_dir: Path) -> None:
    save_file({NORM: torch.ones(64)}, model_dir / "another.safetensors")
    message = refusal(model_dir)
    assert NORM in message
    assert "another.safetensors" in message


@pytest.mark.parametrize("name", ["adapter.weight", "model.visual.extra", "model.language_model.norm.weight"])
def test_a_tensor_of_no_part_is_named(model_dir: Path, name: str) -> None:
    change_tensors(model_dir, lambda tensors: {**tensors, name: torch.zeros(64)})
    message = refusal(model_dir)
    assert "unexpected" in message
    assert name in message


# --- progress ---------------------------------------------------------------------------------------------------------


def percents(records: list[logging.LogRecord]) -> list[int]:
    return [record.__dict__["percent"] for record in records if record.message == "loading weights"]


def test_progress_of_a_large_part_is_a_line_each_tenth(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    progress = LoadProgress("language", 100 << 30)
    for _ in range(25_600):
        progress.advance(4 << 20)
    assert percents(caplog.records) == [10, 20, 30, 40, 50, 60, 70, 80, 90, 100]
    assert caplog.records[-1].__dict__["bytes"] == caplog.records[-1].__dict__["of_bytes"] == 100 << 30


def test_progress_of_a_small_part_is_one_line(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    adapter_for(model_dir).load_vision(torch.float32, CPU)
    assert percents(caplog.records) == [100]
