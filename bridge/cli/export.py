"""`bridge export`: recorded episodes as a dataset of Minari, as arrays, or as films."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bridge.cli.program import OK, say
from bridge.cli.target import find_target
from bridge.errors import RecordingError
from bridge.recording.exports import export_minari, export_mp4, export_npz
from bridge.recording.reader import open_episode, read_folder
from bridge.recording.selection import add_selection_options, selection_of

__all__ = ["register"]

_EPILOG = """examples:
  bridge export runs/ --minari cartpole/people-v0 --who person
  bridge export runs/ --minari pong/expert-v0 --env-id "ALE/Pong*" --min-return 15
  bridge export runs/ --npz arrays/ --no-intervention
  bridge export runs/20261122T140501-3fa9c1-1.0.17 --mp4 films/

Observations that were not recorded come from a replay, which is held against the recording meanwhile.
"""


def register(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "export", description="Turn recorded episodes into a dataset, arrays or films.", epilog=_EPILOG
    )
    parser.add_argument("runs", type=Path, metavar="RUNS", help="a folder with recordings, or FOLDER/ID of an episode")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--minari", metavar="NAME", help="a dataset of Minari; of several agents one for each")
    what.add_argument("--npz", type=Path, metavar="FOLDER", help="a file of NumPy arrays for each episode")
    what.add_argument("--mp4", type=Path, metavar="FOLDER", help="a film of each episode")
    parser.add_argument("--env", metavar="ENV_ID", help="what makes the environment, as for bridge serve")
    parser.add_argument("--author", metavar="NAME", help="with --minari: who made the dataset")
    parser.add_argument("--data-format", choices=["hdf5", "arrow"], help="with --minari: how it is stored")
    parser.add_argument("--fps", type=float, metavar="X", help="with --mp4: frames a second")
    add_selection_options(parser, complete=True)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Export."""
    env = None if arguments.env is None else find_target([arguments.env]).factory
    path: Path = arguments.runs
    if path.exists():
        folder = read_folder(path)
        for damage in folder.damage:
            say(f"warning: {damage}")
        found = folder.episodes()
    else:
        found = [open_episode(path)]
    episodes = selection_of(arguments).of(found)
    say(f"{len(episodes)} of {len(found)} episodes")
    if not episodes:
        raise RecordingError("there are no such episodes; `bridge runs` lists those that there are")
    if arguments.minari is not None:
        export_minari(
            episodes, arguments.minari, env=env, author=arguments.author, data_format=arguments.data_format, say=say
        )
    elif arguments.npz is not None:
        export_npz(episodes, arguments.npz, env=env, say=say)
    else:
        export_mp4(episodes, arguments.mp4, env=env, fps=arguments.fps, say=say)
    return OK
