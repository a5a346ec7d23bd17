"""The compliance classes of the public `dm-env-rpc` library, run on our server (issue's own measure of D-3 to D-17)."""

import itertools

import gymnasium
import pytest
from dm_env_rpc.v1 import compliance, dm_env_rpc_pb2, tensor_utils

import bridge
from bridge.web.gateway import serve_gateway
from tests.ends.compliance import INVALID, SPACES, least, methods, run, run_reset
from tests.parallel_envs import Relay
from tests.peers import PublicClient
from tests.support import chosen
from tests.websocket_tools import WebSocketChannel

OVER_WEBSOCKET = ("websocket", "gateway")


class Endless(gymnasium.Env):
    """Observes and acts in one space, and never ends."""

    def __init__(self, space="nested"):
        self.observation_space, self.action_space = SPACES[space], SPACES[space]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return self.observation_space.sample(), 0.5, False, False, {}


@pytest.fixture(scope="module")
def transport(request):
    return request.param


TRANSPORTS = ("http2", "grpcio", "websocket", "gateway")
over_every_transport = pytest.mark.parametrize("transport", TRANSPORTS, indirect=True, scope="module")


def over_transports(names):
    """Run a test over each transport with one nested space, and with each of these spaces over one transport.

    `make test-all` runs the product.
    """
    pairs = chosen(
        itertools.product(TRANSPORTS, names), lambda transport, space: transport == "http2" or space == "nested"
    )
    return pytest.mark.parametrize(("transport", "space"), pairs, indirect=["transport"], scope="module")


@pytest.fixture(scope="module")
def server(transport):
    options = {"web": True} if transport == "websocket" else {"transport": transport}
    if transport == "gateway":
        with bridge.serve_gym(Endless) as behind, serve_gateway(behind.url) as server:
            yield server
        return
    with bridge.serve_gym(Endless, **options) as server:
        yield server


@pytest.fixture
def client(server, transport):
    client = PublicClient(server, channel=WebSocketChannel(server.port) if transport in OVER_WEBSOCKET else None)
    yield client
    client.close()


def create(client, space):
    settings = {"kwargs.space": tensor_utils.pack_tensor(space)}
    return client.send(dm_env_rpc_pb2.CreateWorldRequest(settings=settings)).world_name


@over_every_transport
@pytest.mark.parametrize("method", methods(compliance.CreateDestroyWorld))
def test_create_and_destroy_comply(method, client):
    """D-3, D-17."""
    run(
        compliance.CreateDestroyWorld,
        method,
        connection=client,
        required_world_settings={},  # no setting of ours is required
        invalid_world_settings=INVALID,
        has_multiple_world_support=True,
    )


@over_transports(SPACES)
@pytest.mark.parametrize("method", methods(compliance.JoinLeaveWorld))
def test_join_and_leave_comply(method, space, client):
    """D-6, D-7, D-16."""
    name = create(client, space)
    run(compliance.JoinLeaveWorld, method, connection=client, world_name=name, invalid_join_settings=INVALID)


# The public class casts the least double to float for an unbounded action.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@over_transports(SPACES)
@pytest.mark.parametrize("method", methods(compliance.Step))
def test_steps_comply(method, space, client):
    """D-9, D-10, D-11, D-19, D-20."""
    client.join(create(client, space))
    required = {uid: least(spec) for uid, spec in client.specs.actions.items()}
    if method == "test_first_step_actions_are_ignored":
        required = {}
    run(compliance.Step, method, connection=client, specs=client.specs, required_actions=required)


@over_transports(SPACES)
@pytest.mark.parametrize("method", methods(compliance.Reset))
def test_reset_complies(method, space, client):
    """D-8, D-14."""
    run_reset(method, client, create(client, space))


@over_transports(["scalar bounded", "nested"])
@pytest.mark.parametrize("method", methods(compliance.ResetWorld))
def test_reset_world_complies(method, space, client):
    """D-15."""
    run(compliance.ResetWorld, method, connection=client, world_name=create(client, space))


@pytest.mark.parametrize("agent", ["ann", "bob", "cyd"])
@pytest.mark.parametrize(
    ("cls", "method"),
    [
        (cls, method)
        for cls in (compliance.JoinLeaveWorld, compliance.Reset, compliance.ResetWorld)
        for method in methods(cls)
    ],
)
def test_a_world_of_several_agents_complies(cls, method, agent):
    """D-22: each agent's connection is by itself a lawful one."""
    join = {"agent": tensor_utils.pack_tensor(agent)}
    with bridge.serve_parallel(Relay) as server:
        client = PublicClient(server)
        if cls is compliance.Reset:
            run_reset(method, client, "", agent=agent)
        elif cls is compliance.JoinLeaveWorld:
            wrong = {"agent": tensor_utils.pack_tensor("dan")}
            settings = {"required_join_settings": join, "invalid_join_settings": {**INVALID}}
            run(cls, method, connection=client, world_name="", **settings)
            run(cls, method, connection=client, world_name="", invalid_join_settings=wrong)
        else:
            run(cls, method, connection=client, world_name="", required_join_world_settings=join)
        client.close()
