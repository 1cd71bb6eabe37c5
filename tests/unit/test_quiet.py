"""Timing while the host is quiet."""

from __future__ import annotations

import pytest

from liveroll.tools.quiet import QuietHost, time_python

QUICK, SLOW = 1.0, 2.0


class Host:
    """A host whose time is only counted, and which is slow between some seconds of it."""

    def __init__(self, *slow: tuple[float, float]) -> None:
        self._slow = slow
        self.now = 0.0
        self.begun: list[float] = []

    @property
    def pace(self) -> float:
        return SLOW if any(low <= self.now < high for low, high in self._slow) else QUICK

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def work(self) -> float:
        return self.pace

    def call(self, seconds: float):
        """What takes so many seconds; it returns in which of the calls it was."""

        def run() -> int:
            self.begun.append(self.now)
            self.now += seconds
            return len(self.begun)

        return run

    def quiet(self, share: float) -> QuietHost:
        return QuietHost(share, work_ms=self.work, clock=lambda: self.now, sleep=self.sleep)


def test_calls_wait_for_a_quiet_host():
    """Guards against routes compared by calls of which some ran at half the speed of others."""
    host = Host((2.0, 3.0))
    quiet = host.quiet(1.0)
    assert [quiet.run(host.call(2.0)), quiet.run(host.call(0.1))] == [1, 2]
    assert host.begun == [0.0, pytest.approx(3.0, abs=0.03)]


def test_a_call_that_was_disturbed_is_run_again():
    """Guards against the time of a call during which the host became slow, and against the first result returned."""
    host = Host((5.5, 7.0))
    quiet = host.quiet(1.0)
    quiet.run(host.call(5.0))
    assert quiet.run(host.call(1.0)) == 3
    assert host.begun == [0.0, 5.0, pytest.approx(7.0, abs=0.03)]


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_waiting_ends(share):
    """Guards against a host that stays slow, where a command waits for ever, or a quick calibration for minutes."""
    host = Host((10.0, 1e9))
    quiet = host.quiet(share)
    for _ in range(20):
        quiet.run(host.call(1.0))
    assert len(host.begun) >= 20
    # A call begun just before the patience ends may be repeated.
    assert 20.0 <= host.now <= 20.0 + share * 20 + 0.1


def test_nothing_is_waited_for_without_time_spent():
    """Guards against a first call that waits, before anything is known of how long calls take."""
    host = Host((0.0, 1e9))
    assert host.quiet(1.0).run(host.call(0.0)) == 1
    assert host.begun == [0.0]


def test_what_was_thought_quiet_may_be_slow():
    """Guards against a host that is slow when it is first looked at, and counts as quiet ever after."""
    host = Host((0.0, 4.0), (6.1, 7.0))
    quiet = host.quiet(1.0)
    for _ in range(3):
        quiet.run(host.call(2.0))
    host.sleep(0.2)
    quiet.run(host.call(0.1))
    assert host.begun == [0.0, 2.0, 4.0, pytest.approx(7.0, abs=0.03)]


def test_interruptions_do_not_count():
    """Guards against a wait for each time that the system runs something else for a moment."""
    host = Host()
    paces = iter([QUICK] * 30 + [SLOW, SLOW, QUICK] * 4)
    quiet = QuietHost(1.0, work_ms=lambda: next(paces), clock=lambda: host.now, sleep=host.sleep)
    for _ in range(2):
        quiet.run(host.call(1.0))
    assert host.begun == [0.0, 1.0]


def test_python_takes_time():
    """Guards against a piece of work that is none, by which every host is quiet."""
    assert time_python() > 0.01
