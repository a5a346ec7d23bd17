"""Custom pacers: they decide, from the actions of agents, when an environment is stepped, and by which action (D-22).

`bridge.core.worlds.turns` handles the rest: joining, waiting, and what each agent is told.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from bridge.core.encoding.properties import Property
from bridge.core.worlds.environment import Spaces, Transition
from bridge.core.worlds.group import DEFAULT, default_action
from bridge.core.worlds.participants import Participant, WaitingStep
from bridge.errors import SettingError

__all__ = ["Decision", "Turn", "TurnPacer", "refuse_lanes"]


@dataclasses.dataclass(frozen=True)
class Decision:
    """A decision about a turn, made by `Turn.step`, `Turn.wait` or `Turn.end`."""

    kind: str
    """`step`, `wait` or `end`."""
    action: object = None
    """For a step: the environment's action; with several agents a mapping by name; `DEFAULT`: the default action."""
    by: Sequence[str] | None = None
    """For a step: the agents whose Steps it answers; None: all that have acted; of several agents those in `action`."""
    until: float = math.inf
    """For a wait: the latest time of the next decision."""


_WAIT = Decision("wait")


class Turn:
    """A turn of a sequence, from one step of the environment to the next, as a `TurnPacer` sees it.

    Its attributes are read-only.

    Args:
        names: See the attribute.
        participants: The joined agents by name; `Turns` updates this mapping.
        waits: The waiting Steps; `Turns` updates this mapping.
    """

    def __init__(
        self,
        names: Sequence[str],
        participants: Mapping[str, Participant],
        waits: Mapping[Participant, WaitingStep],
    ) -> None:
        self._participants = participants
        self._waits = waits
        self.names = list(names)
        """All possible agents."""
        self.now = -math.inf
        """The time, in seconds of a clock that never goes back."""
        self.expired = False
        """True if a Step has waited for `TurnPacer.patience` seconds; in `may_begin`, a Step that asks to begin."""
        self.running = False
        """True if a sequence runs."""
        self.ending = False
        """True if the sequence was ended from outside, and a playing agent was not told yet."""
        self.sequence = 0
        """How many sequences have begun."""
        self.began = -math.inf
        """When the turn began: the time of the last reset, step or failure. -inf: no sequence has begun."""
        self.number = 0
        """The number of steps of the sequence so far; 0 in its first turn."""
        self.alive: Sequence[str] = ()
        """The agents that act in this turn, with or without a player, in the environment's order."""
        self.handed_in: dict[str, Any] = {}
        """The actions of waiting Steps, by agent, including agents that do not act in this turn."""
        self.latest: dict[str, Transition] = {}
        """The last transition of each agent in the sequence, by name."""

    @property
    def joined(self) -> Sequence[str]:
        """The agents that clients have joined as."""
        return list(self._participants)

    @property
    def asked(self) -> Sequence[str]:
        """The agents whose clients wait for a sequence to begin."""
        asking = {wait.participant for wait in self._waits.values() if wait.begins}
        return [name for name, one in self._participants.items() if one in asking]

    @property
    def playing(self) -> Sequence[str]:
        """The agents that are in the sequence and have a client."""
        return [name for name, one in self._participants.items() if one.playing]

    @property
    def gone(self) -> Sequence[str]:
        """The joined agents that were in the sequence, and have left it by a Reset or have ended in it."""
        sequence, members = self.sequence, self._participants.items()
        return [name for name, one in members if one.sequence == sequence and not one.playing]

    @property
    def actions(self) -> Mapping[str, Any]:
        """The actions for this turn so far, by agent."""
        handed_in = self.handed_in
        return {name: handed_in[name] for name in self.alive if name in handed_in}

    def observation(self, name: str) -> Any:
        """Return an agent's last observation; None: there is none yet."""
        return self.latest[name].observation if name in self.latest else None

    def step(self, action: object = DEFAULT, by: Sequence[str] | None = None) -> Decision:
        """Step the environment, which ends the turn.

        Args:
            action: The action; with several agents a mapping by name, where missing agents take the default action. A
                single agent's action may be given by name too, unless its action space is a Dict. Left out: the
                default action for all.
            by: The agents whose Steps are answered with the result; None: all that have acted or, with several agents,
                are in `action`. Other Steps go on waiting.
        """
        return Decision("step", action, by)

    def wait(self, until: float = math.inf) -> Decision:
        """Wait until an agent acts, joins or leaves, or until a time after `now`, in seconds.

        Raises:
            ValueError: The time has passed.
        """
        if until == math.inf:
            return _WAIT
        if not until > self.now:
            raise ValueError(f"expected a time to wait until that is after now={self.now:g}, got {until!r}")
        return Decision("wait", until=until)

    def end(self) -> Decision:
        """End the sequence for all: their episodes are truncated."""
        return Decision("end")


class TurnPacer(abc.ABC):
    """Decides, from the actions of its agents, when an environment is stepped, and by which action.

    A custom pacer is a subclass with `decide`. Pass the class to `serve_gym(world=…)` or `serve_parallel(world=…)`:
    each world gets its own instance. A pacer never waits and needs no clock: the time is `turn.now`. An environment
    with several agents (`serve_parallel`) is stepped by the actions of all agents. An environment of `serve_gym` has
    one agent, named `agent`. With `players` several clients share it: all of them see the same, and `decide` combines
    their actions into one.
    """

    players: Sequence[str] = ()
    """The names of players that share an environment with one agent; empty: one client plays it."""
    patience: float = 30.0
    """Seconds that a Step waits. Then it is refused with DEADLINE_EXCEEDED, and may be sent again."""
    patience_name = "patience"
    """The name of this number in messages."""
    can_place = False
    """True if a message may put the environment into another state: no decision depends on earlier states."""

    @abc.abstractmethod
    def decide(self, turn: Turn) -> Decision:
        """Return what to do now: `turn.step(…)`, `turn.wait(…)` or `turn.end()`.

        Called while a sequence runs: when an agent has acted, joined or left, at the time of the last `turn.wait`, and
        when a Step has waited for `patience` seconds. An exception refuses the waiting Steps, and is logged.
        """

    def may_begin(self, turn: Turn) -> bool:
        """Return True to reset the environment for the agents that ask to begin; by default once all have asked.

        Called for each Step that asks, while nobody plays or a sequence ends. An agent that asks later enters the
        running sequence.
        """
        return not turn.running and len(turn.asked) == len(turn.names)

    def default_action(self, agent: Any, observation: Any, space: Any) -> Any:
        """Return an action for an agent without an action. Called in the environment's thread.

        Args:
            agent: The environment's own id of the agent, or its name.
            observation: Its last observation.
            space: Its action space.
        """
        return default_action(agent, observation, space)

    def told(self, name: str, transition: Transition) -> Transition:
        """Return what an agent is told instead of the environment's result, such as another reward.

        Use `dataclasses.replace(transition, reward=…)` to change it.
        """
        return transition

    def spaces_of(self, name: str, spaces: Spaces) -> Spaces:
        """Return an agent's observation and action space, if they differ from those of the environment."""
        return spaces

    def dropped(self, name: str) -> bool:
        """Return True to end the sequence for all after an agent has left it by a Reset, or lost its client."""
        return False

    def properties(self) -> Sequence[Property]:
        """Return additional properties of its agents, below `world`."""
        return ()


def refuse_lanes(pacer: object, lanes: int) -> None:
    """Raise SettingError if a pacer that takes turns would have to step several lanes.

    Args:
        pacer: Its class or factory, for the message.
        lanes: The number of lanes.
    """
    if lanes != 1:
        name = getattr(pacer, "__name__", repr(pacer))
        raise SettingError(
            f"{name} steps one environment, or one of several agents: expected num_envs=1, got {lanes} lanes"
        )
