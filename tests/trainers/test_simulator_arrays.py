"""Simulators that take and give arrays of PyTorch and JAX, and EnvPool itself, beside the same without a server."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from bridge import make_remote, make_vec_remote, serve_gym
from bridge.wrappers import BlockingReset, SB3VecEnv
from tests.core.worlds.simulators_beside import play_beside
from tests.simulators import IsaacDouble, ManiSkillDouble
from tests.support import assert_identical

pytestmark = pytest.mark.filterwarnings("ignore:.*gives no final observation:RuntimeWarning")


def arrays(library: str) -> Any:
    """The function that makes an array of a library from one of NumPy's."""
    if library == "torch":
        torch = pytest.importorskip("torch")
        return lambda value: torch.from_numpy(np.array(value))
    return pytest.importorskip("jax").numpy.asarray


def as_torch(cls: Any) -> Any:
    return cls(4, arrays("torch"))


def as_jax(cls: Any) -> Any:
    return cls(4, arrays("jax"))


LIBRARIES = [("torch", as_torch), ("jax", as_jax)]


@pytest.mark.parametrize("isolation", [None, "process"])
@pytest.mark.parametrize("double", [IsaacDouble, ManiSkillDouble])
@pytest.mark.parametrize(("library", "make"), LIBRARIES)
def test_a_simulator_gets_and_gives_arrays_of_its_library(
    library: Any, make: Any, double: Any, isolation: str | None
) -> None:
    asarray = arrays(library)
    # The doubles refuse actions that are arrays of anything else.
    with serve_gym(partial(make, double), array=library, device="cpu", isolation=isolation) as server:
        assert play_beside(server, make(double), asarray) > 20


class OneTorch(gymnasium.Env[Any, Any]):
    """One environment of PyTorch, whose action is a number or a dict."""

    observation_space = spaces.Box(-10, 10, (2,), np.float32)
    action_space = spaces.Dict(force=spaces.Box(-1, 1, (2,), np.float32), mode=spaces.Discrete(3))

    def __init__(self) -> None:
        self.torch: Any = pytest.importorskip("torch")
        self.place = self.torch.zeros(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.place = self.torch.zeros(2)
        return self.place, {}

    def step(self, action: Any) -> Any:
        assert isinstance(action["force"], self.torch.Tensor)
        assert isinstance(action["mode"], self.torch.Tensor)
        self.place = self.place + action["force"] * action["mode"]
        return self.place, self.place.sum(), self.torch.tensor(False), self.torch.tensor(False), {"place": self.place}


def test_one_environment_gets_and_gives_arrays_too() -> None:
    torch = pytest.importorskip("torch")
    local = OneTorch()
    with serve_gym(OneTorch, array="torch") as server, make_remote(server.url) as env:
        assert_identical(env.reset(seed=0)[0], local.reset()[0].numpy())
        for _ in range(20):
            action = env.action_space.sample()
            observation, reward, _, _, info = env.step(action)
            expected = local.step({key: torch.as_tensor(value) for key, value in action.items()})
            assert_identical(observation, expected[0].numpy())
            assert reward == float(expected[1])
            assert_identical(info["place"], expected[0].numpy())


class Containers(gymnasium.Env[Any, Any]):
    """One environment that has arrays of a library in all kinds of containers, also of a dtype that NumPy lacks."""

    observation_space = action_space = spaces.Graph(spaces.Box(-9, 9, (2,), np.float32), None)
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"

    def __init__(self, library: str) -> None:
        self.asarray = arrays(library)
        self.nodes = self.asarray(np.float32([[1, 2], [3, 4]]))
        if library == "torch":
            self.nodes.requires_grad_()
        self.half = self.nodes.bfloat16() if library == "torch" else self.nodes.astype("bfloat16")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        lanes = np.full(2, None)
        lanes[0] = self.nodes
        return spaces.GraphInstance(self.nodes, None, None), {"lanes": lanes, "half": self.half}

    def step(self, action: Any) -> Any:
        assert isinstance(action.nodes, type(self.nodes))
        return spaces.GraphInstance(self.nodes, None, None), self.half[0, 1], False, False, {}

    def render(self) -> Any:
        return self.asarray(np.arange(12, dtype=np.uint8).reshape(2, 2, 3))


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_arrays_come_out_of_all_containers_and_as_float32_where_numpy_lacks_their_dtype(library: str) -> None:
    nodes, lanes = np.float32([[1, 2], [3, 4]]), np.full(2, None)
    lanes[0] = nodes
    with serve_gym(partial(Containers, library), array=library) as server, make_remote(server.url) as env:
        observation, info = env.reset(seed=0)
        assert_identical(observation.nodes, nodes)
        assert_identical(info, {"lanes": lanes, "half": nodes})
        observation, reward, *_ = env.step(env.action_space.sample())
        assert_identical(observation.nodes, nodes)
        assert reward == 2
        assert_identical(env.render(), np.arange(12, dtype=np.uint8).reshape(2, 2, 3))


@pytest.mark.filterwarnings("ignore:.*precision lowered:UserWarning")  # EnvPool's own spaces
def test_envpool_plays_as_it_does_without_a_server() -> None:
    envpool = pytest.importorskip("envpool")
    make = partial(envpool.make, "CartPole-v1", env_type="gymnasium", num_envs=8, seed=3)
    local, ends = make(), 0
    with serve_gym(make) as server:
        envs = BlockingReset(make_vec_remote(server.url))
        assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        assert_identical(envs.reset(), local.reset())
        envs.action_space.seed(1)
        for _ in range(200):
            actions = envs.action_space.sample()
            observation, reward, terminated, truncated, infos = envs.step(actions)
            expected = local.step(actions)
            assert_identical(observation, expected[0])
            assert_identical(reward, expected[1].astype(np.float64))
            assert_identical([terminated, truncated, infos], list(expected[2:]))
            ends += int((terminated | truncated).sum())
        envs.close()
    local.close()
    assert ends > 20


def test_stable_baselines3_gets_the_final_observation_of_a_simulator() -> None:
    pytest.importorskip("stable_baselines3")
    local = ManiSkillDouble()
    with serve_gym(ManiSkillDouble) as server:
        envs = SB3VecEnv(make_vec_remote(server.url))
        envs.seed(5)
        assert_identical(envs.reset(), local.reset(seed=5)[0])
        ends = 0
        for _ in range(20):
            actions = np.full((4, 3), 0.1, np.float32)
            observations, _, dones, infos = envs.step(actions)
            expected = local.step(actions)
            assert_identical(observations, expected[0])
            for lane in np.flatnonzero(dones).tolist():
                assert_identical(infos[lane]["terminal_observation"], expected[4]["final_observation"][lane])
                ends += 1
        envs.close()
    assert ends > 4
