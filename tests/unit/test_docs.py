"""What the pages name exists: files, links, flags of `triptych up` and settings."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from triptych.cli.settings import UpSettings
from triptych.core.environment import SETTING_NAMES

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("services/**/*.md")])
README = (ROOT / "README.md").read_text()
# Written by the benchmarks and by those who convert checkpoints.
MADE_LATER = {
    *("engine.json", "engine.md", "engine.png", "transport.json", "transport.md", "transport.png"),
    *("router.json", "router.md", "routing.json", "routing.md"),
    *("model.safetensors.index.json", "config.json"),
}
FOLDERS = ("triptych", "services", "proto", "docs", "tests", "benchmarks", "scripts", "assets")


def _files() -> set[str]:
    return {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")}


def _row(command: str) -> str:
    return next(line for line in README.splitlines() if line.startswith(f"| `{command}"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    names = re.findall(r"`([\w./-]+\.(?:py|md|proto|json|sh))`", text)
    known = _files() | MADE_LATER
    assert [name for name in names if not (ROOT / name).exists() and Path(name).name not in known] == []
    whole = [name for name in names if name.startswith(FOLDERS) and Path(name).name not in MADE_LATER]
    assert [name for name in whole if not (ROOT / name).exists()] == []


def test_the_row_of_up_has_all_its_flags_and_no_other() -> None:
    flags = {f"--{field.name.replace('_', '-')}" for field in fields(UpSettings)} | {"--config"}
    assert set(re.findall(r"--[a-z-]+[a-z]", _row("triptych up"))) - {"--help"} == flags


def test_the_settings_in_the_table_exist() -> None:
    table = README.split("| setting | of | |")[1].split("```")[0]
    names = re.findall(r"`([a-z_]+)`", table)
    assert len(names) > 10 and set(names) <= SETTING_NAMES


def test_every_page_is_reached_from_the_readme() -> None:
    """By links of links."""
    seen: set[Path] = set()
    ahead = [ROOT / "README.md"]
    while ahead:
        page = ahead.pop().resolve()
        if page in seen or page.suffix != ".md" or not page.exists():
            continue
        seen.add(page)
        links = re.findall(r"\]\(([^)#\s]+\.md)(?:#[^)]*)?\)", page.read_text())
        ahead += [page.parent / link for link in links]
    assert [page.name for page in sorted((ROOT / "docs").glob("*.md")) if page.resolve() not in seen] == []
