"""OpenEnv's own client, server and validator, which run in an environment of their own: `make test-openenv`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import gymnasium
import minigrid  # noqa: F401 - registers its environments
import numpy as np
import pytest
from gymnasium import spaces

from bridge import make_remote, make_vec_remote, serve_gym
from tests.places import ROOT
from tests.support import sampled

PYTHON = ROOT / ".venv-openenv" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="OpenEnv is not installed: make test-openenv"),
]

PLAY = """
import json, sys
from openenv.core.generic_client import GenericEnvClient
url, actions = sys.argv[1], json.loads(sys.argv[2])
told = []
with GenericEnvClient(base_url=url).sync() as env:
    for episode in range(2):
        result = env.reset(seed=episode)
        told.append([result.observation, result.reward, result.done])
        for action in actions:
            if result.done:
                break
            result = env.step({"action": action})
            told.append([result.observation, result.reward, result.done])
    told.append(env.state())
print(json.dumps(told))
"""
VALIDATE = """
import json, sys
from openenv.cli._validation import validate_running_environment
print(json.dumps(validate_running_environment(sys.argv[1], timeout_s=20.0)))
"""
SERVE = """
import sys, threading, uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Say(Action):
    message: str
    loud: bool = False

class Heard(Observation):
    text: str = ""
    length: int = 0
    tags: dict = {}

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    said = 0
    def reset(self, seed=None, episode_id=None, **options):
        self.said = 0
        return Heard(text=f"hello {seed}", tags={"seed": seed})
    def step(self, action, **options):
        self.said += 1
        text = action.message.upper() if action.loud else action.message
        return Heard(text=text, length=len(text), tags={"said": self.said}, reward=len(text) / 2, done=self.said >= 3)
    @property
    def state(self):
        return State(step_count=self.said)

class Server(uvicorn.Server):
    async def startup(self, sockets=None):
        await super().startup(sockets=sockets)
        print(self.servers[0].sockets[0].getsockname()[1], flush=True)

app = create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=8)
server = Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
thread = threading.Thread(target=server.run)
thread.start()
sys.stdin.read()
server.should_exit = True
thread.join()
"""


class Riddle(gymnasium.Env[str, str]):
    """Asks for a word in texts, as environments of language models do."""

    observation_space = spaces.Text(80, charset="".join(map(chr, range(32, 127))))
    action_space = spaces.Text(20)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._word = "".join("abc"[letter] for letter in self.np_random.integers(3, size=4))
        return f"Say {self._word} backwards!", {"tries": 0}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right = action == self._word[::-1]
        return "Right." if right else "No; try again.", float(right), right, False, {"tries": 1}


def openenv(*arguments: str) -> Any:
    """The output of a script that runs with OpenEnv."""
    done = subprocess.run([str(PYTHON), "-c", *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def expected(env: gymnasium.Env[Any, Any], actions: list[Any]) -> list[Any]:
    """The output of `PLAY` for the local environment."""
    told: list[Any] = []
    steps = 0
    for episode in range(2):
        observation, info = env.reset(seed=episode)
        told.append([plain(observation, False, False, info), None, False])
        steps = 0
        for action in actions:
            observation, reward, terminated, truncated, info = env.step(action)
            steps += 1
            told.append([plain(observation, terminated, truncated, info), float(reward), terminated or truncated])
            if terminated or truncated:
                break
    return [*told, {"episode_id": None, "step_count": steps}]


def plain(observation: Any, terminated: bool, truncated: bool, info: Any) -> Any:
    return {
        "observation": json.loads(json.dumps(observation, default=lambda value: value.tolist())),
        "terminated": terminated,
        "truncated": truncated,
        "info": info,
    }


@pytest.mark.parametrize(
    ("name", "actions"),
    sampled([("CartPole-v1", [1, 0] * 6), ("MiniGrid-Empty-5x5-v0", [2, 2, 1, 2, 2]), ("riddle", ["cab"] * 4)], 3, 1),
)
def test_the_client_of_openenv_plays_what_is_here_step_for_step(name: str, actions: list[Any]) -> None:
    local = Riddle() if name == "riddle" else gymnasium.make(name)
    with serve_gym(Riddle if name == "riddle" else name, web=True, openenv=True) as server:
        assert openenv(PLAY, str(server.web_url).rstrip("/"), json.dumps(actions)) == expected(local, actions)


def test_the_client_of_openenv_shows_a_token_in_its_url() -> None:
    with serve_gym("CartPole-v1", web=True, openenv=True, token="secret") as server:
        url = str(server.web_url).rstrip("/").replace("http://", "http://me:secret@")
        assert len(openenv(PLAY, url, "[1]")) == 5


def test_the_validator_of_openenv_passes() -> None:
    with serve_gym("CartPole-v1", web=True, openenv=True) as server:
        report = openenv(VALIDATE, str(server.web_url).rstrip("/"))
    assert report["passed"], report["criteria"]
    assert report["mode"] == "simulation"


@pytest.fixture
def echo() -> Iterator[str]:
    """The URL of a server of OpenEnv."""
    pipe = subprocess.PIPE
    with subprocess.Popen([str(PYTHON), "-c", SERVE], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        yield f"openenv://127.0.0.1:{int(process.stdout.readline())}"
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise


def test_a_server_of_openenv_is_played_on_as_one_environment(echo: str) -> None:
    env = make_remote(echo)
    assert env.reset(seed=5) == ({"length": 0, "text": "hello 5"}, {"tags": {"seed": 5}, "metadata": {}})
    observation, reward, terminated, truncated, info = env.step({"message": "grüß – dich", "loud": 0})
    assert observation == {"length": 11, "text": "grüß – dich"}
    assert (reward, terminated, truncated, info["tags"]) == (5.5, False, False, {"said": 1})
    env.step({"message": "a", "loud": 1})
    assert env.step({"message": "b", "loud": 1})[2:4] == (True, False)
    env.close()


def test_a_server_of_openenv_fills_slots(echo: str) -> None:
    envs = make_vec_remote(echo, num_envs=3, blocking=True)
    observations, _ = envs.reset(seed=1)
    assert observations["text"] == ("hello 1", "hello 2", "hello 3")
    actions = {"message": ("a", "bc", "def"), "loud": np.array([0, 1, 1])}
    for step in range(3):
        observations, rewards, terminations, _, _ = envs.step(actions)
        assert observations["text"] == ("a", "BC", "DEF")
        assert rewards.tolist() == [0.5, 1.0, 1.5]
        assert terminations.tolist() == [step == 2] * 3
    assert envs.step(actions)[0]["text"] == ("hello None",) * 3
    envs.close()
