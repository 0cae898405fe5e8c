"""Which workers served a conversation last, so that its next turn finds its KV where it is.

A turn's prompt begins with the whole prompt of the turn before. So one number is kept of each prompt that was answered,
and the next prompt is looked up by all its beginnings, the longest first:

    answered   [ system, question ]                                     --> home
    asked      [ system, question, answer, question ]
               '--- known? ------'

The same prompt once more is no next turn: it would draw all who ask the same, or share a system prompt, to one worker.

Nothing but speed depends on what is found here: workers compare the ids themselves. The numbers begin with the model's
weights and the tenant's salt, and with a secret of the process, so tenants do not meet.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from triptych.core.ids import WorkerRef
from triptych.core.plan import Plan

MAX_CONVERSATIONS = 65_536


@dataclass(frozen=True, slots=True)
class Home:
    """The processes that hold a conversation's KV."""

    decode: WorkerRef
    prefill: WorkerRef


class Homes:
    """Owner of the memory, bounded: what was not used for longest goes first."""

    def __init__(self, max_conversations: int = MAX_CONVERSATIONS) -> None:
        self._max_conversations = max_conversations
        self._secret = secrets.token_bytes(16)
        self._by_prompt: OrderedDict[int, Home] = OrderedDict()

    def find(self, plan: Plan) -> tuple[int, Home | None]:
        """The number to remember this prompt by, and who served the longest one that it goes on from."""
        *beginnings, whole = self._numbers(plan)
        for number in reversed(beginnings):
            home = self._by_prompt.get(number)
            if home is not None:
                self._by_prompt.move_to_end(number)
                return whole, home
        return whole, None

    def remember(self, number: int, home: Home) -> None:
        self._by_prompt[number] = home
        self._by_prompt.move_to_end(number)
        while len(self._by_prompt) > self._max_conversations:
            self._by_prompt.popitem(last=False)

    def _numbers(self, plan: Plan) -> Iterator[int]:
        """One for each beginning of the prompt, in which pictures stand by their identity; the whole prompt's last."""
        values = list(plan.compact_ids)
        for item in plan.items:
            for run in item.ranges:
                values[run.compact_index] = hash(item.identity)
        nothing = hash((self._secret, plan.model_fingerprint, plan.cache_salt))
        return accumulate(values, lambda number, value: hash((number, value)), initial=nothing)
