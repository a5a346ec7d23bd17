"""Third-party environments, served and compared with the local ones: the table of `benchmarks/zoo.md`.

`make zoo` installs the packages of `PACKAGES` in an environment of its own and runs this. Each environment is played in
a process of its own, so that none disturbs another:

- by Python: 300 steps, bit for bit, and the order of keys;
- by vector: two worlds under `BlockingReset` beside Gymnasium's SyncVectorEnv, 100 steps;
- by lanes: a world of four, likewise;
- frames: ten of `render_mode="rgb_array"`;
- by the command line: `gymnasium-bridge serve MODULE:ID`, 20 steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv

from benchmarks.alone import add_busy, measuring
from bridge import make_parallel_remote, make_remote, make_vec_remote, serve_gym, serve_parallel
from bridge.testing import ServerProcess
from bridge.wrappers import BlockingReset
from tests.support import assert_identical

__all__ = ["ZOO", "Entry", "main", "play"]

PAGE = Path(__file__).resolve().parent / "zoo.md"
COLUMNS = {"python": "300 steps", "vector": "vector", "lanes": "4 lanes", "frames": "frames", "cli": "CLI"}
"""The comparisons, and the name of each in the table."""
TIMEOUT = 60.0
ENTRY_TIMEOUT = 150.0
OK, NONE = "ok", "–"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One environment of a package."""

    package: str
    """As pip knows it."""
    module: str
    """Registers the environment; of a PettingZoo environment, has `parallel_env`."""
    env_id: str = ""
    """Empty: a PettingZoo environment."""
    factory: str = ""
    """A function of the module that makes the environment, in place of Gymnasium; `env_id` is for the table alone."""
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """For its constructor."""
    frames: bool = True
    """True if it renders `rgb_array`."""
    lanes: bool = True
    """True if several can be in one process."""
    steps: int = 300
    """For how many steps two local ones agree, and a remote one is compared."""
    repeatable: bool = True
    """True if two local ones agree after a reset without a seed."""
    refused: str = ""
    """The text of the refusal where it cannot be served so."""
    note: str = ""
    """For the table."""


ZOO = (
    Entry("highway-env", "highway_env", "parking-v0"),
    Entry(
        "highway-env",
        "highway_env",
        "intersection-multi-agent-v1",
        refused="serve_parallel",
        note="rewards of several agents; the error says what to do",
    ),
    Entry("mo-gymnasium", "mo_gymnasium", "deep-sea-treasure-v0", note="array rewards; lanes beside MOSyncVectorEnv"),
    Entry("mo-gymnasium", "mo_gymnasium", "mo-mountaincar-v0", note="array rewards"),
    Entry("gymnasium-robotics", "gymnasium_robotics", "FetchReach-v4"),
    Entry("gymnasium-robotics", "gymnasium_robotics", "PointMaze_UMaze-v3"),
    Entry("gymnasium-robotics", "gymnasium_robotics", "AdroitHandDoor-v1"),
    Entry("shimmy", "shimmy", "dm_control/cartpole-balance-v0", note="dm_control"),
    Entry("flappy-bird-gymnasium", "flappy_bird_gymnasium", "FlappyBird-v0"),
    Entry("gym-pusht", "gym_pusht", "gym_pusht/PushT-v0"),
    Entry("miniworld", "miniworld", "MiniWorld-OneRoom-v0"),
    Entry("vizdoom", "vizdoom.gymnasium_wrapper", "VizdoomBasic-v1"),
    Entry("metaworld", "metaworld", "Meta-World/MT1", kwargs={"env_name": "reach-v3", "seed": 1}),
    Entry(
        "tetris-gymnasium",
        "tetris_gymnasium.envs",
        "tetris_gymnasium/Tetris",
        frames=False,
        note="its `render` raises with NumPy 2.4, locally too",
    ),
    Entry("popgym", "popgym", "popgym-RepeatPreviousEasy-v0", frames=False),
    Entry(
        "panda-gym",
        "panda_gym",
        "PandaReach-v3",
        repeatable=False,
        note="two local ones differ after a reset without a seed",
    ),
    Entry("gym-anytrading", "gym_anytrading", "stocks-v0", frames=False, note="an Enum in the infos"),
    Entry("minigrid", "minigrid", "MiniGrid-DoorKey-5x5-v0", note="the mission is a Text without `register_space`"),
    Entry("lbforaging", "lbforaging", "Foraging-8x8-2p-1f-v3", refused="serve_parallel", note="list rewards; likewise"),
    Entry("rware", "rware", "rware-tiny-2ag-v2", refused="serve_parallel", note="list rewards; likewise"),
    Entry(
        "crafter",
        "benchmarks.zoo_envs",
        "Crafter",
        factory="Crafter",
        frames=False,
        lanes=False,
        steps=5,
        note="5 steps: two local ones differ soon; `metadata` is None, which SyncVectorEnv does not take",
    ),
    Entry("stable-retro", "benchmarks.zoo_envs", "Airstriker-v0", lanes=False, note="one emulator a process"),
    Entry("mpe2", "mpe2.simple_spread_v3", note="PettingZoo"),
    Entry("pettingzoo", "pettingzoo.classic.rps_v2", note="PettingZoo classic"),
    Entry("pettingzoo", "pettingzoo.butterfly.pistonball_v6", note="PettingZoo butterfly"),
)


# Playing


def same(mine: Any, theirs: Any) -> None:
    """Hold two values against each other bit for bit, the order of keys too."""
    assert_identical(mine, theirs)
    if isinstance(theirs, dict):
        assert list(mine) == list(theirs), f"the keys {list(mine)} beside {list(theirs)}"


def without_enums(value: Any) -> Any:
    """Infos as they are said to travel: an Enum as its value."""
    import enum

    if isinstance(value, dict):
        return {key: without_enums(item) for key, item in value.items()}
    return value.value if isinstance(value, enum.Enum) else value


def comparable(entry: Entry, info: Any) -> Any:
    """An info without what no two environments have in common: samples of unseeded generators, and times."""
    left_out = {"action", "rewards", "time", "total_step_time"} if entry.package == "highway-env" else set()
    return without_enums({key: value for key, value in info.items() if key.lstrip("_") not in left_out})


def make(entry: Entry, **more: Any) -> Any:
    """Make the environment here."""
    module = importlib.import_module(entry.module)
    if entry.factory:
        return getattr(module, entry.factory)(**entry.kwargs, **more)
    return gymnasium.make(entry.env_id, **entry.kwargs, **more)


def play_one(entry: Entry, url: str, steps: int, *, frames: int = 0) -> None:
    """Step a remote environment and a local one side by side."""
    mode = {"render_mode": "rgb_array"} if frames else {}
    local = make(entry, **mode)
    remote = make_remote(url, timeout=TIMEOUT, **mode)
    try:
        assert entry.module == "minigrid" or remote.observation_space == local.observation_space
        assert remote.action_space == local.action_space
        local.action_space.seed(5)
        mine, theirs = remote.reset(seed=3), local.reset(seed=3)
        same(mine[0], theirs[0])
        same(comparable(entry, mine[1]), comparable(entry, theirs[1]))
        for _ in range(steps):
            action = local.action_space.sample()
            mine, theirs = remote.step(action), local.step(action)
            same(mine[0], theirs[0])
            same(mine[1:4], theirs[1:4])
            same(comparable(entry, mine[4]), comparable(entry, theirs[4]))
            if frames:
                same(remote.render(), local.render())
            if theirs[2] or theirs[3]:
                again = None if entry.repeatable else 4
                same(remote.reset(seed=again)[0], local.reset(seed=again)[0])
    finally:
        remote.close()
        local.close()


def play_many(entry: Entry, url: str, slots: int, steps: int) -> None:
    """Step remote slots beside Gymnasium's SyncVectorEnv, or MO-Gymnasium's."""
    kind: Callable[..., VectorEnv[Any, Any, Any]] = SyncVectorEnv
    if entry.package == "mo-gymnasium":
        kind = importlib.import_module("mo_gymnasium.wrappers.vector").MOSyncVectorEnv
    local: Any = kind([lambda: make(entry)] * slots)
    remote = BlockingReset(make_vec_remote(url, num_envs=slots, timeout=TIMEOUT))
    try:
        local.action_space.seed(5)
        assert_identical(remote.reset(seed=3)[0], local.reset(seed=3)[0])
        for _ in range(steps):
            actions = local.action_space.sample()
            assert_identical(remote.step(actions)[:4], local.step(actions)[:4])
    finally:
        remote.close()
        local.close()


def plain(observations: dict[Any, Any]) -> dict[Any, Any]:
    """Observations as they are said to arrive: an array of one integer for a Discrete as that integer."""
    return {agent: item[()] if isinstance(item, np.ndarray) else item for agent, item in observations.items()}


def play_agents(entry: Entry, url: str, steps: int, *, frames: int = 0) -> None:
    """Step a remote PettingZoo environment and a local one side by side."""
    mode = {"render_mode": "rgb_array"} if frames else {}
    local = importlib.import_module(entry.module).parallel_env(**mode)
    remote = make_parallel_remote(url, timeout=TIMEOUT, **mode)
    try:
        for agent in local.possible_agents:
            local.action_space(agent).seed(5)
        assert_identical(remote.reset(seed=3)[0], plain(local.reset(seed=3)[0]))
        for _ in range(steps):
            actions = {agent: local.action_space(agent).sample() for agent in local.agents}
            mine, theirs = remote.step(actions), local.step(actions)
            assert_identical(mine[0], plain(theirs[0]))
            assert_identical(mine[1:4], theirs[1:4])
            if frames:
                same(remote.render(), local.render())
            if not local.agents:
                assert_identical(remote.reset(seed=4)[0], plain(local.reset(seed=4)[0]))
    finally:
        remote.close()
        local.close()


def play_agents_by_command_line(entry: Entry) -> None:
    """Serve a PettingZoo module by its name."""
    package, _, name = entry.module.rpartition(".")
    with ServerProcess(f"{package}:{name}", timeout=TIMEOUT) as server:
        play_agents(entry, server.url, 20)


class PythonServer:
    """`serve_gym` or `serve_parallel` in a process of its own, as a program of a user's would call it."""

    def __init__(self, entry: Entry, lanes: int = 1) -> None:
        arguments = [sys.executable, "-m", "benchmarks.zoo", "--serve", str(ZOO.index(entry)), "--lanes", str(lanes)]
        self._process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("URL "):
                return line.split()[1]
        raise RuntimeError("the server ended before it served; its own words are above")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()


def serve(entry: Entry, lanes: int) -> None:
    """Serve an entry in this process until it is terminated, or whoever started it is gone."""
    threading.Thread(target=lambda: (os.read(0, 1), os._exit(0)), daemon=True).start()
    if not entry.env_id:
        server = serve_parallel(importlib.import_module(entry.module).parallel_env)
        print(f"URL {server.url}", flush=True)
        server.wait()
        return
    server = serve_gym(lambda **kwargs: make(entry, **kwargs), num_envs=lanes, start=False)
    server.run(started=lambda: print(f"URL {server.url}", flush=True))


def refusal(entry: Entry, url: str) -> str:
    """Return what a step of an environment answers whose rewards are those of several agents."""
    with make_remote(url, timeout=TIMEOUT) as remote:
        remote.reset(seed=3)
        try:
            remote.step(remote.action_space.sample())
        except Exception as error:
            return str(error)
    return "nothing was refused"


def play(entry: Entry) -> dict[str, str]:
    """Play an entry in every way; return the outcomes by column, `ok` or what went wrong."""
    outcomes = dict.fromkeys(COLUMNS, NONE)

    def attempt(column: str, function: Callable[[], None]) -> None:
        try:
            function()
            outcomes[column] = OK
        except Exception as error:
            outcomes[column] = f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0][:300]

    with PythonServer(entry) as url:
        if entry.refused:
            said = refusal(entry, url)
            outcomes["python"] = "refused" if entry.refused in said else f"expected a refusal, got {said:.200}"
            return outcomes
        if not entry.env_id:
            attempt("python", lambda: play_agents(entry, url, 300))
            attempt("frames", lambda: play_agents(entry, url, 10, frames=10))
            attempt("cli", lambda: play_agents_by_command_line(entry))
            return outcomes
        attempt("python", lambda: play_one(entry, url, entry.steps))
        if entry.lanes and entry.repeatable:
            attempt("vector", lambda: play_many(entry, url, 2, 100))
    if entry.lanes and entry.repeatable:
        with PythonServer(entry, 4) as url:
            attempt("lanes", lambda: play_many(entry, url, 4, 100))
    if entry.frames:
        with PythonServer(entry) as url:
            attempt("frames", lambda: play_one(entry, url, min(10, entry.steps), frames=10))
    pairs = [f"{key}={value}" for key, value in entry.kwargs.items()]
    arguments = (f"{entry.module}:{entry.factory or entry.env_id}", *(("--env-kwargs", *pairs) if pairs else ()))

    def by_command_line() -> None:
        with ServerProcess(*arguments, timeout=TIMEOUT) as server:
            play_one(entry, server.url, min(20, entry.steps))

    attempt("cli", by_command_line)
    return outcomes


# The table


def installed(entry: Entry) -> str:
    """Return the version that is installed; "" where there is none."""
    try:
        return importlib.metadata.version(entry.package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def play_apart(entry: Entry) -> dict[str, str]:
    """Play an entry in a process of its own."""
    if not installed(entry):
        return dict.fromkeys(COLUMNS, "not installed")
    environment = {**os.environ, "PYGLET_HEADLESS": "true", "SDL_VIDEODRIVER": "dummy", "MUJOCO_GL": "egl"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.zoo", "--entry", str(ZOO.index(entry))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ENTRY_TIMEOUT, env=environment)
    except subprocess.TimeoutExpired:
        return dict.fromkeys(COLUMNS, f"not done within {ENTRY_TIMEOUT:g} s")
    found = re.findall(r"^OUTCOME (.*)$", done.stdout, re.MULTILINE)
    if not found:
        said = (done.stderr.strip() or "nothing").splitlines()[-1][:200]
        return dict.fromkeys(COLUMNS, f"its process ended with {done.returncode}: {said}")
    outcomes: dict[str, str] = json.loads(found[0])
    return outcomes


def table(rows: Sequence[tuple[Entry, dict[str, str]]]) -> str:
    """Write the outcomes as a table, with what went wrong below it."""
    alike: dict[tuple[str, str], list[str]] = {}  # the environments of a package that have the same result
    footnotes = []
    for entry, outcomes in rows:
        name = entry.env_id or entry.module
        wrong = []
        for column, outcome in outcomes.items():
            if outcome not in (OK, NONE, "refused", "not installed"):
                footnotes.append(f"{len(footnotes) + 1}. {name}, {column}: {outcome}")
                wrong.append(f"**{COLUMNS[column]} failed** ({len(footnotes)})")
        lacking = [COLUMNS[column] for column, outcome in outcomes.items() if outcome == NONE]
        first = next(iter(outcomes.values()))
        if first in ("refused", "not installed"):
            result = first
        else:
            result = ", ".join(wrong or [OK]) + (f", no {', '.join(lacking)}" if lacking else "")
        package = f"{entry.package} {installed(entry)}"
        alike.setdefault((package, f"{result}{entry.note and f': {entry.note}'}"), []).append(name)
    lines = ["| package | environment | result |", "|---|---|---|"]
    lines += [f"| {package} | {', '.join(names)} | {result} |" for (package, result), names in alike.items()]
    return "\n".join([*lines, *(["", *footnotes] if footnotes else [])])


def main(argv: Sequence[str] | None = None) -> int:
    """Play the zoo and print the table; return 1 where something is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.zoo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", metavar="PACKAGE", help="packages to play (default: all)")
    parser.add_argument("--write", action="store_true", help="put the table into benchmarks/zoo.md")
    parser.add_argument("--entry", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lanes", type=int, default=1, help=argparse.SUPPRESS)
    add_busy(parser)
    arguments = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    if arguments.serve is not None:
        serve(ZOO[arguments.serve], arguments.lanes)
        return 0
    if arguments.entry is not None:
        print(f"OUTCOME {json.dumps(play(ZOO[arguments.entry]))}", flush=True)
        return 0
    rows = []
    with measuring(parser, arguments.busy):
        for entry in ZOO:
            if arguments.only is None or entry.package in arguments.only:
                outcomes = play_apart(entry)
                print(f"{entry.package} {entry.env_id or entry.module}: {outcomes}", flush=True)
                rows.append((entry, outcomes))
    text = table(rows)
    print(text)
    if arguments.write:
        page = PAGE.read_text(encoding="utf-8")
        page = re.sub(
            r"(<!-- zoo -->\n).*?(<!-- end of zoo -->)", lambda m: f"{m[1]}\n{text}\n\n{m[2]}", page, flags=re.S
        )
        PAGE.write_text(page, encoding="utf-8")
    bad = [outcome for _, outcomes in rows for outcome in outcomes.values() if outcome not in (OK, NONE, "refused")]
    return int(any(outcome != "not installed" for outcome in bad))


if __name__ == "__main__":
    sys.exit(main())
