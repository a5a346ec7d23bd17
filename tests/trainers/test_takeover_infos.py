"""Stable-Baselines3 is told in each slot's info what the environment executed while somebody else acted."""

from __future__ import annotations

import numpy as np
import pytest

from bridge import make_vec_remote, serve_gym
from bridge.core.encoding.tensors import pack_tensor
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.testing import CountingEnv
from bridge.wrappers import SB3VecEnv
from tests.peers import Stream


@pytest.mark.parametrize("lanes", [1, 2])
def test_the_slot_s_own_info_has_the_executed_action_also_at_the_end_of_an_episode(lanes: int) -> None:
    with serve_gym(lambda: CountingEnv(2), num_envs=lanes) as server:
        urls = f"{server.url}?world=" if lanes > 1 else [f"{server.url}?world=", server.url]
        envs = SB3VecEnv(make_vec_remote(urls))
        envs.reset()
        program = Stream(server, own_connection=True)
        program.join(role="takeover", name="pilot")
        program.ask(step=pb.StepRequest())
        actions = np.array([envs.action_space.sample() for _ in range(2)])
        own, other = actions[0], 1 - actions[0]
        actions[:] = own
        dones = []
        for _ in range(2):
            program.ask(step=pb.StepRequest(actions={1: pack_tensor(np.int64(other))}))
            _, _, done, infos = envs.step(actions)
            assert (infos[0]["intervene_action"], infos[0]["intervened_by"]) == (other, "pilot")
            assert "intervene_action" not in infos[1]
            dones.append(bool(done[0]))
        assert dones == [False, True]
        program.die()
        program.channel.close()
        envs.close()
