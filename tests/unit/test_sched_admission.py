"""Who gets the next reservation."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from triptych.sched.admission import AdmissionQueue, Ticket
from triptych.sched.aging import Aging


@dataclass(eq=False)
class Request:
    """`size` is the room that it needs, `length` that of its prompt."""

    size: int
    length: int = 100
    priority: int = 0
    queued_s: float = 0.0

    @property
    def ticket(self) -> Ticket:
        return Ticket(self.length, int(self.queued_s * 1e9), self.priority)


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
    queue: AdmissionQueue[Request] = AdmissionQueue(max_bypass, max_wait_s=10.0, aging=Aging(2.0, 10.0))
    for request in requests:
        queue.push(request, request.ticket)
    return queue


def test_equals_are_served_in_order_of_arrival() -> None:
    queue = queue_of(Request(3), Request(1), Request(2))
    assert sizes(queue.admit(Room(100).reserve, 2, now_ns=0)) == [3, 1]
    assert sizes(queue.admit(Room(100).reserve, 10, now_ns=0)) == [2]
    assert len(queue) == 0


def test_a_blocked_request_is_overtaken_by_those_that_fit_and_keeps_its_place() -> None:
    queue = queue_of(Request(10), Request(1), Request(9), Request(2))
    assert sizes(queue.admit(Room(5).reserve, 10, now_ns=0)) == [1, 2]
    assert sizes(queue.admit(Room(100).reserve, 10, now_ns=0)) == [10, 9]


@pytest.mark.parametrize("per_turn", [1, 3, 100])
def test_a_blocked_head_is_overtaken_a_bounded_number_of_times(per_turn: int) -> None:
    queue = queue_of(Request(10), *(Request(1) for _ in range(50)), max_bypass=4)
    overtakers: list[int] = []
    for _ in range(60):
        overtakers += sizes(queue.admit(Room(5).reserve, per_turn, now_ns=0))
    assert overtakers == [1] * 4
    assert sizes(queue.admit(Room(10).reserve, 1, now_ns=0)) == [10]
    assert sizes(queue.admit(Room(50).reserve, 100, now_ns=0)) == [1] * 46


def test_nobody_is_starved_however_small_the_others_are(seed: int) -> None:
    rng = random.Random(seed)
    queue = queue_of(max_bypass=3)
    arrived: dict[Request, int] = {}
    overtaken: dict[Request, int] = {}
    for _ in range(400):
        request = Request(rng.choice([1, 1, 1, 2, 8]))
        queue.push(request, request.ticket)
        arrived[request], overtaken[request] = len(arrived), 0
        admitted = queue.admit(Room(rng.randint(1, 8)).reserve, rng.randint(0, 3), now_ns=0)
        for winner in admitted:
            del overtaken[winner]
            for waiting in overtaken:
                overtaken[waiting] += arrived[waiting] < arrived[winner]
        assert all(count <= 3 for count in overtaken.values())


def test_no_admission_where_no_place_is_left() -> None:
    queue = queue_of(Request(1))
    assert queue.admit(Room(5).reserve, 0, now_ns=0) == []
    assert queue.admit(Room(5).reserve, -1, now_ns=0) == []
    assert len(queue) == 1


def test_a_request_leaves_the_queue_by_identity() -> None:
    first, second = Request(1), Request(1)
    queue = queue_of(first, second)
    assert queue.remove(first)
    assert not queue.remove(first)
    assert queue.admit(Room(9).reserve, 9, now_ns=0) == [second]


def test_the_short_go_first_and_waiting_makes_shorter() -> None:
    queue = queue_of(Request(1, 50, queued_s=0.0), Request(2, 20, queued_s=1.0), Request(3, 31, queued_s=3.0))
    assert sizes(queue.admit(Room(100).reserve, 9, now_ns=4 * 10**9)) == [2, 1, 3]  # -10, 10 and 21 by then


def test_the_more_urgent_go_first() -> None:
    queue = queue_of(Request(1, 5), Request(2, 500, priority=-1), Request(3, 5, priority=1))
    assert sizes(queue.admit(Room(100).reserve, 9, now_ns=0)) == [2, 1, 3]


def test_the_short_pass_the_long_a_bounded_number_of_times() -> None:
    queue = queue_of(Request(9, 5000), *(Request(1, 5) for _ in range(20)), max_bypass=4)
    assert sizes(queue.admit(Room(100).reserve, 6, now_ns=0)) == [1] * 4 + [9, 1]


def test_the_urgent_pass_without_being_counted_until_a_request_has_waited_long_enough() -> None:
    batch = Request(9, 5, priority=100)
    queue = queue_of(batch, max_bypass=4)
    for number in range(50):
        urgent = Request(1, 5, priority=-1, queued_s=number / 10)
        queue.push(urgent, urgent.ticket)
        assert queue.admit(Room(8).reserve, 9, now_ns=number * 10**8) == [urgent]
    urgent = Request(1, 5, priority=-1, queued_s=9.9)
    queue.push(urgent, urgent.ticket)
    assert queue.admit(Room(8).reserve, 9, now_ns=10 * 10**9) == []
    assert queue.admit(Room(100).reserve, 9, now_ns=10 * 10**9) == [batch, urgent]


def test_one_call_makes_a_bounded_number_of_offers() -> None:
    offers: list[Request] = []
    queue = queue_of(*(Request(9) for _ in range(100)))
    assert queue.admit(lambda request: bool(offers.append(request)), 9, now_ns=0) == []
    assert len(offers) == 32
