"""The server's log has the exceptions of environments."""

import re

import pytest

from bridge import make_remote, serve_gym
from bridge.core.logs import FailureLog
from bridge.errors import EnvironmentFailedError
from bridge.testing import CountingEnv, LocalRuntime


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def lines(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "bridge.core.logs"]


def test_the_first_failure_of_a_kind_is_logged_in_full_and_the_others_are_counted_each_minute(clock, caplog):
    scheduler = LocalRuntime(clock).scheduler
    failures = FailureLog(scheduler.call_later)
    for number in range(5):
        failures.add("w", f"the environment raised ValueError in step: number {number}\nTraceback …")
    failures.add("w", "the environment raised KeyError in reset: 'a'\nTraceback …")
    assert lines(caplog) == [
        "world=w the environment raised ValueError in step: number 0\n  Traceback …",
        "world=w the environment raised KeyError in reset: 'a'\n  Traceback …",
    ]
    clock.now = 59.0
    scheduler.run()
    assert len(lines(caplog)) == 2
    clock.now = 60.0
    scheduler.run()
    assert lines(caplog)[2:] == ["the environment raised ValueError in step: 4 times more in the last minute"]
    assert scheduler.next_due() is None
    failures.add("w", "the environment raised ValueError in step: again")
    clock.now = 120.0
    scheduler.run()
    assert lines(caplog)[3:] == ["the environment raised ValueError in step: 1 times more in the last minute"]


def test_ever_new_kinds_of_failures_are_counted_as_one(clock, caplog):
    scheduler = LocalRuntime(clock).scheduler
    failures = FailureLog(scheduler.call_later)
    for minute in (1, 2):
        for number in range(300):
            failures.add("w", f"the environment raised Error{number + 300 * minute} in step: x")
        clock.now = 60.0 * minute
        scheduler.run()
        assert len(lines(caplog)) == 100 + minute
    assert lines(caplog)[-1] == "failures of further kinds: 300 times more in the last minute"


@pytest.mark.parametrize("isolation", [None, "process"])
def test_a_server_logs_the_traceback_of_its_environment_once(caplog, isolation):
    class Broken(CountingEnv):
        def step(self, action):
            raise RuntimeError("the arm is stuck")

    with serve_gym(Broken, isolation=isolation) as server, make_remote(server.url) as env:
        for _ in range(3):
            env.reset()
            with pytest.raises(EnvironmentFailedError, match="the arm is stuck"):
                env.step(0)
    (line,) = lines(caplog)
    assert re.match(
        r"world=world-\w+ the environment raised RuntimeError in step: the arm is stuck\n  Traceback ", line
    )


def test_what_a_client_sent_obeys_no_terminal_and_looks_like_no_line_of_the_log(caplog):
    class Quoting(CountingEnv):
        def reset(self, *, seed=None, options=None):
            raise ValueError(f"unknown level {options['level']}")

    with serve_gym(Quoting) as server, make_remote(server.url) as env:
        with pytest.raises(EnvironmentFailedError, match="unknown level"):
            env.reset(options={"level": "\x1b]0;title\x07\r\nERROR forged" + " " * 100_000})
        (line,) = lines(caplog)
    assert "unknown level \ufffd]0;title\ufffd\ufffd\n  ERROR forged" in line
    assert all(each.isprintable() or each == "\n" for each in line)
    assert len(line) < 70_000
    assert "\nERROR" not in line


def test_a_bad_request_is_not_logged_as_a_failure(caplog):
    with serve_gym(CountingEnv) as server, make_remote(server.url) as env:
        env.reset()
        with pytest.raises(Exception, match="_private"):
            env.call("_private")
    assert lines(caplog) == []


def test_the_log_of_a_server_gives_no_advice_that_is_for_its_clients(caplog):
    class Broken(CountingEnv):
        def step(self, action):
            raise RuntimeError("the arm is stuck")

    with serve_gym(Broken) as server, make_remote(server.url) as env:
        env.reset()
        with pytest.raises(EnvironmentFailedError, match=r"call reset\(\)"):
            env.step(0)
    (line,) = lines(caplog)
    assert line.endswith("RuntimeError: the arm is stuck")
    assert "reset()" not in line
