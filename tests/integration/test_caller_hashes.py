"""Pictures that trusted callers name by hashes of their own: who lies gets wrong answers, and nobody else does."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from services.router.image_header import read_image_header
from services.router.media import Media
from tests.integration import tiny_cluster
from tests.integration.tiny_cluster import MAX_TOKENS
from tests.integration.trusted import Answered, ask
from tests.parity.prompts import draw_picture
from triptych.core.errors import MediaMismatch
from triptych.core.plan import Plan
from triptych.mm.identity import tenant_salt
from triptych.model.adapters.base import Adapter
from triptych.stages.encoder import EncoderStage
from triptych.testing.cluster import ChatRequest, InProcessCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")
model_dir, shared, epd = tiny_cluster.model_dir, tiny_cluster.shared, tiny_cluster.epd

# Alike but for their content.
PICTURE, LIE = draw_picture(1, (84, 56)), draw_picture(7, (84, 56))
TURNED = draw_picture(1, (56, 84))
HASH, OTHER = b"h" * 32, b"o" * 32
LIAR, RIVAL = tenant_salt("liar"), tenant_salt("rival")


def asked(media: bytes) -> ChatRequest:
    content = [{"type": "image"}, {"type": "text", "text": "what is it?"}]
    return ChatRequest([{"role": "user", "content": content}], (media,), MAX_TOKENS)


def planned(cluster: InProcessCluster, media: bytes, salt: bytes, caller_hash: bytes = b"") -> Plan:
    """As the router plans it for a tenant's caller."""
    unnamed = cluster.plan(asked(media))
    one = Media(media, read_image_header(media, 10**8, "media"), caller_hash)
    layout = cluster.adapter.image_layout(one.header.width_px, one.header.height_px)
    item = cluster.planner._item(one, layout, list(unnamed.items[0].ranges), salt)
    return dataclasses.replace(unnamed, items=(item,), cache_salt=salt)


async def answer(cluster: InProcessCluster, media: bytes, salt: bytes, caller_hash: bytes = b"") -> Answered:
    return await ask(cluster.pipeline, planned(cluster, media, salt, caller_hash), [media])


def num_encoded(found: Answered) -> int:
    return len(found.events("encode"))


async def truths(cluster: InProcessCluster) -> dict[bytes, list[int]]:
    """By pictures of nobody's, and with nothing left of them."""
    found = {media: (await cluster.generate(asked(media))).token_ids for media in (PICTURE, LIE, TURNED)}
    assert found[PICTURE] != found[LIE], "a mix-up would not be seen"
    cluster.clear_caches()
    return found


async def test_a_name_holds_for_its_tenant_and_is_encoded_once(epd: InProcessCluster) -> None:
    truth = await truths(epd)
    first = await answer(epd, PICTURE, LIAR, HASH)
    assert (first.token_ids, num_encoded(first)) == (truth[PICTURE], 1)
    again = await answer(epd, PICTURE, LIAR, HASH)
    assert (again.token_ids, num_encoded(again)) == (truth[PICTURE], 0)
    assert not again.events("write"), "prefill holds its KV, whether the encoder was asked or not"
    epd.clear_language_caches()
    third = await answer(epd, PICTURE, LIAR, HASH)
    assert (third.token_ids, num_encoded(third), len(third.events("cache_hit"))) == (truth[PICTURE], 0, 1)


async def others_are_right(epd: InProcessCluster, truth: dict[bytes, list[int]]) -> None:
    """Whoever names the picture by its bytes, or by the same hash in another namespace, has it encoded, and rightly."""
    others: list[tuple[str, bytes, bytes]] = [
        ("its own name by bytes", LIAR, b""),
        ("its own other salt", tenant_salt("liar", "s"), HASH),
        ("another hash", LIAR, OTHER),
        ("another tenant", RIVAL, HASH),
        ("another tenant by bytes", RIVAL, b""),
        ("nobody's tenant", b"", b""),
    ]
    for who, salt, caller_hash in others:
        found = await answer(epd, PICTURE, salt, caller_hash)
        assert (found.token_ids, num_encoded(found)) == (truth[PICTURE], 1), who


async def test_a_liar_meets_nobody_but_itself(epd: InProcessCluster) -> None:
    truth = await truths(epd)
    assert (await answer(epd, LIE, LIAR, HASH)).token_ids == truth[LIE]
    believed = await answer(epd, PICTURE, LIAR, HASH)
    assert (believed.token_ids, num_encoded(believed)) == (truth[LIE], 0), "it asked for its own lie"
    turned = await answer(epd, TURNED, LIAR, HASH)
    assert (turned.token_ids, num_encoded(turned)) == (truth[TURNED], 1), "another shape is another item"
    await others_are_right(epd, truth)
    await asyncio.to_thread(epd.check_integrity)


async def test_liars_and_honest_callers_at_once(epd: InProcessCluster) -> None:
    """Of one hash and one moment, so that flights could be joined."""
    truth = await truths(epd)
    asking = [answer(epd, LIE, LIAR, HASH) if n % 2 else answer(epd, PICTURE, RIVAL, HASH) for n in range(12)]
    found = await asyncio.gather(*asking)
    for number, one in enumerate(found):
        assert one.token_ids == (truth[LIE] if number % 2 else truth[PICTURE])


FORGED: dict[str, dict[str, Any]] = {
    "bytes of a picture under the name of another's bytes": {"hash": HASH, "claims": b""},
    "a name of another hash": {"hash": HASH, "claims": OTHER},
    "without the hash that it was made of": {"hash": b"", "claims": HASH},
}


@pytest.mark.parametrize("case", FORGED)
async def test_a_mark_that_is_not_what_the_identity_was_made_of_is_refused(case: str, epd: InProcessCluster) -> None:
    """By one who holds the cluster's token and would leave LIE where PICTURE belongs."""
    truth = await truths(epd)
    forged = planned(epd, LIE, LIAR, FORGED[case]["hash"])
    victim = planned(epd, PICTURE, LIAR, FORGED[case]["claims"])
    item = dataclasses.replace(forged.items[0], identity=victim.items[0].identity)
    with pytest.raises(MediaMismatch, match="identity names"):
        await ask(epd.pipeline, dataclasses.replace(forged, items=(item,)), [LIE])
    found = await ask(epd.pipeline, victim, [PICTURE])
    assert (found.token_ids, num_encoded(found)) == (truth[PICTURE], 1)


async def test_a_name_of_another_tenant_is_refused(epd: InProcessCluster) -> None:
    truth = await truths(epd)
    victim = planned(epd, PICTURE, RIVAL, HASH)
    forged = planned(epd, LIE, LIAR, HASH)
    item = dataclasses.replace(forged.items[0], identity=victim.items[0].identity)
    with pytest.raises(MediaMismatch, match="identity names"):
        await ask(epd.pipeline, dataclasses.replace(forged, items=(item,)), [LIE])
    assert (await ask(epd.pipeline, victim, [PICTURE])).token_ids == truth[PICTURE]


# --- broken builds ----------------------------------------------------------------------------------------------------


async def test_names_without_the_tenant_are_found(epd: InProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    honest: Any = Adapter.caller_identity
    monkeypatch.setattr(type(epd.adapter), "caller_identity", lambda self, *args: honest(self, *args[:4]))
    with pytest.raises(AssertionError):
        await test_a_liar_meets_nobody_but_itself(epd)


async def test_an_encoder_that_believes_a_callers_mark_is_found(
    epd: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest: Any = EncoderStage._identity_of

    def trusting(self: EncoderStage, held: Any, cache_salt: bytes) -> bytes:
        return held.item.identity if held.item.caller_hash else honest(self, held, cache_salt)

    monkeypatch.setattr(EncoderStage, "_identity_of", trusting)
    with pytest.raises(pytest.fail.Exception):
        await test_a_mark_that_is_not_what_the_identity_was_made_of_is_refused(next(iter(FORGED)), epd)
