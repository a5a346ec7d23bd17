"""Worlds on one server: made, joined, left, destroyed, limited and reaped (D-3 to D-6, D-16, D-17)."""

import gc
import random
import threading
import weakref
from functools import partial

import numpy as np
import psutil
import pytest

import bridge
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv
from tests.parallel_envs import NAMES, Relay
from tests.peers import Stream
from tests.support import direct_registry, gym_source

STEP = {"step": pb.StepRequest(actions={1: pack_tensor(0)}, requested_observations=[1])}


def create(stream, **settings):
    answer = stream.ask(create_world=pb.CreateWorldRequest(settings={k: pack_tensor(v) for k, v in settings.items()}))
    assert answer.WhichOneof("payload") == "create_world", answer
    return answer.create_world.world_name


def destroy(stream, name):
    return stream.ask(destroy_world=pb.DestroyWorldRequest(world_name=name))


@pytest.fixture
def server():
    with bridge.serve_gym(lambda length=100: CountingEnv(length)) as server:
        yield server


def test_a_hundred_worlds_made_and_destroyed_by_ten_clients_leave_nothing():
    """D-3, D-5, D-17: in random order, some played in between; no world, environment, thread or file is left."""
    alive = weakref.WeakSet()
    closed = []

    class Tracked(CountingEnv):
        def __init__(self):
            super().__init__(50)
            alive.add(self)

        def close(self):
            closed.append(id(self))
            super().close()

    names, guard, errors = [], threading.Lock(), []
    process = psutil.Process()

    def client(server, number):
        rng = random.Random(number)
        stream = Stream(server)
        try:
            left = 10
            while left or names:
                with guard:
                    take = names.pop(rng.randrange(len(names))) if names and (not left or rng.random() < 0.5) else None
                if take is None and left:
                    name = create(stream)
                    left -= 1
                    with guard:
                        names.append(name)
                elif take is not None:
                    if rng.random() < 0.5:  # somebody else's world, played and left
                        stream.join(take)
                        stream.ask(**STEP)
                        position = stream.ask(**STEP).step.observations[1]
                        assert unpack_tensor(position).tolist() == [1, 1]
                        stream.ask(leave_world=pb.LeaveWorldRequest())
                    assert destroy(stream, take).WhichOneof("payload") == "destroy_world"
        except BaseException as error:
            errors.append(error)
        finally:
            stream.close()

    with bridge.serve_gym(Tracked) as server:
        warm = Stream(server)  # gRPC's own threads and files are there from the first connection on
        destroy(warm, create(warm))
        before_files, before_threads = process.num_fds(), threading.active_count()
        threads = [threading.Thread(target=client, args=(server, number)) for number in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not errors
        assert server.worlds == []
        assert len(closed) == 101
        assert threading.active_count() <= before_threads + 2
        assert process.num_fds() <= before_files + 4
        assert warm.ask(leave_world=pb.LeaveWorldRequest()).WhichOneof("payload") == "leave_world"
        warm.close()
    gc.collect()
    assert len(alive) == 0


def test_an_agent_of_one_world_cannot_touch_another(server, streams):
    """D-5: two worlds of one kind go their own ways, also where one is reset or destroyed."""
    one, two = streams(server), streams(server)
    first, second = create(one), create(two)
    one.join(first), two.join(second)
    for stream in (one, two):
        stream.ask(**STEP)
    for _ in range(4):
        one.ask(**STEP)
    one.ask(reset=pb.ResetRequest())
    one.ask(leave_world=pb.LeaveWorldRequest())
    destroy(one, first)
    assert unpack_tensor(two.ask(**STEP).step.observations[1]).tolist() == [1, 1]


def test_a_world_is_joined_left_and_joined_again_and_stays(server, streams):
    """D-16, D-3: from another connection than the one that made it; Leave without a world is a no-op."""
    maker, player = streams(server), streams(server)
    name = create(maker)
    assert player.ask(leave_world=pb.LeaveWorldRequest()).WhichOneof("payload") == "leave_world"
    for _ in range(2):
        player.join(name)
        assert player.ask(**STEP).step.state == pb.RUNNING
        assert player.ask(leave_world=pb.LeaveWorldRequest()).WhichOneof("payload") == "leave_world"
    assert name in server.worlds


def test_destroying_is_refused_inside_and_for_unknown_worlds_and_felt_by_others(server, streams):
    """D-17: on the joined connection, of an unknown world, twice; an agent of another connection gets an error."""
    player, other = streams(server), streams(server)
    name = create(player)
    player.join(name)
    player.ask(**STEP)
    inside = destroy(player, name).error
    assert inside.code == Code.FAILED_PRECONDITION
    assert "LeaveWorld" in inside.message
    assert destroy(other, "nowhere").error.code == Code.NOT_FOUND
    assert player.ask(**STEP).step.state == pb.RUNNING  # what was refused changed nothing (D-2)
    assert destroy(other, name).WhichOneof("payload") == "destroy_world"
    assert destroy(other, name).error.code == Code.NOT_FOUND
    for request in (STEP, {"step": pb.StepRequest()}):
        error = player.ask(**request).error
        assert error.code == Code.FAILED_PRECONDITION
        assert "destroyed" in error.message
    assert player.ask(leave_world=pb.LeaveWorldRequest()).WhichOneof("payload") == "leave_world"
    player.join("")
    assert player.ask(**STEP).step.state == pb.RUNNING


def test_a_world_dies_with_the_client_that_made_and_joined_it_and_with_no_other(server, streams):
    """D-16, D-22: a dead client's own world goes; one made for others to join stays."""
    player, maker = streams(server), streams(server)
    own, shared = create(player), create(maker)
    player.join(own)
    player.ask(**STEP)
    player.die()
    maker.close()
    watcher = streams(server)
    deadline = threading.Event()
    for _ in range(200):
        if server.worlds == [shared]:
            break
        deadline.wait(0.05)
    assert server.worlds == [shared]
    watcher.join(shared)


def test_worlds_beyond_the_limit_are_refused_by_its_name(streams):
    """D-2: RESOURCE_EXHAUSTED naming `max_worlds`; the place of a destroyed one is free again."""
    with bridge.serve_gym("CartPole-v1", limits=bridge.Limits(max_worlds=2)) as server:
        stream = streams(server)
        first = create(stream)
        create(stream)
        error = stream.ask(create_world=pb.CreateWorldRequest()).error
        assert error.code == Code.RESOURCE_EXHAUSTED
        assert "max_worlds=2" in error.message
        destroy(stream, first)
        create(stream)


def test_a_full_world_an_unknown_one_and_a_second_join_are_errors(server, streams):
    """D-6."""
    first, second = streams(server).join(), streams(server)
    full = second.ask(join_world=pb.JoinWorldRequest()).error
    assert (full.code, "at most 1" in full.message) == (Code.RESOURCE_EXHAUSTED, True)
    assert second.ask(join_world=pb.JoinWorldRequest(world_name="x")).error.code == Code.NOT_FOUND
    assert first.ask(join_world=pb.JoinWorldRequest()).error.code == Code.FAILED_PRECONDITION
    settings = {"team": pack_tensor("red")}
    assert second.ask(join_world=pb.JoinWorldRequest(settings=settings)).error.code == Code.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("serve", "agents", "advice"),
    [
        (partial(bridge.serve_gym, CountingEnv), 1, "wait until it leaves"),
        (partial(bridge.serve_gym, CountingEnv, fps=20), 1, "role=spectator"),
        (partial(bridge.serve_parallel, Relay), len(NAMES), "wait until one is free"),
        (partial(bridge.serve_parallel, Relay, fps=20), len(NAMES), "role=spectator"),
    ],
)
def test_a_full_world_tells_what_a_server_without_further_worlds_allows(streams, serve, agents, advice):
    """Where `max_worlds` is reached, `create a world` alone would be advice that fails."""
    with serve(limits=bridge.Limits(max_worlds=0)) as server:
        for _ in range(agents):
            streams(server).join()
        error = streams(server).ask(join_world=pb.JoinWorldRequest()).error
    assert error.code == Code.RESOURCE_EXHAUSTED
    assert f"{advice}, or create another world, if the server has room for one" in error.message
    assert "max_worlds" in error.message


class Owner:
    """Stands for a connection."""


def make_registry(idle_timeout=10.0):
    source = gym_source(lambda: CountingEnv(5))
    return direct_registry(source, bridge.Limits(idle_timeout=idle_timeout))


def test_a_world_without_agents_goes_after_the_idle_timeout_and_not_before():
    """Time is an argument: no waiting in this test."""
    registry, owner = make_registry(), Owner()
    name = registry.create_world({}, owner)
    assert registry.reap(100.0) == []
    assert registry.reap(109.9) == []
    assert registry.names == [name]
    assert registry.reap(110.0) == [name]
    assert registry.names == []
    registry.close()


def test_a_world_with_an_agent_is_never_idle_and_counts_anew_once_it_left():
    registry, owner = make_registry(), Owner()
    world = registry.find_world(registry.create_world({}, owner))
    registry.reap(0.0)
    agent = world.join({})
    registry.joined(world, owner)
    assert registry.reap(1000.0) == []
    agent.leave()
    registry.left(world)
    assert registry.reap(1010.5) == []  # it is found to be empty now
    assert registry.reap(1011.0) == []
    agent = world.join({})  # in and out again between two looks
    registry.joined(world, owner)
    agent.leave()
    assert registry.reap(1020.6) == []
    assert registry.reap(1031.0) == [world.name]
    registry.close()


def test_a_world_whose_creator_is_gone_goes_sooner_and_others_have_time_to_join_it():
    registry, owner = (
        direct_registry(gym_source(lambda: CountingEnv(5)), bridge.Limits(abandoned_timeout=60.0)),
        Owner(),
    )
    kept, left = registry.create_world({}, Owner()), registry.create_world({}, owner)
    registry.reap(0.0)
    assert registry.reap(1000.0) == []  # the creators are there
    registry.disconnected(owner)
    assert registry.reap(1001.0) == []
    world = registry.find_world(left)
    agent = world.join({})
    registry.joined(world, Owner())
    assert registry.reap(2000.0) == []  # somebody is in it
    agent.leave()
    assert registry.reap(2001.0) == []
    assert registry.reap(2060.0) == []
    assert registry.reap(2061.0) == [left]
    assert registry.names == [kept]
    registry.close()


def test_nobody_joins_a_world_that_is_being_reaped():
    registry = make_registry()
    world = registry.find_world("")
    registry.reap(0.0)
    assert registry.reap(10.0) == [""]
    with pytest.raises(bridge.errors.RequestError, match="destroyed"):
        world.join({})
    assert registry.find_world("").wrapped is not world.wrapped  # D-4: the default world is there again when asked for
    registry.close()


def test_without_an_idle_timeout_worlds_stay():
    registry = make_registry(None)
    registry.create_world({}, Owner())
    assert registry.reap(1e9) == []
    registry.close()


def test_a_server_reaps_by_itself_and_its_thread_ends_with_it(streams):
    """The thread is thin: it only tells the time. The fixture of all tests sees to it that it is gone."""
    with bridge.serve_gym("CartPole-v1", limits=bridge.Limits(idle_timeout=0.2)) as server:
        create(streams(server))
        waiting = threading.Event()
        for _ in range(400):
            if not server.worlds:
                break
            waiting.wait(0.05)
        assert server.worlds == []


def test_lanes_and_single_environments_take_a_reset_of_their_world(streams):
    """D-15 in a world of lanes: all lanes begin anew, from the seed."""
    with bridge.serve_gym("CartPole-v1", num_envs=3) as server:
        stream = streams(server).join()
        settings = {"seed": pack_tensor(np.array([5, 6, 7]))}
        observed = []
        for _ in range(2):
            stream.ask(reset_world=pb.ResetWorldRequest(settings=settings))
            observed.append(stream.ask(step=pb.StepRequest(requested_observations=[1])).step.observations[1])
        assert observed[0] == observed[1]


@pytest.mark.parametrize("thread_safe", [False, True])
def test_environments_of_two_servers_in_a_process_are_called_one_at_a_time(streams, thread_safe):
    """Those that draw are not thread-safe, whichever server they are on; an author may promise that others are."""
    both, met = threading.Barrier(2), []

    class Meeting(CountingEnv):
        def step(self, action):
            try:
                both.wait(20.0 if thread_safe else 0.3)
                met.append(True)
            except threading.BrokenBarrierError:
                met.append(False)
            return super().step(action)

    def serve():
        return bridge.serve_gym(lambda: Meeting(9), thread_safe=thread_safe)

    with serve() as one, serve() as other:
        agents = [streams(one).join(), streams(other).join()]
        for _ in range(2):
            for agent in agents:
                agent.send(**STEP)
            assert [agent.take().step.state for agent in agents] == [pb.RUNNING] * 2
    assert met == [thread_safe] * 2
