"""Attributes and methods of a remote environment by a dot, which act where it runs, and what stays here."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import pickle
import re
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import bridge
from bridge import errors, make_parallel_remote, make_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.errors import Code, EnvironmentFailedError, MissingAttributeError, RefusedError
from bridge.testing import CountingEnv
from bridge.wrappers import BlockingReset
from tests.parallel_envs import Relay
from tests.places import ROOT
from tests.public_server import PublicServer
from tests.support import everywhere, minigrid


class Planet(CountingEnv):
    """Has attributes and methods of every kind; `asked` counts how often its property is run."""

    LEVELS = (1, 2)
    action_space = spaces.Discrete(4)

    def __init__(self) -> None:
        super().__init__(8)
        self.gravity, self.asked, self.spec_sheet, self.engine = 9.8, 0, {"mass": [1, 2.5]}, object()
        self._hidden = 1

    @property
    def slow(self) -> int:
        self.asked += 1
        return self.asked

    @property
    def broken(self) -> int:
        raise ZeroDivisionError("in the property")

    @property
    def wind(self) -> float:
        return self.__dict__.get("_wind", 0.5)

    @wind.setter
    def wind(self, speed: float) -> None:
        self._set(speed)

    def _set(self, speed: float) -> None:
        if speed < 0:
            raise AttributeError("in the setter")
        self._wind = speed

    @staticmethod
    def moons() -> int:
        return 2

    @classmethod
    def title(cls) -> str:
        return cls.__name__

    def fall(self, seconds: float, *, steps: int = 1) -> float:
        return self.gravity * seconds * steps

    def stumble(self) -> None:
        raise AttributeError("inside of the method")

    def reset(self, **keywords: Any) -> Any:
        result = super().reset(**keywords)
        if self.LEVELS:
            self.crater = 7
        return result


class Named(gymnasium.Wrapper):
    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.colour = "red"


class Forwarding(gymnasium.Wrapper):
    """Hands on what it has not, as many wrappers of users do."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.env, name)


def planet() -> Any:
    return gymnasium.wrappers.TimeLimit(Named(Planet()), 100)


KINDS = pytest.mark.parametrize(
    "options", [{}, {"isolation": "process"}, {"fps": 200.0}, {"thread_safe": True}, {"web": True}], ids=str
)


@KINDS
def test_attributes_are_read_called_and_set_where_the_environment_runs(options: Any) -> None:
    with serve_gym(planet, **options) as server:
        url = server.urls[-1] if "web" in options else server.url
        with make_remote(url) as env:
            env.reset(seed=0)
            assert (env.unwrapped.gravity, env.colour, env.LEVELS) == (9.8, "red", (1, 2))
            env.unwrapped.gravity = 2.0
            env.colour = "blue"
            env.wind = 3.5
            assert (env.call("gravity"), env.call("colour"), env.call("wind")) == (2.0, "blue", 3.5)
            assert (env.fall(2.0, steps=3), env.moons(), env.title()) == (12.0, 2, "Planet")
            assert env.spec_sheet == {"mass": [1, 2.5]}
            assert not {"gravity", "colour", "wind"} & set(vars(env))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda env: gymnasium.wrappers.TimeLimit(env, 100),
        gymnasium.wrappers.RecordEpisodeStatistics,
        lambda env: gymnasium.wrappers.ClipReward(gymnasium.wrappers.OrderEnforcing(env), 0, 1),
        gymnasium.wrappers.PassiveEnvChecker,
        lambda env: Named(gymnasium.wrappers.TimeLimit(env, 100)),
    ],
)
def test_nothing_hides_the_environments_attribute_from_a_wrapper(wrap: Any) -> None:
    with serve_gym(planet) as server, make_remote(server.url) as env:
        outer = wrap(env)
        outer.reset(seed=0)
        outer.unwrapped.gravity = 2.0
        assert outer.set_wrapper_attr("gravity", 3.0)
        assert outer.has_wrapper_attr("gravity")
        assert outer.get_wrapper_attr("gravity") == outer.unwrapped.gravity == env.call("gravity") == 3.0
        assert outer.get_wrapper_attr("fall")(2.0) == 6.0
        outer.unwrapped.gravity = 4.0
        assert env.call("gravity") == 4.0


def test_a_wrapper_that_hands_on_attributes_hands_on_these() -> None:
    with serve_gym(planet) as server, make_remote(server.url) as env:
        outer = Forwarding(env)
        env.gravity = 3.0
        assert (outer.gravity, outer.fall(1.0), outer.get_wrapper_attr("gravity")) == (3.0, 3.0, 3.0)
        assert not hasattr(outer, "nothing")


def test_a_remote_environment_acts_as_the_local_one() -> None:
    def play(env: Any) -> list[Any]:
        env.reset(seed=3)
        env.unwrapped.gravity = 2.0
        env.unwrapped.force_mag = 20.0
        return [env.step(action)[0].tolist() for action in (0, 1, 1, 0, 1)]

    with serve_gym("CartPole-v1") as server, make_remote(server.url) as env:
        assert play(env) == play(gymnasium.make("CartPole-v1"))


def test_a_name_that_nobody_has_names_the_calls_to_use() -> None:
    with serve_gym(planet) as server, make_remote(server.url) as env:
        with pytest.raises(AttributeError, match="set_wrapper_attr"):
            env.unwrapped.gravty = 2.0
        with pytest.raises(AttributeError, match="get_wrapper_attr"):
            env.unwrapped.gravty  # noqa: B018
        assert not hasattr(env, "gravty")
        assert env.set_wrapper_attr("gravty", 1.5)
        assert env.gravty == 1.5
        env.gravty = 2.5
        assert env.get_attr("gravty") == 2.5
        for private in ("_hidden", "_brand_new"):  # they stay here
            with pytest.raises(AttributeError, match=f"'{private}'$"):
                getattr(env, private)
            setattr(env, private, 5)
            assert vars(env)[private] == 5


def test_no_property_is_run_and_nobody_is_asked_for_a_name_or_a_method() -> None:
    with serve_gym(planet) as server, make_remote(server.url) as env:
        env.reset(seed=0)
        before = server.status()["requests"], env.get_attr("asked")
        assert before[1] == 0
        assert all(env.has_wrapper_attr(name) for name in ("slow", "broken", "gravity", "fall", "engine"))
        assert hasattr(env, "fall")
        assert not hasattr(env, "nothing")
        copy.deepcopy(env).close()
        pickle.loads(pickle.dumps(env)).close()
        inspect.getmembers(env)
        inspect.signature(env.step)
        repr(env), dir(env), hash(env), bool(env), np.shape(env)
        assert env.get_attr("asked") == 0
        assert env.slow == 1


def test_errors_of_the_environment_are_told_as_such() -> None:
    with serve_gym(planet) as server, make_remote(server.url) as env:
        with pytest.raises(EnvironmentFailedError, match="inside of the method") as caught:
            env.stumble()
        assert not isinstance(caught.value, AttributeError)
        with pytest.raises(EnvironmentFailedError, match="in the property"):
            env.broken  # noqa: B018
        with pytest.raises(EnvironmentFailedError, match="in the setter") as caught:
            env.wind = -1.0
        assert not isinstance(caught.value, AttributeError)
        with pytest.raises(RefusedError, match="engine cannot be sent"):
            env.engine  # noqa: B018
        with pytest.raises(MissingAttributeError, match="cannot be set"):
            env.slow = 3
        assert env.gravity == 9.8


@everywhere
def test_names_that_a_reset_adds_are_known_after_it(isolation: Any) -> None:
    with serve_gym(planet, isolation=isolation) as server, make_remote(server.url) as env:
        assert not hasattr(env, "crater")
        with pytest.raises(AttributeError, match="set_wrapper_attr"):
            env.crater = 1
        env.reset(seed=0)
        assert env.crater == 7
        env.crater = 8
        assert env.get_attr("crater") == 8
        env.reset()
        assert env.crater == 7


class Growing(CountingEnv):
    """Gets another attribute by each reset, and loses the one before."""

    episodes = 0

    def reset(self, **keywords: Any) -> Any:
        self.__dict__.pop(f"map{self.episodes}", None)
        self.episodes += 1
        setattr(self, f"map{self.episodes}", self.episodes)
        return super().reset(**keywords)


@pytest.mark.parametrize("options", [{}, {"isolation": "process"}, {"fps": 200.0}], ids=str)
def test_names_follow_each_reset(options: Any) -> None:
    with serve_gym(lambda: Growing(1000), **options) as server, make_remote(server.url) as env:
        for _ in range(3):
            env.reset()
            number = env.get_attr("episodes")
            assert getattr(env, f"map{number}") == number
            assert not hasattr(env, f"map{number - 1}")


def test_the_names_are_bounded_and_others_are_reached_by_name() -> None:
    def many() -> Any:
        env = CountingEnv(3)
        for number in range(20_000):
            setattr(env, f"attribute{number}", number)
        return env

    with serve_gym(many) as server, make_remote(server.url) as env:
        assert env.attribute0 == 0
        with pytest.raises(AttributeError, match="get_wrapper_attr"):
            env.attribute19999  # noqa: B018
        assert env.get_wrapper_attr("attribute19999") == 19999


class Mine(bridge.RemoteEnv):
    """A user's own, with attributes of its own."""

    gravity = 1.0

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.steps_taken = 0

    def step(self, action: Any) -> Any:
        self.steps_taken += 1
        return super().step(action)

    def harden(self) -> None:
        self.colour = "black"


def test_what_a_users_subclass_defines_stays_here() -> None:
    with serve_gym(planet) as server, Mine(server.url) as env:
        env.reset(seed=0)
        env.step(0)
        env.gravity = 2.0
        assert (env.steps_taken, env.gravity, env.call("gravity")) == (1, 2.0, 9.8)
        env.harden()
        assert env.call("colour") == "black"
        with pytest.raises(AttributeError, match="set_wrapper_attr"):
            env.steps_take = 1
        again = pickle.loads(pickle.dumps(env))
        assert again.steps_taken == 1
        again.close()


def test_names_of_the_class_stay_here() -> None:
    with serve_gym(planet) as server, make_remote(server.url) as env:
        env.render_mode = "ansi"
        env.spec = None
        assert vars(env)["render_mode"] == "ansi"
        with pytest.raises(AttributeError):
            env.url = "another"
        assert not hasattr(env, "env"), "a loop that unwraps environments ends here"


class Curious(bridge.RemoteEnv):
    """Sets attributes of its own by each kind of code that a class may have."""

    def reset(self, **keywords: Any) -> Any:
        def remember() -> None:
            self.nested = 1

        remember()
        self.few = [setattr(self, f"item_{index}", index) for index in range(2)]
        (lambda: setattr(self, "by_lambda", 2))()
        return super().reset(**keywords)

    @property
    def level(self) -> Any:
        return self.chosen

    @level.setter
    def level(self, value: Any) -> None:
        self.chosen = value

    @classmethod
    def of(cls, url: str) -> Curious:
        made = cls(url)
        made.made_by = "of"
        return made

    @staticmethod
    def mark(env: Curious) -> None:
        env.marked = True

    @functools.cached_property
    def summary(self) -> str:
        self.summed = 1
        return "s"


def test_whatever_code_of_a_users_subclass_sets_stays_here() -> None:
    with serve_gym(planet) as server, Curious.of(server.url) as env:
        env.reset(seed=0)
        env.level = 3
        env.mark(env)
        assert (env.nested, env.item_1, env.by_lambda, env.level, env.made_by, env.marked) == (1, 1, 2, 3, "of", True)
        assert (env.summary, env.summed) == ("s", 1)
        assert not {"nested", "item_0", "chosen", "marked"} & {*dir(planet().unwrapped)}
        with pytest.raises(AttributeError, match="set_wrapper_attr"):
            (lambda: setattr(env, "nestd", 1))()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env)), copy.copy])
def test_a_copy_has_the_attributes_before_it_is_reset(copied: Any) -> None:
    with serve_gym(planet) as server, make_remote(server.url) as env:
        env.set_attr("only_there", 1)
        for act in (lambda again: again.gravity, lambda again: setattr(again, "gravity", 1.0)):
            again = copied(env)
            act(again)
            assert again.fall(1.0) == again.call("gravity")
            # Its environment is another one, which has not been given this.
            assert not hasattr(again, "only_there")
            again.close()
        assert (env.gravity, env.only_there) == (9.8, 1)


def test_a_copy_knows_the_names_that_its_reset_adds() -> None:
    with serve_gym(planet) as server, make_remote(server.url) as env:
        again = copy.deepcopy(env)
        again.reset(seed=0)
        again.gravity = 1.0
        assert (again.gravity, env.gravity, again.crater) == (1.0, 9.8, 7)
        again.close()


def test_a_closed_environment_says_so() -> None:
    with serve_gym(planet) as server:
        env = make_remote(server.url)
        env.close()
        with pytest.raises(errors.ClosedError):
            env.gravity  # noqa: B018
        with pytest.raises(errors.ClosedError):
            env.gravity = 1.0


def test_another_server_has_no_attributes_by_a_dot() -> None:
    with PublicServer() as server, make_remote(server.url) as env:
        assert not hasattr(env, "gravity")
        with pytest.raises(AttributeError, match="get_wrapper_attr"):
            env.gravity  # noqa: B018
        with pytest.raises(AttributeError, match="set_wrapper_attr"):
            env.gravity = 2.0
        assert "gravity" not in vars(env)


def test_environments_of_a_zoo_and_of_clients_have_theirs() -> None:
    with serve_gym(["CartPole-v1", "Pendulum-v1"]) as server:
        for name, attribute in (("CartPole-v1", "force_mag"), ("Pendulum-v1", "max_torque")):
            with make_remote(f"{server.url}/{name}") as env:
                setattr(env, attribute, 0.25)
                assert env.call(attribute) == getattr(env, attribute) == 0.25
    make = functools.partial(gymnasium.make, "Pendulum-v1")
    with serve_gym("CartPole-v1", allow_env_factories=True) as server, make_remote(server.url, env=make) as env:
        env.max_torque = 0.5
        assert env.call("max_torque") == 0.5


def test_minigrid_has_its_agents_position_after_a_reset() -> None:
    local = minigrid()
    local.reset(seed=1)
    with serve_gym(minigrid) as server, make_remote(server.url) as env:
        env.reset(seed=1)
        assert tuple(env.unwrapped.agent_pos) == tuple(local.unwrapped.agent_pos)
        env.unwrapped.agent_dir = 2
        local.unwrapped.agent_dir = 2
        assert env.step(2)[0]["direction"] == local.step(2)[0]["direction"] == 2


class FireReset(gymnasium.Wrapper):
    """Presses the fire button after each reset, as that of Stable-Baselines3's AtariWrapper."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        assert env.unwrapped.get_action_meanings()[1] == "FIRE"
        assert len(env.unwrapped.get_action_meanings()) >= 3

    def reset(self, **keywords: Any) -> Any:
        self.env.reset(**keywords)
        observation, _, terminated, truncated, _ = self.env.step(1)
        assert not terminated
        assert not truncated
        return observation, {}


def test_the_actions_of_atari_games_have_their_names() -> None:
    ale_py = pytest.importorskip("ale_py")
    gymnasium.register_envs(ale_py)
    local = gymnasium.make("ALE/Pong-v5", frameskip=1)
    with serve_gym("ALE/Pong-v5", env_kwargs={"frameskip": 1}) as server, make_remote(server.url) as env:
        outer = gymnasium.wrappers.TimeLimit(env, 100)
        assert outer.unwrapped.get_action_meanings() == local.unwrapped.get_action_meanings()
        found, expected = (FireReset(each).reset(seed=0)[0] for each in (outer, local))
        assert found.tobytes() == expected.tobytes()
        # The emulator itself, which draws into arrays of its caller, stays where it is.
        with pytest.raises(RefusedError, match="ale cannot be sent"):
            env.unwrapped.ale  # noqa: B018
    local.close()


# Vectors


@pytest.mark.parametrize("make", [make_vec_remote, lambda *args, **more: BlockingReset(make_vec_remote(*args, **more))])
def test_a_vector_names_its_calls_for_what_a_dot_does_not_reach(make: Any) -> None:
    with serve_gym(planet) as server:
        envs = make(server.url, num_envs=2)
        for name in ("gravity", "fall", "nothing"):
            with pytest.raises(AttributeError, match="get_attr, set_attr and call"):
                getattr(envs, name)
            with pytest.raises(AttributeError, match="get_attr, set_attr and call"):
                setattr(envs, name, 2.0)
            assert not hasattr(envs, name)
            assert name not in vars(envs)
        envs.set_attr("gravity", 2.0)
        assert envs.get_attr("gravity") == (2.0, 2.0)
        envs.spec = None
        private = "_mine"
        setattr(envs, private, 1)
        assert vars(envs)[private] == 1
        copied = pickle.loads(pickle.dumps(envs))
        copied.close()
        envs.close()


def test_a_users_subclass_of_a_vector_has_attributes_of_its_own() -> None:
    class Counting(BlockingReset):
        def __init__(self, envs: Any) -> None:
            super().__init__(envs)
            self.calls = 0

        def step(self, actions: Any) -> Any:
            self.calls += 1
            return super().step(actions)

    with serve_gym(planet) as server:
        envs = Counting(make_vec_remote(server.url, num_envs=2))
        envs.reset(seed=0)
        envs.step(np.zeros(2, np.int64))
        envs.calls = 5
        assert envs.calls == 5
        gymnasium.wrappers.vector.RecordEpisodeStatistics(envs).reset(seed=0)
        envs.close()


# Several agents


class Windy(Relay):
    def __init__(self) -> None:
        super().__init__()
        self.wind = 1

    def shout(self, text: str) -> str:
        return text.upper()


def wrapped_windy() -> Any:
    from pettingzoo.utils import BaseParallelWrapper

    class Coloured(BaseParallelWrapper):
        def __init__(self, env: Any) -> None:
            super().__init__(env)
            self.colour = "red"

    return Coloured(Windy())


@pytest.mark.parametrize("make", [Windy, wrapped_windy])
@pytest.mark.parametrize("options", [{}, {"fps": 200.0}, {"web": True}, {"transport": "grpcio"}], ids=str)
def test_a_parallel_environment_acts_as_the_local_one(make: Any, options: Any) -> None:
    with serve_parallel(make, **options) as server:
        url = server.urls[-1] if "web" in options else server.url
        with contextlib.closing(make_parallel_remote(url)) as env:
            env.reset(seed=0)
            assert (env.wind, env.shout("hey")) == (1, "HEY")
            env.wind = 2
            assert env.call("wind") == env.get_attr("wind") == 2
            env.set_attr("wind", 3)
            assert env.wind == 3
            env.max_cycles = 40
            assert env.call("max_cycles") == env.max_cycles == 40
            assert not {"wind", "max_cycles"} & set(vars(env))
            if make is wrapped_windy:
                env.colour = "blue"
                assert env.colour == "blue"
            with pytest.raises(AttributeError, match="get_attr, set_attr and call"):
                env.nothing  # noqa: B018
            with pytest.raises(MissingAttributeError):
                env.get_attr("nothing")


# Names that are not there


@everywhere
@pytest.mark.slow
def test_what_is_not_there_is_both_a_refusal_and_an_attribute_error(isolation: Any) -> None:
    with serve_gym(planet, isolation=isolation) as server, make_remote(server.url) as env:
        envs = make_vec_remote(server.url, num_envs=2)
        lanes = make_vec_remote(f"{server.url}?num_envs=2")
        for ask in (
            lambda: env.call("nothing"),
            lambda: env.call("nothing", 1, key=2),
            lambda: env.get_attr("nothing"),
            lambda: env.get_wrapper_attr("nothing"),
            lambda: envs.call("nothing"),
            lambda: envs.get_attr("nothing"),
            lambda: envs.call_at([1], "nothing"),
            lambda: lanes.call("nothing"),
            lambda: lanes.call_at([1], "nothing"),
            lambda: BlockingReset(envs).get_attr("nothing"),
            lambda: env.set_attr("slow", 1),
            lambda: envs.set_attr("slow", 1),
            lambda: lanes.set_attr("slow", [1, 2]),
        ):
            with pytest.raises(AttributeError, match=r"nothing|slow") as caught:
                ask()
            assert isinstance(caught.value, RefusedError)
            assert caught.value.code == Code.NOT_FOUND
            assert not isinstance(caught.value, EnvironmentFailedError)
            again = pickle.loads(pickle.dumps(caught.value))
            assert (type(again), str(again), again.code) == (MissingAttributeError, str(caught.value), Code.NOT_FOUND)
        envs.call_async("nothing")
        with pytest.raises(MissingAttributeError):
            envs.call_wait()
        for remote in (envs, lanes):
            with pytest.raises(EnvironmentFailedError, match="inside of the method") as failed:
                remote.call("stumble")
            assert not isinstance(failed.value, AttributeError)
            assert remote.get_attr("gravity") == (9.8, 9.8)
            remote.close()


def test_lanes_in_processes_of_gymnasiums_own_survive_a_name_that_is_not_there() -> None:
    with serve_gym("CartPole-v1", num_envs=2, vectorization_mode="async") as server:
        envs = BlockingReset(make_vec_remote(server.url))
        envs.reset(seed=0)
        for ask in (lambda: envs.call("nothing"), lambda: envs.get_attr("nothing")):
            with pytest.raises(MissingAttributeError):
                ask()
        envs.step(np.zeros(2, np.int64))
        assert envs.get_attr("gravity") == (9.8, 9.8)
        envs.close()


def test_the_names_that_hide_the_environments_are_in_the_docs() -> None:
    text = (ROOT / "docs" / "limits.md").read_text("utf-8")
    listed = (
        text.partition("hide the environment's, which")[2].partition("reach: ")[2].partition("`reset`, `step` and")[0]
    )
    single, several = (re.findall(r"`(\w+)`", part) for part in listed.split("Those of a parallel environment:"))
    # Some spaces are attributes of the object; a reward space is one where rewards are arrays.
    with serve_gym(planet) as server, make_remote(server.url) as env:
        assert single == sorted({*public(env), "reward_space"})
    with serve_parallel(Relay) as server:
        both = make_parallel_remote(server.url)
        assert several == sorted(public(both))
        both.close()


def public(env: Any) -> set[str]:
    return {name for name in {*dir(type(env)), *vars(env)} if not name.startswith("_")}
