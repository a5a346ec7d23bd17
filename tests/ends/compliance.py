"""The compliance tests of dm_env_rpc, run over any server."""

import string

import numpy as np
from dm_env_rpc.v1 import compliance, dm_env_rpc_pb2, tensor_spec_utils, tensor_utils
from gymnasium import spaces

TEXT = spaces.Text(8, min_length=0, charset=string.printable)


VECTOR = spaces.Box(np.array([-1, -2, 0], np.float32), np.array([1, 2, 9], np.float32))


SPACES = {
    "scalar bounded": spaces.Box(-3, 3, (), np.float64),
    "scalar unbounded": spaces.Box(-np.inf, np.inf, (), np.float32),
    "vector bounded": VECTOR,
    "vector unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float64),
    "matrix of bytes": spaces.Box(0, 255, (2, 3), np.uint8),
    "integers": spaces.Box(-5, 5, (2, 2), np.int32),
    "discrete": spaces.Discrete(5, start=2),
    "multi-discrete": spaces.MultiDiscrete([3, 4]),
    "multi-binary": spaces.MultiBinary(3),
    "string": TEXT,
    "nested": spaces.Dict(
        arm=spaces.Dict(torque=VECTOR, grip=spaces.Box(0, 1, (2, 2), np.float32)), say=TEXT, move=spaces.Discrete(3)
    ),
    "tuple": spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (), np.float64))),
}


INVALID = {"level": tensor_utils.pack_tensor(3)}


def methods(cls):
    return [name for name in dir(cls) if name.startswith("test_")]


def run(cls, method, **members):
    """Run one method of a compliance class with the properties that it asks for."""
    case = type(cls.__name__, (cls,), {name: property(lambda _, v=value: v) for name, value in members.items()})
    result = case(method).run()
    assert result.wasSuccessful(), "\n".join(text for _, text in result.failures + result.errors)


def least(spec):
    """A lawful value of an action, as the compliance classes make one."""
    shape = np.maximum(np.asarray(spec.shape, int), 1)
    if spec.dtype == dm_env_rpc_pb2.DataType.STRING:
        return tensor_utils.pack_tensor(np.full(shape, ""))
    low = np.zeros(()) if not spec.HasField("min") else tensor_spec_utils.bounds(spec).min
    return tensor_utils.pack_tensor(np.full(shape, low), dtype=spec.dtype)


def run_reset(method, client, world, **settings):
    class Reset(compliance.Reset):
        connection = property(lambda self: client)

        def join_world(self):
            return client.join(world, **settings).specs

    result = Reset(method).run()
    assert result.wasSuccessful(), str(result.failures + result.errors)
