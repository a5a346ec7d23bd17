"""Helpers of several test files: exact comparison, zoo environments, servers in processes of their own."""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import os
import random
import re
import selectors
import socket
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from bridge import Limits, RealTime, SessionMessage
from bridge.core.encoding.spaces import Layout
from bridge.core.encoding.tensors import unpack_tensor
from bridge.core.gymnasium_versions import dict_space, discrete_space
from bridge.core.server.registry import Registry
from bridge.core.server.session import Session
from bridge.core.worlds.base import Agent, World
from bridge.core.worlds.environment import CALL_TIMEOUT, Isolation
from bridge.core.worlds.multi_agent.joint_steps import MultiAgentOptions
from bridge.core.worlds.realtime_options import RealtimeOptions
from bridge.core.worlds.scheduling import PendingResult
from bridge.core.worlds.sources.parallel_source import ParallelSource
from bridge.core.worlds.sources.source import EnvSource
from bridge.testing import Inspector, LocalRuntime
from tests.inside import registry_of
from tests.places import ROOT
from tests.preloaded import AVAILABLE, Program

everywhere = pytest.mark.parametrize("isolation", [None, "process"], indirect=True, ids=["here", "isolated"])
"""Runs a test with environments in the server's process, and in processes of their own."""


TAXI = "Taxi-v4" if "Taxi-v4" in gymnasium.registry else "Taxi-v3"
"""The newest version of Taxi that this Gymnasium has."""


def assert_identical(mine: Any, theirs: Any, where: str = "value") -> None:
    """Hold two values against each other bit for bit: arrays with dtype and shape, containers with kind and order.

    Python's and NumPy's scalars count by their value, as Gymnasium's own spaces take either.
    """
    if isinstance(theirs, dict):
        assert isinstance(mine, dict), f"{where}: {type(mine)} beside a dict"
        assert mine.keys() == theirs.keys(), f"{where}: the keys {list(mine)} beside {list(theirs)}"
        for key in theirs:
            assert_identical(mine[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(theirs, (tuple, list)):
        assert isinstance(mine, type(theirs)) or (isinstance(mine, tuple) and isinstance(theirs, tuple)), where
        assert len(mine) == len(theirs), f"{where}: {len(mine)} items beside {len(theirs)}"
        for index, (left, right) in enumerate(zip(mine, theirs, strict=True)):
            assert_identical(left, right, f"{where}[{index}]")
    elif isinstance(theirs, np.ndarray) and theirs.dtype == object:
        assert isinstance(mine, np.ndarray), where
        assert mine.dtype == object, where
        assert_identical(mine.tolist(), theirs.tolist(), where)
    elif isinstance(theirs, np.ndarray):
        assert isinstance(mine, np.ndarray), f"{where}: {type(mine)} beside an array"
        assert mine.dtype == theirs.dtype, f"{where}: {mine.dtype} beside {theirs.dtype}"
        assert mine.shape == theirs.shape, f"{where}: {mine.shape} beside {theirs.shape}"
        assert mine.tobytes() == theirs.tobytes(), f"{where}: {mine} beside {theirs}"
    elif isinstance(theirs, (float, np.floating)) and np.isnan(theirs):
        assert np.isnan(mine), f"{where}: {mine} beside nan"
    else:
        assert mine == theirs, f"{where}: {mine!r} beside {theirs!r}"


def assert_same_space(mine: spaces.Space[Any], theirs: spaces.Space[Any]) -> None:
    """Hold two spaces against each other exactly; `Box.__eq__` only says that their bounds are close."""
    assert type(mine) is type(theirs)
    assert mine == theirs
    if isinstance(theirs, spaces.Box) and isinstance(mine, spaces.Box):
        for name in ("low", "high", "bounded_below", "bounded_above"):
            assert_identical(getattr(mine, name), getattr(theirs, name), name)
    elif isinstance(theirs, spaces.Dict) and isinstance(mine, spaces.Dict):
        assert list(mine.spaces) == list(theirs.spaces)
        for key in theirs.spaces:
            assert_same_space(mine.spaces[key], theirs.spaces[key])
    elif isinstance(theirs, (spaces.Tuple, spaces.OneOf)) and isinstance(mine, (spaces.Tuple, spaces.OneOf)):
        for left, right in zip(mine.spaces, theirs.spaces, strict=True):
            assert_same_space(left, right)
    elif isinstance(theirs, spaces.Sequence) and isinstance(mine, spaces.Sequence):
        assert_same_space(mine.feature_space, theirs.feature_space)
    elif isinstance(theirs, spaces.Text) and isinstance(mine, spaces.Text):
        assert mine.character_list == theirs.character_list
    elif isinstance(theirs, spaces.Graph) and isinstance(mine, spaces.Graph):
        assert_same_space(mine.node_space, theirs.node_space)
        if theirs.edge_space is not None and mine.edge_space is not None:
            assert_same_space(mine.edge_space, theirs.edge_space)


class TextMission(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Gives a MiniGrid environment a mission of Gymnasium's Text, since a MissionSpace is made of code."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        parts = dict(env.observation_space.spaces)  # type: ignore[attr-defined]
        letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ,.-"
        self.observation_space = spaces.Dict({**parts, "mission": spaces.Text(200, charset=letters)})

    def observation(self, observation: Any) -> Any:
        return observation


def minigrid(**kwargs: Any) -> gymnasium.Env[Any, Any]:
    """A MiniGrid environment with a Dict of Discrete, Box and Text."""
    importlib.import_module("minigrid")  # registers its environments
    return TextMission(gymnasium.make("MiniGrid-DoorKey-5x5-v0", **kwargs))


def pong(**kwargs: Any) -> gymnasium.Env[Any, Any]:
    """Atari's Pong."""
    import ale_py

    gymnasium.register_envs(ale_py)
    return gymnasium.make("ALE/Pong-v5", **kwargs)


class SmallNumbers(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Leaves out the info that Gymnasium's vector environments cannot join: an int beyond 64 bits."""

    def reset(self, **kwargs: Any) -> Any:
        observation, info = self.env.reset(**kwargs)
        return observation, {key: value for key, value in info.items() if key != "big"}

    def step(self, action: Any) -> Any:
        *rest, info = self.env.step(action)
        return (*rest, {key: value for key, value in info.items() if key != "big"})


class LargeArrays(gymnasium.Env[Any, Any]):
    """Gives observations of 700 KB, and takes actions as large; the reward is the sum of an action."""

    observation_space = spaces.Box(0, 255, (700, 1000), np.uint8)
    action_space = spaces.Box(0, 255, (700, 1000), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros((700, 1000), np.uint8), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return action + np.uint8(1), float(action.sum(dtype=np.int64)), False, False, {}


NO_BOX2D = "Box2D is not installed: it has no wheel for this version of Python"


def import_box2d() -> bool:
    """Import Box2D; False: it is not there."""
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.simplefilter("ignore")  # where its warnings are errors, the import of Box2D crashes the process
        importlib.import_module("Box2D")
        return True
    return False


@contextmanager
def server_process(*arguments: str, deadline: float = 60.0, fresh: bool = False) -> Iterator[tuple[Any, str]]:
    """Run a server in a process of its own: a script that prints its URL in a line; yield the process and the URL.

    Its standard input is a pipe, for scripts that take commands.

    Args:
        arguments: The script, and its arguments.
        deadline: Seconds until the line.
        fresh: Start an interpreter, for tests of what is imported or how much memory is used; otherwise the process is
            forked from one that has imported it all.
    """
    process = start_fresh(*arguments) if fresh or not AVAILABLE else Program("-c", *arguments, pipe=True)
    try:
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            assert selector.select(deadline), "the server printed no URL"
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait(30)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def start_fresh(*arguments: str) -> subprocess.Popen[str]:
    """Start an interpreter with a script, its input and output by pipes."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment
    )


SERVE = """
import sys, warnings
import gymnasium, bridge
server = bridge.serve_gym(sys.argv[1], num_envs=int(sys.argv[2]) if len(sys.argv) > 2 else 1)
print(server.url, flush=True)
server.wait(grace=0.0)
"""
"""A script for `server_process`: serves the environment, and lanes, that its arguments name."""


class Direct:
    """Stands for a world, an agent or a registry whose coroutines are run to their end, without a server.

    Args:
        wrapped: The object.
        runtime: Runs the coroutines.
    """

    def __init__(self, wrapped: Any, runtime: LocalRuntime) -> None:
        self.wrapped, self.runtime = wrapped, runtime

    def __getattr__(self, name: str) -> Any:
        return self._plain(getattr(self.wrapped, name))

    def _plain(self, value: Any) -> Any:
        if callable(value) and not isinstance(value, type):
            return lambda *args, **kwargs: self._plain(value(*args, **kwargs))
        if inspect.iscoroutine(value):
            value = self.runtime.run(value)
        return Direct(value, self.runtime) if isinstance(value, (World, Agent, Session)) else value

    def handle(self, data: bytes) -> bytes:
        """Of a session: answer a request, in one piece."""
        return b"".join(self.runtime.run(self.wrapped.handle(data)))


class Later:
    """An executor that makes no call before `release`."""

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self._released: PendingResult[None] = PendingResult()

    async def run(self, function: Any, *args: Any) -> Any:
        self.begun.append(function)
        await self._released
        return function(*args)

    def close(self) -> None:
        """Nothing ends."""

    def release(self, runtime: LocalRuntime) -> None:
        """Make the calls, and all that follows from them."""
        self._released.set_result(None)
        while runtime.scheduler.ready:
            runtime.scheduler.run()


def gym_source(env: Any, *, fps: float | None = None, realtime: RealTime | None = None, **options: Any) -> Any:
    """Give the maker of worlds that a server of `serve_gym` with these keywords has."""
    return EnvSource(env, realtime=_clocked(fps, realtime), **options)


def parallel_source(
    env: Any,
    *,
    fps: float | None = None,
    realtime: RealTime | None = None,
    isolation: str | None = None,
    **options: Any,
) -> Any:
    """Give the maker of worlds that a server of `serve_parallel` with these keywords has."""
    apart = Isolation.of(isolation, CALL_TIMEOUT, None)
    if fps is None:
        world = options.pop("world", None)
        return ParallelSource(env, MultiAgentOptions(**options), isolation=apart, world=world)
    return ParallelSource(env, isolation=apart, realtime=_clocked(fps, realtime, **options))


def _clocked(fps: float | None, realtime: RealTime | None, **options: Any) -> RealtimeOptions | None:
    return None if fps is None else RealtimeOptions(fps=fps, **{**vars(realtime or RealTime()), **options})


def direct_registry(
    source: Any,
    limits: Limits | None = None,
    runtime: LocalRuntime | None = None,
    messages: Iterable[SessionMessage] = (),
    **options: Any,
) -> Any:
    """A registry of worlds without a server: a `Direct` one, whose `runtime` sessions may share."""
    runtime = runtime or LocalRuntime()
    options["messages"] = list(messages)
    return Direct(Registry(source, limits or Limits(), runtime, **options), runtime)


def direct_session(registry: Any, version: str = "") -> Any:
    """A session of a `direct_registry`."""
    return Direct(Session(registry.wrapped, version), registry.runtime)


def direct_world(source: Any, settings: Any = None, name: str = "w", runtime: LocalRuntime | None = None) -> Any:
    """A world that a source makes, without a server."""
    runtime = runtime or LocalRuntime()
    return Direct(runtime.run(source.make_world(name, settings or {}, runtime)), runtime)


def world_of(server: Any, name: str = "") -> Any:
    """A world of a server in this process."""
    (found,) = [world for world in registry_of(server).worlds if world.name == name]
    return found


def layout_of(space: spaces.Space[Any], name: str = "observation", lanes: int | None = None, **more: Any) -> Any:
    """How values of a space stand in tensors: `name` is `observation` or `action`, and those of lanes are batched."""
    return Layout(space, name, lanes, **more)


def ordered_dict(items: Iterable[tuple[Any, spaces.Space[Any]]]) -> spaces.Dict:
    """A Dict space that keeps the order of its keys, with any Gymnasium."""
    return dict_space(items, sort_keys=False)


def typed_discrete(n: int, start: int, dtype: Any) -> spaces.Discrete:
    """A Discrete space of a dtype, with any Gymnasium."""
    return discrete_space(n, start, np.dtype(dtype))


def lane_info(info: Any, lane: int) -> dict[str, Any]:
    """One lane's part of Gymnasium's infos of lanes: the keys whose mask `_key` has it."""
    if isinstance(info, list):
        return dict(info[lane])
    own = {key: value for key, value in info.items() if not key.startswith("_") and info[f"_{key}"][lane]}
    return {key: lane_info(value, lane) if isinstance(value, dict) else value[lane] for key, value in own.items()}


def without_readers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Forget for a test what `register_space` was given; return the table, empty."""
    readers: dict[str, Any] = {}
    monkeypatch.setattr("bridge.core.encoding.space_json._readers", readers)
    return readers


def read_property(url: str, key: str) -> Any:
    """The value of a property of a server."""
    with Inspector(url, 20.0) as inspector:
        return unpack_tensor(inspector.read_property(key))[()]


def keeping(make: Callable[..., Any]) -> tuple[Callable[..., Any], list[Any]]:
    """A factory of environments that does as `make` does, and the list of those that it has made."""
    made: list[Any] = []

    @functools.wraps(make)
    def factory(*args: Any, **kwargs: Any) -> Any:
        made.append(make(*args, **kwargs))
        return made[-1]

    return factory, made


def objects_of(*packages: str) -> Counter[type]:
    """The objects of the classes of these packages that are alive and that the garbage collector can name, by class."""
    return Counter(type(each) for each in gc.get_objects() if str(type(each).__module__).startswith(packages))


def sampled(values: Iterable[Any], every: int, first: int = 0, *, slow: bool | int = False) -> list[Any]:
    """Return parameters of which `make test` plays each `every`-th one, from `first` on; `make test-all` plays all.

    A tuple is one set of several parameters. `.ci/run` plays those, too, that are `slow`: True is all of them, a number
    each so-many-th one.
    """

    def mark(index: int) -> pytest.MarkDecorator:
        return pytest.mark.slow if slow and index % slow == 0 else pytest.mark.repeat

    return [
        value
        if index % every == first
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=mark(index))
        for index, value in enumerate(values)
    ]


def chosen(values: Iterable[Any], is_chosen: Callable[..., bool]) -> list[Any]:
    """Return parameters of which all but `make test-all` play only those for which a function says so.

    A tuple is one set of several parameters, with which the function is called.
    """
    sets = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [value if is_chosen(*each) else pytest.param(*each, marks=pytest.mark.repeat) for value, each in sets]


def stable_id(value: Any) -> str:
    """Return the id of a parameter that is the same in each process: no address, no order of a set."""
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(stable_id, value)))}}}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def check_types(*files: Path) -> None:
    """Hold files that use this package to mypy's strict checks.

    With the settings of `make check`, and with what it has kept of this package: else mypy would read all of that.
    """
    pytest.importorskip("mypy")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def play_vector(envs: Any, steps: int, seed: int) -> None:
    """Reset a vector environment, step it with random actions, and close it."""
    envs.action_space.seed(seed)
    envs.reset(seed=seed)
    for _ in range(steps):
        envs.step(envs.action_space.sample())
    envs.close()


def free_port() -> int:
    """Return a port that nobody listens on.

    Not one that the system would give to the next who asks for any: tests beside this one ask for some all the time.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def until(condition: Any, deadline: float = 60.0) -> None:
    """Wait for a condition that another thread brings about."""
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, "the condition did not come about in time"
        time.sleep(0.005)
