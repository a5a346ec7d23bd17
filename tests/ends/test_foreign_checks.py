"""The checks of Gymnasium and of PettingZoo, as they are, over remote environments."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.utils.env_match import check_environments_match
from pettingzoo.utils.conversions import parallel_to_aec

from bridge import make_parallel_remote, make_remote, serve_gym, serve_parallel
from tests.support import NO_BOX2D, TAXI, chosen, import_box2d, sampled

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PettingZoo's own tests import what it deprecates
    from pettingzoo import test as checks

BOX2D = ("LunarLander-v3", "LunarLanderContinuous-v3", "BipedalWalker-v3")
IDS = [
    "CartPole-v1", "Acrobot-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0",
    "Blackjack-v1", "FrozenLake-v1", "FrozenLake8x8-v1", "CliffWalking-v1", TAXI,
    *BOX2D,
    "Hopper-v5", "HalfCheetah-v5", "Ant-v5", "InvertedPendulum-v5", "Reacher-v5",
]  # fmt: skip
"""Their rewards are floats, ints, float64 and float32."""
TEAMS = {
    "simple_spread": "mpe2.simple_spread_v3",
    "simple_tag": "mpe2.simple_tag_v3",
    "simple_speaker_listener": "mpe2.simple_speaker_listener_v4",
    "pistonball": "pettingzoo.butterfly.pistonball_v6",
    "knights_archers_zombies": "pettingzoo.butterfly.knights_archers_zombies_v11",
    "cooperative_pong": "pettingzoo.butterfly.cooperative_pong_v6",
    "rps": "pettingzoo.classic.rps_v2",
}
SMALL_TEAMS = chosen(TEAMS, lambda name: name != "pistonball")
"""Without the one whose large pictures take a second for each check; it passes one of them in `make test`."""
Make = Callable[..., Any]

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # the remarks of both about their own environments
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def known(env_id: str) -> str:
    """Return an id, or skip where this Gymnasium has another version of it, or what it needs is not there."""
    if env_id in BOX2D and not import_box2d():
        pytest.skip(NO_BOX2D)
    if env_id not in gymnasium.registry:
        pytest.skip(f"this Gymnasium has no {env_id}")
    return env_id


@pytest.mark.parametrize("env_id", IDS)
def test_gymnasiums_check_finds_a_remote_environment_equal_to_the_local_one(env_id: str) -> None:
    with (
        serve_gym(known(env_id)) as server,
        gymnasium.make(env_id) as local,
        make_remote(server.url) as remote,
    ):
        check_environments_match(local, remote, num_steps=120)


@pytest.mark.parametrize("env_id", ["CartPole-v1", TAXI])
def test_gymnasiums_check_finds_the_same_frames(env_id: str) -> None:
    with (
        serve_gym(env_id) as server,
        gymnasium.make(env_id, render_mode="rgb_array") as local,
        make_remote(server.url, render_mode="rgb_array") as remote,
    ):
        check_environments_match(local, remote, num_steps=12)


@pytest.mark.parametrize("env_id", IDS)
def test_gymnasiums_own_checker_passes(env_id: str) -> None:
    with serve_gym(known(env_id)) as server, make_remote(server.url) as remote:
        check_env(remote, skip_render_check=True)  # it makes an environment for each mode that is drawn


@pytest.fixture
def teams() -> Iterator[Callable[[str], tuple[Make, Make]]]:
    """Serve an environment of several agents; return what makes remotes of it, as a ParallelEnv and as an AECEnv."""
    made: list[Any] = []

    def serve(name: str) -> tuple[Make, Make]:
        server = serve_parallel(importlib.import_module(TEAMS[name]).parallel_env)
        made.append(server.stop)

        def parallel(render_mode: str | None = None, **kwargs: Any) -> Any:
            env = make_parallel_remote(server.url, env_kwargs=kwargs, render_mode=render_mode, timeout=60)
            made.append(env.close)
            return env

        return parallel, lambda **kwargs: parallel_to_aec(parallel(**kwargs))

    yield serve
    for close in reversed(made):
        close()


@pytest.mark.parametrize("name", sampled(TEAMS, 3, slow=True))
def test_a_remote_of_several_agents_passes_parallel_api_test(name: str, teams: Any) -> None:
    parallel, _ = teams(name)
    checks.parallel_api_test(parallel(), num_cycles=50)


@pytest.mark.parametrize("name", SMALL_TEAMS)
def test_a_remote_of_several_agents_passes_parallel_seed_test(name: str, teams: Any) -> None:
    parallel, _ = teams(name)
    checks.parallel_seed_test(parallel, num_cycles=20)


@pytest.mark.parametrize("name", SMALL_TEAMS)
def test_a_remote_as_an_aec_environment_passes_api_test(name: str, teams: Any) -> None:
    _, aec = teams(name)
    checks.api_test(aec(), num_cycles=20)


@pytest.mark.parametrize("name", SMALL_TEAMS)
def test_a_remote_as_an_aec_environment_passes_seed_test(name: str, teams: Any) -> None:
    _, aec = teams(name)
    checks.seed_test(aec, num_cycles=20)


@pytest.mark.parametrize("name", SMALL_TEAMS)
def test_a_remote_of_several_agents_passes_max_cycles_test(name: str, teams: Any) -> None:
    parallel, aec = teams(name)
    checks.max_cycles_test(SimpleNamespace(parallel_env=parallel, env=aec))


@pytest.mark.parametrize("name", SMALL_TEAMS)
def test_a_remote_as_an_aec_environment_passes_render_test(name: str, teams: Any) -> None:
    """Over the modes that a remote has: `human` opens a window where the environment runs."""
    _, aec = teams(name)
    checks.render_test(aec)


@pytest.mark.parametrize("name", [name for name in SMALL_TEAMS if name != "rps"])
def test_a_remote_of_several_agents_passes_state_test(name: str, teams: Any) -> None:
    """Rock paper scissors has no `state_space` locally either."""
    parallel, aec = teams(name)
    checks.state_test(aec(), parallel(), num_cycles=5)


@pytest.mark.parametrize("name", TEAMS)
def test_a_remote_has_the_state_space_that_the_local_environment_has(name: str, teams: Any) -> None:
    parallel, _ = teams(name)
    local = importlib.import_module(TEAMS[name]).parallel_env()
    remote = parallel()
    assert hasattr(remote, "state_space") == hasattr(local, "state_space") == (name != "rps")
    if hasattr(local, "state_space"):
        assert remote.state_space == local.state_space
    local.close()
