"""The states in which players gather, are counted in, and play a round: one table, without clock, input or output.

A lobby of PERLERT and a world in which people play in rounds follow it; who is waited for, and how long, they say
themselves.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

__all__ = ["TRANSITIONS", "RoundEvent", "RoundState"]


class RoundState(enum.Enum):
    """The states of those who play in rounds."""

    GATHERING = "gathering"
    COUNTDOWN = "countdown"
    STARTING = "starting"
    RUNNING = "running"


class RoundEvent(enum.Enum):
    """What happens to them."""

    COMPLETE = "everybody is ready"
    INCOMPLETE = "somebody left, came or is no longer ready"
    COUNTDOWN_OVER = "the countdown is over"
    STARTED = "the environment was reset"
    START_FAILED = "the environment could not be reset"
    ROUND_ENDED = "the episode is over"


# The first three events come from what the players and the time say, the other three from what the environment does.
#
# A reset takes time, so there is a state between the countdown and the round: in STARTING no second reset is ordered.
# Who leaves in STARTING or RUNNING changes no state: the round goes on without them, and where all have left, whoever
# owns it ends it. A round that was cut off ends like any other.
#
# INCOMPLETE does not reset the countdown's end: who comes, or changes their mind, again and again could
# otherwise keep the round from ever beginning. Once it is complete again, what is left of the countdown runs.
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
