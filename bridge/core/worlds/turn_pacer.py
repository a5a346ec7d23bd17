"""Pacers of one's own: they decide from what agents hand in when an environment is stepped, and by what (D-22).

`bridge.core.worlds.turns` has the rest: who is in, who waits, and what each is told.
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
    """A decision about a turn: made by `Turn.step`, `Turn.wait` and `Turn.end`."""

    kind: str
    """`step`, `wait` or `end`."""
    action: object = None
    """Of a step: the environment's action, or of several agents a mapping by name; `DEFAULT`: a default one."""
    by: Sequence[str] | None = None
    """Of a step: whose Steps it answers; None: those of all who have acted, of several agents of those in `action`."""
    until: float = math.inf
    """Of a wait: when to decide again at the latest."""


_WAIT = Decision("wait")


class Turn:
    """A turn of a sequence, from one step of the environment to the next, as a `TurnPacer` sees it.

    Its attributes are to be read only.

    Args:
        names: As the attribute.
        participants: The agents that are in, by name; `Turns` keeps them.
        waits: The Steps that wait, kept so too.
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
        """All agents that there may be."""
        self.now = -math.inf
        """The time, in seconds of a clock that never goes back."""
        self.expired = False
        """True if a Step has waited for `TurnPacer.patience` seconds: in `may_begin` one that asks to begin."""
        self.running = False
        """True if a sequence runs."""
        self.ending = False
        """True if it ends from outside, and somebody who plays was not told yet."""
        self.sequence = 0
        """How many sequences have begun."""
        self.began = -math.inf
        """When the turn began: when the environment was reset or stepped, or failed. -inf: no sequence has begun."""
        self.number = 0
        """How many steps the sequence has had: 0 in its first turn."""
        self.alive: Sequence[str] = ()
        """Those that act in this turn, whoever plays them, in the environment's order."""
        self.handed_in: dict[str, Any] = {}
        """The actions of the Steps that wait, by agent, also of those that do not act in this turn."""
        self.latest: dict[str, Transition] = {}
        """The last transition of each agent in the sequence, by name."""

    @property
    def joined(self) -> Sequence[str]:
        """Those that clients have joined as."""
        return list(self._participants)

    @property
    def asked(self) -> Sequence[str]:
        """Those whose clients wait for a sequence to begin."""
        asking = {wait.participant for wait in self._waits.values() if wait.begins}
        return [name for name, one in self._participants.items() if one in asking]

    @property
    def playing(self) -> Sequence[str]:
        """Those of them that clients play."""
        return [name for name, one in self._participants.items() if one.playing]

    @property
    def gone(self) -> Sequence[str]:
        """Those that clients have joined as who were in the sequence, and left it by a Reset or ended in it."""
        sequence, members = self.sequence, self._participants.items()
        return [name for name, one in members if one.sequence == sequence and not one.playing]

    @property
    def actions(self) -> Mapping[str, Any]:
        """The actions that were handed in for this turn, by agent."""
        handed_in = self.handed_in
        return {name: handed_in[name] for name in self.alive if name in handed_in}

    def observation(self, name: str) -> Any:
        """Return what an agent saw last; None: nothing yet."""
        return self.latest[name].observation if name in self.latest else None

    def step(self, action: object = DEFAULT, by: Sequence[str] | None = None) -> Decision:
        """Step the environment, which ends the turn.

        Args:
            action: Its action; of an environment of several agents a mapping by name, in which those that are missing
                do the default action. One agent alone may have its action by name too, unless its action space is a
                Dict. Left out: the default action, of all.
            by: Whose Steps are answered with what came of it; None: of all who have acted, of several agents of those
                in `action`. The Steps of others wait on.
        """
        return Decision("step", action, by)

    def wait(self, until: float = math.inf) -> Decision:
        """Wait until somebody acts, joins or leaves, or until a time after `now`, in seconds.

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
    """Decides when an environment is stepped, and by which actions, from what its agents hand in.

    A pacer of one's own is a subclass with `decide`, which `serve_gym(world=…)` or `serve_parallel(world=…)` takes: an
    object of it is made for each world. It waits for nothing and needs no clock: the time is `turn.now`.

    An environment of several agents (`serve_parallel`) is stepped by the actions of all. One of `serve_gym` has one
    agent, named `agent`; with `players` several clients share it: all of them see the same, and `decide` makes one
    action of theirs.
    """

    players: Sequence[str] = ()
    """The names of those who share an environment of one agent; none: one client plays it."""
    patience: float = 30.0
    """Seconds that a Step waits; then it is refused with DEADLINE_EXCEEDED, and may be sent again."""
    patience_name = "patience"
    """What messages call that number."""
    can_place = False
    """True if a message may put the environment into another situation: nothing that it decides by was in an earlier
    one."""

    @abc.abstractmethod
    def decide(self, turn: Turn) -> Decision:
        """Return what to do now: `turn.step(…)`, `turn.wait(…)` or `turn.end()`.

        Called while a sequence runs: when an agent has acted, joined or left, at the time that the last `turn.wait`
        named, and when a Step has waited for `patience` seconds. What it raises refuses the Steps that wait, and is
        logged.
        """

    def may_begin(self, turn: Turn) -> bool:
        """Return True to reset the environment for those who ask to begin: here once all agents have asked.

        Called for each Step that asks, while nobody plays, or a sequence ends. Who asks later enters the sequence that
        runs.
        """
        return not turn.running and len(turn.asked) == len(turn.names)

    def default_action(self, agent: Any, observation: Any, space: Any) -> Any:
        """Return an action for an agent that has none; called in the environment's thread.

        Args:
            agent: The environment's own id of it, or its name.
            observation: What it saw last.
            space: Its action space.
        """
        return default_action(agent, observation, space)

    def told(self, name: str, transition: Transition) -> Transition:
        """Return what an agent is told in place of what the environment gave, such as another reward.

        `dataclasses.replace(transition, reward=…)` makes another one.
        """
        return transition

    def spaces_of(self, name: str, spaces: Spaces) -> Spaces:
        """Return an agent's observation and action space, where those of the environment are not its own."""
        return spaces

    def dropped(self, name: str) -> bool:
        """Return True to end the sequence for all, since an agent left it: by a Reset, or its client is gone."""
        return False

    def properties(self) -> Sequence[Property]:
        """Return what it adds to the properties of its agents, below `world`."""
        return ()


def refuse_lanes(pacer: object, lanes: int) -> None:
    """Raise SettingError where a pacer that takes turns is to step several lanes.

    Args:
        pacer: Its class, or what makes it, for the message.
        lanes: How many there are.
    """
    if lanes != 1:
        name = getattr(pacer, "__name__", repr(pacer))
        raise SettingError(
            f"{name} steps one environment, or one of several agents: expected num_envs=1, got {lanes} lanes"
        )
