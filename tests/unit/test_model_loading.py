"""Checkpoints: each half loads its own weights and no others, in either layout; weights that cannot be stop the start.

What config.json and preprocessor_config.json must say is in `test_model_config.py`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.parity.checkpoints import FAMILIES
from tests.unit.spoiling import Tensors, change_json, change_tensors
from tests.unit.stock_parts import load_stock_language
from triptych.core.errors import StartupError
from triptych.core.plan import Grid
from triptych.model.adapters.base import Adapter
from triptych.model.loader import count_parameters
from triptych.model.registry import adapter_for, supported_architectures

CPU = torch.device("cpu")


def load_both(model_dir: Path) -> tuple[Any, Any]:
    adapter = adapter_for(model_dir)
    return adapter.load_vision(torch.float32, CPU), adapter.load_language(torch.float32, CPU)


# --- the halves -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=FAMILIES)
def family_dir(request: pytest.FixtureRequest, tiny_model_dirs: dict[str, Path]) -> Path:
    return tiny_model_dirs[request.param]


def stock_of(model_dir: Path) -> Any:
    architecture = json.loads((model_dir / "config.json").read_text())["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(model_dir, dtype=torch.float32).eval()


def test_each_half_has_exactly_the_parameters_of_the_stock_submodule(family_dir: Path) -> None:
    stock = stock_of(family_dir)
    vision, language = load_both(family_dir)
    assert vision.num_parameters == count_parameters(stock.model.visual)
    head = stock.lm_head.weight.numel()
    assert language.num_parameters == count_parameters(stock.model.language_model) + head
    assert vision.num_parameters + language.num_parameters == count_parameters(stock)


def test_each_half_holds_its_own_tensors_with_the_stock_values_and_no_others(family_dir: Path) -> None:
    """Buffers too: what is computed from the config, and never stored, must be as the stock model computes it."""
    stock = stock_of(family_dir)
    vision: Any = adapter_for(family_dir).load_vision(torch.float32, CPU)
    language = load_stock_language(family_dir)
    expected = {f"visual.{name}": tensor for name, tensor in named_tensors(stock.model.visual).items()}
    for ours, theirs in ((vision.model, expected), (language.model, named_tensors(stock.model.language_model))):
        held = named_tensors(ours)
        assert held.keys() == theirs.keys()
        assert any("inv_freq" in name for name in held)
        for name, tensor in held.items():
            assert torch.equal(tensor, theirs[name]), name
    assert torch.equal(language.head, stock.lm_head.weight)


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


def test_parameters_are_in_the_asked_precision(family_dir: Path) -> None:
    adapter = adapter_for(family_dir)
    vision: Any = adapter.load_vision(torch.bfloat16, CPU)
    language = load_stock_language(family_dir, torch.bfloat16)
    assert vision.dtype == language.dtype == language.head.dtype == torch.bfloat16
    for module in (vision.model, language.model):
        assert {parameter.dtype for parameter in module.parameters()} == {torch.bfloat16}
    stock = stock_of(family_dir).model.visual.patch_embed.proj.weight
    assert torch.equal(vision.model.visual.patch_embed.proj.weight, stock.to(torch.bfloat16))


def test_rows_are_as_wide_as_all_levels_together(tiny_model_dirs: dict[str, Path]) -> None:
    widths = {}
    for family, model_dir in tiny_model_dirs.items():
        adapter = adapter_for(model_dir)
        assert adapter.load_vision(torch.float32, CPU).row_elements == adapter.row_elements
        widths[family] = adapter.row_elements // adapter.hidden_size
    assert widths == {"qwen2-vl": 1, "qwen2.5-vl": 1, "qwen3-vl": 3}


# --- layouts ----------------------------------------------------------------------------------------------------------


def outputs(model_dir: Path) -> tuple[torch.Tensor, torch.Tensor]:
    vision, language = load_both(model_dir)
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(16, 3 * 2 * adapter_for(model_dir).patch_px ** 2, generator=generator)  # type: ignore[attr-defined]
    return vision.encode([pixels], [Grid(1, 4, 4)])[0], language.logits(torch.randn(3, 64, generator=generator))


OLD_NAME, NEW_NAME = "visual.patch_embed.proj.weight", "model.visual.patch_embed.proj.weight"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_old_and_the_new_layout_of_names_load_alike(
    tiny_model_dirs: dict[str, Path], tmp_path: Path, family: str
) -> None:
    kept = tiny_model_dirs[family]
    other = Path(shutil.copytree(kept, tmp_path / "other"))
    is_new = NEW_NAME in load_file(kept / "model.safetensors")
    change_tensors(other, as_old_layout if is_new else as_new_layout)
    assert (OLD_NAME if is_new else NEW_NAME) in load_file(other / "model.safetensors")
    for one, two in zip(outputs(kept), outputs(other), strict=True):
        assert torch.equal(one, two)


def as_new_layout(tensors: Tensors) -> Tensors:
    return renamed(tensors, {"visual.": "model.visual.", "model.": "model.language_model."})


def as_old_layout(tensors: Tensors) -> Tensors:
    return renamed(tensors, {"model.visual.": "visual.", "model.language_model.": "model."})


def renamed(tensors: Tensors, prefixes: dict[str, str]) -> Tensors:
    """By the first prefix that fits."""
    result = {}
    for name, tensor in tensors.items():
        old = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        result[prefixes.get(old, "") + name.removeprefix(old)] = tensor
    return result


def test_a_checkpoint_in_several_shards_loads_alike(tiny_model_dir: Path, model_dir: Path) -> None:
    shard(model_dir)
    assert not (model_dir / "model.safetensors").exists()
    for whole, sharded in zip(outputs(tiny_model_dir), outputs(model_dir), strict=True):
        assert torch.equal(whole, sharded)


def shard(model_dir: Path) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: f"model-{index % 2 + 1:05}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        save_file({name: tensors[name].clone() for name in names if weight_map[name] == file}, model_dir / file)
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_an_untied_head_is_its_own_tensor(tiny_model_dir: Path) -> None:
    language = load_stock_language(tiny_model_dir)
    assert not torch.equal(language.head, language.model.embed_tokens.weight)


def tie(model_dir: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True

    change_json(model_dir / "config.json", change)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tied_head_is_the_embedding_table_and_counts_once(
    tiny_model_dirs: dict[str, Path], tmp_path: Path, family: str
) -> None:
    tied = Path(shutil.copytree(tiny_model_dirs[family], tmp_path / "tied"))
    tie(tied)
    change_tensors(tied, lambda tensors: {n: t for n, t in tensors.items() if n != "lm_head.weight"})
    language = load_stock_language(tied)
    assert language.head.data_ptr() == language.model.embed_tokens.weight.data_ptr()
    ours = adapter_for(tied).load_language(torch.float32, CPU)
    assert ours.num_parameters == language.num_parameters == count_parameters(stock_of(tied).model.language_model)


def test_a_tied_head_may_be_stored_again_but_not_as_another(model_dir: Path) -> None:
    tie(model_dir)
    assert "lm_head.weight" in refusal(model_dir)
    change_tensors(
        model_dir, lambda tensors: tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    )
    language = load_stock_language(model_dir)
    assert language.head.data_ptr() == language.model.embed_tokens.weight.data_ptr()


# --- what stops the start ---------------------------------------------------------------------------------------------


def refusal(model_dir: Path) -> str:
    with pytest.raises(StartupError) as caught:
        load_both(model_dir)
    assert str(model_dir.parent) not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "visual.blocks.0.norm1.weight", "lm_head.weight"],
)
def test_a_missing_tensor_is_named(model_dir: Path, name: str) -> None:
    change_tensors(model_dir, lambda tensors: {n: t for n, t in tensors.items() if n != name})
    assert name.removeprefix("model.").removeprefix("visual.") in refusal(model_dir)


@pytest.mark.parametrize("name", ["model.layers.9.mlp.up_proj.weight", "visual.blocks.0.extra"])
def test_an_unexpected_tensor_is_named(model_dir: Path, name: str) -> None:
    change_tensors(model_dir, lambda tensors: {**tensors, name: torch.zeros(1)})
    assert name in refusal(model_dir)


@pytest.mark.parametrize("name", ["model.norm.weight", "visual.merger.mlp.0.weight", "lm_head.weight"])
def test_a_tensor_of_another_shape_is_named_with_both_shapes(model_dir: Path, name: str) -> None:
    shape = load_file(model_dir / "model.safetensors")[name].shape
    change_tensors(model_dir, lambda tensors: {**tensors, name: torch.zeros(3, 2)})
    message = refusal(model_dir)
    assert name in message
    assert "(3, 2)" in message
    assert str(tuple(shape)) in message


def test_a_vocabulary_that_is_not_the_embedding_tables_is_named(model_dir: Path) -> None:
    rows = load_file(model_dir / "model.safetensors")["model.embed_tokens.weight"].shape[0]
    change_json(model_dir / "config.json", lambda config: config["text_config"].update(vocab_size=rows + 10))
    message = refusal(model_dir)
    assert "lm_head.weight" in message, "the head has as many rows, and is read first"
    assert f"({rows + 10}, 64)" in message


@pytest.mark.parametrize("part", ["model.", "visual."])
def test_a_checkpoint_of_one_half_only_is_refused(model_dir: Path, part: str) -> None:
    change_tensors(model_dir, lambda tensors: {n: t for n, t in tensors.items() if not n.startswith(part)})
    assert "lacks the tensor" in refusal(model_dir)


def test_bounds_in_pixels_may_stand_beside_the_size(model_dir: Path) -> None:
    def older(config: dict[str, Any]) -> None:
        del config["size"]
        config |= {"min_pixels": 3136, "max_pixels": 50176}

    change_json(model_dir / "preprocessor_config.json", older)
    adapter: Any = adapter_for(model_dir)
    assert (adapter.min_pixels, adapter.max_pixels) == (3136, 50176)


def test_another_architecture_is_refused_with_the_list_of_those_that_can_be_served(model_dir: Path) -> None:
    change_json(model_dir / "config.json", lambda config: config.update(architectures=["BloomForCausalLM"]))
    message = refusal(model_dir)
    assert "BloomForCausalLM" in message
    assert set(supported_architectures()) == {"LlamaForCausalLM", *(tiny.architecture for tiny in FAMILIES.values())}
    assert all(name in message for name in supported_architectures())


def test_a_config_that_names_no_architecture_is_refused(model_dir: Path) -> None:
    change_json(model_dir / "config.json", lambda config: config.pop("architectures"))
    assert "supported: " in refusal(model_dir)


def test_a_checkpoint_without_safetensors_is_refused(model_dir: Path) -> None:
    (model_dir / "model.safetensors").rename(model_dir / "pytorch_model.bin")
    assert "safetensors" in refusal(model_dir)


@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json"])
@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_missing_or_damaged_json_file_is_named(model_dir: Path, file: str, content: str | None) -> None:
    (model_dir / file).unlink()
    if content is not None:
        (model_dir / file).write_text(content)
    assert file in refusal(model_dir)


def test_a_weights_file_that_is_a_dangling_link_is_named(model_dir: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    (model_dir / "model.safetensors").symlink_to(model_dir / "blobs" / "gone")
    assert "model.safetensors" in refusal(model_dir)


def test_a_weights_file_cut_short_is_named(model_dir: Path) -> None:
    whole = (model_dir / "model.safetensors").read_bytes()
    (model_dir / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "model.safetensors" in refusal(model_dir)


def test_a_missing_shard_is_named(model_dir: Path) -> None:
    shard(model_dir)
    (model_dir / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors" in refusal(model_dir)


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": 3}'])
def test_a_damaged_list_of_shards_is_named(model_dir: Path, content: str) -> None:
    (model_dir / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refusal(model_dir)


# --- fingerprint ------------------------------------------------------------------------------------------------------


def fingerprint(model_dir: Path) -> bytes:
    adapter: Adapter = adapter_for(model_dir)
    return adapter.fingerprint


def test_copies_of_a_checkpoint_have_one_fingerprint(tiny_model_dir: Path, model_dir: Path) -> None:
    assert fingerprint(tiny_model_dir) == fingerprint(model_dir)
    assert len(fingerprint(model_dir)) == 32


def test_a_single_changed_weight_changes_the_fingerprint(tiny_model_dir: Path, model_dir: Path) -> None:
    def nudge(tensors: Tensors) -> Tensors:
        tensors["model.norm.weight"][5] += 1e-3
        return tensors

    change_tensors(model_dir, nudge)
    assert fingerprint(tiny_model_dir) != fingerprint(model_dir)


def test_a_changed_config_changes_the_fingerprint_and_its_order_does_not(tiny_model_dir: Path, model_dir: Path) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items()))))
    assert fingerprint(tiny_model_dir) == fingerprint(model_dir)
    change_json(path, lambda config: config["text_config"].update(rms_norm_eps=1e-5))
    assert fingerprint(tiny_model_dir) != fingerprint(model_dir)
