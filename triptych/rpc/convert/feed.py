"""What a worker tells of its caches and its load."""

from __future__ import annotations

from triptych.core.cache_feed import Change, FeedKind, FeedMessage, Holding, WorkerLoad
from triptych.rpc import check
from triptych.rpc.convert.limits import INT63, MAX_FEED_NUMBERS, MAX_PAGES
from triptych.wire.v1 import feed_pb2 as pb

MAX_PER_S = 1e12
_KIND: dict[pb.FeedKind, FeedKind] = {
    pb.FEED_KIND_SNAPSHOT: FeedKind.SNAPSHOT,
    pb.FEED_KIND_PART: FeedKind.PART,
    pb.FEED_KIND_DELTA: FeedKind.DELTA,
}
_HOLDING: dict[pb.Holding, Holding] = {
    pb.HOLDING_PAGE: Holding.PAGE,
    pb.HOLDING_LANDED: Holding.LANDED,
    pb.HOLDING_ENCODED: Holding.ENCODED,
}
_KIND_TO = {domain: wire for wire, domain in _KIND.items()}
_HOLDING_TO = {domain: wire for wire, domain in _HOLDING.items()}


def feed_to_proto(message: FeedMessage) -> pb.WatchResponse:
    return pb.WatchResponse(
        epoch=message.epoch,
        sequence=message.sequence,
        kind=_KIND_TO[message.kind],
        changes=[
            pb.HoldingChange(holding=_HOLDING_TO[holding], stored=change.stored, removed=change.removed)
            for holding, change in message.changes.items()
        ],
        load=None if message.load is None else _load_to_proto(message.load),
    )


def feed_from_proto(message: pb.WatchResponse) -> FeedMessage:
    check.at_most("changes", message.changes, len(_HOLDING))
    changes: dict[Holding, Change] = {}
    for change in message.changes:
        check.at_most("stored", change.stored, MAX_FEED_NUMBERS)
        check.at_most("removed", change.removed, MAX_FEED_NUMBERS)
        holding = check.choice("holding", _HOLDING, change.holding)
        changes[holding] = Change(tuple(change.stored), tuple(change.removed))
    return FeedMessage(
        epoch=check.integer("epoch", message.epoch, 1, INT63),
        sequence=check.integer("sequence", message.sequence, 0, INT63),
        kind=check.choice("kind", _KIND, message.kind),
        changes=changes,
        load=_load_from_proto(message.load) if message.HasField("load") else None,
    )


def _load_to_proto(load: WorkerLoad) -> pb.WorkerLoad:
    return pb.WorkerLoad(
        waiting_tokens=load.waiting_tokens,
        waiting_patches=load.waiting_patches,
        free_pages=load.free_pages,
        num_decoding=load.num_decoding,
        tokens_per_s=load.tokens_per_s,
        patches_per_s=load.patches_per_s,
    )


def _load_from_proto(message: pb.WorkerLoad) -> WorkerLoad:
    return WorkerLoad(
        waiting_tokens=check.integer("waiting_tokens", message.waiting_tokens, 0, INT63),
        waiting_patches=check.integer("waiting_patches", message.waiting_patches, 0, INT63),
        free_pages=_optional(message, "free_pages", MAX_PAGES),
        num_decoding=check.integer("num_decoding", message.num_decoding, 0, MAX_PAGES),
        tokens_per_s=_rate(message, "tokens_per_s"),
        patches_per_s=_rate(message, "patches_per_s"),
    )


def _optional(message: pb.WorkerLoad, field: str, limit: int) -> int | None:
    return check.integer(field, getattr(message, field), 0, limit) if message.HasField(field) else None


def _rate(message: pb.WorkerLoad, field: str) -> float | None:
    if not message.HasField(field):
        return None
    return check.number(field, getattr(message, field), 1e-6, MAX_PER_S)
