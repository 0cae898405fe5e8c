"""`mm_hashes`: who is believed, what is a hash, and what a plan is then made of."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from services.router import chat_service
from services.router.admission.key_file import load_keyring
from services.router.admission.keyring import Keyring
from services.router.app import Model
from services.router.mm_hashes import CallerHashes, caller_hashes
from tests.unit import router_house
from tests.unit.router_house import Api, error_of, picture, serve
from triptych.core.errors import StartupError
from triptych.core.plan import Item, Modality
from triptych.mm.identity import tenant_salt

model = router_house.model

KEYS = {name: f"tk-of-{name}-0123456789" for name in ("trusted", "rival", "plain")}
HASH, OTHER = "ab" * 32, "cd" * 32


@pytest.fixture
def keyring(tmp_path: Path) -> Keyring:
    path = tmp_path / "keys.toml"
    lines = [
        f"[tenants.{name}]\nkeys = ['{key}']\nis_trusted = {str(name != 'plain').lower()}" for name, key in KEYS.items()
    ]
    path.write_text("\n".join(lines))
    found = load_keyring(path, ())
    assert found is not None
    return found


# --- what is a hash ---------------------------------------------------------------------------------------------------


def test_hashes_are_64_digits_each_picture_its_own_and_null_is_none() -> None:
    both = caller_hashes([HASH.upper(), OTHER], 2, is_trusted=True)
    assert both == CallerHashes((bytes.fromhex(HASH), bytes.fromhex(OTHER)))
    assert caller_hashes([None, OTHER], 2, is_trusted=True) == CallerHashes((b"", bytes.fromhex(OTHER)))
    assert caller_hashes(None, 3, is_trusted=False) == CallerHashes((b"", b"", b""))
    assert caller_hashes([], 0, is_trusted=True) == CallerHashes(())


WRONG: list[Any] = ["", HASH[:-1], HASH + "a", HASH[:-1] + "g", HASH[:-1] + "\n", "0x" + HASH[2:], 7, [HASH], {}, True]


@pytest.mark.parametrize("entry", WRONG)
def test_an_entry_that_is_no_hash_is_left_aside_alone(entry: Any) -> None:
    found = caller_hashes([HASH, entry, OTHER], 3, is_trusted=True)
    assert found.hashes == (bytes.fromhex(HASH), b"", bytes.fromhex(OTHER))
    assert found.complaint is not None and "entry 1" in found.complaint


@pytest.mark.parametrize("field", [HASH, {"0": HASH}, 7, [HASH], [HASH] * 3, [HASH] * 100_000])
def test_what_is_no_list_of_that_length_is_left_aside_whole(field: Any) -> None:
    found = caller_hashes(field, 2, is_trusted=True)
    assert found.hashes == (b"", b"")
    assert found.complaint is not None and "2 pictures" in found.complaint


def test_who_is_not_trusted_is_not_believed() -> None:
    found = caller_hashes([HASH], 1, is_trusted=False)
    assert found.hashes == (b"",)
    assert found.complaint is not None and "is_trusted" in found.complaint


@pytest.mark.parametrize("line", ["is_trusted = 1", "is_trusted = 'yes'", "trusted = true"])
def test_trust_is_said_plainly_or_the_start_stops(line: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f"[tenants.a]\nkeys = ['{KEYS['plain']}']\n{line}\n")
    with pytest.raises(StartupError, match="is_trusted"):
        load_keyring(path, ())


# --- what is planned --------------------------------------------------------------------------------------------------


async def items_of(api: Api, key: str, mm_hashes: Any, *pictures: dict[str, Any], **fields: Any) -> tuple[Item, ...]:
    content = [*(pictures or (picture(),)), {"type": "text", "text": "what?"}]
    messages = [{"role": "user", "content": content}]
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = await api.chat(headers=headers, messages=messages, mm_hashes=mm_hashes, **fields)
    assert answer.status_code == 200, answer.text
    return api.pipeline.plans[-1].items


def count() -> float:
    return REGISTRY.get_sample_value("triptych_fallbacks_total", {"reason": "ignored_mm_hash"}) or 0.0


def by_bytes(model: Model, tenant: str, sent: dict[str, Any]) -> bytes:
    data = base64.b64decode(sent["image_url"]["url"].split(",")[1])
    return model.adapter.identity(Modality.IMAGE, data, tenant_salt(tenant))


async def test_a_hash_names_a_picture_for_one_tenant_one_salt_and_one_shape(model: Model, keyring: Keyring) -> None:
    small, large = picture(60, 40), picture(120, 40)
    async with serve(model, keyring=keyring) as api:
        asked: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
            ("trusted", small, HASH, {}),
            ("trusted", small, OTHER, {}),
            ("trusted", large, HASH, {}),
            ("trusted", small, HASH, {"cache_salt": "s"}),
            ("rival", small, HASH, {}),
        ]
        before = count()
        names = []
        for tenant, sent, name, fields in asked:
            (item,) = await items_of(api, KEYS[tenant], [name], sent, **fields)
            salt = tenant_salt(tenant, fields.get("cache_salt", ""))
            assert item.caller_hash == bytes.fromhex(name)
            hashed = model.adapter.caller_identity(item.modality, item.grid, item.num_tokens, item.caller_hash, salt)
            assert item.identity == hashed, "as the encoder computes it"
            names.append(item.identity)
        names += [by_bytes(model, tenant, small) for tenant in ("trusted", "rival", "")]
        assert len(set(names)) == len(names)
        (again,) = await items_of(api, KEYS["trusted"], [HASH], picture(60, 40, "JPEG"))
        assert again.identity == names[0], "whatever the bytes"
        assert count() == before


async def test_one_of_several_pictures_may_be_named(model: Model, keyring: Keyring) -> None:
    async with serve(model, keyring=keyring) as api:
        first, second = await items_of(api, KEYS["trusted"], [None, HASH], picture(60, 40), picture(40, 60))
    assert (first.caller_hash, second.caller_hash) == (b"", bytes.fromhex(HASH))
    assert first.identity == by_bytes(model, "trusted", picture(60, 40))


@pytest.mark.parametrize("key", ["plain", ""])
async def test_others_get_names_of_the_bytes_a_count_and_a_line(
    key: str, model: Model, keyring: Keyring, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with serve(model, keyring=keyring if key else None) as api:
        before = count()
        (item,) = await items_of(api, KEYS.get(key, ""), [HASH])
        assert (item.identity, item.caller_hash) == (by_bytes(model, key, picture()), b"")
        assert count() == before + 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert HASH not in caplog.text


@pytest.mark.parametrize("field", [["nonsense"], [HASH, HASH], HASH, 3])
async def test_what_is_wrong_is_ignored_or_with_strict_a_400(field: Any, model: Model, keyring: Keyring) -> None:
    async with serve(model, keyring=keyring) as api:
        (item,) = await items_of(api, KEYS["trusted"], field)
        assert item.identity == by_bytes(model, "trusted", picture())
    async with serve(model, keyring=keyring, strict=True) as api:
        for key, sent in (("trusted", field), ("plain", [HASH])):
            content = [picture(), {"type": "text", "text": "what?"}]
            headers = {"authorization": f"Bearer {KEYS[key]}"}
            messages = [{"role": "user", "content": content}]
            refused = await api.chat(headers=headers, messages=messages, mm_hashes=sent)
            assert error_of(refused, 400)["param"] == "mm_hashes"
        assert (await items_of(api, KEYS["trusted"], [HASH]))[0].caller_hash


async def test_the_schema_tells_of_it(model: Model) -> None:
    async with serve(model) as api:
        schema = json.dumps((await api.client.get("/openapi.json")).json())
    assert "mm_hashes" in schema


# --- broken builds ----------------------------------------------------------------------------------------------------


def _believes_everybody(field: object, num_pictures: int, *, is_trusted: bool) -> CallerHashes:
    return caller_hashes(field, num_pictures, is_trusted=True)


async def test_a_router_that_believes_everybody_is_found(
    model: Model, keyring: Keyring, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(chat_service, "caller_hashes", _believes_everybody)
    with pytest.raises(AssertionError):
        await test_others_get_names_of_the_bytes_a_count_and_a_line("plain", model, keyring, caplog)


async def test_names_without_the_salt_are_found(
    model: Model, keyring: Keyring, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter: Any = type(model.adapter)
    honest: Callable[..., bytes] = adapter.caller_identity
    monkeypatch.setattr(adapter, "caller_identity", lambda self, *args: honest(self, *args[:4]))
    with pytest.raises(AssertionError):
        await test_a_hash_names_a_picture_for_one_tenant_one_salt_and_one_shape(model, keyring)
