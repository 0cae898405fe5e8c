"""What signals ask of the launcher."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from triptych.cli.signals import ECHO_SECONDS, StopSignals

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    """Also where whoever started the tests ignores one, as nohup does."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in NUMBERS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_the_first_asks_to_stop_its_echo_for_nothing_more_and_a_later_one_to_hurry(number: signal.Signals) -> None:
    now_s = 100.0
    signals = StopSignals(lambda: now_s)
    assert not signals.stop_wanted
    for moment_s, hurry in ((100.0, False), (100.0, False), (100.0 + 0.9 * ECHO_SECONDS, False), (101.0, True)):
        now_s = moment_s
        signal.raise_signal(number)
        assert signals.stop_wanted
        assert signals.hurry_wanted is hurry


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals = StopSignals()
    signal.raise_signal(signal.SIGHUP)
    assert not signals.stop_wanted
