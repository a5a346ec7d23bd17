"""The agent of a world with an environment: it converts Steps to actions, and results to observations."""

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
"""An encoded empty info."""
_NOT_ENDED = False, False


class AgentPacer(Protocol):
    """The methods of a `Pacer` that agents call."""

    steps_at_once: bool
    keeps_actions: bool
    can_place: bool

    @property
    def world(self) -> PacedWorld:
        """The world."""

    def watches(self, agent: EnvAgent) -> bool:
        """True if an agent only watches."""

    def reset(self, agent: EnvAgent, settings: Settings, running: bool) -> None:
        """Store the settings of an agent's next sequence."""

    async def begin(self, agent: EnvAgent) -> int:
        """Start a sequence; return its state."""

    async def step(self, agent: EnvAgent, action: object) -> int:
        """Apply an action; return the resulting state."""

    def act_on_arrival(self, agent: EnvAgent, action: object, actions: Mapping[int, Array]) -> float:
        """Apply the action of a Step when it arrives; return the time of arrival."""

    async def report(self, agent: EnvAgent) -> int:
        """Wait until there is an answer to an agent's Step; return the state of its sequence."""

    def interrupt(self, agent: EnvAgent) -> None:
        """End a sequence because of a ResetWorld."""

    def hang_up(self, agent: EnvAgent) -> None:
        """End an agent's wait."""

    def rest(self, agent: EnvAgent) -> bool:
        """Keep an agent whose client has left."""

    def leave(self, agent: EnvAgent) -> None:
        """Remove an agent."""

    def prepare(self, agent: EnvAgent, wanted: Sequence[int]) -> None:
        """Store which of an agent's `more` observations are requested."""

    def observe(self, agent: EnvAgent, wanted: Sequence[int]) -> Mapping[int, Array]:
        """Return an agent's `more` observations."""

    def properties_of(self, agent: EnvAgent) -> PropertyTree:
        """Return an agent's properties, below `world`."""

    def held(self, agent: EnvAgent) -> AbstractContextManager[None]:
        """Return a context manager in which nobody steps the environment."""

    def place(self, agent: EnvAgent, result: Result, lanes: Sequence[int]) -> int:
        """Begin a sequence in the environment's current state; return the state of the agent's sequence."""


class InfoWriter:
    """Writes the infos of one agent.

    Forms of observations, types of rewards and names of attributes are sent when they change; the client remembers
    them. A note is sent once.

    Args:
        layout: The layout of observations.
        plain_type: The type of rewards that their tensor represents completely, until another type was sent; None:
            no type.
    """

    def __init__(self, layout: Layout, plain_type: type | None) -> None:
        self.notes = values.Notes()
        """Notes to send once."""
        self.beside: dict[str, Any] = {}
        """Additional arguments of `encode_info` for the next info."""
        self.plain_type: object = plain_type
        """The type of rewards that the info need not repeat, the usual case; None: every reward is checked."""
        self.has_forms = layout.has_forms
        """True if observations of the space may have several forms."""
        self._layout = layout
        self._form: object = None
        # The client converts each reward to the last type that an info has sent.
        self._reward_type: object = float
        self._names: str | None = None

    def follow_names(self, names: str) -> None:
        """Send changed names of attributes from now on; the client has read `names`."""
        self._names = names

    @property
    def follows_names(self) -> bool:
        """True if changed names must be sent to the client."""
        return self._names is not None

    def take_names(self, names: str | None) -> None:
        """Send the names of attributes with the next info if they have changed; None: there are no names."""
        if names is not None and names != self._names:
            self._names = names
            self.notes.rename(AttributeNames(names))

    def take_reward(self, reward: object) -> None:
        """Send a reward with the next info if its tensor does not represent it completely."""
        if reward_type(reward) == self._reward_type and is_held_by_float64(reward):
            self.beside.pop("reward", None)
            self.plain_type = type(reward) if type(reward) in HELD_BY_FLOAT64 else None
        else:
            # Check each reward until an info is sent: a later reward may replace this one.
            self.beside["reward"], self.plain_type = reward, None

    def write(self, info: Any, observation: object, remarks: list[str]) -> bytes:
        """Encode an info.

        Args:
            info: A dict for one environment; for lanes the infos of the vector environment.
            observation: The observation that it belongs to.
            remarks: Further notes; the list is cleared.
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
        """Return an info as plain values, for sending it elsewhere than in the observation `info`.

        Values that cannot be sent are left out, and noted in the next info, because clients read notes only there.
        """
        found, self.notes.fresh, _ = values.decode_info(values.encode_info(info, self.notes))
        return found


class EnvAgent(Agent):
    """The agent of an environment or of its lanes, or one of several agents.

    It encodes and decodes actions and observations, and forwards each request to the pacer of its world. The pacer
    decides when the environment is reset and stepped, and what the agent is told.

    Args:
        pacer: The pacer of its world.
        name: Its name in the group.
        spaces: Its spaces if it is one of several agents; None: the spaces of the environment.
        pacer_state: The pacer's state for this agent.
        more: Specs of additional observations; `Pacer.observe` returns their values.
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
        """The world that it has joined."""
        self.name = name
        """Its name in the group."""
        self.pacer_state = pacer_state
        """The pacer's state for this agent."""
        self._pacer = pacer
        self._facts = facts = self.world.env.facts
        self.lanes = lanes = facts.num_envs
        """The number of lanes; None: it has a single environment, or is one of several agents."""
        observation_space, action_space = spaces or facts.spaces
        self._observation_layout = Layout(observation_space, "observation", lanes)
        self._action_layout = Layout(action_space, "action", lanes)
        self.rewards = Rewards(facts.reward_space, lanes)
        """Reads the environment's rewards."""
        self.actions = dict(enumerate(self._action_layout.specs, start=1))
        # A fast path for a single environment in lock-step, which steps without asking the pacer.
        self.steps_at_once = self._pacer.steps_at_once and lanes is None
        self._may_leave_out_actions = self._pacer.keeps_actions
        # Integers only: an environment may change a dict.
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
        """The UIDs that our own client requests: observation, reward, terminated, truncated and info."""
        self.asks_as_usual = False
        """True if the current and later Steps request these."""
        self.answer: list[Any] | None = None
        """The values of these for the current Step, if the pacer has set them; None: the newest observations."""
        self._plain = self._observation_layout.single and self._observation_layout.leaves[0].kind == "array"
        self._dtype, self._shape = self.observations[1].dtype, self.observations[1].shape
        self.infos = InfoWriter(self._observation_layout, self.rewards.plain_type)
        """Encodes the infos of its Steps, with their additions."""
        self.observation: object = None
        """The observation for its Step; None: there is none yet."""
        self.info: Any = {}
        """The info for its Step."""
        self.reward: Array = np.zeros(self.rewards.spec.shape, self.rewards.spec.dtype)
        """The reward for its Step; one item for each lane."""
        self.terminated: Array = np.zeros(shape, np.bool_)
        """True if its episode has terminated; one item for each lane."""
        self.truncated: Array = np.zeros(shape, np.bool_)
        """True if its episode was truncated; one item for each lane."""
        # Writing and reading three arrays took a twentieth of the time of a single environment's step.
        self._scalars: tuple[float, bool, bool] | None = None
        """Reward and flags that are not in the arrays yet; None: the arrays are up to date."""
        self._failed: Sequence[int] = ()
        """The lanes that failed in the last transition."""

    @property
    def plays(self) -> bool:
        """True if it plays, and does not only watch."""
        return not self.watches

    @property
    def watches(self) -> bool:
        """True if its actions and resets change nothing."""
        return self._pacer.watches(self)

    def follow_names(self, names: str) -> None:
        """Send the names of attributes with the info after a reset that changes them; the client has read `names`."""
        self.infos.follow_names(names)

    def tell_names(self) -> None:
        """Send the names of attributes with the next info if the current reset has changed them."""
        if self.infos.follows_names:
            self.infos.take_names(self.world.env.properties().get(NAMES))

    # Requests

    def prepare(self, uids: Sequence[int]) -> None:
        """Store which observations the following Steps request."""
        self.asks_as_usual = tuple(uids) == self.usual
        if self._has_more:
            self._pacer.prepare(self, [uid - self._first_more for uid in uids])

    def reset(self, settings: Settings, running: bool) -> None:
        """Store the settings of the next sequence, and end the running one (D-14)."""
        self._pacer.reset(self, settings, running)

    async def begin(self) -> int:
        """Start a sequence; return its state, RUNNING."""
        return await self._pacer.begin(self)

    async def step(self, actions: Mapping[int, Array]) -> int:
        """Step the environment, or record an action for its next step."""
        action = self.decode(actions)
        # Do not call `apply`, which would add one more coroutine for a step that waits.
        return await (self.apply(action) if self.steps_at_once else self._pacer.step(self, action))

    def decode(self, actions: Mapping[int, Array]) -> object:
        """Return the environment's action; None: the last one is repeated, if the pacer supports that."""
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
        """Apply the actions of a Step when it arrives; return the time of arrival."""
        listed = {uid: array for uid, array in actions.items() if uid in self.actions}
        return self._pacer.act_on_arrival(self, self.decode(listed), actions)

    async def report(self) -> int:
        """Wait until there is an answer to the current Step; return the state of the sequence."""
        return await self._pacer.report(self)

    async def apply(self, action: object) -> int:
        """Step the environment, or record an action. TERMINATED has precedence over INTERRUPTED (D-13)."""
        if not self.steps_at_once:
            return await self._pacer.step(self, action)
        return self.take_step(await self.world.env.step(action))

    def take_step(self, result: Result) -> int:
        """Store the result of the environment's `step`; return the resulting state (D-13)."""
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
        """Write the scalars of the newest step into the arrays."""
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
        """Stay in the world without a client; return False if others would wait for it."""
        return self._pacer.rest(self)

    def leave(self) -> None:
        """Leave the world, which goes on (D-16)."""
        self._pacer.leave(self)

    # Results

    def take_reset(self, result: Result) -> None:
        """Store the result of the environment's `reset`."""
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
        """Store the result of the environment's `step` for all lanes."""
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
        """Report the lanes that failed in the last call of the environment, log their errors, and return them."""
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
        """Store the reward of a single environment. If its tensor loses something, the next info adds it."""
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
        """Report that the sequence was ended from outside: truncated, with the last observations repeated."""
        self._fill_arrays()
        self.reward[...] = 0
        for told in ("reward", "failed"):
            self.infos.beside.pop(told, None)
        self.truncated[...] = True
        # The info of the last transition was sent already.
        self.info, self._failed = {}, ()

    @property
    def newest(self) -> tuple[object, object] | None:
        """Observation and info of the running episode; None: no episode runs."""
        self._fill_arrays()
        over = self.lanes is None and bool(self.terminated or self.truncated)
        return None if over or self.observation is None else (self.observation, self.info)

    @property
    def ended_lanes(self) -> Array | None:
        """True for each lane that the next step resets instead of stepping, `(lanes,)`; None: there are none.

        Also None if lanes begin their next episodes in the step that ends the last ones (SAME_STEP).
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
        # Do this first, because it may add notes to the info.
        told = self._pacer.observe(self, [uid - more for uid in uids if uid >= more]) if self._has_more else {}
        # The second item is a placeholder for the discount, which is computed only on request.
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
        """Return observations of the last transition in order, without converting them to arrays."""
        if self.answer is not None:
            answer, self.answer = self.answer, None
            return answer
        # A fast path for our own client, without a loop over UIDs: a step takes 1756 bytecodes instead of 1901.
        if uids != self.usual:
            return super().values(uids)
        seen: Any = self.observation
        as_spec = self._plain and type(seen) is np.ndarray and seen.dtype == self._dtype and seen.shape == self._shape
        # Do not encode an empty info in each step.
        infos, remarks = self.infos, self.world.env.notes
        told = self.info or infos.beside or infos.notes.fresh or remarks or infos.has_forms
        if as_spec and not told and self._scalars is not None:  # the usual case for a single environment
            return [seen, *self._scalars, NO_INFO]
        parts = (seen,) if as_spec else [self._leaf(uid) for uid in range(1, self._first_flag)]
        info, reward = self._write_info() if told or infos.notes.fresh else NO_INFO, self.reward
        if self._scalars is not None:
            return [*parts, *self._scalars, info]
        if self.lanes is not None:
            return [*parts, reward, self.terminated, self.truncated, info]
        return [*parts, reward if reward.ndim else reward.item(), self.terminated.item(), self.truncated.item(), info]

    def by_uid(self, parts: Sequence[Any]) -> dict[int, Array]:
        """Convert the result of `values(usual)` to the form of `observe`."""
        arrays = [np.frombuffer(part, np.uint8) if isinstance(part, bytes) else np.asarray(part) for part in parts]
        return dict(zip(self.usual, arrays, strict=True))

    def _write_info(self) -> bytes:
        """Return the encoded info with its additions."""
        return self.infos.write(self.info, self.observation, self.world.env.notes)

    def _is_as_spec(self, seen: Any) -> bool:
        """True if an observation is an array in the exact form of its tensor."""
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
        """Return the first observations of lanes, as rows of each tensor for `Value.Begun`, and the info."""
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
        """Return the properties below `world`, as this agent sees them."""
        return self.world.properties().merged(self._pacer.properties_of(self))

    async def answer_property(self, request: properties_pb2.PropertyRequest) -> properties_pb2.PropertyResponse:
        """Read, write or list a property that the environment computes."""
        self.world.refuse_if_over()
        env = self.world.env
        # Before the first reset, an environment of several agents would draw something undefined, or fail.
        if request.read_property.key == "world.frame" and env.facts.agents and not env.times.reset.count:
            raise RequestError(Code.FAILED_PRECONDITION, "no frame before the first Step: no sequence has begun")
        return await env.answer_property(request)

    async def call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Call a public method of the environment, or read a public attribute, on some lanes."""
        refuse_private(request.name)  # even if the world is over
        self.world.refuse_if_over()
        return await self.world.env.call(request)

    async def run_message(self, message: SessionMessage, request: bytes) -> PartOutcome:
        """Let the message's part beside the environment answer a request."""
        self.world.refuse_if_over()
        if message.form.places and not self._pacer.can_place:
            text = (
                f"a message {message.form.name!r} needs a lock-step world with one client; this world is another kind"
            )
            raise RequestError(Code.UNIMPLEMENTED, text)
        return await self.world.env.run_message(message, request)

    @property
    def home(self) -> object:
        """The process of the environment; equal for environments in the same process."""
        return self.world.env.home

    def held(self) -> AbstractContextManager[None]:
        """Return a context manager in which nobody else steps the environment."""
        return self._pacer.held(self)

    def place(self, result: Result, lanes: Sequence[int]) -> int:
        """Begin a sequence in the environment's current state, like `begin` after a reset."""
        return self._pacer.place(self, result, lanes)

    def forget_failures(self) -> None:
        """Forget which lanes failed in the last transition."""
        self._failed = ()


def _wrong_observation(error: TensorError) -> RequestError:
    return RequestError(Code.INTERNAL, f"the environment's observation is not of its observation_space: {error}")
