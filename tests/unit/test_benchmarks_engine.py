"""The figures of `benchmarks/engine`: their arithmetic, and that what was not measured is null and says why."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

from benchmarks.engine import arms, cells, keys, report, samples, weights
from benchmarks.engine.arms import CONTINUOUS, GENERATE, VLLM, Case
from benchmarks.engine.budget import Budget
from benchmarks.engine.client import AskFailed, ask
from benchmarks.engine.experiments.overlap import chain_s
from benchmarks.engine.prompts import only_text, questions
from benchmarks.engine.results import Results, bandwidth_share
from benchmarks.engine.samples import Figures, Sample
from tests.unit.demo_dir import demo_model_dir

SLOW = Figures(400.0, 500.0, 40.0, 50.0, 20.0, 320.0, 16)
FAST = Figures(100.0, 200.0, 20.0, 25.0, 60.0, 320.0, 16)


def measured(*places: tuple[str, str, str, int], figures: Figures = FAST) -> Results:
    results = Results()
    for arm, case, workload, clients in places:
        results.rounds[arm, (case, workload, clients)].append(figures)
    return results


def test_percentiles_are_numpys():
    values = np.random.default_rng(1).random(37).tolist()
    for percent in (0, 50, 99, 100):
        assert samples.percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    with pytest.raises(ValueError, match="no values"):
        samples.percentile([], 50)


def test_time_per_token_leaves_out_the_first():
    assert Sample(0.5, 1.4, 10, 10).tpot_s == pytest.approx(0.1)
    assert Sample(0.5, 0.5, 10, 1).tpot_s is None


def test_speed_is_of_all_answers_over_the_wall():
    made = samples.figures([Sample(0.1, 1.0, 10, 30), Sample(0.3, 2.0, 20, 30)], wall_s=2.0)
    assert made.tokens_per_s == 30
    assert made.ttft_p50_ms == pytest.approx(200)
    assert made.prompt_tokens == 15


def test_a_figure_over_rounds_is_the_median_of_the_rounds():
    assert samples.over_rounds([SLOW, FAST, FAST]).tokens_per_s == 60
    assert samples.over_rounds([SLOW, FAST]).requests == 32


def test_nothing_measured_is_nothing_but_nulls_with_notes():
    found = keys.all_keys(Results())
    assert set(found) == set(keys.KEYS)
    assert all(key.value is None and key.note for key in found.values())


def test_a_ratio_is_ours_over_theirs_and_null_for_the_model_that_lacks_an_arm():
    results = measured(("mono", cells.DEMO, "text-cold", 16), ("mono", cells.SMOL_F32, "text-cold", 16))
    results.rounds[CONTINUOUS, (cells.DEMO, "text-cold", 16)].append(SLOW)
    results.missing[CONTINUOUS, cells.SMOL_F32] = "it fell over"
    key = keys.all_keys(results)["tokens_per_s_vs_transformers_c16"]
    assert key.value == {cells.DEMO: 3.0, cells.SMOL_F32: None, cells.SMOL_BF16: None}
    assert "it fell over" in key.note


def test_first_tokens_under_shared_prefixes_are_those_of_generate():
    results = measured(("mono", cells.DEMO, "pictures-shared", 1))
    results.rounds[GENERATE, (cells.DEMO, "pictures-shared", 1)].append(SLOW)
    value = keys.all_keys(results)["ttft_vs_transformers_shared_prefix"].value
    assert isinstance(value, dict)
    assert value[cells.DEMO] == 0.25


def test_bandwidth_counts_weights_once_and_the_context_of_each_sequence():
    share = bandwidth_share(FAST, 2, weights=1000, kv_per_token=10, triad=1e6)["bandwidth_share"]
    assert share == pytest.approx((1000 + 2 * 10 * (320 + 16)) / 0.020 / 1e6)
    assert bandwidth_share(FAST, 2, 1000, 10, None) == {}
    assert bandwidth_share(Figures(1, 1, math.nan, math.nan, 1, 1, 1), 1, 1000, 10, 1e6) == {}


def test_weights_are_those_of_the_language_model():
    folder = demo_model_dir()

    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(AutoConfig.from_pretrained(folder))
    wanted = sum(weight.numel() for weight in model.model.language_model.parameters())
    assert weights.weight_bytes(folder, "float32") == 4 * wanted
    text = json.loads((folder / "config.json").read_text())["text_config"]
    head = text["hidden_size"] // text["num_attention_heads"]
    kv = 2 * text["num_hidden_layers"] * text["num_key_value_heads"] * head
    assert weights.kv_bytes_per_token(folder, "bfloat16") == 2 * kv


def test_each_key_of_a_comparison_has_its_cells_on_their_arms():
    for key in keys.COMPARISONS:
        found = [cell for case in cells.CASES for cell in cells.only(key, cells.cells_of(case))]
        assert found
        assert all("mono" in cell.arms for cell in found)
    vllm = cells.only("ttft_vs_vllm_c8", cells.cells_of(cells.SMOL_BF16))
    assert [(cell.concurrency, cell.arms) for cell in vllm] == [(8, ("mono", VLLM))]


def test_the_cells_of_keys_come_before_the_rest():
    for case in cells.CASES:
        needed = [bool(cell.keys) for cell in cells.cells_of(case)]
        assert needed == sorted(needed, reverse=True)


def test_questions_are_the_same_for_every_arm_and_share_what_they_should():
    first, second = questions("text-shared", 5, 2, num_words=100)
    assert questions("text-shared", 5, 2, num_words=100) == [first, second]
    words = [question.messages[0]["content"].split() for question in (first, second)]
    assert words[0][:80] == words[1][:80]
    assert words[0][80:] != words[1][80:]
    cold = [question.messages[0]["content"].split() for question in questions("text-cold", 5, 2, num_words=100)]
    assert cold[0][:5] != cold[1][:5]


def test_a_part_of_the_time_never_outlasts_it():
    clock = [100.0]
    budget = Budget(160.0, lambda: clock[0])
    part = budget.part(0.5)
    assert part.left_s() == 30
    clock[0] = 131.0
    assert part.left_s() == 0
    assert budget.left_s() == 29
    assert not budget.has(30)


def test_the_chain_leaves_out_waiting():
    def row(stage: str, event: str, start_ms: int, end_ms: int, item: int | None = None) -> dict[str, object]:
        return {
            "stage": stage,
            "event": event,
            "start_ns": start_ms * 10**6,
            "end_ns": end_ms * 10**6,
            "item": item,
        }

    rows = [
        row("router", "plan", 0, 10),
        row("encoder", "encode", 20, 40, item=0),
        row("prefill", "chunk", 40, 60),
        row("encoder", "encode", 20, 320, item=1),
        row("prefill", "chunk", 400, 410),  # began 80 ms after it could have
    ]
    assert chain_s(rows, late=1) == pytest.approx(0.320)


def test_what_is_written_is_json_and_a_table(tmp_path: Path):
    results = measured(("mono", cells.DEMO, "text-cold", 16))
    results.missing[VLLM, cells.DEMO] = "--vllm-python was not given"
    results.weights[cells.DEMO], results.kv[cells.DEMO] = 1000, 10
    found = keys.all_keys(results)
    written = report.as_json(results, found, {"threads": 2})
    report.write(tmp_path, written, found)
    read = json.loads((tmp_path / "engine.json").read_text())
    assert read["ttft_vs_vllm_c8"] is None
    assert read["cells"][0]["tokens_per_s"] == 60
    table = (tmp_path / "engine.md").read_text()
    assert "| demo-vl | text-cold | 16 | mono |" in table
    assert "--vllm-python was not given" in table


@pytest.mark.parametrize(
    ("events", "reads"),
    [
        (['{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}'], "ended before"),
        (['{"error": {"message": "no room"}}'], "no room"),
        (
            [
                '{"choices": [{"delta": {"content": "a"}}]}',
                '{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}',
            ],
            "1 tokens came instead of 2",
        ),
    ],
)
async def test_an_answer_that_is_not_whole_is_a_failure(events: list[str], reads: str):
    async with _server(events) as url:
        with pytest.raises(AskFailed, match=reads):
            await ask(url, "m", only_text("hello", 2), timeout_s=5)


async def test_a_stream_is_read_whatever_its_pieces():
    events = [
        '{"choices": [{"delta": {"role": "assistant", "content": ""}}]}',
        '{"choices": [{"delta": {"content": "a"}}]}',
        '{"choices": [{"delta": {"content": "b"}}]}',
        '{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}',
    ]
    async with _server(events) as url:
        sample = await ask(url, "m", only_text("hello", 2), timeout_s=5)
    assert (sample.text, sample.prompt_tokens, sample.completion_tokens) == ("ab", 3, 2)
    assert 0 < sample.first_s <= sample.last_s


class _server:  # noqa: N801 - it is used like a function
    """Answers every request with these events, cut into chunks of seven bytes."""

    def __init__(self, events: list[str]) -> None:
        self._body = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()

    async def __aenter__(self) -> str:
        self._listener = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        for start in range(0, len(self._body), 7):
            piece = self._body[start : start + 7]
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()


def test_the_commands_that_are_written_name_no_folder_of_this_machine(tmp_path: Path) -> None:
    case = Case("demo-vl", arms.ROOT / "assets" / "demo-vl", "float32", 80, True)
    elsewhere = Case("other", tmp_path / "other", "float32", 80, True)
    lines = [
        arms.launch(arm, each, 2, tmp_path / "run", tmp_path / "venv" / "bin" / "python").portable_line()
        for arm in case.arms
        for each in (case, elsewhere)
    ]
    assert not [word for line in lines for word in line.split(" ") if word.startswith("/")]
    assert "python -m triptych.cli up --topology mono --model assets/demo-vl" in lines[0]
