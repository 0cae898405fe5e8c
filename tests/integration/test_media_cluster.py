"""The media corpus sent to a cluster of processes, by data URI and by address, for the first time and again; crowds of
pictures at once; streams whose picture fails."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest
from PIL import Image

from tests.corpus.drawing import drawn, noise
from tests.corpus.fuzz import fuzzed
from tests.corpus.refused import refused
from tests.corpus.sample import Sample, encoded
from tests.corpus.taken import taken
from tests.corpus.wrappings import PICTURE, WRAPPINGS
from tests.integration.media_cluster import ASK_S, Client, MediaCluster, Reply, data_uri, each, media_cluster
from tests.picture_server import redirect
from tests.unit.fetch_house import GOOD
from tests.unit.fetch_tries import SOME, TRIES

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900 if os.environ.get("TRIPTYCH_VERIFY") == "full" else 180)]

IS_FULL = os.environ.get("TRIPTYCH_VERIFY") == "full"
NUM_FUZZED = 2000 if IS_FULL else 20
NUM_CROWD = 200
MIB = 1 << 20
# What fits a body of 21 MiB in base64, and not the crowd whose bytes are counted.
MAX_HELD_BYTES = 40 * MIB
AT_A_TIME = 4
MAX_LAG_S, MAX_LAG_SHARE = 0.1, 0.05
MAX_GROWTH_BYTES = {"router": 160 * MIB, "encoder-0": 120 * MIB}
MAX_SWELLING_BYTES = {"router": 320 * MIB, "encoder-0": 200 * MIB}
CODES = {400: "media_invalid", 413: "payload_too_large", 415: "media_unsupported"}
SECRETS = re.compile(r"0x[0-9a-f]{4}|/etc|/tmp|/usr|PIL|Traceback|127\.0\.0\.1")
INGRESSES = ("data", "url")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MediaCluster]:
    folder = tmp_path_factory.mktemp("media")
    with media_cluster(folder, TRIPTYCH_MAX_HELD_BYTES=str(MAX_HELD_BYTES)) as running:
        yield running


def samples() -> list[Sample]:
    return [*taken(), *refused(), *fuzzed(1, NUM_FUZZED)]


def ingresses(number: int) -> Sequence[str]:
    """Of a sample; by turns where there is little time: each kind has several samples."""
    return INGRESSES if IS_FULL else (INGRESSES[number % 2],)


class Truths:
    """What is answered about what a person sees: of a plain PNG, asked alone."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: dict[bytes, asyncio.Task[Reply]] = {}

    async def of(self, shown: Image.Image) -> Reply:
        data = encoded(shown, "PNG")
        if data not in self._known:
            self._known[data] = asyncio.create_task(self._client.ask(data_uri(data), "truth"))
        return await self._known[data]


@pytest.fixture(scope="module")
def alone() -> dict[bytes, Reply]:
    """What is answered about each picture of the crowds, asked by few at a time."""
    return {}


async def truths_of(pictures: Sequence[bytes], client: Client, alone: dict[bytes, Reply]) -> list[Reply]:
    new = [data for data in pictures if data not in alone]
    alone |= zip(new, await each(AT_A_TIME, [client.ask(data_uri(data), "alone") for data in new]), strict=True)
    return [alone[data] for data in pictures]


@asynccontextmanager
async def unharmed(cluster: MediaCluster) -> AsyncIterator[None]:
    """Nobody was started again, nothing is held when it is over, and what it cost is within bounds."""
    workers, decoders = cluster.pids_of_records(), cluster.media_pids()
    resident = {name: cluster.resident_bytes(name) for name in MAX_GROWTH_BYTES}
    yield
    assert cluster.pids_of_records() == workers and cluster.media_pids() == decoders and len(decoders) > 0
    assert await cluster.metric("triptych_held_bytes") == {"": 0.0}
    for name, bound in MAX_GROWTH_BYTES.items():
        assert cluster.resident_bytes(name) - resident[name] < bound, name
        assert cluster.resident_bytes(name, most=True) - resident[name] < MAX_SWELLING_BYTES[name], name


@asynccontextmanager
async def turning(cluster: MediaCluster) -> AsyncIterator[None]:
    """The router's event loop comes back in time, but for what a machine does that runs other tests beside these."""
    before = await cluster.metric("triptych_router_event_loop_lag_seconds_bucket")
    yield
    after = await cluster.metric("triptych_router_event_loop_lag_seconds_bucket")
    assert _share_beyond(MAX_LAG_S, before, after) < MAX_LAG_SHARE


def _share_beyond(lag_s: float, before: dict[str, float], after: dict[str, float]) -> float:
    """Of what was observed between two looks at a histogram's buckets, which are cumulative."""
    counts = {float(label[5:-2].replace("+Inf", "inf")): after[label] - before[label] for label in after}
    within = max(count for bound, count in counts.items() if bound <= lag_s * 1.2)
    assert counts[float("inf")] > 0
    return 1.0 - within / counts[float("inf")]


# --- the corpus -------------------------------------------------------------------------------------------------------


async def fault_of(
    sample: Sample, ingress: str, number: int, cluster: MediaCluster, client: Client, truths: Truths
) -> str:
    """What is not as it was promised, first and again, with a good picture after each that is not taken."""
    if ingress == "data":
        uri = data_uri(sample.data, sample.media_type)
    else:
        suffix = ("png", "jpg", "txt", "svg", "exe")[number % 5]
        uri = cluster.offer(f"/{number}.{suffix}", sample.data, sample.media_type)
    for time in ("first", "again"):
        answer = await client.ask(uri, f"{ingress} {number}")
        fault = await _fault(sample, time, answer, truths)
        if not fault and answer.status != 200:
            good = await client.ask(data_uri(PICTURE), f"good {number % 7}")
            fault = "" if good.is_like(await truths.of(drawn((57, 56)))) else "the good one after it is wrong"
        if fault:
            return f"{ingress}, {time}: {fault}"
    return ""


async def _fault(sample: Sample, time: str, answer: Reply, truths: Truths) -> str:
    allowed = {400, 415} if sample.kind == "fuzz" and sample.status == 400 else {sample.status}
    if answer.status not in allowed or answer.code != CODES.get(answer.status, ""):
        return f"{answer.status} {answer.code} {answer.message}"
    if SECRETS.search(answer.message):
        return f"it tells {answer.message}"
    if sample.shown is None:
        return ""
    if not answer.is_like(await truths.of(sample.shown)):
        return f"{answer.told}, not {(await truths.of(sample.shown)).told}"
    return "" if (answer.cached_tokens > 0) == (time == "again") else f"{answer.cached_tokens} cached tokens"


async def test_every_medium_becomes_what_was_promised_by_every_way(cluster: MediaCluster) -> None:
    async with cluster.client() as client, unharmed(cluster), turning(cluster):
        truths = Truths(client)
        assert not (await truths.of(drawn())).is_like(await truths.of(drawn().transpose(Image.Transpose.ROTATE_180)))
        asked = [(one, ingress, number) for number, one in enumerate(samples()) for ingress in ingresses(number)]
        faults = await each(AT_A_TIME, [fault_of(*which, cluster, client, truths) for which in asked])
        named = {f"{one.name} by {way}": fault for (one, way, _), fault in zip(asked, faults, strict=True) if fault}
        assert named == {}
        cluster.server.answers.clear()


async def test_every_way_of_writing_a_reference(cluster: MediaCluster) -> None:
    async with cluster.client() as client, unharmed(cluster):
        truth = await Truths(client).of(drawn((57, 56)))
        for number, wrapping in enumerate(WRAPPINGS):
            for _ in range(2):
                answer = await client.ask(wrapping.uri, f"wrapping {number}")
                assert answer.status == wrapping.status, (wrapping, answer.message)
                assert not SECRETS.search(answer.message)
                assert answer.is_like(truth) if answer.status == 200 else answer.code == "media_invalid", wrapping


# --- addresses that are not for us ------------------------------------------------------------------------------------

# None that needs a name server: that one stands in for in the tests of the fetcher.
AT_ONCE = [one.url for one in TRIES.values() if not one.names and not one.answers and GOOD not in one.url]
LED_THERE = [*(f"http://[{each}]/" if ":" in each else f"http://{each}/" for each in SOME), "file:///etc/passwd"]


async def test_nobody_gets_the_router_to_call_what_only_it_can_reach(cluster: MediaCluster) -> None:
    """An allowed server is there, and another that nobody allowed."""
    async with cluster.client() as client, unharmed(cluster):
        with socket.create_server(("127.0.0.1", 0)) as canary:
            canary.setblocking(False)
            port = canary.getsockname()[1]
            hosts = ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "0.0.0.0", "[::]", "0x7f000001", "127.1")
            tries = [*AT_ONCE, *(f"http://{host}:{port}/" for host in hosts)]
            for number, location in enumerate([*LED_THERE, f"http://127.0.0.1:{port}/", "/led/0"]):
                cluster.server.answers[f"/led/{number}"] = redirect(location)
                tries.append(cluster.server.url(f"/led/{number}"))
            for url in tries:
                answer = await client.ask(url, "led")
                assert (answer.status, answer.code) == (400, "media_invalid"), (url, answer)
                assert not SECRETS.search(answer.message)
            with pytest.raises(BlockingIOError):
                canary.accept()
        cluster.server.answers["/led/good"] = redirect("/good")
        cluster.offer("/good", PICTURE, "image/png")
        answer = await client.ask(cluster.server.url("/led/good"), "led")
        assert answer.is_like(await Truths(client).of(drawn((57, 56))))


# --- streams ----------------------------------------------------------------------------------------------------------


async def test_a_stream_has_no_200_before_its_first_token(cluster: MediaCluster) -> None:
    """Their headers are good, so it is the encoder that refuses them."""
    failing = [one for one in refused() if one.kind in ("cut short", "damaged")]
    async with cluster.client() as client, unharmed(cluster):
        for number, one in enumerate(failing):
            uri = data_uri(one.data) if number % 2 else cluster.offer("/stream.png", one.data, "image/png")
            for fields in ({}, {"n": 2}):
                answer = await client.ask(uri, "stream", stream=True, **fields)
                assert (answer.status, answer.code) == (400, "media_invalid"), one.name
                assert answer.headers["content-type"] == "application/json"


async def test_a_stream_whose_encoder_says_nothing_ends_in_time_and_not_with_a_200(cluster: MediaCluster) -> None:
    encoder = cluster.pids["encoder-0"]
    async with cluster.client() as client, unharmed(cluster):
        os.kill(encoder, signal.SIGSTOP)
        try:
            answer = await client.ask(
                data_uri(encoded(noise((60, 60), 999), "PNG")), "late", stream=True, timeout_s=1.0
            )
        finally:
            os.kill(encoder, signal.SIGCONT)
        assert (answer.status, answer.code) == (504, "deadline_exceeded")
        assert answer.headers["content-type"] == "application/json"


# --- crowds -----------------------------------------------------------------------------------------------------------


def crowd() -> list[bytes]:
    """Pictures that are all different."""
    return [encoded(noise((57 + number % 30, 56), number), "PNG") for number in range(NUM_CROWD)]


def references(cluster: MediaCluster, pictures: Sequence[bytes]) -> list[str]:
    """Every other by its address."""
    return [
        cluster.offer(f"/crowd/{number}.png", data, "image/png") if number % 2 else data_uri(data)
        for number, data in enumerate(pictures)
    ]


def check_crowd(answers: Sequence[Reply], truths: Sequence[Reply]) -> int:
    """How many were served; all others were told to come again."""
    for answer, truth in zip(answers, truths, strict=True):
        if answer.status == 200:
            assert answer.is_like(truth)
        else:
            assert (answer.status, answer.code) in {(429, "overloaded"), (503, "unavailable")}, answer.message
            assert int(answer.headers["retry-after"]) >= 1
    return sum(answer.status == 200 for answer in answers)


async def test_200_pictures_at_once_are_answered_rightly_or_told_to_come_again(
    cluster: MediaCluster, alone: dict[bytes, Reply]
) -> None:
    async with cluster.client() as client, unharmed(cluster):
        pictures = crowd()
        truths = await truths_of(pictures, client, alone)
        assert len({truth.told for truth in truths}) > NUM_CROWD * 3 // 4, "an answer to another's would not show"
        async with asyncio.timeout(ASK_S):
            answers = await asyncio.gather(*(client.ask(uri, "crowd") for uri in references(cluster, pictures)))
        assert check_crowd(answers, truths) > NUM_CROWD // 2


async def test_what_the_router_cannot_hold_is_told_to_come_again(
    cluster: MediaCluster, alone: dict[bytes, Reply]
) -> None:
    """The encoder stands still, so that all are there at once."""
    encoder, pictures = cluster.pids["encoder-0"], crowd()
    uris = references(cluster, [data + bytes(400_000) for data in pictures])
    async with cluster.client() as client, unharmed(cluster):
        os.kill(encoder, signal.SIGSTOP)
        try:
            asked = [asyncio.create_task(client.ask(uri, "held")) for uri in uris]
            held = await _until_full(cluster, asked)
        finally:
            os.kill(encoder, signal.SIGCONT)
        async with asyncio.timeout(ASK_S):
            answers = await asyncio.gather(*asked)
        assert MAX_HELD_BYTES // 2 < held <= MAX_HELD_BYTES
        assert 20 < check_crowd(answers, await truths_of(pictures, client, alone)) < NUM_CROWD


async def _until_full(cluster: MediaCluster, asked: Sequence[asyncio.Task[Reply]]) -> float:
    """The bytes that the router holds when it has sent some away."""
    await asyncio.wait(asked, timeout=ASK_S, return_when=asyncio.FIRST_COMPLETED)
    return (await cluster.metric("triptych_held_bytes"))[""]
