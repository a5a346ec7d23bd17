"""Try out a kind of environment in separate processes: does a state of one environment fit another one?

The served environments are not touched. The check makes new ones, and saves and restores them at several moments. It
compares their results bit for bit with those of the original. It also checks that two environments do not influence
each other, and that closing one leaves the other intact. Around each reset and step it checks the generators of
`random` and `numpy.random`, and what classes and modules hold.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv
from numpy.random import bit_generator

from bridge.core.worlds.kinds import facts_of, is_parallel
from bridge.core.worlds.lane_vector import with_lanes_of_ours
from bridge.states.digest import digest_of, objects_in
from bridge.states.fields import fields_of
from bridge.states.graph import restore, take
from bridge.states.history import History, Ledger, foreign_in
from bridge.states.layers import layers_of
from bridge.states.refusal import CannotCopyError
from bridge.states.replay import StateReplay, replayed
from bridge.states.scan import Shared

__all__ = ["CHECK_SECONDS", "Verdict", "examine", "examine_replay", "run_check", "run_child", "single"]

CHECK_SECONDS = 120.0
"""The timeout of a check, in seconds."""
_ENOUGH = 20.0
"""Seconds after which no more moments are tried."""
_MOMENTS = (0, 1, 5, 20, 60)
"""The numbers of steps after which a state is saved."""
_STEPS = 40
"""How many steps are compared."""
_LONG_STEPS, _LONG_SECONDS = 500, 1.0
"""The most steps, and seconds of the processor, of an episode beside other environments: some change shared values only
late."""
_LONG_WAIT = 10.0
"""The most seconds of such an episode."""
_MOST_STEPS, _MOST_BYTES = 1_000_000, 2**40
"""The limits of a history in a check, which never reaches them."""
_DRAWS_RANDOM = "it draws from the generator of the module random, which all share"
_DRAWS_NUMPY = "it draws from the generator of numpy.random, which all share"
_CHANGES_SHARED = "it changes what its class or its module holds, which all environments share"
_CHANGES_COMMON = "it changes an object that other environments of its kind have too"
_RESETS_ANEW = (
    "its reset without a seed differs. A cause may be random.Random(None), which draws a seed from the system: "
    "use self.np_random instead"
)
_RESET_PARTS = 2
"""A reset returns an observation and an info, a step five values."""
_OF_ALL = (_DRAWS_RANDOM, _DRAWS_NUMPY, _CHANGES_SHARED, _CHANGES_COMMON)
"""Reasons that exclude a replay too, so that it is not tried."""
_CHILD = "import sys; from bridge.states.check import run_child; run_child(*sys.argv[1:])"


class _DiffersError(Exception):
    """A copy went on differently from the original."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a check."""

    way: str
    """How states are saved: `copy` or `replay`; "": not at all."""
    reason: str = ""
    """Why states cannot be saved."""
    seconds: float = 0.0
    """The processor time of the check."""


def run_check(
    made: bytes, started: Callable[[subprocess.Popen[bytes]], None], timeout: float = CHECK_SECONDS
) -> Verdict:
    """Check the environments that a pickled function makes, by copy and, if that fails, by replay.

    Each way is checked in a fresh process, because something may change only once in a process, such as a cache that
    fills. A check takes seconds: call this function in a separate thread.

    Args:
        made: The pickle of a function that makes an environment, as `cloudpickle` writes it.
        started: Called with each process, so that the caller can kill it.
        timeout: Seconds after which the check is given up.
    """
    until = time.monotonic() + timeout
    copied = _checked("copy", made, started, timeout)
    if copied.way or copied.reason in _OF_ALL or time.monotonic() >= until:
        return copied
    again = _checked("replay", made, started, until - time.monotonic())
    seconds = copied.seconds + again.seconds
    if again.way or again.reason == copied.reason:
        return dataclasses.replace(again, seconds=seconds)
    return Verdict("", f"{copied.reason}; and by replay: {again.reason}", seconds)


def _checked(way: str, made: bytes, started: Callable[[subprocess.Popen[bytes]], None], timeout: float) -> Verdict:
    """Check one way in a fresh process."""
    with tempfile.TemporaryDirectory(prefix="bridge-states-") as folder:
        Path(folder, "make").write_bytes(made)
        path = os.pathsep.join(entry for entry in sys.path if entry)
        environment = {**os.environ, "PYTHONPATH": path, "SDL_VIDEODRIVER": os.environ.get("SDL_VIDEODRIVER", "dummy")}
        command = [sys.executable, "-c", _CHILD, folder, way]
        try:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches the server alone, which then ends this process
            )
        except OSError as error:
            return Verdict("", f"the check of its kind could not be started: {error}")
        with process:
            started(process)
            try:
                _, said = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                return Verdict("", f"the check of its kind did not end within {timeout:.3g} s", timeout)
        result = Path(folder, "result")
        if not result.exists():
            last = said.decode("utf-8", "replace").strip().rpartition("\n")[2]
            return Verdict("", f"the process that checks its kind ended with {process.returncode}: {last[:300]}")
        return Verdict(*json.loads(result.read_text(encoding="utf-8")))


def run_child(folder: str, way: str) -> None:
    """Run one check: read the function from a folder, and write the verdict there. Called in the new process."""
    try:
        make = pickle.loads(Path(folder, "make").read_bytes())
        why = examine(make) if way == "copy" else examine_replay(make)
    except Exception as error:  # a user's environment may raise anything
        why = f"it raised {type(error).__name__} in the check of its kind: {error}"
    found = "" if why else way, why, time.process_time()
    Path(folder, "written").write_text(json.dumps(found), encoding="utf-8")
    os.replace(Path(folder, "written"), Path(folder, "result"))
    # The environment may have threads that do not end.
    os._exit(0)


def single(make: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that makes one environment, if `make` makes lanes of it."""
    recipe = getattr(make, "__self__", None)
    if dataclasses.is_dataclass(recipe) and not isinstance(recipe, type) and hasattr(recipe, "num_envs"):
        return getattr(dataclasses.replace(recipe, num_envs=1), make.__name__)  # type: ignore[no-any-return]
    return make


def _one(made: Any) -> Any:
    """Return the object to check: of lanes that are stepped one by one, the first lane."""
    if isinstance(made, SyncVectorEnv):
        lanes: Any = made
        return lanes.envs[0]
    if isinstance(made, VectorEnv):
        return with_lanes_of_ours(made, facts_of(made).reward_space)
    if not isinstance(made, gymnasium.Env) and not is_parallel(made):
        raise CannotCopyError(f"a {type(made).__name__} is no environment of Gymnasium or PettingZoo")
    return made


def examine_replay(make: Callable[[], Any]) -> str:
    """Check whether the environments of a function can be replayed; return why not, or "" if they can."""
    env = _one(make())
    if isinstance(env, VectorEnv):
        with contextlib.closing(env):
            return "lanes that are stepped together are not replayed"
    history, other = History(env, Ledger(_MOST_STEPS, _MOST_BYTES), fresh=True), env
    began = time.monotonic()
    try:
        other = _one(make())
        if other is not env:
            _refuse_foreign(env, other)
        for number, moment in enumerate(_MOMENTS):
            if number and time.monotonic() - began > _ENOUGH:
                break
            _try_replay(history, env, make, moment, seed=number)
        if other is not env:
            _try_replay_among(history, env, other, make)
    except (CannotCopyError, _DiffersError) as error:
        return str(error)
    finally:
        for each in (env, other):
            with contextlib.suppress(Exception):
                each.close()
    return ""


def _try_replay(history: History, env: Any, make: Callable[[], Any], moment: int, seed: int) -> None:
    # Copy the space: the generator of the environment's own space is part of the state.
    watched, space = _Watched(history), copy.deepcopy(_actions_of(env))
    space.seed(seed)
    # Try resets with and without a seed; after the first moment the environment has been played before.
    watched.reset(seed if seed % 2 else None)
    watched.advance(moment, space)
    state = replayed(history)
    watched.shared = state.after.common
    actions = [space.sample() for _ in range(_STEPS)]
    wanted = watched.run_and_reset(actions)
    for in_place in (False, True) if state.track.clean else (False,):
        replay = StateReplay(state, env, make, in_place=in_place)
        try:
            replay.advance(CHECK_SECONDS)
            track = replay.finish(None)
            if replay.in_place:
                history.go_on(env, track)
            beside = watched if replay.in_place else _Watched(replay.env)
            beside.shared = watched.shared
            _compare(beside.run_and_reset(actions), wanted, "an environment that was replayed")
        finally:
            replay.close()
    if history.track is not None:
        # The original must still work after all this, and after the other one was closed.
        watched.advance(3, space)


def _try_replay_among(history: History, env: Any, other: Any, make: Callable[[], Any]) -> None:
    watched, space = _Watched(history), copy.deepcopy(_actions_of(env))
    space.seed(11)
    watched.reset(11)
    watched.advance(3, space)
    state = replayed(history)
    watched.shared = state.after.common
    actions = [space.sample() for _ in range(_LONG_STEPS)]
    wanted = _played(watched, actions)
    replay = StateReplay(state, env, make, in_place=False)
    try:
        replay.advance(CHECK_SECONDS)
        replay.finish(None)
        again = _Watched(replay.env)
        again.shared = watched.shared
        _go_on_among(again, actions, wanted, other, make)
    finally:
        replay.close()


def examine(make: Callable[[], Any]) -> str:
    """Check whether the environments of a function can be copied; return why not, or "" if they can."""
    env = _one(make())
    other = _one(make())
    began = time.monotonic()
    try:
        if other is not env:
            # This comes first: a restore gives an environment new objects, and would hide objects that both hold.
            _try_among(env, other, make)
        for number, moment in enumerate(_MOMENTS):
            if number and time.monotonic() - began > _ENOUGH:
                break
            _try_out(env, None if other is env else other, moment, seed=number)
        if other is not env:
            _try_closing(env, other)
    except (CannotCopyError, _DiffersError) as error:
        return str(error)
    finally:
        for each in (env, other):
            with contextlib.suppress(Exception):
                each.close()
    return ""


class _Common:
    """The objects that two environments both hold, such as one that the function which made them gave to each.

    Args:
        env: An environment.
        other: Another one.
    """

    def __init__(self, env: Any, other: Any) -> None:
        for each in (env, other):
            _Watched(each).reset(0)
        mine, theirs = (
            objects_in(value for layer in layers_of(each) for _, value in fields_of(layer)) for each in (env, other)
        )
        self._objects = [value for key, value in mine.items() if key in theirs]
        self._samples = take(env)[0].common.samples
        self._before = digest_of(self._objects, samples=self._samples)

    def refuse_changes(self) -> None:
        """Raise if the steps of one environment have changed them."""
        if digest_of(self._objects, samples=self._samples) != self._before:
            raise _DiffersError(_CHANGES_COMMON)


def _refuse_foreign(env: Any, other: Any) -> None:
    """Refuse an environment that shares a C object with another one: a replay in one would change the other."""
    known = {id(value) for value in foreign_in(other)}
    for value in foreign_in(env):
        if id(value) in known and not callable(value):
            title = f"{type(value).__module__}.{type(value).__qualname__}"
            raise CannotCopyError(f"other environments of its kind have its {title} too")


class _JointSpace:
    """The action spaces of all possible agents of an environment.

    Args:
        env: The environment.
    """

    def __init__(self, env: Any) -> None:
        self._spaces = {agent: env.action_space(agent) for agent in env.possible_agents}

    def seed(self, seed: int) -> None:
        for number, space in enumerate(self._spaces.values()):
            space.seed(seed + number)

    def sample(self) -> dict[Any, Any]:
        return {agent: space.sample() for agent, space in self._spaces.items()}


def _actions_of(env: Any) -> Any:
    """Return the space for sampling actions: the environment's own space, whose generator is part of its state."""
    return _JointSpace(env) if is_parallel(env) else env.action_space


def _same_entropy() -> Any:
    """Return a context in which NumPy gets the same numbers each time, where it asks the system for seeds.

    A reset without a seed may make a generator by `default_rng(None)`. Its seed is not part of a state, because two
    runs of the original would draw different seeds, too. Any other difference after such a reset is a fault of the
    restore.
    """
    return mock.patch.object(bit_generator, "randbits", side_effect=itertools.count(1), create=True)


class _Watched:
    """Resets and steps an environment, and raises if it changes what it shares with others."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._inner = env.env if isinstance(env, History) else env
        self._several, self._lanes = is_parallel(self._inner), isinstance(self._inner, VectorEnv)
        self.shared: Shared | None = None

    def _around(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = random.getstate(), pickle.dumps(np.random.get_state())
        held = "" if self.shared is None else self.shared.digest()
        try:
            return function(*args, **kwargs)
        finally:
            if before[0] != random.getstate():
                raise _DiffersError(_DRAWS_RANDOM)
            if before[1] != pickle.dumps(np.random.get_state()):
                raise _DiffersError(_DRAWS_NUMPY)
            if self.shared is not None and held != self.shared.digest():
                raise _DiffersError(_CHANGES_SHARED)

    def refuse_shared_changes(self, function: Callable[[], Any]) -> None:
        """Call a function; raise if it changes shared values."""
        held = "" if self.shared is None else self.shared.digest()
        function()
        if self.shared is not None and held != self.shared.digest():
            raise _DiffersError(_CHANGES_SHARED)

    def reset(self, seed: int | None = None) -> Any:
        if seed is not None:
            return self._around(self._env.reset, seed=seed)
        with _same_entropy():
            return self._around(self._env.reset)

    def step(self, action: Any) -> Any:
        given = {agent: action[agent] for agent in self._inner.agents} if self._several else action
        return self._around(self._env.step, given)

    def _has_ended(self, result: Any) -> bool:
        if self._lanes:  # lanes reset themselves
            return False
        return not self._inner.agents if self._several else bool(result[2] or result[3])

    def advance(self, steps: int, space: Any) -> None:
        """Take a number of steps, with resets at the ends of episodes."""
        for _ in range(steps):
            try:
                ended = self._has_ended(self.step(space.sample()))
            except _DiffersError:
                raise
            except Exception:
                ended = True
            if ended:
                self.reset()

    def run(self, actions: Sequence[Any]) -> list[Any]:
        """Return the results of some actions, with resets at the ends of episodes; stop if a step raises."""
        found: list[Any] = []
        for action in actions:
            try:
                result = self.step(action)
                found.append(_kept(result))
                if self._has_ended(result):
                    found.append(_kept(self.reset()))
            except (_DiffersError, CannotCopyError):
                raise
            except Exception as error:  # it may refuse a sampled action
                found.append(type(error).__name__)
                break
        return found

    def run_and_reset(self, actions: Sequence[Any]) -> list[Any]:
        """As `run`, with a reset after the last action: an episode may be longer than the actions."""
        return [*self.run(actions), _kept(self.reset())]


def _try_out(env: Any, other: Any, moment: int, seed: int) -> None:
    watched, space = _Watched(env), _actions_of(env)
    space.seed(seed)
    snapshot, _ = take(env)
    watched.shared = snapshot.common
    watched.reset(seed)
    watched.advance(moment, space)
    actions = [space.sample() for _ in range(_STEPS)]
    # Save only now: sampling has moved the generator of the space, which is part of the state.
    snapshot, _ = take(env)
    watched.shared = snapshot.common
    held = watched.shared.digest()
    wanted = watched.run_and_reset(actions)
    restore(snapshot, env)
    # A save must not change the environment: one that counts reads of its attributes would be changed.
    take(env)
    _compare(watched.run_and_reset(actions), wanted, "the environment itself, restored")
    if other is None:
        return
    beside = _Watched(other)
    beside.shared = watched.shared
    beside.reset(seed + 1000)
    beside.run(actions[: 1 + moment % 7])
    restore(snapshot, other)
    _compare(beside.run_and_reset(actions), wanted, "another environment")
    wanted.pop()  # what follows does without the last reset
    restore(snapshot, env)
    restore(snapshot, other)
    mine: list[Any] = []
    theirs: list[Any] = []
    for action in actions:
        mine += watched.run([action])
        theirs += beside.run([action])
        if mine and isinstance(mine[-1], str):
            break
    _compare(mine, wanted, "the original beside another one")
    _compare(theirs, wanted, "another environment beside the original")
    if held != watched.shared.digest():
        raise _DiffersError(_CHANGES_SHARED)


def _try_among(env: Any, other: Any, make: Callable[[], Any]) -> None:
    common = _Common(env, other)
    # Copy the space: the compared environment does not repeat these samples.
    watched, space = _Watched(env), copy.deepcopy(_actions_of(env))
    space.seed(11)
    actions = [space.sample() for _ in range(_LONG_STEPS)]
    snapshot, _ = take(env)
    watched.shared = snapshot.common
    wanted = _played(watched, actions)
    common.refuse_changes()
    restore(snapshot, env)
    _go_on_among(watched, actions, wanted, other, make)


def _played(watched: _Watched, actions: Iterable[Any]) -> list[list[Any]]:
    """Return the results of some actions, until the time is over or a step raises."""
    # By its own processor time: where other programs run, it would be too few steps. It may wait for something, too.
    began, used = time.monotonic(), time.process_time()
    found: list[list[Any]] = []
    for action in actions:
        found.append(watched.run([action]))
        late = time.process_time() - used > _LONG_SECONDS or time.monotonic() - began > _LONG_WAIT
        if late or isinstance(found[-1][-1], str):
            break
    return found


def _go_on_among(
    watched: _Watched, actions: Sequence[Any], wanted: list[list[Any]], other: Any, make: Callable[[], Any]
) -> None:
    """Compare results while another environment is at a different point of its episode, and while a third is made.

    That is the situation of lanes and of a server's worlds. Shared values may change late, or only by steps at another
    point of an episode.
    """
    # Copy the space: if it belongs to the class, the compared environment uses it too.
    beside, space = _Watched(other), copy.deepcopy(_actions_of(other))
    beside.shared = watched.shared
    space.seed(12)
    beside.reset(1012)
    beside.advance(7, space)
    for number, (action, results) in enumerate(zip(actions, wanted, strict=False)):
        if number == 1:
            watched.refuse_shared_changes(lambda: _make_and_close(make))
        _compare(watched.run([action]), results, "an environment beside other ones")
        beside.advance(1, space)


def _make_and_close(make: Callable[[], Any]) -> None:
    with contextlib.closing(_one(make())) as third:
        _Watched(third).reset(5)


def _try_closing(env: Any, other: Any) -> None:
    watched = _Watched(env)
    watched.reset(7)
    space = _actions_of(env)
    space.seed(7)
    actions = [space.sample() for _ in range(_STEPS)]
    snapshot, _ = take(env)
    wanted = watched.run(actions)
    restore(snapshot, other)
    other.close()
    restore(snapshot, env)
    _compare(watched.run(actions), wanted, "the original after the other one was closed")


def _compare(found: list[Any], wanted: list[Any], what: str) -> None:
    if len(found) != len(wanted):
        raise _DiffersError(f"{what} gave {len(found)} results, not {len(wanted)}")
    for number, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        if _same(mine, theirs):
            continue
        if len(theirs) == _RESET_PARTS and not isinstance(theirs, str):
            raise _DiffersError(f"{what} did not go on as the original: {_RESETS_ANEW}")
        raise _DiffersError(f"{what} did not go on as the original: its result {number + 1} differs")


def _kept(result: Any) -> Any:
    """Return a copy of what a reset or a step returned."""
    if isinstance(result, str):
        return result
    *parts, info = result
    # Times and values that are not plain are left out of infos.
    return [*(_plain(part) for part in parts), {key: _plain(value) for key, value in _timeless(info).items()}]


def _timeless(info: Any) -> dict[Any, Any]:
    found = dict(info)
    if isinstance(found.get("episode"), dict):
        found["episode"] = {key: value for key, value in found["episode"].items() if key != "t"}
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (
            value.dtype.str,
            value.shape,
            [_plain(item) for item in value.flat] if value.dtype.hasobject else value.tobytes(),
        )
    if isinstance(value, np.generic):
        return (value.dtype.str, value.tobytes())
    if isinstance(value, float):
        return ("float", np.float64(value).tobytes())
    if isinstance(value, dict):
        return {repr(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (str, bytes, int, bool, type(None))) else None


def _same(mine: Any, theirs: Any) -> bool:
    return bool(mine == theirs)
