"""The ready file: refused before the start, or written whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from triptych.core.errors import StartupError
from triptych.core.ready_file import check_ready_file, write_ready_file


def test_it_is_written_whole_over_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    for content in (b"a longer first one", b"{}"):
        check_ready_file(path)
        write_ready_file(path, content)
        assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path], "no draft stays"


@pytest.mark.parametrize("name", ["missing/ready.json", "file/ready.json", "folder"])
def test_where_it_cannot_be_is_a_sentence_before_and_after_the_start(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(StartupError, match="--ready-file"):
        check_ready_file(tmp_path / name)
    with pytest.raises(StartupError, match="cannot be written"):
        write_ready_file(tmp_path / name, b"{}")
