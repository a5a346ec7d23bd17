"""The states in which players gather, are counted in, and play a round: one table, without clock, input or output.

A lobby of PERLERT and a world in which people play in rounds use it. They define who is waited for, and how long.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

__all__ = ["TRANSITIONS", "RoundEvent", "RoundState"]


class RoundState(enum.Enum):
    """The states of a group that plays in rounds."""

    GATHERING = "gathering"
    COUNTDOWN = "countdown"
    STARTING = "starting"
    RUNNING = "running"


class RoundEvent(enum.Enum):
    """The events that change the state."""

    COMPLETE = "everybody is ready"
    INCOMPLETE = "somebody left, came or is no longer ready"
    COUNTDOWN_OVER = "the countdown is over"
    STARTED = "the environment was reset"
    START_FAILED = "the environment could not be reset"
    ROUND_ENDED = "the episode is over"


# The first three events come from the players and the time, the other three from the environment.
#
# A reset takes time, so there is a state between the countdown and the round: in STARTING no second reset is ordered. A
# player that leaves in STARTING or RUNNING changes no state: the round continues without that player. If all have left,
# the owner of the round ends it. A round that was cut off ends like any other.
#
# INCOMPLETE does not move the end of the countdown: otherwise a player who comes, or changes their mind, again and
# again could keep the round from ever beginning. When it is complete again, the rest of the countdown runs.
#
# An environment that raises ends the round (ROUND_ENDED) or its start (START_FAILED). Both lead to GATHERING and not
# to COUNTDOWN: people see the error, and say again that they are ready.
TRANSITIONS: Mapping[tuple[RoundState, RoundEvent], RoundState] = {
    (RoundState.GATHERING, RoundEvent.COMPLETE): RoundState.COUNTDOWN,
    (RoundState.COUNTDOWN, RoundEvent.INCOMPLETE): RoundState.GATHERING,
    (RoundState.COUNTDOWN, RoundEvent.COUNTDOWN_OVER): RoundState.STARTING,
    (RoundState.STARTING, RoundEvent.STARTED): RoundState.RUNNING,
    (RoundState.STARTING, RoundEvent.START_FAILED): RoundState.GATHERING,
    (RoundState.RUNNING, RoundEvent.ROUND_ENDED): RoundState.GATHERING,
}
