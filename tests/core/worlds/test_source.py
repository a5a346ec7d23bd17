"""`bridge.core.worlds.sources.source`: what can be served, and what CreateWorld settings make of it (D-3)."""

import os

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from bridge import make_remote, serve_gym, serve_parallel
from bridge.core.encoding import values
from bridge.core.encoding.tensors import pack_tensor
from bridge.core.worlds.sources.source import EnvSource
from bridge.errors import Code, EnvironmentFailedError, RefusedError, RequestError, SettingError
from bridge.testing import CountingEnv
from tests.support import TAXI, direct_world, keeping


def make(source, **settings):
    tensors = {
        name: value if hasattr(value, "DESCRIPTOR") else pack_tensor(value)
        for name, value in {key.replace("__", "."): value for key, value in settings.items()}.items()
    }
    return direct_world(source, tensors)


def refusal(source, **settings):
    with pytest.raises(RequestError) as caught:
        make(source, **settings)
    return caught.value


def encoded(value):
    return pack_tensor(np.frombuffer(values.encode(value), np.uint8))


def lanes_of(world):
    """The lanes of a world, as its specs tell them: the reward has one of each; None: the world is a single one."""
    (shape,) = [tuple(spec.shape) for spec in world.join({}).observations.values() if spec.name == "reward"]
    return shape[0] if shape else None


@pytest.fixture
def made(monkeypatch):
    """The environment that Gymnasium makes."""
    factory, found = keeping(gymnasium.make)
    monkeypatch.setattr(gymnasium, "make", factory)
    return found


class Adjustable(CountingEnv):
    """Keeps its arguments."""

    def __init__(self, size=1, *, name="x", render_mode=None, **more):
        super().__init__()
        self.size, self.name, self.render_mode, self.more = size, name, render_mode, more


class Strict(CountingEnv):
    def __init__(self, length=5, truncates=False):
        super().__init__(length, truncates=truncates)


# What can be served


@pytest.mark.parametrize(
    ("env", "ids", "title"),
    [
        ("CartPole-v1", ["CartPole-v1"], "CartPole-v1"),
        ("gymnasium.envs:CartPole-v1", ["CartPole-v1"], "CartPole-v1"),
        (gymnasium.spec(TAXI), [TAXI], TAXI),
        (["CartPole-v1", TAXI], ["CartPole-v1", TAXI], f"CartPole-v1, {TAXI}"),
        (["CartPole-v*", "CartPole-v1"], ["CartPole-v0", "CartPole-v1"], "CartPole-v*, CartPole-v1"),
        (CountingEnv, [], "CountingEnv"),
        (lambda: CountingEnv(), [], "<lambda>"),
    ],
    ids=["id", "module", "spec", "list", "patterns", "class", "function"],
)
def test_an_id_a_spec_a_list_and_a_callable_can_be_served(env, ids, title):
    source = EnvSource(env)
    assert source.env_ids == ids
    assert source.title == title
    world = make(source, **({"env_id": ids[-1]} if len(ids) > 1 else {}))
    assert lanes_of(world) is None
    world.close()


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            "Nope-v0",
            r"cannot serve 'Nope-v0': .*[^.]\. Import the package that registers it first, or write MODULE:ENV_ID",
        ),
        ("CartPole-v99", "cannot serve 'CartPole-v99'"),
        ("no_such_module:X-v0", "cannot serve 'no_such_module:X-v0': No module named 'no_such_module'"),
        ("", "cannot serve ''"),
        (["CartPole-v1", "Nope-*"], r"no registered environment matches 'Nope-\*'; import the package"),
        ([], "a list of ids; got"),
        ([1], "a list of ids; got"),
        (5, r"expected a Gymnasium id, an EnvSpec, a callable .* got 5 of type int"),
        (None, "of type NoneType"),
    ],
    ids=str,
)
def test_what_cannot_be_served_is_refused_at_once(env, message):
    with pytest.raises(SettingError, match=f"(?s){message}"):
        EnvSource(env)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"num_envs": 0}, "num_envs from 1 to max_lanes=4096, got 0"),
        ({"num_envs": 5, "max_lanes": 4}, "num_envs from 1 to max_lanes=4, got 5"),
        ({"num_envs": 2.0}, "got 2.0"),
        ({"vectorization_mode": "threads"}, "one of sync, async, vector_entry_point, got 'threads'"),
    ],
    ids=str,
)
def test_keywords_out_of_range_are_refused_at_once(kwargs, message):
    with pytest.raises(SettingError, match=message):
        EnvSource("CartPole-v1", **kwargs)


def test_nothing_is_built_before_it_is_asked_for():
    EnvSource(lambda: pytest.fail("built"))


# Settings


def test_the_client_names_one_of_the_served_environments(made):
    # D-3
    source = EnvSource(["CartPole-*", TAXI])
    world = make(source, env_id=TAXI)
    assert [env.spec.id for env in made] == [TAXI]
    world.close()
    error = refusal(source)
    assert error.code == Code.INVALID_ARGUMENT
    assert "name one of the environments, in the path of the URL or by env_id: this server has" in error.message
    assert f"CartPole-v0, CartPole-v1, {TAXI}" in error.message
    for name in ("Pendulum-v1", "", "os:system", "taxi-v4"):
        error = refusal(source, env_id=name)
        assert error.code == Code.NOT_FOUND
        assert f"{name!r} is not served here; this server has CartPole-v0" in error.message


def test_no_client_makes_the_server_import_a_module(tmp_path, monkeypatch):
    (tmp_path / "evil_module.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert refusal(EnvSource("CartPole-v1"), env_id="evil_module:CartPole-v1").code == Code.NOT_FOUND


def test_a_callable_has_no_id():
    error = refusal(EnvSource(CountingEnv), env_id="CountingEnv")
    assert error.code == Code.NOT_FOUND
    assert "this server has one environment, CountingEnv, without an id" in error.message


def test_arguments_come_from_the_server_and_the_client_on_top():
    factory, made = keeping(Adjustable)
    source = EnvSource(factory, env_kwargs={"size": 2, "name": "server"})
    make(source, kwargs__name="client", kwargs__speed=1.5, kwargs__on=True, render_mode="ansi")
    env = made[-1]
    assert (env.size, env.name, env.render_mode, env.more) == (2, "client", "ansi", {"speed": 1.5, "on": True})
    assert [type(env.more[key]) for key in env.more] == [float, bool]
    make(source, kwargs__size=np.array([1, 2]), kwargs=encoded({"name": None, "x": {"y": (1,)}}))
    env = made[-1]
    assert env.size.tolist() == [1, 2]
    assert env.name is None
    assert env.more == {"x": {"y": (1,)}}
    make(source)
    assert made[-1].name == "server"


def test_a_first_lane_that_is_false_is_made_once():
    class Empty(CountingEnv):
        def __len__(self):
            return 0

    factory, made = keeping(Empty)
    world = make(EnvSource(factory), num_envs=2)
    assert len(made) == 2
    world.close()


def test_arguments_reach_a_registered_environment(made):
    world = make(EnvSource("FrozenLake-v1", env_kwargs={"map_name": "8x8"}), kwargs__is_slippery=False)
    (env,) = made
    assert env.observation_space.n == 64
    assert env.spec.kwargs["is_slippery"] is False
    world.close()


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize(
    ("env", "accepted"), [("CartPole-v1", "sutton_barto_reward"), (Strict, "length=5, truncates=False")], ids=str
)
def test_wrong_arguments_are_answered_by_those_that_are_taken(env, accepted, lanes):
    # D-3
    error = refusal(EnvSource(env), kwargs__gravity=1, num_envs=lanes)
    assert error.code == Code.INVALID_ARGUMENT
    assert "could not be made with env_kwargs={'gravity': 1}" in error.message
    assert "It takes (" in error.message
    assert accepted in error.message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"speed": 1},
            "unknown CreateWorld settings speed; the settings here are: env_id, num_envs, vectorization_mode",
        ),
        ({"env_id": 5}, "expected the setting 'env_id' to be a string, got"),
        ({"env_id": ["CartPole-v1"]}, "'env_id' to be a string"),
        ({"render_mode": 1}, "'render_mode' to be a string"),
        ({"num_envs": 0}, "'num_envs' to be an integer from 1 to 8, got"),
        ({"num_envs": 9}, "'num_envs' to be an integer from 1 to 8"),
        ({"num_envs": 2.0}, "'num_envs' to be an integer"),
        ({"num_envs": "2"}, "'num_envs' to be an integer"),
        ({"num_envs": True}, "'num_envs' to be an integer"),
        ({"num_envs": [2]}, "'num_envs' to be an integer"),
        ({"vectorization_mode": "threads"}, "one of sync, async, vector_entry_point, got 'threads'"),
        ({"kwargs": 5}, "'kwargs' as uint8 bytes of the values codec"),
        ({"kwargs": encoded([1])}, r"expected kwargs to be a dict, got \[1\]"),
        ({"kwargs": encoded("ab")}, "expected kwargs to be a dict"),
    ],
    ids=str,
)
def test_settings_that_are_wrong_are_refused_with_what_is_right(settings, words):
    # D-3
    with pytest.raises(RequestError, match=words) as caught:
        make(EnvSource("CartPole-v1", max_lanes=8), **settings)
    assert caught.value.code == Code.INVALID_ARGUMENT


# What comes of it


@pytest.mark.parametrize(
    ("mode", "num_envs", "lanes"),
    [("sync", 1, None), ("sync", 3, 3), ("vector_entry_point", 1, 1), ("vector_entry_point", 4, 4)],
)
@pytest.mark.parametrize("who", ["server", "client"])
def test_lanes_are_made_in_the_mode_that_is_asked_for(mode, num_envs, lanes, who):
    keywords = {"num_envs": num_envs, "vectorization_mode": mode}
    world = (
        make(EnvSource("CartPole-v1", **keywords)) if who == "server" else make(EnvSource("CartPole-v1"), **keywords)
    )
    assert lanes_of(world) == lanes
    world.close()


def test_a_callable_is_called_once_for_each_lane():
    made = []

    def factory():
        made.append(CountingEnv())
        return made[-1]

    world = make(EnvSource(factory, num_envs=3))
    assert len(made) == 3
    agent = world.join({})
    agent.reset({"seed": pack_tensor([7, 5, 6])}, False)
    agent.begin()
    assert [env.np_random_seed for env in made] == [7, 5, 6]
    world.close()
    assert all(env.closed for env in made)


def test_a_callable_that_returns_a_vector_environment_is_served_as_it_is():
    def factory():
        return SyncVectorEnv([CountingEnv] * 2)

    world = make(EnvSource(factory))
    assert lanes_of(world) == 2
    world.close()
    error = refusal(EnvSource(factory), num_envs=4)
    assert error.code == Code.INVALID_ARGUMENT
    assert "returns a vector environment of 2 lanes, so num_envs cannot be given" in error.message


def test_a_callable_has_no_vector_entry_point():
    error = refusal(EnvSource(CountingEnv), num_envs=2, vectorization_mode="vector_entry_point")
    assert error.code == Code.INVALID_ARGUMENT
    assert "a callable, which has no vector entry point; expected vectorization_mode sync or async" in error.message


@pytest.mark.parametrize("mode", [AutoresetMode.DISABLED, None])
def test_a_vector_environment_of_another_autoreset_mode_is_refused_and_closed(mode):
    closed = []

    class Other(SyncVectorEnv):
        def __init__(self):
            super().__init__([CountingEnv] * 2, autoreset_mode=mode or AutoresetMode.NEXT_STEP)
            if mode is None:
                self.metadata = {}

        def close_extras(self, **kwargs):
            closed.append(True)
            super().close_extras(**kwargs)

    error = refusal(EnvSource(Other))
    assert error.code == Code.FAILED_PRECONDITION
    assert f"expected a vector environment whose autoreset mode is NEXT_STEP or SAME_STEP, got {mode}" in error.message
    assert closed


@pytest.mark.parametrize("result", [None, 5, object])
def test_a_callable_that_returns_no_environment_is_told_so(result):
    error = refusal(EnvSource(lambda: result))
    assert error.code == Code.FAILED_PRECONDITION
    assert "where a gymnasium.Env or VectorEnv was expected" in error.message


def test_an_environment_that_cannot_be_made_is_told_with_its_traceback():
    def broken():
        raise OSError("no GPU")

    error = refusal(EnvSource(broken))
    assert error.code == Code.INTERNAL
    assert "OSError in its construction: no GPU" in error.message
    assert os.path.basename(__file__) in error.message


def test_a_vector_environment_class_is_a_callable_too():
    assert issubclass(SyncVectorEnv, VectorEnv)
    assert EnvSource(SyncVectorEnv, env_kwargs={"env_fns": [CountingEnv]}).title == "SyncVectorEnv"
    world = make(EnvSource(SyncVectorEnv, env_kwargs={"env_fns": [CountingEnv]}))
    assert lanes_of(world) == 1
    world.close()


class Careless(gymnasium.Env):
    """Its constructor takes its arguments, and then raises a TypeError of its own."""

    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, size=1):
        self.size = size + None


def _careless_agents(size=1):
    raise TypeError("unsupported operand")


@pytest.mark.parametrize(
    ("serve", "factory"),
    [
        (serve_gym, Careless),
        (serve_gym, gymnasium.envs.registration.EnvSpec("Careless-v0", entry_point=Careless)),
        (serve_parallel, _careless_agents),
    ],
    ids=["callable", "spec", "several agents"],
)
def test_a_type_error_inside_of_a_constructor_is_the_environment_s_own(serve, factory):
    with serve(factory, env_kwargs={"size": 2}) as server:
        with pytest.raises(EnvironmentFailedError, match="TypeError in its construction") as caught:
            make_remote(server.url)
        assert "Traceback" in str(caught.value)
        assert "could not be made with" not in str(caught.value)
    said = r"could not be made with .*It takes \(size=1\)"
    with serve(factory, env_kwargs={"colour": 2}) as server, pytest.raises(RefusedError, match=said):
        make_remote(server.url)
