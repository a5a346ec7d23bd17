"""Conditions that select episodes of a recording: who acted, the return, the environment."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it needs an extra, but the commands' help must not
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
"""The player of steps without one."""
UNFINISHED = ("running", "closed", "lost", "failed")
"""The ways in which an episode stops without reaching its end."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """The conditions that select episodes."""

    who: str | None = None
    """The player, with wildcards: `person`, `agent`, `person:Ann` or `person Ann`, `agent:*`; None: any."""
    env_id: str | None = None
    """The environment's id, with wildcards; None: any."""
    min_return: float = -math.inf
    """The lowest sum of rewards."""
    max_return: float = math.inf
    """The largest sum of rewards."""
    intervention: bool | None = None
    """True: more than one player acted, as when a person took over from an agent. False: only one. None: either."""
    complete: bool = True
    """True: only episodes that ended without an error, and are not missing any rows."""
    acted: bool = True
    """True: only episodes in which somebody acted. A real-time world continues, and is recorded, without players."""

    def has(self, episode: RecordedEpisode) -> bool:
        """Return True if an episode is selected."""
        if self.complete and not is_complete(episode):
            return False
        if self.acted and is_idle(episode):
            return False
        if self.env_id is not None and not fnmatch.fnmatchcase(episode.stream.title, self.env_id):
            return False
        total = episode.total
        limited = self.min_return > -math.inf or self.max_return < math.inf
        if limited and not self.min_return <= total <= self.max_return:  # without limits a NaN is selected, too
            return False
        # In real time, frames without an action use the default one, which is no intervention.
        players = acting(episode.players)
        if self.intervention is not None and (len(players) > 1) != self.intervention:
            return False
        # `person` matches every person, with or without a name.
        who = self.who
        spellings = [(name, called(name), name.partition(":")[0]) for name in players]
        return who is None or any(fnmatch.fnmatchcase(name, who) for names in spellings for name in names)

    def of(self, episodes: Sequence[RecordedEpisode]) -> list[RecordedEpisode]:
        """Return the selected episodes."""
        return [episode for episode in episodes if self.has(episode)]


def acting(players: Sequence[str]) -> list[str]:
    """Return the players that acted: the default action is nobody's."""
    return [name for name in players if name and name != DEFAULT]


def called(player: str) -> str:
    """Return a player's name for people: `person Ann` for `person:Ann`, `person 5457` for `person:person 5457`.

    `called` in the page's `words.js` does the same.
    """
    kind, _, name = player.partition(":")
    return (name or kind) if name in ("", kind) or name.startswith(f"{kind} ") else f"{kind} {name}"


def names_of(episode: RecordedEpisode) -> str:
    """Return the names of an episode's players for people."""
    return ", ".join(map(called, acting(episode.players))) or ("nobody" if episode.length else "")


def is_idle(episode: RecordedEpisode) -> bool:
    """Return True if an episode has steps, and nobody acted in any of them."""
    return bool(episode.length) and not acting(episode.players)


def is_complete(episode: RecordedEpisode) -> bool:
    """Return True if an episode has steps, ended without an error, and has all its rows."""
    # A failed episode was cut off where a step raised or a server was lost, which says nothing about its player.
    return bool(episode.length) and not episode.incomplete and episode.end not in UNFINISHED


def add_selection_options(parser: argparse.ArgumentParser, *, complete: bool) -> None:
    """Add the options that select episodes, each named like its field of `Selection`."""
    parser.add_argument("--who", metavar="WHO", help="where this one acted: person, agent, person:Ann, 'agent:*'")
    parser.add_argument("--env-id", metavar="ID", help="recorded of this environment; wildcards as in 'ALE/*'")
    parser.add_argument("--min-return", type=_number, default=-math.inf, metavar="X", help="with this return or more")
    parser.add_argument("--max-return", type=_number, default=math.inf, metavar="X", help="with this return or less")
    parser.add_argument(
        "--intervention",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="in which several players acted, for example after a takeover; or only one",
    )
    parser.set_defaults(complete=complete, acted=complete)
    if complete:
        text = "also episodes in which nobody acted: all actions were default ones"
        parser.add_argument("--unattended", action="store_false", dest="acted", help=text)
        text = "also episodes that failed (for example because a step raised), did not end, or lack rows or a checksum"
        parser.add_argument("--unfinished", action="store_false", dest="complete", help=text)


def _number(text: str) -> float:
    """Parse a limit of returns, which may be infinite, for `add_argument(type=…)`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}")
    return value


def given_conditions(arguments: argparse.Namespace) -> str:
    """Return the given conditions for an error message, such as ` with --who person`; empty if there are none."""
    given = [
        f"--{field.name.replace('_', '-')} {getattr(arguments, field.name)}"
        for field in dataclasses.fields(Selection)
        if field.name not in ("complete", "acted", "intervention") and getattr(arguments, field.name) != field.default
    ]
    if arguments.intervention is not None:
        given.append("--intervention" if arguments.intervention else "--no-intervention")
    return f" with {' '.join(given)}" if given else ""


def selection_of(arguments: argparse.Namespace) -> Selection:
    """Return the selection for the options."""
    return Selection(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Selection)})
