"""`gymnasium-bridge runs`: the episodes of a folder of recordings, as a table."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.program import OK, USAGE, positive_int, say, table
from bridge.core.logs import counted
from bridge.errors import RecordingError
from bridge.recording.selection import add_selection_options, names_of, selection_of

if TYPE_CHECKING:
    from bridge.recording.reader import RecordedEpisode

__all__ = ["register"]

_EPILOG = """examples:
  gymnasium-bridge runs runs/
  gymnasium-bridge runs runs/ --who person --min-return 100
  gymnasium-bridge runs runs/ --last 20
  gymnasium-bridge runs runs/ --json | jq .return
"""
_HEAD = ("episode", "environment", "began", "steps", "return", "end", "seed", "who", "")
_NUMBERS = (3, 4, 6)


def register(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser("runs", description="List the episodes of recordings.", epilog=_EPILOG)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a folder with recordings, or one of its files")
    add_selection_options(parser, complete=False)
    parser.add_argument(
        "--last", type=positive_int, metavar="N", help="only the N episodes that began last, from the newest files"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object in each line instead of a table")
    parser.set_defaults(run=run, exit_codes={RecordingError: USAGE})


def run(arguments: argparse.Namespace) -> int:
    """List them."""
    from bridge.recording.reader import read_folder  # it needs an extra, which `--help` does not

    last: int | None = arguments.last
    folder = read_folder(arguments.folder, last)
    episodes = selection_of(arguments).of(folder.episodes())[-(last or 0) :]
    if arguments.json:
        for episode in episodes:
            say(json.dumps(facts_of(episode)))
    else:
        rows = [_HEAD, *(_row(episode) for episode in episodes)]
        if any(episode.parent is not None for episode in episodes):
            parents = ("branch of", *("" if one.parent is None else str(one.parent) for one in episodes))
            rows = [(*row[:-1], parent, row[-1]) for row, parent in zip(rows, parents, strict=True)]
        for line in table(rows, _NUMBERS):
            say(line)
        steps = sum(episode.length for episode in episodes)
        say(f"{counted(len(episodes), 'episode')}, {counted(steps, 'step')}")
    for line in folder.warnings():
        say(f"warning: {line}")
    return OK


def facts_of(episode: RecordedEpisode) -> dict[str, Any]:
    """Return the facts of an episode, for JSON."""
    from bridge.recording.episodes import obstacle  # needs an extra, which `--help` does not

    return {
        "episode": episode.id,
        "environment": episode.stream.title,
        "began": episode.started,
        "seconds": episode.seconds,
        "steps": episode.length,
        "return": episode.total,
        "end": episode.end,
        "seed": episode.seed,
        "parent": None if episode.parent is None else episode.parent.facts(),
        "players": episode.players,
        "incomplete": episode.incomplete,
        "observations": episode.stream.has_observations,
        "obstacle": obstacle(episode),
    }


def _row(episode: RecordedEpisode) -> tuple[str, ...]:
    return (
        episode.id,
        episode.stream.title,
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(episode.started)),
        str(episode.length),
        f"{episode.total:g}",
        episode.end,
        "" if episode.seed is None else str(episode.seed),
        names_of(episode),
        "incomplete" if episode.incomplete else "",
    )
