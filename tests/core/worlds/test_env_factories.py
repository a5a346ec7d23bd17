"""Environments whose code comes from the client: only where the server said so, and in processes of their own."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from bridge import TLS, errors, make_remote, make_vec_remote, serve_gym
from bridge.testing import make_certificates
from bridge.wrappers import BlockingReset


def factory(scale: float = 1.0) -> gymnasium.Env[Any, Any]:
    """Refers to its own module, as a user's script does."""
    from gymnasium.wrappers import TransformReward

    class Home(gymnasium.Wrapper[Any, Any, Any, Any]):
        def pid(self) -> int:
            return os.getpid()

    return Home(TransformReward(gymnasium.make("CartPole-v1"), lambda reward: scale * float(reward)))


@pytest.mark.slow
def test_a_clients_factory_makes_its_worlds_in_processes_of_their_own() -> None:
    weight = 3.0
    with serve_gym("Acrobot-v1", allow_env_factories=True) as server:
        remotes = make_vec_remote(server.url, num_envs=2, env=lambda: factory(weight))
        envs = BlockingReset(remotes)
        assert envs.single_observation_space.shape == (4,)
        envs.reset(seed=0)
        assert envs.step(np.array([0, 1]))[1].tolist() == [3.0, 3.0]
        assert len({*remotes.call("pid"), os.getpid()}) == 3
        envs.close()
        env = make_remote(server.url, env=factory, env_kwargs={"scale": 0.5})
        env.reset(seed=0)
        assert env.step(0)[1] == 0.5
        env.close()
        plain = make_remote(server.url)
        assert plain.observation_space.shape == (6,)
        plain.close()


def test_lanes_are_made_of_a_factory_too() -> None:
    with serve_gym("Acrobot-v1", allow_env_factories=True) as server:
        envs = make_vec_remote(f"{server.url}?num_envs=3", env=factory)
        assert envs.num_envs == 3
        assert envs.single_observation_space.shape == (4,)
        envs.close()


class Trap:
    """Leaves a mark where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)

    def __call__(self) -> None:
        return


def test_a_server_that_did_not_say_so_refuses_and_unpickles_nothing(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with serve_gym("CartPole-v1") as server:
        with pytest.raises(errors.RefusedError, match="allow_env_factories=True") as caught:
            make_remote(server.url, env=Trap(str(mark)))
        assert caught.value.code == errors.Code.PERMISSION_DENIED
        assert server.worlds == []
    assert not mark.exists()
    pickle.loads(pickle.dumps(Trap(str(mark))))
    assert mark.exists()  # the trap works


def test_the_server_itself_never_unpickles_a_factory(tmp_path: Path) -> None:
    mark = tmp_path / "mark"

    def tell() -> Any:
        raise RuntimeError(f"in process {os.getpid()}")

    with serve_gym("CartPole-v1", allow_env_factories=True) as server:
        with pytest.raises(errors.EnvironmentFailedError, match="in process") as caught:
            make_remote(server.url, env=tell)
        assert f"in process {os.getpid()}\n" not in str(caught.value)
        with pytest.raises(errors.RefusedError, match="not callable"):
            make_remote(server.url, env=Trap(str(mark)))
        assert mark.exists()
        assert server.worlds == []


def test_beyond_loopback_it_needs_token_and_tls(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    files = make_certificates(tmp_path)
    tls: Any = {"tls": TLS(files["server.pem"], files["server.key"])}
    for given, lacks in (
        ({}, "TLS and token"),
        ({"token": "x" * 20}, "TLS"),
        (tls, "token"),
    ):
        with pytest.raises(errors.SettingError, match=f"execute code on this machine.*it needs {lacks};"):
            serve_gym("CartPole-v1", host="0.0.0.0", allow_env_factories=True, **given)  # type: ignore[arg-type]
    assert not recwarn.list


def test_what_is_no_factory_is_refused_before_anything_is_sent() -> None:
    import threading

    lock = threading.Lock()
    url = "grpc://127.0.0.1:1"
    with pytest.raises(errors.SettingError, match="cannot be pickled"):
        make_remote(url, env=lambda: lock)
    with pytest.raises(errors.SettingError, match="expected env to be a function"):
        make_vec_remote(url, env=5)
    for other in (f"{url}/CartPole-v1", f"{url}?world=mine"):
        with pytest.raises(errors.SettingError, match="got two of them"):
            make_vec_remote(other, env=factory)
