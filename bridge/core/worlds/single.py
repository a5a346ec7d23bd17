"""The world of one Gymnasium environment, or of the lanes of one vector environment: one agent, in lock-step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from gymnasium.vector import AutoresetMode

from bridge.core.encoding import values
from bridge.core.encoding.attribute_names import AttributeNames
from bridge.core.encoding.names import NAMES
from bridge.core.encoding.properties import ENCODED, TEXT, Property, PropertyTree
from bridge.core.encoding.spaces import Layout
from bridge.core.encoding.tensors import Array, Spec
from bridge.core.worlds.base import (
    DEFAULT_PLAYER,
    OTHER_WORLD,
    Agent,
    World,
    WorldCounts,
    answer_to,
    failures_in,
)
from bridge.core.worlds.environment import Environment, Spaces
from bridge.core.worlds.hosts import refuse_private
from bridge.core.worlds.rewards import HELD_BY_FLOAT64, Rewards, as_number, is_held_by_float64, reward_type
from bridge.core.worlds.scheduling import Scheduler
from bridge.core.worlds.settings import Settings, read_reset, reading, refuse_unknown, wrong
from bridge.errors import Code, RequestError, SettingError, TensorError
from bridge.pb import bridge_pb2, properties_pb2
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["EnvAgent", "EnvWorld", "GymAgent", "GymWorld", "VectorAgent"]


_IN_NEXT_STEP, _IN_SAME_STEP = "next_step", "same_step"
NO_INFO = values.encode_info({}, values.Notes())
"""An empty info as it travels."""


def _wrong_observation(error: TensorError) -> RequestError:
    return RequestError(Code.INTERNAL, f"the environment's observation is not of its observation_space: {error}")


class EnvAgent(Agent):
    """The one agent of an environment; what one environment and many lanes have in common.

    Args:
        world: Has the environment.
        spaces: Of one environment; None: as its facts say, which of several agents are those of the first.
    """

    SETTINGS: tuple[str, ...] = ("seed", "options")

    def __init__(self, world: EnvWorld, spaces: Spaces | None = None) -> None:
        self._world = world
        self._facts = world.env.facts
        self.lanes = lanes = self._facts.num_envs
        """The number of lanes; None: it is of a single environment, or one agent of several."""
        observation_space, action_space = spaces or self._facts.spaces
        self._observation_layout = Layout(observation_space, "observation", lanes)
        self._action_layout = Layout(action_space, "action", lanes)
        self._rewards = Rewards(self._facts.reward_space, lanes)
        self.actions = dict(enumerate(self._action_layout.specs, start=1))
        # Integers, and not a dict of them, from which an environment may take what it has read.
        integers = self._action_layout.single and self._action_layout.leaves[0].kind == "scalar"
        self.keeps_actions = lanes is None and integers
        shape = () if lanes is None else (lanes,)
        flags = [
            self._rewards.spec,
            Spec.number("discount", shape, np.float64, np.asarray(0.0), np.asarray(1.0)),
            Spec.number("terminated", shape, np.bool_),
            Spec.number("truncated", shape, np.bool_),
            Spec.number("info", (-1,), np.uint8),
        ]
        self.observations = dict(enumerate([*self._observation_layout.specs, *flags], start=1))
        first = self._first_flag = len(self._observation_layout.specs) + 1
        # What our own client asks for: the observation, reward, terminated, truncated and info.
        self._usual = (*range(1, first + 1), first + 2, first + 3, first + 4)
        self._plain = self._observation_layout.single and self._observation_layout.leaves[0].kind == "array"
        self._of_spec = self.observations[1].dtype, self.observations[1].shape
        self._has_forms = self._observation_layout.has_forms
        self.pending: tuple[object, object] = (None, None)
        self._notes = values.Notes()
        self._form: object = None
        self._observation: object = None
        self._reward: Array = np.zeros(self._rewards.spec.shape, self._rewards.spec.dtype)
        # The client gives each reward the type of the last one that it was told in an info. In each step of nearly all
        # environments the reward is of `_plain_type`, and its tensor says all.
        self._reward_type: object = float
        self._plain_type: object = self._rewards.plain_type
        self._beside: dict[str, Any] = {}
        """What the next info tells beside it, arguments of `encode_info`."""
        self._terminated: Array = np.zeros(shape, np.bool_)
        self._truncated: Array = np.zeros(shape, np.bool_)
        self._info: Any = {}
        self._failed: Sequence[int] = ()
        """The lanes that failed in the last transition, each alone."""
        self._known_names: str | None = None

    def follow_names(self, names: str) -> None:
        """Send the names of attributes with the info after a reset that changes them; the client has read `names`."""
        self._known_names = names

    def _tell_names(self) -> None:
        """Send the names of attributes with the next info, if the reset at hand has changed them."""
        if self._known_names is None:
            return
        names = self._world.env.properties().get(NAMES)
        if names is not None and names != self._known_names:
            self._known_names = names
            self._notes.rename(AttributeNames(names))

    def reset(self, settings: Settings, running: bool) -> None:
        """Keep the settings for the next `begin`, so that the environment is reset once (D-14)."""
        pending = self.read_settings(settings)
        # D-14: a plain Reset between two sequences must not take back the settings of the one before it.
        if settings or running:
            self.pending = pending

    def read_settings(self, settings: Settings) -> tuple[object, object]:
        """Return the seed and the options that Reset settings give."""
        asked = read_reset(settings, self.SETTINGS, None)
        return asked.seed, asked.options

    async def begin(self) -> int:
        """Reset the environment with the settings that wait."""
        pending = self.pending
        result = await self._world.env.reset(seed=pending[0], options=pending[1])
        with failures_in("reset"):
            self._observation, self._info = result
        if self.pending is pending:  # else a ResetWorld brought others meanwhile
            self.pending = (None, None)
        for array in (self._reward, self._terminated, self._truncated):
            array[...] = 0
        self._beside.clear()
        self._tell_names()
        return pb.RUNNING

    @property
    def newest(self) -> tuple[object, object] | None:
        """Observation and info of the running episode; None: none runs."""
        over = self.lanes is None and bool(self._terminated or self._truncated)
        return None if over or self._observation is None else (self._observation, self._info)

    @property
    def ended_lanes(self) -> Array | None:
        """True for each lane that the next step resets in place of stepping it, `(lanes,)`; None: there are none."""
        return None if self.lanes is None else self._terminated | self._truncated

    def interrupt(self) -> None:
        """End the sequence by truncation, with the last observations."""
        self._reward[...] = 0
        for told in ("reward", "failed"):
            self._beside.pop(told, None)
        self._truncated[...] = True
        # The info of the last transition was told with that.
        self._info, self._failed = {}, ()

    async def step(self, actions: Mapping[int, Array]) -> int:
        """Step the environment."""
        return await self.apply(self.decode(actions))

    def decode(self, actions: Mapping[int, Array]) -> object:
        """Return the environment's action."""
        try:
            return self._action_layout.unpack([actions[uid] for uid in self.actions], check=True)
        except KeyError as error:
            missing = self.actions[error.args[0]]
            text = f"the Step lacks the action {missing.name!r}: expected {missing.describe()}"
            raise RequestError(Code.INVALID_ARGUMENT, text) from None
        except TensorError as error:
            raise RequestError(Code.INVALID_ARGUMENT, f"bad action: {error}") from error

    def observe(self, uids: Sequence[int]) -> Mapping[int, Array]:
        """Return observations of the last transition."""
        first = self._first_flag
        # The second stands for the discount, which is computed only for those who ask for it.
        flags = (self._reward, self._terminated, self._terminated, self._truncated)
        found: dict[int, Array] = {}
        for uid in uids:
            if uid < first:
                found[uid] = self._leaf(uid)
            elif uid == first + 1:
                found[uid] = 1.0 - self._terminated  # D-21: the discount, which our own clients do not ask for
            elif uid < first + len(flags):
                found[uid] = flags[uid - first]
            else:
                found[uid] = np.frombuffer(self._encode_info(), np.uint8)
        return found

    def values(self, uids: Sequence[int]) -> list[Array | float | bool | bytes]:
        """Return observations of the last transition in order, as they are at hand."""
        # What our own client asks for is read without a loop over UIDs: a step took 1756 bytecodes in place of 1901.
        if uids != self._usual:
            return super().values(uids)
        seen: Any = self._observation
        as_spec = self._plain and type(seen) is np.ndarray and (seen.dtype, seen.shape) == self._of_spec
        parts = (seen,) if as_spec else [self._leaf(uid) for uid in range(1, self._first_flag)]
        # An empty info, which is not encoded anew in each step.
        told = self._info or self._beside or self._notes.fresh or self._world.env.notes or self._has_forms
        info, reward = self._encode_info() if told else NO_INFO, self._reward
        if self.lanes is not None:
            return [*parts, reward, self._terminated, self._truncated, info]
        return [*parts, reward if reward.ndim else reward.item(), self._terminated.item(), self._truncated.item(), info]

    def _encode_info(self) -> bytes:
        """Return the info as it travels, with what the client is to be told beside it."""
        env, form = self._world.env, self._observation_layout.form(self._observation)
        if env.notes:
            for note in env.notes:
                self._notes.add(note, note)
            env.notes.clear()
        # Forms and types are told when they change, and the client keeps them.
        beside, self._beside = self._beside, {}
        if "reward" in beside:
            reward = beside["reward"]
            self._reward_type = reward_type(reward)
            self._plain_type = type(reward) if type(reward) in HELD_BY_FLOAT64 else None
        if form == self._form:
            if not (self._info or self._notes or beside):
                return NO_INFO
            return values.encode_info(self._info, self._notes, **beside)
        self._form = form
        return values.encode_info(self._info, self._notes, form, **beside)

    def _take_reward(self, reward: object) -> None:
        """Take the reward of a single environment. What its tensor does not say, the next info tells."""
        typed = self._rewards.typed(reward, self._notes)
        if self._reward.ndim:
            self._reward[...] = typed
            return
        self._reward[...] = as_number(typed)
        if reward_type(typed) == self._reward_type and is_held_by_float64(typed):
            self._beside.pop("reward", None)
            self._plain_type = type(typed) if type(typed) in HELD_BY_FLOAT64 else None
        else:
            # Until it is told, each reward is looked at: the next one may have to be told in its place.
            self._beside["reward"], self._plain_type = typed, None

    def _leaf(self, uid: int) -> Array:
        """Return one tensor of the environment's observation."""
        observation: Any = self._observation
        if self._plain and type(observation) is np.ndarray and (observation.dtype, observation.shape) == self._of_spec:
            return cast(Array, observation)
        try:
            self._observation_layout.note_type(uid - 1, observation, self._notes)
            return self._observation_layout.pack_leaf(uid - 1, observation)
        except TensorError as error:
            raise _wrong_observation(error) from error

    def properties(self) -> PropertyTree:
        """Return the tree below `world`."""
        return self._world.properties()

    async def answer_property(self, request: properties_pb2.PropertyRequest) -> properties_pb2.PropertyResponse:
        """Read, write or list a property that the environment computes."""
        self._world.refuse_if_over()
        env = self._world.env
        # One of several agents draws what there is before its first reset, or fails in some way of its own.
        if request.read_property.key == "world.frame" and env.facts.agents and not env.times.reset.count:
            raise RequestError(Code.FAILED_PRECONDITION, "no frame before the first Step: no sequence has begun")
        return await env.answer_property(request)

    async def call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Call a public method of the environment, or read a public attribute, on some lanes."""
        refuse_private(request.name)  # in a world that has ended, too
        self._world.refuse_if_over()
        return await self._world.env.call(request)

    def leave(self) -> None:
        """Leave the world to the next agent."""
        self._world.vacate(self)


class GymAgent(EnvAgent):
    """The agent of a single environment."""

    async def apply(self, action: object) -> int:
        """Step the environment; truncation alone interrupts, termination terminates (D-13)."""
        result = await self._world.env.step(action)
        try:
            self._observation, reward, terminated, truncated, self._info = result
            if type(reward) is self._plain_type:
                self._reward[...] = reward
            else:
                self._take_reward(reward)
            self._terminated[...] = bool(terminated)
            self._truncated[...] = bool(truncated)
        except Exception as error:
            raise answer_to("step", error) from error
        if terminated or truncated:
            self._world.episodes += 1
        return pb.TERMINATED if terminated else pb.INTERRUPTED if truncated else pb.RUNNING


class VectorAgent(EnvAgent):
    """The agent of all lanes. It stays RUNNING: a lane that ended begins anew by itself, in this Step or the next.

    A client that has set the property `world.autoreset` to `same_step` gets with the answer to a Step also the answer
    to what it would ask next: the Reset of the lanes that ended, and the Step that begins their episodes. The
    environment is called as if it had asked, so observers and recordings see the same.
    """

    SETTINGS = ("seed", "options", "reset_mask")

    def __init__(self, world: EnvWorld, spaces: Spaces | None = None) -> None:
        super().__init__(world, spaces)
        self._in_same_step = False
        self._asked_as_usual = False
        self._told: list[Any] | None = None
        """The answer to the Step at hand, where the lanes that it ended have begun their next episodes since; None: the
        newest observations are the answer."""
        self._unbegun: Sequence[int] = ()
        """The lanes that the Step before ended, and that failed to begin their next episodes with it."""

    def prepare(self, uids: Sequence[int]) -> None:
        """Learn whether the Steps that follow ask for what is usual."""
        self._asked_as_usual = tuple(uids) == self._usual

    def read_settings(self, settings: Settings) -> tuple[object, object]:
        """Return the seed and the options that Reset settings give.

        An integer seeds lane i with itself + i; a list gives each lane's, -1 for none.
        """
        asked = read_reset(settings, self.SETTINGS, self.lanes)
        with reading("Reset"):
            seed, options = self._seed_of(asked.seed), asked.options
            if asked.mask.all():
                return seed, options
            if not self._facts.resets_lanes:
                raise TensorError(f"{self._facts.kind} cannot reset some of its lanes alone; reset all of them")
            return seed, {**(options or {}), "reset_mask": asked.mask}

    def _seed_of(self, seeds: int | list[int | None] | None) -> int | list[int | None] | None:
        if self._facts.resets_lanes or not isinstance(seeds, list):
            return seeds
        # Other vector environments take one integer, from which they seed all lanes.
        first = seeds[0]
        if first is not None and seeds == [first + lane for lane in range(len(seeds))]:
            return first
        if any(seed is not None for seed in seeds):
            text = f"{self._facts.kind} takes one integer seed; expected consecutive seeds, got {seeds!r:.80}"
            raise TensorError(text)
        return None

    @property
    def ended_lanes(self) -> Array | None:
        """As of `EnvAgent`; None also where lanes begin anew within the step that ends their episode (SAME_STEP)."""
        return super().ended_lanes if self._facts.autoreset is AutoresetMode.NEXT_STEP else None

    async def begin(self) -> int:
        """Reset the environment; a lane that failed has no episode, and begins anew in the next step."""
        options = self.pending[1]
        mask = options.get("reset_mask") if isinstance(options, Mapping) else None
        self._told = None
        state = await super().begin()
        self._unbegun = [] if mask is None else [lane for lane in self._unbegun if not mask[lane]]
        self._note_failures()
        self._truncated[list(self._failed)] = True
        return state

    def _note_failures(self) -> None:
        """Keep which lanes failed in the last call of the environment, and have the server log why."""
        failures, retried = self._world.env.failures, self._world.env.retried
        if failures or self._failed:
            self._failed = tuple(failures)
            if failures:
                self._beside["failed"] = self._failed
        if failures or retried:
            for message in (*retried, *failures.values()):
                self._world.report_failure(message)
            retried.clear()

    async def apply(self, action: object) -> int:
        """Step all lanes with actions of their own."""
        result = await self._world.env.step(action)
        self._note_failures()
        # Those that ended before: what failed is their reset, and no episode ended by it.
        unbegun = sum(bool(self._terminated[lane] or self._truncated[lane]) for lane in self._failed)
        with failures_in("step"):
            self._observation, reward, terminated, truncated, self._info = result
            self._reward[...] = self._rewards.read(reward, self._notes)
            self._terminated[...] = terminated
            self._truncated[...] = truncated
        ended: Array = self._terminated | self._truncated
        count = int(np.count_nonzero(ended))
        self._world.episodes += count - unbegun
        self._told = None
        if self._in_same_step and self._asked_as_usual and (count or self._unbegun):
            if self._unbegun:
                # The client takes the step in which they begin for an episode of its own, which was cut, and asks anew.
                ended[list(self._unbegun)] = True
            await self._begin_next(ended)
        return pb.RUNNING

    async def _begin_next(self, ended: Array) -> None:
        """Begin the next episodes of lanes that ended, and keep what the Step is answered."""
        # First: notes are told once, and the client reads this part first. Copies, because an environment may write
        # what it observes next into the same arrays.
        *parts, info = super().values(self._usual)
        told: list[Any] = [part.copy() for part in cast("list[Array]", parts)]
        self._unbegun = ()
        lanes = ended.nonzero()[0].tolist()
        # Messages of protobuf that stand one behind the other are read as one: the info, and what is beside it.
        beside = bridge_pb2.Value()
        begun = beside.begun
        begun.lanes.extend(lanes)
        try:
            options = None if len(lanes) == len(ended) else {"reset_mask": ended}
            result = await self._world.env.reset(seed=None, options=options)
            with failures_in("reset"):
                self._observation, self._info = result
            for array in (self._reward, self._terminated, self._truncated):
                array[...] = 0
            self._note_failures()
            if self._failed:
                self._unbegun = self._failed
                self._truncated[list(self._failed)] = True
            rows = [self._rows(index, lanes) for index in range(self._first_flag - 1)]
            info_of_reset = self._encode_info()
            begun.rows.extend(rows)
            if info_of_reset != NO_INFO:
                begun.info = info_of_reset
        except Exception as error:  # the Reset would have been refused; the step was taken all the same
            refused = answer_to("reset", error)
            if refused.code is Code.INTERNAL:
                self._world.report_failure(refused.message)
            begun.code, begun.message = int(refused.code), refused.message
        self._told = [*told, cast(bytes, info) + beside.SerializeToString()]

    def _rows(self, index: int, lanes: list[int]) -> bytes:
        """Return one tensor of the environment's observation, of some lanes alone, as `Value.Begun` holds it."""
        observation: Any = self._observation
        if self._plain and type(observation) is np.ndarray and (observation.dtype, observation.shape) == self._of_spec:
            return observation[lanes].tobytes()
        try:
            return self._observation_layout.pack_rows(index, observation, lanes)
        except TensorError as error:
            raise _wrong_observation(error) from error

    def values(self, uids: Sequence[int]) -> list[Array | float | bool | bytes]:
        """Return observations of the last transition in order."""
        if self._told is None:
            return super().values(uids)
        told, self._told = self._told, None
        return told

    def observe(self, uids: Sequence[int]) -> Mapping[int, Array]:
        """Return observations of the last transition."""
        if self._told is None:
            return super().observe(uids)
        *arrays, info = cast("list[Any]", self.values(uids))
        return dict(zip(uids, [*arrays, np.frombuffer(info, np.uint8)], strict=True))

    def properties(self) -> PropertyTree:
        """Return the tree below `world`."""
        tree = super().properties()
        if self._facts.autoreset is not AutoresetMode.NEXT_STEP or not self._facts.resets_lanes:
            return tree
        text = f"when lanes that ended begin anew for this client: {_IN_NEXT_STEP}, {_IN_SAME_STEP}"
        mode = Property("world.autoreset", TEXT, text, self._autoreset, self._set_autoreset)
        return tree.merged(PropertyTree([mode]))

    def _autoreset(self) -> str:
        return _IN_SAME_STEP if self._in_same_step else _IN_NEXT_STEP

    def _set_autoreset(self, mode: object) -> None:
        if mode not in (_IN_NEXT_STEP, _IN_SAME_STEP):
            raise wrong("world.autoreset", f"{_IN_NEXT_STEP} or {_IN_SAME_STEP}", mode)
        self._in_same_step, self._unbegun = mode == _IN_SAME_STEP, ()


class EnvWorld(World):
    """A world around an environment that one agent may use at a time.

    Args:
        name: The world's name.
        env: The environment, owned by the world from here on.
        scheduler: Runs what the world waits for.
    """

    allows_takeover = True
    """True if people may act in an agent's place."""

    def __init__(self, name: str, env: Environment, scheduler: Scheduler) -> None:
        super().__init__(name, scheduler)
        self.env: Environment = env
        """The environment that is stepped; observers put themselves in its place."""
        self.taken_over: Mapping[object, str] = {}
        """The people whose actions the step at hand takes in place of an agent's, by agent or lane."""
        self.episodes = 0
        """Episodes that ended, counted for each lane."""
        self._agent: EnvAgent | None = None
        self._closed = False
        self.pending: tuple[object, object] = (None, None)
        """Seed and options of the first sequence of the next agent."""

    @property
    def alive(self) -> bool:
        """True if the world can be joined; False once its environment's process has ended."""
        return self.env.ended is None

    @property
    def agents(self) -> int:
        """1 while an agent is in, else 0."""
        return int(self._agent is not None)

    def join(self, settings: Settings) -> Agent:
        """Let the one agent in."""
        refuse_unknown(settings, (), "JoinWorld")
        self.refuse_if_over()
        if self._agent is not None:
            remedy = f"wait until it leaves, or {OTHER_WORLD}"
            text = f"{self.title_in_messages} is full: it has 1 agent of at most 1; {remedy}"
            raise RequestError(Code.RESOURCE_EXHAUSTED, text)
        self._agent = self.make_agent()
        # A ResetWorld that came while nobody was in is for the agent that comes first.
        self._agent.pending, self.pending = self.pending, (None, None)
        return self._agent

    def applied_by(self, lane: int) -> object:
        """Return who the action is of that the environment is stepped by now, for a recording.

        Args:
            lane: Which of the environments that are stepped one by one.

        Returns:
            A text such as `agent`, `agent:PPO`, `person:Ann` or `default`; of several agents one for each, by name.
        """
        return self._agent.player if self._agent is not None else DEFAULT_PLAYER

    @property
    def clock_frames(self) -> int | None:
        """Frames of the world's clock; None: it has none."""
        return None

    @property
    def newest(self) -> tuple[object, object] | None:
        """Observation and info of the running episode; None: nobody plays one."""
        return None if self._agent is None else self._agent.newest

    @property
    def ended_lanes(self) -> Array | None:
        """As of the agent that plays; None also where nobody does."""
        return None if self._agent is None else self._agent.ended_lanes

    def counts(self) -> WorldCounts:
        """Return how much it has done; a call that failed counts as a step too."""
        lanes = self.env.facts.num_envs or 1
        return WorldCounts(lanes, self.env.times.step.count * lanes, self.episodes)

    def describe(self) -> dict[str, object]:
        """Return its lanes, whether it has begun, and whether it is recorded; None: nothing could record it."""
        recording = self.env.properties().get("world.recording")
        return {
            "lanes": self.env.facts.num_envs,
            "begun": bool(self.env.times.reset.count),
            "recording": None if recording is None else recording == "on",
        }

    def refuse_if_over(self) -> None:
        """Raise where the world is destroyed, or its environment has ended by itself."""
        if self.env.ended is not None:
            raise self.env.ended
        if self._closed:
            raise self._destroyed()

    def _destroyed(self) -> RequestError:
        text = f"the world {self.name!r} was destroyed; leave, and create or join another"
        return RequestError(Code.FAILED_PRECONDITION, text)

    def prepare_reset(self, settings: Settings, caller: Agent | None) -> Callable[[], None]:
        """Keep the settings for the agent's next sequence, or for the next agent's first."""
        holder: EnvAgent | EnvWorld = self._agent or self
        # Read by an agent that is not in, because there may be none yet, and bad settings must change nothing (D-2).
        before, asked = holder.pending, self.make_agent().read_settings(settings)
        holder.pending = asked
        # Another ResetWorld, or a Reset of the agent, may have brought others since.
        return lambda: setattr(holder, "pending", before if holder.pending is asked else holder.pending)

    def make_agent(self) -> EnvAgent:
        """Return an agent that is not in."""
        raise NotImplementedError

    def vacate(self, agent: EnvAgent) -> None:
        """Make room for another agent, where this one is the world's."""
        if self._agent is agent:
            self._agent = None

    async def close(self) -> None:
        """Close the environment; one that is in a call is closed when the call returns."""
        if not self._closed:
            # First: those whose waits `stop` ends look at it.
            self._closed = True
            self.stop()
            await self.env.close(self._destroyed())

    def stop(self) -> None:
        """End what waits in a world that is closed from here on."""

    def properties(self) -> PropertyTree:
        """Return the tree below `world`."""
        name = Property("world.name", TEXT, "the world's name", lambda: self.name)
        # `count`, `p50`, `p90`, `p99` and `max` of each.
        text = "seconds in the environment's step and reset, a dict for each"
        timing = Property("world.timing", ENCODED, text, lambda: self.env.times.summary())
        return PropertyTree([name]).merged(self.env.properties()).merged(PropertyTree([timing]))


class GymWorld(EnvWorld):
    """The world of one environment, or of the lanes of a vector environment.

    Raises:
        SettingError: The vector environment does not reset its lanes by itself.
    """

    def __init__(self, name: str, env: Environment, scheduler: Scheduler) -> None:
        facts = env.facts
        if facts.num_envs is not None and facts.autoreset not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
            raise SettingError(
                "expected a vector environment whose autoreset mode is NEXT_STEP or SAME_STEP, got "
                f"{facts.autoreset} from {facts.kind}; the client's BlockingReset gives the other modes"
            )
        super().__init__(name, env, scheduler)

    def make_agent(self) -> EnvAgent:
        """Return an agent that is not in."""
        return GymAgent(self) if self.env.facts.num_envs is None else VectorAgent(self)
