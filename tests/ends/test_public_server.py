"""`public_server.py` is right by the public library's own measure: its compliance classes and its client."""

import contextlib

import grpc
import numpy as np
import pytest
from dm_env_rpc.v1 import compliance, dm_env_rpc_pb2, error, tensor_utils
from dm_env_rpc.v1 import connection as dm_env_rpc_connection
from dm_env_rpc.v1.extensions import properties

from tests.public_server import KINDS, PublicServer


@contextlib.contextmanager
def connect(server):
    with grpc.insecure_channel(server.url.removeprefix("grpc://")) as channel:
        connection = dm_env_rpc_connection.Connection(channel)
        try:
            yield connection
        finally:
            connection.close()


def join(connection, kind="full"):
    settings = {"kind": tensor_utils.pack_tensor(kind)}
    name = connection.send(dm_env_rpc_pb2.CreateWorldRequest(settings=settings)).world_name
    return name, connection.send(dm_env_rpc_pb2.JoinWorldRequest(world_name=name)).specs


def methods(cls):
    return [name for name in dir(cls) if name.startswith("test_")]


def run(cls, method, **members):
    """Run one method of a compliance class with the properties that it asks for."""
    case = type(cls.__name__, (cls,), {name: property(lambda _, v=value: v) for name, value in members.items()})
    result = case(method).run()
    assert result.wasSuccessful(), str(result.failures + result.errors)


@pytest.mark.parametrize("method", methods(compliance.CreateDestroyWorld))
def test_create_and_destroy_comply(method):
    with PublicServer() as server, connect(server) as connection:
        run(
            compliance.CreateDestroyWorld,
            method,
            connection=connection,
            required_world_settings={},
            invalid_world_settings={"level": tensor_utils.pack_tensor(1)},
            has_multiple_world_support=True,
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", methods(compliance.JoinLeaveWorld))
def test_join_and_leave_comply(method, kind):
    with PublicServer(kind=kind) as server, connect(server) as connection:
        run(
            compliance.JoinLeaveWorld,
            method,
            connection=connection,
            world_name="",
            invalid_join_settings={"class": tensor_utils.pack_tensor("wizard")},
        )


# The public class casts the least double to float for an unbounded action.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", methods(compliance.Step))
def test_steps_comply(method, kind):
    with PublicServer() as server, connect(server) as connection:
        _, specs = join(connection, kind)
        run(compliance.Step, method, connection=connection, specs=specs)


@pytest.mark.parametrize("method", methods(compliance.Reset))
def test_reset_complies(method):
    with PublicServer() as server, connect(server) as connection:

        class Reset(compliance.Reset):
            @property
            def connection(self):
                return connection

            def join_world(self):
                return connection.send(dm_env_rpc_pb2.JoinWorldRequest()).specs

        result = Reset(method).run()
        assert result.wasSuccessful(), str(result.failures + result.errors)


@pytest.mark.parametrize("method", methods(compliance.ResetWorld))
def test_reset_world_complies(method):
    with PublicServer() as server, connect(server) as connection:
        run(compliance.ResetWorld, method, connection=connection, world_name="")


def test_the_public_client_plays_and_reads_properties():
    with PublicServer() as server, connect(server) as connection:
        name, specs = join(connection)
        uids = {spec.name: uid for uid, spec in specs.observations.items()}
        step = dm_env_rpc_pb2.StepRequest(requested_observations=list(uids.values()))
        states, discounts = [], []
        for _ in range(10):
            response = connection.send(step)
            states.append(response.state)
            discounts.append(tensor_utils.unpack_tensor(response.observations[uids["discount"]]))
            events = tensor_utils.unpack_tensor(response.observations[uids["events"]])
            assert events.dtype == np.int32
        assert states == [1, 1, 1, 1, 2, 1, 1, 1, 1, 3]
        assert discounts == [1.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]
        tree = properties.PropertiesExtension(connection)
        assert set(tree.specs()) == {"volume", "server", "world"}
        tree["volume"] = np.float32(0.25)
        assert tree["volume"] == np.float32(0.25)
        assert tree["world.name"] == name
        with pytest.raises(KeyError):
            tree["nowhere"]
        with pytest.raises(PermissionError):
            tree["server.key"]
        with pytest.raises(ValueError, match="value"):
            tree["volume"] = "loud"


def test_without_properties_extensions_are_unimplemented():
    with (
        PublicServer(properties=False) as server,
        connect(server) as connection,
        pytest.raises(error.DmEnvRpcError, match="no extension"),
    ):
        properties.PropertiesExtension(connection).specs()


def test_an_unknown_fault_is_an_error():
    with pytest.raises(ValueError, match="no such faults"):
        PublicServer({"typo"})
