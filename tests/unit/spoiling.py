"""Ways to spoil a copy of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def change_tensors(model_dir: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = model_dir / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(change(tensors), path, {"format": "pt"})


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
