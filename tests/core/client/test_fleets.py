"""Fleets of real servers of which some are silent, slow, dead, full or new: training goes on, evenly, in few words."""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import gymnasium
import numpy as np
import pytest

from bridge import Endpoint, Limits, make_parallel_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.errors import RemoteError, RemoteTimeoutError, SettingError
from bridge.testing import CountingEnv
from bridge.wrappers import BlockingReset
from tests.parallel_envs import Relay
from tests.planned_env import Planned
from tests.support import free_port, until

DEADLINE = 60.0


class Listed:
    """A directory whose list the test changes."""

    def __init__(self, *urls: str) -> None:
        self.listed = [Endpoint(url) for url in urls]

    def endpoints(self) -> list[Endpoint]:
        return list(self.listed)


class Stuck(CountingEnv):
    """Its steps wait while `held` is set, in the first environment that was made alone."""

    def __init__(self, held: threading.Event, go: threading.Event) -> None:
        super().__init__(1000)
        self.held, self.go = held, go

    def step(self, action: Any) -> Any:
        if self.held.is_set():
            self.held.clear()
            assert self.go.wait(DEADLINE)
        return super().step(action)


@contextmanager
def silent() -> Iterator[str]:
    """A server that takes connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"grpc://127.0.0.1:{listener.getsockname()[1]}"


def zeros(envs: Any) -> Any:
    return np.zeros(envs.num_envs, np.int64)


def lines(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if re.search(words, record.getMessage())]


# Starting with what is there


def test_of_a_list_who_answers_stands_in_for_who_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    with serve_gym(lambda: CountingEnv(9)) as one, serve_gym(lambda: CountingEnv(9)) as other, silent() as url:
        envs = BlockingReset(make_vec_remote([one.url, url, other.url], connect_timeout=0.5))
        assert envs.num_envs == 3
        assert set(envs.env.urls) == {one.url, other.url}
        assert envs.reset(seed=0)[0].shape == (3, 2)
        (line,) = lines(caplog, "stands in for it")
        assert line.startswith(f"{url} has not replied within 0.5 s: ")
        envs.close()


@pytest.mark.slow
def test_of_a_list_a_server_that_was_silent_at_the_start_gets_its_slots_once_it_answers() -> None:
    with serve_gym(lambda: CountingEnv(9)) as one, ExitStack() as stack:
        url = stack.enter_context(silent())
        envs = BlockingReset(make_vec_remote([one.url, url], num_envs=4, connect_timeout=0.5, timeout=5.0))
        envs.reset(seed=0)
        assert envs.env.urls == (one.url,) * 4
        stack.pop_all().close()  # nobody is there any more, and then a server is
        with serve_gym(lambda: CountingEnv(9), port=int(url.rpartition(":")[2])):
            deadline = time.monotonic() + DEADLINE
            while envs.env.urls != (one.url, url) * 2:
                assert not envs.step(zeros(envs))[3].any()
                assert time.monotonic() < deadline
            envs.close()


@pytest.mark.parametrize("connect_timeout", [10.0, 1.5])
def test_of_a_list_a_silent_server_is_passed_over_by_the_timeout_too(connect_timeout: float) -> None:
    with serve_gym(lambda: CountingEnv(9)) as one, silent() as url:
        for urls in ([url, one.url], [one.url, url]):
            envs = make_vec_remote(urls, timeout=1.0, connect_timeout=connect_timeout, blocking=True)
            assert envs.env.urls == (one.url, one.url)
            assert envs.reset(seed=0)[0].shape == (2, 2)
            envs.close()


@pytest.mark.parametrize("count", [1, 2])
def test_silent_endpoints_of_a_directory_are_passed_over_by_the_timeout_too(count: int) -> None:
    with serve_gym(lambda: CountingEnv(9)) as one, ExitStack() as stack:
        dark = [stack.enter_context(silent()) for _ in range(count)]
        for directory in (Listed(*dark, one.url), Listed(one.url, *dark)):
            envs = make_vec_remote(directory, num_envs=3, timeout=1.0, blocking=True)
            assert envs.env.urls == (one.url,) * 3
            envs.close()


def test_a_start_ends_where_who_answers_is_full_and_the_others_are_silent() -> None:
    limits = Limits(max_connections=1)
    with serve_gym(lambda: CountingEnv(9), limits=limits) as one, silent() as url, pytest.raises(RemoteError):
        make_vec_remote(Listed(one.url, url), num_envs=3, timeout=0.5)


def test_a_server_that_stands_in_has_the_whole_timeout() -> None:
    """As the others have: what the silent one took is not taken off."""

    def slow() -> CountingEnv:
        time.sleep(1.0)
        return CountingEnv(9)

    with serve_gym(slow, thread_safe=True) as one, silent() as url:
        envs = make_vec_remote([one.url, url], timeout=1.6, connect_timeout=1.2, blocking=True)
        assert envs.env.urls == (one.url, one.url)
        envs.close()


def test_where_all_are_silent_the_error_names_them_and_no_other() -> None:
    with silent() as url, silent() as other, pytest.raises(RemoteTimeoutError) as raised:
        make_vec_remote([url, other], timeout=0.5)
    assert raised.value.url == f"{url}, {other}"
    with silent() as url, silent() as other, pytest.raises(RemoteTimeoutError, match="nothing has come") as raised:
        make_vec_remote(Listed(url, other), num_envs=2, timeout=0.5)
    assert raised.value.url in (url, other)


def test_an_error_names_the_server_that_is_late_and_not_the_one_that_has_joined() -> None:
    """Nobody stands in for another environment: so the silent one is what the start failed by."""
    with serve_gym(lambda: CountingEnv(9)) as one, silent() as url, pytest.raises(RemoteTimeoutError) as raised:
        make_vec_remote([one.url, f"{url}/Other-v0"], timeout=0.5)
    assert raised.value.url == f"{url}/Other-v0"


def test_nobody_stands_in_for_another_environment() -> None:
    with serve_gym(lambda: CountingEnv(9)) as one, silent() as url:
        for other in (f"{url}?kwargs.length=3", f"{url}/Other-v0"):
            with pytest.raises(RemoteTimeoutError, match="nothing has come from there at all"):
                make_vec_remote([one.url, other], connect_timeout=0.1, timeout=1.0)


def test_a_silent_endpoint_of_a_directory_is_passed_over() -> None:
    with serve_gym(lambda: CountingEnv(9)) as one, serve_gym(lambda: CountingEnv(9)) as other, silent() as url:
        envs = BlockingReset(make_vec_remote(Listed(url, one.url, other.url), num_envs=4, connect_timeout=0.5))
        assert set(envs.env.urls) == {one.url, other.url}
        assert not envs.reset(seed=0)[0][:, 1].any()
        envs.close()


@pytest.mark.slow
def test_two_thousand_dead_addresses_are_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    with serve_gym(Planned) as one, serve_gym(Planned) as other, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        port = closed.getsockname()[1]
        dead = [f"grpc://127.1.{number // 250}.{number % 250 + 1}:{port}" for number in range(2000)]
        envs = BlockingReset(make_vec_remote(Listed(*dead, one.url, other.url), num_envs=8))
        envs.reset(seed=0)
        for _ in range(50):
            assert not envs.step(zeros(envs))[3].any()
        assert set(envs.env.urls) <= {one.url, other.url}
        assert len(caplog.records) <= 30
        envs.close()


# Slow worlds


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_world_that_is_late_with_a_step_is_cut_and_the_others_go_on(lanes: int) -> None:
    held, go = threading.Event(), threading.Event()
    vector = {} if lanes == 1 else {"num_envs": lanes}
    with (
        serve_gym(lambda: Stuck(held, go), thread_safe=True, **vector) as slow,
        serve_gym(lambda: CountingEnv(1000), **vector) as well,
    ):
        envs = BlockingReset(make_vec_remote([slow.url, well.url]), on_lost="continue", step_timeout=0.5)
        mine = np.arange(2 * lanes) < lanes
        envs.reset(seed=0)
        envs.step(zeros(envs))
        held.set()
        before = envs.step(zeros(envs))
        while not before[3].any():
            before = envs.step(zeros(envs))
        assert before[3].tolist() == mine.tolist()
        assert before[4]["valid"].tolist() == (~mine).tolist()
        assert "within 0.5 s" in before[4]["error"][0]
        truncated, last = 0, before
        go.set()
        deadline = time.monotonic() + DEADLINE
        while not last[4]["valid"].all():
            assert time.monotonic() < deadline
            result = envs.step(zeros(envs))
            truncated += result[3].sum()
            assert (result[0][~mine, 1] == last[0][~mine, 1] + 1).all()  # the others make every step
            last = result
        assert truncated == 0
        assert (last[0][mine, 1] == 1).all()  # of the new episode; what the old one answered late was dropped
        reports = envs.remotes()
        assert sum(r.steps_asked for r in reports) == sum(r.steps_received + r.steps_lost for r in reports)
        envs.close()


def test_a_timeout_for_steps_needs_a_loop_that_goes_on() -> None:
    with serve_gym(lambda: CountingEnv(9)) as server:
        envs = make_vec_remote(server.url)
        with pytest.raises(SettingError, match="on_lost='continue' with step_timeout=2"):
            BlockingReset(envs, step_timeout=2)
        with pytest.raises(SettingError, match="step_timeout to be a positive"):
            BlockingReset(envs, on_lost="continue", step_timeout=-1)
        envs.close()


# Evening out


@pytest.mark.slow
def test_slots_move_to_a_new_server_at_the_ends_of_their_episodes() -> None:
    with serve_gym(lambda: CountingEnv(5)) as one, serve_gym(lambda: CountingEnv(5)) as other:
        directory = Listed(one.url)
        envs = BlockingReset(make_vec_remote(directory, num_envs=6))
        observations, _ = envs.reset(seed=0)
        directory.listed.append(Endpoint(other.url))
        deadline = time.monotonic() + DEADLINE
        while Counter(envs.env.urls) != {one.url: 3, other.url: 3}:
            assert time.monotonic() < deadline
            before = observations
            observations, _, terminations, truncations, _ = envs.step(zeros(envs))
            assert not truncations.any()
            assert ((observations[:, 1] == before[:, 1] + 1) | (observations[:, 1] == 0)).all()
            assert (terminations == (observations[:, 1] == 5)).all()
        assert sum(report.moves for report in envs.remotes()) == 3
        for _ in range(100):
            envs.step(zeros(envs))
        assert sum(report.moves for report in envs.remotes()) == 3, "it stays even"
        envs.close()


@pytest.mark.slow
def test_a_server_that_is_back_gets_its_share_again() -> None:
    with ExitStack() as stack:
        one, other = (stack.enter_context(serve_gym(lambda: CountingEnv(5))) for _ in range(2))
        envs = BlockingReset(make_vec_remote(Listed(one.url, other.url), num_envs=4), on_lost="continue")
        envs.reset(seed=0)
        port = other.port
        other.stop()
        deadline = time.monotonic() + DEADLINE
        while set(envs.env.urls) != {one.url} or not envs.step(zeros(envs))[4]["valid"].all():
            assert time.monotonic() < deadline
            envs.step(zeros(envs))
        again = stack.enter_context(serve_gym(lambda: CountingEnv(5), port=port))
        while Counter(envs.env.urls) != {one.url: 2, again.url: 2}:
            assert time.monotonic() < deadline
            assert not envs.step(zeros(envs))[3].any()
        envs.close()


def test_lanes_are_not_moved_for_an_even_spread() -> None:
    with serve_gym(lambda: CountingEnv(5), num_envs=2) as one, serve_gym(lambda: CountingEnv(5), num_envs=2) as other:
        directory = Listed(one.url)
        envs = BlockingReset(make_vec_remote(directory, num_envs=6))
        envs.reset(seed=0)
        directory.listed.append(Endpoint(other.url))
        watch = threading.Event()
        for _ in range(20):
            watch.wait(0.1)  # for looks of the policy; nothing is waited for
            assert not envs.step(zeros(envs))[3].any()
        assert set(envs.env.urls) == {one.url}
        envs.close()


def lengths_after_a_move() -> Iterator[tuple[int, float | None]]:
    """Yield number and length of each episode that a slot begins; the length is None until the slot has moved."""
    with serve_gym(lambda: Planned((3, 20, 150))) as old, serve_gym(lambda: Planned((3, 20, 150))) as new:
        directory = Listed(old.url)
        envs = BlockingReset(make_vec_remote(directory, num_envs=1))
        envs.reset(seed=7)
        directory.listed.append(Endpoint(new.url))
        old.drain(600.0)
        try:
            for episode in itertools.count(2):
                while not envs.step(zeros(envs))[2][0]:
                    pass
                observations = envs.step(zeros(envs))[0]  # the step after the end begins the next episode
                yield episode, float(observations[0, 0]) if envs.env.urls == (new.url,) else None
        finally:
            envs.close()


@pytest.mark.slow
def test_episodes_after_a_move_follow_from_the_seed_and_their_number() -> None:
    with contextlib.closing(lengths_after_a_move()) as first, contextlib.closing(lengths_after_a_move()) as second:
        deadline = time.monotonic() + DEADLINE
        compared: list[float] = []
        while len(compared) < 12:  # one slot may move many episodes before the other
            assert time.monotonic() < deadline
            (episode, one), (same, other) = next(first), next(second)
            assert episode == same
            if one is not None and other is not None:
                assert one == other
                compared.append(one)
        assert len(set(compared)) > 1


# In few words


@pytest.mark.slow
def test_a_full_server_is_a_line_and_is_asked_seldom(caplog: pytest.LogCaptureFixture) -> None:
    with (
        serve_gym(lambda: CountingEnv(5), limits=Limits(max_worlds=2)) as full,
        serve_gym(lambda: CountingEnv(5)) as other,
    ):
        envs = BlockingReset(make_vec_remote(Listed(full.url, other.url), num_envs=8))
        envs.reset(seed=0)
        end = time.monotonic() + 3.0
        while time.monotonic() < end:
            assert not envs.step(zeros(envs))[3].any()
        assert Counter(envs.env.urls) == {full.url: 2, other.url: 6}
        assert (
            1 <= len(lines(caplog, "is full")) <= 2
        )  # worlds that were tried together may join after the first refusal
        assert len(caplog.records) <= 4
        envs.close()


def test_a_server_that_is_started_late_is_said_to_answer_not_to_answer_again(caplog: pytest.LogCaptureFixture) -> None:
    late = f"grpc://127.0.0.1:{free_port()}"
    with serve_gym(lambda: CountingEnv(5)) as server:
        envs = BlockingReset(make_vec_remote(Listed(server.url, late), num_envs=4))
        envs.reset(seed=0)
        deadline = time.monotonic() + DEADLINE
        while not lines(caplog, f"^{late} does not answer: "):
            assert time.monotonic() < deadline, caplog.text
            envs.step(zeros(envs))
        with serve_gym(lambda: CountingEnv(5), port=int(late.rpartition(":")[2])):
            while not lines(caplog, f"^{late} answers"):
                assert time.monotonic() < deadline, caplog.text
                envs.step(zeros(envs))
            assert lines(caplog, f"^{late} answers") == [f"{late} answers"]
            envs.close()


def test_what_became_of_a_server_is_said_in_words_that_need_no_explanation(caplog: pytest.LogCaptureFixture) -> None:
    with serve_gym(lambda: CountingEnv(5)) as server, serve_gym(lambda: CountingEnv(5)) as other:
        envs = BlockingReset(make_vec_remote(Listed(server.url, other.url), num_envs=2))
        envs.reset(seed=0)
        server.stop()
        deadline = time.monotonic() + DEADLINE
        while not lines(caplog, f"^{re.escape(server.url)} no longer answers: "):
            assert time.monotonic() < deadline, caplog.text
            envs.step(zeros(envs))
        assert not lines(caplog, f" no longer answers: .*{re.escape(server.url)}"), "once is enough"
        with serve_gym(lambda: CountingEnv(5), port=server.port):
            while not lines(caplog, f"^{re.escape(server.url)} answers again$"):
                assert time.monotonic() < deadline, caplog.text
                envs.step(zeros(envs))
            assert not lines(caplog, r"\b(dark|untried|after up)\b")
            envs.close()


@pytest.mark.slow
def test_other_spaces_are_a_line_with_the_server_the_space_and_the_difference(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ExitStack() as stack:
        one, other = (stack.enter_context(serve_gym("CartPole-v1")) for _ in range(2))
        envs = BlockingReset(make_vec_remote([one.url, other.url]), on_lost="continue")
        envs.reset(seed=0)
        other.stop()
        stack.enter_context(serve_gym("Acrobot-v1", port=other.port))
        words = f"slot 1: it came back as another environment: {other.url} has, unlike {one.url}, the observation space"
        deadline = time.monotonic() + DEADLINE
        while not lines(caplog, "another environment"):
            assert time.monotonic() < deadline
            envs.step(zeros(envs))
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            envs.step(zeros(envs))
        (line,) = lines(caplog, "slot 1: it came back")
        assert line.startswith(words)
        assert "(6,), float32) and not Box(" in line
        assert "the action space Discrete(3) and not Discrete(2)" in line
        envs.close()


def test_agents_share_a_connection() -> None:
    with serve_parallel(Relay) as server:
        env = make_parallel_remote(server.url)
        env.reset(seed=0)
        env.step({agent: env.action_space(agent).sample() for agent in env.agents})
        assert server.status()["sockets"] == 1
        env.close()


# What users call


def test_blocking_gives_what_wrappers_and_trainers_expect() -> None:
    with serve_gym("CartPole-v1") as server:
        envs = make_vec_remote(server.url, num_envs=2, blocking=True, autoreset_mode="SameStep", blocking_timeout=7.0)
        assert isinstance(envs, BlockingReset)
        assert envs.timeout == 7.0
        assert envs.metadata["autoreset_mode"].value == "SameStep"
        observations, _ = envs.reset(seed=0)
        assert observations.shape == (2, 4)
        envs.close()
        with pytest.raises(TypeError, match=r"autoreset_mod'.*did you mean autoreset_mode="):
            make_vec_remote(server.url, blocking=True, autoreset_mod="SameStep")
        with pytest.raises(TypeError, match=r"^make_vec_remote\(\) takes on_lost only with blocking=True$"):
            make_vec_remote(server.url, on_lost="continue")


def test_a_vector_wrapper_around_the_plain_one_is_told_what_to_wrap() -> None:
    with serve_gym("CartPole-v1") as server:
        envs = gymnasium.wrappers.vector.NormalizeObservation(make_vec_remote(server.url, num_envs=2))
        with pytest.raises(SettingError, match=r"NormalizeObservation takes batched .* blocking=True"):
            envs.reset(seed=0)
        envs.close()
        envs = gymnasium.wrappers.vector.NormalizeObservation(make_vec_remote(server.url, num_envs=2, blocking=True))
        assert envs.reset(seed=0)[0].shape == (2, 4)
        envs.close()


def test_a_report_is_flat_numbers() -> None:
    with serve_gym(lambda: CountingEnv(5)) as one, serve_gym(lambda: CountingEnv(5)) as other:
        envs = make_vec_remote([one.url, other.url], blocking=True, on_lost="continue")
        envs.reset(seed=0)
        for _ in range(3):
            envs.step(zeros(envs))
        found = envs.report()
        assert all(type(value) is float for value in found.values())
        assert found["slots/running"] == 2.0
        assert found["steps_asked"] == found["steps_received"] == 6.0
        assert found[f"servers/{one.url}/slots"] == 1.0
        other.stop()
        while not envs.step(zeros(envs))[3].any():
            pass
        found = envs.report()
        assert found["slots/running"] == 1.0
        assert found[f"servers/{other.url}/losses"] == found["losses"] == found["episodes_cut"] == 1.0
        logging.getLogger("bridge").debug("%s", found)
        envs.close()


def test_a_report_blames_the_server_that_was_lost_also_once_its_slots_are_elsewhere() -> None:
    with serve_gym(lambda: CountingEnv(5)) as stays, serve_gym(lambda: CountingEnv(5)) as goes:
        envs = make_vec_remote(Listed(stays.url, goes.url), num_envs=4, blocking=True)
        envs.reset(seed=0)
        assert envs.report()[f"servers/{goes.url}/slots"] == 2.0
        goes.stop()
        until(lambda: bool(envs.step(zeros(envs)) and envs.report()[f"servers/{stays.url}/slots"] == 4.0))
        found = envs.report()
        assert found["losses"] == found[f"servers/{goes.url}/losses"] == 2.0
        assert found[f"servers/{stays.url}/losses"] == found[f"servers/{stays.url}/seconds_away"] == 0.0
        assert found[f"servers/{goes.url}/slots"] == 0.0
        assert found[f"servers/{goes.url}/seconds_away"] > 0.0
        envs.close()
