"""Participants: agents that take turns, their waiting Steps, and the results for their next Steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from bridge.core.worlds.agent import EnvAgent
from bridge.core.worlds.environment import Transition, kept
from bridge.core.worlds.scheduling import PendingResult
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["Participant", "WaitingStep"]

_NOTHING = Transition(None)


@dataclasses.dataclass(eq=False)
class Participant:
    """A joined agent and the unreported results for its next Step."""

    name: str
    agent: EnvAgent
    """The agent, which the world's `ResetBook` knows; it has the name of the player."""
    sequence: int = -1
    """The last sequence that it was in."""
    playing: bool = False
    """True if it is expected to act."""
    outcome: int | None = None
    """The end of its sequence, until a Step has reported it."""
    absent: bool = False
    """True if the sequence that it asked for began without it."""
    may_enter: bool = False
    """True if it has appeared in the running sequence, and its client has not entered yet."""
    agents: Sequence[str] = ()
    """The living agents, if its next Step has to report them; empty: as before, without agents that ended."""
    told: Transition = _NOTHING
    """The agent's last transition."""
    reward: Any = None
    """The unreported reward; the sum of several rewards is a float; None: there is no unreported reward."""
    cut_off: bool = False
    """True if the current Step reports that the sequence was ended from outside."""

    def enter(self, sequence: int, seen: Transition) -> None:
        """Enter a sequence; `seen` is the agent's last transition in it."""
        self.sequence, self.playing = sequence, True
        self.outcome, self.absent, self.reward = None, False, None
        # An agent that appeared in the last step may have got a reward in it. It is alive, even if the transition has
        # the end of its earlier part in the episode.
        if self.may_enter and "reward" not in seen.missing:
            self.reward = kept(seen.reward)
        self.told = dataclasses.replace(seen, terminated=False, truncated=False)
        self.may_enter = False

    def add(self, seen: Transition) -> None:
        """Add a transition of a step in which the agent played."""
        self.told = seen
        # Rewards of steps that a late agent missed are added up.
        if "reward" not in seen.missing:
            waits, reward = self.reward, kept(seen.reward)
            self.reward = reward if waits is None else self.agent.rewards.sum(waits, reward)
        if seen.terminated or seen.truncated:
            # Copy it, because further steps may reuse the arrays before the agent's next Step.
            observation, info = kept((seen.observation, seen.info))
            self.told = dataclasses.replace(seen, observation=observation, info=info)
            self.playing = False
            self.outcome = pb.TERMINATED if seen.terminated else pb.INTERRUPTED

    def take_outcome(self) -> int:
        """Return the state for the current Step, and clear it."""
        state, self.outcome = self.outcome, None
        return pb.RUNNING if state is None else state

    def tell(self, cut_off: bool) -> None:
        """Fill in the results for the current Step: everything that was not reported to the agent.

        Args:
            cut_off: True if the sequence was ended from outside.
        """
        agent, told = self.agent, self.told
        agent.observation, agent.info = told.observation, told.info
        agent.terminated[...], agent.truncated[...] = told.terminated, told.truncated
        # Replace additions of an earlier answer that did not request the info.
        agent.infos.beside = {"agents": self.agents} if self.agents else {}
        if told.missing:
            agent.infos.beside["missing"] = told.missing
        if cut_off:
            # The world ended the sequence, not the environment: report a truncation with the last observation.
            agent.take_cut()
            agent.infos.beside.clear()
        # Only after `take_cut`, which sets the reward to 0: rewards until the end are still reported.
        reward, self.reward = self.reward, None
        if reward is None:
            agent.reward[...] = 0.0
        else:
            agent.take_reward(reward)


@dataclasses.dataclass
class WaitingStep:
    """A waiting Step."""

    participant: Participant
    deadline: float
    begins: bool
    """True for the first Step of a sequence, which waits for the next sequence or enters the running one."""
    answer: PendingResult[int] = dataclasses.field(default_factory=PendingResult)
    """Its state or error, once it is answered."""
