"""A part takes little more memory while it loads than afterwards, whatever the file's dtype and however it is cut.

Measured as the kernel counts it (VmHWM, which counts mapped pages of files too) in a process of its own that forks for
each case, so that each starts with everything imported. With the library's mapped tensors in the reader's place the
peak of a conversion from float32 to bfloat16 is 2.9 times the part's own weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.parity.checkpoints import DEMO_DIR

AT_MOST = 1.3

MEASURE = """
import json, os, sys
from pathlib import Path
import torch
from triptych.model.registry import adapter_for

torch.set_num_threads(1)

def status_bytes(name):
    line = next(line for line in open("/proc/self/status") if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024

def load(model_dir, part, dtype):
    adapter, device = adapter_for(Path(model_dir)), torch.device("cpu")
    return adapter.load_vision(dtype, device) if part == "vision" else adapter.load_language(dtype, device)

def measure(model_dir, part, dtype):
    dtype = getattr(torch, dtype)
    # A fork has its libraries' pages mapped but not counted: this touches them, and stays, so that nothing that it
    # freed can be taken again.
    kept = [load(sys.argv[1], part, dtype) for _ in range(2)]
    before = status_bytes("VmRSS")
    loaded = load(model_dir, part, dtype)
    return status_bytes("VmHWM") - before, loaded.num_parameters * dtype.itemsize

load(sys.argv[1], "vision", torch.float32)
load(sys.argv[1], "language", torch.float32)
for case in json.load(sys.stdin):
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        print(json.dumps(measure(*case)))
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""


def make_checkpoint(directory: Path, dtype: torch.dtype) -> Path:
    """Some 50 million weights, half of them in the tower, in two shards."""
    directory.mkdir()
    config = json.loads((DEMO_DIR / "config.json").read_text())
    config["text_config"] |= {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 3}
    config["text_config"] |= {"num_attention_heads": 8, "vocab_size": 12_000, "layer_types": ["full_attention"] * 3}
    config["text_config"]["rope_parameters"]["mrope_section"] = [8, 12, 12]
    config["vision_config"] |= {"hidden_size": 512, "intermediate_size": 2048, "out_hidden_size": 512, "num_heads": 8}
    config["vision_config"] |= {"depth": 5, "fullatt_block_indexes": [1]}
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("preprocessor_config.json", "generation_config.json"):
        (directory / name).write_bytes((DEMO_DIR / name).read_bytes())
    stock: Any = transformers.Qwen2_5_VLForConditionalGeneration
    with torch.device("meta"):
        shapes = {name: weight.shape for name, weight in stock(stock.config_class(**config)).named_parameters()}
    names = sorted(shapes)
    shards = {f"model-{number + 1:05}-of-00002.safetensors": names[number::2] for number in range(2)}
    for file, held in shards.items():
        save_file({name: torch.full(shapes[name], 0.5, dtype=dtype) for name in held}, directory / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def as_one_file(directory: Path, sharded: Path) -> Path:
    directory.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for path in sharded.iterdir():
        if path.suffix == ".safetensors":
            tensors |= load_file(path)
        elif "index" not in path.name:
            (directory / path.name).write_bytes(path.read_bytes())
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.timeout(240)
def test_the_peak_while_loading_is_little_above_the_parts_own_weights(tmp_path: Path) -> None:
    cases = []
    for file_dtype in ("float32", "bfloat16"):
        sharded = make_checkpoint(tmp_path / f"sharded-{file_dtype}", getattr(torch, file_dtype))
        whole = as_one_file(tmp_path / f"whole-{file_dtype}", sharded)
        for part in ("vision", "language"):
            for dtype in ("float32", "bfloat16"):
                cases += [(str(model_dir), part, dtype) for model_dir in (whole, sharded)]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(DEMO_DIR)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measured = [json.loads(line) for line in done.stdout.splitlines()]
    ratios = {}
    for (model_dir, part, dtype), (peak, own) in zip(cases, measured, strict=True):
        assert own > 40_000_000, "too small to measure"
        ratios[f"{Path(model_dir).name} {part} as {dtype}"] = peak / own
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.3f}")
    assert max(ratios.values()) <= AT_MOST, ratios
    assert min(ratios.values()) > 0.7, "the weights are not in memory"
