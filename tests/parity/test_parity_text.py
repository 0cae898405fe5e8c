"""Models of text alone through whole clusters: transformers' tokens, greedy in float32, on tiny random Llamas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.parity.checkpoints import make_tiny_llama
from tests.parity.compare import Comparison, compare
from tests.parity.prompts import draw_picture
from tests.parity.reference import Reference
from triptych.core.errors import ModalityUnsupported, StartupError
from triptych.core.worker import Role
from triptych.model.registry import adapter_for
from triptych.stages.settings import LanguageSettings, VisionSettings, WorkerSettings
from triptych.stages.worker import WorkerPlan
from triptych.testing.cluster import ChatRequest, ChatResult, InProcessCluster

NEW_TOKENS = 24
QUESTIONS = ("what is it?", "one two three four " * 30, "harbour engine 17", "one two three four " * 30 + "five")
SHAPES: dict[str, dict[str, Any]] = {
    "tied": {},
    "own head, wide heads": {"tie_word_embeddings": False, "head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3 rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


def text_of(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": question}]}]


def stock_answers(model_dir: Path) -> list[tuple[Reference, Any]]:
    """For each question the reference, and what it says after other tokens."""
    model: Any = transformers.LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model_dir)
    answers = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.inference_mode():
            out = model.generate(
                ids, do_sample=False, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, output_logits=True
            )

        def forced(tokens: Any, ids: torch.Tensor = ids) -> Any:
            with torch.inference_mode():
                return model(torch.cat([ids, torch.tensor([list(tokens)])], 1)).logits[0, ids.shape[1] - 1 : -1].numpy()

        made = Reference(tuple(out.sequences[0, ids.shape[1] :].tolist()), torch.cat(out.logits).float().numpy())
        answers.append((made, forced))
    return answers


def judged(model_dir: Path, results: list[ChatResult]) -> Comparison:
    total = Comparison()
    for (reference, forced), result in zip(stock_answers(model_dir), results, strict=True):
        total.add(compare(reference, result.token_ids, result.logits, forced))
    return total


@pytest.mark.parametrize(("shape", "topology"), [("tied", "p-d"), *((shape, "mono") for shape in SHAPES)])
async def test_parity_of_a_text_model(tmp_path: Path, shape: str, topology: str) -> None:
    model_dir = make_tiny_llama(tmp_path / "llama", **SHAPES[shape])
    async with InProcessCluster(model_dir, topology, chunk_tokens=48, capture_logits=True) as cluster:
        requests = [ChatRequest(text_of(question), max_tokens=NEW_TOKENS) for question in QUESTIONS]
        results = await cluster.generate_many(requests, concurrency=4)
        cluster.check_integrity()
        with pytest.raises(ModalityUnsupported, match="takes text only"):
            cluster.plan(ChatRequest([{"role": "user", "content": [{"type": "image"}]}], (draw_picture(1, (56, 56)),)))
    total = judged(model_dir, results)
    assert total.outputs == len(QUESTIONS) and total.is_exact, total


async def test_the_comparison_sees_another_base_of_the_rotation(tmp_path: Path) -> None:
    model_dir = make_tiny_llama(tmp_path / "llama")
    async with InProcessCluster(model_dir, "mono", capture_logits=True) as cluster:
        results = [await cluster.generate(ChatRequest(text_of(q), max_tokens=NEW_TOKENS)) for q in QUESTIONS]
    config = json.loads((model_dir / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 11.0
    (model_dir / "config.json").write_text(json.dumps(config))
    assert not judged(model_dir, results).is_exact


def test_an_encoder_of_a_text_model_says_which_topologies_serve_it(tmp_path: Path) -> None:
    adapter = adapter_for(make_tiny_llama(tmp_path / "llama"))
    common = WorkerSettings(model=adapter.model_dir, worker_id="encoder-0")
    with pytest.raises(StartupError, match="needs no encoder; use --topology mono or p-d"):
        WorkerPlan(common, vision=VisionSettings()).for_model(adapter)
    beside = WorkerPlan(common, vision=VisionSettings(), prefill=LanguageSettings()).for_model(adapter)
    assert beside.roles == {Role.PREFILL} and not beside.lands_embeddings_of_others
