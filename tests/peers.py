"""Connections for tests: the public `dm-env-rpc` client, and a plain stream of our messages that can send ahead."""

import contextlib
import queue

import grpc
from dm_env_rpc.v1 import connection as public_connection
from dm_env_rpc.v1 import dm_env_rpc_pb2 as public
from dm_env_rpc.v1 import tensor_utils

from bridge.core.encoding.tensors import pack_tensor, unpack_tensor
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.pb import properties_pb2

TIMEOUT = 20.0
SERVICE = "dm_env_rpc.v1.Environment"
METHOD = "Process"
HELLO = "gymnasium-bridge"  # the key of the response metadata that tells the version of a server of this package


class PublicClient:
    """The public client's connection, closed for good at the end."""

    def __init__(self, server, target=None, channel=None):
        self.channel = channel or grpc.insecure_channel(target or server.url.removeprefix("grpc://"))
        self.connection = public_connection.Connection(self.channel)
        self.send = self.connection.send
        self.specs = None

    def join(self, world="", **settings):
        tensors = {name: tensor_utils.pack_tensor(value) for name, value in settings.items()}
        self.specs = self.send(public.JoinWorldRequest(world_name=world, settings=tensors)).specs
        self.observations = {spec.name: uid for uid, spec in self.specs.observations.items()}
        self.actions = {spec.name: (uid, spec) for uid, spec in self.specs.actions.items()}
        return self

    def step(self, *observations, **actions):
        """Step with actions by name; return the state and the observations by name."""
        packed = {}
        for name, value in actions.items():
            uid, spec = self.actions[name.replace("__", ".")]
            packed[uid] = tensor_utils.pack_tensor(value, dtype=spec.dtype)
        wanted = [self.observations[name] for name in observations]
        answer = self.send(public.StepRequest(actions=packed, requested_observations=wanted))
        names = {uid: name for name, uid in self.observations.items()}
        return answer.state, {names[uid]: tensor_utils.unpack_tensor(t) for uid, t in answer.observations.items()}

    def close(self):
        self.connection._stream._requests.put(None)  # its own close() leaves a blocked thread behind
        self.channel.close()


class Stream:
    """Our messages over a stream of its own: `send` never waits, `take` waits for the next answer.

    With `own_connection` it shares its TCP connection with no other stream of this process.
    """

    def __init__(self, server, own_connection=False, token=None):
        options = [("grpc.use_local_subchannel_pool", int(own_connection))]
        self.channel = grpc.insecure_channel(server.url.removeprefix("grpc://"), options)
        metadata = (("authorization", f"Bearer {token}"),) if token else None
        process = self.channel.stream_stream(
            f"/{SERVICE}/{METHOD}",
            pb.EnvironmentRequest.SerializeToString,
            pb.EnvironmentResponse.FromString,
        )
        self.requests = queue.SimpleQueue()
        self.call = process(iter(self.requests.get, None), timeout=120, metadata=metadata)

    def send(self, **payload):
        self.requests.put(pb.EnvironmentRequest(**payload))

    def take(self):
        return next(self.call)

    def ask(self, **payload):
        self.send(**payload)
        return self.take()

    def join(self, world="", **settings):
        packed = {name: pack_tensor(value) for name, value in settings.items()}
        answer = self.ask(join_world=pb.JoinWorldRequest(world_name=world, settings=packed))
        assert answer.WhichOneof("payload") == "join_world", answer
        self.specs = answer.join_world.specs
        self.uids = {spec.name: uid for uid, spec in self.specs.observations.items()}
        return self

    def read_property(self, key):
        """The value of a property, as this stream is told it."""
        request = properties_pb2.PropertyRequest()
        request.read_property.key = key
        message = pb.EnvironmentRequest()
        message.extension.type_url = "type.googleapis.com/dm_env_rpc.v1.extensions.properties.PropertyRequest"
        message.extension.value = request.SerializeToString()
        self.requests.put(message)
        answer = properties_pb2.PropertyResponse.FromString(self.take().extension.value)
        return unpack_tensor(answer.read_property.value)[()]

    def die(self):
        """Cut the connection, as a killed process does."""
        self.call.cancel()
        self.requests.put(None)

    def close(self):
        self.requests.put(None)
        with contextlib.suppress(grpc.RpcError, StopIteration):
            while True:
                next(self.call)
        self.channel.close()
