"""What a path would take, in seconds, stage by stage.

    encoders   │ wait │ encode what is cached nowhere │──────┐
    prefill    │ wait for the prompts before it ─────────────┤ compute what it holds no KV of │─► first token
    decode                                                    send what decode holds no KV of │─► the others

Rates are those that the workers measured. What is held is what they told, and until they did what they were given.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.router.placement import Path
from services.router.routing.board import Board
from services.router.routing.homes import Found, Home, Homes
from services.router.routing.index import CacheIndex
from services.router.routing.prompt import Picture, Prompt
from services.router.routing.rendezvous import EncoderLoad, choose_encoder, in_order
from triptych.core.cache_feed import Holding
from triptych.core.worker import WorkerInfo

SESSION_SHARE = 0.5
"""Of a prompt, believed to be with who served its session last, where nothing else is known."""
SEND_S_PER_TOKEN = 5e-6
HOP_S = 0.002
"""What a stage in another process costs, where it is known what stages take at all."""


@dataclass(frozen=True, slots=True)
class Held:
    """Tokens at the beginning of the prompt whose KV a worker holds, and by what account: "told", "home", "session" or
    "sibling"; empty where there is none."""

    num_tokens: int = 0
    account: str = ""


@dataclass(frozen=True, slots=True)
class Share:
    """Where the embedding of a picture comes from.

    `source`: "kv" (prefill holds the KV of its span) or "landed" (the embedding lies at prefill): nobody is asked; then
    "cached" (an encoder holds it, or makes it just now), "rendezvous", or "overflow" (as before, but that one had too
    much to do).
    """

    picture: Picture
    source: str
    encoder: WorkerInfo | None = None

    @property
    def is_encoded(self) -> bool:
        return self.source in ("rendezvous", "overflow")


@dataclass(frozen=True, slots=True)
class Forecast:
    """Of one path. Seconds, but for `new_tokens`, which prefill would compute, and `pages_short`, what decode would
    lack."""

    path: Path
    held: Held
    held_at_decode: int
    shares: tuple[Share, ...]
    new_tokens: int
    pages_short: int
    wait_s: float
    encode_s: float
    tower_s: float
    compute_s: float
    send_s: float
    hop_s: float
    used_share: float
    num_sequences: int

    @property
    def new_patches(self) -> int:
        return sum(share.picture.num_patches for share in self.shares if share.is_encoded)


class Forecaster:
    """Of one request. What does not depend on the other stages is computed once a worker."""

    def __init__(
        self, prompt: Prompt, board: Board, index: CacheIndex, homes: Homes, known: Found | None = None
    ) -> None:
        """`known`: who has the prompt, where the caller knows better."""
        self._prompt = prompt
        self._board = board
        self._index = index
        self._homes = homes
        self._found = known or homes.find(prompt) or _of_session(prompt, homes.of_session(prompt))
        self._held: dict[str, Held] = {}
        self._encodes: dict[str, tuple[tuple[Share, ...], float, float]] = {}

    def forecast(self, path: Path) -> Forecast:
        prompt, view, decode = self._prompt, self._board.view(path.prefill), self._board.view(path.decode)
        held, is_split = self.held(path.prefill), path.decode is not path.prefill
        at_decode = self.held(path.decode).num_tokens if is_split else held.num_tokens
        new_tokens = max(prompt.num_tokens - held.num_tokens, 1)
        shares, encode_s, tower_s = self._encode(path, held)
        hops = is_split + any(share.encoder not in (None, path.prefill) for share in shares)
        return Forecast(
            path=path,
            held=held,
            held_at_decode=at_decode,
            shares=shares,
            new_tokens=new_tokens,
            pages_short=_pages_short(path.decode, decode.free_pages, prompt.num_tokens - at_decode),
            wait_s=view.waiting_tokens / view.tokens_per_s,
            encode_s=encode_s,
            tower_s=tower_s,
            compute_s=new_tokens / view.tokens_per_s,
            # Who says nothing of what stages take is not better for doing more of them: then all seem to send.
            send_s=(prompt.num_tokens - at_decode) * SEND_S_PER_TOKEN if is_split or not view.is_measured else 0.0,
            hop_s=hops * HOP_S if view.is_measured else 0.0,
            used_share=decode.used_share,
            num_sequences=decode.num_sequences,
        )

    def held(self, worker: WorkerInfo) -> Held:
        """Of the prompt, at a prefill or a decode worker."""
        held = self._held.get(worker.worker_id)
        if held is None:
            held = self._held[worker.worker_id] = self._look(worker)
        return held

    def shares_again(self, path: Path, indices: Collection[int]) -> tuple[Share, ...]:
        """Who encodes those pictures, though they were believed to be there."""
        loads, shares = [self._load(encoder) for encoder in path.encoders], []
        for picture in self._prompt.pictures:
            if picture.index in indices:
                shares.append(self._elsewhere(picture, path, loads))
        return tuple(shares)

    def _look(self, worker: WorkerInfo) -> Held:
        ref, found, told = worker.ref, self._found, 0
        if size := worker.page_tokens:
            num_pages = self._index.num_pages(ref, self._prompt.numbers(size))
            told = min(num_pages, self._prompt.num_reusable(size)) * size
        if found is not None and found.num_tokens > told and ref in (found.home.prefill, found.home.decode):
            return Held(found.num_tokens, found.account)
        return Held(told, "told") if told else Held()

    def _encode(self, path: Path, held: Held) -> tuple[tuple[Share, ...], float, float]:
        """Where each picture comes from; seconds until all are there; seconds of towers for what is new."""
        if not self._prompt.pictures:
            return (), 0.0, 0.0
        key = path.prefill.worker_id  # which is all that a path's encoders depend on
        known = self._encodes.get(key)
        if known is None:
            known = self._encodes[key] = self._share_out(path, held)
        return known

    def _share_out(self, path: Path, held: Held) -> tuple[tuple[Share, ...], float, float]:
        loads = [self._load(encoder) for encoder in path.encoders]
        shares: list[Share] = []
        encode_s = tower_s = 0.0
        taken: dict[bytes, Share] = {}  # the same picture twice is encoded once
        for picture in self._prompt.pictures:
            share = self._share(picture, path, held, loads)
            if picture.identity in taken and share.is_encoded:
                share = Share(picture, "cached", taken[picture.identity].encoder)
            shares.append(share)
            if share.is_encoded:
                taken[picture.identity] = share
                at = path.encoders.index(share.encoder)
                load = loads[at]
                loads[at] = EncoderLoad(load.worker_id, load.waiting_patches + picture.num_patches, load.patches_per_s)
                encode_s = max(encode_s, loads[at].waiting_patches / load.patches_per_s)
                tower_s += picture.num_patches / load.patches_per_s
        return tuple(shares), encode_s, tower_s

    def _share(self, picture: Picture, path: Path, held: Held, loads: Sequence[EncoderLoad]) -> Share:
        if held.account == "told" and picture.end <= held.num_tokens:
            return Share(picture, "kv")
        if self._index.holds(path.prefill.ref, Holding.LANDED, picture.number):
            return Share(picture, "landed")
        return self._elsewhere(picture, path, loads)

    def _elsewhere(self, picture: Picture, path: Path, loads: Sequence[EncoderLoad]) -> Share:
        holder = self._holder(picture, path.encoders)
        if holder is not None:
            return Share(picture, "cached", holder)
        chosen = choose_encoder(picture.identity, picture.num_patches, loads)
        first = in_order(picture.identity, loads)[0]
        return Share(picture, "rendezvous" if chosen == first else "overflow", path.encoders[chosen])

    def _holder(self, picture: Picture, encoders: Sequence[WorkerInfo]) -> WorkerInfo | None:
        for encoder in encoders:
            if self._index.holds(encoder.ref, Holding.ENCODED, picture.number):
                return encoder
        sent = self._homes.encoder_of(picture.number)
        return next((encoder for encoder in encoders if encoder.ref == sent), None)

    def _load(self, encoder: WorkerInfo) -> EncoderLoad:
        view = self._board.view(encoder)
        return EncoderLoad(encoder.worker_id, view.waiting_patches, view.patches_per_s)


def _of_session(prompt: Prompt, home: Home | None) -> Found | None:
    return None if home is None else Found(home, int(prompt.num_tokens * SESSION_SHARE), "session")


def _pages_short(decode: WorkerInfo, free_pages: int | None, new_tokens: int) -> int:
    if free_pages is None or not decode.page_tokens:
        return 0
    return max(-(-new_tokens // decode.page_tokens) - free_pages, 0)
