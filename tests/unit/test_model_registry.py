"""Adapters are found by looking into their folder; one that is broken takes nobody down."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

from triptych.cli import models
from triptych.cli.main import run
from triptych.core.errors import StartupError
from triptych.core.plan import Modality
from triptych.model import adapters
from triptych.model.adapters.base import AttentionKind, ExtraInput
from triptych.model.registry import Scan, scan, supported_architectures


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One more folder in which adapters are looked for; what was loaded from there is forgotten afterwards."""
    monkeypatch.setattr(adapters, "__path__", [*adapters.__path__, str(tmp_path)])
    scan.cache_clear()
    yield tmp_path
    scan.cache_clear()
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(f"{adapters.__name__}.{path.stem}", None)


def adapter_source(name: str, architecture: str) -> str:
    return (
        "from triptych.model.adapters.qwen2_vl import Qwen2VLAdapter\n"
        f"class {name}(Qwen2VLAdapter):\n"
        f"    architecture = {architecture!r}\n"
        f"    family = {name!r}\n"
    )


def test_every_family_is_found_and_transformers_has_its_architecture() -> None:
    found = scan()
    assert found.broken == ()
    assert [adapter.family for adapter in found.adapters] == ["Llama", "Qwen2-VL", "Qwen2.5-VL", "Qwen3-VL"]
    for adapter in found.adapters:
        assert hasattr(transformers, adapter.architecture)
        assert adapter.attention is AttentionKind.CAUSAL
        assert adapter.modalities == (() if adapter.family == "Llama" else (Modality.IMAGE,))
    with_levels = [adapter.family for adapter in found.adapters if ExtraInput.EMBEDDING_LEVELS in adapter.extra_inputs]
    assert with_levels == ["Qwen3-VL"]


def test_a_module_that_is_added_is_found(folder: Path) -> None:
    (folder / "zz_added.py").write_text(adapter_source("Added", "AddedForConditionalGeneration"))
    assert "AddedForConditionalGeneration" in supported_architectures()
    assert scan().broken == ()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import a_library_that_nobody_has\n", "ModuleNotFoundError"),
        ("raise RuntimeError('out of luck')\n", "RuntimeError: out of luck"),
        ("def broken(:\n", "SyntaxError"),
        ("raise SystemExit(3)\n", "SystemExit"),
    ],
)
def test_a_broken_module_is_reported_and_the_others_serve(
    folder: Path, source: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "aa_broken.py").write_text(source)
    (folder / "zz_added.py").write_text(adapter_source("Added", "AddedForConditionalGeneration"))
    found = scan()
    assert [broken.module for broken in found.broken] == ["aa_broken"]
    assert reason in found.broken[0].reason
    assert {"Qwen2VLForConditionalGeneration", "AddedForConditionalGeneration"} <= set(supported_architectures())
    assert [getattr(record, "adapter_module", None) for record in caplog.records] == ["aa_broken"]


def test_an_architecture_belongs_to_one_module(folder: Path) -> None:
    (folder / "zz_again.py").write_text(adapter_source("Again", "Qwen2VLForConditionalGeneration"))
    found = scan()
    assert [adapter.family for adapter in found.adapters][:2] == ["Llama", "Qwen2-VL"]
    assert "qwen2_vl" in found.broken[0].reason


def test_what_an_adapter_imports_is_not_found_again(folder: Path) -> None:
    (folder / "zz_importer.py").write_text("from triptych.model.adapters.qwen3_vl import Qwen3VLAdapter\n")
    assert len(scan().adapters) == 4
    assert scan().broken == ()


def test_looking_for_adapters_imports_no_torch() -> None:
    """The router has neither; it starts in a second because of that."""
    code = (
        "import json, sys; from triptych.model.registry import scan; found = scan();"
        "print(json.dumps([len(found.adapters), [m for m in ('torch', 'transformers') if m in sys.modules]]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [4, []]


# --- triptych models --------------------------------------------------------------------------------------------------


def test_the_command_lists_every_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "architecture"
    assert [row.split()[0] for row in rows] == list(supported_architectures())
    assert all("causal" in row and row.endswith("served") for row in rows)
    assert ["text, image" in row for row in rows] == [False, True, True, True]
    assert ["those of the checkpoint" in row for row in rows] == [False, False, False, True]


def test_the_command_says_what_was_left_out_and_succeeds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "aa_broken.py").write_text("raise RuntimeError('line one\\nline two')\n")
    assert run(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "  aa_broken: RuntimeError: line one line two"


def test_the_command_takes_no_flags() -> None:
    with pytest.raises(StartupError):
        run(["models", "--all"])


def test_an_empty_installation_still_prints_its_head() -> None:
    assert models.table(Scan((), ())).split() == " ".join(models.HEAD).split()
