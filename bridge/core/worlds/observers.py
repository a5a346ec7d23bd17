"""Observers: they are told of the worlds of a server, of what environments do, and of who joins.

Watching, take-over and recordings are observers, and so is whatever a user gives as `observers=` of `serve_gym` and
`serve_parallel`; `examples/log_episodes.py` is one. Worlds and sessions know none of them: a server holds those that it
was given, and asks each where this module says so.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from gymnasium.vector import AutoresetMode

from bridge.core.encoding.tensors import Array
from bridge.core.worlds.environment import EnvFacts, Environment, EnvironmentProxy, Result
from bridge.core.worlds.messages import PartOutcome, SessionMessage
from bridge.core.worlds.rewards import as_number
from bridge.core.worlds.settings import Settings
from bridge.errors import Code, RequestError

if TYPE_CHECKING:
    from bridge.core.worlds.base import Agent, World

__all__ = ["Background", "Episode", "Episodes", "Listener", "ObservedEnv", "Observer", "describe_fault"]


class Background(Protocol):
    """Runs what takes processor time in a thread of its own."""

    def submit(self, job: Callable[[], object], done: Callable[[object], None]) -> None:
        """Call `job` there, and `done` in the event loop with what it returned, or with its exception."""


class Observer:
    """Is told of the worlds of a server. Subclasses override what they need; all of it runs in the serving thread.

    So it must not wait: while it does, the server answers nobody. What takes time is for `Background.submit`.

    An observer refuses a client by raising RequestError in `made` or `join`, and so does another exception there: the
    client is told the observer's class and the exception. Any other exception of an observer goes to the log, with its
    traceback once and then as a count each minute, and the environments are served as if it had not been asked.
    """

    def start(self, background: Background) -> None:
        """Begin with a server, which has a thread for what takes time. What it raises, `serve_gym` raises."""

    def made(self, world: World) -> Listener | None:
        """Note a new world; return what is told of each reset and step of its environment, None: nothing is."""
        return None

    def join(self, world: World, settings: Settings, join: Callable[[Settings], Agent]) -> Agent:
        """Let an agent into a world; `join` lets in the agent of other settings, such as those that are not its own."""
        return join(settings)

    def keep(self, world: World, agent: Agent) -> bool:
        """Return True to keep the agent of a client that is gone in its world: the observer has it leave later."""
        return False

    def describe(self, world: World) -> Mapping[str, object]:
        """Return what a page shows of a world by this observer, as JSON has it."""
        return {}

    def counts(self, worlds: Sequence[World]) -> Mapping[str, float]:
        """Return what the server's status counts by this observer."""
        return {}

    def close(self) -> None:
        """End with the server."""


class Listener:
    """Is told what an environment returns. Subclasses override what they need.

    `lane` is the number of a lane that is stepped by itself, as in real time; None: one call steps all that there is.
    Results are as the environment gave them, with the living agents at their end where it has several; a listener
    copies what it keeps, since the environment may change it in its next step.

    An exception of a listener goes to the log, and the environment is served as if it had not been told: the agent's
    action is used, and the environment's result. One that has to stop an agent raises RequestError, which the agent
    gets in the place of the result.
    """

    def began(self, lane: int | None, result: Result, mask: Array | None) -> None:
        """Note what `reset` returned; `mask` says which lanes of a batch began, bools `(lanes,)`, None: all."""

    def placed(self, result: Result, mask: Array | None) -> None:
        """Note that a message has put the environment into another situation, and what a reset would return there.

        `mask` says which lanes of a batch are in it, bools `(lanes,)`, None: all. Unless a subclass says otherwise, it
        is as the beginning of an episode.
        """
        self.began(None, result, mask)

    async def acting(self, lane: int | None, action: object) -> object:
        """Return the action that the environment is stepped by: this one, or another in its place. It may wait."""
        return action

    def stepped(self, lane: int | None, action: object, result: Result) -> Result:
        """Note what `step` returned for an action; return it, or what the world is to be told in its place."""
        return result

    def over(self, error: RequestError) -> None:
        """Note that the world ended, and the error that its agents get from now on."""


class ObservedEnv(EnvironmentProxy):
    """Stands for an environment whose listener is told what it returns, and what its lanes return.

    Args:
        env: The environment.
        listener: Is told.
        observer: Whose listener it is: errors name its class.
        report: Logs what the listener raises, so that an observer ends nobody's episode.
    """

    def __init__(self, env: Environment, listener: Listener, observer: object, report: Callable[[str], None]) -> None:
        super().__init__(env)
        self._listener = listener
        self._observer = observer
        self._report = report

    async def reset(self, *, seed: object = None, options: object = None, lane: int | None = None) -> Result:
        """Reset the environment, or one lane by itself."""
        # Read before the call: Gymnasium's vector environments take it out of the dict.
        mask = options.get("reset_mask") if isinstance(options, Mapping) else None
        result = await self.inner.reset(seed=seed, options=options, lane=lane)
        try:
            self._listener.began(lane, result, mask)
        except RequestError:
            raise
        except Exception as error:
            self._report(describe_fault(self._observer, "began", error))
        return result

    async def step(self, action: object, lane: int | None = None) -> Result:
        """Step the environment, or one lane by itself."""
        try:
            action = await self._listener.acting(lane, action)
        except RequestError:
            raise
        except Exception as error:
            self._report(describe_fault(self._observer, "acting", error))
        result = await self.inner.step(action, lane)
        try:
            told = self._listener.stepped(lane, action, result)
            # A `return` is forgotten easily, and the world would fail far from here.
            if not isinstance(told, tuple):
                raise TypeError(f"expected it to return a result, as it got one, got {told!r:.80}")
        except RequestError:
            raise
        except Exception as error:
            self._report(describe_fault(self._observer, "stepped", error))
            return result
        return told

    async def run_message(self, message: SessionMessage, request: bytes) -> PartOutcome:
        """Have the part of a message beside the environment answer a request."""
        outcome = await self.inner.run_message(message, request)
        if outcome.placed is not None:
            mask: Array | None = None
            if self.facts.num_envs is not None and len(outcome.lanes) < self.facts.num_envs:
                mask = np.isin(np.arange(self.facts.num_envs), outcome.lanes)
            try:
                self._listener.placed(outcome.placed, mask)
            except RequestError:
                raise
            except Exception as error:
                self._report(describe_fault(self._observer, "placed", error))
        return outcome

    async def close(self, reason: RequestError | None = None) -> None:
        """Close the environment."""
        try:
            self._listener.over(reason or RequestError(Code.FAILED_PRECONDITION, "the world was destroyed"))
        except Exception as error:
            self._report(describe_fault(self._observer, "over", error))
        finally:  # what ends a thread, too, keeps no environment open
            await self.inner.close(reason)


def describe_fault(observer: object, method: str, error: Exception) -> str:
    """Return for the log what an observer, or its listener, raised: its class, the method, and the traceback."""
    frames = "".join(traceback.format_exception(error))
    return f"the observer {type(observer).__qualname__} failed at {method}: {error!r}\n{frames}"


@dataclasses.dataclass(frozen=True)
class Episode:
    """An episode that ended."""

    lane: int
    """The number of its lane; 0 where there is one environment."""
    reward: float
    """Its return: the sum of its rewards, of all agents and of all objectives."""
    length: int
    """Its steps."""
    agents: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """The return of each of several agents, by name."""


class Episodes(Listener):
    """Adds up the episodes of an environment.

    Args:
        facts: Those of the environment.
        ended: Called with each episode that ended; one that a reset cuts off is left out, and so is one of which the
            beginning was not seen.
    """

    def __init__(self, facts: EnvFacts, ended: Callable[[Episode], None]) -> None:
        self._ended = ended
        self._facts = facts
        self._sums: Array = np.zeros(facts.num_envs or 1)
        self._lengths: Array = np.zeros(facts.num_envs or 1, np.int64)
        self._resets: Array = np.zeros(facts.num_envs or 1, np.bool_)
        """True for each lane that the next step resets, `(lanes,)`: for it, that step is of no episode."""
        self._whole: Array = np.zeros(facts.num_envs or 1, np.bool_)
        """True for each lane whose episode was seen from its beginning on."""
        self._agents: dict[str, float] = {}

    def began(self, lane: int | None, result: Result, mask: Array | None) -> None:
        """Begin an episode of each lane that was reset."""
        which: Any = lane if lane is not None else slice(None) if mask is None else mask
        self._sums[which], self._lengths[which], self._resets[which] = 0.0, 0, False
        self._whole[which] = True
        self._agents.clear()

    def stepped(self, lane: int | None, action: object, result: Result) -> Result:
        """Add a step."""
        reward, terminated, truncated = result[1:4]
        if lane is None and self._facts.num_envs is not None:
            self._add_batch(reward, np.logical_or(terminated, truncated))
            return result
        over = terminated or truncated
        if self._facts.agents:
            for agent, value in reward.items():
                self._agents[str(agent)] = self._agents.get(str(agent), 0.0) + as_number(value)
            # The episode goes on while any agent is alive.
            reward, over = sum(map(as_number, reward.values())), not result[5]
        elif type(reward) is not float:
            # An array of several is of a reward space; an integer may be too large for a sum of NumPy's.
            reward = float(np.sum(reward)) if np.size(reward) > 1 else as_number(reward)
        index = lane or 0
        self._sums[index] += reward
        self._lengths[index] += 1
        if over:
            self._end(index)
        return result

    def _add_batch(self, rewards: object, ended: Array) -> None:
        # In NEXT_STEP mode the step after an end resets the lane: its reward and flags are of no episode.
        counts = ~self._resets
        self._sums += np.where(counts, np.asarray(rewards, np.float64).reshape(len(counts), -1).sum(axis=1), 0.0)
        self._lengths += counts
        for lane in np.flatnonzero(ended & counts).tolist():
            self._end(lane)
        # A lane whose reset failed is truncated once more, and reset by the next step.
        self._resets = ended & (self._facts.autoreset is AutoresetMode.NEXT_STEP)

    def _end(self, lane: int) -> None:
        episode = Episode(lane, float(self._sums[lane]), int(self._lengths[lane]), dict(self._agents))
        whole, self._whole[lane] = self._whole[lane], True
        self._sums[lane], self._lengths[lane] = 0.0, 0
        self._agents.clear()
        if whole:
            self._ended(episode)
