"""`array=` and `device=`: environments with arrays of another library, of which a double stands for JAX here.

`tests/trainers/test_simulator_arrays.py` has the same with PyTorch and JAX themselves.
"""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from bridge import make_remote, serve_gym
from bridge.errors import SettingError
from tests.core.worlds.simulators_beside import play_beside
from tests.simulators import IsaacDouble, ManiSkillDouble
from tests.support import assert_identical


class OnDevice(np.ndarray[Any, Any]):
    """An array of the double."""


def on_device(array: Any) -> Any:
    return np.asarray(array).view(OnDevice)


class Double(ModuleType):
    """As much of JAX as environments are served with; it has two devices, and DLPack without int64, as JAX has."""

    Array = OnDevice

    def __init__(self) -> None:
        super().__init__("jax")
        self.fetched: list[int] = []
        """How many arrays came to the host, each time that some did."""
        self.put: set[str] = set()
        """The devices on which arrays were put."""
        self.numpy = SimpleNamespace(from_dlpack=self._from_dlpack, asarray=on_device)

    @staticmethod
    def _from_dlpack(array: Any) -> Any:
        assert array.flags.writeable, "DLPack takes what is writable alone"
        if array.dtype == np.int64:
            raise BufferError("no such dtype")
        return on_device(array)

    def devices(self, platform: str | None = None) -> list[str]:
        if platform not in (None, "cpu"):
            raise RuntimeError(f"Unknown backend {platform}")
        return ["cpu:0", "cpu:1"]

    def device_put(self, array: Any, device: str) -> Any:
        self.put.add(device)
        return array

    def device_get(self, arrays: Any) -> list[Any]:
        self.fetched.append(len(arrays))
        return [np.array(array) for array in arrays]


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Double:
    made = Double()
    monkeypatch.setitem(sys.modules, "jax", made)
    return made


@pytest.mark.filterwarnings("ignore:.*gives no final observation:RuntimeWarning")
@pytest.mark.parametrize("simulator", [IsaacDouble, ManiSkillDouble])
def test_a_simulator_gets_and_gives_arrays_of_its_library(double: Double, simulator: Any) -> None:
    make = partial(simulator, 4, on_device)  # refuses actions that are arrays of anything else
    with serve_gym(make, array="jax", device="cpu:1") as server:
        assert play_beside(server, make(), on_device) > 20
    assert double.put == {"cpu:1"}


class Moved(gymnasium.Env[Any, Any]):
    """Gives arrays of the double in a tuple, a dict, a list and an array of objects."""

    observation_space = spaces.Tuple((spaces.Box(-9, 9, (2,), np.float32), spaces.Discrete(9)))
    action_space = spaces.Dict(force=spaces.Box(-1, 1, (2,), np.float32), mode=spaces.Discrete(3))
    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    render_mode = "rgb_array"

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        lanes = np.full(2, None)
        lanes[0] = on_device([1.0, 2.0])
        return (on_device(np.zeros(2, np.float32)), 3), {"lanes": lanes, "list": [on_device([5]), "text"]}

    def step(self, action: Any) -> Any:
        assert type(action["force"]) is type(action["mode"]) is OnDevice
        place = action["force"] * action["mode"]
        return (place.astype(np.float32), 4), place.sum().view(OnDevice), False, False, {"place": place}

    def render(self) -> Any:
        return on_device(np.full((2, 2, 3), 7, np.uint8))


def test_one_environment_gives_its_arrays_in_all_containers_and_they_come_to_the_host_together(double: Double) -> None:
    with serve_gym(Moved, array="jax") as server, make_remote(server.url, render_mode=None) as env:
        observation, info = env.reset(seed=0)
        assert_identical(observation, (np.zeros(2, np.float32), 3))
        assert_identical(info["lanes"][0], np.array([1.0, 2.0]))
        assert info["lanes"][1] is None
        assert_identical(info["list"], [np.array([5]), "text"])
        double.fetched.clear()
        observation, *_, info = env.step({"force": np.array([0.5, -1.0], np.float32), "mode": np.int64(2)})
        assert_identical(observation, (np.array([1.0, -2.0], np.float32), 4))
        assert double.fetched == [3], "the observation's, the reward and the info's at once"
        assert_identical(env.render(), np.full((2, 2, 3), 7, np.uint8))
    assert double.put == {"cpu:0"}


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"array": "cupy"}, "expected array to be one of 'numpy', 'torch', 'jax', got 'cupy'"),
        ({"device": "cpu"}, "device='cpu' is for array='torch' or 'jax'"),
        ({"array": "numpy", "device": "cuda:0"}, "device='cuda:0' is for array='torch' or 'jax'"),
        ({"array": "jax", "device": "tpu"}, "expected a device of jax, got 'tpu': Unknown backend tpu"),
        ({"array": "jax", "device": "cpu:one"}, "expected a device of jax, got 'cpu:one'"),
        (
            {"array": "jax", "device": "cpu:2"},
            "expected a device of jax, got 'cpu:2': there are 2, with numbers from 0",
        ),
        ({"array": "jax", "device": "cpu:-1"}, "expected a device of jax, got 'cpu:-1': there are 2"),
    ],
)
def test_a_library_or_a_device_that_is_not_there_is_refused_at_the_start(
    double: Double, keywords: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingError, match=said):
        serve_gym(Moved, **keywords)


def test_a_library_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SettingError, match="array='torch' needs the package torch, which is not here"):
        serve_gym(Moved, array="torch")
