"""Conditions that select episodes of a recording: who acted, the return, the environment."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it needs an extra, which the help of the commands does not
    from bridge.recording.reader import RecordedEpisode

__all__ = [
    "Selection",
    "acting",
    "add_selection_options",
    "called",
    "given_conditions",
    "is_complete",
    "is_idle",
    "names_of",
    "selection_of",
]

DEFAULT = "default"
"""Who acts where nobody does."""
UNFINISHED = ("running", "closed", "lost", "failed")
"""How an episode stops that did not come to its end."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """The conditions by which episodes are chosen."""

    who: str | None = None
    """Who acted in it, with wildcards: `person`, `agent`, `person:Ann` or `person Ann`, `agent:*`; None: anybody."""
    env_id: str | None = None
    """The environment's id, with wildcards; None: any."""
    min_return: float = -math.inf
    """The least sum of rewards."""
    max_return: float = math.inf
    """The largest sum of rewards."""
    intervention: bool | None = None
    """True if more than one acted in it, as where a person took over from an agent; None: either."""
    complete: bool = True
    """True if it must have ended without an error, and lack nothing."""
    acted: bool = True
    """True if somebody must have acted in it: a real-time world goes on, and is recorded, while nobody does."""

    def has(self, episode: RecordedEpisode) -> bool:
        """True if an episode is chosen."""
        if self.complete and not is_complete(episode):
            return False
        if self.acted and is_idle(episode):
            return False
        if self.env_id is not None and not fnmatch.fnmatchcase(episode.stream.title, self.env_id):
            return False
        total = episode.total
        limited = self.min_return > -math.inf or self.max_return < math.inf
        if limited and not self.min_return <= total <= self.max_return:  # no limit: also a return that is no number
            return False
        # In real time each frame without an action has the default one: nobody intervened by that.
        players = acting(episode.players)
        if self.intervention is not None and (len(players) > 1) != self.intervention:
            return False
        # `person` means every person, with a name or without.
        who = self.who
        spellings = [(name, called(name), name.partition(":")[0]) for name in players]
        return who is None or any(fnmatch.fnmatchcase(name, who) for names in spellings for name in names)

    def of(self, episodes: Sequence[RecordedEpisode]) -> list[RecordedEpisode]:
        """Return the episodes that are chosen."""
        return [episode for episode in episodes if self.has(episode)]


def acting(players: Sequence[str]) -> list[str]:
    """Return who acted, of the names that steps have: the default action is nobody's."""
    return [name for name in players if name and name != DEFAULT]


def called(player: str) -> str:
    """Return what to call a player: `person Ann` of `person:Ann`, `person 5457` of `person:person 5457`.

    `called` of the page's `words.js` does the same.
    """
    kind, _, name = player.partition(":")
    return (name or kind) if name in ("", kind) or name.startswith(f"{kind} ") else f"{kind} {name}"


def names_of(episode: RecordedEpisode) -> str:
    """Return the names of those who acted in an episode, for people to read."""
    return ", ".join(map(called, acting(episode.players))) or ("nobody" if episode.length else "")


def is_idle(episode: RecordedEpisode) -> bool:
    """True if an episode has steps, and nobody acted in any of them."""
    return bool(episode.length) and not acting(episode.players)


def is_complete(episode: RecordedEpisode) -> bool:
    """True if an episode has steps, came to its end without an error, and lacks nothing."""
    # One that failed was cut off where a step raised or a server was lost, which says nothing of who acted.
    return bool(episode.length) and not episode.incomplete and episode.end not in UNFINISHED


def add_selection_options(parser: argparse.ArgumentParser, *, complete: bool) -> None:
    """Add the options that choose episodes, each named as its field of `Selection`."""
    parser.add_argument("--who", metavar="WHO", help="where this one acted: person, agent, person:Ann, 'agent:*'")
    parser.add_argument("--env-id", metavar="ID", help="recorded of this environment; wildcards as in 'ALE/*'")
    parser.add_argument("--min-return", type=_number, default=-math.inf, metavar="X", help="with this return or more")
    parser.add_argument("--max-return", type=_number, default=math.inf, metavar="X", help="with this return or less")
    parser.add_argument(
        "--intervention",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="in which more than one acted, as where a person took over; or in which nobody else did",
    )
    parser.set_defaults(complete=complete, acted=complete)
    if complete:
        text = "also episodes in which nobody acted: all actions were default ones"
        parser.add_argument("--unattended", action="store_false", dest="acted", help=text)
        text = "also episodes that failed, as where a step raised, did not end, or lack rows or a checksum"
        parser.add_argument("--unfinished", action="store_false", dest="complete", help=text)


def _number(text: str) -> float:
    """Read a bound of returns, which may be infinite, for `add_argument(type=…)`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}")
    return value


def given_conditions(arguments: argparse.Namespace) -> str:
    """Return the conditions that were given, as an error names them: ` with --who person`; empty: none was."""
    given = [
        f"--{field.name.replace('_', '-')} {getattr(arguments, field.name)}"
        for field in dataclasses.fields(Selection)
        if field.name not in ("complete", "acted", "intervention") and getattr(arguments, field.name) != field.default
    ]
    if arguments.intervention is not None:
        given.append("--intervention" if arguments.intervention else "--no-intervention")
    return f" with {' '.join(given)}" if given else ""


def selection_of(arguments: argparse.Namespace) -> Selection:
    """Read the options."""
    return Selection(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Selection)})
