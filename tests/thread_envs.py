"""Environments for tests of threads, importable by other processes.

They record which thread calls them, use what is bound to one thread, block, or wait for each other.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from pettingzoo import ParallelEnv

SLOW = 0.12
"""Seconds of a slow call: longer than any call after which another thread runs the event loop (40 ms)."""
BLOCKED = 60.0
"""Seconds after which a blocked call returns if nobody released it before."""
_numbers = itertools.count()


class Log:
    """Appends a line to a file for each new pair of operation and thread of one environment.

    Args:
        path: The file. Several environments, also in several processes, may append to it.
    """

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._name = f"{os.getpid()}-{next(_numbers)}"
        self._seen: set[tuple[str, int]] = set()

    def add(self, what: str) -> None:
        """Record that the calling thread does something; only its first time counts."""
        # Not threading.get_ident(): it is used again as soon as a thread has ended.
        thread = threading.get_native_id()
        if (what, thread) in self._seen:
            return
        self._seen.add((what, thread))
        record = {
            "env": self._name,
            "what": what,
            "pid": os.getpid(),
            "thread": thread,
            "name": threading.current_thread().name,
            "main": threading.current_thread() is threading.main_thread(),
        }
        os.write(self._file, f"{json.dumps(record)}\n".encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """Return the records of a log; empty if there is no such file yet."""
    if not os.path.exists(path):
        return []
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


class _Recording:
    """The part that both kinds of recording environments share."""

    log: Log

    def __getattribute__(self, name: str) -> Any:
        if name[0] != "_" and name != "log":
            with contextlib.suppress(AttributeError):  # the log is not there yet
                object.__getattribute__(self, "log").add("attribute")
        return super().__getattribute__(name)

    def _begin(self, log: str) -> None:
        self.log = Log(log)
        self.log.add("__init__")
        time.sleep(SLOW)
        self._speed = 1

    @property
    def speed(self) -> int:
        self.log.add("read")
        return self._speed

    @speed.setter
    def speed(self, value: int) -> None:
        self.log.add("write")
        self._speed = value

    def nap(self, seconds: float) -> float:
        """A public method, as slow as the caller says."""
        self.log.add("call")
        time.sleep(seconds)
        return seconds

    def render(self) -> Any:
        self.log.add("render")
        return np.zeros((2, 2, 3), np.uint8)

    def close(self) -> None:
        self.log.add("close")

    def __del__(self) -> None:
        if hasattr(self, "log"):
            self.log.add("__del__")
            self.log.close()


class RecordingEnv(_Recording, gymnasium.Env[Any, Any]):
    """Records the thread of everything that is done with it. Action 1 is a slow step, an episode has 150 steps."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}  # noqa: RUF012
    observation_space = spaces.Box(0, 2**31, (2,), np.int64)
    action_space = spaces.Discrete(2)

    def __init__(self, log: str, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.episode = self.time = 0
        self._begin(log)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.log.add("reset")
        if options and options.get("slow"):
            time.sleep(SLOW)
        self.episode, self.time = self.episode + 1, 0
        return np.array([self.episode, 0]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.log.add("step")
        if action == 1:
            time.sleep(SLOW)
        self.time += 1
        return np.array([self.episode, self.time]), 1.0, self.time >= 150, False, {}


class RecordingAgents(_Recording, ParallelEnv):
    """The same for two agents: a step is slow if any agent's action is 1."""

    metadata = {"name": "recording_v0", "render_modes": ["rgb_array"], "render_fps": 50}  # noqa: RUF012
    possible_agents = ["ann", "bob"]  # noqa: RUF012
    _observed = spaces.Box(0, 2**31, (1,), np.int64)
    _acted = spaces.Discrete(2)

    def __init__(self, log: str, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.agents: list[str] = []
        self.time = 0
        self._begin(log)

    def observation_space(self, agent: Any) -> Any:
        return self._observed

    def action_space(self, agent: Any) -> Any:
        return self._acted

    def _all(self, value: Any) -> dict[str, Any]:
        return {agent: value() if callable(value) else value for agent in self.possible_agents}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.log.add("reset")
        if options and options.get("slow"):
            time.sleep(SLOW)
        self.agents, self.time = list(self.possible_agents), 0
        return self._all(lambda: np.array([0])), self._all(dict)

    def step(self, actions: Any) -> Any:
        self.log.add("step")
        if 1 in actions.values():
            time.sleep(SLOW)
        self.time += 1
        over = self.time >= 150
        self.agents = [] if over else self.agents
        return (
            self._all(lambda: np.array([self.time])),
            self._all(1.0),
            self._all(over),
            self._all(False),
            self._all(dict),
        )

    def state(self) -> Any:
        self.log.add("state")
        return np.array([self.time])


class DatabaseEnv(RecordingEnv):
    """Counts its steps in a database whose connection works in the thread alone that made it."""

    def __init__(self, log: str, render_mode: str | None = None) -> None:
        super().__init__(log, render_mode)
        self._database = sqlite3.connect(":memory:")
        self._database.execute("create table steps (number integer)")

    def _count(self) -> int:
        (found,) = self._database.execute("select count(*) from steps").fetchone()
        return int(found)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._database.execute("delete from steps")
        observation, _ = super().reset(seed=seed, options=options)
        return observation, {"count": self._count()}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._database.execute("insert into steps values (?)", (self.time,))
        observation, *rest, _ = super().step(action)
        return (observation, *rest, {"count": self._count()})  # type: ignore[return-value]

    def render(self) -> Any:
        return np.full((1, 1, 3), self._count() % 256, np.uint8)

    def count(self) -> int:
        return self._count()

    def close(self) -> None:
        self._database.close()
        super().close()  # recorded only if the database could be closed


class StuckEnv(RecordingEnv):
    """Its steps with action 1 return after a minute; records what is raised in them."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == 1:
            self.log.add("stuck")
            try:
                time.sleep(BLOCKED)
            except BaseException as error:
                self.log.add(f"raised {type(error).__name__}")
                raise
        return super().step(0)


class Gate:
    """Lets a test hold a step up: `entered` is set in the step, which returns once `release` is set."""

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        self.release.wait(BLOCKED)


class CallbackEnv(gymnasium.Env[Any, Any]):
    """Calls a function in every step whose action is 1."""

    observation_space = spaces.Discrete(2)
    action_space = spaces.Discrete(2)

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return 0, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == 1:
            self._function()
        return 0, 0.0, False, False, {}


class CallbackAgents(ParallelEnv):
    """Agents named a0, a1 and so on; calls a function in every step in which some action is 1."""

    metadata = {"name": "callback_v0"}  # noqa: RUF012
    render_mode = None
    _space = spaces.Discrete(2)

    def __init__(self, agents: int = 1, function: Callable[[], Any] = lambda: None) -> None:
        self.possible_agents = [f"a{index}" for index in range(agents)]
        self.agents: list[str] = []
        self._function = function

    def observation_space(self, agent: Any) -> Any:
        return self._space

    def action_space(self, agent: Any) -> Any:
        return self._space

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents = list(self.possible_agents)
        return dict.fromkeys(self.agents, 0), {agent: {} for agent in self.agents}

    def step(self, actions: Any) -> Any:
        if 1 in actions.values():
            self._function()
        flags = dict.fromkeys(self.agents, False)
        return (
            dict.fromkeys(self.agents, 0),
            dict.fromkeys(self.agents, 0.0),
            flags,
            dict(flags),
            {agent: {} for agent in self.agents},
        )


class MeetingEnv(CallbackEnv):
    """In a step with action 1 it leaves a file named after its process, and waits for a file named `go`."""

    def __init__(self, folder: str) -> None:
        super().__init__(self._meet)
        self._folder = Path(folder)

    def pid(self) -> int:
        return os.getpid()

    def _meet(self) -> None:
        (self._folder / f"inside-{os.getpid()}").touch()
        deadline = time.monotonic() + BLOCKED
        while not (self._folder / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.005)


def hallway(**kwargs: Any) -> gymnasium.Env[Any, Any]:
    """MiniWorld's Hallway, whose observations are drawn by OpenGL; without a screen."""
    import pyglet

    pyglet.options["headless"] = True
    import miniworld  # noqa: F401 - it registers its environments

    return gymnasium.make("MiniWorld-Hallway-v0", **kwargs)


def frames(env: gymnasium.Env[Any, Any]) -> Iterator[Any]:
    """Yield frames of four episodes: before and after 100 seeded steps."""
    rng = np.random.default_rng(5)
    box = env.action_space
    assert isinstance(box, spaces.Box)
    for episode in range(4):
        env.reset(seed=episode)
        yield env.render()
        for _ in range(100):
            _, _, terminated, truncated, _ = env.step(rng.uniform(box.low, box.high).astype(box.dtype))
            if terminated or truncated:
                env.reset()
        yield env.render()


def views(env: gymnasium.Env[Any, Any]) -> Iterator[Any]:
    """Yield the observations of 200 seeded steps, and of the resets between them."""
    rng = np.random.default_rng(6)
    yield env.reset(seed=7)[0]
    for _ in range(200):
        observation, _, terminated, truncated, _ = env.step(int(rng.integers(env.action_space.n)))  # type: ignore[attr-defined]
        yield observation
        if terminated or truncated:
            yield env.reset()[0]


def _drawing(name: str) -> gymnasium.Env[Any, Any]:
    return hallway() if name == "hallway" else gymnasium.make(name, render_mode="rgb_array")


def can_draw(name: str) -> None:
    """Draw something; raises whatever is wrong with this machine."""
    env = _drawing(name)
    env.reset(seed=0)
    env.render()
    env.close()


def write_frames(name: str, path: str) -> None:
    """Save what a local environment shows: the reference, from a process that does nothing else."""
    env = _drawing(name)
    np.save(path, np.stack(list((views if name == "hallway" else frames)(env))))
    env.close()


for _name, _entry in (("Recording", RecordingEnv), ("Stuck", StuckEnv)):
    if f"ThreadTests/{_name}-v0" not in gymnasium.registry:
        gymnasium.register(f"ThreadTests/{_name}-v0", entry_point=_entry, disable_env_checker=True, order_enforce=False)
