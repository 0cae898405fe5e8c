"""The HTTP API over a model of text alone: its template gets strings, and a picture is a 400 before it is fetched."""

from __future__ import annotations

from pathlib import Path

from services.router.app import Cluster, Model
from tests.parity.checkpoints import make_tiny_llama
from tests.unit.router_house import error_of, picture, serve
from triptych.core.worker import Role
from triptych.registry.runtime import RuntimeFolder
from triptych.registry.static import StaticRegistry

# As such templates are: a list of parts in the place of the string would be an error.
STRINGS_ONLY = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant: "


def text_model(directory: Path) -> Model:
    model_dir = make_tiny_llama(directory / "llama")
    (model_dir / "chat_template.jinja").write_text(STRINGS_ONLY)
    return Model(model_dir)


async def test_a_picture_is_refused_and_text_parts_are_joined(tmp_path: Path) -> None:
    async with serve(text_model(tmp_path)) as api:
        parts = [{"type": "text", "text": "what"}, {"type": "text", "text": "is it?"}]
        assert (await api.chat(messages=[{"role": "user", "content": parts}])).status_code == 200
        assert api.decode(api.pipeline.plans[0].compact_ids) == "user: what\nis it?\nassistant: "
        unread = {"type": "image_url", "image_url": {"url": "https://nobody.example/a.png"}}
        for image in (picture(), unread):
            error = error_of(await api.chat(messages=[{"role": "user", "content": [*parts, image]}]), 400)
            assert "takes text only" in error["message"]
            assert error["code"] == "modality_unsupported"
            assert error["param"].startswith("messages.0")


def test_no_encoder_is_missed(tmp_path: Path) -> None:
    model = text_model(tmp_path)
    cluster = Cluster(StaticRegistry(RuntimeFolder(tmp_path / "run")), model.adapter)
    assert cluster.missing_roles() == (Role.PREFILL, Role.DECODE)
