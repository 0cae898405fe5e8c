"""The demo model's tokenizer: Qwen2's scheme (NFC, Qwen2's split pattern, byte-level BPE) with a tiny vocabulary.

The vocabulary is learnt from the questions and answers themselves, so that an answer is a few whole-word tokens.
Any other text still encodes, down to single bytes.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from scripts.demo_model.questions import SYSTEM_PROMPTS, about_nothing, about_picture, about_pictures
from scripts.demo_model.scenes import make_scene, training_seed

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
LEARNT_TOKENS = 624
_CORPUS_SCENES = 3000
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build(seed: int) -> Tokenizer:
    """A tokenizer learnt from the texts of run `seed`; the special tokens come after the learnt ones."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=LEARNT_TOKENS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_corpus(seed), trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _corpus(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    for index in range(_CORPUS_SCENES):
        scenes = [make_scene(training_seed(seed, 2 * index + k)) for k in range(2)]
        turns = [*about_picture(scenes[0]), *about_pictures(scenes), about_nothing(rng), about_nothing(rng)]
        yield f"user\nassistant\nsystem\n{rng.choice(SYSTEM_PROMPTS)}"
        for turn in turns:
            yield f"{turn.question}\n{turn.answer}"


def save(tokenizer: Tokenizer, directory: Path) -> None:
    """Writes the two tokenizer files as `transformers` expects them for `Qwen2Tokenizer`."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "extra_special_tokens": list(SPECIAL_TOKENS),
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The number of a token that the vocabulary has."""
    found = tokenizer.token_to_id(token)
    assert found is not None, token
    return int(found)


def load(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))
