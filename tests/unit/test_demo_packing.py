"""Training computes what the stock model computes, and writes rows as the chat template writes conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from scripts.demo_model import config as configs
from scripts.demo_model import tokenizer as tokenizers_of_ours
from scripts.demo_model.export import CHAT_TEMPLATE, PROCESSOR
from scripts.demo_model.forward import embed, encode_pictures, run_language
from scripts.demo_model.pack import Batch, Pictures, Writer, draw_all, normalised, patches_of, training_batch
from scripts.demo_model.questions import Turn
from scripts.demo_model.scenes import draw, evaluation_seed, make_scene


@pytest.fixture(scope="module")
def writer() -> Writer:
    return Writer(tokenizers_of_ours.build(0))


@pytest.fixture(scope="module")
def model(writer: Writer) -> Any:
    torch.manual_seed(0)
    return Qwen2_5_VLForConditionalGeneration(configs.build(writer.tokenizer)).eval()


def _stock_pixels(pictures: Pictures, row: int) -> torch.Tensor:
    """One picture as the stock patch embedding wants it: both temporal frames alike."""
    patches = normalised(pictures.patches[row]).view(-1, 3, 1, 196)
    return patches.expand(-1, -1, 2, -1).reshape(-1, 1176)


def _grid_thw(pictures: Pictures) -> list[int]:
    return [1, 2 * pictures.grid[0], 2 * pictures.grid[1]]


@pytest.mark.parametrize("grid", [(2, 2), (5, 7), (8, 8), (3, 9)])
def test_dense_vision_matches_the_stock_tower(model: Any, grid: tuple[int, int]) -> None:
    pictures = draw_all([make_scene(evaluation_seed(0, k), grid) for k in range(2)])
    pixels = torch.cat([_stock_pixels(pictures, row) for row in range(2)])
    with torch.inference_mode():
        ours = encode_pictures(model.model.visual, pictures.patches, grid)
        stock = model.model.visual(pixels, grid_thw=torch.tensor([_grid_thw(pictures)] * 2)).pooler_output
    torch.testing.assert_close(ours.flatten(0, 1), stock, atol=2e-5, rtol=1e-4)


def test_patches_are_those_of_the_stock_processor() -> None:
    settings = {key: value for key, value in PROCESSOR.items() if key != "image_processor_type"}
    processor = Qwen2VLImageProcessorPil(**settings)
    for index in range(6):
        scene = make_scene(evaluation_seed(0, index))
        seen = processor(draw(scene), return_tensors="pt")
        ours = normalised(torch.from_numpy(patches_of(draw(scene), scene.grid)))
        assert seen["image_grid_thw"].tolist() == [[1, 2 * scene.grid[0], 2 * scene.grid[1]]]
        torch.testing.assert_close(seen["pixel_values"].view(-1, 3, 2, 196)[:, :, 0].reshape(-1, 588), ours)


def _first_batch(writer: Writer, pictures: int) -> Batch:
    batches = (training_batch(writer, 0, step) for step in range(200))
    return next(batch for batch in batches if len(batch.pictures) == pictures)


@pytest.mark.parametrize("pictures", [1, 2])
def test_each_branch_computes_as_if_alone(model: Any, writer: Writer, pictures: int) -> None:
    batch = _first_batch(writer, pictures)
    language = model.model.language_model
    with torch.inference_mode():
        tokens = [encode_pictures(model.model.visual, p.patches, p.grid) for p in batch.pictures]
        hidden, _ = run_language(language, embed(language, batch, tokens), batch, 1)
        for branch in range(1, int(batch.segments[0].max()) + 1):
            mine = (batch.segments[0] == 0) | (batch.segments[0] == branch)
            alone = _stock_hidden(model, batch, batch.ids[0][mine][None])
            torch.testing.assert_close(hidden[0][mine], alone, atol=5e-5, rtol=1e-4)


def _stock_hidden(model: Any, batch: Batch, ids: torch.Tensor) -> torch.Tensor:
    model.model.rope_deltas = None
    out = model.model(
        input_ids=ids,
        pixel_values=torch.cat([_stock_pixels(p, 0) for p in batch.pictures]),
        image_grid_thw=torch.tensor([_grid_thw(p) for p in batch.pictures]),
        mm_token_type_ids=(ids == model.config.image_token_id).int(),
        attention_mask=torch.ones_like(ids),
    )
    hidden: torch.Tensor = out.last_hidden_state[0]
    return hidden


def test_a_batch_is_a_function_of_run_and_step(writer: Writer) -> None:
    first, second, other = (training_batch(writer, run, 3) for run in (0, 0, 1))
    assert torch.equal(first.ids, second.ids)
    assert torch.equal(first.digits.patches, second.digits.patches)
    assert first.ids.shape != other.ids.shape or not torch.equal(first.ids, other.ids)


def test_rows_read_as_the_chat_template_writes(writer: Writer, tmp_path: Path) -> None:
    tokenizers_of_ours.save(writer.tokenizer, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    stock = AutoTokenizer.from_pretrained(tmp_path)
    first, second = Turn("digit", "Which digit is shown?", "The digit is 7."), Turn("fact", "Hello", "Hello!")
    opening = "<|im_start|>system\nBe short and exact.<|im_end|>\n<|im_start|>user\n"
    row = writer.row(opening, [(2, 3)], [[first, second]])
    messages = [
        {"role": "system", "content": "Be short and exact."},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}, _text(first.question)]},
        {"role": "assistant", "content": first.answer},
        {"role": "user", "content": [_text(second.question)]},
        {"role": "assistant", "content": second.answer},
    ]
    text = stock.apply_chat_template(messages, tokenize=False)
    ids = stock(text.replace("<|image_pad|>", "<|image_pad|>" * 6), add_special_tokens=False)["input_ids"]
    assert ids == row.ids + writer.tokenizer.encode("\n").ids


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
