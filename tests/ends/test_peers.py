"""Our ends against those of other packages, which run in an environment of their own: `make test-peers`.

They need other versions of Gymnasium and NumPy than this package does.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge import make_remote, make_vec_remote
from bridge.policies import serve_policy
from bridge.wrappers import BlockingReset
from tests.places import ROOT

PYTHON = ROOT / ".venv-peers" / "bin" / "python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="the other packages are not installed: make test-peers")

# What remote-gym's create_remote_environment_server does, at a port that the system chooses.
SERVE = """
import sys
from concurrent import futures
import grpc
from dm_env_rpc.v1 import dm_env_rpc_pb2_grpc
from remote_gym.remote_environment_management import RemoteEnvironmentServicer
server = grpc.server(futures.ThreadPoolExecutor())
servicer = RemoteEnvironmentServicer(default_args={"entrypoint": "entry.py"}, use_thread=True)
dm_env_rpc_pb2_grpc.add_EnvironmentServicer_to_server(servicer, server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
print(port, flush=True)
sys.stdin.read()
server.stop(None)
"""
ENTRY = """
import gymnasium
def create_environment(**kwargs):
    return gymnasium.make("CartPole-v1")
"""


@pytest.fixture
def remote_gym(tmp_path: Path) -> Iterator[str]:
    """The URL of a server of remote-gym, of CartPole."""
    (tmp_path / "entry.py").write_text(ENTRY)
    command = [str(PYTHON), "-c", SERVE]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        yield f"grpc://127.0.0.1:{int(process.stdout.readline())}"
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def test_remote_gym_serves_one_environment(remote_gym: str) -> None:
    env = make_remote(remote_gym)
    observation, _ = env.reset()
    assert observation.shape == (4,)
    assert env.step(1)[1] == 1.0
    env.close()


def test_remote_gym_serves_the_slots_of_a_vector(remote_gym: str) -> None:
    envs = BlockingReset(make_vec_remote(remote_gym, num_envs=3))
    observations, _ = envs.reset()
    assert observations.shape == (3, 4)
    ended = 0
    for _ in range(60):
        _, rewards, terminations, truncations, _ = envs.step(np.ones(3, np.int64))
        ended += int((terminations | truncations).sum())
        assert set(rewards.tolist()) <= {0.0, 1.0}
    assert ended >= 9  # pushed one way only, a pole falls within a dozen steps
    envs.close()


# What a robot's program does with openpi-client.
INFER = """
import sys
import numpy as np
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy
client = WebsocketClientPolicy("127.0.0.1", int(sys.argv[1]), api_key="secret-token")
assert client.get_server_metadata()["robot"] == "arm"
policy = ActionChunkBroker(client, action_horizon=2)
image = np.full((2, 2, 3), 7, np.uint8)
for step in range(4):
    answer = policy.infer({"state": np.array([step, 0.5], np.float32), "image": image, "prompt": "pick"})
    print(answer["actions"].tolist())
"""


def test_openpi_client_drives_a_served_policy() -> None:
    def plan(batch: dict[str, Any]) -> np.ndarray[Any, Any]:
        assert batch["prompt"] == ["pick"]
        assert batch["image"].dtype == np.uint8
        return np.stack([batch["state"], -batch["state"]], axis=1)

    with serve_policy(plan, chunked=True, token="secret-token", metadata={"robot": "arm"}) as server:
        command = [str(PYTHON), "-c", INFER, server.url.rpartition(":")[2]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["[0.0, 0.5]", "[-0.0, -0.5]", "[2.0, 0.5]", "[-2.0, -0.5]"]
