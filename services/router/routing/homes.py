"""Who was given what, before the workers say what they hold.

Between the moment when a prompt is sent and the one when the worker tells of its pages, and with workers that tell of
nothing, the router goes by its own memory. Of each prompt one number is kept, that of its last full page, and the next
prompt is looked up by all its pages, the last first:

    answered   [ page | page | pa…]                                     --> home
    asked      [ page | page | page | page | …]
                      '-- known? ------'

A picture is remembered by the encoder that it was sent to, and a session, where the caller names one, by who served it
last. Nothing but speed depends on what is found here. What a worker says that it has dropped is not believed any more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from services.router.routing.prompt import DEFAULT_PAGE_TOKENS, Prompt
from triptych.core.ids import WorkerRef

MAX_CONVERSATIONS = 65_536

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Home:
    """The processes that hold a conversation's KV."""

    decode: WorkerRef
    prefill: WorkerRef


@dataclass(frozen=True, slots=True)
class Found:
    """`num_tokens` of the prompt are believed to be at `home`, on `account` of "home" (it was given a prompt
    that began so), "session" or "sibling" (it serves another choice of this very request)."""

    home: Home
    num_tokens: int
    account: str = "home"


class Recent(Generic[K, V]):
    """A dictionary, bounded: what was not used for longest goes first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def get(self, key: K) -> V | None:
        value = self._entries.get(key)
        if value is not None:
            self._entries.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        self._entries[key] = value
        self._entries.move_to_end(key)
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def drop(self, key: K, value: V) -> None:
        """If that is what stands there."""
        if self._entries.get(key) == value:
            del self._entries[key]


class Homes:
    """Owner of the memory."""

    def __init__(self, max_conversations: int = MAX_CONVERSATIONS) -> None:
        self._by_page: Recent[int, Home] = Recent(max_conversations)
        self._by_session: Recent[tuple[int, str], Home] = Recent(max_conversations)
        self._encoders: Recent[int, WorkerRef] = Recent(max_conversations)

    def remember(self, prompt: Prompt, home: Home) -> None:
        numbers = prompt.pages.get(DEFAULT_PAGE_TOKENS, ())
        if numbers:
            self._by_page.put(numbers[-1], home)
        if prompt.session is not None:
            self._by_session.put((prompt.root, prompt.session), home)

    def find(self, prompt: Prompt) -> Found | None:
        """Who was given the longest beginning of this prompt, the whole of it included."""
        numbers, known = prompt.pages.get(DEFAULT_PAGE_TOKENS, ()), self._by_page
        for index in range(len(numbers) - 1, -1, -1):
            if numbers[index] in known and (home := known.get(numbers[index])) is not None:
                return Found(home, min((index + 1) * DEFAULT_PAGE_TOKENS, prompt.num_tokens - 1))
        return None

    def of_session(self, prompt: Prompt) -> Home | None:
        """Who served the session last."""
        return None if prompt.session is None else self._by_session.get((prompt.root, prompt.session))

    def sent(self, number: int, encoder: WorkerRef) -> None:
        """A picture, by its number, was given to an encoder."""
        self._encoders.put(number, encoder)

    def encoder_of(self, number: int) -> WorkerRef | None:
        return self._encoders.get(number)

    def dropped_pages(self, worker: WorkerRef, numbers: Iterable[int]) -> None:
        """The worker does not hold those pages any more."""
        known = self._by_page
        for number in numbers:
            if number in known and (home := known.get(number)) is not None and home.prefill == worker:
                known.drop(number, home)

    def dropped_pictures(self, encoder: WorkerRef, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._encoders.drop(number, encoder)
