"""What copies environments, without a server: if one goes on right after a restore, and what a check says of it."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import cloudpickle

from bridge.states.check import Verdict, run_check
from bridge.states.check import examine as examine
from bridge.states.check import examine_replay as examine_replay
from bridge.states.graph import restore, take
from bridge.states.history import History, Ledger
from bridge.states.replay import StateReplay, replayed
from tests.late_envs import LATE

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


def judge(make: Any) -> Verdict:
    """What a server finds about a kind, in processes of their own."""
    return run_check(cloudpickle.dumps(make), lambda process: None)


def lanes_of(kind: Any, moment: int) -> tuple[list[Any], list[Any]]:
    """Three environments, stepped in turns as lanes are; and what draws the actions of each."""
    lanes = [kind() for _ in range(3)]
    drawing = [copy.deepcopy(lane.action_space) for lane in lanes]
    for number, (lane, space) in enumerate(zip(lanes, drawing, strict=True)):
        lane.reset(seed=3 + number)
        space.seed(1 + number)
    for _ in range(moment):
        turn(lanes, [space.sample() for space in drawing])
    return lanes, drawing


def turn(lanes: list[Any], actions: list[Any]) -> list[list[Any]]:
    """What lanes give for an action each."""
    return [played(lane, [action]) for lane, action in zip(lanes, actions, strict=True)]


def goes_wrong_as_a_lane(kind: Any) -> bool:
    """True if a lane goes on otherwise after a restore, beside others that went on, or by a state of another one."""
    for moment in MOMENTS:
        lanes, drawing = lanes_of(kind, moment)
        try:
            actions = [drawing[0].sample() for _ in range(STEPS)]
            with refusals():
                snapshot, _ = take(lanes[0])
                wanted = [turn(lanes, [action, *(s.sample() for s in drawing[1:])])[0] for action in actions]
                restore(snapshot, lanes[0])
                for action, result in zip(actions, wanted, strict=True):
                    if turn(lanes, [action, *(space.sample() for space in drawing[1:])])[0] != result:
                        return True
                for lane in lanes:
                    restore(snapshot, lane)
                for action, result in zip(actions, wanted, strict=True):
                    if turn(lanes, [action] * len(lanes)) != [result] * len(lanes):
                        return True
        finally:
            for lane in lanes:
                lane.close()
    return False


def is_moved_by_a_save(kind: Any) -> bool:
    """True if an environment goes on otherwise because it was saved."""
    for moment in MOMENTS:
        found = []
        for saves in (False, False, True):
            env = kind()
            with contextlib.closing(env), refusals():
                env.reset(seed=3)
                space = copy.deepcopy(env.action_space)
                space.seed(1)
                played(env, [space.sample() for _ in range(moment)])
                if saves:
                    take(env)
                found.append(played(env, [space.sample() for _ in range(STEPS)]))
        # One that no two runs are alike of shows nothing.
        if len(found) == 3 and found[0] == found[1] != found[2]:
            return True
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


def replayed_in_place(kind: Any) -> bool:
    """True if an environment goes on right after a replay in it."""
    env = kind()
    with contextlib.closing(env):
        history = History(env, Ledger(10_000, 2**30), fresh=True)
        history.reset(seed=3)
        played(history, [0, 2, 1])
        state, actions = replayed(history), [1, 0, 2] * 20
        wanted = played(history, actions)
        replay = StateReplay(state, env, kind, in_place=True)
        replay.advance(60.0)
        replay.finish(None)
        return played(env, actions) == wanted


def goes_on_like_its_twin(kind: Any) -> None:
    """Save shortly before it is late, and restore into the environment itself, before and after, and another one."""
    with contextlib.ExitStack() as stack:
        twin, env, other = (stack.enter_context(contextlib.closing(kind())) for _ in range(3))
        space = copy.deepcopy(env.action_space)
        space.seed(1)
        before, rest, aside = ([space.sample() for _ in range(count)] for count in (20, 250, 3))
        for number, each in enumerate((twin, env, other)):
            each.reset(seed=3 if number < 2 else 8)
            played(each, before[: 20 if number < 2 else 7])
            each.n = LATE - 5 * (number < 2) - 30 * (number == 2)
        wanted = played(twin, rest)
        first, _ = take(env)
        played(env, aside)
        restore(first, env)
        second, _ = take(env)
        assert played(env, rest) == wanted, "restored before it was late"
        for snapshot in (first, second):
            restore(snapshot, other)
            assert played(other, rest) == wanted, "another one"
            restore(snapshot, env)
            assert played(env, rest) == wanted, "restored after it was late"
