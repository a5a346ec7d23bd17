"""What copies environments, without a server: if one goes on right after a restore, and what a check says of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from bridge.states.check import examine as examine
from bridge.states.check import examine_replay as examine_replay
from bridge.states.graph import restore, take
from bridge.states.history import History, Ledger
from bridge.states.replay import StateReplay, replayed

STEPS = 100
MOMENTS = (1, 50, 120, 149)
"""Steps before the save; some of these environments do in step 150 what no earlier step shows."""


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """End a block at a refusal, which is right."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "CannotCopyError":
            raise


def played(env: Any, actions: list[Any]) -> list[Any]:
    """What an environment gives for actions, across the ends of episodes."""
    found: list[Any] = []
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        found.append((observation.tobytes(), float(reward), terminated, truncated))
        if terminated or truncated:
            found.append(env.reset()[0].tobytes())
    return found


def goes_wrong(kind: Any) -> bool:
    """True if an environment goes on otherwise after a restore, without a refusal."""
    for moment in MOMENTS:
        env = kind()
        try:
            env.reset(seed=3)
            env.action_space.seed(1)
            played(env, [env.action_space.sample() for _ in range(moment)])
            actions = [env.action_space.sample() for _ in range(STEPS)]
            with refusals():
                snapshot, _ = take(env)
                wanted = played(env, actions)
                restore(snapshot, env)
                try:
                    if played(env, actions) != wanted:
                        return True
                except KeyError:  # such as of an environment that knows objects by their addresses
                    return True
        finally:
            env.close()
    return False


def is_replayed_wrong(kind: Any) -> bool:
    """True if an environment goes on otherwise after a replay, without a refusal."""
    for moment in MOMENTS:
        env = kind()
        with contextlib.closing(env):
            history = History(env, Ledger(10_000, 2**30), fresh=True)
            history.reset(seed=3)
            env.action_space.seed(1)
            played(history, [env.action_space.sample() for _ in range(moment)])
            actions = [env.action_space.sample() for _ in range(STEPS)]
            with refusals():
                state = replayed(history)
                wanted = played(history, actions)
                replay = StateReplay(state, env, kind, in_place=False)
                with contextlib.closing(replay):
                    replay.advance(60.0)
                    replay.finish(None)
                    if played(replay.env, actions) != wanted:
                        return True
    return False
