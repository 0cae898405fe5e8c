"""Room for KV, and who may write to it."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.core.errors import InvalidRequest
from triptych.core.grant import Grant, GroupRegions, Region
from triptych.core.ids import CAPABILITY_BYTES
from triptych.rpc import check
from triptych.rpc.convert.limits import INT64, MAX_GROUPS, MAX_PAGES, MAX_RANGES
from triptych.rpc.convert.names import worker_ref_from_proto
from triptych.wire.v1 import common_pb2 as pb


def region_to_proto(region: Region) -> pb.Region:
    return pb.Region(first_page=region.first_page, num_pages=region.num_pages)


def region_from_proto(message: pb.Region) -> Region:
    first = check.integer("regions.first_page", message.first_page, 0, MAX_PAGES - 1)
    return Region(first, check.integer("regions.num_pages", message.num_pages, 1, MAX_PAGES - first))


def group_to_proto(group: GroupRegions) -> pb.GroupRegions:
    return pb.GroupRegions(
        cache_group=group.cache_group, rank=group.rank, regions=[region_to_proto(region) for region in group.regions]
    )


def group_from_proto(message: pb.GroupRegions) -> GroupRegions:
    """No page twice."""
    check.at_most("regions", message.regions, MAX_RANGES)
    regions = tuple(region_from_proto(region) for region in message.regions)
    end = 0
    for region in sorted(regions, key=lambda entry: entry.first_page):
        if region.first_page < end:
            raise InvalidRequest("a page is named twice in one group", param="regions")
        end = region.first_page + region.num_pages
    return GroupRegions(
        check.integer("cache_group", message.cache_group, 0, MAX_GROUPS),
        check.integer("rank", message.rank, 0, MAX_GROUPS),
        regions,
    )


def groups_from_proto(messages: Sequence[pb.GroupRegions]) -> tuple[GroupRegions, ...]:
    check.at_most("groups", messages, MAX_GROUPS)
    groups = tuple(group_from_proto(group) for group in messages)
    if len({(group.cache_group, group.rank) for group in groups}) != len(groups):
        raise InvalidRequest("a (cache group, rank) is named twice", param="groups")
    return groups


def grant_to_proto(grant: Grant) -> pb.Grant:
    return pb.Grant(
        grant_id=grant.grant_id,
        worker_id=grant.worker_id,
        epoch=grant.epoch,
        capability=grant.capability,
        num_pages=grant.num_pages,
        generation=grant.generation,
        groups=[group_to_proto(group) for group in grant.groups],
    )


def grant_from_proto(message: pb.Grant) -> Grant:
    worker = worker_ref_from_proto(message.worker_id, message.epoch)
    return Grant(
        grant_id=check.name("grant_id", message.grant_id),
        worker_id=worker.worker_id,
        epoch=worker.epoch,
        capability=capability_from_proto(message.capability),
        num_pages=check.integer("num_pages", message.num_pages, 0, MAX_PAGES),
        generation=check.integer("generation", message.generation, 0, INT64),
        groups=groups_from_proto(message.groups),
    )


def capability_from_proto(value: bytes) -> bytes:
    return check.exact_bytes("capability", value, CAPABILITY_BYTES)
