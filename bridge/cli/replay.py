"""`gymnasium-bridge replay`: verify a recorded episode, or watch it again."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.cli.program import FAILED, OK, USAGE, port_number, positive, say
from bridge.cli.serve import SERVED_AT
from bridge.cli.target import ENV_HELP, find_factory
from bridge.errors import RecordingError, SettingError

if TYPE_CHECKING:
    from bridge.recording.reader import RecordedEpisode, RecordedStream
    from bridge.recording.replay import Verification

__all__ = ["register"]

_EPILOG = f"""examples:
  gymnasium-bridge replay runs/20261122T140501-3fa9c1-1.0.17 --verify
  gymnasium-bridge replay runs/ --verify                             every episode of the folder
  gymnasium-bridge replay runs/… --verify --env ale_py:ALE/Pong-v5   the environment, where its id is not registered
  gymnasium-bridge replay runs/… --serve --port 50051                as a world that people watch

exit codes:
  {OK}    verified
  {FAILED}    a step differs, bytes of the recording are damaged, or an episode cannot be verified: there was no reset
       with a seed before it, or rows are missing
  {USAGE}    there is no such episode, or its environment cannot be made
  130  interrupted by Ctrl-C; --serve stops in order and exits with {OK}
"""


def register(commands: Any) -> None:
    """Add the sub-command."""
    parser = commands.add_parser("replay", description="Verify recorded episodes, or watch one again.", epilog=_EPILOG)
    parser.add_argument(
        "episode", type=Path, metavar="EPISODE", help="FOLDER/ID as `gymnasium-bridge runs` lists it, or a FOLDER"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--verify", action="store_true", help="make the environment again, and compare each step with the recording"
    )
    what.add_argument("--serve", action="store_true", help="publish the episode as a world, in real time")
    parser.add_argument(
        "--env",
        metavar="ENV_ID",
        help=f"the environment, if the recorded id is not registered: {ENV_HELP}",
    )
    parser.add_argument(
        "--allow-calls",
        action="store_true",
        help="call the recorded methods and set the recorded attributes; only for recordings that you trust",
    )
    parser.add_argument("--port", type=port_number, default=0, help="with --serve: the port (default: any free one)")
    parser.add_argument(
        "--fps", type=positive, metavar="X", help="with --serve: frames per second (default: as recorded)"
    )
    parser.set_defaults(run=run, exit_codes={RecordingError: USAGE})


def run(arguments: argparse.Namespace) -> int:
    """Verify or serve."""
    from bridge.recording.reader import open_episode, read_folder  # it needs an extra, which `--help` does not

    env = None if arguments.env is None else find_factory(arguments.env)
    if arguments.serve:
        return _serve(open_episode(arguments.episode), env, arguments)
    path: Path = arguments.episode
    if not path.exists():
        return _verify(open_episode(path), env, arguments.allow_calls)
    folder = read_folder(path)
    for line in folder.warnings():
        say(f"warning: {line}")
    codes = [code for stream in folder.streams for code in _verify_all(stream, env, arguments.allow_calls)]
    say(f"{codes.count(OK)} of {len(codes)} episodes are verified")
    # A folder with damaged bytes does not pass, because episodes may be missing.
    return OK if codes and set(codes) == {OK} and not folder.damage else FAILED


def _verify(episode: RecordedEpisode, env: Any, allow_calls: bool) -> int:
    from bridge.recording.replay import verify

    for damage in episode.stream.damage:
        say(f"warning: {damage}")
    try:
        done: Verification | RecordingError = verify(episode, env, allow_calls=allow_calls)
    except RecordingError as error:
        done = error
    code = _tell(done)
    return FAILED if episode.stream.damage else code


def _verify_all(stream: RecordedStream, env: Any, allow_calls: bool) -> list[int]:
    """Verify the episodes of one stream of a folder; print a line if its environment cannot be made."""
    from bridge.recording.replay import env_for, verify_stream

    try:
        return [_tell(done) for done in verify_stream(stream, env_for(stream, env), allow_calls=allow_calls)]
    except (RecordingError, SettingError) as error:
        codes = [FAILED] * len(stream.episodes())
        say(f"{stream.run}-{stream.number}: {len(codes)} episodes cannot be verified: {error}")
        return codes


def _tell(done: Verification | RecordingError) -> int:
    """Print the result of a verification; return the exit code."""
    say(str(done))
    return OK if not isinstance(done, RecordingError) and done.ok else FAILED


def _serve(episode: RecordedEpisode, env: Any, arguments: argparse.Namespace) -> int:
    """Serve an episode until a signal."""
    from bridge.recording.player import serve_episode

    server = serve_episode(
        episode, env, port=arguments.port, fps=arguments.fps, allow_calls=arguments.allow_calls, start=False
    )

    def started() -> None:
        say(f"{episode.id}{SERVED_AT}{' '.join(server.urls)}")
        say(f'watch:  gymnasium-bridge play "{server.url}?world=" --role spectator')
        say("Ctrl-C stops.")

    server.run(started=started)
    return OK
