"""A pytest plugin: DummyVecEnv and SubprocVecEnv are `SB3VecEnv`, over servers of the environments they are given.

`tests/trainers/test_sb3_own_tests.py` runs Stable-Baselines3's own tests with it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

from stable_baselines3.common import env_util, vec_env

from bridge import make_vec_remote, serve_gym
from bridge.wrappers import SB3VecEnv

LAYOUT = "SB3_STAND_IN_LAYOUT"
"""The environment variable that says how the environments are served: `worlds`, `lanes` or `blocking`."""


class ServedVecEnv(SB3VecEnv):
    """What DummyVecEnv is given, served by this process, and reached over sockets.

    Args:
        env_fns: Make the environments.
    """

    def __init__(self, env_fns: list[Callable[[], Any]]) -> None:
        layout = os.environ[LAYOUT]
        self.servers: list[Any] = []
        if layout == "lanes":
            made = itertools.cycle(env_fns)
            self.servers.append(serve_gym(lambda: next(made)(), num_envs=len(env_fns)))
        else:
            self.servers += [serve_gym(each) for each in env_fns]
        try:
            urls = [server.url for server in self.servers]
            super().__init__(make_vec_remote(urls, blocking=layout == "blocking"))
        except BaseException:
            self._stop()
            raise

    def _stop(self) -> None:
        for server in self.servers:
            server.stop()

    def close(self) -> None:
        """Close the environments, and stop their servers."""
        super().close()
        self._stop()

    def __del__(self) -> None:
        self._stop()  # some of the tests close nothing


class ServedSubprocVecEnv(ServedVecEnv):
    """The same in the place of SubprocVecEnv, which the tests tell from DummyVecEnv.

    Args:
        env_fns: Make the environments.
        start_method: Of processes; there are none here.
    """

    def __init__(self, env_fns: list[Callable[[], Any]], start_method: str | None = None) -> None:
        super().__init__(env_fns)


def pytest_configure() -> None:
    """Put them in place, before the tests are imported."""
    for module in (vec_env, env_util):
        setattr(module, "DummyVecEnv", ServedVecEnv)  # noqa: B010 - the type of the class differs
        setattr(module, "SubprocVecEnv", ServedSubprocVecEnv)  # noqa: B010
