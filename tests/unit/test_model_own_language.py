"""Our decoder against transformers' modules with the same weights: packed products, rotation, precision, and what it
does not know. Token for token in whole clusters: tests/parity."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import linear, silu

from tests.parity.checkpoints import FAMILIES, make_tiny_llama
from tests.unit.stock_parts import load_stock_language
from triptych.core.plan import Sampling
from triptych.model.language_weights import LanguageWeights
from triptych.model.linear import Linear, PackedLinear, can_pack
from triptych.model.llama_parts import language_weights as llama_weights
from triptych.model.own_language import OwnLanguage
from triptych.model.parts import LanguagePart
from triptych.model.registry import adapter_for
from triptych.model.rotary import rotary_of, turn
from triptych.model.runner import LanguageRunner, RunSlice
from triptych.model.sampler import SampleRow
from triptych.model.stock_language import StockLanguage
from triptych.obs import metrics

CPU = torch.device("cpu")


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (7, 3), (960, 576), (1, 33), (130, 16)])
def test_packed_products_are_the_plain_ones(dtype: torch.dtype, outputs: int, inputs: int, seed: int) -> None:
    torch.manual_seed(seed)
    if not can_pack(dtype, CPU):
        assert dtype is torch.bfloat16, "float32 is packed on every CPU"
        return
    weight, bias = torch.randn(outputs, inputs).to(dtype) / inputs**0.5, torch.randn(outputs).to(dtype)
    kept = weight.clone()
    packed = PackedLinear(weight, bias)
    weight.zero_()  # where it was read from is used for the next one
    for count in (1, 2, 16, 70):
        rows, other = torch.randn(count, inputs).to(dtype), torch.randn(count, outputs).to(dtype)
        exact = linear(rows.float(), kept.float(), bias.float())
        near: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 0.02, "atol": 0.02}
        for one in (packed, Linear(kept, bias)):
            torch.testing.assert_close(one(rows).float(), exact, **near)
            torch.testing.assert_close(one.silu(rows).float(), silu(exact), **near)
            torch.testing.assert_close(one.plus(rows, other).float(), exact + other.float(), **near)
            torch.testing.assert_close(one.times(rows, other).float(), exact * other.float(), rtol=0.03, atol=0.03)


# --- rotation ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_turn_heads_as_the_stock_module_says(
    tiny_model_dirs: dict[str, Path], family: str, seed: int
) -> None:
    """To the bit, for positions that differ by axis."""
    torch.manual_seed(seed)
    module = load_stock_language(tiny_model_dirs[family]).model.rotary_emb
    positions = torch.randint(0, 4000, (3, 11))
    heads = torch.randn(11, 6, 2 * len(module.inv_freq))
    cos, sin = module(heads, positions[:, None])
    half = heads.shape[-1] // 2
    expected = heads * cos[0, :, None] + torch.cat((-heads[..., half:], heads[..., :half]), -1) * sin[0, :, None]
    turn(heads, rotary_of(module, 3).angles(positions, torch.float32))
    torch.testing.assert_close(heads, expected, rtol=0, atol=1e-6)


# --- the whole part ---------------------------------------------------------------------------------------------------


def logits_of(part: LanguagePart, model_dir: Path) -> torch.Tensor:
    """Of three sequences in two steps: prompts of several lengths, then a token each."""
    adapter = adapter_for(model_dir)
    kv = adapter.kv_shape
    pool = torch.zeros(kv.num_layers, 2, 20, kv.num_kv_heads, 16, kv.head_dim, dtype=part.dtype)
    runner = LanguageRunner(part, pool, 16, adapter.lookup_id)
    rng = np.random.default_rng(5)
    rows: list[torch.Tensor] = []
    lengths, sampling = (3, 40, 17), SampleRow(Sampling(max_tokens=9), 0, 1)
    for start, count in ((0, None), (None, 1)):
        slices = []
        for index, length in enumerate(lengths):
            first, number = (0, length) if start == 0 else (length, count or 1)
            positions, _ = adapter.positions(first + number, ())
            ids = rng.integers(10, 500, number)
            pages = range(1 + 4 * index, 5 + 4 * index)
            slices.append(RunSlice(ids, positions[:, first:], pages, first, (), sampling))
        out = runner.run(slices).logits
        assert out is not None
        rows.append(out)
    return torch.cat(rows)


@pytest.mark.parametrize("family", [*FAMILIES, "llama"])
@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_logits_are_near_those_of_the_stock_modules(
    tiny_model_dirs: dict[str, Path], tmp_path: Path, family: str, dtype: torch.dtype, share: float
) -> None:
    """Within a share of their spread; in bfloat16 both round, each at other places."""
    model_dir = make_tiny_llama(tmp_path / "llama") if family == "llama" else tiny_model_dirs[family]
    own = adapter_for(model_dir).load_language(dtype, CPU)
    assert isinstance(own, OwnLanguage)
    stock = stock_of(model_dir, dtype)
    expected, found = logits_of(stock, model_dir), logits_of(own, model_dir)
    assert ((found - expected).abs().mean() / expected.std()).item() < share
    other = stock_of(model_dir, dtype)
    other.model.layers[1].mlp.down_proj.weight.data.neg_()
    assert ((found - logits_of(other, model_dir)).abs().mean() / expected.std()).item() > share, "it would see nothing"


def stock_of(model_dir: Path, dtype: torch.dtype) -> StockLanguage:
    return (
        weights_of(model_dir).load_stock(StockLanguage, dtype, CPU)
        if is_llama(model_dir)
        else load_stock_language(model_dir, dtype)
    )


def is_llama(model_dir: Path) -> bool:
    return bool(json.loads((model_dir / "config.json").read_text())["model_type"] == "llama")


def weights_of(model_dir: Path) -> LanguageWeights:
    adapter: Any = adapter_for(model_dir)
    return llama_weights(adapter)


def test_what_is_not_known_runs_in_the_stock_modules_and_is_counted(tmp_path: Path) -> None:
    model_dir = make_tiny_llama(tmp_path / "llama", hidden_act="gelu")
    before = metrics.FALLBACKS.labels("stock_decoder")._value.get()
    assert isinstance(adapter_for(model_dir).load_language(torch.float32, CPU), StockLanguage)
    assert metrics.FALLBACKS.labels("stock_decoder")._value.get() == before + 1
    plain = make_tiny_llama(tmp_path / "plain")
    assert isinstance(adapter_for(plain).load_language(torch.float16, CPU), StockLanguage)
    shutil.rmtree(plain)
