"""The agent of a world that has an environment: Steps as actions, and what the environment gives as observations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import numpy as np
from gymnasium.vector import AutoresetMode

from bridge.core.encoding import values
from bridge.core.encoding.names import NAMES, AttributeNames
from bridge.core.encoding.properties import PropertyTree
from bridge.core.encoding.spaces import Layout
from bridge.core.encoding.tensors import Array, Spec
from bridge.core.worlds.base import Agent, PacedWorld, answer_to
from bridge.core.worlds.environment import Result, Spaces
from bridge.core.worlds.hosts import refuse_private
from bridge.core.worlds.messages import PartOutcome, SessionMessage
from bridge.core.worlds.rewards import HELD_BY_FLOAT64, Rewards, as_number, is_held_by_float64, reward_type
from bridge.core.worlds.settings import Settings
from bridge.errors import Code, RequestError, TensorError
from bridge.pb import bridge_pb2, properties_pb2
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["AgentPacer", "EnvAgent", "InfoWriter"]

NO_INFO = values.encode_info({}, values.Notes())
"""An empty info as it travels."""
_NOT_ENDED = False, False


class AgentPacer(Protocol):
    """What an agent hands its requests to: the part of a `Pacer` that agents know."""

    steps_at_once: bool
    keeps_actions: bool
    can_place: bool

    @property
    def world(self) -> PacedWorld:
        """The world."""

    def watches(self, agent: EnvAgent) -> bool:
        """True if an agent only looks on."""

    def reset(self, agent: EnvAgent, settings: Settings, running: bool) -> None:
        """Take the settings of an agent's next sequence."""

    async def begin(self, agent: EnvAgent) -> int:
        """Start a sequence; return its state."""

    async def step(self, agent: EnvAgent, action: object) -> int:
        """Take an action; return the state that follows."""

    def act_on_arrival(self, agent: EnvAgent, action: object, actions: Mapping[int, Array]) -> float:
        """Apply the action of a Step when it comes; return when that was."""

    async def report(self, agent: EnvAgent) -> int:
        """Return the state of an agent's sequence, once there is what its Step is to be told."""

    def interrupt(self, agent: EnvAgent) -> None:
        """End a sequence because of a ResetWorld."""

    def hang_up(self, agent: EnvAgent) -> None:
        """End what an agent waits for."""

    def rest(self, agent: EnvAgent) -> bool:
        """Keep an agent without a client."""

    def leave(self, agent: EnvAgent) -> None:
        """Remove an agent."""

    def prepare(self, agent: EnvAgent, wanted: Sequence[int]) -> None:
        """Note which of an agent's `more` observations are wanted."""

    def observe(self, agent: EnvAgent, wanted: Sequence[int]) -> Mapping[int, Array]:
        """Return an agent's `more` observations."""

    def properties_of(self, agent: EnvAgent) -> PropertyTree:
        """Return what an agent adds to the tree below `world`."""

    def held(self, agent: EnvAgent) -> AbstractContextManager[None]:
        """Return a context in which nobody steps the environment."""

    def place(self, agent: EnvAgent, result: Result, lanes: Sequence[int]) -> int:
        """Have a sequence begin in the situation that the environment is in; return the state of the agent's own."""


class InfoWriter:
    """Writes the infos of one agent.

    Forms of observations, types of rewards and names of attributes are told when they change, and the client keeps
    them. A note is told once.

    Args:
        layout: Of the observations.
        plain_type: The type of rewards of which their tensor says all, until another type was told; None: there is
            none.
    """

    def __init__(self, layout: Layout, plain_type: type | None) -> None:
        self.notes = values.Notes()
        """What is to be told once."""
        self.beside: dict[str, Any] = {}
        """What the next info tells beside it: arguments of `encode_info`."""
        self.plain_type: object = plain_type
        """The type of rewards that need not be told, as in each step of nearly all environments; None: all are looked
        at."""
        self.has_forms = layout.has_forms
        """True if observations of the space may have several forms."""
        self._layout = layout
        self._form: object = None
        # The client gives each reward the type of the last one that it was told in an info.
        self._reward_type: object = float
        self._names: str | None = None

    def follow_names(self, names: str) -> None:
        """Tell the names of attributes from now on where they change; the client has read `names`."""
        self._names = names

    @property
    def follows_names(self) -> bool:
        """True if the client is to be told names that have changed."""
        return self._names is not None

    def take_names(self, names: str | None) -> None:
        """Tell the names of attributes with the next info, if they have changed; None: there are none."""
        if names is not None and names != self._names:
            self._names = names
            self.notes.rename(AttributeNames(names))

    def take_reward(self, reward: object) -> None:
        """Tell a reward with the next info, if its tensor does not say all of it."""
        if reward_type(reward) == self._reward_type and is_held_by_float64(reward):
            self.beside.pop("reward", None)
            self.plain_type = type(reward) if type(reward) in HELD_BY_FLOAT64 else None
        else:
            # Until it is told, each reward is looked at: the next one may have to be told in its place.
            self.beside["reward"], self.plain_type = reward, None

    def write(self, info: Any, observation: object, remarks: list[str]) -> bytes:
        """Return an info as it travels.

        Args:
            info: Of one environment a dict, of lanes as their vector environment returns it.
            observation: What it belongs to.
            remarks: Further notes, which are taken out of the list.
        """
        form = self._layout.form(observation)
        for remark in remarks:
            self.notes.add(remark, remark)
        remarks.clear()
        beside, self.beside = self.beside, {}
        if "reward" in beside:
            reward = beside["reward"]
            self._reward_type = reward_type(reward)
            self.plain_type = type(reward) if type(reward) in HELD_BY_FLOAT64 else None
        if form == self._form:
            if not (info or self.notes or beside):
                return NO_INFO
            return values.encode_info(info, self.notes, **beside)
        self._form = form
        return values.encode_info(info, self.notes, form, **beside)

    def write_apart(self, info: Mapping[str, Any]) -> object:
        """Return an info that travels elsewhere than in the observation `info`, as plain values.

        What it lacks since it does not travel, the next info tells: clients read no notes elsewhere.
        """
        found, self.notes.fresh, _ = values.decode_info(values.encode_info(info, self.notes))
        return found


class EnvAgent(Agent):
    """An agent of an environment, of its lanes, or one of several agents.

    It says how actions and observations travel. When it is reset and stepped, and what it is told then, is decided by
    the pacer of its world, which each of its requests is handed to.

    Args:
        pacer: The pacer of its world.
        name: Its name in the group.
        spaces: Its spaces where it is one of several agents; None: those of the environment.
        pacer_state: The pacer's state for this agent.
        more: Specs of what it is told beside what an environment gives; `Pacer.observe` has their values.
    """

    def __init__(
        self,
        pacer: AgentPacer,
        name: str,
        spaces: Spaces | None = None,
        pacer_state: Any = None,
        more: Sequence[Spec] = (),
    ) -> None:
        self.world = pacer.world
        """Where it is."""
        self.name = name
        """Its name in the group."""
        self.pacer_state = pacer_state
        """The pacer's state for this agent."""
        self._pacer = pacer
        self._facts = facts = self.world.env.facts
        self.lanes = lanes = facts.num_envs
        """The number of lanes; None: it is of a single environment, or one agent of several."""
        observation_space, action_space = spaces or facts.spaces
        self._observation_layout = Layout(observation_space, "observation", lanes)
        self._action_layout = Layout(action_space, "action", lanes)
        self.rewards = Rewards(facts.reward_space, lanes)
        """Reads the environment's rewards."""
        self.actions = dict(enumerate(self._action_layout.specs, start=1))
        # The short way of a single environment in lock-step: nobody else is asked when it is stepped.
        self.steps_at_once = self._pacer.steps_at_once and lanes is None
        self._may_leave_out_actions = self._pacer.keeps_actions
        # Integers, and not a dict of them, from which an environment may take what it has read.
        integers = self._action_layout.single and self._action_layout.leaves[0].kind == "scalar"
        self.keeps_actions = lanes is None and integers
        shape = () if lanes is None else (lanes,)
        flags = [
            self.rewards.spec,
            Spec.number("discount", shape, np.float64, np.asarray(0.0), np.asarray(1.0)),
            Spec.number("terminated", shape, np.bool_),
            Spec.number("truncated", shape, np.bool_),
            Spec.number("info", (-1,), np.uint8),
        ]
        self.observations = dict(enumerate([*self._observation_layout.specs, *flags, *more], start=1))
        first = self._first_flag = len(self._observation_layout.specs) + 1
        self._first_more, self._has_more = first + len(flags), bool(more)
        self.usual = (*range(1, first + 1), first + 2, first + 3, first + 4)
        """The UIDs that our own client asks for: of the observation, reward, terminated, truncated and info."""
        self.asks_as_usual = False
        """True if the Steps from now on ask for these."""
        self.answer: list[Any] | None = None
        """What the Step at hand is told of these, where its pacer has said it; None: the newest observations."""
        self._plain = self._observation_layout.single and self._observation_layout.leaves[0].kind == "array"
        self._dtype, self._shape = self.observations[1].dtype, self.observations[1].shape
        self.infos = InfoWriter(self._observation_layout, self.rewards.plain_type)
        """Writes the infos of its Steps, and what they tell beside."""
        self.observation: object = None
        """The observation that its Step is told; None: there is none yet."""
        self.info: Any = {}
        """The info that its Step is told."""
        self.reward: Array = np.zeros(self.rewards.spec.shape, self.rewards.spec.dtype)
        """The reward that its Step is told; an item a lane."""
        self.terminated: Array = np.zeros(shape, np.bool_)
        """Whether its episode has terminated; an item a lane."""
        self.truncated: Array = np.zeros(shape, np.bool_)
        """Whether its episode was truncated; an item a lane."""
        # Of a single environment's step: to write three arrays and read them again took a twentieth of a step.
        self._scalars: tuple[float, bool, bool] | None = None
        """Reward and flags that are not in the arrays yet; None: they are."""
        self._failed: Sequence[int] = ()
        """The lanes that failed in the last transition, each alone."""

    @property
    def plays(self) -> bool:
        """True if it takes part in the world, and does not only watch."""
        return not self.watches

    @property
    def watches(self) -> bool:
        """True if its actions and resets change nothing."""
        return self._pacer.watches(self)

    def follow_names(self, names: str) -> None:
        """Send the names of attributes with the info after a reset that changes them; the client has read `names`."""
        self.infos.follow_names(names)

    def tell_names(self) -> None:
        """Send the names of attributes with the next info, if the reset at hand has changed them."""
        if self.infos.follows_names:
            self.infos.take_names(self.world.env.properties().get(NAMES))

    # Requests

    def prepare(self, uids: Sequence[int]) -> None:
        """Note which observations the Steps that follow ask for."""
        self.asks_as_usual = tuple(uids) == self.usual
        if self._has_more:
            self._pacer.prepare(self, [uid - self._first_more for uid in uids])

    def reset(self, settings: Settings, running: bool) -> None:
        """Take the settings of the next sequence, and end the running one (D-14)."""
        self._pacer.reset(self, settings, running)

    async def begin(self) -> int:
        """Start a sequence; return its state, RUNNING."""
        return await self._pacer.begin(self)

    async def step(self, actions: Mapping[int, Array]) -> int:
        """Step the environment, or hand in an action for its next step."""
        action = self.decode(actions)
        # Not by `apply`, which each result of a step that waits would pass through once more.
        return await (self.apply(action) if self.steps_at_once else self._pacer.step(self, action))

    def decode(self, actions: Mapping[int, Array]) -> object:
        """Return the environment's action; None: the last one goes on, where the pacer has it so."""
        if self._may_leave_out_actions and not actions:
            return None
        try:
            return self._action_layout.unpack([actions[uid] for uid in self.actions], check=True)
        except KeyError as error:
            missing = self.actions[error.args[0]]
            text = f"the Step lacks the action {missing.name!r}: expected {missing.describe()}"
            raise RequestError(Code.INVALID_ARGUMENT, text) from None
        except TensorError as error:
            raise RequestError(Code.INVALID_ARGUMENT, f"bad action: {error}") from error

    def act(self, actions: Mapping[int, Array]) -> float:
        """Apply the actions of a Step when it comes; return when that was."""
        listed = {uid: array for uid, array in actions.items() if uid in self.actions}
        return self._pacer.act_on_arrival(self, self.decode(listed), actions)

    async def report(self) -> int:
        """Return the state of the sequence, once there is what the Step at hand is to be told."""
        return await self._pacer.report(self)

    async def apply(self, action: object) -> int:
        """Step the environment, or hand in an action; truncation alone interrupts, termination terminates (D-13)."""
        if not self.steps_at_once:
            return await self._pacer.step(self, action)
        return self.take_step(await self.world.env.step(action))

    def take_step(self, result: Result) -> int:
        """Take what the environment's `step` returned; return the state that follows (D-13)."""
        try:
            self.observation, reward, terminated, truncated, self.info = result
            ended = terminated or truncated
            flags = (bool(terminated), bool(truncated)) if ended else _NOT_ENDED
            if type(reward) is self.infos.plain_type:
                self._scalars = reward, *flags
            else:
                self._scalars = None
                self.take_reward(reward)
                self.terminated[...], self.truncated[...] = flags
        except Exception as error:
            raise answer_to("step", error, self._facts.kind) from error
        if ended:
            self.world.episodes += 1
        return pb.TERMINATED if terminated else pb.INTERRUPTED if truncated else pb.RUNNING

    def _fill_arrays(self) -> None:
        """Write the scalars of the newest step into the arrays, for those who read these."""
        if self._scalars is not None:
            self.reward[...], self.terminated[...], self.truncated[...] = self._scalars
            self._scalars = None

    def interrupt(self) -> None:
        """End the sequence because of a ResetWorld."""
        self._pacer.interrupt(self)

    def hang_up(self) -> None:
        """End its wait."""
        self._pacer.hang_up(self)

    def rest(self) -> bool:
        """Stay in the world without a client; return False where others would wait for it."""
        return self._pacer.rest(self)

    def leave(self) -> None:
        """Leave the world, which goes on (D-16)."""
        self._pacer.leave(self)

    # What its Step is told

    def take_reset(self, result: Result) -> None:
        """Take what the environment's `reset` returned."""
        try:
            self.observation, self.info = result
        except RequestError:
            raise
        except BaseException as error:
            raise answer_to("reset", error, self._facts.kind) from error
        self._scalars = None
        for array in (self.reward, self.terminated, self.truncated):
            array.fill(0)
        self.infos.beside.clear()
        self.tell_names()

    def take_lanes(self, result: Result) -> None:
        """Take what the environment's `step` returned for all lanes."""
        try:
            self.observation, reward, terminated, truncated, self.info = result
            self.reward[...] = self.rewards.read(reward, self.infos.notes)
            self.terminated[...] = terminated
            self.truncated[...] = truncated
        except RequestError:
            raise
        except BaseException as error:
            raise answer_to("step", error, self._facts.kind) from error

    def take_failures(self) -> Sequence[int]:
        """Tell which lanes failed in the last call of the environment, and have the server log why; return them."""
        env = self.world.env
        failures, retried = env.failures, env.retried
        if failures or self._failed:
            self._failed = tuple(failures)
            if failures:
                self.infos.beside["failed"] = self._failed
        if failures or retried:
            for message in (*retried, *failures.values()):
                self.world.report_failure(message)
            retried.clear()
        return self._failed

    def take_reward(self, reward: object) -> None:
        """Take the reward of a single environment. What its tensor does not say, the next info tells."""
        if type(reward) is self.infos.plain_type:
            self.reward[...] = reward
            return
        typed = self.rewards.typed(reward, self.infos.notes)
        if self.reward.ndim:
            self.reward[...] = typed
            return
        self.reward[...] = as_number(typed)
        self.infos.take_reward(typed)

    def take_cut(self) -> None:
        """Tell that the sequence was ended from outside: truncated, with the last observations once more."""
        self._fill_arrays()
        self.reward[...] = 0
        for told in ("reward", "failed"):
            self.infos.beside.pop(told, None)
        self.truncated[...] = True
        # The info of the last transition was told with that.
        self.info, self._failed = {}, ()

    @property
    def newest(self) -> tuple[object, object] | None:
        """Observation and info of the running episode; None: none runs."""
        self._fill_arrays()
        over = self.lanes is None and bool(self.terminated or self.truncated)
        return None if over or self.observation is None else (self.observation, self.info)

    @property
    def ended_lanes(self) -> Array | None:
        """True for each lane that the next step resets in place of stepping it, `(lanes,)`; None: there are none.

        Also None where lanes begin anew within the step that ends their episode (SAME_STEP).
        """
        if self.lanes is None or self._facts.autoreset is not AutoresetMode.NEXT_STEP:
            return None
        return self.terminated | self.truncated

    # Observations

    def observe(self, uids: Sequence[int]) -> Mapping[int, Array]:
        """Return observations of the last transition."""
        if self.answer is not None:
            return self.by_uid(self.values(uids))
        self._fill_arrays()
        first, more = self._first_flag, self._first_more
        # First, since what they tell may add to the notes of the info.
        told = self._pacer.observe(self, [uid - more for uid in uids if uid >= more]) if self._has_more else {}
        # The second stands for the discount, which is computed only for those who ask for it.
        flags = (self.reward, self.terminated, self.terminated, self.truncated)
        found: dict[int, Array] = {}
        for uid in uids:
            if uid < first:
                found[uid] = self._leaf(uid)
            elif uid == first + 1:
                found[uid] = 1.0 - self.terminated  # D-21: the discount, which our own clients do not ask for
            elif uid < first + len(flags):
                found[uid] = flags[uid - first]
            elif uid < more:
                found[uid] = np.frombuffer(self._write_info(), np.uint8)
            else:
                found[uid] = told[uid - more]
        return found

    def values(self, uids: Sequence[int]) -> list[Array | float | bool | bytes]:
        """Return observations of the last transition in order, as they are at hand."""
        if self.answer is not None:
            answer, self.answer = self.answer, None
            return answer
        # What our own client asks for is read without a loop over UIDs: a step took 1756 bytecodes in place of 1901.
        if uids != self.usual:
            return super().values(uids)
        seen: Any = self.observation
        as_spec = self._plain and type(seen) is np.ndarray and seen.dtype == self._dtype and seen.shape == self._shape
        # An empty info, which is not encoded anew in each step.
        infos, remarks = self.infos, self.world.env.notes
        told = self.info or infos.beside or infos.notes.fresh or remarks or infos.has_forms
        if as_spec and not told and self._scalars is not None:  # as in nearly each step of a single environment
            return [seen, *self._scalars, NO_INFO]
        parts = (seen,) if as_spec else [self._leaf(uid) for uid in range(1, self._first_flag)]
        info, reward = self._write_info() if told or infos.notes.fresh else NO_INFO, self.reward
        if self._scalars is not None:
            return [*parts, *self._scalars, info]
        if self.lanes is not None:
            return [*parts, reward, self.terminated, self.truncated, info]
        return [*parts, reward if reward.ndim else reward.item(), self.terminated.item(), self.truncated.item(), info]

    def by_uid(self, parts: Sequence[Any]) -> dict[int, Array]:
        """Return what `values` gives of the usual observations as `observe` does."""
        arrays = [np.frombuffer(part, np.uint8) if isinstance(part, bytes) else np.asarray(part) for part in parts]
        return dict(zip(self.usual, arrays, strict=True))

    def _write_info(self) -> bytes:
        """Return the info as it travels, with what the client is to be told beside it."""
        return self.infos.write(self.info, self.observation, self.world.env.notes)

    def _is_as_spec(self, seen: Any) -> bool:
        """True if an observation is its one tensor already."""
        return self._plain and type(seen) is np.ndarray and seen.dtype == self._dtype and seen.shape == self._shape

    def _leaf(self, uid: int) -> Array:
        """Return one tensor of the environment's observation."""
        observation: Any = self.observation
        if self._is_as_spec(observation):
            return cast("Array", observation)
        try:
            self._observation_layout.note_type(uid - 1, observation, self.infos.notes)
            return self._observation_layout.pack_leaf(uid - 1, observation)
        except TensorError as error:
            raise _wrong_observation(error) from error

    def begun(self, lanes: list[int]) -> tuple[list[bytes], bytes]:
        """Return how lanes began: their rows of each tensor, as `Value.Begun` holds them, and the info."""
        seen: Any = self.observation
        if self._is_as_spec(seen):
            return [seen.take(lanes, 0).tobytes()], self._write_info()
        try:
            layout = self._observation_layout
            return [layout.pack_rows(index, seen, lanes) for index in range(len(layout.leaves))], self._write_info()
        except TensorError as error:
            raise _wrong_observation(error) from error

    # Properties and calls

    def properties(self) -> PropertyTree:
        """Return the tree below `world`, as this agent sees it."""
        return self.world.properties().merged(self._pacer.properties_of(self))

    async def answer_property(self, request: properties_pb2.PropertyRequest) -> properties_pb2.PropertyResponse:
        """Read, write or list a property that the environment computes."""
        self.world.refuse_if_over()
        env = self.world.env
        # One of several agents draws what there is before its first reset, or fails in some way of its own.
        if request.read_property.key == "world.frame" and env.facts.agents and not env.times.reset.count:
            raise RequestError(Code.FAILED_PRECONDITION, "no frame before the first Step: no sequence has begun")
        return await env.answer_property(request)

    async def call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Call a public method of the environment, or read a public attribute, on some lanes."""
        refuse_private(request.name)  # in a world that has ended, too
        self.world.refuse_if_over()
        return await self.world.env.call(request)

    async def run_message(self, message: SessionMessage, request: bytes) -> PartOutcome:
        """Have the part of a message beside the environment answer a request."""
        self.world.refuse_if_over()
        if message.form.places and not self._pacer.can_place:
            text = f"a {message.form.name!r} is for worlds in lock-step that one client has; this one is another kind"
            raise RequestError(Code.UNIMPLEMENTED, text)
        return await self.world.env.run_message(message, request)

    @property
    def home(self) -> object:
        """Where the environment lives."""
        return self.world.env.home

    def held(self) -> AbstractContextManager[None]:
        """Return a context in which nobody else steps the environment."""
        return self._pacer.held(self)

    def place(self, result: Result, lanes: Sequence[int]) -> int:
        """Begin a sequence in the situation that the environment is in, as `begin` does after a reset."""
        return self._pacer.place(self, result, lanes)

    def forget_failures(self) -> None:
        """Tell no more which lanes failed in the last transition."""
        self._failed = ()


def _wrong_observation(error: TensorError) -> RequestError:
    return RequestError(Code.INTERNAL, f"the environment's observation is not of its observation_space: {error}")
