"""The world of a PettingZoo parallel environment: each agent is a connection, and all of them step together (D-22).

A sequence begins when all that must be there have sent their first Step; from then on the environment steps each time
that every agent's action is in. What happens where one is missing is the world's declared policy (`MissingAgent`).
An agent is missing when nobody has its seat, when its client left or died, when it sent Reset, or when its Step does
not come within `agent_timeout`. An agent that ends early, or resets, waits in its next Step for the next sequence.

The environments' lock is held for `reset` and `step` alone, never while an agent waits for another.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from gymnasium import spaces

from bridge.errors import Code, RequestError, SettingError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.properties import ENCODED, TEXT, Property, PropertyTree
from bridge.space_json import published_space, space_to_json
from bridge.tensors import Array, unpack_tensor
from bridge.worlds.access import ParallelAccess
from bridge.worlds.base import Agent, Lock, refuse_unknown
from bridge.worlds.gym import EnvAgent, EnvWorld

__all__ = ["MissingAgent", "MultiAgent", "MultiAgentWorld", "Teamwork", "default_action"]


class MissingAgent(str, enum.Enum):
    """What a world does where an agent is missing."""

    WAIT = "wait"
    """Wait for it, or for another client that takes its seat, up to the deadline; then the Steps of those who wait
    are refused with DEADLINE_EXCEEDED, and may be sent again. An agent that sent Reset is played by default actions."""
    DEFAULT = "default"
    """Go on with a default action in its place: at once where it is not playing, after the deadline where it is."""
    END = "end"
    """End the sequence: each other agent gets its observations once with INTERRUPTED."""


@dataclasses.dataclass(frozen=True)
class Teamwork:
    """How the agents of a world are coordinated."""

    missing_agent: MissingAgent | str = MissingAgent.WAIT
    """What is done where an agent is missing."""
    agent_timeout: float = 30.0
    """Seconds that a Step waits for the other agents."""
    default_action: Callable[[Any, Any, Any], Any] | None = None
    """Gives the action of a missing agent from its id, its last observation and its action space; None:
    `default_action`."""

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "missing_agent", MissingAgent(self.missing_agent))
        except ValueError:
            known = ", ".join(policy.value for policy in MissingAgent)
            raise SettingError(f"expected missing_agent to be one of {known}, got {self.missing_agent!r}") from None
        if not isinstance(self.agent_timeout, (int, float)) or not self.agent_timeout > 0:
            raise SettingError(f"expected agent_timeout to be a positive number of seconds, got {self.agent_timeout!r}")
        if self.default_action is not None and not callable(self.default_action):
            raise SettingError(
                f"expected default_action to be a callable (agent, observation, space), got {self.default_action!r}"
            )


def default_action(agent: Any, observation: Any, space: Any) -> Any:
    """Return an action that does little: the first that is allowed, zeros within the bounds, or else a sample.

    Args:
        agent: The agent's id.
        observation: What it saw last; of a dict with `action_mask` the mask is obeyed.
        space: Its action space.
    """
    if isinstance(space, spaces.Discrete):
        mask = observation.get("action_mask") if isinstance(observation, Mapping) else None
        first = int(np.argmax(mask)) if mask is not None and np.any(mask) else 0
        return space.dtype.type(int(space.start) + first)
    if isinstance(space, spaces.Box):
        return np.clip(np.zeros(space.shape, space.dtype), space.low, space.high)
    if isinstance(space, spaces.MultiDiscrete):
        return np.array(space.start)
    if isinstance(space, spaces.MultiBinary):
        return np.zeros(space.shape, space.dtype)
    if isinstance(space, spaces.Dict):
        return {key: default_action(agent, None, item) for key, item in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(default_action(agent, None, item) for item in space.spaces)
    return space.sample()


@dataclasses.dataclass
class _Joint:
    """One joint step while its actions come in."""

    actions: dict[str, Any] = dataclasses.field(default_factory=dict)
    running: bool = False
    done: bool = False
    error: RequestError | None = None


class MultiAgent(EnvAgent):
    """The seat of one agent."""

    may_wait = True
    _world: MultiAgentWorld

    def __init__(self, world: MultiAgentWorld, env: Any, name: str, observation_space: Any, action_space: Any) -> None:
        super().__init__(world, env, observation_space, action_space, None)
        self.name = name
        self.sequence = -1
        """The sequence that it last took part in."""
        self.playing = False
        """Whether an action of it is expected."""
        self.outcome: int | None = None
        """How its sequence ended, until a Step has told."""
        self.absent = False
        """The sequence that it asked for began without it."""
        self.gone = False
        """Its client has hung up."""
        self._gain = 0.0

    def reset(self, settings: Mapping[str, pb.Tensor], running: bool) -> None:
        """Give up the running sequence; seed and options are for the next one, which begins for all."""
        before, self.pending = self.pending, (None, None)
        try:
            super().reset(settings, running)
            self._world.keep(*self.pending)
        finally:
            self.pending = before
        if running:
            self._world.drop(self)

    def begin(self) -> int:
        """Wait for the next sequence, or enter the running one."""
        return self._world.begin(self)

    def step(self, actions: Mapping[int, Array]) -> int:
        """Hand in an action and wait for the joint step."""
        return self._world.step(self, self._action(actions))

    def receive(self, observation: Any, reward: float, terminated: bool, truncated: bool, info: Any) -> None:
        """Take a transition; the rewards of those that no Step has fetched add up."""
        self._observation, self._info = observation, info
        self._gain += reward
        self._terminated[...] = terminated
        self._truncated[...] = truncated

    def enter(self, sequence: int, observation: Any, info: Any) -> None:
        """Begin a sequence."""
        self.sequence, self.playing, self.outcome, self._gain = sequence, True, None, 0.0
        self.receive(observation, 0.0, False, False, info)
        self._reward[...] = 0.0

    def collect(self) -> int:
        """Let the Step at hand have what came; return its state."""
        self._reward[...] = self._gain
        self._gain = 0.0
        state, self.outcome = self.outcome, None
        return pb.RUNNING if state is None else state

    def interrupt(self) -> None:
        """End the sequence for this agent, with what it has seen last."""
        super().interrupt()
        self.collect()
        self._world.drop(self)

    def hang_up(self) -> None:
        """End its waits."""
        self.gone = True
        self._world.resets.wake()

    def properties(self) -> PropertyTree:
        """Return the tree below `world`, with this agent's spaces."""
        return self._world.agent_properties(self.name)


class MultiAgentWorld(EnvWorld):
    """A world of as many agents as its environment has.

    Args:
        name: The world's name.
        env: A PettingZoo ParallelEnv, owned by the world from here on.
        lock: Held around every call of the environment.
        teamwork: How the agents are coordinated.
    """

    ACCESS = ParallelAccess

    def __init__(self, name: str, env: Any, lock: Lock, teamwork: Teamwork) -> None:
        super().__init__(name, env, lock)
        self._teamwork = teamwork
        self._default_action = teamwork.default_action or default_action
        self._ids: dict[str, Any] = {str(agent): agent for agent in env.possible_agents}
        self._spaces = {
            name: (published_space(env.observation_space(agent)), published_space(env.action_space(agent)))
            for name, agent in self._ids.items()
        }
        self._changed = self.resets.changed
        self._seats: dict[str, MultiAgent] = {}
        self._ready: list[MultiAgent] = []
        self._sequence = 0
        self._playing = False
        self._ending = False
        self._starting = False
        self._alive: list[str] = []
        self._latest: dict[str, tuple[Any, Any]] = {}
        self._joint = _Joint()

    # Seats

    @property
    def agents(self) -> int:
        """How many seats are taken."""
        return len(self._seats)

    def join(self, settings: Mapping[str, pb.Tensor]) -> Agent:
        """Seat an agent: the one that the setting `agent` names, or the first that is free."""
        refuse_unknown(settings, ("agent",), "JoinWorld")
        try:
            wanted = unpack_tensor(settings["agent"], "agent")[()] if "agent" in settings else None
        except TensorError as error:
            raise RequestError(Code.INVALID_ARGUMENT, f"bad JoinWorld settings: {error}") from error
        with self._changed:
            self.refuse_if_over()
            free = [name for name in self._ids if name not in self._seats]
            if wanted is not None and (not isinstance(wanted, str) or wanted not in self._ids):
                raise RequestError(
                    Code.INVALID_ARGUMENT,
                    f"expected the setting 'agent' to be one of {', '.join(self._ids)}, got {wanted!r:.80}",
                )
            if not free:
                raise RequestError(
                    Code.RESOURCE_EXHAUSTED,
                    f"the world {self.name!r} is full: all of its {len(self._ids)} agents are taken; create a world of "
                    "your own",
                )
            name = free[0] if wanted is None else str(wanted)
            if name not in free:
                raise RequestError(
                    Code.RESOURCE_EXHAUSTED, f"the agent {name!r} is taken; there are still {', '.join(free)}"
                )
            agent = MultiAgent(self, self._env, name, *self._spaces[name])
            self._seats[name] = agent
            self._changed.notify_all()
            return agent

    def vacate(self, agent: EnvAgent) -> None:
        """Free the seat of an agent that leaves or has died; the policy says what that means for the others."""
        with self._changed:
            if isinstance(agent, MultiAgent) and self._seats.get(agent.name) is agent:
                del self._seats[agent.name]
                self.drop(agent)

    def drop(self, agent: MultiAgent) -> None:
        """Take an agent out of the running sequence."""
        with self._changed:
            was_playing, agent.playing, agent.outcome = agent.playing, False, None
            if not any(seat.playing for seat in self._seats.values()):
                self._playing = self._ending = False
            elif was_playing and self._teamwork.missing_agent is MissingAgent.END:
                self._end_sequence()
            self._changed.notify_all()

    def _end_sequence(self) -> None:
        """Let every agent that plays be told so by its next Step."""
        if not self._ending:
            self._ending = True
            self.resets.interrupt()

    def retire(self) -> bool:
        """End the world if no agent is in, so that none joins meanwhile."""
        with self._changed:
            if self._seats:
                return False
            self.close()
            return True

    def close(self) -> None:
        """Close the environment; who waits for others hears that the world is gone."""
        try:
            super().close()
        finally:
            self.resets.wake()

    # Sequences

    def keep(self, seed: Any, options: Any) -> None:
        """Keep what a Reset brings for the next sequence."""
        with self._changed:
            if seed is not None or options is not None:
                self._carried = (seed, options)

    def prepare_reset(self, settings: Mapping[str, pb.Tensor], caller: Agent | None) -> Callable[[], None]:
        """End the sequence for all; the settings are for the next one."""
        reader = MultiAgent(self, self._env, next(iter(self._ids)), *next(iter(self._spaces.values())))
        pending = reader.read_settings(settings)
        with self._changed:
            before, ending = self._carried, self._ending
            self._carried = pending
            self._ending = self._playing

        def undo() -> None:
            with self._changed:
                self._carried, self._ending = before, ending

        return undo

    def reset(
        self, settings: Mapping[str, pb.Tensor], caller: Agent | None, gone: Callable[[], bool], timeout: float
    ) -> None:
        """Begin a new sequence for every agent (D-15); the environment itself is reset when they begin it."""
        super().reset(settings, caller, gone, timeout)
        if isinstance(caller, MultiAgent):
            self.drop(caller)

    def begin(self, agent: MultiAgent) -> int:
        """Wait until a sequence begins with the agent, or enter the one that runs."""
        deadline = time.monotonic() + self._teamwork.agent_timeout
        with self._changed:
            self.resets.end(agent)  # while it waits, no ResetWorld waits for it
            self._ready.append(agent)
            try:
                while not agent.playing:
                    self._check(agent)
                    left = deadline - time.monotonic()
                    if self._may_enter(agent):
                        self._enter(agent)
                    elif self._may_start(left <= 0):
                        self._start()
                    elif agent.absent:
                        agent.absent = False
                        raise RequestError(
                            Code.FAILED_PRECONDITION,
                            f"the environment began a sequence without the agent {agent.name!r}; Step again for the "
                            "next one, or leave",
                        )
                    elif left <= 0:
                        raise self._late(self._awaited_for_start())
                    else:
                        self._changed.wait(left)
            finally:
                self._ready.remove(agent)
            return pb.RUNNING

    def _check(self, agent: MultiAgent) -> None:
        self.refuse_if_over()
        if agent.gone:
            raise RequestError(Code.CANCELLED, "the client has hung up")

    def _may_enter(self, agent: MultiAgent) -> bool:
        return (
            self._playing
            and not self._ending
            and not self._joint.running
            and agent.sequence != self._sequence
            and agent.name in self._alive
        )

    def _enter(self, agent: MultiAgent) -> None:
        agent.enter(self._sequence, *self._latest[agent.name])
        self.resets.start(agent)
        self._changed.notify_all()

    def _may_start(self, expired: bool) -> bool:
        if self._starting or self._joint.running:
            return False
        if self._teamwork.missing_agent is not MissingAgent.DEFAULT:
            return not self._playing and len(self._ready) == len(self._ids)
        if self._playing:
            return expired and self._ending  # those that were not told yet are told all the same
        return expired or all(seat in self._ready for seat in self._seats.values())

    def _awaited_for_start(self) -> list[str]:
        if self._playing:
            return [seat.name for seat in self._seats.values() if seat.playing]
        ready = {agent.name for agent in self._ready}
        return [name for name in self._ids if name not in ready]

    def _start(self) -> None:
        """Reset the environment, and let all who are ready in."""
        self._starting = True
        seed, options = self._carried
        try:
            with self._unlocked(), self.environment("reset"):
                observations, infos = self._env.reset(seed=seed, options=options)
                alive = list(self._env.agents)
        finally:
            self._starting = False
            self._changed.notify_all()
        self._carried = (None, None)
        self._sequence += 1
        self._playing, self._ending = True, False
        self._alive = [str(agent) for agent in alive]
        self._latest = {str(agent): (observations.get(agent), infos.get(agent, {})) for agent in alive}
        for seat in self._seats.values():
            seat.playing = False
            if seat in self._ready:
                if seat.name in self._alive:
                    self._enter(seat)
                else:
                    seat.sequence, seat.absent = self._sequence, True
        self._settle()

    def _settle(self) -> None:
        """The sequence is over when nobody plays any more."""
        if not any(seat.playing for seat in self._seats.values()):
            self._playing = self._ending = False
        self._changed.notify_all()

    # Steps

    def step(self, agent: MultiAgent, action: Any) -> int:
        """Hand in an agent's action, and wait until the environment has stepped with all of them."""
        deadline = time.monotonic() + self._teamwork.agent_timeout
        with self._changed:
            while self._joint.running and agent.outcome is None:  # a step without it goes on; it is in the next
                self._check(agent)
                self._changed.wait(1.0)
            if agent.outcome is not None:
                return agent.collect()
            joint = self._joint
            joint.actions[agent.name] = action
            try:
                while not joint.done:
                    self._check(agent)
                    left = deadline - time.monotonic()
                    if joint.running:
                        self._changed.wait(1.0)
                    elif self._ending or not agent.playing or self.resets.is_due(agent):
                        agent.interrupt()
                        return pb.INTERRUPTED
                    elif not (missing := self._missing(joint)):
                        self._advance(joint)
                    elif left > 0:
                        self._changed.wait(left)
                    elif self._teamwork.missing_agent is MissingAgent.DEFAULT:
                        self._advance(joint)
                    elif self._teamwork.missing_agent is MissingAgent.END:
                        self._end_sequence()
                    else:
                        raise self._late(missing)
            finally:
                if not joint.done:
                    joint.actions.pop(agent.name, None)
            if joint.error is not None:
                raise joint.error
            return agent.collect()

    def _missing(self, joint: _Joint) -> list[str]:
        """Whose action has to be waited for."""
        missing = []
        for name in self._alive:
            seat = self._seats.get(name)
            begun = seat is not None and seat.sequence == self._sequence
            awaited = seat.playing if seat is not None and begun else self._teamwork.missing_agent is MissingAgent.WAIT
            if name not in joint.actions and awaited:
                missing.append(name)
        return missing

    def _advance(self, joint: _Joint) -> None:
        """Step the environment with the actions that are in, and default ones for the rest."""
        joint.running = True
        try:
            with self._unlocked(), self.environment("step"):
                actions = {}
                for name in self._alive:
                    agent, given = self._ids[name], name in joint.actions
                    if not given:
                        space = self._env.action_space(agent)
                        joint.actions[name] = self._default_action(agent, self._latest[name][0], space)
                    actions[agent] = joint.actions[name]
                results = self._env.step(actions)
                alive = list(self._env.agents)
            self._publish(results, alive)
        except RequestError as error:
            joint.error = error
        finally:
            joint.running, joint.done = False, True
            self._joint = _Joint()
            self._changed.notify_all()

    def _publish(self, results: Any, alive: list[Any]) -> None:
        """Hand each agent its part of a joint step."""
        observations, rewards, terminations, truncations, infos = results
        for name in self._alive:
            agent = self._ids[name]
            terminated = bool(terminations.get(agent, False))
            # An agent that the environment drops without a word is truncated.
            truncated = bool(truncations.get(agent, False)) or (agent not in alive and not terminated)
            observation = observations.get(agent, self._latest[name][0])
            info = infos.get(agent, {})
            self._latest[name] = (observation, info)
            seat = self._seats.get(name)
            if seat is not None and seat.playing:
                seat.receive(observation, float(rewards.get(agent, 0.0)), terminated, truncated, info)
                if terminated or truncated:
                    seat.playing = False
                    seat.outcome = pb.TERMINATED if terminated else pb.INTERRUPTED
        for agent in alive:
            self._latest.setdefault(str(agent), (observations.get(agent), infos.get(agent, {})))
        self._alive = [str(agent) for agent in alive]
        self._settle()

    @contextmanager
    def _unlocked(self) -> Iterator[None]:
        """Let the others at the world's state while the environment works."""
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()

    def _late(self, missing: list[str]) -> RequestError:
        return RequestError(
            Code.DEADLINE_EXCEEDED,
            f"the world {self.name!r} waited agent_timeout={self._teamwork.agent_timeout:g} s for the agents "
            f"{', '.join(missing)}; send the Step again to go on waiting, or leave",
        )

    # Properties

    def agent_properties(self, name: str) -> PropertyTree:
        """Return the tree below `world`, as one agent sees it."""
        observation_space, action_space = self._spaces[name]

        def leaf(key: str, kind: str, description: str, read: Callable[[], Any]) -> Property:
            return Property(f"world.{key}", kind, description, read)

        return self._access.properties().merged(
            PropertyTree(
                [
                    self._name_leaf(),
                    leaf("agent", TEXT, "the agent of this connection", lambda: name),
                    leaf("agents", ENCODED, "the names of all agents", lambda: list(self._ids)),
                    leaf(
                        "missing_agent",
                        TEXT,
                        "what is done where an agent is missing: wait, default or end",
                        lambda: MissingAgent(self._teamwork.missing_agent).value,
                    ),
                    leaf(
                        "observation_space",
                        TEXT,
                        "the agent's exact space, as JSON",
                        lambda: space_to_json(observation_space),
                    ),
                    leaf("action_space", TEXT, "the agent's exact space, as JSON", lambda: space_to_json(action_space)),
                    leaf("frame", ENCODED, "what render() gives now, in a list", self._frame),
                    self._timing_leaf(),
                ]
            )
        )

    def _frame(self) -> Any:
        if self._sequence == 0:
            raise RequestError(Code.FAILED_PRECONDITION, "no frame before the first Step: no sequence has begun")
        return self._access.frame()
