"""Lanes that are stepped one after the other in one thread, and fail separately.

`LaneVectorEnv` returns bit for bit what Gymnasium's SyncVectorEnv returns, as long as no environment fails. If one
fails, SyncVectorEnv raises, and the episodes of all lanes are lost. Here only the episode of that lane ends.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from bridge.core.encoding import values
from bridge.core.encoding.space_json import published_space
from bridge.core.encoding.spaces import Layout
from bridge.core.encoding.tensors import Array
from bridge.core.gymnasium_versions import SyncLanes
from bridge.core.worlds.base import answer_to
from bridge.core.worlds.environment import kept
from bridge.core.worlds.kinds import Lanes
from bridge.core.worlds.rewards import Rewards
from bridge.core.worlds.settings import without_mask
from bridge.errors import Code, RequestError, TensorError

__all__ = ["LaneInfos", "LaneVectorEnv", "with_lanes_of_ours"]

LaneInfos = dict[int, Mapping[str, object]]
"""The infos of the lanes that have one."""
# The client makes as many attempts for a slot of a single environment.
_RESET_ATTEMPTS = 3


def with_lanes_of_ours(env: Lanes, reward_space: Space[object] | None) -> Lanes:
    """Return a vector environment with a LaneVectorEnv in place of its SyncVectorEnv, if it contains one.

    A subclass of SyncVectorEnv is left unchanged: its own `step` may do more.

    Args:
        env: The vector environment, perhaps in wrappers, which keep their places.
        reward_space: The reward space of one environment; None: rewards are numbers.
    """
    outer: Any = None
    inner: Any = env
    while isinstance(inner, VectorWrapper):
        outer, inner = inner, inner.env
    if type(inner) is not SyncVectorEnv:
        return env
    lanes = LaneVectorEnv(inner, reward_space)
    # Gymnasium closes an unreferenced vector environment, but its environments are still used.
    inner.closed = True
    if outer is None:
        return lanes
    outer.env = lanes
    return env


class LaneVectorEnv(SyncLanes):
    """A SyncVectorEnv in which a failing lane ends only its own episode.

    A lane fails if its environment raises in `reset` or `step`, or returns an observation outside its space, an invalid
    reward, flags without a truth value, or an info that is no dict. It is truncated: with its last observation, reward
    0.0, and the reason as `error` in its info. It begins its next episode as an ended lane does.

    A reset that raises is repeated at once. If it raises each time, the lane is truncated too, and the next step tries
    again. In the mode SAME_STEP, the step that should have been the first of the next episode is truncated. If no lane
    can begin, and so none is in an episode, the call raises.

    The second call after a call overwrites the observations that `reset_lanes` and `step_lanes` returned.

    Args:
        vector: The vector environment; this object takes over its environments.
        reward_space: The reward space of one environment; None: rewards are numbers.
    """

    KEPT = frozenset(("env_fns", "failed", "retried", "notes"))
    """Attributes that are not part of the lanes' situation: other objects refer to them."""

    def __init__(
        self,
        vector: SyncVectorEnv[Any, Any],
        reward_space: Space[object] | None,
    ) -> None:
        vars(self).update(vars(vector))
        lanes = self.num_envs
        self.envs = list(self.envs)
        self._callees: list[Any] = self.envs
        """The object to call for each lane: its environment, or an object in its place."""
        self.failed: dict[int, str] = {}
        """The reasons of failures in the last call, by lane; always the same dict."""
        self.retried: list[str] = []
        """Errors of resets that were repeated, for the log; the reader removes them."""
        self.notes = values.Notes()
        """Notes for clients on the results of environments."""
        self._layout = Layout(published_space(self.single_observation_space), "observation")
        # For text, graphs and sequences a batch is a tuple of the environments' own objects. For these spaces each
        # observation is checked, and copied, because an environment may change it in its next step.
        self._holds_objects = any(leaf.kind not in ("array", "scalar") for leaf in self._layout.leaves)
        leaf = self._layout.leaves[0] if self._layout.single else None
        dtype: Any = leaf.space.dtype if leaf is not None and leaf.kind == "array" else None
        shape = (leaf.space.shape or ()) if leaf is not None else ()
        self._array = None if dtype is None else (dtype, shape)
        """Dtype and shape of observations that are one array; None: they are not."""
        self._joined_array = None if dtype is None else (dtype, (lanes, *shape))
        """Dtype and shape of the batch of all lanes' observations."""
        # NumPy silently writes int64 into int8, even with loss. Integers of another dtype are checked.
        self._integers = dtype if dtype is not None and dtype.kind in "iu" else None
        self._rewards_read = Rewards(reward_space, None)
        self._reward_dtype = np.dtype(np.float64) if reward_space is None else reward_space.dtype
        self._no_reward: Any = 0.0 if reward_space is None else np.zeros(reward_space.shape or (), reward_space.dtype)
        # Two in turn: a lane's last observation is still in one of them when its next observation is found invalid.
        empty: list[Any] = [create_empty_array(self.single_observation_space, n=lanes, fn=np.zeros) for _ in range(2)]
        self._batch, self._next_batch = empty
        self._splits_arrays = type(self.action_space) in (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)
        # For a Dict or Tuple without parts, Gymnasium's `iterate` returns no row at all.
        self._iterates = not _lacks_parts(self.single_action_space)
        self._began = False
        self._seen: list[Any] = [None] * lanes
        """The newest observation of each lane."""
        self._over = [False] * lanes
        """True for a lane without a running episode."""
        self._told: dict[int, Mapping[str, object]] = {}
        """The newest info of each lane; a lane that had none is missing."""
        self._unbegun: dict[int, str] = {}
        """In the mode SAME_STEP: why lanes could not begin their next episodes in the step that ended the last ones."""

    # The interface of SyncVectorEnv

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environments as `reset_lanes`; the infos are joined as in SyncVectorEnv."""
        rest, mask = without_mask(options)
        observations, infos = self.reset_lanes(seed, rest, mask)
        if mask is not None:
            # As in SyncVectorEnv: environments may share an array, and each writes into it.
            observations = self._concatenated()
        return self._copied(observations), self._joined(infos)

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Step the environments as `step_lanes`; the infos are joined as in SyncVectorEnv."""
        observations, rewards, terminations, truncations, infos = self.step_lanes(actions)
        return self._copied(observations), rewards, terminations, truncations, self._joined(infos)

    def close_extras(self, **kwargs: Any) -> None:
        """Close all environments; raises the first error."""
        failures = []
        for env in self.envs:
            try:
                env.close()
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def _copied(self, observations: Any) -> Any:
        return copy.deepcopy(observations) if self.copy else observations

    def _joined(self, infos: LaneInfos) -> dict[str, Any]:
        joined: dict[str, Any] = {}
        for lane, info in infos.items():
            joined = self._add_info(joined, dict(info), lane)
        return joined

    # Single lanes

    def reset_lanes(self, seed: Any, options: dict[str, Any] | None, mask: Any = None) -> tuple[Any, LaneInfos]:
        """Reset the environments, or those of a mask.

        A reset that raises is repeated at once. If it raises each time, the lane is in `failed`, has its last
        observation, and begins again in the next step.

        Args:
            seed: An integer seeds lane i with `seed + i`; a list has each lane's seed; None: no seed.
            options: The options for each environment.
            mask: The lanes, bools `(num_envs,)`; None: all.

        Returns:
            The batch of all lanes' observations, unchanged for lanes outside the mask; and the infos of the lanes that
            were reset.

        Raises:
            Exception: The error of a lane's environment that has no observation yet.
            RequestError: The error of an environment, if no lane is in an episode.
        """
        count = self.num_envs
        seeds = [seed + lane for lane in range(count)] if isinstance(seed, (int, np.integer)) else seed
        if seeds is not None and len(seeds) != count:
            raise ValueError(f"expected a seed for each of {count} lanes, got {len(seeds)}")
        chosen = range(count) if mask is None else np.asarray(mask).nonzero()[0].tolist()
        self.failed.clear()
        infos: LaneInfos = {}
        for lane in chosen:
            self._unbegun.pop(lane, None)
            try:
                self._begin(lane, infos, seed=None if seeds is None else seeds[lane], options=options)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self._fail(lane, "reset", error, infos)
                self._unbegun[lane] = self.failed[lane]
        if self.failed and all(self._over):
            raise self._first_failure()
        observations = self._with_rows(chosen) if self._began and mask is not None else self._concatenated()
        self._began = True
        self._told = infos if mask is None else {**self._told, **{lane: {} for lane in chosen}, **infos}
        return observations, infos

    def step_lanes(self, actions: Any) -> tuple[Any, Array, Array, Array, LaneInfos]:
        """Step the environments. One whose episode is over begins the next one, as the autoreset mode says.

        Args:
            actions: A batch of `action_space`.

        Returns:
            The batch of observations, the rewards, of shape `(num_envs,)` and the shape of the reward space,
            terminations and truncations, bools `(num_envs,)`, and the infos of the lanes that have one.

        Raises:
            gymnasium.error.ResetNeeded: In the mode DISABLED, a lane's episode is over.
            RequestError: The error of an environment, if no lane could begin an episode.
        """
        if self.autoreset_mode is AutoresetMode.DISABLED and any(self._over):
            ended = [lane for lane, over in enumerate(self._over) if over]
            raise gymnasium.error.ResetNeeded(f"expected lanes in an episode, but {ended} have ended; reset them first")
        if self.failed:
            self.failed.clear()
        same_step = self.autoreset_mode is AutoresetMode.SAME_STEP
        infos: LaneInfos = {}
        count = self.num_envs
        rewards, terminations, truncations = [self._no_reward] * count, [False] * count, [False] * count
        seen, over, looks, integers = self._seen, self._over, self._holds_objects, self._integers
        checks, plain_reward = looks or integers is not None, self._rewards_read.plain_type
        begun: list[int] = []
        for lane, (env, action) in enumerate(zip(self._callees, self._split(actions), strict=True)):
            try:
                if over[lane]:
                    begun.append(lane)
                    if same_step:
                        # There is no transition between the last observation of an episode and the first one of
                        # another: this step is reported as a separate episode, which was cut off.
                        truncations[lane], infos[lane] = True, {"error": self._unbegun[lane]}
                    else:
                        self._begin(lane, infos, checks=checks)
                else:
                    observation, reward, terminated, truncated, info = env.step(action)
                    # Nearly all environments return these types and values. All others take the slower path.
                    if type(reward) is not plain_reward:
                        reward = self._read_reward(reward)
                    ends = False
                    if terminated is not False or truncated is not False:
                        terminated, truncated = bool(terminated), bool(truncated)
                        ends = terminated or truncated
                    if checks or ends:
                        if looks or (integers is not None and getattr(observation, "dtype", None) is not integers):
                            observation = self._checked(observation)
                        elif same_step and ends:
                            # The reset's observation replaces it in the batch, where it would have been checked.
                            self._checked(observation)
                    if info:
                        infos[lane] = _copied_info(info)
                    seen[lane], rewards[lane] = observation, reward
                    if ends:
                        terminations[lane], truncations[lane], over[lane] = terminated, truncated, True
            except KeyboardInterrupt:
                raise
            # Any exception, as for a single environment: some libraries' do not derive from `Exception`.
            except BaseException as error:
                self._fail(lane, "reset" if over[lane] else "step", error, infos)
                truncations[lane] = True
            if same_step and over[lane]:
                self._begin_at_once(lane, infos)
        try:
            observations = self._concatenated()
        except Exception:
            for lane in self._fail_wrong_ones(infos, begun):
                rewards[lane], terminations[lane], truncations[lane] = self._no_reward, False, True
                if same_step:
                    self._begin_at_once(lane, infos)
            observations = self._concatenated()
        if len(begun) == self.num_envs and all(over):
            raise self._first_failure()
        self._told = infos
        flags = np.array(terminations, np.bool_), np.array(truncations, np.bool_)
        return observations, np.array(rewards, self._reward_dtype), *flags, infos

    # Messages

    def set_callee(self, lane: int, callee: Any) -> None:
        """Call an object in place of a lane's environment."""
        self._callees = [*self._callees[:lane], callee, *self._callees[lane + 1 :]]

    def newest(self, lane: int) -> tuple[Any, Mapping[str, object]] | None:
        """Return a lane's last observation and info, not copied; None: it has no running episode."""
        if not self._began or self._over[lane]:
            return None
        return self._seen[lane], self._told.get(lane, {})

    def place_lanes(self, placed: Mapping[int, tuple[Any, Any]]) -> tuple[Any, LaneInfos]:
        """Put lanes into the given situations of their environments; return the result as of a reset of these lanes."""
        self.failed.clear()
        for lane, (observation, _) in placed.items():
            self._seen[lane], self._over[lane] = observation, False
            self._unbegun.pop(lane, None)
        infos: LaneInfos = {lane: _copied_info(info) for lane, (_, info) in placed.items()}
        self._told = {**self._told, **infos}
        observations = self._concatenated()
        self._began = True
        return observations, infos

    def _split(self, actions: Any) -> Iterable[Any]:
        """Return the action of each lane."""
        if self._splits_arrays and isinstance(actions, np.ndarray):
            return actions  # the same rows as from `iterate`, without its checks
        if self._iterates:
            return iterate(self.action_space, actions)
        return _rows(self.single_action_space, actions, self.num_envs)

    def _begin(
        self, lane: int, infos: LaneInfos, *, checks: bool = True, attempts: int = _RESET_ATTEMPTS, **given: Any
    ) -> None:
        """Reset an environment, and store the result; raises the last error if each attempt fails.

        Args:
            lane: The lane.
            infos: Gets the lane's info.
            checks: True: check the observation now. False: an invalid one is found when it is put into the batch.
            attempts: The most attempts.
            given: The arguments for the environment.
        """
        options = given.get("options")
        while True:
            attempts -= 1
            try:
                # A copy of the options, because an environment may remove those that it has read.
                if options is not None:
                    given["options"] = kept(options) if options else {}
                result = self._callees[lane].reset(**given)
                observation, info = result
                if checks:
                    observation = self._checked(observation, notes=self.notes)
                # In the mode SAME_STEP the lane's info also has the end of the episode before.
                told = {**infos.get(lane, {}), **_copied_info(info)} if info else None
                break
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                if not attempts:
                    raise
                self.retried.append(answer_to("reset", error).message)
        if told is not None:
            infos[lane] = told
        self._seen[lane], self._over[lane] = observation, False

    def _begin_at_once(self, lane: int, infos: LaneInfos) -> None:
        """Begin the next episode in the step that ended the last one (SAME_STEP)."""
        # A copy, because the environment may write its first observation into the same array.
        self._seen[lane] = copy.deepcopy(self._seen[lane])
        infos[lane] = {"final_obs": self._seen[lane], "final_info": infos.get(lane, {})}
        self._unbegun.pop(lane, None)
        try:
            self._begin(lane, infos)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # as in `step_lanes`
            message = answer_to("reset", error).message
            self.failed[lane] = self._unbegun[lane] = infos[lane]["error"] = message  # type: ignore[index]

    def _fail(self, lane: int, where: str, error: BaseException, infos: LaneInfos) -> None:
        """End the episode of a lane whose environment failed; raises the error if there is no observation yet."""
        if not self._began:
            raise error
        self.failed[lane] = answer_to(where, error).message
        infos[lane] = {"error": self.failed[lane]}
        rows = iterate(self.observation_space, self._batch)
        # A copy: the row is a view of an array that will be overwritten.
        self._seen[lane] = copy.deepcopy(next(row for number, row in enumerate(rows) if number == lane))
        self._over[lane] = True

    def _first_failure(self) -> RequestError:
        return RequestError(Code.INTERNAL, next(iter(self.failed.values())))

    # Results of environments

    def _read_reward(self, reward: Any) -> Any:
        """Return a reward as a float, or as an array of the reward space; raises RequestError if it is invalid."""
        read = self._rewards_read.read(reward, self.notes)
        # A copy, because several environments may write their rewards into the same array.
        return np.array(read) if isinstance(read, np.ndarray) else read

    def _checked(self, observation: Any, notes: values.Notes | None = None) -> Any:
        """Return an observation in a form that fits a batch, converted if needed.

        It is copied if its batch would contain the object itself.

        Args:
            observation: The observation of an environment.
            notes: Gets a note if the dtype differs; None: there are no notes.

        Raises:
            RequestError: The observation is not in the observation space.
        """
        if type(observation) is np.ndarray and (observation.dtype, observation.shape) == self._array:
            return observation
        try:
            arrays = self._layout.pack(observation, rounding=True)
        except TensorError as error:
            text = f"the environment's observation is not of its observation_space: {error}"
            raise RequestError(Code.INTERNAL, text) from error
        if notes is not None:
            for index in range(len(arrays)):
                self._layout.note_type(index, observation, notes)
        # As for a single environment: int64 is cast to uint8 if nothing is lost, which NumPy does not do by itself.
        if not self._holds_objects:
            return self._layout.unpack(arrays)
        observation = kept(observation)
        space: Any = self.single_observation_space
        empty: Any = create_empty_array(space, n=1, fn=np.zeros)
        try:
            concatenate(space, [observation], empty)
        except Exception:
            observation = self._layout.unpack(arrays)
        return observation

    def _fail_wrong_ones(self, infos: LaneInfos, begun: Sequence[int]) -> list[int]:
        """Convert observations that do not fit a batch; fail the lanes of invalid ones.

        Args:
            infos: Get the reasons.
            begun: The lanes that were reset, which are reset again.

        Returns:
            The lanes that failed.
        """
        wrong = []
        for lane, observation in enumerate(self._seen):
            try:
                try:
                    self._seen[lane] = self._checked(observation)
                except RequestError as error:
                    if lane not in begun:
                        raise
                    self.retried.append(error.message)
                    infos.pop(lane, None)
                    self._begin(lane, infos, attempts=_RESET_ATTEMPTS - 1)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # as in `step_lanes`
                self._fail(lane, "reset" if lane in begun else "step", error, infos)
                wrong.append(lane)
        return wrong

    def _with_rows(self, lanes: Iterable[int]) -> Any:
        """Return the last batch with the newest observations of some lanes, which were checked before."""
        if self._joined_array is None:
            return self._concatenated()
        self._batch = batch = self._batch.copy()
        for lane in lanes:
            batch[lane] = self._seen[lane]
        return batch

    def _concatenated(self) -> Any:
        """Return all lanes' newest observations as a batch; raises if one does not fit."""
        # All of them, even if few are new: environments may share an array, and each writes into it.
        if self._joined_array is not None:
            # The same as `concatenate` for arrays that are in the space. That takes twice as long, because it checks
            # each of them several times. If an array is not in the space, NumPy raises, or converts it wrongly.
            try:
                joined = np.array(self._seen)
                if (joined.dtype, joined.shape) == self._joined_array:
                    self._batch = joined
                    return joined
            except Exception:  # without `suppress`, whose calls would be made in each step
                pass
        space: Any = self.single_observation_space
        observations = concatenate(space, self._seen, self._next_batch)
        self._batch, self._next_batch = observations, self._batch
        return observations


def _lacks_parts(space: Space[Any]) -> bool:
    """True if a space is, or contains, a Dict or a Tuple without parts."""
    if not isinstance(space, (spaces.Dict, spaces.Tuple)):
        return False
    parts = list(space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces)
    return not parts or any(_lacks_parts(part) for part in parts)


def _rows(space: Space[Any], batch: Any, count: int) -> list[Any]:
    """Return the rows of a batch, as `iterate` does, but also for a space without parts.

    Args:
        space: The space of one row: batches of other spaces may be tuples too.
        batch: The batch.
        count: The number of its rows.
    """
    if isinstance(space, spaces.Dict):
        parts = {key: _rows(part, batch[key], count) for key, part in space.spaces.items()}
        return [{key: part[row] for key, part in parts.items()} for row in range(count)]
    if isinstance(space, spaces.Tuple):
        columns = [_rows(part, column, count) for part, column in zip(space.spaces, batch, strict=True)]
        return [tuple(column[row] for column in columns) for row in range(count)]
    return list(iterate(batch_space(space, count), batch))


def _copied_info(info: Any) -> dict[str, object]:
    """Return a copy of an info, because environments may share one dict; raises TypeError if it is no dict."""
    if not isinstance(info, Mapping):
        raise TypeError(f"expected a dict as info, got {info!r:.80} of type {type(info).__name__}")
    # A deep copy: several environments may also write into one array or list.
    try:
        return {key: kept(value) for key, value in info.items()}
    except RecursionError:  # it contains itself
        return dict(info)
