"""The state of an endpoint of a directory, without input or output: one table, and when to try again.

An endpoint is *untried* until an attempt to join a world there has ended. It is *up* once one was joined, and stays so
while its worlds answer. Four kinds of trouble are told apart, because each ends in another way:

- *dark*: nobody answers there, or a connection was lost. It ends when a server is started, or the network mended.
- *full*: a server answers, and has no room. It ends when another client leaves. Worlds that are there go on.
- *failing*: the server is well, but its environment raises in every reset. A world can still be joined, so that shows
  nothing: only the first observation of an episode ends it.
- *refused*: it refuses us, or serves another environment. It ends when a person changes the server.

A *draining* server has said that it takes no further worlds. Its worlds go on until it is gone, and it does not take
that back: the next server at its URL is another one. Whose worlds have all left sees no connection end, so after a
while it is asked.

An endpoint in trouble is tried again after pauses that double, by one world at a time: were all that are lost to try
it at once, a black hole would hold up each of them, and a full server would refuse each of them.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Mapping

from bridge.errors import Code, EnvironmentFailedError, PeerError, RefusedError, RemoteError

__all__ = ["TRANSITIONS", "EndpointEvent", "EndpointRecord", "EndpointState", "change_of", "event_of"]


class EndpointState(enum.Enum):
    """The state of an endpoint, as far as this client has seen."""

    UNTRIED = "untried"
    UP = "up"
    FULL = "full"
    FAILING = "failing"
    DARK = "dark"
    DRAINING = "draining"
    REFUSED = "refused"

    __hash__ = object.__hash__  # Enum's own is a Python function; each attempt goes through all endpoints


def change_of(before: EndpointState, after: EndpointState) -> str:
    """Return what a change of state means to a user who reads the log: the rest of a sentence about the server."""
    if after is EndpointState.DARK:
        return "does not answer" if before is EndpointState.UNTRIED else "no longer answers"
    return _UP_AFTER[before] if after is EndpointState.UP else _TROUBLE_TEXTS[after]


_TROUBLE_TEXTS = {
    EndpointState.UNTRIED: "was not tried yet",
    EndpointState.FULL: "is full",
    EndpointState.FAILING: "answers, but its environment fails when it is made or reset",
    EndpointState.DRAINING: "shuts down, and takes no further environments",
    EndpointState.REFUSED: "answers, but refuses this client",
}
_UP_AFTER = {
    EndpointState.UNTRIED: "answers",
    EndpointState.UP: "answers",
    EndpointState.FULL: "has room again",
    EndpointState.FAILING: "answers, and its environment works again",
    EndpointState.DARK: "answers again",
    EndpointState.DRAINING: "was started again, and answers",
    EndpointState.REFUSED: "accepts this client again",
}


class EndpointEvent(enum.Enum):
    """An event of an endpoint."""

    JOINED = "world joined"
    OBSERVED = "first observation of an episode"
    NO_ROOM = "no room for a world"
    RAISED = "environment raised when it was made or reset"
    GONE = "no connection, connection lost, or no answer in time"
    REFUSES = "refused, or other spaces"
    DRAINS = "server says that it drains"


_S, _E = EndpointState, EndpointEvent

# Each world of an endpoint is joined, stepped and lost by itself, so events of several worlds mix, and any event may
# follow any other: the table has a row for each pair.
#
# The latest event decides, with these exceptions. An observation of a world that was there before says nothing about
# room for another one, or about who is let in. While an environment fails, a world can still be joined, or find the
# server full: neither shows that its resets work again. A server that drains refuses worlds and may still fail, but
# nothing brings it back: only its end, or a world that was joined at its URL, shows that it is over.
TRANSITIONS: Mapping[tuple[EndpointState, EndpointEvent], EndpointState] = {
    (_S.UNTRIED, _E.JOINED): _S.UP,
    (_S.UNTRIED, _E.OBSERVED): _S.UP,  # of a world of a URL that is an endpoint of the directory since
    (_S.UNTRIED, _E.NO_ROOM): _S.FULL,
    (_S.UNTRIED, _E.RAISED): _S.FAILING,
    (_S.UNTRIED, _E.GONE): _S.DARK,
    (_S.UNTRIED, _E.REFUSES): _S.REFUSED,
    (_S.UNTRIED, _E.DRAINS): _S.DRAINING,
    (_S.UP, _E.JOINED): _S.UP,
    (_S.UP, _E.OBSERVED): _S.UP,
    (_S.UP, _E.NO_ROOM): _S.FULL,
    (_S.UP, _E.RAISED): _S.FAILING,
    (_S.UP, _E.GONE): _S.DARK,
    (_S.UP, _E.REFUSES): _S.REFUSED,
    (_S.UP, _E.DRAINS): _S.DRAINING,
    (_S.FULL, _E.JOINED): _S.UP,
    (_S.FULL, _E.OBSERVED): _S.FULL,  # of a world that was there before
    (_S.FULL, _E.NO_ROOM): _S.FULL,
    (_S.FULL, _E.RAISED): _S.FAILING,
    (_S.FULL, _E.GONE): _S.DARK,
    (_S.FULL, _E.REFUSES): _S.REFUSED,
    (_S.FULL, _E.DRAINS): _S.DRAINING,
    (_S.FAILING, _E.JOINED): _S.FAILING,  # the environment can be made, and still raise when it is reset
    (_S.FAILING, _E.OBSERVED): _S.UP,
    (_S.FAILING, _E.NO_ROOM): _S.FAILING,
    (_S.FAILING, _E.RAISED): _S.FAILING,
    (_S.FAILING, _E.GONE): _S.DARK,
    (_S.FAILING, _E.REFUSES): _S.REFUSED,
    (_S.FAILING, _E.DRAINS): _S.DRAINING,
    (_S.DARK, _E.JOINED): _S.UP,
    (_S.DARK, _E.OBSERVED): _S.UP,  # one of several connections was lost, another one goes on
    (_S.DARK, _E.NO_ROOM): _S.FULL,
    (_S.DARK, _E.RAISED): _S.FAILING,
    (_S.DARK, _E.GONE): _S.DARK,
    (_S.DARK, _E.REFUSES): _S.REFUSED,
    (_S.DARK, _E.DRAINS): _S.DRAINING,
    (_S.DRAINING, _E.JOINED): _S.UP,  # the next server at its URL; the old one would say once more that it drains
    (_S.DRAINING, _E.OBSERVED): _S.DRAINING,
    (_S.DRAINING, _E.NO_ROOM): _S.DRAINING,
    (_S.DRAINING, _E.RAISED): _S.DRAINING,
    (_S.DRAINING, _E.GONE): _S.DARK,
    (_S.DRAINING, _E.REFUSES): _S.DRAINING,
    (_S.DRAINING, _E.DRAINS): _S.DRAINING,
    (_S.REFUSED, _E.JOINED): _S.UP,
    (_S.REFUSED, _E.OBSERVED): _S.REFUSED,  # of a world that was there before
    (_S.REFUSED, _E.NO_ROOM): _S.FULL,
    (_S.REFUSED, _E.RAISED): _S.FAILING,
    (_S.REFUSED, _E.GONE): _S.DARK,
    (_S.REFUSED, _E.REFUSES): _S.REFUSED,
    (_S.REFUSED, _E.DRAINS): _S.DRAINING,
}

# Seconds until it is asked whether there is another server at the URL of one that drains.
_DRAINING = 30.0
_WELL = frozenset({_S.UNTRIED, _S.UP})
_TROUBLE = frozenset({_E.NO_ROOM, _E.RAISED, _E.GONE, _E.REFUSES, _E.DRAINS})


def event_of(error: RemoteError) -> EndpointEvent:
    """Return what the end of an attempt, or of a connection, says of the endpoint."""
    # The first question, for this is a RefusedError too.
    if isinstance(error, EnvironmentFailedError):
        return EndpointEvent.RAISED
    if isinstance(error, PeerError):  # it breaks the protocol, or has other spaces
        return EndpointEvent.REFUSES
    # A server that is stopping refuses worlds by UNAVAILABLE: soon nobody answers there.
    if not isinstance(error, RefusedError) or error.code == Code.UNAVAILABLE:
        return EndpointEvent.GONE
    return EndpointEvent.NO_ROOM if error.code == Code.RESOURCE_EXHAUSTED else EndpointEvent.REFUSES


@dataclasses.dataclass
class EndpointRecord:
    """The state of one endpoint, and when a world may be tried there; times are monotonic seconds."""

    state: EndpointState = EndpointState.UNTRIED
    """Assigned by `handle` alone."""
    failures: int = 0
    """Attempts in a row that failed; those that were under way together count as one."""
    failed_at: float = -math.inf
    """The time of the last failure."""
    retry_at: float = -math.inf
    """The time from which on a world may be tried again."""
    trial_until: float = -math.inf
    """The time by which the one attempt under way will have ended; until then there is no other."""

    def may_try(self, now: float) -> bool:
        """Tell whether a world may be tried there now."""
        return self.state in _WELL or (now >= self.retry_at and now >= self.trial_until)

    @property
    def rank(self) -> tuple[bool, float]:
        """The key to sort endpoints by: those that are well first, and the last to fail last."""
        # `failed_at` outlasts the trouble: one that is up again does not come behind others for it.
        return self.state not in _WELL, -math.inf if self.state in _WELL else self.failed_at

    def tried(self, now: float, patience: float) -> None:
        """Take note that a world is tried there, whose attempt ends within `patience` seconds."""
        # Where it is well, as many worlds as there is room for are tried at a time.
        if self.state not in _WELL:
            self.trial_until = now + patience

    def handle(self, event: EndpointEvent, now: float, pause: Callable[[int], float]) -> bool:
        """Take an event; return whether the state changed.

        Args:
            event: What was seen.
            now: When.
            pause: Gives the seconds until the next attempt for the number of failures in a row.
        """
        before, self.state = self.state, TRANSITIONS[self.state, event]
        if event is EndpointEvent.DRAINS and before is EndpointState.DRAINING:
            return False  # it is looked for often, and when to ask the next server there was decided when it began
        # JOINED changes neither pause nor count: a server that takes each world and then loses it, or whose environment
        # raises in each reset, is tried in growing pauses too. OBSERVED shows that all of it works.
        if event in _TROUBLE:
            if event is EndpointEvent.DRAINS:
                self.retry_at = now + _DRAINING
            # Else what fails now was tried together with what has failed before. Not so the end of a server that
            # drained: the next one may be at its URL in a moment.
            elif now >= self.retry_at or (before is EndpointState.DRAINING and event is EndpointEvent.GONE):
                self.failures += 1
                self.retry_at = now + pause(self.failures)
            self.failed_at, self.trial_until = now, -math.inf
        elif self.state in _WELL and event is EndpointEvent.OBSERVED:
            self.failures, self.retry_at = 0, -math.inf
        return self.state is not before
