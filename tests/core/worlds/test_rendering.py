"""A served environment draws what it draws locally, whichever of its calls are slow.

OpenGL contexts belong to one thread. The local environment draws in a process that does nothing else. Drawing without
a screen needs EGL with Mesa's software renderer; on Debian: libegl1 libopengl0 libgl1 libglu1-mesa libgl1-mesa-dri.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from typing import Any

import gymnasium
import numpy as np
import pytest

from bridge import make_remote
from tests.support import sampled, server_process
from tests.thread_envs import frames, views

SERVE = """
import json, sys
import bridge
from tests import thread_envs
env = getattr(thread_envs, sys.argv[1], sys.argv[1])
server = bridge.serve_gym(env, **json.loads(sys.argv[2]))
print(server.url, flush=True)
server.wait(grace=0.0)
"""
SERVE_IN_MAIN_THREAD = """
import sys
import bridge
from tests import thread_envs
server = bridge.serve_gym(getattr(thread_envs, sys.argv[1], sys.argv[1]), start=False)
print(server.url, flush=True)
server.run(grace=0.0)
"""
WRITE = "import sys; from tests.thread_envs import write_frames; write_frames(*sys.argv[1:])"
DEADLINE = 120.0

places = pytest.mark.parametrize(
    "keywords",
    sampled([{}, None, {"thread_safe": True}, {"isolation": "process"}], 2),
    ids=["serving", "run", "world", "isolated"],
)


@cache
def trouble_with_drawing(name: str) -> str:
    """Why an environment cannot draw here; empty: it can."""
    code = f"from tests import thread_envs as t; t.can_draw({name!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE)
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it crashed"])[-1]


@cache
def local(name: str) -> Any:
    """The local environment's frames, one array for all."""
    if trouble := trouble_with_drawing(name):
        pytest.skip(f"{name} cannot draw on this machine: {trouble}")
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/local.npy"
        subprocess.run([sys.executable, "-c", WRITE, name, path], check=True, timeout=DEADLINE, capture_output=True)
        return np.load(path)


@contextlib.contextmanager
def remote(name: str, keywords: dict[str, Any] | None, **more: Any) -> Iterator[gymnasium.Env[Any, Any]]:
    """A remote environment of a server in a process of its own; keywords None: which serves in its main thread."""
    arguments = [SERVE_IN_MAIN_THREAD, name] if keywords is None else [SERVE, name, json.dumps(keywords)]
    with server_process(*arguments, fresh=True) as (_, url):
        env = make_remote(url, timeout=DEADLINE, **more)
        try:
            yield env
        finally:
            env.close()


def assert_equal(shown: list[Any], expected: Any) -> None:
    assert expected.max() > 0, "the local environment drew nothing but black"
    assert len(shown) == len(expected)
    wrong = [index for index, frame in enumerate(shown) if frame.tobytes() != expected[index].tobytes()]
    means = ", ".join(f"{index}: {shown[index].mean():.1f} not {expected[index].mean():.1f}" for index in wrong[:5])
    assert not wrong, f"{len(wrong)} of {len(shown)} frames differ; their means: {means}"


@places
@pytest.mark.parametrize("name", ["HalfCheetah-v5", pytest.param("Hopper-v5", marks=pytest.mark.repeat)])
@pytest.mark.slow
def test_frames_of_mujoco_equal_the_local_ones(name: str, keywords: dict[str, Any] | None) -> None:
    expected = local(name)
    with remote(name, keywords, render_mode="rgb_array") as env:
        assert_equal(list(frames(env)), expected)


@places
@pytest.mark.slow
def test_observations_of_miniworld_equal_the_local_ones(keywords: dict[str, Any] | None) -> None:
    if importlib.util.find_spec("miniworld") is None:
        pytest.skip("miniworld is not installed; the extra `test` has it")
    expected = local("hallway")
    with remote("hallway", keywords) as env:
        assert_equal(list(views(env)), expected)
