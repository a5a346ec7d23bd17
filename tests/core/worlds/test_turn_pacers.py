"""Pacers of a user's own, as docs/plugins.md has them: when an environment is stepped, and by which actions."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from bridge import Decision, Turn, TurnPacer, make_parallel_remote, make_remote, serve_gym, serve_parallel
from bridge.core.encoding.tensors import pack_tensor
from bridge.errors import Code, RequestError, SettingError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv, LocalRuntime, VirtualClock
from tests.parallel_envs import NAMES, Relay
from tests.places import ROOT
from tests.support import direct_world, gym_source, parallel_source

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PATIENCE = 30.0


def blocks_of_the_page() -> dict[str, str]:
    page = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
    return dict(re.findall(r'^```\w+ title="(.*?)"\n(.*?)^```', page, re.MULTILINE | re.DOTALL))


class TurnTimer(TurnPacer):
    """Each player has some seconds for an action; then the default action stands in."""

    def __init__(self, seconds: float = 5.0) -> None:
        self.seconds = seconds

    def may_begin(self, turn: Turn) -> bool:
        """Begin with those who are there."""
        return not turn.running and set(turn.joined) <= set(turn.asked)

    def decide(self, turn: Turn) -> Decision:
        """Step once all who play have acted, or the time is over."""
        end = turn.began + self.seconds
        if turn.now < end and not set(turn.playing) <= set(turn.actions):
            return turn.wait(until=end)
        return turn.step(turn.actions)


class SealedBids(TurnPacer):
    """Takes the highest bid once all have bid, or two seconds have passed; who is silent bids nothing."""

    players = ("first", "second")

    def decide(self, turn: Turn) -> Decision:
        end = turn.began + 2.0
        if len(turn.actions) < len(turn.alive) and turn.now < end:
            return turn.wait(until=end)
        return turn.step(max(turn.actions.values(), default=0))


class AtMost(TurnPacer):
    """Steps in lock-step, at most ten times a second, whatever the number of agents."""

    def decide(self, turn: Turn) -> Decision:
        if len(turn.actions) < len(turn.alive):
            return turn.wait()
        due = turn.began + 0.1
        return turn.step(turn.actions) if turn.now >= due else turn.wait(until=due)


class Alternating(TurnPacer):
    """Two players control an environment in turns; who is not on sees each step."""

    players = ("left", "right")

    def decide(self, turn: Turn) -> Decision:
        if len(turn.actions) < 2:
            return turn.wait()
        return turn.step(turn.actions[self.players[turn.number % 2]])


class FirstCome(TurnPacer):
    """The first action counts; the Steps of others are for the next turn."""

    def decide(self, turn: Turn) -> Decision:
        first = dict(list(turn.actions.items())[:1])
        return turn.step(first) if first else turn.wait()


class ZeroSum(TurnPacer):
    """Each half of the actions is a player's own, and what one gets the other loses."""

    players = ("one", "other")

    def spaces_of(self, name: str, spaces_: tuple[Any, Any]) -> tuple[Any, Any]:
        return spaces_[0], spaces.Box(-1, 1, (1,), np.float32)

    def told(self, name: str, transition: Any) -> Any:
        return dataclasses.replace(transition, reward=transition.reward * (1.0 if name == "one" else -1.0))

    def decide(self, turn: Turn) -> Decision:
        if len(turn.actions) < 2:
            return turn.wait()
        return turn.step(np.concatenate([turn.actions[name] for name in self.players]))


class Pair(gymnasium.Env[Any, Any]):
    """Takes two numbers, and gives them back and their difference as reward."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return action, float(action[0] - action[1]), False, False, {}


class Host:
    """A world in a runtime whose time the test turns, and agents whose Steps it sends."""

    def __init__(self, source: Any) -> None:
        self.clock = VirtualClock(100.0)
        self.runtime = LocalRuntime(self.clock.now)
        self.world = direct_world(source, runtime=self.runtime).wrapped
        self.failures: list[str] = []
        self.world.report_failure = self.failures.append

    def join(self, **settings: Any) -> Any:
        return self.world.join(settings)

    def start(self, coroutine: Any) -> list[Any]:
        """Send a request; return a list that gets the answer."""
        answers: list[Any] = []
        self.runtime.scheduler.start(coroutine, lambda state, error: answers.append(error or state))
        self.settle()
        return answers

    def settle(self) -> None:
        scheduler = self.runtime.scheduler
        while scheduler.ready:
            scheduler.run()

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.runtime.scheduler.run()
        self.settle()


def step(host: Host, agent: Any, action: Any) -> list[Any]:
    return host.start(agent.apply(action))


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def together(threads: ThreadPoolExecutor, *calls: Callable[[], Any]) -> list[Any]:
    return [future.result(PATIENCE) for future in [threads.submit(call) for call in calls]]


def test_the_world_of_the_page_is_served_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: ThreadPoolExecutor
) -> None:
    """The package is laid out as pip installs it; nothing of it is imported before somebody names it."""
    blocks = blocks_of_the_page()
    project = tomllib.loads(blocks["pyproject.toml of bridge-voting"])["project"]
    (names,) = project["entry-points"].items()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "bridge_voting", raising=False)
    (tmp_path / "bridge_voting.py").write_text(blocks["bridge_voting.py"], encoding="utf-8")
    info = tmp_path / "bridge_voting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0\n", encoding="utf-8")
    lines = [f"[{names[0]}]", *(f"{name} = {place}" for name, place in names[1].items())]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(SettingError, match=r"no installed package has a world 'vote' \(installed: voting\)"):
        serve_gym("CartPole-v1", world="vote")
    assert "bridge_voting" not in sys.modules
    with serve_gym("CartPole-v1", world="voting") as server:
        voters = [make_remote(f"{server.url}?world=") for _ in range(3)]
        local = gymnasium.make("CartPole-v1")
        first, _ = local.reset(seed=5)
        for observation, _ in together(threads, *(partial(voter.reset, seed=5) for voter in voters)):
            np.testing.assert_array_equal(observation, first)
        for votes in ((1, 0, 1), (0, 0, 1)):
            expected = local.step(int(sum(votes) >= 2))
            results = together(threads, *(partial(one.step, vote) for one, vote in zip(voters, votes, strict=True)))
            for result in results:
                np.testing.assert_array_equal(result[0], expected[0])
                assert result[1:4] == expected[1:4]
        together(threads, *(voter.close for voter in voters))


def test_a_player_who_is_late_is_told_all_that_has_passed_by_the_next_step() -> None:
    host = Host(gym_source(lambda: CountingEnv(length=4), world=TurnTimer))
    agent = host.join()
    assert host.start(agent.begin()) == [pb.RUNNING]
    assert step(host, agent, 1) == [pb.RUNNING]
    rewards = [float(agent.reward)]
    host.advance(5.0)
    host.advance(5.0)
    assert host.world.env.times.step.count == 3, "two steps by the default action"
    assert step(host, agent, 1) == [pb.TERMINATED]
    rewards.append(float(agent.reward))
    local = CountingEnv(length=4)
    local.reset()
    expected = [local.step(action)[:2] for action in (1, 0, 0, 1)]
    assert rewards == [expected[0][1], sum(float(reward) for _, reward in expected[1:])]
    np.testing.assert_array_equal(agent.observation, expected[-1][0])


def test_an_end_that_came_without_a_player_is_told_by_the_next_step() -> None:
    host = Host(gym_source(lambda: CountingEnv(length=2), world=partial(TurnTimer, 3.0)))
    agent = host.join()
    host.start(agent.begin())
    for _ in range(4):
        host.advance(3.0)
    assert host.world.env.times.step.count == 2, "nobody plays on when the episode has ended"
    assert step(host, agent, 1) == [pb.TERMINATED]
    assert host.start(agent.begin()) == [pb.RUNNING]
    assert host.world.counts().episodes == 1


def test_each_of_several_players_has_time_and_defaults_stand_in_for_those_who_are_late() -> None:
    host = Host(parallel_source(lambda: Relay(horizon=10), world=TurnTimer))
    ann, bob = host.join(), host.join()
    begun = host.start(ann.begin())
    assert not begun, "bob has joined, and has not asked"
    assert host.start(bob.begin()) == [pb.RUNNING]
    assert begun == [pb.RUNNING]
    waits = step(host, ann, np.int64(1))
    host.advance(4.9)
    assert not waits
    host.advance(0.2)
    assert waits == [pb.RUNNING], "bob was late, and cyd is nobody's"
    bob_runs = {"run": np.int64(0), "lean": np.zeros(2, np.float32)}
    both = [step(host, ann, np.int64(1)), step(host, bob, bob_runs)]
    assert both == [[pb.RUNNING], [pb.RUNNING]], "no time passed: both have acted"
    assert host.world.pacer.applied_by(0) == {}


def test_two_players_control_an_environment_in_turns(threads: ThreadPoolExecutor) -> None:
    made = []

    class Keeping(CountingEnv):
        def step(self, action: Any) -> Any:
            made.append(int(action))
            return super().step(action)

    with serve_gym(lambda: Keeping(length=6), world=Alternating) as server:
        left, right = (make_remote(f"{server.url}?world=") for _ in range(2))
        together(threads, left.reset, right.reset)
        results = [together(threads, partial(left.step, 0), partial(right.step, 1)) for _ in range(6)]
        assert [one[2] for one, _ in results] == [False] * 5 + [True]
        for one, other in results:
            np.testing.assert_array_equal(one[0], other[0])
        assert made == [0, 1] * 3
        together(threads, left.close, right.close)


def test_only_the_steps_that_made_a_turn_are_answered() -> None:
    host = Host(parallel_source(lambda: Relay(horizon=10), world=FirstCome))
    agents = [host.join() for _ in NAMES]
    for agent in agents:
        host.start(agent.begin())
    count = host.world.env.times.step
    assert step(host, agents[1], {"run": np.int64(0), "lean": np.zeros(2, np.float32)}) == [pb.RUNNING]
    assert count.count == 1
    assert step(host, agents[0], np.int64(1)) == [pb.RUNNING]
    assert count.count == 2


def test_players_have_spaces_and_rewards_of_their_own(threads: ThreadPoolExecutor) -> None:
    with serve_gym(Pair, world=ZeroSum) as server:
        one, other = (make_remote(f"{server.url}?world=") for _ in range(2))
        together(threads, one.reset, other.reset)
        act = [np.array([value], np.float32) for value in (0.5, -0.25)]
        first, second = together(threads, partial(one.step, act[0]), partial(other.step, act[1]))
        assert first[0].tolist() == second[0].tolist() == [0.5, -0.25]
        assert (first[1], second[1]) == (0.75, -0.75)
        together(threads, one.close, other.close)


def test_a_parallel_environment_takes_a_pacer(threads: ThreadPoolExecutor) -> None:
    pytest.importorskip("pettingzoo")
    with serve_parallel(lambda: Relay(horizon=3), world=partial(TurnTimer, 60.0)) as server:
        env = make_parallel_remote(server.url)
        observations, _ = env.reset(seed=1)
        local = Relay(horizon=3)
        expected, _ = local.reset(seed=1)
        np.testing.assert_array_equal(observations["ann"], expected["ann"])
        while env.agents:
            actions = {name: env.action_space(name).sample() for name in env.agents}
            results, reference = env.step(actions), local.step(actions)
            assert results[1:4] == reference[1:4]
        env.close()


def test_a_pacer_ends_an_episode_for_all() -> None:
    class Short(TurnPacer):
        players = ("a", "b")

        def decide(self, turn: Turn) -> Decision:
            if turn.number == 2:
                return turn.end()
            return turn.step(0) if len(turn.actions) == 2 else turn.wait()

    host = Host(gym_source(lambda: CountingEnv(length=100), world=Short))
    a, b = host.join(), host.join()
    host.start(a.begin())
    host.start(b.begin())
    for _ in range(2):
        waits = step(host, a, 0)
        assert not waits
        assert step(host, b, 0) == [pb.RUNNING] == waits
    assert [step(host, agent, 0) for agent in (a, b)] == [[pb.INTERRUPTED]] * 2
    assert (bool(a.terminated), bool(a.truncated)) == (False, True)


def test_a_step_that_waits_for_too_long_is_refused_and_may_be_sent_again() -> None:
    class Quick(Alternating):
        patience = 2.0

    host = Host(gym_source(lambda: CountingEnv(length=100), world=Quick))
    left, right = host.join(), host.join()
    host.start(left.begin())
    host.start(right.begin())
    waits = step(host, right, 0)
    host.advance(2.0)
    assert isinstance(waits[0], RequestError)
    assert waits[0].code is Code.DEADLINE_EXCEEDED
    assert "waited patience=2 s for the agents left" in waits[0].message
    again = step(host, right, 0)
    assert step(host, left, 0) == [pb.RUNNING] == again


class Broken(TurnPacer):
    """Does what a test says."""

    wrong: Any = None

    def decide(self, turn: Turn) -> Decision:
        if not turn.actions:
            return turn.wait()
        found: Decision = type(self).wrong(turn)
        return found


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda turn: 1 / 0, "the environment raised ZeroDivisionError in the pacer Broken"),
        (lambda turn: sys.exit(3), "the environment raised SystemExit in the pacer Broken"),
        (lambda turn: None, r"expected turn.step\(…\), turn.wait\(…\) or turn.end\(\) of decide, got None"),
        (lambda turn: turn.wait(until=turn.now), "expected a time to wait until that is after now=100, got 100.0"),
    ],
    ids=["raises", "exits", "decides nothing", "waits for the past"],
)
def test_a_pacer_that_is_broken_refuses_steps_and_is_logged(
    monkeypatch: pytest.MonkeyPatch, wrong: Any, message: str
) -> None:
    monkeypatch.setattr(Broken, "wrong", staticmethod(wrong))
    host = Host(gym_source(lambda: CountingEnv(length=100), world=Broken))
    agent = host.join()
    host.start(agent.begin())
    (error,) = step(host, agent, 0)
    assert error.code is Code.INTERNAL
    (logged,) = host.failures
    assert all(re.search(message, text) for text in (error.message, logged))
    monkeypatch.setattr(Broken, "wrong", staticmethod(lambda turn: turn.step(*turn.actions.values())))
    assert step(host, agent, 0) == [pb.RUNNING], "the sequence goes on"


def test_an_environment_that_raises_without_anybody_s_action_is_logged_once_a_turn() -> None:
    class Bad(CountingEnv):
        def step(self, action: Any) -> Any:
            raise RuntimeError("stuck")

    host = Host(gym_source(Bad, world=TurnTimer))
    host.start(host.join().begin())
    for turns in (1, 2):
        host.advance(5.0)
        assert ["stuck" in text for text in host.failures] == [True] * turns


def test_bids_are_taken_when_all_are_in_or_their_time_is_over() -> None:
    host = Host(gym_source(lambda: CountingEnv(length=100), world=SealedBids))
    first, second = host.join(), host.join()
    host.start(first.begin())
    host.start(second.begin())
    waits = step(host, first, 0)
    assert not waits
    assert step(host, second, 1) == [pb.RUNNING] == waits
    late = step(host, first, 1)
    host.advance(1.9)
    assert not late
    host.advance(0.2)
    assert late == [pb.RUNNING], "the second did not bid in time"


@pytest.mark.parametrize("several", [False, True])
def test_a_pacer_holds_steps_back_and_gives_actions_by_name_to_one_agent_as_to_several(several: bool) -> None:
    taken = []

    class Keeping(CountingEnv):
        def step(self, action: Any) -> Any:
            taken.append(action)
            return super().step(action)

    host = Host(
        parallel_source(lambda: Relay(horizon=10), world=AtMost) if several else gym_source(Keeping, world=AtMost)
    )
    agents = [host.join() for _ in (NAMES if several else "1")]
    begun = [host.start(agent.begin()) for agent in agents]
    actions = [np.int64(1), {"run": np.int64(0), "lean": np.zeros(2, np.float32)}, np.ones(1, np.float32)]
    for _ in range(2):
        waits = [step(host, agent, action) for agent, action in zip(agents, actions, strict=False)]
        host.advance(0.05)
        assert not any(waits)
        host.advance(0.06)
        assert all(waits)
    assert all(begun)
    assert taken == ([] if several else [1, 1])


def test_an_action_that_is_a_dict_is_the_environment_s_own() -> None:
    space = spaces.Dict({"agent": spaces.Discrete(3)})

    class Keyed(Pair):
        action_space: Any = space

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            return np.zeros(2, np.float32), float(action["agent"]), False, False, {}

    class Plain(TurnPacer):
        def decide(self, turn: Turn) -> Decision:
            return turn.step(*turn.actions.values()) if turn.actions else turn.wait()

    host = Host(gym_source(Keyed, world=Plain))
    agent = host.join()
    host.start(agent.begin())
    assert step(host, agent, {"agent": np.int64(2)}) == [pb.RUNNING]
    assert float(agent.reward) == 2.0


def test_players_who_share_an_environment_give_it_one_action() -> None:
    class ByName(SealedBids):
        def decide(self, turn: Turn) -> Decision:
            return turn.step(turn.actions) if turn.actions else turn.wait()

    host = Host(gym_source(lambda: CountingEnv(length=100), world=ByName))
    first, second = host.join(), host.join()
    host.start(first.begin())
    host.start(second.begin())
    (error,) = step(host, first, 0)
    assert error.code is Code.INTERNAL
    assert "expected one action for the environment of turn.step(…), which first, second have together" in error.message


def test_what_is_no_pacer_is_refused() -> None:
    class Needy(TurnTimer):
        def __init__(self, seconds: float, more: int) -> None:
            super().__init__(seconds)

    for wrong, message in (
        (5, "expected world to be a class derived from bridge.TurnPacer"),
        (TurnTimer(), "expected world to be a class derived from bridge.TurnPacer"),
        (Needy, r"give functools.partial\(Needy, …\)"),
        (lambda: {}, "expected world to make a bridge.TurnPacer, got {}"),
        (partial(TurnTimer, 1.0), "expected num_envs=1, got 2 lanes"),
    ):
        with pytest.raises(SettingError, match=message):
            serve_gym("CartPole-v1", num_envs=2, world=wrong, start=False)
    with pytest.raises(SettingError, match="missing_agent and fps: world= has a pacer of its own"):
        serve_parallel(Relay, world=TurnTimer, fps=5, missing_agent="end")


def test_a_client_more_than_there_are_players_is_refused_and_one_may_name_its_place() -> None:
    host = Host(gym_source(CountingEnv, world=Alternating))
    host.join(agent=pack_tensor("right"))
    assert host.world.played == {"left": False, "right": True}
    with pytest.raises(RequestError, match="the agent 'right' is taken; there are still left"):
        host.join(agent=pack_tensor("right"))
    left = host.join()
    with pytest.raises(RequestError, match="all of its 2 agents are taken"):
        host.join()
    left.leave()
    assert host.join().name == "left"
