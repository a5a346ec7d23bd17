"""Hosts of lanes that one call steps together; their infos are joined without loss.

Gymnasium joins the infos of several environments into arrays whose dtype the first environment decides: after an int, a
float of the next environment loses its fraction. Over several worlds the first lane of each would decide. So the infos
of lanes are collected unchanged, and sent as arrays only if all lanes have a key's values in one type, else as a list
of dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState
from gymnasium.vector.utils import batch_space, iterate

from bridge.core.logs import SafeLog
from bridge.core.worlds import kinds
from bridge.core.worlds.base import answer_to, failures_in
from bridge.core.worlds.environment import EnvFacts, Result
from bridge.core.worlds.hosts import EnvHost, Host, look_up, no_episode
from bridge.core.worlds.kinds import Known, Lanes
from bridge.core.worlds.lane_vector import LaneVectorEnv, with_lanes_of_ours
from bridge.core.worlds.rewards import refuse_array_rewards
from bridge.core.worlds.settings import for_gymnasium, without_mask
from bridge.errors import Code, RequestError
from bridge.pb import bridge_pb2

__all__ = ["FinalInfos", "LanesHost", "collect_infos", "join_infos"]

_log = SafeLog(__name__)
T = TypeVar("T")


class LanesHost(Host[Lanes]):
    """Hosts lanes that one call steps together.

    A `LaneVectorEnv` takes the place of a SyncVectorEnv and steps its environments. Its infos, and those of an
    AsyncVectorEnv, are joined without loss.

    An AsyncVectorEnv cannot be used any more after one of its lanes has raised, because that ended the lane's process:
    the next reset makes another one.

    Args:
        env: The vector environment.
        facts: The description of the vector environment.
        make: Makes another one.
    """

    def __init__(self, env: Lanes, facts: EnvFacts, make: Callable[[], Known]) -> None:
        super().__init__(env, facts, make)
        self._broken: RequestError | None = None
        if "autoreset_mode" not in kinds.metadata_of(env):
            _log.info(
                "%s does not say in metadata['autoreset_mode'] when a lane that ended begins anew; it is taken to do "
                "so in the same step",
                facts.kind,
            )
        self._adopt(env)

    def _adopt(self, env: Lanes) -> None:
        facts = self.facts
        self.env = env = with_lanes_of_ours(env, facts.reward_space)
        refuse_array_rewards(env, facts.reward_space)
        inner = env.unwrapped
        self._is_async = isinstance(inner, AsyncVectorEnv)
        self._ours = inner if isinstance(inner, LaneVectorEnv) else None
        if self._ours is not None:
            self.failures, self.retried = self._ours.failed, self._ours.retried
        # Not for subclasses and wrappers, which may read or change the joined infos in their own `step`.
        self._collects = type(env) in (LaneVectorEnv, AsyncVectorEnv)
        if type(env) is AsyncVectorEnv:
            collect_infos(env)
        same_step = facts.autoreset is AutoresetMode.SAME_STEP
        self._finals = FinalInfos(facts) if same_step and not self._collects else None
        if self.facts.steps_lanes:
            self.lanes = [EnvHost(lane, self.facts.of_lane, self.make) for lane in kinds.local_parts(env)]

    def reset(self, seed: object, options: Any) -> Result:
        """Reset all lanes, or those of the option `reset_mask`."""
        if self._broken is not None:
            with failures_in("its construction"):
                env = self.make()
                assert isinstance(env, VectorEnv), "the same function made lanes before"
                self._adopt(env)
            # Only after another one is made: otherwise calls would go to the closed one.
            self._broken = None
            # All lanes are new, so a reset cannot leave any unchanged.
            options, _ = without_mask(options)
        info: Any
        self.fresh = False
        if self._ours is self.env:
            observation, info = self._ours.reset_lanes(seed, *without_mask(options))
        else:
            given = options if self._ours is not None else for_gymnasium(options)
            observation, info = self._guarded("reset", super().reset, seed, given)
        return observation, join_infos(info, self.env.num_envs) if self._collects else info

    def step(self, action: object) -> Result:
        """Step all lanes."""
        info: Any
        if self._ours is self.env:
            observation, reward, terminated, truncated, info = self._ours.step_lanes(action)
        else:
            observation, reward, terminated, truncated, info = self._guarded("step", super().step, action)
        if self._ours is not None and self._ours.notes:
            self.notes += self._ours.notes.take()
        if self._collects:
            info = join_infos(info, self.env.num_envs)
        elif self._finals is not None:
            info = self._finals.read(info, terminated, truncated, self.notes)
        return observation, reward, terminated, truncated, info

    @property
    def can_place(self) -> bool:  # type: ignore[override]
        """True if the lanes are stepped one by one here, and no wrapper is around all of them."""
        return self._ours is self.env

    @property
    def can_place_all(self) -> bool:  # type: ignore[override]
        """True if all its lanes are in one object of this process."""
        return self._ours is not self.env and not self._is_async

    def _stepped_here(self) -> LaneVectorEnv:
        if self._ours is None or self._ours is not self.env:
            raise RequestError(Code.UNIMPLEMENTED, f"the lanes of {self.facts.kind} are not stepped one by one")
        return self._ours

    def _set_callee(self, lane: int, callee: Any) -> None:
        self._stepped_here().set_callee(lane, callee)

    def _set_env(self, lane: int, env: Any) -> None:
        self._stepped_here().envs[lane] = env
        if self.lanes:
            self.lanes = [EnvHost(one, self.facts.of_lane, self.make) for one in kinds.local_parts(self.env)]

    def newest(self, lane: int | None) -> tuple[Any, Any]:
        """Return the last observation and info of a lane, or of all; raises RequestError if no episode runs."""
        if lane is None:
            return self._newest_of_all()
        found = self._stepped_here().newest(lane)
        if found is None:
            raise no_episode(lane)
        return found

    def _newest_of_all(self) -> tuple[Any, Any]:
        result = self.result
        if result is None:
            raise no_episode(None)
        if len(result) > 2 and self.facts.autoreset is not AutoresetMode.SAME_STEP:
            ended = np.flatnonzero(np.asarray(result[2], np.bool_) | np.asarray(result[3], np.bool_))
            if ended.size:
                text = f"the episode of lane {ended[0]} has ended, and the next one begins by the next step: step first"
                raise RequestError(Code.FAILED_PRECONDITION, text)
        return result[0], result[-1]

    def _take_placed(self) -> Result:
        if self._ours is None or self._ours is not self.env:
            return self._placed[0]  # of all
        observations, infos = self._ours.place_lanes(self._placed)
        return observations, join_infos(infos, self.env.num_envs)

    def call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Call a public method, or read a public attribute, on the lanes that the request names."""
        return self._guarded(f"call of {request.name}", super().call, request)

    def _guarded(self, where: str, function: Callable[..., T], *args: object) -> T:
        """Call the environment, unless a failure made it unusable; note such a failure."""
        if self._broken is not None:
            raise self._broken
        try:
            return function(*args)
        except BaseException as error:
            vector = self.env.unwrapped
            # A lane of an AsyncVectorEnv that raises ends its process, as one that crashes does. Gymnasium does not
            # restart it: the whole vector environment must be made again.
            gone = isinstance(error.__cause__ or error, (EOFError, ConnectionError))
            if isinstance(vector, AsyncVectorEnv) and (gone or None in vector.parent_pipes):
                # Without the traceback, which the failed call has reported.
                first = str(answer_to(where, error)).partition("\n")[0]
                text = f"the lanes cannot be used since one of them failed, reset all of them: {first}"
                self._broken = RequestError(Code.FAILED_PRECONDITION, text)
                # Otherwise `close` would wait for the answer of a process that has ended.
                vector._state = AsyncState.DEFAULT  # noqa: SLF001
                self.env.close(terminate=True)
            raise

    def frame(self) -> list[object]:
        """Return what `render()` returns now, a list with one entry per lane."""
        with failures_in("render"):
            frame: Any = self.env.render()
        if isinstance(frame, np.ndarray) and frame.ndim == 3 and frame.shape[-1] in (3, 4):
            # One picture of all lanes, as from a simulator; an empty one means None.
            return [frame if frame.size else None] * self.env.num_envs
        return list(kinds.each_lane(frame, self.env.num_envs))

    def _find(self, name: str, lanes: list[int]) -> list[object]:
        # Lanes of a simulator are in this process, but not as separate objects.
        if self.facts.resets_lanes:
            return super()._find(name, lanes)
        value = look_up(partial(kinds.attribute_of, self.env, name), name)
        each = [value] * self.env.num_envs if callable(value) else kinds.each_lane(value, self.env.num_envs)
        return [each[lane] for lane in lanes]

    def _call(self, name: str, args: list[object], kwargs: dict[str, object], lanes: list[int]) -> list[object]:
        # `VectorEnv.call` is always for all lanes.
        if set(lanes) < set(range(self.env.num_envs)):
            return super()._call(name, args, kwargs, lanes)
        if kinds.local_parts(self.env):
            # For NOT_FOUND: `SyncVectorEnv.call` raises the AttributeError of a lane, which would be reported as a
            # failure of the environment.
            self._find(name, [0])
        # In its process an AttributeError would end the lane, and with it the whole vector environment.
        elif self._is_async and not all(cast("Any", self.env).call("has_wrapper_attr", name)):
            raise RequestError(Code.NOT_FOUND, f"the environment has no method or attribute {name!r}")
        if not self.facts.resets_lanes:
            results = look_up(partial(kinds.call_simulator, self.env, name, args, kwargs), name)
        else:
            results = list(cast("Any", self.env).call(name, *args, **kwargs))
        return [results[lane] for lane in lanes]

    def _set(self, name: str, value: list[object]) -> None:
        cast("Any", self.env).set_attr(name, value)  # Sync and Async have this method, VectorEnv does not


def collect_infos(env: AsyncVectorEnv) -> None:
    """Change an AsyncVectorEnv to return its infos as `{lane: info}`."""

    def keep(infos: dict[Any, dict[str, object]], info: dict[str, object], lane: int) -> dict[Any, dict[str, object]]:
        if info:
            # In SAME_STEP mode it is called twice for an ended lane: with the last info, and with the first one of the
            # next episode. Later values win; the last info is under separate keys, `final_obs` and `final_info`.
            infos[lane] = {**infos.get(lane, {}), **info}
        return infos

    env._add_info = keep  # type: ignore[method-assign,assignment]  # noqa: SLF001 - Gymnasium's hook for it


def join_infos(infos: Mapping[int, Mapping[str, object]], lanes: int) -> dict[str, object] | list[Mapping[str, object]]:
    """Join the infos of some lanes.

    Returns:
        Arrays over the lanes with `_key` masks, as `VectorEnv._add_info` makes them, if that loses nothing; otherwise a
        list with each lane's dict.
    """
    if not infos:
        return {}
    if not _uniform(list(infos.values())):
        return [infos.get(lane, {}) for lane in range(lanes)]
    joiner = VectorEnv[Any, Any, Any]()
    joiner.num_envs = lanes
    joined: dict[str, object] = {}
    for lane, info in infos.items():
        joined = joiner._add_info(joined, dict(info), lane)  # noqa: SLF001 - its rules are the ones to follow
    return joined


def _uniform(infos: list[Mapping[str, object]]) -> bool:
    """True if the keys are in one order in all dicts, and the values of each key are of one type."""
    kinds: dict[str, tuple[int, object]] = {}
    nested: dict[str, list[Mapping[str, object]]] = {}
    for info in infos:
        last = -1
        for key, value in info.items():
            # A final observation may be of any space, which a list of dicts carries unchanged. An environment's own key
            # that begins with an underscore could not be distinguished from a mask.
            if not isinstance(key, str) or key == "final_obs" or key.startswith("_"):
                return False
            kind: object = (value.dtype, value.shape) if isinstance(value, np.ndarray) else type(value)
            place, known = kinds.setdefault(key, (len(kinds), kind))
            # An array over the lanes would turn arrays of shape () into NumPy's scalars.
            if kind != known or place < last or (isinstance(value, np.ndarray) and not value.ndim):
                return False
            # An integer beyond int64 fits no array of integers.
            if type(value) is int and not -(2**63) <= value < 2**63:
                return False
            last = place
            if isinstance(value, Mapping):
                nested.setdefault(key, []).append(value)
    return all(_uniform(inner) for inner in nested.values())


class FinalInfos:
    """Finds the final observations in the infos of a simulator that resets lanes in the step that ends them.

    Gymnasium's name for them is `final_obs`, formerly `final_observation`; simulators put a batch of all lanes there.

    Args:
        facts: The description of the simulator.
    """

    def __init__(self, facts: EnvFacts) -> None:
        self._kind = facts.kind
        self._lanes = facts.num_envs or 0
        self._space = batch_space(facts.observation_space, self._lanes)
        self._told = False

    def read(self, info: object, terminated: object, truncated: object, notes: list[str]) -> object:
        """Return a step's infos with `final_obs` as in Gymnasium: an array of objects, None for lanes without one.

        Args:
            info: The simulator's infos.
            terminated: The flags of the lanes.
            truncated: The flags of the lanes.
            notes: Gets a note, once, if there are no final observations.
        """
        ended = np.asarray(terminated, np.bool_) | np.asarray(truncated, np.bool_)
        if not ended.any() or not isinstance(info, Mapping):
            return info
        # Also without their `_key` masks, which are written again.
        rest = {key: value for key, value in info.items() if str(key).lstrip("_") not in _FINAL}
        found = next((info[key] for key in _FINAL[:2] if info.get(key) is not None), None)
        if found is not None:
            # Gymnasium's own form is an array of objects; ManiSkill and others use arrays with a row for each lane.
            batch = found if isinstance(found, np.ndarray) and found.dtype == object else iterate(self._space, found)
            rows = np.full(self._lanes, None)
            for lane, row in enumerate(batch):
                # A batch also has a row for each running lane.
                rows[lane] = row if ended[lane] else None
            rest.update(final_obs=rows, _final_obs=ended)
        elif not self._told:
            self._told = True
            notes.append(
                f"{self._kind} resets a lane in the step that ends it, and gives no final observation (final_obs in "
                "its infos): what a truncated episode ended with is not known"
            )
        if (final_info := info.get("final_info")) is not None:
            rest.update(final_info={**final_info} if isinstance(final_info, Mapping) else final_info, _final_info=ended)
        return rest


_FINAL = ("final_obs", "final_observation", "final_info")
