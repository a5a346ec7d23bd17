"""A match: who has which seat, who is ready, when a round begins, and its result. No clock or I/O.

The rules are those of a PERLERT lobby. People declare themselves ready; programs are always ready. When all seated
clients are ready, a countdown runs. It runs once: a client that joins, or is no longer ready, can delay the start, but
not restart the countdown. Nobody is waited for longer than `MatchOptions.patience` seconds, whoever joins and leaves:
then the round begins without them. A client that joins during a round plays in the next one.

`tick(now)` returns what the owner must do, and `wake()` returns when it is due. The owner reports the environment's
events with `started`, `failed` and `ended`.
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
"""The pause before a round is retried after a failure, in seconds: the first and the longest; it doubles."""
_MAX_NAME = 32
# Clients choose their names, so a client could fill the memory with new ones.
_MOST_STANDINGS = 50
_INVISIBLE = {"Cc", "Cf", "Cn", "Co", "Cs"}
"""Unicode categories of invisible characters, including those that change the direction of text."""


class Order(enum.Enum):
    """What the owner of a match must do."""

    BEGIN = "begin an episode"
    END = "cut off the running episode"


@dataclasses.dataclass(frozen=True)
class MatchOptions:
    """The times of a match, in seconds."""

    countdown: float = 3.0
    """From the time when all are ready to the start."""
    patience: float = 60.0
    """The longest time for which a ready player waits for those who are not; then the round begins without them."""

    def check(self) -> None:
        """Raise SettingError if a time is out of its range."""
        for name, value in (("countdown", self.countdown), ("patience", self.patience)):
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 3600:
                raise SettingError(f"expected {name} in seconds, from 0 to 3600, got {value!r}")


@dataclasses.dataclass
class Seat:
    """The seat of one agent of the environment."""

    stand_in: str
    """The name of the policy that plays while the seat has no client."""
    kind: str = ""
    """`person` or `agent`: the kind of client in the seat; empty: none."""
    name: str = ""
    """The client's name, as displayed."""
    ready: bool = False
    playing: bool = False
    """True if the client plays in the round that begins or runs."""

    @property
    def waits(self) -> bool:
        """True if the client is ready, and not playing yet."""
        return self.ready and not self.playing


@dataclasses.dataclass
class Standing:
    """The results of one player, over all seats."""

    kind: str
    """`person` or `agent`."""
    rounds: int = 0
    wins: int = 0
    best: float = -math.inf
    """The highest return of a round."""


def display_name(player: str) -> tuple[str, str]:
    """Return the kind of a player, `person` or `agent`, and the name without invisible characters.

    Args:
        player: The value of the JoinWorld setting `player`, such as `person:Ann`.
    """
    kind, _, given = player.partition(":")
    return kind, visible_name(given)[:_MAX_NAME].rstrip() or kind


def visible_name(given: str) -> str:
    """Return a name without control characters, direction marks, and other invisible characters."""
    shown = "".join(" " if unicodedata.category(letter)[0] == "Z" else letter for letter in given)
    shown = "".join(letter for letter in shown if unicodedata.category(letter) not in _INVISIBLE)
    return " ".join(shown.split())


class Match:
    """The match in one world.

    Args:
        seats: For each agent, the name of the policy that plays while it has no client.
        options: The times.
    """

    def __init__(self, seats: Mapping[str, str], options: MatchOptions | None = None) -> None:
        self.options = options or MatchOptions()
        self.state = RoundState.GATHERING
        self.seats = {name: Seat(stand_in) for name, stand_in in seats.items()}
        self.round = 0
        """The number of the running round, or of the last one."""
        self.result: dict[str, Any] | None = None
        """The result of the last round, in the form of `describe`; None: there was no round."""
        self.standings: dict[str, Standing] = {}
        """The totals of players over all rounds, by name, ordered by their last round."""
        self._waits_since = math.inf
        self._start_at = math.inf
        self._not_before = -math.inf
        self._failures = 0

    # Seats

    def take(self, seat: str, player: str) -> None:
        """Put a client into a free seat.

        Args:
            seat: The agent's name.
            player: The player, as for `display_name`. People are not ready at first.
        """
        kind, name = display_name(player)
        self.seats[seat] = Seat(self.seats[seat].stand_in, kind, name, ready=kind != "person")

    def leave(self, seat: str) -> None:
        """Free a seat; its policy continues a running round."""
        self.seats[seat] = Seat(self.seats[seat].stand_in)

    def stand_down(self, seat: str) -> None:
        """Let a seat's policy play the rest of the round; the client keeps the seat."""
        self.seats[seat].playing = False

    def set_ready(self, seat: str, ready: bool) -> None:
        """Set whether a seat's client is ready for the next round. Has no effect while it plays, and for programs."""
        one = self.seats[seat]
        if one.kind == "person" and not one.playing:
            one.ready = ready

    def is_playing(self, seat: str) -> bool:
        """True if the seat's client plays in the round that begins or runs."""
        return self.seats[seat].playing

    # Time

    def tick(self, now: float) -> Order | None:
        """Do what is due, and return an order for the owner, each only once."""
        # Also during a round: ready people may be waiting for others, while a round without people is about to be cut
        # off for them.
        waiting = [seat for seat in self.seats.values() if seat.waits]
        if not waiting:
            self._waits_since = self._start_at = math.inf
        else:
            # The first ready player starts the clock, which runs while anybody is ready: joining and leaving does not
            # restart the wait.
            self._waits_since = min(self._waits_since, now)
        if self.state is RoundState.RUNNING:
            return Order.END if self._is_pointless(now) else None
        complete = bool(waiting) and not self.missing(now)
        if self.state is RoundState.GATHERING and complete:
            self._follow(RoundEvent.COMPLETE)
            # A delayed countdown continues.
            self._start_at = max(min(self._start_at, now + self.options.countdown), self._not_before)
        elif self.state is RoundState.COUNTDOWN and not complete:
            self._follow(RoundEvent.INCOMPLETE)
        if self.state is RoundState.COUNTDOWN and now >= self._start_at:
            self._follow(RoundEvent.COUNTDOWN_OVER)
            # Clients that are ready now take part in the round; a client that joins while the environment is reset
            # plays in the next one.
            for seat in waiting:
                seat.playing = True
            return Order.BEGIN
        return None

    def missing(self, now: float) -> list[str]:
        """Return the seats of people for whom the ready players wait, or would wait."""
        late = now >= self._waits_since + self.options.patience
        return [] if late else [name for name, seat in self.seats.items() if seat.kind and not self._is_set(seat)]

    def _is_set(self, seat: Seat) -> bool:
        return seat.ready or seat.playing

    def _is_pointless(self, now: float) -> bool:
        """Return True if no client plays any more, or only programs do while people are ready for the next round."""
        nobody_plays = not any(seat.playing for seat in self.seats.values())
        # Programs may play a round of any length, for which ready people would have to wait.
        return nobody_plays or (self._people_wait_for_programs() and not self.missing(now))

    def _people_wait_for_programs(self) -> bool:
        people = [seat for seat in self.seats.values() if seat.kind == "person"]
        return any(seat.waits for seat in people) and not any(seat.playing for seat in people)

    def wake(self) -> float:
        """Return when `tick` is due; infinity: only after the next event."""
        if self.state is RoundState.COUNTDOWN:
            return self._start_at
        patient = self.state is RoundState.GATHERING or (
            self.state is RoundState.RUNNING and self._people_wait_for_programs()
        )
        # Only patience runs out by itself: all other changes come with a call of the owner, which calls `tick`.
        return self._waits_since + self.options.patience if patient else math.inf

    # Events of the environment

    def started(self) -> None:
        """Record that the environment was reset: the round runs."""
        self._follow(RoundEvent.STARTED)
        self.round += 1
        self.result = None

    def failed(self, error: str, now: float) -> None:
        """Record that the environment raised, which ends the round or its start."""
        # Programs are always ready: without a pause, an environment that fails in reset() would be reset endlessly.
        self._failures += 1
        self._not_before = now + doubling_pause(self._failures, *RETRY)
        self._follow(RoundEvent.START_FAILED if self.state is RoundState.STARTING else RoundEvent.ROUND_ENDED)
        self._gather()
        self.result = {"round": self.round, "seats": [], "winners": [], "error": error}

    def ended(self, returns: Mapping[str, float] | None) -> None:
        """Record the end of the round.

        Args:
            returns: The return of each seat that took part, by name; None: the round was cut off and has no result.
        """
        self._failures = 0
        if returns is not None:
            seats = [{**self._describe(name), "return": finite(value)} for name, value in returns.items()]
            self.result = {"round": self.round, "seats": seats, "winners": _winners(returns), "error": None}
            self._count(self.result)
        self._follow(RoundEvent.ROUND_ENDED)
        self._gather()

    def _count(self, result: Mapping[str, Any]) -> None:
        """Add a round to the standings of its players; the server's policies have none."""
        for seat in result["seats"]:
            if seat["kind"] == "policy":
                continue
            # Removed and added again at the end, to keep the dict ordered by the last round.
            standing = self.standings.pop(seat["name"], Standing(seat["kind"]))
            standing.rounds += 1
            standing.wins += seat["seat"] in result["winners"]
            standing.best = max(standing.best, -math.inf if seat["return"] is None else seat["return"])
            self.standings[seat["name"]] = standing
        for name in list(self.standings)[:-_MOST_STANDINGS]:  # the players whose last round was longest ago
            del self.standings[name]

    def _gather(self) -> None:
        self._waits_since = self._start_at = math.inf
        for seat in self.seats.values():
            if seat.playing:
                # People look at the result first. A client that joined during the round and is ready stays ready.
                seat.playing, seat.ready = False, seat.kind == "agent"

    def _follow(self, event: RoundEvent) -> None:
        self.state = TRANSITIONS[self.state, event]

    # Display

    def describe(self, now: float, returns: Mapping[str, float]) -> dict[str, Any]:
        """Return what a page shows of the match; see docs/protocol.md.

        Args:
            now: The current time.
            returns: The returns in the running round so far, by seat.
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
        """Return who plays a seat or, before a round, who will play it."""
        seat = self.seats[name]
        under_way = self.state in (RoundState.STARTING, RoundState.RUNNING)
        here = seat.playing if under_way else bool(seat.kind)
        return {"seat": name, "name": seat.name if here else seat.stand_in, "kind": seat.kind if here else "policy"}


def finite(value: float | None) -> float | None:
    """Return the number, or None for one that JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def _winners(returns: Mapping[str, float]) -> list[str]:
    """Return the seats with the highest return; empty if all are equal, or there is only one seat."""
    most = max((value for value in returns.values() if not math.isnan(value)), default=0.0)
    # Sums of the same rewards in a different order differ in their last bits.
    best = [name for name, value in returns.items() if math.isclose(value, most, rel_tol=1e-9, abs_tol=1e-9)]
    return best if len(best) < len(returns) else []
