"""The data of an episode: its observations and actions as elements of the environment's spaces."""

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
    """The agent's name, in an environment of several agents; None: there is one agent."""
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
    """bool, `(length,)`; an episode that was cut off is truncated in its last step."""
    by: list[str]
    """The name of the player of each action."""
    infos: list[dict[str, Any]] | None = None
    """`length` + 1 infos; None: they were not recorded."""

    def not_finite(self) -> int:
        """Return the number of steps with a NaN or an infinity in the action, the reward, or the observation after it.

        The first observation counts as a further step.
        """
        bad = [not _is_finite(seen) for seen in self.observations]
        for at, (action, reward) in enumerate(zip(self.actions, self.rewards, strict=True), 1):
            bad[at] = bad[at] or not (_is_finite(action) and _is_finite(reward))
        return sum(bad)


def _is_finite(sample: Any) -> bool:
    """Return False if a sample of a space contains NaN or infinity at any depth."""
    if isinstance(sample, dict):
        return all(map(_is_finite, sample.values()))
    if isinstance(sample, (tuple, list)):  # includes Gymnasium's graphs, which are named tuples
        return all(map(_is_finite, sample))
    kind = getattr(getattr(sample, "dtype", None), "kind", "f" if isinstance(sample, float) else "")
    return kind not in ("f", "c") or bool(np.isfinite(sample).all())


def facts_of(data: EpisodeData) -> dict[str, Any]:
    """Return an episode's facts for a dataset: how it ended, who acted, and what it continues if it is a branch."""
    parent = data.episode.parent
    names = dict.fromkeys(acting(data.by))  # each once, in the order of their first actions
    return {"end": data.episode.end, "by": ", ".join(names), **({} if parent is None else parent.columns())}


def observed_rows(
    episode: RecordedEpisode, env: Any = None, *, frames: bool = False, check: bool = True, allow_calls: bool = False
) -> ObservedRows:
    """Yield, for each call of an episode, its step, its observation, and a function that returns its frame.

    Call that function before the next item is requested. Observations and frames come from the recording, or from a
    replay if they were not recorded. For a lane, the observation is its own; for several agents it is a dict.

    Args:
        episode: The episode.
        env: Makes the environment, for a replay; None: the id in the recording.
        frames: True if frames are needed; otherwise None is yielded for the function.
        check: True to compare a replay with the recording.
        allow_calls: As for `Replay`.

    Raises:
        RecordingError: They were not recorded, and the episode cannot be replayed, or the replay differs from the
            recording.
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
        # Comparing single calls takes thirty times as long. But a frame can only be drawn before the next call.
        for batch in batches_of(replay.calls(start, episode.stop), 1 if frames else AT_ONCE):
            if check and (difference := compare.difference(batch)):
                (first,) = difference.values()
                raise RecordingError(f"{episode.id}: the replay is not what was recorded: {first}")
            for call, row in batch:
                if call in wanted and row.observation is not None:
                    seen = _seen(episode, row, is_first=wanted[call] == 0)
                    yield wanted[call], seen, partial(replay.frame, episode.lane) if frames else None


def _seen(episode: RecordedEpisode, row: Row, *, is_first: bool) -> Any:
    """Return the observation of an episode's own lane in a replayed call, or a dict of several agents' ones."""
    stream, lane = episode.stream, episode.lane
    if stream.kind == "agents":
        return {str(agent): seen for agent, seen in row.observation.items()}
    # A lane that began anew in the step that ended its episode has two observations: the last and the first.
    observation = stream.columns.parts_of(row)[-1 if is_first else 0].observation
    if stream.kind == "env":
        return observation
    if isinstance(observation, LaneSamples):
        return observation[lane]
    layout, batch = stream.columns.groups[0].layouts["observation"], batch_space(stream.spaces[0][0], stream.lanes)
    sample = next(itertools.islice(iterate(batch, observation), lane, None))
    return layout.unpack(layout.pack(sample, rounding=True))


def has_frames(episode: RecordedEpisode) -> bool:
    """Return True if the frames of an episode were recorded."""
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
    """Return why an episode cannot be shown, as far as the rows read tell; empty if it can."""
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
        env: Makes the environment if observations were not recorded; None: the id in the recording.
        agent: The agent, in an environment of several agents.
        allow_calls: As for `Replay`.

    Raises:
        RecordingError: The episode has no such agent, or the agent left and came back (`load_stretches` supports that),
            or its observations were not recorded and cannot be replayed.
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
    """Return the data of an episode, in one piece for each time that the agent entered: usually one.

    The first observation of an agent that comes back does not follow any of its actions, so it begins a new piece.

    Args:
        episode: The episode.
        env: As for `load_episode`.
        agent: As for `load_episode`.
        allow_calls: As for `Replay`.

    Raises:
        RecordingError: The episode has no such agent, or its observations are not available.
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
    # For each piece: where the agent entered, and where it acted from there on.
    stretches: list[tuple[int, list[int]]] = [(first, [])]
    for at in range(first + 1, len(rows)):
        if actions[at] is not None:
            stretches[-1][1].append(at)
        elif seen[at] is not None:  # it has not acted yet: it enters (again) with this observation
            # Before its first action the newest observation counts.
            stretches[len(stretches) - (not stretches[-1][1]) :] = [(at, [])]
    if len(stretches) > 1 and not stretches[-1][1]:  # the last piece has no action
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
    """Return the data after a first observation, for the rows in which an agent acted."""
    stream, observations = episode.stream, [seen[first]]
    for at in acted:  # without a last observation, the previous one is repeated
        observations.append(observations[-1] if seen[at] is None else seen[at])
    steps = rows[list(acted)]
    terminated, truncated = stream.column("terminated")[steps], stream.column("truncated")[steps]
    if acted and not terminated[-1]:  # the episode may have been cut off
        truncated[-1] = True
    infos = stream.infos(np.concatenate([rows[first : first + 1], steps])) if stream.header.get("infos") else None
    rewards = stream.column("reward")[steps]
    return EpisodeData(
        episode, agent, *stream.spaces[lane], observations, [actions[at] for at in acted], rewards,
        terminated, truncated, stream.players(steps), infos,
    )  # fmt: skip


def stacked(space: Space[Any], samples: list[Any]) -> Any:
    """Return samples of a space as lists of their parts: a dict of lists for a Dict, a tuple of lists for a Tuple."""
    if isinstance(space, spaces.Dict):
        return {key: stacked(part, [sample[key] for sample in samples]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(stacked(part, [sample[i] for sample in samples]) for i, part in enumerate(space.spaces))
    return list(samples)
