"""The doctor's checks of a checkpoint, against what the loaders really load, and of what fits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.demo_dir import demo_model_dir
from tests.unit.spoiling import change_json, change_tensors
from tests.unit.stock_parts import load_stock_language
from triptych.cli.checks import checkpoint
from triptych.cli.checks.checkpoint import Parts
from triptych.cli.checks.finding import Status
from triptych.core.errors import StartupError
from triptych.model.adapters.base import Adapter
from triptych.model.registry import adapter_for

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
