"""Whether the stages can hand over to each other: what differs in number formats only shows when a request comes."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.cli.checks.finding import Finding, fail, ok, warn
from triptych.cli.checks.workers import Wanted
from triptych.core.kv_format import Conversion, KvDtype, KvTerms, PageFormat, conversion, why_not
from triptych.core.worker import Role

NAME = "handover"
_ONE_DTYPE = "give both one --dtype (TRIPTYCH_DTYPE, or the tables of the file)"


def handover(workers: Sequence[Wanted]) -> Finding:
    """Each worker that is handed something must have one that can hand it over."""
    senders = [worker for worker in workers if Role.PREFILL in worker.roles]
    for decode in workers:
        if decode.shares_pool and senders and (reason := _no_kv(senders, decode)):
            return fail(NAME, f"no prefill worker can hand over to {decode.name}: {reason}", _ONE_DTYPE)
    towers = [worker for worker in workers if Role.ENCODER in worker.roles]
    for prefill in senders:
        if prefill.shares_landing and towers and all(tower.dtype != prefill.dtype for tower in towers):
            reason = f"they encode in {towers[0].dtype}, it computes in {prefill.dtype}"
            return fail(NAME, f"no encoder can send to {prefill.name}: {reason}", _ONE_DTYPE)
    rounded = [worker.name for worker in workers if worker.shares_pool and _is_rounded(senders, worker)]
    if rounded:
        return warn(NAME, f"KV is rounded on its way to {', '.join(rounded)}", f"{_ONE_DTYPE} for exact answers")
    return ok(NAME, "what one stage computes, the next can take")


def _terms(worker: Wanted) -> KvTerms:
    sizes = worker.sizes
    may_narrow = sizes.allow_kv_narrowing and not sizes.strict
    return KvTerms(PageFormat(sizes.page_tokens, KvDtype(worker.dtype)), may_narrow)


def _no_kv(senders: Sequence[Wanted], decode: Wanted) -> str | None:
    """Why none of them can; None when one can."""
    reasons = [why_not(_terms(sender), _terms(decode)) for sender in senders]
    return None if None in reasons else reasons[0]


def _is_rounded(senders: Sequence[Wanted], decode: Wanted) -> bool:
    """By whoever can: a sender that need not round is taken before one that must."""
    found = {conversion(KvDtype(sender.dtype), KvDtype(decode.dtype)) for sender in senders}
    return Conversion.NARROWED in found and not found & {Conversion.NONE, Conversion.WIDENED}
