"""Who gets the next reservation, and which pictures share a pass."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from triptych.sched.admission import AdmissionQueue
from triptych.sched.encode import plan_batch


@dataclass(eq=False)
class Request:
    size: int


class Room:
    def __init__(self, free: int) -> None:
        self.free = free

    def reserve(self, request: Request) -> bool:
        if request.size > self.free:
            return False
        self.free -= request.size
        return True


def sizes(requests: list[Request]) -> list[int]:
    return [request.size for request in requests]


def queue_of(*requests: Request, max_bypass: int = 16) -> AdmissionQueue[Request]:
    queue: AdmissionQueue[Request] = AdmissionQueue(max_bypass)
    for request in requests:
        queue.push(request)
    return queue


def test_first_come_first_served() -> None:
    queue = queue_of(Request(3), Request(1), Request(2))
    assert sizes(queue.admit(Room(100).reserve, 2)) == [3, 1]
    assert sizes(queue.admit(Room(100).reserve, 10)) == [2]
    assert len(queue) == 0


def test_a_blocked_request_is_overtaken_by_those_that_fit_and_keeps_its_place() -> None:
    queue = queue_of(Request(10), Request(1), Request(9), Request(2))
    assert sizes(queue.admit(Room(5).reserve, 10)) == [1, 2]
    assert sizes(queue.admit(Room(100).reserve, 10)) == [10, 9]


@pytest.mark.parametrize("per_turn", [1, 3, 100])
def test_a_blocked_head_is_overtaken_a_bounded_number_of_times(per_turn: int) -> None:
    queue = queue_of(Request(10), *(Request(1) for _ in range(50)), max_bypass=4)
    overtakers: list[int] = []
    for _ in range(60):
        overtakers += sizes(queue.admit(Room(5).reserve, per_turn))
    assert overtakers == [1] * 4
    assert sizes(queue.admit(Room(10).reserve, 1)) == [10]
    assert sizes(queue.admit(Room(50).reserve, 100)) == [1] * 46


def test_nobody_is_starved_however_small_the_others_are(seed: int) -> None:
    rng = random.Random(seed)
    queue = queue_of(max_bypass=3)
    arrived: dict[Request, int] = {}
    overtaken: dict[Request, int] = {}
    for _ in range(400):
        request = Request(rng.choice([1, 1, 1, 2, 8]))
        queue.push(request)
        arrived[request], overtaken[request] = len(arrived), 0
        admitted = queue.admit(Room(rng.randint(1, 8)).reserve, rng.randint(0, 3))
        for winner in admitted:
            del overtaken[winner]
            for waiting in overtaken:
                overtaken[waiting] += arrived[waiting] < arrived[winner]
        assert all(count <= 3 for count in overtaken.values())


def test_no_admission_where_no_place_is_left() -> None:
    queue = queue_of(Request(1))
    assert queue.admit(Room(5).reserve, 0) == []
    assert queue.admit(Room(5).reserve, -1) == []
    assert len(queue) == 1


def test_a_request_leaves_the_queue_by_identity() -> None:
    first, second = Request(1), Request(1)
    queue = queue_of(first, second)
    assert queue.remove(first)
    assert not queue.remove(first)
    assert queue.admit(Room(9).reserve, 9) == [second]


@pytest.mark.parametrize(
    ("patches", "count"),
    [
        ([], 0),
        ([100], 1),
        ([101], 1),  # alone it goes, however large
        ([50, 50], 2),
        ([50, 51], 1),
        ([60, 50, 10], 1),  # in order of arrival: the third does not overtake
        ([10] * 9, 4),
    ],
)
def test_a_pass_takes_what_fits_in_order_and_at_least_one(patches: list[int], count: int) -> None:
    assert plan_batch(patches, max_patches=100, max_items=4) == count
