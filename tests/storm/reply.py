"""What a storm hears of a request, and whether it is right."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np
import torch

from tests.parity.compare import LOGITS_WITHIN
from tests.storm.wishes import Wish
from triptych.core.errors import TriptychError
from triptych.core.ids import AttemptRef
from triptych.core.plan import FinishReason, Token


class StormFailed(AssertionError):
    """A promise was broken. The message says which, and by which request."""


@dataclass
class Reply:
    """The tokens of one wish, over whatever stages and attempts they came, and its one terminal reply."""

    wish: Wish
    tokens: list[Token] = field(default_factory=list)
    reason: FinishReason | None = None
    error: TriptychError | None = None

    @property
    def has_ended(self) -> bool:
        return self.reason is not None or self.error is not None

    def heard(self, tokens: SequenceOf[Token]) -> None:
        for token in tokens:
            self._demand(not self.has_ended, f"token {token.index} after the end")
            self._demand(token.index == len(self.tokens), f"token {token.index} as number {len(self.tokens)}")
            self.tokens.append(token)
            right = self.wish.expected[: len(self.tokens)]
            self._demand(self.ids == right, f"says {self.ids} instead of {right}")

    def finished(self, reason: FinishReason) -> None:
        self._demand(not self.has_ended, "a second end")
        self.reason = reason
        self._demand(self.ids == self.wish.expected, f"ends with {self.ids} instead of {self.wish.expected}")
        self._demand(reason is self.wish.reason, f"ends by {reason} instead of {self.wish.reason}")

    def failed(self, error: TriptychError) -> None:
        self._demand(not self.has_ended, f"a second end, {error!r}")
        self.error = error

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token.id for token in self.tokens)

    def _demand(self, holds: bool, what: str) -> None:
        if not holds:
            raise StormFailed(f"{self.wish}: {what}")


class LogitsWitness:
    """Sees the logits of every token that an engine samples. Called on the engines' threads: it notes what is wrong,
    and `check` raises it."""

    def __init__(self, find: Callable[[AttemptRef], Wish | None]) -> None:
        self._find = find
        self.complaints: list[str] = []
        self.num_rows = 0
        self.max_difference = 0.0

    def __call__(self, ref: AttemptRef, index: int, logits: torch.Tensor) -> None:
        wish = self._find(ref)
        if wish is None or index >= len(wish.truth.logits):
            return
        self.num_rows += 1
        if not bool(torch.isfinite(logits).all()):
            self.complaints.append(f"{wish}: poison in the logits of token {index}")
            return
        difference = float(np.abs(logits.numpy() - wish.truth.logits[index]).max())
        self.max_difference = max(self.max_difference, difference)
        if difference > LOGITS_WITHIN:
            self.complaints.append(f"{wish}: the logits of token {index} are off by {difference:.2g}")

    def check(self) -> None:
        if self.complaints:
            raise StormFailed("; ".join(self.complaints[:4]))
