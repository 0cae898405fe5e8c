"""The truth about a prompt: `transformers` alone, float32, one prompt at a time, kept on disk.

Nothing of our engine runs here; only how a sampled token is drawn from a row of logits is ours, and
`tests/property/test_sampler_truth.py` compares that with `transformers`. A truth ends where rounding alone could
decide on the next token: there a storm asks for no more.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
import transformers
from PIL import Image
from transformers import AutoImageProcessor

from tests.parity.reference import CACHE_DIR, _cache_key, _write
from tests.storm.prompts import Prompt, Variant, conversation, follow_up
from tests.storm.world import World
from triptych.core.plan import Sampling
from triptych.model import sampler
from triptych.model.sampler import SampleRow, TokenHistory, sample, uniform

NEW_TOKENS = 10
FORMAT = 3
NOISE = 2e-4
"""More than our logits may differ from the stock model's: a token that survives it is certain."""

STORM_DIR = CACHE_DIR.parent / "storm"

Logits = npt.NDArray[np.float32]

MANNERS: tuple[Sampling, ...] = (
    Sampling(NEW_TOKENS),
    Sampling(NEW_TOKENS, temperature=0.8, seed=11),
    Sampling(NEW_TOKENS, temperature=1.3, top_p=0.9, top_k=40, seed=2**40 + 3),
    Sampling(NEW_TOKENS, repetition_penalty=1.4),
    Sampling(NEW_TOKENS, temperature=0.6, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.3, seed=5),
)
"""The ways in which storms sample; the first is greedy."""


@dataclass(frozen=True, slots=True)
class Truth:
    """`tokens` (n,) that are certain, and `logits` (n, vocabulary) from which each was chosen."""

    tokens: tuple[int, ...]
    logits: Logits


class TruthBook:
    """Truths of one world, each computed once. Owner of the stock model."""

    def __init__(self, world: World, cache_dir: Path = STORM_DIR) -> None:
        self._world = world
        self._cache = cache_dir / _cache_key(world.model_dir)
        self._known: dict[tuple[str, int, int], Truth] = {}
        self._follow_ups: dict[int, Prompt] = {}

    def prompt(self, root: int, variant: Variant) -> Prompt:
        """A follow-up goes on after what the greedy model answers."""
        if variant is not Variant.FOLLOW_UP:
            return conversation(root, variant)
        if root not in self._follow_ups:
            base = conversation(root, Variant.BASE)
            self._follow_ups[root] = follow_up(base, self.of(base, 0, 0).tokens)
        return self._follow_ups[root]

    def of(self, prompt: Prompt, manner: int, choice: int) -> Truth:
        key = prompt.digest, manner, choice
        if key not in self._known:
            self._known[key] = self._kept(prompt, manner, choice)
        return self._known[key]

    def _kept(self, prompt: Prompt, manner: int, choice: int) -> Truth:
        how = hashlib.sha256(json.dumps([FORMAT, repr(MANNERS[manner]), choice]).encode()).hexdigest()[:12]
        path = self._cache / f"{prompt.digest}-{how}.npz"
        if path.exists():
            with np.load(path, allow_pickle=False) as kept:
                return Truth(tuple(kept["tokens"].tolist()), kept["logits"])
        made = self._compute(prompt, MANNERS[manner], choice)
        _write(path, made)  # type: ignore[arg-type]
        return made

    @torch.inference_mode()
    def _compute(self, prompt: Prompt, how: Sampling, choice: int) -> Truth:
        self._model.model.rope_deltas = None  # the stock model keeps the last prompt's
        inputs = self._inputs(prompt)
        vocabulary = np.unique([piece for piece in prompt.pieces if isinstance(piece, int)])
        out = self._model(**inputs, use_cache=True)
        tokens: list[int] = []
        rows: list[torch.Tensor] = []
        while len(tokens) < NEW_TOKENS:
            row = out.logits[0, -1].float()
            index = len(tokens)
            history = TokenHistory(vocabulary, np.array(tokens, np.int64)) if how.has_penalties else None
            asked = SampleRow(how, choice, inputs["input_ids"].shape[1] + index, index, history)
            token = certain(row, lambda logits, asked=asked: sample(logits[None], [asked])[0])
            if token is None:
                break
            tokens.append(token)
            rows.append(row)
            out = self._model(input_ids=torch.tensor([[token]]), cache=out.cache, use_cache=True)
        return Truth(tuple(tokens), torch.stack(rows).numpy() if rows else np.zeros((0, 0), np.float32))

    @functools.cached_property
    def _model(self) -> Any:
        architecture = json.loads((self._world.model_dir / "config.json").read_text())["architectures"][0]
        model: Any = getattr(transformers, architecture).from_pretrained(self._world.model_dir, dtype=torch.float32)
        return model.eval()

    @functools.cached_property
    def _image_processor(self) -> Any:
        return AutoImageProcessor.from_pretrained(self._world.model_dir)  # type: ignore[no-untyped-call]

    def _inputs(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        input_ids = torch.tensor([self._world.expanded(prompt.pieces)])
        pixels: dict[str, torch.Tensor] = {}
        if prompt.media:
            pictures = [Image.open(io.BytesIO(media)).convert("RGB") for media in prompt.media]
            pixels = dict(self._image_processor(images=pictures, return_tensors="pt"))
        is_picture = (input_ids == self._world.adapter.lookup_id).int()
        mask = torch.ones_like(input_ids)
        return {"input_ids": input_ids, "attention_mask": mask, "mm_token_type_ids": is_picture, **pixels}


def _shifted(place: float, shift: float) -> float:
    return min(max(place + shift, 0.0), 1.0 - 1e-12)


def certain(row: torch.Tensor, choose: Callable[[torch.Tensor], int]) -> int | None:
    """What is chosen, unless noise of the size of rounding errors changes it: in the logits, or in the place at which
    the cumulative distribution is inverted, where noise in the logits adds up."""
    chosen = choose(row)
    for shift in (-NOISE, NOISE):
        with mock.patch.object(sampler, "uniform", lambda *place, shift=shift: _shifted(uniform(*place), shift)):
            if choose(row) != chosen:
                return None
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        noise = NOISE * (2 * torch.randint(0, 2, row.shape, generator=generator) - 1)
        if choose(row + noise) != chosen:
            return None
    for shift in (0.0, 0.5):  # what is nearly equal is made equal: a top-k keeps all that equal the k-th
        if choose(((row / NOISE + shift).round() - shift) * NOISE) != chosen:
            return None
    second, best = torch.topk(row, 2).values.flip(0).tolist()
    return chosen if best - second > 2 * NOISE else None
