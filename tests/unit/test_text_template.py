from __future__ import annotations

import json
from pathlib import Path

import pytest

from triptych.core.errors import InvalidRequest, StartupError
from triptych.text.messages import ChatMessage, ImagePart, TextPart
from triptych.text.template import ChatTemplate


def render(source: str, *messages: ChatMessage, **specials: str) -> str:
    return ChatTemplate(source, specials).render(messages)


def test_strings_stay_strings_and_parts_are_typed() -> None:
    source = "{% for m in messages %}{{ m.content is string }}:{{ m.content | tojson }};{% endfor %}"
    text = render(source, ChatMessage("user", "é<"), ChatMessage("user", (TextPart("a"), ImagePart())))
    assert text == 'True:"é<";False:[{"type": "text", "text": "a"}, {"type": "image"}];'


def test_generation_prompt_specials_and_block_trimming() -> None:
    source = "{{ bos_token }}\n  {% if add_generation_prompt %}\nA:{% endif %}\n"
    assert render(source, ChatMessage("user", "x"), bos_token="<s>") == "<s>\nA:"


def test_loop_controls_and_time() -> None:
    source = "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}"
    assert render(source, ChatMessage("user", "x"), ChatMessage("assistant", "y")) == "user"
    assert len(render("{{ strftime_now('%Y') }}", ChatMessage("user", "x"))) == 4


def test_the_templates_own_refusal_reaches_the_caller() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}", ChatMessage("user", "x"))
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{% for %}", "{{" * 100_000])
def test_a_template_that_cannot_be_compiled_stops_the_start(source: str) -> None:
    with pytest.raises(StartupError, match="cannot be compiled"):
        ChatTemplate(source, {})


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"\xff\xfe{", "folder", "dangling"])
def test_a_file_that_cannot_be_read_is_not_one_that_is_missing(tmp_path: Path, name: str, content: bytes | str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "other"}))
    (tmp_path / name).unlink(missing_ok=True)
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content == "folder":
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).symlink_to(tmp_path / "cleared")
    with pytest.raises(StartupError, match=name) as caught:
        ChatTemplate.from_model(tmp_path)
    assert str(tmp_path) not in caught.value.message


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "[" * 100_000])
def test_a_damaged_tokenizer_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "chat_template.jinja").write_text("x")
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(StartupError, match=r"tokenizer_config\.json"):
        ChatTemplate.from_model(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].content.no.such }}",
        "{{ 1 + 'a' }}",
        "{{ 1 // 0 }}",
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "{{ '%c' | format(2 ** 40) }}",
        "{% macro deeper() %}{{ deeper() }}{% endmacro %}{{ deeper() }}",
    ],
)
def test_whatever_goes_wrong_inside_is_a_plain_refusal(source: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot render") as caught:
        render(source, ChatMessage("user", "x"))
    assert "0x" not in caught.value.message


def test_a_template_that_does_not_compile_stops_the_start() -> None:
    with pytest.raises(StartupError):
        ChatTemplate("{% for %}", {})


def test_where_the_template_comes_from(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="chat_template"):
        ChatTemplate.from_model(tmp_path)
    config = {"chat_template": "from config {{ eos_token }}", "eos_token": {"content": "<e>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    message = ChatMessage("user", "x")
    assert ChatTemplate.from_model(tmp_path).render([message]) == "from config <e>"
    (tmp_path / "chat_template.jinja").write_text("from file {{ eos_token }}")
    assert ChatTemplate.from_model(tmp_path).render([message]) == "from file <e>"
