"""`gymnasium.make` and `gymnasium.make_vec` find remote environments, and specs make second ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import bridge
from bridge import RemoteEnv, Server, make_remote, make_vec_remote, serve_gym
from bridge.errors import RefusedError, SettingError
from bridge.registration import REMOTE_ID, register_remote
from bridge.testing import CountingEnv
from bridge.wrappers import BlockingReset
from tests.support import assert_identical

ID = f"bridge:{REMOTE_ID}"


@pytest.fixture
def server() -> Iterator[Server]:
    with serve_gym("CartPole-v1") as made:
        yield made


def test_registering_twice_changes_nothing() -> None:
    before = gymnasium.registry[REMOTE_ID]
    register_remote()
    assert gymnasium.registry[REMOTE_ID] is before
    assert "register_remote" not in bridge.__all__


LOOKED_FOR_FIRST = f"""
import importlib.util, sys, bridge
assert "gymnasium" not in sys.modules
assert importlib.util.find_spec("gymnasium") is not None
import gymnasium
assert {REMOTE_ID!r} in gymnasium.registry
"""


def test_the_id_is_registered_also_where_somebody_only_looks_for_gymnasium_before() -> None:
    subprocess.run([sys.executable, "-c", LOOKED_FOR_FIRST], timeout=120, check=True)


PLUGIN = {
    "plugin-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: plugin\nVersion: 1\n",
    "plugin-1.dist-info/entry_points.txt": "[gymnasium.envs]\nplugin = plugin:register\n",
    "plugin.py": "def register():\n    print('registered')\n",
}
MAKE_OF_A_PLUGIN = """
import importlib.metadata, gymnasium
assert [found.name for found in importlib.metadata.entry_points(group="gymnasium.envs")] == ["plugin"]
try:
    gymnasium.make("plugin/Env-v0")
except gymnasium.error.NamespaceNotFound:
    print("not found")
"""


def test_gymnasium_loads_no_entry_points_so_the_id_names_the_module(tmp_path: Path) -> None:
    """Gymnasium 1.0 has removed the entry point `gymnasium.envs`. Where this fails, this package can use it again."""
    for name, text in PLUGIN.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MAKE_OF_A_PLUGIN],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split("\n") == ["not found", ""]


def test_make_gives_a_remote_environment(server: Server) -> None:
    env = gymnasium.make(ID, url=server.url, render_mode="rgb_array")
    assert isinstance(env.unwrapped, RemoteEnv)
    local = gymnasium.make("CartPole-v1", render_mode="rgb_array")
    assert_identical(env.reset(seed=3), local.reset(seed=3))
    assert_identical(env.step(1), local.step(1))
    assert_identical(env.render(), local.render())
    assert env.spec is not None
    again = gymnasium.make(env.spec)
    assert_identical(again.reset(seed=5), local.reset(seed=5))
    for each in (env, again, local):
        each.close()


def test_spares_given_as_one_url_are_one_url_in_the_spec(server: Server) -> None:
    envs = make_vec_remote(server.url, spares=server.url)
    assert envs.spec is not None
    assert envs.spec.kwargs["spares"] == [server.url]
    again = gymnasium.make_vec(envs.spec)
    assert [report.url for report in again.unwrapped.remotes()] == [server.url] * 2  # type: ignore[attr-defined]
    again.close()
    envs.close()


def test_make_vec_gives_the_batched_contract(server: Server) -> None:
    envs = gymnasium.make_vec(ID, num_envs=3, urls=server.url, autoreset_mode="SameStep")
    assert isinstance(envs, BlockingReset)
    assert envs.num_envs == 3
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert envs.reset(seed=1)[0].shape == (3, 4)
    envs.close()
    with serve_gym("CartPole-v1", num_envs=4) as lanes:
        envs = gymnasium.make_vec(ID, urls=[lanes.url, server.url])
        assert envs.num_envs == 5
        envs.close()


def test_a_spec_makes_a_second_one(server: Server) -> None:
    made = gymnasium.make_vec(ID, num_envs=2, urls=server.url, autoreset_mode="Disabled")
    direct = BlockingReset(make_vec_remote(server.url, num_envs=2), timeout=7.0, autoreset_mode="Disabled")
    for envs in (made, direct):
        assert envs.spec is not None
        again = gymnasium.make_vec(envs.spec)
        assert isinstance(again, BlockingReset)
        assert again.spec == envs.spec
        assert again.timeout == envs.timeout  # type: ignore[attr-defined]
        assert again.autoreset_mode is AutoresetMode.DISABLED
        assert_identical(again.reset(seed=4), envs.reset(seed=4))
        third = gymnasium.make_vec(EnvSpec.from_json(envs.spec.to_json()))
        assert_identical(third.reset(seed=4), envs.reset(seed=4))
        for each in (again, third, envs):
            each.close()


def test_a_spec_can_be_set(server: Server) -> None:
    envs = BlockingReset(make_vec_remote(server.url))
    envs.spec = EnvSpec("Mine-v0", entry_point="somewhere:Mine")
    assert envs.spec is not None
    assert envs.spec.id == "Mine-v0"
    envs.spec = None
    assert envs.spec is None
    envs.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_make_vec_puts_remote_environments_into_gymnasiums_own_vectors(server: Server, mode: str) -> None:
    kwargs = {"vector_kwargs": {"context": "forkserver"}} if mode == "async" else {}
    envs = gymnasium.make_vec(ID, num_envs=2, vectorization_mode=mode, url=server.url, **kwargs)
    assert isinstance(envs, AsyncVectorEnv if mode == "async" else SyncVectorEnv)
    local = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
    assert_identical(envs.reset(seed=1), local.reset(seed=1))
    actions = np.array([0, 1])
    for _ in range(30):
        assert_identical(envs.step(actions), local.step(actions))
    envs.close()
    local.close()


def test_no_pattern_lets_clients_have_a_server_connect_elsewhere() -> None:
    """`kwargs.url` of `bridge/Remote-v0` may be any place, to which the server would show its BRIDGE_TOKEN."""
    with serve_gym(["*"]) as zoo, pytest.raises(RefusedError, match="is not served here"):
        make_remote(zoo.url, env_id=REMOTE_ID)
    with pytest.raises(SettingError, match="no registered environment matches 'bridge/\\*'"):
        serve_gym(["bridge/*"])
    serve_gym([REMOTE_ID], start=False).stop()  # who names it means it


def test_a_spec_names_the_remotes_environment_and_makes_it_again() -> None:
    with serve_gym(["CartPole-v1", "FrozenLake-v1"]) as zoo:
        made: list[Any] = [
            make_remote(zoo.url, env_id="FrozenLake-v1", env_kwargs={"map_name": "8x8"}),
            BlockingReset(make_vec_remote(zoo.url, num_envs=2, env_id="FrozenLake-v1", env_kwargs={"map_name": "8x8"})),
        ]
        for env, make in zip(made, (gymnasium.make, gymnasium.make_vec), strict=True):
            assert env.spec.id == "FrozenLake-v1"
            assert (env.spec.namespace, env.spec.name, env.spec.version) == (None, "FrozenLake", 1)
            assert env.spec.kwargs["env_kwargs"] == {"map_name": "8x8"}
            assert env.spec.max_episode_steps in (100, None)  # of a vector, Gymnasium makes no time limit of it
            again = make(EnvSpec.from_json(env.spec.to_json()))
            assert again.spec.id == "FrozenLake-v1"
            assert again.observation_space == env.observation_space
            again.close()
            env.close()
    with serve_gym(lambda: gymnasium.make("CartPole-v1").unwrapped) as server:
        env = make_remote(server.url)
        assert env.spec is not None
        assert env.spec.id == "CartPole-v1"
        env.close()
    with serve_gym(CountingEnv) as server:
        env = make_remote(server.url)
        assert env.spec is not None
        assert env.spec.id == REMOTE_ID  # it has no id of its own
        env.close()


def test_the_json_of_a_spec_which_data_sets_hold_has_no_token_and_makes_another_where_one_is_given() -> None:
    with serve_gym("CartPole-v1", token="a-secret") as server:
        url = f"{server.url}?token=a-secret"
        for env in (
            make_remote(url),
            make_remote(server.url, token="a-secret"),
            make_vec_remote([url, url]),
            gymnasium.wrappers.RecordEpisodeStatistics(make_remote(url)),
        ):
            text = env.spec.to_json()
            assert "a-secret" not in text
            again = gymnasium.make_vec if hasattr(env, "num_envs") else gymnasium.make
            again(EnvSpec.from_json(text), token="a-secret").close()
            again(env.spec).close()
            env.close()


def test_the_spec_of_make_remote_makes_a_second_one(server: Server) -> None:
    env = make_remote(server.url)
    assert env.spec is not None
    again = gymnasium.make(env.spec)
    assert_identical(again.reset(seed=2), env.reset(seed=2))
    again.close()
    env.close()


def test_urls_and_url_together_are_refused(server: Server) -> None:
    with pytest.raises(ValueError, match="expected urls="):
        gymnasium.make_vec(ID, num_envs=1, urls=server.url, url=server.url)
    with pytest.raises(ValueError, match="expected urls="):
        gymnasium.make_vec(ID, num_envs=1)
