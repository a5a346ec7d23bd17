"""A match: who sits where, who is ready, when a round begins, and what came of it. No clock, no input or output.

Its words and rules are those of a lobby of PERLERT. People say that they are ready; programs always are. Once all who
have a seat are ready a countdown runs, which is counted once: whoever comes or changes their mind can put the start
off, and begins no new countdown. Nobody is waited for longer than `MatchOptions.patience` seconds, however many come
and go: then the round begins without them. Whoever comes during a round plays in the next one.

`tick(now)` returns what the owner is to do, and `wake()` says when it is due. Of the environment it is told by
`started`, `failed` and `ended`.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import unicodedata
from collections.abc import Mapping
from typing import Any

from bridge.core.back_off import doubling_pause
from bridge.core.rounds import TRANSITIONS, RoundEvent, RoundState
from bridge.errors import SettingError

__all__ = [
    "Match",
    "MatchOptions",
    "Order",
    "Seat",
    "display_name",
    "finite",
]

RETRY = (0.5, 10.0)
"""Seconds after which a round is begun at the earliest when one has failed: at first, and at most, doubling."""
_MAX_NAME = 32
# Names are what clients say they are, so a client could fill the memory with new ones.
_MOST_STANDINGS = 50
_INVISIBLE = {"Cc", "Cf", "Cn", "Co", "Cs"}
"""Categories of characters that are not shown, among them those that turn the direction of a text."""


class Order(enum.Enum):
    """An order to the owner of a match."""

    BEGIN = "begin an episode"
    END = "cut off the running episode"


@dataclasses.dataclass(frozen=True)
class MatchOptions:
    """Times of a match, in seconds."""

    countdown: float = 3.0
    """From everybody's being ready to the start."""
    patience: float = 60.0
    """Somebody who is ready waits at most so long for those who are not; then the round begins without these."""

    def check(self) -> None:
        """Raise SettingError where a time is out of its range."""
        for name, value in (("countdown", self.countdown), ("patience", self.patience)):
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 3600:
                raise SettingError(f"expected {name} in seconds, from 0 to 3600, got {value!r}")


@dataclasses.dataclass
class Seat:
    """One agent of the environment."""

    stand_in: str
    """The name of the policy that plays it while no client does."""
    kind: str = ""
    """`person` or `agent`: who has it; empty: nobody."""
    name: str = ""
    """Who has it, as it is shown."""
    ready: bool = False
    playing: bool = False
    """True if who has it plays in the round that begins, or runs."""

    @property
    def waits(self) -> bool:
        """True if who has it is ready, and not playing yet."""
        return self.ready and not self.playing


@dataclasses.dataclass
class Standing:
    """The results of one player, in all seats."""

    kind: str
    """`person` or `agent`."""
    rounds: int = 0
    wins: int = 0
    best: float = -math.inf
    """The highest return of a round."""


def display_name(player: str) -> tuple[str, str]:
    """Return what is shown of a player: `person` or `agent`, and the name without what is invisible.

    Args:
        player: As the JoinWorld setting `player` has it, such as `person:Ann`.
    """
    kind, _, given = player.partition(":")
    return kind, visible_name(given)[:_MAX_NAME].rstrip() or kind


def visible_name(given: str) -> str:
    """Return a name without control characters, those that change the direction of text, and other invisible ones."""
    shown = "".join(" " if unicodedata.category(letter)[0] == "Z" else letter for letter in given)
    shown = "".join(letter for letter in shown if unicodedata.category(letter) not in _INVISIBLE)
    return " ".join(shown.split())


class Match:
    """The match that is played in one world.

    Args:
        seats: What to call the policy that plays while no client does, for each agent by its name.
        options: Times.
    """

    def __init__(self, seats: Mapping[str, str], options: MatchOptions | None = None) -> None:
        self.options = options or MatchOptions()
        self.state = RoundState.GATHERING
        self.seats = {name: Seat(stand_in) for name, stand_in in seats.items()}
        self.round = 0
        """The number of the round that runs, or of the last one."""
        self.result: dict[str, Any] | None = None
        """The result of the last round, as `describe` shows it; None: there was none."""
        self.standings: dict[str, Standing] = {}
        """The totals of players over all rounds, by name, in the order in which they played last."""
        self._waits_since = math.inf
        self._start_at = math.inf
        self._not_before = -math.inf
        self._failures = 0

    # Who sits where

    def take(self, seat: str, player: str) -> None:
        """Put a client into a free seat.

        Args:
            seat: The agent's name.
            player: Who it is, as `display_name` takes it. People have to say that they are ready.
        """
        kind, name = display_name(player)
        self.seats[seat] = Seat(self.seats[seat].stand_in, kind, name, ready=kind != "person")

    def leave(self, seat: str) -> None:
        """Free a seat; in a running round its policy plays on."""
        self.seats[seat] = Seat(self.seats[seat].stand_in)

    def stand_down(self, seat: str) -> None:
        """Have a seat's policy play the rest of the round; who has the seat keeps it."""
        self.seats[seat].playing = False

    def set_ready(self, seat: str, ready: bool) -> None:
        """Say whether who has a seat is ready for the next round. While it plays, and for programs, nothing changes."""
        one = self.seats[seat]
        if one.kind == "person" and not one.playing:
            one.ready = ready

    def is_playing(self, seat: str) -> bool:
        """True if who has a seat plays in the round that begins, or runs."""
        return self.seats[seat].playing

    # Time

    def tick(self, now: float) -> Order | None:
        """Do what is due; return what the owner is to do, once."""
        # Also in a round: people who are ready may wait for others, before a round of programs alone is cut off for
        # them.
        waiting = [seat for seat in self.seats.values() if seat.waits]
        if not waiting:
            self._waits_since = self._start_at = math.inf
        else:
            # The first who is ready starts the clock, and it goes on while anybody is: nobody waits anew because others
            # come and go.
            self._waits_since = min(self._waits_since, now)
        if self.state is RoundState.RUNNING:
            return Order.END if self._is_pointless(now) else None
        complete = bool(waiting) and not self.missing(now)
        if self.state is RoundState.GATHERING and complete:
            self._follow(RoundEvent.COMPLETE)
            # A countdown that was put off goes on.
            self._start_at = max(min(self._start_at, now + self.options.countdown), self._not_before)
        elif self.state is RoundState.COUNTDOWN and not complete:
            self._follow(RoundEvent.INCOMPLETE)
        if self.state is RoundState.COUNTDOWN and now >= self._start_at:
            self._follow(RoundEvent.COUNTDOWN_OVER)
            # Who is ready now has a part in the round; who sits down while the environment is reset plays in the next
            # one.
            for seat in waiting:
                seat.playing = True
            return Order.BEGIN
        return None

    def missing(self, now: float) -> list[str]:
        """Return the seats of the people for whom those who are ready wait, or would."""
        late = now >= self._waits_since + self.options.patience
        return [] if late else [name for name, seat in self.seats.items() if seat.kind and not self._is_set(seat)]

    def _is_set(self, seat: Seat) -> bool:
        return seat.ready or seat.playing

    def _is_pointless(self, now: float) -> bool:
        """True if nobody plays any more, or only programs do while people are ready for the next round."""
        nobody_plays = not any(seat.playing for seat in self.seats.values())
        # Programs alone may play a round of any length, which people who are ready would have to sit through.
        return nobody_plays or (self._people_wait_for_programs() and not self.missing(now))

    def _people_wait_for_programs(self) -> bool:
        people = [seat for seat in self.seats.values() if seat.kind == "person"]
        return any(seat.waits for seat in people) and not any(seat.playing for seat in people)

    def wake(self) -> float:
        """Return when `tick` is due; infinity: when something happens."""
        if self.state is RoundState.COUNTDOWN:
            return self._start_at
        patient = self.state is RoundState.GATHERING or (
            self.state is RoundState.RUNNING and self._people_wait_for_programs()
        )
        # Patience alone runs out by itself: all other changes come with a call of the owner, which ticks.
        return self._waits_since + self.options.patience if patient else math.inf

    # What the environment does

    def started(self) -> None:
        """The environment was reset: the round runs."""
        self._follow(RoundEvent.STARTED)
        self.round += 1
        self.result = None

    def failed(self, error: str, now: float) -> None:
        """The environment raised, which ends the round or its start."""
        # Programs are ready at once: without a pause an environment that fails in reset() would be reset without end.
        self._failures += 1
        self._not_before = now + doubling_pause(self._failures, *RETRY)
        self._follow(RoundEvent.START_FAILED if self.state is RoundState.STARTING else RoundEvent.ROUND_ENDED)
        self._gather()
        self.result = {"round": self.round, "seats": [], "winners": [], "error": error}

    def ended(self, returns: Mapping[str, float] | None) -> None:
        """The round is over.

        Args:
            returns: Of the seats that had a part in it, by name; None: it was cut off, and has no result.
        """
        self._failures = 0
        if returns is not None:
            seats = [{**self._describe(name), "return": finite(value)} for name, value in returns.items()]
            self.result = {"round": self.round, "seats": seats, "winners": _winners(returns), "error": None}
            self._count(self.result)
        self._follow(RoundEvent.ROUND_ENDED)
        self._gather()

    def _count(self, result: Mapping[str, Any]) -> None:
        """Add a round to the standings of those who played in it; policies of the server have none."""
        for seat in result["seats"]:
            if seat["kind"] == "policy":
                continue
            # Put back at the end: the order of the dict is that in which they played last.
            standing = self.standings.pop(seat["name"], Standing(seat["kind"]))
            standing.rounds += 1
            standing.wins += seat["seat"] in result["winners"]
            standing.best = max(standing.best, -math.inf if seat["return"] is None else seat["return"])
            self.standings[seat["name"]] = standing
        for name in list(self.standings)[:-_MOST_STANDINGS]:  # whoever played longest ago
            del self.standings[name]

    def _gather(self) -> None:
        self._waits_since = self._start_at = math.inf
        for seat in self.seats.values():
            if seat.playing:
                # People look at the result first. Who has sat down during the round, and is ready, stays so.
                seat.playing, seat.ready = False, seat.kind == "agent"

    def _follow(self, event: RoundEvent) -> None:
        self.state = TRANSITIONS[self.state, event]

    # For people

    def describe(self, now: float, returns: Mapping[str, float]) -> dict[str, Any]:
        """Return what a page shows of it; see docs/protocol.md.

        Args:
            now: The time.
            returns: Of the running round so far, by seat.
        """
        counting = self.state is RoundState.COUNTDOWN
        return {
            "state": self.state.value,
            "round": self.round,
            "countdown": round(max(0.0, self._start_at - now), 3) if counting else None,
            "waits_for": self.missing(now) if self.state is RoundState.GATHERING else [],
            "seats": [
                {
                    **self._describe(name),
                    "taken_by": seat.name,
                    "ready": seat.ready,
                    "playing": seat.playing,
                    "return": finite(returns.get(name)),
                }
                for name, seat in self.seats.items()
            ],
            "result": self.result,
            "standings": [
                {"name": name, **dataclasses.asdict(one), "best": finite(one.best)}
                for name, one in sorted(self.standings.items(), key=lambda item: (-item[1].wins, -item[1].best))
            ],
        }

    def _describe(self, name: str) -> dict[str, Any]:
        """Return who plays a seat; before a round: who is to."""
        seat = self.seats[name]
        under_way = self.state in (RoundState.STARTING, RoundState.RUNNING)
        here = seat.playing if under_way else bool(seat.kind)
        return {"seat": name, "name": seat.name if here else seat.stand_in, "kind": seat.kind if here else "policy"}


def finite(value: float | None) -> float | None:
    """Return a number that JSON has."""
    return value if value is not None and math.isfinite(value) else None


def _winners(returns: Mapping[str, float]) -> list[str]:
    """Return the seats with the highest return; none where all have the same, or there is one seat."""
    most = max((value for value in returns.values() if not math.isnan(value)), default=0.0)
    # Sums of the same rewards in another order differ in their last bits.
    best = [name for name, value in returns.items() if math.isclose(value, most, rel_tol=1e-9, abs_tol=1e-9)]
    return best if len(best) < len(returns) else []
