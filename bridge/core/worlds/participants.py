"""Participants: agents that take turns, the Steps of theirs that wait, and what the next one will tell."""

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
    """A joined agent, and what its next Step will report."""

    name: str
    agent: EnvAgent
    """The agent: the world's `ResetBook` takes note of it, and it says who acts."""
    sequence: int = -1
    """The sequence that it last took part in."""
    playing: bool = False
    """True if an action of it is expected."""
    outcome: int | None = None
    """How its sequence ended, until a Step has told."""
    absent: bool = False
    """True if the sequence that it asked for began without it."""
    may_enter: bool = False
    """True if the environment has brought it into the running sequence, and its client has not entered yet."""
    agents: Sequence[str] = ()
    """Those that are alive, where its next Step has to tell them; none: as before, without those that ended."""
    told: Transition = _NOTHING
    """The last transition that its agent received."""
    reward: Any = None
    """The reward that no Step has told yet, of several their sum, a float; None: there is none."""
    cut_off: bool = False
    """True if the Step that is answered now tells that the sequence was ended from outside."""

    def enter(self, sequence: int, seen: Transition) -> None:
        """Enter a sequence, in which the agent has seen a transition last."""
        self.sequence, self.playing = sequence, True
        self.outcome, self.absent, self.reward = None, False, None
        # Brought in by the last step, it may have got something by it. It is alive, whatever that step said of an end
        # that it had before.
        if self.may_enter and "reward" not in seen.missing:
            self.reward = kept(seen.reward)
        self.told = dataclasses.replace(seen, terminated=False, truncated=False)
        self.may_enter = False

    def add(self, seen: Transition) -> None:
        """Keep a transition of a step in which the agent played."""
        self.told = seen
        # Adds up over the steps that a late agent missed.
        if "reward" not in seen.missing:
            waits, reward = self.reward, kept(seen.reward)
            self.reward = reward if waits is None else self.agent.rewards.sum(waits, reward)
        if seen.terminated or seen.truncated:
            # Kept as it is now: its Step may come later than further steps, which reuse the arrays.
            observation, info = kept((seen.observation, seen.info))
            self.told = dataclasses.replace(seen, observation=observation, info=info)
            self.playing = False
            self.outcome = pb.TERMINATED if seen.terminated else pb.INTERRUPTED

    def take_outcome(self) -> int:
        """Return the state of the Step that is answered now."""
        state, self.outcome = self.outcome, None
        return pb.RUNNING if state is None else state

    def tell(self, cut_off: bool) -> None:
        """Fill in what the Step at hand tells: all that the agent has not been told.

        Args:
            cut_off: True if the sequence was ended from outside.
        """
        agent, told = self.agent, self.told
        agent.observation, agent.info = told.observation, told.info
        agent.terminated[...], agent.truncated[...] = told.terminated, told.truncated
        # What an earlier answer had to tell, and was asked for no info, is of no interest any more.
        agent.infos.beside = {"agents": self.agents} if self.agents else {}
        if told.missing:
            agent.infos.beside["missing"] = told.missing
        if cut_off:
            # The world ended the sequence, not the environment: it is truncated, with the last observation.
            agent.take_cut()
            agent.infos.beside.clear()
        # After `take_cut`, which sets the reward to 0: what was earned until the end is still told.
        reward, self.reward = self.reward, None
        if reward is None:
            agent.reward[...] = 0.0
        else:
            agent.take_reward(reward)


@dataclasses.dataclass
class WaitingStep:
    """A Step that waits."""

    participant: Participant
    deadline: float
    begins: bool
    """True if it is the first of a sequence, which waits for the next one, or enters the running one."""
    answer: PendingResult[int] = dataclasses.field(default_factory=PendingResult)
    """Its state, or why it is refused."""
