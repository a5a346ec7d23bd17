"""`gymnasium-bridge export`: recorded episodes as a dataset of Minari or LeRobot, or as films."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bridge.cli.program import OK, positive, say
from bridge.cli.target import ENV_HELP, find_factory
from bridge.errors import RecordingError, SettingError
from bridge.recording.selection import add_selection_options, given_conditions, is_complete, is_idle, selection_of

__all__ = ["register"]

_EPILOG = """examples:
  gymnasium-bridge export runs/ --minari cartpole/people-v0 --who person
  gymnasium-bridge export runs/ --minari pong/expert-v0 --env-id "ALE/Pong*" --min-return 15
  gymnasium-bridge export runs/ --lerobot datasets/pong --env-id "ALE/Pong*" --task "win at table tennis"
  gymnasium-bridge export runs/20261122T140501-3fa9c1-1.0.17 --mp4 films/

Observations that were not recorded come from a replay, which is compared with the recording.
"""


_FORMS = ("minari", "lerobot", "mp4")
_OF_FORMS = {
    "author": ("minari",),
    "data_format": ("minari",),
    "task": ("lerobot",),
    "fps": ("lerobot", "mp4"),
    "finite": ("minari", "lerobot"),
}
"""The options that only some forms have, with these forms."""


def register(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "export", description="Turn recorded episodes into a dataset or films.", epilog=_EPILOG
    )
    parser.add_argument("runs", type=Path, metavar="RUNS", help="a folder with recordings, or FOLDER/ID of an episode")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--minari", metavar="NAME", help="a dataset of Minari; of several agents one for each")
    what.add_argument(
        "--lerobot", type=Path, metavar="FOLDER", help="a dataset of LeRobot (v3.0); of several agents one for each"
    )
    what.add_argument("--mp4", type=Path, metavar="FOLDER", help="a film of each episode")
    parser.add_argument(
        "--env",
        metavar="ENV_ID",
        help=f"the environment for a replay, if observations were not recorded (default: the recorded id): {ENV_HELP}",
    )
    parser.add_argument("--author", metavar="NAME", help="with --minari: who made the dataset")
    parser.add_argument("--data-format", choices=["hdf5", "arrow"], help="with --minari: how it is stored")
    parser.add_argument("--task", metavar="TEXT", help="with --lerobot: the task in words (default: the environment)")
    parser.add_argument("--fps", type=positive, metavar="X", help="with --mp4 and --lerobot: frames per second")
    parser.add_argument(
        "--allow-calls", action="store_true", help="call the recorded methods and set the recorded attributes"
    )
    finite = (
        "with --minari and --lerobot: leave out episodes with a NaN or an infinity; without it --minari keeps them, "
        "and --lerobot refuses them"
    )
    parser.add_argument("--finite", action="store_true", help=finite)
    add_selection_options(parser, complete=True)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Export."""
    from bridge.recording.exports import export_minari, export_mp4  # they need an extra, which `--help` does not
    from bridge.recording.lerobot import export_lerobot
    from bridge.recording.reader import open_episode, read_folder

    form = next(form for form in _FORMS if getattr(arguments, form) is not None)
    for name, forms in _OF_FORMS.items():
        if getattr(arguments, name) and form not in forms:
            title, wanted = name.replace("_", "-"), " and ".join(f"--{each}" for each in forms)
            raise SettingError(f"--{title} is for {wanted}, got it with --{form}")
    env = None if arguments.env is None else find_factory(arguments.env)
    path: Path = arguments.runs
    if path.exists():
        folder = read_folder(path)
        for line in folder.warnings():
            say(f"warning: {line}")
        found = folder.episodes()
    else:
        found = [open_episode(path)]
    episodes = selection_of(arguments).of(found)
    said = f"{len(episodes)} of {len(found)} episodes"
    whole = [episode for episode in found if is_complete(episode)] if arguments.complete else found
    if partial := len(found) - len(whole):
        said += f"; left out: {partial} failed or incomplete (no step, no end, or missing rows; --unfinished)"
    if idle := sum(map(is_idle, whole)) if arguments.acted else 0:
        said += f"; left out: {idle} in which nobody acted (--unattended)"
    say(said)
    if not episodes:
        raise RecordingError(
            f"there are no such episodes{given_conditions(arguments)}; `gymnasium-bridge runs` lists those that there "
            "are, of which --unfinished takes also those that failed or did not end, and --unattended those in which "
            "nobody acted"
        )
    how = {"env": env, "say": say, "allow_calls": arguments.allow_calls}
    if arguments.mp4 is None:
        how["finite"] = arguments.finite
    if arguments.minari is not None:
        named = {"author": arguments.author, "data_format": arguments.data_format}
        export_minari(episodes, arguments.minari, **named, **how)
    elif arguments.lerobot is not None:
        export_lerobot(episodes, arguments.lerobot, task=arguments.task, fps=arguments.fps, **how)
    else:
        export_mp4(episodes, arguments.mp4, fps=arguments.fps, **how)
    return OK
