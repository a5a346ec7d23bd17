"""Plays environments at one end and compares at the other; each end runs in an environment of its own.

`serve FILE` plays each case locally, serves it, writes both into FILE, prints a line, and serves until its standard
input ends. `compare FILE…` plays the same actions on the environments that are served as files say, and prints what
differs, as JSON: for each file a mapping of cases.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.vector import SyncVectorEnv

from bridge import make_remote, make_vec_remote, serve_gym
from bridge.core.encoding import values
from bridge.core.encoding.space_json import space_to_json
from bridge.errors import UnsupportedSpaceError
from bridge.testing import EVERY_SPACE, SpaceEnv
from bridge.wrappers import BlockingReset

STEPS = 100  # of an environment
LIMIT = 40  # of an episode's steps, so that some are truncated
SPACE_STEPS = 10  # of a space, sampled anew in each
LANES = 3
IDS = ("CartPole-v1", "Pendulum-v1", "MountainCarContinuous-v0", "FrozenLake-v1", "Blackjack-v1")
ACTIONS = ("box_float32", "dict_nested", "tuple_nested", "multi_discrete_start", "multi_binary_2d", "text_unicode")


def maker(case: str) -> Callable[[], gymnasium.Env[Any, Any]]:
    """Return what makes the environment of a case."""
    lanes = case.startswith("lanes of ")
    kind, _, name = case.removeprefix("lanes of ").partition(" ")
    if kind == "observation":
        # Gymnasium's own vector environments raise for the large integers of these infos.
        return lambda: SpaceEnv(EVERY_SPACE[name](), infos=not lanes)
    if kind == "action":
        return lambda: SpaceEnv(None, EVERY_SPACE[name]())
    return lambda: gymnasium.make(name, max_episode_steps=LIMIT, disable_env_checker=True)


def cases() -> list[str]:
    """Return the cases that the installed Gymnasium can make; those with `lanes` are vectors."""
    single = [f"id {name}" for name in IDS]
    single += [f"observation {name}" for name in EVERY_SPACE] + [f"action {name}" for name in ACTIONS]
    return single + [f"lanes of id {name}" for name in IDS[:2]] + ["lanes of observation dict_nested"]


def digest(value: Any) -> str:
    """Return a hash of a value with its types, and the dtypes and bits of its arrays and scalars."""
    return hashlib.sha256(values.encode(value)).hexdigest()


def spaces_of(env: Any) -> list[str]:
    """Return the exact spaces as JSON."""
    lanes = hasattr(env, "single_observation_space")
    pair = (
        [env.single_observation_space, env.single_action_space] if lanes else [env.observation_space, env.action_space]
    )
    return [space_to_json(space) for space in pair]


def play(env: Any, actions: Iterator[Any], seed: int = 7) -> Iterator[str]:
    """Yield a hash of each reset and step."""
    lanes = hasattr(env, "single_observation_space")
    yield digest(env.reset(seed=seed))
    for action in actions:
        observation, reward, *rest = env.step(action)
        # FrozenLake of Gymnasium 1.4 gives the integer 0 as a reward; a remote environment's rewards are floats.
        result = (observation, reward if lanes else float(reward), *rest)
        yield digest(result)
        if not lanes and (result[2] or result[3]):
            yield digest(env.reset())


def sampled(env: Any, steps: int, kept: list[str]) -> Iterator[Any]:
    """Yield actions of an environment, and keep them."""
    env.action_space.seed(3)
    for _ in range(steps):
        action = env.action_space.sample()
        kept.append(values.encode(action).hex())
        yield action


def serve(target: Path) -> None:
    """Play each case here, and serve it."""
    written: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        for case in cases():
            lanes = case.startswith("lanes of ")
            make = maker(case)
            local: Any = SyncVectorEnv([make] * LANES) if lanes else make()
            actions: list[str] = []
            steps = STEPS if " id " in f" {case}" else SPACE_STEPS
            given = list(play(local, sampled(local, steps, actions)))
            server = stack.enter_context(serve_gym(make, num_envs=LANES if lanes else 1))
            written[case] = {"url": server.url, "spaces": spaces_of(local), "actions": actions, "given": given}
            local.close()
        target.write_text(json.dumps(written))
        print("serving", flush=True)
        sys.stdin.read()


def comparable(spaces: list[str]) -> list[str]:
    """Leave out what this Gymnasium does not know: a Dict has no `sort_keys` before 1.4, and keeps its order."""
    if tuple(map(int, re.findall(r"\d+", gymnasium.__version__)[:2])) >= (1, 4):
        return spaces
    return [text.replace('"sort_keys":false', '"sort_keys":true') for text in spaces]


def difference(case: str, wanted: dict[str, Any]) -> str | None:
    """Play a case remotely, and return how that differs from how it was played where it is served."""
    lanes = case.startswith("lanes of ")
    try:
        env: Any = BlockingReset(make_vec_remote([wanted["url"]])) if lanes else make_remote(wanted["url"])
    except UnsupportedSpaceError as error:
        return f"UnsupportedSpaceError: {error}"
    try:
        spaces = spaces_of(env)
        given = list(play(env, (values.decode(bytes.fromhex(action)) for action in wanted["actions"])))
    finally:
        env.close()
    if comparable(spaces) != comparable(wanted["spaces"]):
        return f"spaces: {wanted['spaces']} became {spaces}"
    for number, (mine, theirs) in enumerate(zip(given, wanted["given"], strict=True)):
        if mine != theirs:
            return f"the results differ from number {number} on"
    return None


def compare(source: Path) -> dict[str, str]:
    """Return how each case of a server differs."""
    found: dict[str, str] = {}
    for case, wanted in json.loads(source.read_text()).items():
        try:
            problem = difference(case, wanted)
        except Exception as error:  # the other cases are played nevertheless
            problem = f"{type(error).__name__}: {error}"
        if problem is not None:
            found[case] = problem
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    files = [Path(argument) for argument in sys.argv[2:]]
    if sys.argv[1] == "serve":
        serve(*files)
    else:
        print(json.dumps({file.stem: compare(file) for file in files}), flush=True)
