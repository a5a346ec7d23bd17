"""When a server ends, in virtual time: each signal, grace, client that leaves or stays, and environment that hangs.

That the signals reach the event loop of a real process, however it serves: tests/core/server/test_signals.py.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bridge.core.server.shutdown import CLOSE_TIMEOUT, Shutdown
from bridge.core.worlds.scheduling import PendingResult, Scheduler
from bridge.errors import Code, SettingError
from bridge.testing import VirtualClock

INTERRUPT_TIMEOUT = 1.5
"""Seconds that environments have to be closed after Ctrl-C."""
LOOK = 0.02
"""Seconds between two looks whether the last client has left."""
NEVER = float("inf")


class Ended(BaseException):
    """The process was ended at once."""


class Process:
    """A process of a world that does not end by itself."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.abandoned_at: float | None = None

    def abandon(self) -> None:
        self.abandoned_at = self.clock.now()


class House:
    """A server without sockets: clients that leave at their times, and worlds that close or do not."""

    def __init__(self, leaves: float | Sequence[float] = 0.0, closes: float = 0.0, drain_timeout: float = 5.0) -> None:
        self.clock = VirtualClock()
        self.scheduler = Scheduler(self.clock.now)
        self.leaves, self.closes = leaves if isinstance(leaves, Sequence) else [leaves], closes
        self.cut_off: list[tuple[float, Any]] = []
        self.drains: list[float] = []
        self.ended_at: float | None = None
        self.wakeup, writer = os.pipe()
        os.set_blocking(writer, False)
        self.loop = SimpleNamespace(scheduler=self.scheduler, serve=lambda: None, wakeup_fd=writer, on_signal=None)
        self.finished = threading.Event()
        serving = SimpleNamespace(finished=self.finished, finish=self._finish, in_call=closes == NEVER)
        self.process = Process(self.clock)
        self.shutdown = Shutdown(
            self.loop,  # type: ignore[arg-type]
            serving,  # type: ignore[arg-type]
            SimpleNamespace(close=self._close_worlds),  # type: ignore[arg-type]
            self,
            {self.process},
            self.drains.append,
            drain_timeout,
        )

    @property
    def clients(self) -> int:
        """The number of clients that are there."""
        return 0 if self.cut_off else sum(self.clock.now() < leaves for leaves in self.leaves)

    def close_all(self, error: Any) -> None:
        self.cut_off.append((self.clock.now(), error))

    async def _close_worlds(self) -> None:
        closed: PendingResult[None] = PendingResult()
        if self.closes != NEVER:
            self.scheduler.call_later(self.closes, lambda: closed.set_result(None))
        await closed

    def _finish(self) -> None:
        if self.ended_at is None:
            self.ended_at = self.clock.now()
        self.finished.set()

    def run(self, until: float = 1e6) -> float | None:
        """Let time pass, to a time or to the end; return when it ended."""
        while True:
            self.scheduler.run()
            if self.scheduler.ready:
                continue
            due = self.scheduler.next_due()
            if self.ended_at is not None or due is None or due > until:
                break
            self.clock.advance_to(due)
        if self.ended_at is None:
            self.clock.advance_to(until)
        return self.ended_at

    def close(self) -> None:
        os.close(self.wakeup)
        os.close(self.loop.wakeup_fd)


@pytest.fixture
def house() -> Iterator[Any]:
    made: list[House] = []

    def make(*args: Any, **kwargs: Any) -> House:
        made.append(House(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(autouse=True)
def no_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> None:
        raise Ended(code)

    monkeypatch.setattr(os, "_exit", end)


GRACES = (0.0, 0.5, 5.0, 60.0)
LEAVES = (0.0, 0.3, 4.0, 100.0)
CLOSES = (0.0, 1.0, 3.0, NEVER)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_server_ends_with_its_last_client_or_its_grace_and_gives_its_worlds_time_to_close(
    house: Any, number: int
) -> None:
    for grace, leaves, closes in itertools.product(GRACES, LEAVES, CLOSES):
        server = house(leaves, closes)
        with server.shutdown.handle_signals(grace):
            server.loop.on_signal(number)
            ended = server.run()
        given = 0.0 if number == signal.SIGINT else grace
        ((cut_off, error),) = server.cut_off
        assert min(leaves, given) <= cut_off <= min(leaves + LOOK, given) + 1e-9, (grace, leaves, closes)
        assert error.code == Code.UNAVAILABLE
        closing = INTERRUPT_TIMEOUT if number == signal.SIGINT else CLOSE_TIMEOUT
        assert ended == pytest.approx(cut_off + min(closes, closing)), (grace, leaves, closes)
        assert server.drains == [given]
        assert server.shutdown.left_behind == (closes == NEVER)
        assert server.process.abandoned_at == ended, "processes of worlds that do not close are given up"


@pytest.mark.parametrize(("first", "second"), list(itertools.product([signal.SIGTERM, signal.SIGINT], repeat=2)))
def test_a_second_signal_ends_the_process_at_once_whatever_is_under_way(house: Any, first: int, second: int) -> None:
    for grace, closes, after in itertools.product((0.5, 60.0), CLOSES, (0.0, 0.25, 1.2)):
        server = house(100.0, closes)
        with server.shutdown.handle_signals(grace):
            server.loop.on_signal(first)
            if server.run(after) is not None:
                continue  # it had ended by then
            with pytest.raises(Ended) as caught:
                server.loop.on_signal(second)
        assert caught.value.args == (128 + second,)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_call_that_does_not_return_ends_the_process_only_where_it_holds_its_main_thread(
    house: Any, number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for holds, leaves in itertools.product((False, True), (0.0, 1.0, 100.0)):
        server = house(leaves, NEVER)
        server.shutdown.ends_process = holds
        with server.shutdown.handle_signals(2.0):
            server.loop.on_signal(number)
            if holds:
                with pytest.raises(Ended) as caught:
                    server.run()
                assert caught.value.args == (128 + number,)
                assert "an environment is still in a call: the process is ended" in capsys.readouterr().err
            else:
                assert server.run() is not None


def test_another_signal_changes_nothing(house: Any) -> None:
    server = house(100.0)
    with server.shutdown.handle_signals(1.0):
        server.loop.on_signal(signal.SIGCHLD)
        assert server.run(50.0) is None
    assert not server.drains


def test_a_later_order_to_end_only_brings_the_end_forward(house: Any) -> None:
    for first, second, at in itertools.product(GRACES, GRACES, (0.0, 0.25, 3.0)):
        server = house(NEVER)
        server.shutdown.begin(first)
        server.run(at)
        server.shutdown.begin(second)
        assert server.run() == pytest.approx(min(first, at + second)), (first, second, at)
        assert server.drains == [first], "clients are told once"


def test_a_signal_during_a_drain_brings_its_end_forward_too(house: Any) -> None:
    for grace, number in itertools.product(GRACES, (signal.SIGTERM, signal.SIGINT)):
        server = house(NEVER)
        with server.shutdown.handle_signals(grace):
            server.shutdown.begin(600.0)
            server.run(1.0)
            server.loop.on_signal(number)
            assert server.run() == pytest.approx(1.0 + (0.0 if number == signal.SIGINT else grace))


def test_without_a_grace_of_its_own_a_signal_gives_that_of_the_server(house: Any) -> None:
    for drain_timeout in (0.0, 7.0):
        server = house(NEVER, drain_timeout=drain_timeout)
        with server.shutdown.handle_signals(None):
            server.loop.on_signal(signal.SIGTERM)
            assert server.run() == pytest.approx(drain_timeout)


def test_the_handlers_of_before_are_back_afterwards(house: Any) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    server = house()
    with server.shutdown.handle_signals(1.0):
        assert signal.getsignal(signal.SIGTERM) not in before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    with pytest.raises(SettingError, match="expected grace to be a number"), server.shutdown.handle_signals(-1.0):
        pass
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_an_ended_server_ends_no_second_time(house: Any) -> None:
    server = house()
    server.shutdown.begin(0.0)
    ended = server.run()
    server.shutdown.begin(0.0)
    server.scheduler.run()
    assert server.ended_at == ended
    assert server.drains == [0.0]
    assert len(server.cut_off) == 1


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("leaves", "grace", "lines"),
    [
        ([0.4, 2.0, 1.0], 30.0, ["draining: 3 clients are left, until TIME at the latest (30 s)",
                                 "drained: the last client has left after 2.0 s"]),
        ([NEVER, 1.0], 5.0, ["draining: 2 clients are left, until TIME at the latest (5 s)",
                             "drain timed out: 1 client is still there, and cut off after 5.0 s"]),
        ([NEVER, NEVER], 0.5, ["draining: 2 clients are left, until TIME at the latest (0.5 s)",
                               "drain timed out: 2 clients are still there, and cut off after 0.5 s"]),
        ([], 30.0, []),
        ([NEVER], 0.0, []),
    ],
)  # fmt: skip
def test_who_is_waited_for_and_the_end_of_the_wait_are_logged(
    house: Any, caplog: pytest.LogCaptureFixture, leaves: list[float], grace: float, lines: list[str]
) -> None:
    caplog.set_level("INFO", "bridge.core.server.shutdown")
    server = house(leaves)
    server.shutdown.begin(grace)
    server.run()
    assert [re.sub(r"\d\d:\d\d:\d\d", "TIME", line) for line in lines_of(caplog)] == lines
    # A log that is searched for what went wrong finds the clients that were cut off.
    levels = {record.levelname for record in caplog.records if "cut off" in record.getMessage()}
    assert levels == ({"WARNING"} if any("cut off" in line for line in lines) else set())


def test_an_end_that_is_brought_forward_is_logged_once(house: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "bridge.core.server.shutdown")
    server = house([NEVER])
    server.shutdown.begin(60.0)
    server.run(1.0)
    server.shutdown.begin(2.0)
    server.run()
    assert lines_of(caplog)[1:] == ["drain was cut short: 1 client is still there, and cut off after 3.0 s"]
    assert caplog.records[-1].levelname == "WARNING"
