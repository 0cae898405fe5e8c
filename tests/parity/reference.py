"""The outside truth: `transformers` alone, float32, greedy, one prompt at a time.

Nothing of ours runs here. The tokenizer, the chat template and the Pillow image processor come from `transformers`;
only the expansion of `<|image_pad|>` is written out, because the combined Qwen processor needs torchvision.
Outputs are kept on disk, one file per prompt, under a key of everything that they depend on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from transformers import AutoImageProcessor, AutoTokenizer

from tests.parity.prompts import Prompt

NEW_TOKENS = 32
CACHE_DIR = Path(__file__).resolve().parents[2] / ".cache" / "parity"
FORMAT = 1

Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Reference:
    """What `generate` gave: `tokens` (n,), and `logits` (n, vocabulary) from which each was chosen."""

    tokens: tuple[int, ...]
    logits: Logits


class ReferenceModel:
    """Owns the stock model. `generate` is cached on disk, all else is computed."""

    def __init__(self, model_dir: Path, cache_dir: Path = CACHE_DIR) -> None:
        self.model_dir = model_dir
        self._cache = cache_dir / _cache_key(model_dir)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        self.image_processor: Any = AutoImageProcessor.from_pretrained(model_dir)  # type: ignore[no-untyped-call]
        self._model: Any = None

    @property
    def model(self) -> Any:
        """Loaded at the first use: a run that finds everything in the cache needs no weights."""
        if self._model is None:
            architecture = json.loads((self.model_dir / "config.json").read_text())["architectures"][0]
            model: Any = getattr(transformers, architecture).from_pretrained(self.model_dir, dtype=torch.float32)
            model.eval()
            model.generation_config.eos_token_id = None  # outputs always have their full length
            self._model = model
        return self._model

    def inputs(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        """Everything that the stock `forward` takes for a prompt, placeholders expanded."""
        text = self.tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        pixels: dict[str, torch.Tensor] = {}
        if prompt.media:
            pixels = dict(self.image_processor(images=prompt.pictures, return_tensors="pt"))
            counts = (pixels["image_grid_thw"].prod(-1) // self.image_processor.merge_size**2).tolist()
            ids = _expand(ids, self.image_token_id, counts)
        input_ids = torch.tensor([ids])
        return {
            "input_ids": input_ids,
            "attention_mask": torch.ones_like(input_ids),
            "mm_token_type_ids": (input_ids == self.image_token_id).int(),
            **pixels,
        }

    @property
    def image_token_id(self) -> int:
        return int(self.tokenizer.convert_tokens_to_ids("<|image_pad|>"))

    def generate(self, prompt: Prompt) -> Reference:
        """Greedy, exactly NEW_TOKENS tokens; from the cache where it is known."""
        path = self._cache / f"{prompt.digest}.npz"
        if path.exists():
            with np.load(path, allow_pickle=False) as kept:
                return Reference(tuple(kept["tokens"].tolist()), kept["logits"])
        made = self.generate_now(prompt)
        _write(path, made)
        return made

    def generate_now(self, prompt: Prompt, new_tokens: int = NEW_TOKENS) -> Reference:
        """As `generate`, always computed: with a fault planted in the model, the cache must not answer."""
        self.model.model.rope_deltas = None  # the stock model keeps the last request's
        inputs = self.inputs(prompt)
        with torch.inference_mode():
            out = self.model.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=new_tokens,
                return_dict_in_generate=True,
                output_logits=True,
            )
        tokens = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return Reference(tuple(tokens), torch.cat(out.logits).float().numpy())

    def teacher_forced_logits(self, prompt: Prompt, tokens: Sequence[int]) -> Logits:
        """Logits (len(tokens), vocabulary): row i is what the model says after the prompt and `tokens[:i]`."""
        self.model.model.rope_deltas = None
        with torch.inference_mode():
            prefilled = self.model(**self.inputs(prompt), use_cache=True)
            logits = [prefilled.logits[0, -1:]]
            if len(tokens) > 1:
                # Apart from the prompt: a model may well *say* the placeholder of a picture, and then it is text.
                forced = torch.tensor([list(tokens[:-1])])
                logits.append(self.model(input_ids=forced, cache=prefilled.cache, use_cache=True).logits[0])
        return torch.cat(logits).float().numpy()


def _expand(ids: Sequence[int], image_token_id: int, counts: Sequence[int]) -> list[int]:
    if sum(token == image_token_id for token in ids) != len(counts):
        raise ValueError("the prompt has not as many placeholders as pictures")
    left = iter(counts)
    return [t for token in ids for t in ([token] * next(left) if token == image_token_id else [token])]


def _cache_key(model_dir: Path) -> str:
    """Hash of the checkpoint's files, of the versions that compute, and of how the outputs are stored."""
    sha = hashlib.sha256()
    for path in sorted(model_dir.iterdir()):
        if path.suffix in {".json", ".safetensors", ".jinja"}:
            sha.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    sha.update(json.dumps([FORMAT, NEW_TOKENS, transformers.__version__, torch.__version__]).encode())
    return sha.hexdigest()[:24]


def _write(path: Path, made: Reference) -> None:
    """Whole or not at all: several runs may fill the same cache."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.stem}.{os.getpid()}.tmp")
    with fresh.open("wb") as file:
        np.savez(file, tokens=np.array(made.tokens, np.int64), logits=made.logits)
    fresh.replace(path)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """The models are so small that threads only get in each other's way."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
