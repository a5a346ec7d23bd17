"""Export episodes as Minari datasets and as videos."""

from __future__ import annotations

import contextlib
import copy
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.extras import needed
from bridge.core.logs import counted
from bridge.errors import RecordingError, SettingError
from bridge.recording.episodes import EpisodeData, facts_of, load_stretches, observed_rows, stacked
from bridge.recording.reader import RecordedEpisode, RecordedStream
from bridge.recording.replay import kwargs_of
from bridge.recording.selection import acting, called

__all__ = [
    "Said",
    "datasets_of",
    "even",
    "export_minari",
    "export_mp4",
    "name_of_agent",
    "quiet",
    "rate_of",
    "told_branches",
    "told_infos",
    "write_film",
]

Said = Callable[[str], None]


def quiet(text: str) -> None:
    """Ignore a message."""


def export_minari(
    episodes: Sequence[RecordedEpisode],
    name: str,
    *,
    env: Any = None,
    author: str | None = None,
    data_format: str | None = None,
    say: Said = quiet,
    allow_calls: bool = False,
    finite: bool = False,
) -> list[str]:
    """Write episodes as a Minari dataset without loss; with several agents, one dataset for each.

    An episode's infos contain `by`, the player of each action: `infos["by"][t + 1]` belongs to `actions[t]`. Its
    metadata contains `end` and, as `by`, all players. NaN and infinities are kept and reported.

    Args:
        episodes: Episodes of one environment.
        name: The dataset's id, such as `cartpole/people-v0`; with several agents, each adds its name:
            `pong/people-first_0-v0`.
        env: Makes the environment if observations were not recorded; None: the id in the recording.
        author: The author of the dataset.
        data_format: `hdf5` or `arrow`; None: Minari's default.
        say: Called with a line of text for each dataset.
        allow_calls: As for `Replay`.
        finite: True to leave out episodes with NaN or infinities.

    Returns:
        The ids of the datasets.

    Raises:
        SettingError: Minari is not installed or does not support the name or the spaces, or the dataset exists.
        RecordingError: The episodes are of several environments, or their observations are not available.
    """
    if (match := re.fullmatch(r"(.+)(-v\d+)", name)) is None:
        raise SettingError(f"expected a dataset's name that ends in its version, as cartpole/people-v0, got {name!r}")
    with needed("this needs Minari", "minari"):
        import minari
        import minari.data_collector
        import minari.storage.datasets_root_dir
    more = {} if data_format is None else {"data_format": data_format}
    names: list[str] = []
    with contextlib.ExitStack() as undo:
        for agent, data in datasets_of(episodes, env, allow_calls, finite=finite, say=say):
            dataset = name if agent is None else f"{match[1]}-{name_of_agent(agent)}{match[2]}"
            # Minari refuses a name whose folder exists, even if a failed export left it behind.
            if not (folder := minari.storage.datasets_root_dir.get_dataset_path(dataset)).exists():
                undo.callback(shutil.rmtree, folder, ignore_errors=True)
            _write_dataset(minari, dataset, episodes[0].stream, data, author=author, **more)
            names.append(dataset)
            steps = sum(len(one.actions) for one in data)
            kept = f"{counted(len(data), 'episode')}, {counted(steps, 'step')}"
            say(f"{dataset}: {kept}{told_infos(data)}{told_branches(data, 'metadata')}")
            counts = {one.episode.id: count for one in data if (count := one.not_finite())}
            if counts:
                affected = counted(sum(counts.values()), "step")
                say(
                    f"warning: {dataset} keeps the NaN or infinities of {affected} in the episode"
                    f"{'' if len(counts) == 1 else 's'} {', '.join(counts)}; --finite (finite=True) leaves out such"
                )
        undo.pop_all()  # all datasets are complete: keep them
    return names


def _write_dataset(minari: Any, name: str, stream: RecordedStream, data: Sequence[EpisodeData], **more: Any) -> None:
    """Write a dataset; `more` is passed to Minari. Raise SettingError if Minari does not support it."""
    buffers = [
        minari.data_collector.EpisodeBuffer(
            id=number,
            seed=one.episode.seed,
            observations=stacked(one.observation_space, one.observations),
            actions=stacked(one.action_space, one.actions),
            rewards=list(one.rewards),
            terminations=one.terminations.tolist(),
            truncations=one.truncations.tolist(),
            infos={"by": ["", *one.by]},  # with an entry for the reset, as all of Minari's infos
        )
        for number, one in enumerate(data)
    ]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* is (set to )?None")  # about an address and a link, which nobody gave
            dataset = minari.create_dataset_from_buffers(
                dataset_id=name,
                buffer=buffers,
                env=_spec_of(stream),
                observation_space=data[0].observation_space,
                action_space=data[0].action_space,
                description=_describe(data),
                requirements=_requirements(stream),
                jpeg_encoding=False,  # it would change colours
                **more,
            )
        dataset.storage.update_episode_metadata([facts_of(one) for one in data])
    # It raises the last two for unsupported spaces.
    except (ValueError, TypeError, NotImplementedError) as error:
        raise SettingError(f"Minari does not take the dataset {name!r}: {error}") from error


def datasets_of(
    episodes: Sequence[RecordedEpisode], env: Any, allow_calls: bool, *, finite: bool = False, say: Said = quiet
) -> Iterator[tuple[str | None, list[EpisodeData]]]:
    """Yield each agent with its data of the episodes in which it acted; None for the agent if there is only one.

    Args:
        episodes: Episodes of one environment.
        env: As for `export_minari`.
        allow_calls: As for `Replay`.
        finite: True to leave out episodes with NaN or infinities.
        say: Called with the number of such episodes, and of episodes without steps.

    Raises:
        RecordingError: There are no episodes, they are of different environments, or an agent did not act in any.
    """
    if not episodes:
        raise RecordingError("there are no such episodes; `gymnasium-bridge runs` lists those that there are")
    first = episodes[0].stream
    for episode in episodes:
        if episode.stream.header["spaces"] != first.header["spaces"] or episode.stream.title != first.title:
            raise RecordingError(
                f"expected episodes of one environment, got {first.title} and {episode.stream.title}; choose one by "
                "--env-id"
            )
    if unseen := sum(episode.stream.misses_frames for episode in episodes):
        say(
            f"warning: a client recorded {unseen} of the {len(episodes)} episodes in real time. It does not see every "
            "frame, and the action of a step may have been executed later; have the server record them "
            "(serve --record, in Python record=)"
        )
    agents: Sequence[str | None] = first.agents or [None]
    for agent in agents:
        loaded = (load_stretches(episode, env, agent, allow_calls=allow_calls) for episode in episodes)
        acted = [[one for one in some if one.actions] for some in loaded]
        data, no_step = [one for some in acted for one in some], f"no step{'' if agent is None else f' of {agent}'}"
        if not data:
            raise RecordingError(f"there is {no_step} in these episodes")
        if empty := acted.count([]):
            say(f"left out: {empty} of {len(episodes)} episodes, with {no_step}")
        if finite:
            found, data = len(data), [one for one in data if not one.not_finite()]
            if len(data) < found:
                say(f"left out: {counted(found - len(data), 'episode')} with a NaN or an infinity (--finite)")
            if not data:
                raise RecordingError(
                    "each of these episodes has a NaN or an infinity: leave out --finite, or mend the environment"
                )
        yield agent, data


def told_infos(data: Sequence[EpisodeData]) -> str:
    """Return a message if infos were recorded, which datasets do not contain; empty otherwise."""
    return "; without the recorded infos" if any(one.infos is not None for one in data) else ""


def told_branches(data: Sequence[EpisodeData], place: str) -> str:
    """Return a message with the number of branches, and where the dataset has their parents; empty if none."""
    count = sum(one.episode.parent is not None for one in data)
    return f"; {count} of them are branches, whose parent is in the {place} of the episode" if count else ""


def name_of_agent(agent: str) -> str:
    """Return an agent's name as part of a file name: an untrusted recording may contain any text as a name."""
    return re.sub(r"[^A-Za-z0-9_-]+", "_", agent)


def _spec_of(stream: RecordedStream) -> Any:
    """Return the environment's spec, with the recorded keywords, for the dataset's `recover_environment`."""
    import gymnasium

    env_id = stream.header.get("env_id")
    if stream.kind == "agents" or env_id not in gymnasium.registry or "kwargs" not in stream.header:
        return None
    spec = copy.deepcopy(gymnasium.spec(env_id))
    kwargs = kwargs_of(stream)
    kwargs.pop("render_mode", None)  # the caller of `recover_environment` chooses it
    for name in ("max_episode_steps", "disable_env_checker"):  # `gymnasium.make` has arguments of these names
        if (value := kwargs.pop(name, None)) is not None:
            setattr(spec, name, value)
    spec.kwargs.update(kwargs)
    return spec


def _describe(data: Sequence[EpisodeData]) -> str:
    header = data[0].episode.stream.header
    who = sorted({called(name) for one in data for name in acting(one.by)}) or ["nobody"]
    title = header.get("env_id") or header.get("title")
    return f"Recorded by Gymnasium Bridge from {title}; by {', '.join(who)}"


def _requirements(stream: RecordedStream) -> list[str]:
    """Return the versions of the packages at the recording, as requirements for pip."""
    versions: dict[str, str] = stream.header.get("versions", {})
    return [f"{name}=={text}" for name, text in versions.items() if name not in ("python", "gymnasium-bridge")]


def export_mp4(
    episodes: Sequence[RecordedEpisode],
    folder: str | Path,
    *,
    env: Any = None,
    fps: float | None = None,
    say: Said = quiet,
    allow_calls: bool = False,
) -> list[Path]:
    """Write each episode as a video, `ID.mp4`, from its recorded frames or those of a replay.

    Args:
        episodes: The episodes.
        folder: The folder for the files; created if it does not exist.
        env: As for `export_minari`.
        fps: Frames per second; None: those of the real-time world, or of the environment's metadata, or 30.
        say: Called with a line of text for each file.
        allow_calls: As for `Replay`.

    Raises:
        SettingError: PyAV is not installed.
        RecordingError: The frames of an episode are not available.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    written = []
    for episode in episodes:
        path, rate = target / f"{episode.id}.mp4", rate_of(episode, fps)
        rows = observed_rows(episode, env, frames=True, allow_calls=allow_calls)
        write_film(path, (frame() if frame is not None else None for _, _, frame in rows), rate)
        written.append(path)
        branch = "" if episode.parent is None else f"; a branch of {episode.parent}, which a film has no place for"
        say(f"{path}: {counted(episode.length + 1, 'frame')} at {rate:g} a second{branch}")
    return written


def write_film(path: Path, pictures: Iterable[Any], fps: float, keyframes: int = 12) -> None:
    """Write pictures as a video (H.264) with `fps` frames per second and a keyframe every `keyframes` frames.

    Raises:
        SettingError: PyAV is not installed.
        RecordingError: The pictures have another form.
    """
    with needed("films need PyAV", "film"):
        import av
    with contextlib.ExitStack() as undo:
        undo.callback(path.unlink, missing_ok=True)  # an incomplete video would look like a complete one
        with av.open(str(path), "w") as container:
            film = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(100_000))
            film.pix_fmt, film.codec_context.gop_size = "yuv420p", keyframes
            for picture in map(even, pictures):
                # The size is known only with the first picture, and must be set before encoding.
                if not film.codec_context.is_open:
                    film.height, film.width = picture.shape[:2]
                container.mux(film.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(film.encode())
        undo.pop_all()


def rate_of(episode: RecordedEpisode, fps: float | None = None) -> float:
    """Return the frame rate of a video: the requested one, or the world's, or the environment's, or 30."""
    return float(fps or episode.fps or episode.stream.header.get("render_fps") or 30)


def even(frame: Any) -> Any:
    """Return a picture with three bytes per pixel; an odd last row or column is repeated."""
    picture = np.asarray(frame)
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
        raise RecordingError(f"expected frames of bytes, (height, width, 3), got {picture.dtype} {picture.shape}")
    # yuv420p has one color for each two by two pixels, so libx264 refuses odd sizes.
    odd = ((0, picture.shape[0] % 2), (0, picture.shape[1] % 2), (0, 0))
    return np.ascontiguousarray(np.pad(picture, odd, mode="edge"))
