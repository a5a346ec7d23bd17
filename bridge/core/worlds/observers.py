"""Observers: objects that are told of a server's worlds, of results of environments, and of joining agents.

Watching, take-over and recordings are observers, and users can pass their own as `observers=` of `serve_gym` and
`serve_parallel`; `examples/log_episodes.py` is one. Worlds and sessions do not know them: the server holds its
observers, and calls them as this module documents.
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
    """Runs slow functions in a separate thread."""

    def submit(self, job: Callable[[], object], done: Callable[[object], None]) -> None:
        """Call `job` in that thread, and then `done` in the event loop with its result or its exception."""


class Observer:
    """Is told of the worlds of a server. Subclasses override methods, which all run in the serving thread.

    A method must not block, because the server answers nobody meanwhile. Use `Background.submit` for slow work.

    An observer refuses a client by raising RequestError in `made` or `join`. Another exception there refuses the client
    too, with the observer's class and the exception as the text. Exceptions in other methods are logged, with the
    traceback once and then as a count each minute, and environments are served as if the method had not been called.
    """

    def start(self, background: Background) -> None:
        """Start with a server, which provides a thread for slow work. `serve_gym` raises exceptions of this method."""

    def made(self, world: World) -> Listener | None:
        """Handle a new world; return a listener for each reset and step of its environment, or None."""
        return None

    def join(self, world: World, settings: Settings, join: Callable[[Settings], Agent]) -> Agent:
        """Let an agent into a world; call `join` with the settings that are not for this observer."""
        return join(settings)

    def keep(self, world: World, agent: Agent) -> bool:
        """Return True to keep an agent whose client has gone in its world; the observer must remove it later."""
        return False

    def describe(self, world: World) -> Mapping[str, object]:
        """Return what a page shows of a world for this observer, as values for JSON."""
        return {}

    def counts(self, worlds: Sequence[World]) -> Mapping[str, float]:
        """Return this observer's counts for the server's status."""
        return {}

    def close(self) -> None:
        """Stop with the server."""


class Listener:
    """Is told the results of an environment. Subclasses override methods.
    `lane` is the number of a lane that is stepped separately, as in real time; None: one call steps everything. Results
    are those of the environment, followed by the living agents if it has several. A listener must copy what it keeps,
    because the environment may change it in its next step.
    An exception of a listener is logged, and the environment is served as if the method had not been called, with the
    agent's action and the environment's result. To stop an agent, raise RequestError, which the agent gets instead of
    the result.
    """

    def began(self, lane: int | None, result: Result, mask: Array | None) -> None:
        """Handle the result of `reset`; `mask` has the lanes of a batch that began, bools `(lanes,)`; None: all."""

    def placed(self, result: Result, mask: Array | None) -> None:
        """Handle a message that has put the environment into another state; `result` is like that of a reset there.
        `mask` has the lanes of a batch that were changed, bools `(lanes,)`; None: all. By default this counts as the
        beginning of an episode.
        """
        self.began(None, result, mask)

    async def acting(self, lane: int | None, action: object) -> object:
        """Return the action for the environment: `action` itself or a replacement. This coroutine may wait."""
        return action

    def stepped(self, lane: int | None, action: object, result: Result) -> Result:
        """Handle the result of `step`; return it, or a replacement for the world."""
        return result

    def over(self, error: RequestError) -> None:
        """Handle the end of the world; `error` is what its agents get from now on."""


class ObservedEnv(EnvironmentProxy):
    """An environment whose results, and those of its lanes, are passed to a listener.

    Args:
        env: The environment.
        listener: The listener.
        observer: The observer of the listener; errors name its class.
        report: Logs exceptions of the listener, so that an observer cannot end an episode.
    """

    def __init__(self, env: Environment, listener: Listener, observer: object, report: Callable[[str], None]) -> None:
        super().__init__(env)
        self._listener = listener
        self._observer = observer
        self._report = report

    async def reset(self, *, seed: object = None, options: object = None, lane: int | None = None) -> Result:
        """Reset the environment, or one lane by itself."""
        # Read it before the call: Gymnasium's vector environments remove it from the dict.
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
            # A missing `return` is a common mistake, and would fail elsewhere.
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
        finally:  # close the environment even after an exception that ends the thread
            await self.inner.close(reason)


def describe_fault(observer: object, method: str, error: Exception) -> str:
    """Return a log text for an exception of an observer or its listener: the class, the method and the traceback."""
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
        facts: The facts of the environment.
        ended: Called with each ended episode, except episodes that a reset cut off, or whose beginning was not seen.
    """

    def __init__(self, facts: EnvFacts, ended: Callable[[Episode], None]) -> None:
        self._ended = ended
        self._facts = facts
        self._sums: Array = np.zeros(facts.num_envs or 1)
        self._lengths: Array = np.zeros(facts.num_envs or 1, np.int64)
        self._resets: Array = np.zeros(facts.num_envs or 1, np.bool_)
        """True for each lane that the next step resets, `(lanes,)`: that step belongs to no episode of the lane."""
        self._whole: Array = np.zeros(facts.num_envs or 1, np.bool_)
        """True for each lane whose episode was seen from its beginning."""
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
            # Sum up an array reward. Read a single number separately: an integer may be too large for NumPy.
            reward = float(np.sum(reward)) if np.size(reward) > 1 else as_number(reward)
        index = lane or 0
        self._sums[index] += reward
        self._lengths[index] += 1
        if over:
            self._end(index)
        return result

    def _add_batch(self, rewards: object, ended: Array) -> None:
        # In NEXT_STEP mode the step after an end resets the lane: its reward and flags belong to no episode.
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
