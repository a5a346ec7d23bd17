"""The data of an episode: observations and actions as the environment gave and took them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector.utils import batch_space, iterate

from bridge.encoding.tensors import Array
from bridge.errors import RecordingError
from bridge.recording.reader import Episode
from bridge.recording.replay import Comparison, Replay, replayed_from

__all__ = ["EpisodeData", "lane_sample", "load_episode", "observed_rows", "obstacle", "stacked"]


@dataclasses.dataclass(frozen=True)
class EpisodeData:
    """What one agent saw and did in an episode of `length` steps."""

    episode: Episode
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


def observed_rows(
    episode: Episode, env: Any = None, *, frames: bool = False, check: bool = True
) -> Iterator[tuple[int, Any, Callable[[], Any] | None]]:
    """Yield row and observation of each row of an episode, and what gives its frame before the next is asked for.

    Observations and frames are as recorded, or by a replay where they were not.

    Args:
        episode: The episode.
        env: What makes the environment, for a replay; None: the id that the recording names.
        frames: Whether frames are wanted; else None is yielded for what gives them.
        check: Whether a replay is held against the recording.

    Raises:
        RecordingError: They were not recorded, and the episode cannot be replayed, or differs from what was recorded.
    """
    stream, own = episode.stream, set(episode.rows.tolist())
    rows = range(episode.start, episode.stop)
    if stream.has_observations and (_has_frames(episode) or not frames):
        for row, observation in zip(rows, stream.samples("observation", rows.start, rows.stop), strict=True):
            if row in own:
                yield row, observation, partial(_picture, episode, row) if frames else None
        return
    start = replayed_from(episode)
    compare = Comparison(stream, start, episode.stop)
    with Replay(stream, env, render_mode="rgb_array" if frames else None) as replay:
        for replayed in replay.rows(start, episode.stop):
            text = compare(replayed) if check else ""
            if text:
                raise RecordingError(f"{episode.id}: the replay is not what was recorded: {text}")
            if replayed.row in own:
                yield replayed.row, replayed.observation, partial(replay.frame, episode.lane) if frames else None


def _has_frames(episode: Episode) -> bool:
    """Whether frames of an episode were recorded."""
    stream = episode.stream
    return stream.has_column("has_frame") and bool(stream.column("has_frame")[episode.start - stream.first])


def _picture(episode: Episode, row: int) -> Array:
    """Return a recorded frame."""
    frame: Array = episode.stream.column("frame")[row - episode.stream.first]
    picture: Array = frame[episode.lane] if episode.stream.kind == "lanes" else frame
    return picture


def obstacle(episode: Episode) -> str:
    """Say why an episode cannot be watched again, as far as the rows that were read tell; empty: it can."""
    stream = episode.stream
    if (stream.has_observations and _has_frames(episode)) or (
        stream.first and stream.seeded_row(episode.start) is None
    ):
        return ""
    try:
        replayed_from(episode)
    except RecordingError as error:
        return str(error)
    return ""


def load_episode(episode: Episode, env: Any = None, agent: str | None = None) -> EpisodeData:
    """Return the data of an episode.

    Args:
        episode: The episode.
        env: What makes the environment where observations were not recorded; None: the id that the recording names.
        agent: Whose part, in an environment of several agents.

    Raises:
        RecordingError: There is no such agent in it, or its observations are neither recorded nor to be had by a
            replay.
    """
    stream = episode.stream
    if (agent is None) == (stream.kind == "agents"):
        raise RecordingError(f"expected one of the agents {', '.join(stream.agents) or '(none)'}, got {agent!r}")
    if stream.kind == "agents":
        return _load_agent(episode, env, str(agent))
    pair = stream.spaces[0]
    observations = [observation for _, observation, _ in observed_rows(episode, env)]
    actions = episode.chosen(stream.samples("action", episode.start, episode.stop))[1:]
    if stream.kind == "lanes":
        observations = [lane_sample(pair[0], batch, stream.lanes, episode.lane) for batch in observations]
        actions = [lane_sample(pair[1], batch, stream.lanes, episode.lane) for batch in actions]
    flags = [episode.column(name)[1:] for name in ("terminated", "truncated")]
    players = stream.players(episode.start, episode.stop, episode.lane)
    by = [str(name) for name in episode.chosen(players)[1:]]
    return EpisodeData(
        episode, None, *pair, observations, actions, episode.rewards, flags[0], _cut(flags[1], flags[0]), by
    )


def _load_agent(episode: Episode, env: Any, agent: str) -> EpisodeData:
    stream = episode.stream
    if agent not in stream.agents:
        raise RecordingError(f"expected one of the agents {', '.join(stream.agents)}, got {agent!r}")
    number = stream.agents.index(agent)
    rows = slice(episode.start - stream.first, episode.stop - stream.first)
    acted = stream.column("acted")[rows][:, number]
    seen = {row: part.get(agent) for row, part, _ in observed_rows(episode, env)}
    first = next((row for row, sample in seen.items() if sample is not None), None)
    if first is None:
        raise RecordingError(f"{episode.id}: the agent {agent!r} saw nothing in it")
    steps = [row for row in range(first + 1, episode.stop) if acted[row - episode.start]]
    observations = [seen[first]]
    for row in steps:  # an agent that ends without a last observation keeps the one before
        observations.append(observations[-1] if seen[row] is None else seen[row])
    given = stream.samples("action", episode.start, episode.stop)
    actions = {row: part.get(agent) for row, part in zip(range(episode.start, episode.stop), given, strict=True)}
    names = dict(zip(range(episode.start, episode.stop), stream.players(episode.start, episode.stop), strict=True))
    index = np.array(steps, np.int64) - stream.first
    reward, terminated, truncated = (
        stream.column(name)[index, number] for name in ("reward", "terminated", "truncated")
    )
    return EpisodeData(
        episode, agent, *stream.spaces[number], observations, [actions[row] for row in steps], reward, terminated,
        _cut(truncated, terminated), [names[row][agent] for row in steps],
    )  # fmt: skip


def _cut(truncated: Array, terminated: Array) -> Array:
    """Return the truncations with the last step as one, where neither flag says that the episode ended."""
    found: Array = truncated.copy()
    if len(found) and not terminated[-1]:
        found[-1] = True
    return found


def lane_sample(space: Space[Any], batch: Any, lanes: int, lane: int) -> Any:
    """Return the sample of one lane of a batch."""
    for index, sample in enumerate(iterate(batch_space(space, lanes), batch)):
        if index == lane:
            return np.array(sample) if isinstance(sample, np.ndarray) else sample
    raise RecordingError(f"expected lane {lane} of a batch of {lanes}")


def stacked(space: Space[Any], samples: list[Any]) -> Any:
    """Return samples of a space as lists of its parts: a dict of lists for a Dict, a tuple of lists for a Tuple."""
    if isinstance(space, spaces.Dict):
        return {key: stacked(part, [sample[key] for sample in samples]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(stacked(part, [sample[i] for sample in samples]) for i, part in enumerate(space.spaces))
    return list(samples)
