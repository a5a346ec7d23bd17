"""Worlds of several agents saved, restored and forked: right, or refused."""

from __future__ import annotations

import pickle
import re
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest

from bridge import Listener, Observer, make_parallel_remote, make_remote, make_vec_remote, serve_parallel
from bridge.errors import Code, RefusedError, SettingError
from tests.parallel_envs import Relay
from tests.states.herds import Fragile, Herd, OfClass, Sampling, fragile
from tests.states.right_or_refused import judge
from tests.support import assert_identical, sampled, stable_id

DEADLINE = 60.0
STEPS = 100


@contextmanager
def served(kind: Any, *, states: bool = False, **keywords: Any) -> Iterator[tuple[Any, Any]]:
    """A server of several agents, with keywords of `serve_parallel`, and a client that has them all."""
    with (
        serve_parallel(kind, **keywords) as server,
        closing(make_parallel_remote(server.url, states=states, timeout=DEADLINE)) as env,
    ):
        yield server, env


def drawn(env: Any, steps: int, seed: int = 0) -> list[dict[str, Any]]:
    """Actions for all that may act, step by step."""
    spaces = {agent: env.action_space(agent) for agent in env.possible_agents}
    for number, space in enumerate(spaces.values()):
        space.seed(seed + number)
    return [{agent: space.sample() for agent, space in spaces.items()} for _ in range(steps)]


def played(env: Any, actions: list[dict[str, Any]]) -> list[Any]:
    """What an environment gives for actions, across the ends of episodes."""
    found: list[Any] = []
    for joint in actions:
        found.append((env.step({agent: joint[agent] for agent in env.agents}), list(env.agents)))
        if not env.agents:
            found.append((env.reset(), list(env.agents)))
    return found


KINDS = [
    *((Herd, "copy"), (Relay, "copy"), (Fragile, "replay"), (fragile, "replay")),
    # By PettingZoo's own conversion, and wrappers.
    *(("classic/connect_four-v3", "copy"), ("classic/rps-v2", "copy")),
]
# `.ci/run` plays three of them here, and one isolated.
HERE_OR_ISOLATED = [
    *sampled([(*each, None) for each in KINDS], 6, slow=2),
    *sampled([(*each, "process") for each in KINDS], 6, 1),
]


@pytest.mark.parametrize(("kind", "how", "isolation"), HERE_OR_ISOLATED, ids=stable_id)
def test_a_world_of_several_agents_goes_on_from_its_state(kind: Any, how: str, isolation: Any) -> None:
    with served(kind, states=True, isolation=isolation) as (_, env):
        env.reset(seed=3)
        before = played(env, drawn(env, 7, seed=1))
        state = env.save_state()
        assert state.how == how
        alive = list(env.agents)
        (observations, *_, infos), _ = before[-1]
        actions = drawn(env, STEPS)
        wanted = played(env, actions)
        for _ in range(2):
            seen, told = env.restore_state(state)
            assert env.agents == alive
            assert_identical(seen, {agent: observations[agent] for agent in alive})
            assert_identical(told, {agent: infos[agent] for agent in alive})
            assert_identical(played(env, actions), wanted)
        state.release()


@pytest.mark.slow
def test_a_state_is_restored_whoever_has_ended_when_it_was_saved_and_since() -> None:
    with served(Herd) as (_, env):
        env.reset(seed=0)
        states, alive, results, actions = [], [], [], drawn(env, 39)
        for joint in actions:
            states.append(env.save_state())
            alive.append(list(env.agents))
            results.append(env.step({agent: joint[agent] for agent in env.agents}))
        assert any("ann" not in agents for agents in alive), "also of one by whose connection it is asked for"
        # From an episode that is over, from the middle of it, and from one that was reset.
        env.step({agent: actions[0][agent] for agent in env.agents})
        assert not env.agents
        with pytest.raises(RefusedError, match="no episode runs"):
            env.save_state()
        for number in (*range(39), 38, 0, 20):
            env.restore_state(states[number])
            assert env.agents == alive[number]
            joint = {agent: actions[number][agent] for agent in env.agents}
            assert_identical(env.step(joint), results[number])
            if number % 3 == 0:
                env.reset()


@pytest.mark.slow
def test_branches_of_several_agents_differ_by_their_seeds_and_are_reproducible() -> None:
    with served(Herd) as (_, env):
        env.reset(seed=0)
        state, actions = env.save_state(), drawn(env, 30)
        found = []
        for seed in (7, 8, 7, None):
            env.restore_state(state, seed=seed)
            found.append(played(env, actions))
        assert_identical(found[0], found[2])
        assert repr(found[0]) != repr(found[1])
        assert repr(found[0]) != repr(found[3])


@pytest.mark.slow
def test_another_client_goes_on_from_a_pickled_state_of_several_agents() -> None:
    with served(Herd) as (server, env):
        env.reset(seed=0)
        played(env, drawn(env, 5))
        state, actions = env.save_state(), drawn(env, 20)
        with closing(make_parallel_remote(server.url, timeout=DEADLINE)) as other:
            # Before its first reset, too.
            other.restore_state(pickle.loads(pickle.dumps(state)))
            assert_identical(played(other, actions), played(env, actions))
        with pytest.raises(SettingError, match="slots= is for vector environments"):
            env.save_state(slots=[0])


@pytest.mark.parametrize("kind", sampled([OfClass, Sampling], 2, 1, slow=True), ids=stable_id)
def test_several_agents_that_share_a_generator_with_other_worlds_are_refused(kind: Any) -> None:
    with served(kind) as (_, env):
        env.reset(seed=0)
        with pytest.raises(RefusedError, match="no state that can be copied") as refused:
            env.save_state()
        assert refused.value.code == Code.FAILED_PRECONDITION
        env.step({agent: env.action_space(agent).sample() for agent in env.agents})


def test_an_environment_that_was_given_is_refused_since_there_is_no_other_to_try() -> None:
    with serve_parallel(Herd()) as server, closing(make_parallel_remote(f"{server.url}?world=")) as env:
        env.reset(seed=0)
        with pytest.raises(RefusedError, match="give serve_parallel a callable"):
            env.save_state()
        played(env, drawn(env, 3))


def test_several_agents_in_real_time_and_a_match_have_no_states() -> None:
    for keywords in ({"fps": 50}, {"fps": 50, "match": True}):
        with serve_parallel(Herd, **keywords) as server, closing(make_parallel_remote(server.url)) as env:
            if "match" not in keywords:
                env.reset(seed=0)
            with pytest.raises(RefusedError, match="lock-step") as refused:
                env.save_state()
            assert refused.value.code == Code.UNIMPLEMENTED


def test_one_of_two_clients_in_a_world_saves_nothing() -> None:
    with (
        serve_parallel(Relay, missing_agent="default") as server,
        closing(make_remote(f"{server.url}?world=", agent="bob", timeout=DEADLINE)) as bob,
        closing(make_remote(f"{server.url}?world=", agent="ann", timeout=DEADLINE)) as ann,
    ):
        thread = threading.Thread(target=ann.reset)
        thread.start()
        bob.reset(seed=0)
        thread.join(DEADLINE)
        with pytest.raises(RefusedError, match="has a world alone") as refused:
            bob.save_state()
        assert refused.value.code == Code.PERMISSION_DENIED


@pytest.mark.parametrize("agent", ["ann", "dan"])
@pytest.mark.slow
def test_one_agent_whose_world_nobody_else_plays_goes_on_and_may_have_ended(agent: str) -> None:
    with (
        serve_parallel(Herd, missing_agent="default") as server,
        closing(make_remote(f"{server.url}?world=", agent=agent, timeout=DEADLINE)) as env,
    ):
        env.reset(seed=0)
        saved, *_, info = env.step(env.action_space.sample())
        state, action = env.save_state(), env.action_space.sample()
        wanted = env.step(action)
        for _ in range(2):
            observation, told = env.restore_state(state)
            assert_identical((observation, told), (saved, info))
            assert_identical(env.step(action), wanted)


@pytest.mark.slow
def test_slots_that_are_agents_of_one_world_have_no_states() -> None:
    with (
        served(Herd, missing_agent="default") as (server, env),
        closing(make_vec_remote(f"{server.url}?world=", agent=["ann", "bob"], timeout=DEADLINE)) as envs,
    ):
        env.reset(seed=0)
        state = env.save_state()
        envs.reset(seed=0)
        with pytest.raises(SettingError, match="make_parallel_remote"):
            envs.save_state()
        with pytest.raises(SettingError, match="make_parallel_remote"):
            envs.restore_state(state, slots=[0])
        played(env, drawn(env, 3))


class Told(Observer, Listener):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def made(self, world: Any) -> Told:
        return self

    def began(self, lane: Any, result: Any, mask: Any) -> None:
        self.events.append(("began", np.array(result[0]["bob"])))

    def placed(self, result: Any, mask: Any) -> None:
        self.events.append(("placed", np.array(result[0]["bob"])))

    def stepped(self, lane: Any, action: Any, result: Any) -> Any:
        self.events.append(("stepped", np.array(result[0]["bob"])))
        return result


@pytest.mark.parametrize("kind", [Herd, Fragile, fragile], ids=stable_id)
@pytest.mark.slow
def test_an_observer_follows_a_restored_world_of_several_agents(kind: Any) -> None:
    told = Told()
    with served(kind, states=True, observers=[told]) as (_, env):
        env.reset(seed=0)
        saved, state = env.step(drawn(env, 1)[0])[0], env.save_state()
        after = env.step(drawn(env, 1)[0])[0]
        env.restore_state(state)
        env.step(drawn(env, 1)[0])
        assert [name for name, _ in told.events] == ["began", "stepped", "stepped", "placed", "stepped"]
        assert_identical(told.events[3][1], saved["bob"])
        assert_identical(told.events[4][1], after["bob"])


@pytest.mark.parametrize(
    ("module", "told"),
    sampled(
        [
            ("mpe2.simple_spread_v3", r"World\.apply_action_force draws .* \(numpy\.random\.randn\)"),
            ("pettingzoo.butterfly.pistonball_v6", r"_cffi_backend.* and by replay: space\._bodies_to_check is a set"),
            (
                "pettingzoo.butterfly.knights_archers_zombies_v11",
                r"is a pygame\.surface\.Surface within a list or dict",
            ),
        ],
        3,
        slow=True,
    ),
    ids=["mpe2", "pistonball", "knights"],
)
def test_what_of_an_environment_of_a_zoo_cannot_be_copied_is_named(module: str, told: str) -> None:
    found = pytest.importorskip(module)
    verdict = judge(found.parallel_env)
    assert verdict.way == ""
    assert re.search(told, verdict.reason), verdict.reason


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*render method without:UserWarning")
def test_a_game_of_a_zoo_that_draws_what_it_shows_anew_is_copied() -> None:
    found = pytest.importorskip("pettingzoo.butterfly.cooperative_pong_v6")
    assert judge(found.parallel_env).way == "copy"
