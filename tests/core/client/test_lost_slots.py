"""A training loop with an environment that only fails, and with a server that goes: raise, wait, or go on."""

import contextlib
import pickle
import re
import socket
import threading
import time
import warnings
from collections import Counter

import gymnasium
import numpy as np
import pytest

from bridge import Limits, SlotState, make_vec_remote, serve_gym
from bridge.cli import main
from bridge.errors import ConnectionLostError, EnvironmentFailedError, RemoteTimeoutError, SettingError
from bridge.testing import CountingEnv
from bridge.wrappers import ActionHistory, BlockingReset
from tests.inside import pool_of
from tests.places import ROOT
from tests.support import server_process, until

DEADLINE = 30.0


class Broken(CountingEnv):
    """Its steps fail, or only those with the action 1."""

    def __init__(self, picky=False):
        super().__init__(5)
        self.picky = picky

    def step(self, action):
        if not self.picky or action == 1:
            raise RuntimeError("the arm is stuck")
        return super().step(action)


class Number:
    """A server of counting environments that goes and comes back at its port."""

    def __init__(self, length=1000):
        self.length = length
        self.server = serve_gym(lambda: CountingEnv(length))
        self.port = self.server.port

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.stop()

    def back(self):
        self.server = serve_gym(lambda: CountingEnv(self.length), port=self.port)


def play(envs, steps, action=0):
    for _ in range(steps):
        envs.step(np.full(envs.num_envs, action))


# Environments that only fail


@pytest.mark.parametrize("lanes", [1, 2])
def test_an_environment_that_only_fails_ends_the_loop_with_its_own_exception(lanes):
    with serve_gym(Broken, num_envs=lanes) as server:
        envs = BlockingReset(make_vec_remote(server.url))
        envs.reset()
        play(envs, 18)  # nine failures, and the beginnings between them
        text = r"the last 10 episodes of slot 0 ended by failures .*RuntimeError in step: the arm"
        with pytest.raises(EnvironmentFailedError, match=text):
            play(envs, 1)
        envs.reset()  # it goes on where somebody has mended it
        envs.close()


def test_failures_between_which_an_episode_ends_by_itself_are_no_row():
    with serve_gym(lambda: Broken(True)) as server:
        envs = BlockingReset(make_vec_remote(server.url), max_failures=2)
        envs.reset()
        for _ in range(3):
            assert envs.step(np.array([1]))[3].all()
            while not envs.step(np.array([0]))[2].any():
                pass
            envs.step(np.array([0]))
        with pytest.raises(EnvironmentFailedError, match="the last 2 episodes"):
            play(envs, 4, 1)
        envs.close()


def test_without_max_failures_every_failure_is_a_truncation():
    with serve_gym(Broken) as server:
        envs = BlockingReset(make_vec_remote(server.url), max_failures=None)
        envs.reset()
        assert sum(envs.step(np.zeros(1, np.int64))[3].item() for _ in range(60)) == 30
        envs.close()


def test_the_benchmark_of_a_broken_environment_fails_with_a_few_lines(capfd):
    with serve_gym(Broken) as server:
        assert main(["bench", server.url, "--seconds", "60"]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert len(lines) <= 12
    assert "the last 10 episodes of slot 0 ended by failures" in lines[-1]
    assert "RuntimeError in step: the arm is stuck" in lines[-1]


# Servers that go


def test_continue_gives_lost_slots_their_last_observation_until_they_are_back(caplog):
    with Number() as one, Number() as other:
        envs = BlockingReset(make_vec_remote([one.server.url, other.server.url]), timeout=DEADLINE, on_lost="continue")
        _, infos = envs.reset(seed=1)
        assert infos["valid"].tolist() == [True, True]
        actions = np.zeros(2, np.int64)
        last = envs.step(actions)[0][:, 1]
        other.server.stop()
        valid = [True, True]
        while valid[1]:
            before = last
            observations, rewards, terminations, truncations, infos = envs.step(actions)
            last, valid = observations[:, 1], infos["valid"].tolist()
        assert valid == [True, False]
        assert truncations.tolist() == [False, True]
        assert (rewards > 0).tolist() == [True, False]
        assert last[1] == before[1]
        for _ in range(5):  # the others go on, and nothing is told twice
            observations, rewards, terminations, truncations, infos = envs.step(actions)
            assert observations[:, 1].tolist() == [last[0] + 1, before[1]]
            last = observations[:, 1]
            assert infos["valid"].tolist() == [True, False]
            assert (rewards > 0).tolist() == [True, False]
            assert not truncations.any()
            assert not terminations.any()
        other.back()
        steps = 0
        while not infos["valid"][1]:
            observations, rewards, _, truncations, infos = envs.step(actions)
            steps += 1
            assert steps < 10**6
            assert not truncations.any()
        assert observations[1, 1] == 1  # the first action of the new episode was applied
        assert rewards[1] == 1.0
        envs.close()
    assert any("slot 1: back after" in record.getMessage() for record in caplog.records)


def test_a_server_that_takes_slots_along_is_a_line_of_the_log_and_so_is_its_return(caplog):
    with Number() as one, Number() as other:
        urls = [one.server.url] * 3 + [other.server.url] * 20 + [one.server.url]
        envs = BlockingReset(make_vec_remote(urls), timeout=DEADLINE, on_lost="continue")
        envs.reset(seed=1)
        actions, valid = np.zeros(len(urls), np.int64), np.ones(len(urls), np.bool_)
        other.server.stop()
        while valid[3:23].any():
            valid = envs.step(actions)[4]["valid"]
        other.back()
        while not valid.all():
            valid = envs.step(actions)[4]["valid"]
        envs.step(actions)
        envs.close()
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("vector_pool")]
    slots = sum(len(re.findall(r"^slots? \d+", line)) for line in lines)
    assert slots == len(lines) < 12, lines
    assert any(re.match(r"slots 3 to \d+.*: episodes truncated: grpc://", line) for line in lines), lines
    assert any(re.match(r"slots? \d+.*: back after \d+ s$", line) for line in lines), lines
    assert not [line for line in lines if "left out" in line]


def test_continue_counts_each_transition_that_is_valid_once():
    """The observations of valid transitions are those of whole episodes, without a gap or a repetition."""
    with Number(length=7) as one, Number(length=7) as other:
        envs = BlockingReset(make_vec_remote([one.server.url, other.server.url]), on_lost="continue")
        envs.reset(seed=1)
        actions, seen = np.zeros(2, np.int64), []

        def play(steps: int) -> None:
            for _ in range(steps):
                observations, rewards, terminations, _, infos = envs.step(actions)
                if infos["valid"][1] and rewards[1]:
                    seen.append((int(observations[1, 1]), bool(terminations[1])))

        play(20)
        other.server.stop()
        play(20)
        other.back()
        count, deadline = len(seen), time.monotonic() + 60.0
        while len(seen) == count:  # until it is back
            assert time.monotonic() < deadline
            play(1)
        play(60)
        envs.close()
    before, rows = 0, 0
    for observation, terminated in seen:
        assert observation in (before + 1, 1)
        assert terminated == (observation == 7)
        rows += observation == 1
        before = observation
    assert rows > 3


def test_a_world_of_another_number_of_lanes_does_not_take_the_slots_of_the_lost_one():
    """Another program may get the port of a server that has gone."""
    with serve_gym(lambda: CountingEnv(1000)) as one, serve_gym(lambda: CountingEnv(1000), num_envs=2) as two:
        inner = make_vec_remote([one.url, two.url])
        envs = BlockingReset(inner, timeout=DEADLINE, on_lost="continue")
        envs.reset(seed=1)
        play(envs, 5)
        two.stop()
        end = time.monotonic() + DEADLINE
        with serve_gym(lambda: CountingEnv(1000), port=two.port):
            while "expected 2 environments in its world, got 1" not in (inner.remotes()[1].reason or ""):
                assert time.monotonic() < end
                observations, _, _, _, infos = envs.step(np.zeros(3, np.int64))
                assert infos["valid"][0]
                assert not infos["valid"][1:].any()
            last = observations
            observations = envs.step(np.zeros(3, np.int64))[0]
            assert observations[1:].tolist() == last[1:].tolist()
        with serve_gym(lambda: CountingEnv(1000), num_envs=2, port=two.port):
            while not envs.step(np.zeros(3, np.int64))[4]["valid"].all():
                assert time.monotonic() < end + DEADLINE
        envs.close()


class Seeded(CountingEnv):
    """Its first observation is the seed; -1: it got none."""

    fails = 0
    """The resets that fail yet."""

    def __init__(self):
        super().__init__(1000)
        self.observation_space = gymnasium.spaces.Box(-1.0, 2.0**32, (1,), np.float64)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        Seeded.fails -= 1
        if Seeded.fails >= 0:
            raise RuntimeError("the simulator is starting")
        return np.array([-1.0 if seed is None else seed], np.float64), {}

    def step(self, action):
        return np.zeros(1), *super().step(action)[1:]


def next_observations(envs):
    found = []

    def came():
        found[:] = envs.step(np.zeros(envs.num_envs, np.int64))[0]
        return found[0] is not None

    until(came, DEADLINE)
    return found


@pytest.mark.parametrize("lanes", [1, 2])
def test_the_next_episode_of_a_lost_slot_is_seeded_alike_however_soon_its_server_is_back(lanes):
    seeds = []
    for soon, fails in (True, 0), (False, 0), (True, 1):
        server = serve_gym(Seeded, num_envs=lanes)
        envs = make_vec_remote(server.url, timeout=DEADLINE)
        envs.reset(seed=5)
        next_observations(envs)
        server.stop()
        if soon:  # its world is joined again before a step tells of the loss
            server = serve_gym(Seeded, num_envs=lanes, port=server.port)
            until(lambda envs=envs: (envs.slot_states == SlotState.RESETTING).all())
        assert envs.step(np.zeros(lanes, np.int64))[3].all()
        if not soon:
            server = serve_gym(Seeded, num_envs=lanes, port=server.port)
        Seeded.fails = fails
        seeds.append([observation.item() for observation in next_observations(envs)])
        envs.close()
        server.stop()
    assert seeds[0] == seeds[1]
    assert -1.0 not in seeds[0] + seeds[2]


@pytest.mark.parametrize("lost", ["before", "meanwhile"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_episodes_outside_of_a_reset_mask_that_are_lost_are_told_by_the_next_step(lanes, lost):
    servers = [serve_gym(lambda: CountingEnv(1000), num_envs=lanes) for _ in range(2 // lanes)]
    raw = make_vec_remote([server.url for server in servers], timeout=DEADLINE)
    envs = BlockingReset(raw, autoreset_mode="Disabled")
    envs.reset(seed=5)
    play(envs, 3)

    def restart():
        servers[-1].stop()
        until(lambda: raw.slot_states[1] == SlotState.LOST)
        servers[-1] = serve_gym(lambda: CountingEnv(1000), num_envs=lanes, port=servers[-1].port)

    if lost == "before":
        restart()
    envs.reset_async(options={"reset_mask": np.array([True, False])})
    if lost == "meanwhile":
        restart()
    observations, _ = envs.reset_wait()
    assert observations[1].tolist() == [1, 3]
    observations, _, _, truncations, infos = envs.step(np.zeros(2, np.int64))
    assert truncations.tolist() == [lanes == 2, True]
    assert observations[1].tolist() == [1, 3]
    assert "connection" in infos["error"][1]
    assert sum(report.episodes_lost for report in envs.remotes()) == lanes
    observations, _ = envs.reset(options={"reset_mask": truncations})
    assert observations[1].tolist() == [1, 0]
    envs.close()
    for server in servers:
        server.stop()


def test_resets_of_several_lanes_one_after_the_other_leave_the_rest_as_it_is():
    with serve_gym(CountingEnv, num_envs=3) as server:
        envs = make_vec_remote(server.url, timeout=DEADLINE)
        envs.reset()
        next_observations(envs)
        next_observations(envs)
        for mask in np.eye(3, dtype=np.bool_)[:2]:
            envs.reset(options={"reset_mask": mask})
        assert [observation.tolist() for observation in next_observations(envs)] == [[2, 0], [2, 0], [1, 1]]
        envs.close()


def test_continue_waits_where_every_slot_is_lost():
    with Number() as one:
        envs = BlockingReset(make_vec_remote(one.server.url), timeout=0.5, on_lost="continue")
        envs.reset()
        one.server.stop()
        with pytest.raises(RemoteTimeoutError, match=r"no observation within 0\.5 s: slot 0 \(grpc://.*\), "):
            play(envs, 100)
        envs.close()


def test_the_history_of_actions_of_a_lost_slot_begins_with_its_next_episode():
    with Number() as one, Number() as other:
        lost = BlockingReset(make_vec_remote([one.server.url, other.server.url]), on_lost="continue")
        envs = ActionHistory(lost, 2)
        envs.reset(seed=0)
        play(envs, 2, action=1)
        other.server.stop()
        play(envs, 2, action=1)
        other.back()
        valid, deadline = False, time.monotonic() + DEADLINE
        while not valid:
            assert time.monotonic() < deadline
            observations, _, _, _, infos = envs.step(np.ones(2, np.int64))
            valid = infos["valid"][1]
            assert observations["actions"].tolist() == [[1, 1], [0, int(valid)]]
        envs.close()


@pytest.mark.parametrize("mode", ["SameStep", "Disabled"])
def test_continue_works_in_every_autoreset_mode(mode):
    with Number(length=4) as one, Number(length=4) as other:
        envs = BlockingReset(
            make_vec_remote([one.server.url, other.server.url]), autoreset_mode=mode, on_lost="continue"
        )
        envs.reset()
        other.server.stop()
        invalid = 0
        for _ in range(20):
            _, _, terminations, truncations, infos = envs.step(np.zeros(2, np.int64))
            assert infos["valid"][0]
            invalid += not infos["valid"][1]
            if mode == "Disabled" and (terminations | truncations).any():
                envs.reset(options={"reset_mask": terminations | truncations})
        assert invalid >= 18
        envs.close()


class Patient(CountingEnv):
    """Its steps wait for an event."""

    def __init__(self, event):
        super().__init__(1000)
        self.event = event

    def step(self, action):
        assert self.event.wait(DEADLINE)
        return super().step(action)


def test_why_a_remote_was_lost_is_told_though_the_attempts_to_connect_again_fail_otherwise():
    tried = threading.Event()
    with Number() as number, serve_gym(lambda: Patient(tried)) as other:
        envs = make_vec_remote([number.server.url, other.url], blocking=True, on_lost="raise")
        envs.reset()
        number.server.stop()
        with socket.create_server(("127.0.0.1", number.port)) as silent:

            def try_twice():  # the second attempt says that the first has failed
                for _ in range(2):
                    silent.accept()[0].close()
                tried.set()

            thread = threading.Thread(target=try_twice)
            thread.start()
            with pytest.raises(ConnectionLostError, match=str(number.port)):
                envs.step(np.zeros(2, np.int64))
            thread.join()
        envs.close()


def test_raise_raises_why_a_remote_was_lost():
    with Number() as one, Number() as other:
        envs = BlockingReset(make_vec_remote([one.server.url, other.server.url]), on_lost="raise")
        envs.reset()
        other.server.stop()
        with pytest.raises(ConnectionLostError, match=str(other.port)):
            play(envs, 100)
        other.back()
        envs.reset()  # connects again
        envs.close()


def test_raise_lets_a_spare_take_the_place():
    with Number() as one, Number() as other, Number() as third:
        envs = make_vec_remote([one.server.url, other.server.url], spares=[third.server.url])
        blocking = BlockingReset(envs, on_lost="raise")
        blocking.reset()
        ready = threading.Event()
        for _ in range(1000):
            if pool_of(envs).has_spare(pool_of(envs).members.at[0]):
                break
            pool_of(envs).drain()
            ready.wait(0.01)
        other.server.stop()
        cut = [blocking.step(np.zeros(2, np.int64))[3].tolist() for _ in range(20)]
        assert cut.count([False, True]) == 1
        blocking.close()


def advantages():
    """The function of examples/ppo.py, which docs/trainers.md quotes."""
    root = ROOT
    page, example = ((root / name).read_text(encoding="utf-8") for name in ("docs/trainers.md", "examples/ppo.py"))
    blocks = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "real = infos" in block]
    assert len(blocks) == 1
    assert blocks[0] in example
    (function,) = re.findall(r"^def advantages\(.*?^    return \w+$", example, re.DOTALL | re.MULTILINE)
    scope = {"np": np}
    exec(compile(function, "ppo.py", "exec"), scope)
    return scope["advantages"]


def test_the_documented_advantages_leave_out_what_no_action_made():
    rewards, values = np.array([[1.0, 2.0, 0.0, 0.0, 3.0, 4.0]]).T, np.array([[1.0, 5.0, 7.0, 9.0, 9.0, 2.0]]).T
    real = np.array([[True, True, False, False, True, True]]).T
    found = advantages()(rewards, values, np.array([6.0]), np.zeros((6, 1), bool), real, 0.5, 0.5)
    second = 2 + 0.5 * 7 - 5  # it leads to the last observation before the loss, and nothing follows on it
    last = 4 + 0.5 * 6 - 2
    expected = [1 + 0.5 * 5 - 1 + 0.25 * second, second, 0, 0, 3 + 0.5 * 2 - 9 + 0.25 * last, last]
    assert found[:, 0].tolist() == expected


def test_the_documented_advantages_end_with_an_episode():
    """After a termination nothing is to come; a truncated episode goes on behind its last observation."""
    rewards, values = np.array([[1.0, 2.0, 0.0, 3.0]] * 2).T, np.array([[1.0, 5.0, 7.0, 9.0]] * 2).T
    terminations, real = np.zeros((4, 2), bool), np.ones((4, 2), bool)
    terminations[1, 0], real[2] = True, False
    found = advantages()(rewards, values, np.array([6.0, 6.0]), terminations, real, 0.5, 0.5)
    assert found[1].tolist() == [2 - 5, 2 + 0.5 * 7 - 5]
    assert found[0].tolist() == [1 + 0.5 * 5 - 1 + 0.25 * found[1, slot] for slot in range(2)]
    assert found[2:].tolist() == [[0, 0], [3 + 0.5 * 6 - 9] * 2]


def test_a_loop_over_four_servers_uses_no_transition_that_no_action_made():
    """One is killed for good in the middle, another one restarted: every transition of an update is an episode's."""
    with Number(9) as first, Number(9) as second, Number(9) as third, Number(9) as fourth:
        numbers = (first, second, third, fourth)
        envs = BlockingReset(make_vec_remote([number.server.url for number in numbers]), on_lost="continue")
        observations, _ = envs.reset(seed=1)
        rows, ended, again, deadline = [], np.zeros(4, bool), 0, time.monotonic() + DEADLINE
        while again < 50 and time.monotonic() < deadline:
            if len(rows) == 30:
                second.server.stop()
                third.server.stop()
            elif len(rows) == 60:
                third.back()
            after, rewards, terminations, truncations, infos = envs.step(np.zeros(4, np.int64))
            rows.append((observations[:, 1], after[:, 1], rewards, infos["valid"], infos["valid"] & ~ended))
            observations, ended = after, terminations | truncations
            again += len(rows) > 60 and infos["valid"][2]
        envs.close()
    before, after, rewards, valid, real = map(np.array, zip(*rows, strict=True))
    assert (after - before)[real].tolist() == [1] * int(real.sum())
    assert (rewards[real] > 0).all()
    assert not valid[~valid[:, 1].cumprod().astype(bool), 1].any()  # the second never comes back
    assert real[:30, 2].sum() == real[:60, 2].sum() == 27  # nine of ten steps, the tenth begins anew
    assert real[60:, 2].sum() > 40
    assert valid[:, [0, 3]].all()


@pytest.mark.parametrize("options", [{"on_lost": "stop"}, {"max_failures": 0}, {"max_failures": 2.5}])
def test_options_that_are_none_are_refused(options):
    with serve_gym(CountingEnv) as server:
        envs = make_vec_remote(server.url)
        with pytest.raises(SettingError, match=f"expected {next(iter(options))} to be"):
            BlockingReset(envs, **options)
        envs.close()


def test_gymnasium_makes_an_environment_with_these_options_again():
    with serve_gym(CountingEnv) as server:
        options = {"on_lost": "continue", "max_failures": 3}
        envs = gymnasium.make_vec("bridge:bridge/Remote-v0", num_envs=2, url=server.url, **options)
        assert {key: envs.spec.kwargs[key] for key in options} == options
        envs.close()


# A server that hangs, and room that returns


HANGS = """
import sys, threading
from bridge import serve_gym
from bridge.testing import CountingEnv
gate = threading.Event()
class Hangs(CountingEnv):
    def step(self, action):
        if action == 1:
            gate.wait()  # as a simulator that waits for something that does not come
        return super().step(action)
with serve_gym(lambda: Hangs(1000)) as server:
    print(server.url, flush=True)
    sys.stdin.readline()
    gate.set()
    sys.stdin.read()
"""


def test_a_hung_simulator_truncates_its_slot_and_the_others_go_on():
    """The time that a slot has and that of the whole step end together: the slot's end is still told by that step."""
    with server_process(HANGS) as (process, url), serve_gym(lambda: CountingEnv(1000)) as healthy:
        envs = BlockingReset(make_vec_remote([healthy.url, url], timeout=1.0), on_lost="continue")
        envs.reset(seed=0)
        _, _, terminations, truncations, infos = envs.step(np.array([0, 1]))
        assert (terminations.tolist(), truncations.tolist()) == ([False, False], [False, True])
        assert "no answer to a step within 1 s" in infos["error"][1]
        for _ in range(4):
            _, _, _, truncations, infos = envs.step(np.array([0, 0]))
            assert not truncations.any()
            assert infos["valid"].tolist() == [True, False]
        process.stdin.write("\n")
        process.stdin.flush()
        deadline = time.monotonic() + DEADLINE
        while not envs.step(np.array([0, 0]))[4]["valid"].all():
            assert time.monotonic() < deadline
        envs.close()


def test_room_that_returns_carries_the_slots_that_a_full_server_refused(tmp_path, caplog):
    """Three full servers carry nine worlds; while one of them is gone, the others refuse its three."""
    limits = Limits(max_worlds=3)
    servers = [serve_gym(lambda: CountingEnv(1000), limits=limits) for _ in range(3)]
    listed = tmp_path / "servers"
    listed.write_text("\n".join(server.url for server in servers))
    envs = BlockingReset(make_vec_remote(f"file://{listed}", num_envs=9), on_lost="continue")
    try:
        envs.reset(seed=0)
        port = servers[2].port
        servers[2].stop()
        refused, deadline = False, time.monotonic() + DEADLINE
        while not refused:
            envs.step(np.zeros(9, np.int64))
            refused = any(report.away is not None and "world" in str(report.reason) for report in envs.env.remotes())
            assert time.monotonic() < deadline, [r.reason for r in envs.env.remotes()]
        servers[2] = serve_gym(lambda: CountingEnv(1000), limits=limits, port=port)
        while not envs.step(np.zeros(9, np.int64))[4]["valid"].all():
            assert time.monotonic() < deadline
        assert all(report.state == "running" for report in envs.env.remotes())
        # Three slots are cut off and come back, and each server is told of when its state changes: no line an attempt.
        assert len(caplog.records) <= 20, caplog.text
    finally:
        envs.close()
        for server in servers:
            server.stop()


class Raises(CountingEnv):
    """Its resets fail."""

    def reset(self, **_):
        raise RuntimeError("no such map")


def test_slots_leave_a_server_whose_environment_always_raises(tmp_path):
    servers = [serve_gym(make) for make in (lambda: CountingEnv(5), Raises, lambda: CountingEnv(5))]
    listed = tmp_path / "servers"
    listed.write_text("\n".join(server.url for server in servers))
    envs = BlockingReset(make_vec_remote(f"file://{listed}", num_envs=6))
    try:
        envs.reset(seed=0)
        play(envs, 20)
        assert servers[1].url not in envs.env.urls
    finally:
        envs.close()
        for server in servers:
            server.stop()


class Spoilable(CountingEnv):
    """Its resets fail from the moment on that `spoilt` is set."""

    spoilt = False

    def reset(self, **keywords):
        if type(self).spoilt:
            raise RuntimeError("no such map")
        return super().reset(**keywords)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("on_lost", ["wait", "continue"])
def test_slots_of_a_list_leave_a_server_that_begins_to_fail(lanes, on_lost, monkeypatch, caplog):
    servers = [serve_gym(make, num_envs=lanes) for make in (lambda: CountingEnv(5), lambda: Spoilable(5))]
    urls = [server.url for server in servers]
    envs = BlockingReset(make_vec_remote(urls, num_envs=4), on_lost=on_lost)
    try:
        envs.reset(seed=0)
        monkeypatch.setattr(Spoilable, "spoilt", True)
        deadline = time.monotonic() + DEADLINE
        while urls[1] in envs.env.urls:
            play(envs, 1)
            assert time.monotonic() < deadline
        while on_lost == "continue" and not envs.step(np.zeros(4, np.int64))[4]["valid"].all():
            assert time.monotonic() < deadline
        play(envs, 12)  # an episode and more
        assert set(envs.env.urls) == {urls[0]}
        reports = [report for report in envs.env.remotes() if report.slots]  # else it tries whether it still fails
        assert all(report.state == "running" for report in reports)
        assert [bool(report.moves) for report in reports].count(True) == 2 // lanes
        assert all(report.steps_asked == report.steps_received + report.steps_lost for report in reports)
        assert len(caplog.records) <= 12, caplog.text
    finally:
        envs.close()
        for server in servers:
            server.stop()


def test_a_call_is_told_that_its_slot_has_moved(monkeypatch):
    gate = threading.Event()

    class Asked(Spoilable):
        def ask(self):
            assert gate.wait(DEADLINE)

    class Spoilt(Asked):
        spoilt = False

    with serve_gym(lambda: Asked(5)) as one, serve_gym(lambda: Spoilt(5)) as two:
        envs = make_vec_remote([one.url, two.url], timeout=DEADLINE)
        try:
            envs.reset()
            while (envs.slot_states != SlotState.RUNNING).any():
                envs.step([0, 0])
            monkeypatch.setattr(Spoilt, "spoilt", True)
            while pool_of(envs).members.at[1].failures < 3:  # its next reset is on the other server
                envs.step([0, 0])
            envs.call_async("ask")
            until(lambda: envs.urls[1] == one.url)
            gate.set()
            with pytest.raises(ConnectionLostError, match="slot 1 moved to another server; call again"):
                envs.call_wait()
        finally:
            gate.set()
            envs.close()


@pytest.mark.slow
def test_slots_of_a_list_go_back_to_their_server_once_it_is_mended(monkeypatch, caplog):
    makes = (lambda length: CountingEnv(length), lambda length: Spoilable(length))
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serve_gym(make)) for make in (makes[0], makes[1], makes[0])]
        urls = [f"{server.url}?kwargs.length={length}" for server, length in zip(servers, (5, 5, 6), strict=True)]
        envs = BlockingReset(make_vec_remote(urls, num_envs=6))
        stack.callback(envs.close)
        envs.reset(seed=0)
        before = envs.env.urls
        monkeypatch.setattr(Spoilable, "spoilt", True)
        deadline = time.monotonic() + DEADLINE
        while urls[1] in envs.env.urls:
            play(envs, 1)
            assert time.monotonic() < deadline
        assert Counter(envs.env.urls) == {before[0]: 4, before[2]: 2}
        monkeypatch.setattr(Spoilable, "spoilt", False)
        while envs.env.urls != before:
            assert not envs.step(np.zeros(6, np.int64))[3].any(), "no episode is cut"
            assert time.monotonic() < deadline
        play(envs, 12)
        assert envs.env.urls == before
        assert [len(report.slots) for report in envs.env.remotes()] == [1] * 6, "no spare is left"
        assert all(report.steps_asked == report.steps_received for report in envs.env.remotes())
        assert [r.getMessage() for r in caplog.records if f"{urls[1]} answers" in r.getMessage()] == [
            f"{urls[1]} answers, and its environment works again"
        ]


def test_a_copy_of_a_list_has_its_slots_at_their_own_servers(monkeypatch):
    with serve_gym(lambda: CountingEnv(5)) as one, serve_gym(lambda: Spoilable(5)) as other:
        envs = BlockingReset(make_vec_remote([one.url, other.url]))
        envs.reset(seed=0)
        monkeypatch.setattr(Spoilable, "spoilt", True)
        while other.url in envs.env.urls:
            play(envs, 1)
        monkeypatch.setattr(Spoilable, "spoilt", False)
        copied = pickle.loads(pickle.dumps(envs))
        copied.reset(seed=0)
        assert copied.env.urls == (one.url, other.url)
        for each in (copied, envs):
            each.close()


def test_slots_of_a_list_stay_where_no_other_server_has_their_environment(monkeypatch):
    servers = [serve_gym(make) for make in (lambda length: CountingEnv(length), lambda length: Spoilable(length))]
    urls = [f"{server.url}?kwargs.length={5 + index}" for index, server in enumerate(servers)]
    envs = BlockingReset(make_vec_remote(urls))
    try:
        envs.reset(seed=0)
        before = envs.env.urls
        monkeypatch.setattr(Spoilable, "spoilt", True)
        with pytest.raises(EnvironmentFailedError, match="no such map"):
            play(envs, 40)
        assert envs.env.urls == before
    finally:
        envs.close()
        for server in servers:
            server.stop()


def test_an_environment_that_raises_on_every_server_ends_the_loop(tmp_path):
    servers = [serve_gym(Raises) for _ in range(2)]
    listed = tmp_path / "servers"
    listed.write_text("\n".join(server.url for server in servers))
    envs = BlockingReset(make_vec_remote(f"file://{listed}", num_envs=4))
    try:
        with pytest.raises(EnvironmentFailedError, match="no such map"):
            envs.reset(seed=0)
    finally:
        envs.close()
        for server in servers:
            server.stop()


def test_a_last_observation_that_is_told_again_brings_no_remark_again():
    """A slot that was lost gives it once more; what its info said once was told with the step."""

    class Odd(CountingEnv):
        def step(self, action):
            *result, info = super().step(action)
            return *result, {**info, "handle": object()}

    zeros = np.zeros(2, np.int64)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with serve_gym(lambda: Odd(9)) as server:
            envs = make_vec_remote(server.url, num_envs=2, lanes=True, blocking=True)
            envs.reset()
            seen = envs.step(zeros)[0]
        assert sum("handle" in str(each.message) for each in told) == 1
        observations, _, _, truncations, _ = envs.step(zeros)
        envs.close()
    assert truncations.tolist() == [True, True]
    assert observations.tolist() == seen.tolist() == [[1, 1]] * 2
    assert sum("handle" in str(each.message) for each in told) == 1
