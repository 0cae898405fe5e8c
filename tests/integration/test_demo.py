"""What `make demo` shows."""

from __future__ import annotations

import pytest

from scripts import demo


def test_the_demo_judges_and_all_is_right(cluster_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = demo.main(["--url", cluster_url, "--seed", "1"])
    shown = capsys.readouterr().out
    assert status == 0, shown
    assert len(demo.PICTURES) >= 4
    assert shown.count("true answer") == shown.count("given answer") == len(demo.ASKED) >= 8
    assert "   encoder: encoder-0   prefill: prefill-0   decode: decode-0" in shown
    assert "kv_commit" in shown


def test_a_wrong_answer_is_status_1(
    cluster_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo.Asked, "is_right", property(lambda asked: asked.turn.kind != "digit"))
    assert demo.main(["--url", cluster_url, "--seed", "1"]) == 1
    assert f"{len(demo.ASKED) - 1} of {len(demo.ASKED)} answers are right" in capsys.readouterr().out
