"""Properties over real connections, by the public library and by plain messages (D-18)."""

import gymnasium
import numpy as np
import pytest
from dm_env_rpc.v1.extensions import properties as public_properties
from gymnasium.vector import SyncVectorEnv

import bridge
from bridge.core.encoding import values
from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.errors import Code
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv
from tests.core.encoding.served_properties import ask, read
from tests.parallel_envs import Relay
from tests.peers import PublicClient, Stream
from tests.support import everywhere


def listing(stream, key=""):
    return ask(stream, list_property={"key": key})


def write(stream, key, value):
    return ask(stream, write_property={"key": key, "value": value})


def encoded(value):
    return pack_tensor(np.frombuffer(values.encode(value), np.uint8))


def tree(stream, key=""):
    """Every property, by walking down from the root."""
    found = []
    for spec in listing(stream, key).list_property.values:
        found.append(spec)
        if spec.is_listable:
            found += tree(stream, spec.spec.name)
    return found


@pytest.fixture
def stream(isolation):
    with bridge.serve_gym(lambda: CountingEnv(7), isolation=isolation) as server:
        stream = Stream(server)
        yield stream
        stream.close()


@pytest.fixture
def drawn(isolation):
    """A world that has a frame too."""
    with bridge.serve_gym("CartPole-v1", env_kwargs={"render_mode": "rgb_array"}, isolation=isolation) as server:
        stream = Stream(server)
        yield stream
        stream.close()


def test_world_properties_come_with_the_world_and_go_with_it(stream):
    """D-18: universal ones before the join, a layer of the world's after it, keys unique in the tree."""
    roots = [spec.spec.name for spec in listing(stream).list_property.values]
    assert roots == ["server", "connection"]
    assert read(stream, "world.name") == Code.NOT_FOUND
    stream.join()
    whole = tree(stream)
    names = [spec.spec.name for spec in whole]
    assert len(set(names)) == len(names)
    assert {"server", "world", "world.name", "world.observation_space", "world.attributes"} <= set(names)
    stream.ask(leave_world=pb.LeaveWorldRequest())
    assert read(stream, "world.name") == Code.NOT_FOUND


@everywhere
def test_what_is_listed_is_what_can_be_done(drawn):
    """D-18: each property of the tree is read, written and listed as its flags say."""
    stream = drawn
    stream.join()
    stream.ask(step=pb.StepRequest())
    for spec in tree(stream):
        key = spec.spec.name
        assert spec.description or spec.is_listable, key
        got = read(stream, key)
        if spec.is_readable:
            tensor = got.read_property.value
            assert unpack_tensor(tensor).ndim == len(spec.spec.shape)
        else:
            assert got == Code.PERMISSION_DENIED
        if spec.is_writable:
            assert write(stream, key, got.read_property.value).WhichOneof("payload") == "write_property"
        else:
            assert write(stream, key, pack_tensor(1)) == Code.PERMISSION_DENIED
        if not spec.is_listable:
            assert listing(stream, key) == Code.PERMISSION_DENIED


@everywhere
def test_attributes_are_read_and_written_and_wrong_ones_refused(stream):
    """D-18: NOT_FOUND for an unknown one, INVALID_ARGUMENT for a bad value, PERMISSION_DENIED for a private one."""
    stream.join()
    key = "world.attributes.length"
    assert unpack_tensor(read(stream, key).read_property.value).dtype == np.uint8
    assert write(stream, key, encoded([3])).WhichOneof("payload") == "write_property"
    assert values.decode(unpack_tensor(read(stream, key).read_property.value).tobytes()) == [3]
    assert write(stream, key, encoded(3)) == Code.INVALID_ARGUMENT
    assert write(stream, key, pack_tensor("three")) == Code.INVALID_ARGUMENT
    assert read(stream, "world.attributes.nothing") == Code.NOT_FOUND
    assert read(stream, "world.attributes._np_random") == Code.PERMISSION_DENIED
    assert write(stream, "world.attributes._np_random", encoded([1])) == Code.PERMISSION_DENIED
    assert values.decode(unpack_tensor(read(stream, key).read_property.value).tobytes()) == [3]


class Dressed(gymnasium.Wrapper):
    """A wrapper with attributes of its own; one is of no use elsewhere, one takes its time."""

    LEVELS = (1, 2)
    looked = 0

    def __init__(self):
        super().__init__(CountingEnv(7))
        self.colour, self._hidden, self.window, self.engine = "red", 1, None, object()
        self.grid = np.zeros((2, 2))
        self.map = dict.fromkeys(map(str, range(5000)))

    @property
    def slow(self):
        self.looked += 1
        return self.looked

    def shout(self):
        return "hey"


@pytest.mark.parametrize("options", [{}, {"num_envs": 2}, {"isolation": "process"}], ids=str)
def test_attributes_are_listed_as_far_as_they_travel(options):
    """D-18: data of the wrappers and of the environment, without calling anything; a leaf has nothing to list."""
    with bridge.serve_gym(Dressed, **options) as server:
        stream = Stream(server)
        stream.join()
        listed = {spec.spec.name.rpartition(".")[2]: spec for spec in tree(stream, "world.attributes")}
        assert {"colour", "grid", "LEVELS", "looked", "length", "truncates", "episode"} <= set(listed)
        assert not {"_hidden", "window", "engine", "map", "slow", "shout", "step", "env", "action_space"} & set(listed)
        assert all((spec.is_readable, spec.is_writable, spec.is_listable) == (1, 1, 0) for spec in listed.values())
        for name in listed:
            assert read(stream, f"world.attributes.{name}").WhichOneof("payload") == "read_property", name
        for name in ("colour", "window", "slow", "shout", "unwrapped", "_hidden"):
            assert listing(stream, f"world.attributes.{name}") == Code.PERMISSION_DENIED
        for name in ("nothing", "colour.red"):
            assert listing(stream, f"world.attributes.{name}") == Code.NOT_FOUND
        assert values.decode(read_bytes(stream, "world.attributes.looked")) == [0] * options.get("num_envs", 1)
        stream.close()


def test_no_more_than_a_hundred_attributes_are_listed():
    """D-18: a listing is bounded; what is not in it can be read all the same."""
    env = CountingEnv(3)
    for number in range(300):
        setattr(env, f"a{number}", number)
    with bridge.serve_gym(lambda: env) as server:
        stream = Stream(server)
        stream.join()
        assert len(tree(stream, "world.attributes")) == 100
        assert values.decode(read_bytes(stream, "world.attributes.a299")) == [299]
        stream.close()


def test_lanes_in_other_processes_list_no_attributes():
    """D-18: their names are not known here, but they are read by name."""
    with bridge.serve_gym("CartPole-v1", num_envs=2, vectorization_mode="async") as server:
        stream = Stream(server)
        stream.join()
        assert not tree(stream, "world.attributes")
        assert values.decode(read_bytes(stream, "world.attributes.gravity")) == [9.8, 9.8]
        assert listing(stream, "world.attributes.gravity") == Code.PERMISSION_DENIED
        stream.close()


class Unlike(SyncVectorEnv):
    """Lanes of which it gives what is not a list with an item for each."""

    def render(self):
        return [np.zeros((2, 2, 3), np.uint8)] * 3

    @property
    def np_random_seed(self):
        return 5


def test_what_lanes_share_is_each_lanes():
    """D-18: the value of a property of lanes has an item for each of them, whatever the environment gives."""
    with bridge.serve_gym(lambda: Unlike([CountingEnv, CountingEnv])) as server:
        stream = Stream(server)
        stream.join()
        frames = values.decode(read_bytes(stream, "world.frame"))
        assert [len(frame) for frame in frames] == [3, 3]
        random = values.decode(read_bytes(stream, "world.random"))
        assert [lane["seed"] for lane in random] == [5, 5]
        stream.close()


def test_the_attributes_of_a_world_of_agents_are_listed():
    """D-18, D-22."""
    with bridge.serve_parallel(Relay) as server:
        stream = Stream(server).join()
        names = {spec.spec.name for spec in tree(stream, "world.attributes")}
        assert {"world.attributes.horizon", "world.attributes.distances"} <= names
        assert listing(stream, "world.attributes.horizon") == Code.PERMISSION_DENIED
        assert listing(stream, "world.attributes.nothing") == Code.NOT_FOUND
        stream.close()


def test_unknown_keys_and_empty_requests_are_refused(stream):
    """D-18, D-2."""
    for key in ("nothing", "server.nothing", "world"):
        assert read(stream, key) == Code.NOT_FOUND
        assert write(stream, key, pack_tensor(1)) == Code.NOT_FOUND
        assert listing(stream, key) == Code.NOT_FOUND
    assert ask(stream) == Code.INVALID_ARGUMENT
    stream.join()


@everywhere
def test_each_agent_of_a_world_sees_its_own(isolation):
    """D-18, D-22."""
    with bridge.serve_parallel(Relay, missing_agent="end", isolation=isolation) as server:
        streams = [Stream(server).join() for _ in range(2)]
        read_all = [
            [unpack_tensor(read(s, f"world.{key}").read_property.value)[()] for key in ("agent", "missing_agent")]
            for s in streams
        ]
        assert read_all == [["ann", "end"], ["bob", "end"]]
        spaces = [unpack_tensor(read(s, "world.action_space").read_property.value)[()] for s in streams]
        assert spaces[0] != spaces[1]
        for stream in streams:
            stream.close()


def test_the_public_library_reads_writes_and_lists_ours():
    """D-18: `dm_env_rpc.v1.extensions.properties`."""
    with bridge.serve_gym(lambda: CountingEnv(7)) as server:
        client = PublicClient(server)
        tree = public_properties.PropertiesExtension(client)
        assert set(tree.specs()) == {"server", "connection"}
        assert tree["server.name"] == "gymnasium-bridge"
        client.join()
        assert set(public_properties.PropertiesExtension(client).specs()) == {"server", "connection", "world"}
        assert tree["world.num_envs"] == 0
        with pytest.raises(PermissionError):
            tree["world.name"] = "mine"
        tree["world.attributes.length"] = np.frombuffer(values.encode([2]), np.uint8)
        assert values.decode(np.asarray(tree["world.attributes.length"]).tobytes()) == [2]
        client.close()


@pytest.mark.parametrize(
    "serve",
    [
        pytest.param(lambda: bridge.serve_gym(lambda: CountingEnv(3)), id="one"),
        pytest.param(lambda: bridge.serve_gym(lambda: CountingEnv(3), num_envs=2), id="lanes"),
        pytest.param(lambda: bridge.serve_gym("CartPole-v1", isolation="process"), id="isolated"),
        pytest.param(lambda: bridge.serve_parallel(Relay(), missing_agent="default"), id="agents"),
    ],
)
def test_a_world_tells_how_long_its_environment_takes(serve):
    """D-18 (statistics): counts of the calls, and percentiles in seconds."""
    with serve() as server:
        stream = Stream(server)
        try:
            specs = stream.join().specs
            before = values.decode(read_bytes(stream, "world.timing"))
            assert before["step"]["count"] == before["reset"]["count"] == 0
            assert np.isnan(before["step"]["p50"])
            action = {uid: pack_tensor(np.zeros(spec.shape, np.int64)) for uid, spec in specs.actions.items()}
            for _ in range(4):
                assert stream.ask(step={"actions": action}).HasField("step")
            after = values.decode(read_bytes(stream, "world.timing"))
            assert after["reset"]["count"] >= 1
            assert after["step"]["count"] + after["reset"]["count"] in (4, 5)  # lanes begin anew within a step
            for times in after.values():
                assert 0 < times["p50"] <= times["p90"] <= times["p99"] <= times["max"]
        finally:
            stream.close()


def read_bytes(stream, key):
    return unpack_tensor(read(stream, key).read_property.value).tobytes()
