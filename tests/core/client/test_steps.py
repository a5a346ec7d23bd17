"""Steps are written, and their answers read: in the same way whether by protobuf or by the step codec."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from bridge import RemoteEnv, serve_gym
from bridge.core.client.world.steps import Batch
from bridge.pb import dm_env_rpc_pb2 as pb
from tests.inside import begin_step, finish_step, remote_of
from tests.support import assert_identical, layout_of

OBSERVATIONS = [
    spaces.Box(-1.0, 1.0, (3,), np.float32),
    spaces.Box(-1.0, 1.0, (), np.float64),
    spaces.Discrete(5, start=2),
    spaces.Dict({"image": spaces.Box(0, 255, (40, 30), np.uint8), "pair": spaces.Tuple([spaces.MultiBinary(3)] * 2)}),
]


class Sampler(gymnasium.Env[Any, Any]):
    """Observes samples of a space."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = space, spaces.Discrete(2)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        super().reset(**kwargs)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 0.5, False, True, {"action": int(action)}


@pytest.mark.parametrize("space", OBSERVATIONS, ids=str)
def test_both_ways_to_read_an_answer_give_the_same_in_memory_of_its_own(space: spaces.Space[Any]) -> None:
    with serve_gym(lambda: Sampler(space)) as server:
        env = RemoteEnv(server.url)
        env.reset(seed=0)
        begin_step(env, 1)
        answer = finish_step(env)
        assert not isinstance(answer, pb.EnvironmentResponse), "the codec matches it"
        reader = remote_of(env).world.reader
        read = reader.read(answer, 0.0)
        message = pb.EnvironmentResponse.FromString(bytes(answer.data))
        assert_identical(read, reader.read(message, 0.0))
        assert read[1:] == (0.5, False, True, {"action": 1})
        assert (type(read[1]), type(read[2]), type(read[3])) == (float, bool, bool)
        layout = layout_of(space)
        for each in (answer, message):
            batch = Batch.empty(layout, 2)
            info = reader.read_into(each, batch, 1, 0.0)
            row = layout.row(batch.columns, 1), batch.rewards[1], batch.terminations[1], batch.truncations[1], info
            assert_identical(row, read)
        for array in arrays(read[0]):
            assert array.flags.writeable
            assert not np.shares_memory(array, np.frombuffer(answer.data, np.uint8))
        env.close()


def arrays(observation: Any) -> list[Any]:
    if isinstance(observation, dict):
        return [array for part in observation.values() for array in arrays(part)]
    if isinstance(observation, tuple):
        return [array for part in observation for array in arrays(part)]
    return [observation] if isinstance(observation, np.ndarray) else []
