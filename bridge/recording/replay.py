"""Replay: the environment of a recording is made again, and goes through the same resets and steps.

An episode that began by itself has the random generator's state from those before it, so a replay begins with the last
reset that seeded all lanes. What comes is held against what was recorded: a recording is a proof.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import gymnasium
import numpy as np

from bridge.encoding import values
from bridge.encoding.properties import read_encoded
from bridge.encoding.space_json import space_from_json
from bridge.encoding.tensors import Array
from bridge.errors import RecordingError, RequestError, SettingError, TensorError
from bridge.pb import bridge_pb2, properties_pb2
from bridge.recording.columns import Kind, hash_of
from bridge.recording.facts import package_versions
from bridge.recording.reader import Episode, Stream, open_episode
from bridge.worlds.environment import adopt
from bridge.worlds.multi_agent.source import ParallelRecipe, ParallelSource
from bridge.worlds.realtime.clocked_world import kept
from bridge.worlds.rewards import Rewards
from bridge.worlds.source import EnvRecipe, WorldRequest
from bridge.worlds.timed import TimeAction

__all__ = ["Comparison", "Replay", "ReplayedRow", "Verification", "replayed_from", "verify", "verify_stream"]

T = TypeVar("T")


class _Inline:
    """Runs the calls of an environment where they are made."""

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function."""
        return function(*args)

    def close(self) -> None:
        """Nothing to close."""


def _now(coroutine: Any) -> Any:
    """Run a coroutine that waits for nothing."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("expected a call that waits for nothing")


@dataclasses.dataclass(frozen=True)
class ReplayedRow:
    """What a reset or a step of the replayed environment gave."""

    row: int
    observation: Any = None
    """Of the environment, a batch of lanes, or a dict by agent."""
    reward: Any = 0.0
    terminated: Any = False
    truncated: Any = False
    alive: Any = ()
    info: Any = None
    error: str = ""
    """What the environment raised; empty: nothing."""


@dataclasses.dataclass(frozen=True)
class Verification:
    """What came of a comparison."""

    episode: str
    rows: int
    """How many resets and steps were compared."""
    difference: str = ""
    """What differs first, with the step; empty: nothing."""
    step: int | None = None
    """The step of the episode at which it differs, 0 for its first observation; negative: before the episode."""
    damage: str = ""
    """What of the recording is damaged; empty: nothing."""
    versions: str = ""
    """Which packages have other versions than when it was recorded."""

    @property
    def ok(self) -> bool:
        """Whether the recording is what the environment does."""
        return not self.difference and not self.damage

    def __str__(self) -> str:
        if self.ok:
            return f"{self.episode}: verified, {self.rows} rows are the same"
        parts = [part for part in (self.difference, self.damage, self.versions) if part]
        return f"{self.episode}: {'; '.join(parts)}"


class Replay:
    """An environment that goes through what was recorded, row by row.

    Args:
        stream: What was recorded.
        env: What makes the environment, as for `serve_gym` or `serve_parallel`; None: the id that the recording names,
            which must be registered here.
        render_mode: Replaces the recorded render mode; None: as recorded.

    Raises:
        SettingError: The environment is not registered here, or cannot be made.
    """

    def __init__(self, stream: Stream, env: Any = None, render_mode: str | None = None) -> None:
        self.stream = stream
        kwargs = _kwargs(stream)
        if render_mode is not None:
            kwargs["render_mode"] = render_mode
        make = _maker(stream, env, kwargs)
        try:
            self.env: Any = _now(adopt(make, _Inline(), parallel=stream.kind == "agents"))
        except RequestError as error:
            raise SettingError(f"the environment of the recording cannot be made: {error.message}") from error
        self._calls = stream.calls()
        self._ids = {str(agent): agent for agent in getattr(self.env, "possible_agents", ())}

    def rows(self, start: int, stop: int) -> Iterator[ReplayedRow]:
        """Reset and step as the rows from `start` up to `stop` say, and yield what comes of each.

        Raises:
            RecordingError: An action cannot be read.
        """
        for row in sorted(self._calls):
            if row < start:
                self._call(row)
        actions = self.stream.samples("action", start, stop)
        kinds = self.stream.column("kind")
        for row, action in zip(range(start, stop), actions, strict=True):
            self._call(row)
            yield self._do(row, int(kinds[row - self.stream.first]), action)

    def _call(self, row: int) -> None:
        """Make the calls that were made before a row."""
        for kind, data in self._calls.get(row, ()):
            try:
                if kind == "call":
                    _now(self.env.call(bridge_pb2.CallRequest.FromString(data)))
                else:
                    _now(self.env.answer_property(properties_pb2.PropertyRequest.FromString(data)))
            except RequestError:  # as when it was recorded, which no row tells
                continue

    def _do(self, row: int, kind: int, action: Any) -> ReplayedRow:
        agents = self.stream.kind == "agents"
        try:
            if kind in (Kind.RESET, Kind.FAILED_RESET):
                reset = self.stream.resets[row]
                observation, info, *alive = _now(self.env.reset(seed=kept(reset.seed), options=kept(reset.options)))
                if agents:
                    return ReplayedRow(row, _named(observation), {}, {}, {}, [str(one) for one in alive[0]], info)
                return ReplayedRow(row, observation, info=info)
            if agents:
                action = {self._ids[name]: part for name, part in action.items()}
            observation, reward, terminated, truncated, info, *alive = _now(self.env.step(action))
        except RequestError as error:
            return ReplayedRow(row, error=error.message)
        if agents:
            seen, *rest = (_named(part) for part in (observation, reward, terminated, truncated))
            return ReplayedRow(row, seen, rest[0], rest[1], rest[2], [str(one) for one in alive[0]], info)
        return ReplayedRow(row, observation, reward, terminated, truncated, (), info)

    def frame(self, lane: int = 0) -> Any:
        """Return what `render` gives now, of a lane.

        Raises:
            RecordingError: It gives no picture.
        """
        request = properties_pb2.PropertyRequest()
        request.read_property.key = "world.frame"
        try:
            frames = read_encoded(_now(self.env.answer_property(request)).read_property.value)
        except RequestError as error:
            raise RecordingError(f"{self.stream.title} gives no frames: {error.message}") from error
        frame = frames[lane] if self.stream.kind == "lanes" else frames[0]
        if not isinstance(frame, np.ndarray):
            raise RecordingError(f"{self.stream.title} renders {type(frame).__name__}, which is no picture")
        return frame

    def close(self) -> None:
        """Close the environment."""
        _now(self.env.close())

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


def _kwargs(stream: Stream) -> dict[str, Any]:
    if "kwargs" not in stream.header:
        why = stream.header.get("unknown_kwargs", "")
        raise SettingError(f"the keywords that the environment was made with were not recorded: {why}")
    try:
        kwargs = values.decode(base64.b64decode(stream.header["kwargs"]))
    except (TensorError, ValueError, TypeError) as error:
        raise RecordingError(f"the keywords of the environment of {stream.run} cannot be read: {error}") from error
    if not isinstance(kwargs, dict):
        raise RecordingError(f"expected the keywords of the environment of {stream.run} as a dict, got {kwargs!r:.80}")
    return kwargs


def _maker(stream: Stream, env: Any, kwargs: dict[str, Any]) -> Callable[[], Any]:
    """Return what makes the environment of a recording; it calls nothing that only the recording names."""
    header = stream.header
    if stream.kind == "agents":
        return partial(_parallel(stream, env).make_env, kwargs)
    if env is None:
        if not _registered(stream):
            raise _unknown(stream)
        env = header["env_id"]
    timed = header.get("time_action")
    try:
        time_action = None if timed is None else TimeAction(**timed)
    except TypeError as error:
        raise RecordingError(f"the time_action of {stream.run} cannot be read: {error}") from error
    recipe = EnvRecipe.of(env, time_action=time_action)
    count = stream.lanes if stream.kind == "lanes" else 1
    mode = str(header.get("vectorization_mode", "sync")) if stream.kind == "lanes" else "sync"
    if callable(env) and stream.kind == "lanes" and mode == "sync" and header.get("num_envs", 1) == 1:
        count = 1  # the callable makes the vector itself
    ids = recipe.env_ids
    return partial(recipe.make_env, WorldRequest(ids[0] if ids else None, count, mode, kwargs))


def _registered(stream: Stream) -> bool:
    """Whether the environment's id is registered here, for what it was registered for there."""
    spec = gymnasium.registry.get(str(stream.header.get("env_id")))
    return spec is not None and stream.header.get("entry_point") in ("", str(spec.entry_point))


def _parallel(stream: Stream, env: Any) -> ParallelRecipe:
    """Return how an environment of several agents is made; a Gymnasium environment has one agent."""
    if env is None and _registered(stream):
        env = stream.header["env_id"]
    if isinstance(env, str) and env in gymnasium.registry:
        env = partial(gymnasium.make, env)
    if env is None and stream.header.get("env_id") and not stream.header.get("entry_point"):
        env = stream.header["env_id"]  # of PettingZoo's own registry
    if env is None:
        raise _unknown(stream)
    try:
        return ParallelSource(env).recipe
    except SettingError as error:
        raise _unknown(stream) from error


def _unknown(stream: Stream) -> SettingError:
    header = stream.header
    module = str(header.get("entry_point", "")).partition(":")[0].partition(".")[0] or "MODULE"
    name = header.get("env_id") or str(header.get("entry_point", "")).partition(":")[2] or "NAME"
    return SettingError(
        f"the environment {stream.title!r} of the recording is not registered here as it was there "
        f"(entry point {header.get('entry_point')!r}); a recording imports nothing by itself: name what makes it, for "
        f"example --env {module}:{name}"
    )


def _named(part: Mapping[Any, Any]) -> dict[str, Any]:
    return {str(agent): value for agent, value in part.items()}


def verify(episode: Episode | str | Path, env: Any = None) -> Verification:
    """Make the environment of an episode again, replay it, and hold what comes against what was recorded.

    Args:
        episode: An episode, or `FOLDER/ID`.
        env: As for `Replay`.

    Returns:
        What was compared, and the first difference.

    Raises:
        RecordingError: The episode has no seeded reset before it, or rows of it are missing.
        SettingError: Its environment cannot be made.
    """
    found = episode if isinstance(episode, Episode) else open_episode(episode)
    done = _verify_from(found, replayed_from(found), env)
    again = found.stream.whole_from(found.start)
    if done.difference and again is not None and again < replayed_from(found):
        # An environment may have more in it than its reset sets back, such as a count of its episodes.
        second = _verify_from(found, again, env)
        return second if not second.difference else done
    return done


def verify_stream(stream: Stream, env: Any = None) -> Iterator[Verification | RecordingError]:
    """Verify every episode of a stream in one pass, in the order of their beginnings.

    Args:
        stream: What was recorded.
        env: As for `Replay`.

    Yields:
        For each episode what came of the comparison, or why it cannot be verified.

    Raises:
        SettingError: The environment cannot be made.
    """
    differences = _differences(stream, env)
    for episode in stream.episodes():
        try:
            start = replayed_from(episode)
        except RecordingError as error:
            yield error
            continue
        row = next((row for row in range(start, episode.stop) if row in differences), None)
        if row is None:
            yield Verification(episode.id, episode.stop - start, damage=_damage(episode))
        else:
            where = f"{_where(episode, row)}: {differences[row]}"
            step = episode.step_of(row)
            yield Verification(episode.id, row + 1 - start, where, step, _damage(episode), _versions(stream))


def _differences(stream: Stream, env: Any) -> dict[int, str]:
    """Replay a whole stream; return what differs, by row: the first row after each seeded reset that does."""
    seeded = sorted(
        row
        for row, reset in stream.resets.items()
        if reset.seeds(stream.lanes) and int(stream.column("kind")[row - stream.first]) == Kind.RESET
    )
    ends = sorted({at for at, _ in stream.gaps} | {stream.stop})
    found: dict[int, str] = {}
    done = stream.first
    for start in seeded:
        if start < done:
            continue  # the pass that is over came through it
        done = next(end for end in ends if end > start)
        compare, lost = Comparison(stream, start, done), False
        with Replay(stream, env) as replay:
            for row in replay.rows(start, done):
                lost = lost and row.row not in seeded
                text = compare(row)
                if text and not lost:
                    found[row.row], lost = text, True
    return found


def _verify_from(episode: Episode, start: int, env: Any) -> Verification:
    """Replay an episode from an earlier row on."""
    stream, compared = episode.stream, 0
    compare = Comparison(stream, start, episode.stop)
    with Replay(stream, env) as replay:
        for row in replay.rows(start, episode.stop):
            compared += 1
            text = compare(row)
            if text:
                step = episode.step_of(row.row)
                where = f"{_where(episode, row.row)}: {text}"
                return Verification(episode.id, compared, where, step, _damage(episode), _versions(stream))
    return Verification(episode.id, compared, damage=_damage(episode))


def replayed_from(episode: Episode) -> int:
    """Return the row that a replay of an episode begins with.

    Raises:
        RecordingError: There is none, or rows are missing since.
    """
    header = episode.stream.header
    if header.get("recorded_by") == "client" and header.get("fps"):
        raise RecordingError(
            f"{episode.id} cannot be verified: a client recorded it in real time, which does not see every frame; have "
            "the server record it"
        )
    if episode.end == "lost":
        raise RecordingError(f"{episode.id} is incomplete: rows of it were lost, so it cannot be replayed")
    row = episode.stream.seeded_row(episode.start)
    if row is None:
        raise RecordingError(
            f"{episode.id} cannot be verified: no reset with a seed was recorded before it (or rows are missing "
            "since), so the state of the random generator at its beginning is not known; reset with a seed"
        )
    if any(reset.unknown_options for at, reset in episode.stream.resets.items() if row <= at < episode.stop):
        raise RecordingError(f"{episode.id} cannot be replayed: it was reset with options that could not be recorded")
    return row


def _where(episode: Episode, row: int) -> str:
    step = episode.step_of(row)
    if step > 0:
        return f"step {step}"
    return "the first observation" if step == 0 else f"{-step} rows before the episode, which it depends on"


def _damage(episode: Episode) -> str:
    """Say which damaged records the rows of an episode are in."""
    if episode.stream.changed:
        return "the checksum of the record that describes its environment does not fit: its bytes were changed"
    for first, stop in episode.stream.damaged:
        if first < episode.stop and stop > episode.start:
            begin, end = (episode.step_of(row) for row in (max(first, episode.start), min(stop, episode.stop) - 1))
            return f"the checksum of the record with the steps {begin} to {end} does not fit: its bytes were changed"
    return ""


def _versions(stream: Stream) -> str:
    """Say which packages have other versions than when the recording was made."""
    recorded: dict[str, str] = dict(stream.header.get("versions", {}))
    here = package_versions(str(stream.header.get("entry_point") or ""))
    other = [f"{name} {text} (here {here.get(name)})" for name, text in recorded.items() if here.get(name) != text]
    return f"it was recorded with {', '.join(other)}" if other else ""


class Comparison:
    """Holds replayed rows against a recording; called with a row, it says what differs, or nothing.

    Args:
        stream: What was recorded.
        start: The first row that will be compared; the others follow in order.
        stop: The row after the last.
    """

    def __init__(self, stream: Stream, start: int, stop: int) -> None:
        self._stream = stream
        self._samples = stream.samples("observation", start, stop) if stream.has_observations else None
        self._layouts = [pair[0] for pair in stream.layouts()]
        text = stream.header.get("reward_space")
        space = None if text is None else space_from_json(text)
        self._reward = Rewards(space, stream.lanes if stream.kind == "lanes" else None).spec

    def __call__(self, row: ReplayedRow) -> str:
        """Return what differs first in a row; empty: nothing."""
        index = row.row - self._stream.first
        text = self._recorded(index)
        if text:
            return text
        failed = int(self._stream.column("kind")[index]) >= Kind.FAILED_STEP
        if row.error or failed:
            if bool(row.error) == failed:
                return ""
            first = row.error.partition("\n")[0]
            return (
                f"the environment raised when it was recorded, not now{first}" if failed else f"now it raised: {first}"
            )
        if self._stream.kind == "agents":
            return self._agents(row, index)
        return self._observation(0, row.observation, self._column("hash", index), "") or self._numbers(row, index)

    def _recorded(self, index: int) -> str:
        """Hold the recorded observation against the recorded hash."""
        if self._samples is None:
            return ""
        sample = next(self._samples)
        if int(self._stream.column("kind")[index]) >= Kind.FAILED_STEP:
            return ""
        hashes = self._column("hash", index)
        several = self._stream.kind == "agents"
        parts = [(number, sample.get(agent)) for number, agent in enumerate(self._stream.agents)] if several else []
        for number, part in parts or [(0, sample)]:
            if part is None:
                continue
            if hash_of(self._layouts[number], part) != (hashes[number] if several else hashes).tobytes():
                return "the recorded observation is not the one of its hash: its bytes were changed"
        return ""

    def _column(self, name: str, index: int) -> Array:
        return np.asarray(self._stream.column(name)[index])

    def _observation(self, number: int, observation: Any, recorded: Array, whose: str) -> str:
        try:
            digest = hash_of(self._layouts[number], observation)
        except TensorError as error:
            return f"the observation{whose} is not of its space now: {error}"
        if digest == recorded.tobytes():
            return ""
        return f"the observation{whose} differs: its hash was {recorded.tobytes().hex()}, and is {digest.hex()}"

    def _numbers(self, row: ReplayedRow, index: int) -> str:
        shape = () if self._stream.kind != "lanes" else (self._stream.lanes,)
        pairs = [
            ("reward", row.reward, self._reward.dtype, self._reward.shape),
            ("terminated", row.terminated, np.dtype(np.bool_), shape),
            ("truncated", row.truncated, np.dtype(np.bool_), shape),
        ]
        for name, now, dtype, wanted in pairs:
            recorded, fresh = self._column(name, index), np.broadcast_to(np.asarray(now, dtype), wanted)
            if fresh.tobytes() != recorded.tobytes():
                return f"{name} differs: it was {recorded.tolist()}, and is {fresh.tolist()}{_lanes(recorded, fresh)}"
        return ""

    def _agents(self, row: ReplayedRow, index: int) -> str:
        stream = self._stream
        for number, agent in enumerate(stream.agents):
            whose = f" of {agent}"
            pairs: list[tuple[str, Any]] = [("alive", agent in row.alive), ("seen", agent in row.observation)]
            pairs += [
                (name, part.get(agent, 0))
                for name, part in (
                    ("reward", row.reward),
                    ("terminated", row.terminated),
                    ("truncated", row.truncated),
                )
            ]
            for name, now in pairs:
                recorded = self._column(name, index)[number]
                if np.asarray(now, recorded.dtype).tobytes() != recorded.tobytes():
                    return f"{name}{whose} differs: it was {recorded}, and is {now}"
            if agent in row.observation:
                text = self._observation(number, row.observation[agent], self._column("hash", index)[number], whose)
                if text:
                    return text
        return ""


def _lanes(recorded: Array, fresh: Array) -> str:
    if not recorded.ndim:
        return ""
    lanes = sorted(set(np.argwhere(recorded != fresh)[:, 0].tolist()))
    return f" (lanes {', '.join(map(str, lanes))})"
