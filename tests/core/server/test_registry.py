"""`bridge.core.server.registry`: whose worlds there are, from any connection, up to the limits, and that they go."""

import contextlib
import threading
from functools import partial

import pytest
from gymnasium import spaces

from bridge import Limits, Observer, __version__, make_remote, make_vec_remote, serve_gym
from bridge.core.encoding import values
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.errors import Code, RefusedError, RequestError, SettingError
from bridge.testing import CountingEnv
from tests.inside import lock_of_environments
from tests.support import Later, direct_registry, gym_source


class StubbornEnv(CountingEnv):
    """Raises when it is closed."""

    def close(self):
        super().close()
        raise OSError("the motor does not stop")


def make(factory=CountingEnv, observers=(), **limits):
    envs = []

    def build(**kwargs):
        envs.append(factory(**kwargs))
        return envs[-1]

    return direct_registry(gym_source(build), Limits(**limits), observers=observers), envs


def refusal(function, *args, **keywords):
    with pytest.raises(RequestError) as caught:
        function(*args, **keywords)
    return caught.value


def test_every_world_has_a_name_that_nobody_can_guess():
    # D-3
    registry, envs = make()
    names = {registry.create_world({}, object()) for _ in range(20)}
    assert len(names) == len(envs) == 20
    assert all(len(name) > 16 for name in names)
    assert set(registry.names) == names


def test_the_default_world_is_made_when_it_is_first_asked_for_and_only_once():
    # D-4
    registry, envs = make()
    assert registry.names == []
    runtime = registry.runtime
    runtime.executor, worlds = Later(), []
    for _ in range(8):
        runtime.scheduler.start(registry.wrapped.find_world(""), lambda world, error: worlds.append(world))
    assert (len(runtime.executor.begun), worlds) == (1, [])
    runtime.executor.release(runtime)
    assert len(worlds) == 8
    assert len({id(world) for world in worlds}) == len(envs) == 1
    assert registry.names == [""]


def test_worlds_beyond_the_limit_are_refused_by_its_name_and_the_default_one_counts_while_somebody_plays():
    # D-2
    registry, envs = make(max_worlds=2)
    default = registry.find_world("")
    first, _ = (registry.create_world({}, object()) for _ in range(2))
    error = refusal(registry.create_world, {}, object())
    assert error.code == Code.RESOURCE_EXHAUSTED
    assert "max_worlds=2" in error.message
    assert len(envs) == 3
    joining = refusal(registry.admit, default, {}, ours=True)
    assert (joining.code, joining.message, default.agents) == (error.code, error.message, 0)
    registry.destroy_world(first)
    agent = registry.admit(default, {}, ours=True)
    assert refusal(registry.create_world, {}, object()).message == error.message
    assert not registry.has_room
    agent.leave()
    registry.create_world({}, object())


def test_the_default_world_is_not_even_made_where_others_are_as_many_as_there_may_be():
    # There may be but one robot.
    registry, envs = make(max_worlds=1)
    name = registry.create_world({}, object())
    assert "max_worlds=1" in refusal(registry.find_world, "").message
    assert len(envs) == 1
    registry.destroy_world(name)
    assert registry.find_world("").alive


def test_who_only_watches_takes_no_place():
    registry = direct_registry(gym_source(CountingEnv, fps=20.0), Limits(max_worlds=1))
    default = registry.find_world("")
    registry.create_world({}, object())
    watcher = registry.admit(default, {"role": pack_tensor("spectator")}, ours=True)
    assert "max_worlds=1" in refusal(registry.admit, default, {}, ours=True).message
    assert default.agents == 1
    watcher.leave()
    registry.close()


@pytest.mark.parametrize("num_envs", [1, 2, 3])
def test_a_server_has_as_many_clients_as_max_worlds_says(num_envs):
    limits = Limits(max_worlds=2)
    with serve_gym("CartPole-v1", limits=limits) as server:
        if num_envs > 2:
            with pytest.raises(RefusedError, match="this server has max_worlds=2 worlds in use"):
                make_vec_remote(server.url, num_envs=num_envs)
            return
        with contextlib.closing(make_vec_remote(server.url, num_envs=num_envs)):
            others = [make_remote(server.url) for _ in range(2 - num_envs)]
            with pytest.raises(RefusedError) as caught:
                make_remote(server.url)
            assert "this server has max_worlds=2 worlds in use" in caught.value.reason
            assert "close an environment of yours, wait until another client leaves" in caught.value.reason
            assert "world ''" not in caught.value.reason
            for other in others:
                other.close()


@pytest.mark.parametrize("serve", [partial(serve_gym, CountingEnv), partial(serve_gym, CountingEnv, fps=20.0)])
def test_who_wants_a_world_of_its_own_is_told_why_there_is_none(serve):
    """The default world, of which the user never heard, is tried in its place, and is taken."""
    with (
        serve(limits=Limits(max_worlds=1)) as server,
        contextlib.closing(make_remote(f"{server.url}?world=")),
        pytest.raises(RefusedError) as caught,
    ):
        make_remote(server.url)
    assert caught.value.code == Code.RESOURCE_EXHAUSTED
    assert caught.value.reason.startswith("this server has max_worlds=1 worlds in use")
    assert "Nor is there room in its default world: the default world " in caught.value.reason


def test_a_world_that_could_not_be_made_takes_no_place():
    # D-2, D-3
    def broken(**kwargs):
        raise ValueError("no display")

    registry, _ = make(broken, max_worlds=1)
    for _ in range(3):
        error = refusal(registry.create_world, {}, object())
        assert error.code == Code.INTERNAL
        assert "ValueError in its construction: no display" in error.message
    assert refusal(registry.find_world, "").code == Code.INTERNAL
    assert registry.names == []


def test_an_unknown_world_is_not_found():
    registry, _ = make()
    for call in (registry.find_world, registry.destroy_world):
        error = refusal(call, "nope")
        assert error.code == Code.NOT_FOUND
        assert "no world 'nope'; create one with CreateWorld" in error.message


def test_a_world_goes_with_the_connection_that_created_and_joined_it():
    registry, envs = make()
    owner = object()
    world = registry.find_world(registry.create_world({}, owner))
    agent = world.join({})
    registry.joined(world, owner)
    agent.leave()
    registry.left(world)
    registry.disconnected(object())
    assert registry.names == [world.name]
    registry.disconnected(owner)
    assert registry.names == []
    assert envs[0].closed


def test_a_world_that_was_created_for_others_stays():
    # D-3, D-16
    registry, envs = make()
    owner, other = object(), object()
    name = registry.create_world({}, owner)
    registry.disconnected(owner)
    world = registry.find_world(name)
    world.join({})
    registry.joined(world, other)
    registry.disconnected(other)
    assert registry.names == [name]
    assert not envs[0].closed


def test_a_world_in_which_somebody_else_is_stays():
    registry, envs = make()
    owner = object()
    world = registry.find_world(registry.create_world({}, owner))
    agent = world.join({})
    registry.joined(world, owner)
    agent.leave()
    world.join({})
    registry.disconnected(owner)
    assert registry.names == [world.name]
    assert not envs[0].closed


def test_destroy_closes_the_environment_and_the_default_world_comes_back_anew():
    # D-17
    registry, envs = make()
    name = registry.create_world({}, object())
    registry.find_world("")
    registry.destroy_world(name)
    registry.destroy_world("")
    assert [env.closed for env in envs] == [True, True]
    assert registry.names == []
    assert registry.find_world("")
    assert [env.closed for env in envs] == [True, True, False]


def test_close_ends_all_worlds_and_makes_no_more():
    registry, envs = make()
    registry.find_world("")
    registry.create_world({}, object())
    registry.close()
    assert [env.closed for env in envs] == [True, True]
    for call in (lambda: registry.create_world({}, object()), lambda: registry.find_world("")):
        error = refusal(call)
        assert error.code == Code.UNAVAILABLE
        assert "stopping" in error.message
    registry.close()


def test_a_world_that_does_not_close_keeps_no_other_open(caplog):
    registry, envs = make(StubbornEnv)
    owner = object()
    for _ in range(2):
        world = registry.find_world(registry.create_world({}, owner))
        registry.joined(world, owner)
    registry.find_world("")
    registry.disconnected(owner)
    assert [env.closed for env in envs] == [True, True, False]
    assert caplog.text.count("did not close: INTERNAL: the environment raised OSError in close") == 2
    registry.close()
    assert envs[2].closed
    assert caplog.text.count("did not close") == 3


class OddRewards(StubbornEnv):
    """Cannot be served, and raises when it is closed."""

    reward_space = spaces.Discrete(2)


def test_an_environment_that_cannot_be_served_is_closed():
    registry, envs = make(OddRewards)
    for ask in (lambda: registry.create_world({}, object()), lambda: registry.find_world("")):
        error = refusal(ask)
        assert error.code == Code.FAILED_PRECONDITION
        assert "reward_space" in error.message
    assert [env.closed for env in envs] == [True, True]


class Failing(Observer):
    def made(self, world):
        raise ZeroDivisionError("oops")


def test_a_world_is_closed_again_where_an_observer_raises():
    registry, envs = make(observers=[Failing()], max_worlds=1)
    for ask in (lambda: registry.create_world({}, object()), lambda: registry.find_world("")) * 2:
        with pytest.raises(RequestError, match="the observer Failing failed at made: ZeroDivisionError"):
            ask()
    assert [env.closed for env in envs] == [True] * 4
    assert registry.names == []


@pytest.mark.parametrize("broken", [False, True])
def test_a_world_that_is_built_while_the_server_stops_is_closed_again(broken):
    """One that cannot be built is told as such all the same."""

    def factory():
        if broken:
            raise ValueError("no display")
        return CountingEnv()

    registry, envs = make(factory, max_worlds=1)
    registry.runtime.executor, errors, closed = Later(), [], []
    start = registry.runtime.scheduler.start
    start(registry.wrapped.create_world({}, object()), lambda name, error: errors.append(error))
    start(registry.wrapped.close(), lambda result, error: closed.append(error))
    registry.runtime.scheduler.run()
    assert closed == []  # it waits for the environment
    registry.runtime.executor.release(registry.runtime)
    registry.runtime.scheduler.run()
    assert closed == [None]
    assert errors[0].code == (Code.INTERNAL if broken else Code.UNAVAILABLE)
    assert ("no display" in errors[0].message) == broken
    assert all(env.closed for env in envs)
    assert registry.names == []
    assert registry.has_room


def test_the_environment_is_built_under_the_lock_of_the_process():
    held = []

    def factory():
        lock = lock_of_environments()
        thread = threading.Thread(target=lambda: held.append(not lock.acquire(blocking=False)))
        thread.start()
        thread.join(10)
        return CountingEnv()

    with serve_gym(factory) as server:
        make_remote(server.url).close()
    assert held == [True]


def test_properties_say_what_the_server_is_and_gives():
    # D-18, before join
    registry = direct_registry(gym_source(["CartPole-v1", "CartPole-v0"]), Limits(max_connections=9, max_lanes=3))
    tree = registry.properties()
    assert unpack_tensor(tree.read("server.version"))[()] == __version__
    assert unpack_tensor(tree.read("server.limits.max_connections")) == 9
    assert unpack_tensor(tree.read("server.worlds")) == 0
    environments = values.decode(unpack_tensor(tree.read("server.environments")).tobytes())
    assert environments == ["CartPole-v1", "CartPole-v0"]
    settings = values.decode(unpack_tensor(tree.read("server.settings")).tobytes())
    assert settings[:2] == ["env_id", "num_envs"]
    assert settings[-1] == "kwargs.NAME"


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", None])
def test_limits_are_positive_integers(value):
    with pytest.raises(SettingError, match=f"expected max_lanes to be a positive integer, got {value!r}"):
        Limits(max_lanes=value)


@pytest.mark.parametrize("value", [-1, 1.5, True, "8", None])
def test_the_limit_of_worlds_is_an_integer(value):
    with pytest.raises(SettingError, match=f"expected max_worlds to be a non-negative integer, got {value!r}"):
        Limits(max_worlds=value)


def test_without_worlds_of_their_own_clients_join_the_default_one():
    with serve_gym("CartPole-v1", limits=Limits(max_worlds=0)) as server:
        with pytest.raises(RefusedError, match=r"default world alone \(max_worlds=0\): join that, with `\?world=`"):
            make_remote(server.url, env_kwargs={"sutton_barto_reward": True})
        with contextlib.closing(make_remote(server.url + "?world=")) as env:
            env.reset(seed=0)


def test_a_default_world_of_many_ids_asks_for_a_name():
    registry = direct_registry(gym_source(["CartPole-v1", "CartPole-v0"]))
    error = refusal(registry.find_world, "")
    assert error.code == Code.INVALID_ARGUMENT
    assert (
        "name one of the environments, in the path of the URL or by env_id: this server has CartPole-v1, CartPole-v0"
        in error.message
    )
    assert registry.find_world(registry.create_world({"env_id": pack_tensor("CartPole-v1")}, None))
    registry.close()


def test_a_world_has_the_spaces_of_its_environment():
    registry, _ = make(lambda: CountingEnv(action_space=spaces.Discrete(7)))
    agent = registry.find_world("").join({})
    assert agent.actions[1].describe() == "INT64 of shape [], min 0, max 6"
