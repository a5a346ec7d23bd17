"""The data of an episode: observations and actions as the environment gave and took them."""

from __future__ import annotations

import dataclasses
import io
import itertools
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_space, iterate

from bridge.core.encoding.tensors import Array
from bridge.errors import RecordingError, SettingError
from bridge.recording.reader import RecordedEpisode
from bridge.recording.replay import AT_ONCE, Replay, ReplayComparison, batches_of, replayed_from
from bridge.recording.rows import LaneSamples, Row
from bridge.recording.selection import acting

__all__ = [
    "EpisodeData",
    "ObservedRows",
    "facts_of",
    "load_episode",
    "load_stretches",
    "observed_rows",
    "obstacle",
    "stacked",
]

ObservedRows: TypeAlias = Generator[tuple[int, Any, Callable[[], Any] | None], None, None]


@dataclasses.dataclass(frozen=True)
class EpisodeData:
    """The observations and actions of one agent in an episode of `length` steps."""

    episode: RecordedEpisode
    agent: str | None
    """Whose part it is, in an environment of several agents; None: there is one."""
    observation_space: Space[Any]
    action_space: Space[Any]
    observations: list[Any]
    """`length` + 1 elements of the observation space."""
    actions: list[Any]
    """`length` elements of the action space."""
    rewards: Array
    """`(length,)`, or `(length, …)` of the reward space."""
    terminations: Array
    """bool, `(length,)`."""
    truncations: Array
    """bool, `(length,)`; an episode that did not end by itself is truncated in its last step."""
    by: list[str]
    """Who each action is of."""
    infos: list[dict[str, Any]] | None = None
    """`length` + 1 infos; None: they were not recorded."""

    def not_finite(self) -> int:
        """Return how many of its steps have a NaN or an infinity: in the action, the reward, or what was seen after.

        What was seen before the first step counts as a further one.
        """
        bad = [not _is_finite(seen) for seen in self.observations]
        for at, (action, reward) in enumerate(zip(self.actions, self.rewards, strict=True), 1):
            bad[at] = bad[at] or not (_is_finite(action) and _is_finite(reward))
        return sum(bad)


def _is_finite(sample: Any) -> bool:
    """Return False where a sample of a space has a number that is NaN or infinite, however deep."""
    if isinstance(sample, dict):
        return all(map(_is_finite, sample.values()))
    if isinstance(sample, (tuple, list)):  # also the graphs of Gymnasium, which are named tuples
        return all(map(_is_finite, sample))
    kind = getattr(getattr(sample, "dtype", None), "kind", "f" if isinstance(sample, float) else "")
    return kind not in ("f", "c") or bool(np.isfinite(sample).all())


def facts_of(data: EpisodeData) -> dict[str, Any]:
    """Return what a dataset says of an episode: how it ended, who acted, and of a branch what it goes on from."""
    parent = data.episode.parent
    names = dict.fromkeys(acting(data.by))  # each once, in the order in which they began
    return {"end": data.episode.end, "by": ", ".join(names), **({} if parent is None else parent.columns())}


def observed_rows(
    episode: RecordedEpisode, env: Any = None, *, frames: bool = False, check: bool = True, allow_calls: bool = False
) -> ObservedRows:
    """Yield step and observation of each call of an episode, and what gives its frame before the next is asked for.

    Observations and frames are as recorded, or by a replay where they were not. The observation of a lane is its own;
    of several agents it is a dict.

    Args:
        episode: The episode.
        env: What makes the environment, for a replay; None: the id that the recording names.
        frames: Whether frames are wanted; else None is yielded for what gives them.
        check: Whether a replay is compared with the recording.
        allow_calls: As for `Replay`.

    Raises:
        RecordingError: They were not recorded, and the episode cannot be replayed, or differs from what was recorded.
    """
    stream = episode.stream
    steps = stream.column("t")[episode.own]
    if stream.has_observations and (has_frames(episode) or not frames):
        for rows in np.split(episode.own, np.flatnonzero(np.diff(steps)) + 1):
            samples = stream.samples("observation", rows)
            seen = samples[0]
            if stream.agents:
                names = [stream.agents[lane] for lane in stream.column("lane")[rows].tolist()]
                seen = {name: one for name, one in zip(names, samples, strict=True) if one is not None}
            picture = partial(_picture, episode, int(rows[0])) if frames else None
            yield int(stream.column("t")[rows[0]]), seen, picture
        return
    start = replayed_from(episode)
    compare = ReplayComparison(stream)
    wanted = dict(zip(stream.column("call")[episode.own].tolist(), steps.tolist(), strict=True))
    mode = "rgb_array" if frames else None
    try:
        made = Replay(stream, env, render_mode=mode, allow_calls=allow_calls)
    except SettingError as error:
        what = "frames" if stream.has_observations else "observations"
        raise SettingError(
            f"{what} were not recorded, as Recording(FOLDER, {what}=True) does, so they come from a replay, which "
            f"resets and steps the environment: {error}"
        ) from error
    with made as replay:
        # To compare a call by itself takes thirty times as long. But a frame can only be drawn before the next call.
        for batch in batches_of(replay.calls(start, episode.stop), 1 if frames else AT_ONCE):
            if check and (difference := compare.difference(batch)):
                (first,) = difference.values()
                raise RecordingError(f"{episode.id}: the replay is not what was recorded: {first}")
            for call, row in batch:
                if call in wanted and row.observation is not None:
                    seen = _seen(episode, row, is_first=wanted[call] == 0)
                    yield wanted[call], seen, partial(replay.frame, episode.lane) if frames else None


def _seen(episode: RecordedEpisode, row: Row, *, is_first: bool) -> Any:
    """Return the observation of an episode's own lane in a replayed call, or a dict of those of several agents."""
    stream, lane = episode.stream, episode.lane
    if stream.kind == "agents":
        return {str(agent): seen for agent, seen in row.observation.items()}
    # Where lanes began anew in the step that ended them, there are two: the end, and the beginning.
    observation = stream.columns.parts_of(row)[-1 if is_first else 0].observation
    if stream.kind == "env":
        return observation
    if isinstance(observation, LaneSamples):
        return observation[lane]
    layout, batch = stream.columns.groups[0].layouts["observation"], batch_space(stream.spaces[0][0], stream.lanes)
    sample = next(itertools.islice(iterate(batch, observation), lane, None))
    return layout.unpack(layout.pack(sample, rounding=True))


def has_frames(episode: RecordedEpisode) -> bool:
    """Return whether frames of an episode were recorded."""
    if not episode.stream.header.get("frames"):
        return False
    return bool(episode.stream.cells("frame", episode.own[:1])[0].is_valid)


def _picture(episode: RecordedEpisode, row: int) -> Array:
    """Return a recorded frame."""
    cells = episode.stream.cells("frame", np.array([row]))
    try:
        picture: Array = np.lib.format.read_array(io.BytesIO(cells[0].as_py()), allow_pickle=False)
    except (ValueError, TypeError) as error:
        raise RecordingError(f"a frame of {episode.id} cannot be read: {error}") from error
    return picture


def obstacle(episode: RecordedEpisode) -> str:
    """Say why an episode cannot be watched again, as far as the rows that were read tell; empty: it can."""
    if episode.stream.has_observations and has_frames(episode):
        return ""
    try:
        replayed_from(episode)
    except RecordingError as error:
        return str(error)
    return ""


def load_episode(
    episode: RecordedEpisode, env: Any = None, agent: str | None = None, *, allow_calls: bool = False
) -> EpisodeData:
    """Return the data of an episode.

    Args:
        episode: The episode.
        env: What makes the environment where observations were not recorded; None: the id that the recording names.
        agent: Whose part, in an environment of several agents.
        allow_calls: As for `Replay`.

    Raises:
        RecordingError: There is no such agent in it, it left and came back (`load_stretches` takes that), or its
            observations are neither recorded nor to be had by a replay.
    """
    found = load_stretches(episode, env, agent, allow_calls=allow_calls)
    if len(found) > 1:
        raise RecordingError(
            f"{episode.id}: expected an agent that acts from its first step to its last, and {agent} left and came "
            f"back; load_stretches returns its {len(found)} stretches"
        )
    return found[0]


def load_stretches(
    episode: RecordedEpisode, env: Any = None, agent: str | None = None, *, allow_calls: bool = False
) -> list[EpisodeData]:
    """Return the data of an episode, in one piece for each time that the agent came in: mostly one.

    An agent that leaves and comes back saw something new before it acted again, which follows none of its actions.

    Args:
        episode: As for `load_episode`, and so are the other arguments.
        env: What makes the environment.
        agent: Whose part.
        allow_calls: As for `Replay`.

    Raises:
        RecordingError: There is no such agent in it, or its observations are not to be had.
    """
    stream, rows = episode.stream, episode.own
    if (agent is None) == (stream.kind == "agents") or (agent is not None and agent not in stream.agents):
        raise RecordingError(f"expected one of the agents {', '.join(stream.agents) or '(none)'}, got {agent!r}")
    lane = 0 if agent is None else stream.agents.index(agent)
    if agent is not None:
        rows = rows[stream.column("lane")[rows] == lane]
    if stream.has_observations:
        seen = stream.samples("observation", rows)
    else:
        found = {step: sample for step, sample, _ in observed_rows(episode, env, allow_calls=allow_calls)}
        samples = [found.get(step) for step in stream.column("t")[rows].tolist()]
        seen = samples if agent is None else [(sample or {}).get(agent) for sample in samples]
    actions = stream.samples("action", rows)
    first = next((at for at, sample in enumerate(seen) if sample is not None), None)
    if first is None:
        raise RecordingError(f"{episode.id}: {agent or 'the agent'} saw nothing in it")
    # Each is where an agent came in, and where it acted from there on.
    stretches: list[tuple[int, list[int]]] = [(first, [])]
    for at in range(first + 1, len(rows)):
        if actions[at] is not None:
            stretches[-1][1].append(at)
        elif seen[at] is not None:  # without having acted: it comes in (again) by this
            # Before its first action the newest observation counts.
            stretches[len(stretches) - (not stretches[-1][1]) :] = [(at, [])]
    if len(stretches) > 1 and not stretches[-1][1]:  # it saw something, and did nothing more
        stretches.pop()
    return [_data_of(episode, agent, lane, rows, seen, actions, *each) for each in stretches]


def _data_of(
    episode: RecordedEpisode,
    agent: str | None,
    lane: int,
    rows: Array,
    seen: Sequence[Any],
    actions: Sequence[Any],
    first: int,
    acted: Sequence[int],
) -> EpisodeData:
    """Return what follows from a first observation, and where among the rows an agent acted after it."""
    stream, observations = episode.stream, [seen[first]]
    for at in acted:  # one that ends without a last observation keeps the one before
        observations.append(observations[-1] if seen[at] is None else seen[at])
    steps = rows[list(acted)]
    terminated, truncated = stream.column("terminated")[steps], stream.column("truncated")[steps]
    if acted and not terminated[-1]:  # it may have been cut off
        truncated[-1] = True
    infos = stream.infos(np.concatenate([rows[first : first + 1], steps])) if stream.header.get("infos") else None
    rewards = stream.column("reward")[steps]
    return EpisodeData(
        episode, agent, *stream.spaces[lane], observations, [actions[at] for at in acted], rewards,
        terminated, truncated, stream.players(steps), infos,
    )  # fmt: skip


def stacked(space: Space[Any], samples: list[Any]) -> Any:
    """Return samples of a space as lists of its parts: a dict of lists for a Dict, a tuple of lists for a Tuple."""
    if isinstance(space, spaces.Dict):
        return {key: stacked(part, [sample[key] for sample in samples]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(stacked(part, [sample[i] for sample in samples]) for i, part in enumerate(space.spaces))
    return list(samples)
