"""Our own server is held to what we hold others to: every conformance check, strictly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import pytest

from bridge import serve_gym
from bridge.testing import EVERY_SPACE, SpaceEnv, check_server
from tests.support import minigrid, sampled

SERVED: dict[str, Any] = {
    "CartPole": "CartPole-v1",
    "Pendulum": "Pendulum-v1",
    "Taxi": "Taxi-v4",
    "Blackjack": "Blackjack-v1",
    "a zoo of one": ["MountainCar-v0"],
    "MiniGrid": minigrid,
}
# Actions as the checks can make them of the specs alone; what travels encoded they skip.
SPACES = [
    "box_per_element",
    "box_half_bounded",
    "discrete_start",
    "multi_discrete_2d",
    "multi_binary",
    "text",
    "dict",
    "tuple_nested",
]


@pytest.mark.parametrize("name", sampled(SERVED, 3))
def test_our_server_passes_every_check_strictly(name: str) -> None:
    """D-1 to D-22 and D-25, as far as each can be seen from outside."""
    served = SERVED[name]
    with serve_gym(served) as server:
        report = check_server(server.url, strict=True, required_actions=[] if name == "MiniGrid" else ["action"])
        assert report.ok, str(report)
        assert server.worlds in ([], [""])


@pytest.mark.parametrize("name", sampled(SPACES, 4))
def test_our_server_passes_every_check_over_spaces(name: str) -> None:
    """D-7, D-11, D-19, D-20."""
    factory: Callable[[], gymnasium.Env[Any, Any]] = lambda: SpaceEnv(EVERY_SPACE[name](), EVERY_SPACE[name]())  # noqa: E731
    with serve_gym(factory) as server:
        report = check_server(server.url, strict=True)
        assert report.ok, str(report)
