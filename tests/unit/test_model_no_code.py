"""A checkpoint that brings code along: whatever its files say, none of it runs, in any process that reads them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parity.checkpoints import FAMILIES

CANARY = "canary_that_sang"

MODULE = """
import os, pathlib
pathlib.Path(os.environ["CANARY"]).write_text("sang")
from transformers import Qwen2VLConfig as Config
class Model: ...
class Processor: ...
class Tokenizer: ...
"""

# What each process of a cluster reads of a checkpoint; a line says how each folder fared.
LOADERS = """
import json, os, sys
from pathlib import Path
import torch
from PIL import Image
from triptych.model.registry import adapter_for
from triptych.text.tokenizer import ChatTokenizer

def load(model_dir):
    adapter = adapter_for(model_dir)
    vision = adapter.load_vision(torch.float32, torch.device("cpu"))
    vision.preprocess(Image.new("RGB", (64, 64)))
    adapter.load_language(torch.float32, torch.device("cpu"))
    ChatTokenizer(model_dir)

for folder in sys.argv[1:]:
    try:
        load(Path(folder))
        fared = "loaded"
    except Exception as error:
        fared = type(error).__name__
    print(json.dumps([fared, os.path.exists(os.environ["CANARY"])]), flush=True)
"""


def add_auto_map(model_dir: Path) -> None:
    """As a repository that wants `trust_remote_code` does, in every file that may say so."""
    (model_dir / f"{CANARY}.py").write_text(MODULE)
    for name in ("__init__", "modeling", "configuration", "processing", "tokenization"):
        (model_dir / f"{name}.py").write_text(MODULE)
    names = {
        "AutoConfig": "Config",
        "AutoModel": "Model",
        "AutoModelForCausalLM": "Model",
        "AutoProcessor": "Processor",
    }
    names |= {"AutoImageProcessor": "Processor", "AutoModelForImageTextToText": "Model"}
    auto_map = {auto: f"{CANARY}.{cls}" for auto, cls in names.items()}
    change(model_dir, "config.json", {"auto_map": auto_map, "custom_code": True, "trust_remote_code": True})
    for part in ("text_config", "vision_config"):
        change(model_dir, "config.json", {"auto_map": auto_map}, part)
    change(model_dir, "preprocessor_config.json", {"auto_map": auto_map, "trust_remote_code": True})
    tokenizer = {"auto_map": {"AutoTokenizer": [f"{CANARY}.Tokenizer", f"{CANARY}.Tokenizer"]}}
    change(model_dir, "tokenizer_config.json", tokenizer)
    change(model_dir, "generation_config.json", {"custom_generate": str(model_dir), "auto_map": auto_map})


def name_other_classes(model_dir: Path) -> None:
    """Types that nobody has, so that a library would look for them in the repository."""
    change(model_dir, "config.json", {"model_type": "canary", "transformers_version": "99"})
    change(model_dir, "config.json", {"model_type": "canary"}, "vision_config")
    change(model_dir, "preprocessor_config.json", {"image_processor_type": f"{CANARY}.Processor"})
    change(model_dir, "preprocessor_config.json", {"processor_class": f"{CANARY}.Processor"})
    change(model_dir, "tokenizer_config.json", {"tokenizer_class": f"{CANARY}.Tokenizer"})


def name_a_foreign_architecture(model_dir: Path) -> None:
    change(model_dir, "config.json", {"architectures": [f"{CANARY}.Model"], "model_type": "canary"})


def change(model_dir: Path, file: str, fields: dict[str, Any], part: str = "") -> None:
    content = json.loads((model_dir / file).read_text())
    (content[part] if part else content).update(fields)
    (model_dir / file).write_text(json.dumps(content))


CASES: dict[str, tuple[Callable[[Path], None], ...]] = {
    "sound": (add_auto_map,),
    "other classes": (add_auto_map, name_other_classes),
    "foreign architecture": (add_auto_map, name_a_foreign_architecture),
}


@pytest.mark.timeout(120)
def test_no_loader_runs_the_code_of_a_checkpoint(
    tiny_model_dirs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", str(tmp_path / CANARY))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    cases = [(case, family) for case in CASES for family in FAMILIES]
    folders = [shutil.copytree(tiny_model_dirs[family], tmp_path / f"{case}-{family}") for case, family in cases]
    for (case, _), folder in zip(cases, folders, strict=True):
        for spoil in CASES[case]:
            spoil(Path(folder))
    command = [sys.executable, "-c", LOADERS, *map(str, folders)]
    # No terminal: a question whether to trust the code is answered by nobody.
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(cases), done.stderr
    for (case, family), (fared, has_sung) in zip(cases, lines, strict=True):
        assert not has_sung, f"the code of the checkpoint ran: {case}, {family}"
        assert fared in ("loaded", "StartupError")
        assert fared == "loaded" or case != "sound"
    assert not list((tmp_path / "hf").rglob("*canary*")), "the code of a checkpoint was copied to be run"


def test_the_canary_sings_where_it_is_let(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The module does leave its trace: with transformers told to trust it."""
    model_dir = Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))
    for spoil in CASES["other classes"]:
        spoil(model_dir)
    code = (
        f"from transformers import AutoConfig; AutoConfig.from_pretrained({str(model_dir)!r}, trust_remote_code=True)"
    )
    environment = {"CANARY": str(tmp_path / CANARY), "HF_HOME": str(tmp_path / "hf"), "PATH": ""}
    subprocess.run([sys.executable, "-c", code, str(model_dir)], env=environment, capture_output=True, check=False)
    assert (tmp_path / CANARY).exists()
