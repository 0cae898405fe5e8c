"""What a checkpoint's JSON files say: a field that is missing, ill-typed or contradicts another stops the start, and
the message names the field and its file."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file

from tests.parity.checkpoints import FAMILIES
from tests.unit.stock_parts import load_stock_language
from triptych.core.errors import StartupError
from triptych.model.adapters import base
from triptych.model.registry import adapter_for, scan
from triptych.model.stock import stock_on_meta
from triptych.rpc import convert

CPU = torch.device("cpu")


class Missing:
    def __repr__(self) -> str:
        return "missing"


MISSING = Missing()
CONFIG, PROCESSOR, GENERATION = "config.json", "preprocessor_config.json", "generation_config.json"


@pytest.fixture(params=FAMILIES)
def model_dir(request: pytest.FixtureRequest, tiny_model_dirs: dict[str, Path], tmp_path: Path) -> Path:
    return copied(tiny_model_dirs[request.param], tmp_path)


def copied(model_dir: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(model_dir, tmp_path / "spoiled"))


def spoil(model_dir: Path, file: str, place: str, value: object) -> None:
    """Sets the field at the dotted `place`, or removes it."""
    content = json.loads((model_dir / file).read_text())
    table, (*outer, field) = content, place.split(".")
    for name in outer:
        table = table[name]
    if value is MISSING:
        del table[field]
    else:
        table[field] = value
    (model_dir / file).write_text(json.dumps(content))


def refusal(model_dir: Path) -> str:
    """From the adapter alone: the router has no more, and should not start either."""
    with pytest.raises(StartupError) as caught:
        adapter_for(model_dir)
    assert str(model_dir.parent) not in caught.value.message
    return caught.value.message


TEXT_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
VISION_NUMBERS = ("depth", "num_heads", "patch_size", "spatial_merge_size", "temporal_patch_size", "hidden_size")
ILL_TYPED = (None, "many", 0, -1, 1.5, True)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *((f"text_config.{field}", value) for field in TEXT_NUMBERS for value in (MISSING, *ILL_TYPED)),
        *((f"vision_config.{field}", value) for field in VISION_NUMBERS for value in ILL_TYPED),
    ],
    ids=repr,
)
def test_a_size_that_is_missing_or_no_positive_number_is_named(
    tiny_model_dirs: dict[str, Path], tmp_path: Path, place: str, value: object
) -> None:
    for family, kept in tiny_model_dirs.items():
        model_dir = copied(kept, tmp_path / family)
        spoil(model_dir, CONFIG, place, value)
        assert f"config.json: {place}" in refusal(model_dir), family


FAMILYS_OWN = [
    ("qwen2-vl", "vision_config.embed_dim", (None, "wide")),
    ("qwen2-vl", "vision_config.hidden_size", (65,)),
    ("qwen2.5-vl", "vision_config.out_hidden_size", (None, MISSING, 32, 65)),
    ("qwen2.5-vl", "vision_config.window_size", (None, 0, 20)),
    ("qwen2.5-vl", "vision_config.fullatt_block_indexes", (None, MISSING, 1, [3], [-1], [1, 1], ["1"])),
    ("qwen3-vl", "vision_config.out_hidden_size", (None, MISSING, 32)),
    ("qwen3-vl", "vision_config.num_position_embeddings", (None, 0, 63)),
    ("qwen3-vl", "vision_config.deepstack_visual_indexes", (None, MISSING, 1, [3], [-1], [0, 0], [0.0], "01")),
    ("qwen3-vl", "text_config.head_dim", (MISSING, 0)),
]


@pytest.mark.parametrize(
    ("family", "place", "value"), [(family, place, value) for family, place, values in FAMILYS_OWN for value in values]
)
def test_a_field_of_the_familys_own_is_named(
    tiny_model_dirs: dict[str, Path], tmp_path: Path, family: str, place: str, value: object
) -> None:
    model_dir = copied(tiny_model_dirs[family], tmp_path)
    spoil(model_dir, CONFIG, place, value)
    assert f"config.json: {place}" in refusal(model_dir)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("text_config.rms_norm_eps", MISSING),
        ("text_config.rms_norm_eps", "small"),
        ("text_config.rms_norm_eps", 0),
        ("text_config.num_key_value_heads", 3),
        ("text_config.use_sliding_window", True),
        ("text_config.layer_types", ["full_attention", "sliding_attention", "full_attention"]),
        ("text_config.layer_types", 3),
        ("text_config.rope_parameters", MISSING),
        ("text_config.rope_parameters", 3),
        ("text_config.rope_parameters.mrope_section", MISSING),
        ("text_config.rope_parameters.mrope_section", [2, 3]),
        ("text_config.rope_parameters.mrope_section", [2, 3, 4]),
        ("text_config.rope_parameters.mrope_section", [0, 4, 4]),
        ("text_config.rope_parameters.mrope_section", "2,3,3"),
        ("text_config.rope_parameters.rope_type", "dynamic"),
        ("text_config.rope_parameters.rope_type", "longrope"),
        ("text_config.vocab_size", 1_000_001),
        ("vision_config.num_heads", 3),
        ("vision_config.in_channels", 4),
        ("vision_config", MISSING),
        ("vision_config", []),
        ("image_token_id", MISSING),
        ("image_token_id", 638),
        ("image_token_id", -1),
        ("image_token_id", "636"),
    ],
)
def test_a_field_of_the_config_that_contradicts_is_named(model_dir: Path, place: str, value: object) -> None:
    spoil(model_dir, CONFIG, place, value)
    assert f"config.json: {place}" in refusal(model_dir)


def test_a_theta_that_stands_nowhere_is_named(model_dir: Path) -> None:
    spoil(model_dir, CONFIG, "text_config.rope_parameters.rope_theta", MISSING)
    assert "rope_theta" in refusal(model_dir)


@pytest.mark.parametrize("family", ["qwen2-vl", "qwen2.5-vl"])
def test_heads_that_do_not_divide_the_hidden_size_are_named(
    tiny_model_dirs: dict[str, Path], tmp_path: Path, family: str
) -> None:
    model_dir = copied(tiny_model_dirs[family], tmp_path)
    spoil(model_dir, CONFIG, "text_config.num_attention_heads", 6)
    assert "config.json: text_config.num_attention_heads" in refusal(model_dir)


def test_more_levels_than_layers_are_refused(tiny_model_dirs: dict[str, Path], tmp_path: Path) -> None:
    """The stock model would leave them out in silence."""
    model_dir = copied(tiny_model_dirs["qwen3-vl"], tmp_path)
    spoil(model_dir, CONFIG, "text_config.num_hidden_layers", 1)
    assert "deepstack_visual_indexes" in refusal(model_dir)


def test_quantized_weights_are_refused(model_dir: Path) -> None:
    spoil(model_dir, CONFIG, "quantization_config", {"quant_method": "gptq"})
    assert "quantization_config" in refusal(model_dir)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("patch_size", MISSING),
        ("patch_size", 8),
        ("merge_size", MISSING),
        ("merge_size", 1),
        ("temporal_patch_size", MISSING),
        ("temporal_patch_size", 1),
        ("size", MISSING),
        ("size", 3136),
        ("size", {"shortest_edge": 3136}),
        ("size", {"shortest_edge": "few", "longest_edge": 50176}),
        ("size", {"shortest_edge": 50176, "longest_edge": 3136}),
        ("do_resize", False),
        ("image_mean", [0.5, 0.5]),
        ("image_std", "half"),
        ("rescale_factor", "255"),
        ("rescale_factor", math.inf),
        ("rescale_factor", 10**400),
        ("do_rescale", "yes"),
        ("do_normalize", 1),
        ("do_convert_rgb", []),
        ("image_mean", [0.5, math.nan, 0.5]),
        ("image_std", [0.5, math.inf, 0.5]),
        ("image_std", [0.5, 0, 0.5]),
    ],
)
def test_a_field_of_the_processor_is_named(model_dir: Path, place: str, value: object) -> None:
    spoil(model_dir, PROCESSOR, place, value)
    assert f"preprocessor_config.json: {place}" in refusal(model_dir)


@pytest.mark.parametrize(
    ("place", "value"),
    [("resample", 99), ("image_mean", [1e300] * 3), ("image_std", [1e-300] * 3), ("rescale_factor", 1e308)],
)
def test_a_processor_that_makes_nothing_of_a_picture_stops_the_start(
    model_dir: Path, place: str, value: object
) -> None:
    """What stock looks at only with a picture in its hands, at the start and not at the first request."""
    spoil(model_dir, PROCESSOR, place, value)
    adapter = adapter_for(model_dir)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy says what overflows
        with pytest.raises(StartupError, match=r"preprocessor_config\.json"):
            adapter.load_vision(torch.float32, CPU)


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["float12", "b\u00e9float16", 16, ["float32"]])
def test_a_number_format_that_is_none_is_named(model_dir: Path, field: str, value: object) -> None:
    """It is part of every item's identity, which is ASCII: not to be found out with the first picture."""
    config = json.loads((model_dir / CONFIG).read_text())
    config.pop("dtype", None)
    (model_dir / CONFIG).write_text(json.dumps({**config, field: value}))
    assert f"config.json: {field}" in refusal(model_dir)


def test_more_tokens_than_the_wire_carries_are_named(model_dir: Path) -> None:
    """A worker that announces more is not heard by the router, which would wait for it for ever."""
    assert base.MAX_SEQUENCE_TOKENS == 2 * convert.MAX_TOKENS
    spoil(model_dir, CONFIG, "text_config.max_position_embeddings", base.MAX_SEQUENCE_TOKENS + 1)
    assert "config.json: text_config.max_position_embeddings" in refusal(model_dir)


@pytest.mark.parametrize("place", ["text_config.num_hidden_layers", "vision_config.depth"])
def test_more_layers_than_tensors_are_named_before_they_are_built(model_dir: Path, place: str) -> None:
    spoil(model_dir, CONFIG, place, 10**9)
    if place.startswith("text"):
        spoil(model_dir, CONFIG, "text_config.layer_types", None)
    adapter = adapter_for(model_dir)
    for load in (adapter.load_vision, adapter.load_language):
        with pytest.raises(StartupError, match=f"config.json: {place}"):
            load(torch.float32, CPU)


def test_how_stock_hands_results_back_is_not_the_checkpoints_to_say(model_dir: Path) -> None:
    whole = adapter_for(model_dir).load_vision(torch.float32, CPU)
    for field, value in (("return_dict", False), ("output_hidden_states", True), ("output_attentions", True)):
        spoil(model_dir, CONFIG, field, value)
        for part in ("text_config", "vision_config"):
            spoil(model_dir, CONFIG, f"{part}.{field}", value)
    told = adapter_for(model_dir).load_vision(torch.float32, CPU)
    pixels, grid = told.preprocess(Image.linear_gradient("L").convert("RGB"))
    assert torch.equal(told.encode([pixels], [grid])[0], whole.encode([pixels], [grid])[0])


def test_a_file_that_is_a_dangling_link_is_not_one_that_is_missing(model_dir: Path) -> None:
    """It says when an answer ends."""
    (model_dir / GENERATION).unlink()
    adapter_for(model_dir)
    (model_dir / GENERATION).symlink_to(model_dir / "cleared")
    assert GENERATION in refusal(model_dir)


def test_a_byte_order_mark_is_no_damage(model_dir: Path) -> None:
    marked = b"\xef\xbb\xbf" + (model_dir / CONFIG).read_bytes()
    expected = adapter_for(model_dir).fingerprint
    (model_dir / CONFIG).write_bytes(marked)
    assert adapter_for(model_dir).fingerprint == expected


def test_weights_that_are_a_pipe_are_named(model_dir: Path) -> None:
    """Reading one waits for ever."""
    os.mkfifo(model_dir / "more.safetensors")
    assert "more.safetensors" in refusal(model_dir)


@pytest.mark.parametrize("value", ["626", [626, "x"], 638, [-1], True, []])
def test_an_end_token_that_is_none_is_named(model_dir: Path, value: object) -> None:
    spoil(model_dir, GENERATION, "eos_token_id", value)
    assert "generation_config.json: eos_token_id" in refusal(model_dir)


def test_what_stock_refuses_is_refused_with_its_reason(model_dir: Path) -> None:
    """A field that only transformers reads: it names it, and so do we."""
    spoil(model_dir, CONFIG, "text_config.attention_dropout", "a lot")
    adapter = adapter_for(model_dir)
    with pytest.raises(StartupError, match="attention_dropout"):
        adapter.load_language(torch.float32, CPU)


@pytest.mark.parametrize("file", [CONFIG, PROCESSOR])
@pytest.mark.parametrize("content", [None, "{", "[]", "[" * 100_000, "\x00"])
def test_a_missing_or_damaged_json_file_is_named(model_dir: Path, file: str, content: str | None) -> None:
    (model_dir / file).unlink()
    if content is not None:
        (model_dir / file).write_text(content)
    assert file in refusal(model_dir)


@pytest.mark.parametrize("architectures", ["Qwen2VLForConditionalGeneration", [], {}, None, [None], 3])
def test_a_list_of_architectures_that_is_none_is_refused(model_dir: Path, architectures: object) -> None:
    spoil(model_dir, CONFIG, "architectures", architectures)
    assert "supported: " in refusal(model_dir)


# --- what may be left out ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [adapter for adapter in scan().adapters if adapter.modalities])
def test_the_towers_defaults_are_those_of_transformers(adapter: Any) -> None:
    stock = getattr(transformers, adapter.architecture).config_class().vision_config
    for field, value in adapter.vision_defaults.items():
        theirs = getattr(stock, field)
        assert (list(theirs) if isinstance(theirs, tuple) else theirs) == value, field


@pytest.mark.parametrize("family", FAMILIES)
def test_what_equals_the_default_may_be_left_out(
    tiny_model_dirs: dict[str, Path], tmp_path: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And is logged, since nothing of a config should be taken for granted in silence."""
    model_dir = copied(tiny_model_dirs[family], tmp_path)
    fields = ["patch_size", "spatial_merge_size", "temporal_patch_size"]
    for field in fields:
        spoil(model_dir, CONFIG, f"vision_config.{field}", MISSING)
    with caplog.at_level(logging.INFO):
        adapter: Any = adapter_for(model_dir)
    assert [getattr(record, "fields", None) for record in caplog.records] == [fields]
    vision = adapter.load_vision(torch.float32, CPU)
    kept: Any = adapter_for(tiny_model_dirs[family]).load_vision(torch.float32, CPU)
    pixels, grid = kept.preprocess(Image.effect_mandelbrot((160, 96), (-2, -1, 1, 1), 9).convert("RGB"))
    assert torch.equal(vision.encode([pixels], [grid])[0], kept.encode([pixels], [grid])[0])


@pytest.mark.parametrize("family", ["qwen2-vl", "qwen2.5-vl"])
def test_a_default_that_is_not_the_checkpoints_is_refused_by_its_tensors(
    tiny_model_dirs: dict[str, Path], tmp_path: Path, family: str
) -> None:
    model_dir = copied(tiny_model_dirs[family], tmp_path)
    spoil(model_dir, CONFIG, "vision_config.depth", MISSING)
    if family == "qwen2.5-vl":
        spoil(model_dir, CONFIG, "vision_config.fullatt_block_indexes", MISSING)
    adapter = adapter_for(model_dir)
    with pytest.raises(StartupError, match=r"lacks the tensor 'blocks\."):
        adapter.load_vision(torch.float32, CPU)


QWEN2_TEXT = {
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "use_sliding_window": False,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "eos_token_id": 151645,
    "image_token_id": 151655,
}
QWEN2_PROCESSOR = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "7 billion of Qwen2-VL": (
        QWEN2_TEXT
        | {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}
        | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
        | {"num_attention_heads": 28, "num_key_value_heads": 4}
        | {"vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "in_chans": 3}},
        QWEN2_PROCESSOR,
        3584,
    ),
    "72 billion of Qwen2.5-VL": (
        QWEN2_TEXT
        | {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
        | {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 128000}
        | {"vision_config": {"hidden_size": 1280, "intermediate_size": 3456, "out_hidden_size": 8192, "in_chans": 3}},
        QWEN2_PROCESSOR,
        8192,
    ),
    "4 billion of Qwen3-VL": (
        {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "model_type": "qwen3_vl",
            "image_token_id": 151655,
            "tie_word_embeddings": True,
            "text_config": {
                "head_dim": 128,
                "hidden_size": 2560,
                "intermediate_size": 9728,
                "max_position_embeddings": 262144,
                "num_attention_heads": 32,
                "num_hidden_layers": 36,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-06,
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
                "rope_theta": 5000000,
                "vocab_size": 151936,
                "eos_token_id": 151645,
            },
            "vision_config": {
                "deepstack_visual_indexes": [5, 11, 17],
                "depth": 24,
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_heads": 16,
                "num_position_embeddings": 2304,
                "out_hidden_size": 2560,
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
            },
        },
        {"size": {"longest_edge": 16777216, "shortest_edge": 65536}}
        | {
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
        4 * 2560,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_in_the_form_of_the_published_ones_are_taken(tmp_path: Path, name: str) -> None:
    config, processor, row_elements = PUBLISHED[name]
    (tmp_path / CONFIG).write_text(json.dumps(config))
    (tmp_path / PROCESSOR).write_text(json.dumps(processor))
    save_file({"unread": torch.zeros(1)}, tmp_path / "model.safetensors")
    adapter = adapter_for(tmp_path)
    assert adapter.row_elements == row_elements
    assert adapter.image_layout(1000, 800).num_tokens > 0
    meta = stock_on_meta(adapter)
    assert meta.config.text_config.hidden_size == adapter.hidden_size
    heads = meta.model.language_model.layers[0].self_attn
    assert (heads.head_dim, len(meta.model.language_model.layers)) == (128, adapter.kv_shape.num_layers)


# --- what may stand elsewhere -----------------------------------------------------------------------------------------


def test_bounds_in_pixels_may_stand_beside_the_size(model_dir: Path) -> None:
    content = json.loads((model_dir / PROCESSOR).read_text())
    del content["size"]
    (model_dir / PROCESSOR).write_text(json.dumps({**content, "min_pixels": 3136, "max_pixels": 50176}))
    adapter: Any = adapter_for(model_dir)
    assert (adapter.min_pixels, adapter.max_pixels) == (3136, 50176)


def test_the_rope_may_stand_under_its_older_names(model_dir: Path) -> None:
    """As in the published checkpoints: `rope_scaling` of type mrope, `rope_theta` beside it."""
    kept = outputs(model_dir)
    content = json.loads((model_dir / CONFIG).read_text())
    rope = content["text_config"].pop("rope_parameters")
    content["text_config"]["rope_theta"] = rope["rope_theta"]
    content["text_config"]["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    if content["model_type"] == "qwen3_vl":
        content["text_config"]["rope_scaling"] = {"rope_type": "default", "mrope_section": rope["mrope_section"]}
    (model_dir / CONFIG).write_text(json.dumps(content))
    assert torch.equal(outputs(model_dir), kept)


@pytest.mark.parametrize("family", ["qwen2-vl", "qwen2.5-vl"])
def test_the_language_models_fields_may_stand_at_the_top(
    tiny_model_dirs: dict[str, Path], tmp_path: Path, family: str
) -> None:
    """As in the published checkpoints of these two families."""
    model_dir = copied(tiny_model_dirs[family], tmp_path)
    kept = outputs(model_dir)
    content = json.loads((model_dir / CONFIG).read_text())
    text = content.pop("text_config")
    content |= {name: value for name, value in text.items() if name not in ("model_type", "dtype")}
    (model_dir / CONFIG).write_text(json.dumps(content))
    assert torch.equal(outputs(model_dir), kept)


def outputs(model_dir: Path) -> torch.Tensor:
    """Hidden rows of a prompt of text at positions that differ by axis: what the config's numbers go into."""
    language = load_stock_language(model_dir)
    stock = copy.deepcopy(language.model)
    stock.config._attn_implementation = "eager"
    positions = torch.stack([torch.arange(9), torch.arange(9) * 2, torch.arange(9) * 3])[:, None]
    with torch.inference_mode():
        rows: torch.Tensor = stock(
            inputs_embeds=language.embed(torch.arange(1, 10))[None], position_ids=positions, use_cache=False
        ).last_hidden_state
    return rows
