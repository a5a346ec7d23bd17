"""Replay: make the environment of a recording again, and repeat the recorded resets and steps.

The random state of an episode that began by autoreset depends on previous episodes, so a replay begins with the last
reset that seeded all lanes. The outcome is compared with the recording, which so proves what happened.
"""

from __future__ import annotations

import base64
import bisect
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from google.protobuf.message import DecodeError
from gymnasium.vector.utils import concatenate, create_empty_array

from bridge.core.adapters.timed import TimeAction
from bridge.core.encoding import values
from bridge.core.encoding.tensors import Array
from bridge.core.extras import imported_from
from bridge.core.worlds.base import in_environment
from bridge.core.worlds.environment import kept
from bridge.core.worlds.group import neutral_action
from bridge.core.worlds.lane_hosts import join_infos
from bridge.core.worlds.lane_vector import LaneVectorEnv
from bridge.core.worlds.recipe import EnvRecipe
from bridge.core.worlds.sources.parallel_source import ParallelRecipe, ParallelSource
from bridge.errors import RecordingError, RequestError, SettingError, TensorError
from bridge.pb import bridge_pb2, properties_pb2
from bridge.recording.branches import PathPart, path_to
from bridge.recording.facts import package_versions
from bridge.recording.reader import RecordedEpisode, RecordedStream, open_episode
from bridge.recording.rows import BranchPoint, Encoder, Kind, Row, flat_of
from bridge.recording.tape import size_of
from bridge.recording.walk import LaneWalk, made, reseeded
from bridge.recording.writer import BATCH_BYTES

with imported_from("recordings need pyarrow", "record"):
    import pyarrow as pa

__all__ = [
    "AT_ONCE",
    "Replay",
    "ReplayComparison",
    "Verification",
    "batches_of",
    "env_for",
    "refuse_calls",
    "replayed_from",
    "verify",
    "verify_stream",
]

AT_ONCE = 512
"""The most calls that are read and compared at once."""


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of a comparison."""

    episode: str
    rows: int
    """The number of compared resets and steps."""
    difference: str = ""
    """The first difference, with its step; empty: none."""
    step: int | None = None
    """The step of the episode at which it differs, 0 for its first observation; negative: before the episode."""
    parent: str = ""
    """The episode that a branch continues, which was replayed first."""
    versions: str = ""
    """The packages whose versions differ from those at the recording; empty: none, or there is no difference."""
    missing: str = ""
    """The calls before the episode that are missing in the recording; empty: none, or there is no difference."""

    @property
    def ok(self) -> bool:
        """True if the environment's outcome equals the recording."""
        return not self.difference

    def __str__(self) -> str:
        if self.ok:
            branch = f", as a branch of {self.parent}" if self.parent else ""
            return f"{self.episode}: verified, {self.rows} rows are the same{branch}"
        return f"{self.episode}: {'; '.join(filter(None, (self.difference, self.missing, self.versions)))}"


class _BranchError(RecordingError):
    """The episode that a branch continues cannot be replayed."""


class Replay:
    """An environment that repeats recorded calls.

    Args:
        stream: The recorded stream.
        env: Makes the environment, as for `serve_gym` or `serve_parallel`; None: the id in the recording, which must be
            registered in this process.
        render_mode: Replaces the recorded render mode; None: as recorded.
        allow_calls: Repeat recorded method calls and changes of attributes, too. Methods can do anything, so allow this
            only for recordings of known origin.

    Raises:
        SettingError: The environment is not registered in this process, or making it failed.
    """

    def __init__(
        self, stream: RecordedStream, env: Any = None, render_mode: str | None = None, *, allow_calls: bool = False
    ) -> None:
        self.stream = stream
        kwargs = kwargs_of(stream)
        if render_mode is not None:
            kwargs["render_mode"] = render_mode
        self._maker = partial(_maker, stream, env, kwargs)
        self._allow_calls = allow_calls
        # The same host as on a server, so that lanes, autoreset and conversions are those of the recording.
        self._host: Any = made(self._maker())
        self._properties = self._host.properties()
        # A recording has the agents' names; the environment uses its own objects.
        self._ids = {str(agent): agent for agent in self._host.facts.agents}

    def calls(self, start: int, stop: int) -> Iterator[tuple[int, Row]]:
        """Make the calls from `start` up to `stop`; yield the number and outcome of each reset and step.

        Raises:
            RecordingError: An action cannot be read, or methods were called and `allow_calls` is False.
        """
        refuse_calls(self.stream, stop, self._allow_calls)
        for call in sorted(self.stream.calls):
            # The effect of earlier method calls, such as setting an attribute, may outlast the reset with which the
            # replay begins.
            if call < start:
                self._make_calls(self.stream, call)
        yield from self._play(self.stream, start, stop)

    def _play(self, stream: RecordedStream, start: int, stop: int) -> Iterator[tuple[int, Row]]:
        """Like `calls`, without earlier method calls; `stream` is this one, or one of an equal environment."""
        numbers, kinds, lanes = (stream.column(name) for name in ("call", "kind", "lane"))
        for first in range(start, stop, AT_ONCE):
            rows = np.arange(*np.searchsorted(numbers, [first, min(first + AT_ONCE, stop)]))
            rows = rows[kinds[rows] < Kind.CALL]
            cells = zip(numbers[rows].tolist(), lanes[rows].tolist(), stream.samples("action", rows), strict=True)
            for call, part in itertools.groupby(cells, lambda cell: cell[0]):
                self._make_calls(stream, call)
                given = {lane: action for _, lane, action in part if action is not None}
                if (branch := stream.branches.get(call)) is None:
                    yield call, self._do(stream, call, given)
                    continue
                try:
                    row = self._branch(branch)
                except RecordingError as error:
                    raise _BranchError(str(error)) from error
                yield call, row

    def _make_calls(self, stream: RecordedStream, call: int) -> None:
        """Make the method calls that were made before a call."""
        for kind, data in stream.calls.get(call, ()):
            try:
                if kind == "call":
                    in_environment("a call", self._host.call, bridge_pb2.CallRequest.FromString(data))
                else:
                    written = properties_pb2.PropertyRequest.FromString(data)
                    in_environment("writing a property", self._properties.answer, written)
            except (RequestError, DecodeError):  # the recorded call may have failed as well
                continue

    # Branches

    def _branch(self, points: Sequence[BranchPoint | None]) -> Row:
        """Put environments into the states that they continued: make others, which repeat the calls that lead there."""
        vector = getattr(self._host.env, "unwrapped", None)
        if self.stream.kind != "lanes" or not isinstance(vector, LaneVectorEnv):
            return self._branch_whole(points)
        placed: dict[int, tuple[Any, Any]] = {}
        for lane, point in enumerate(points):
            if point is None:
                continue
            way = path_to(self.stream, point)
            for part in way:
                refuse_calls(part.stream, part.last + 1, self._allow_calls)
            arrived = LaneWalk(self._maker(), lane)
            placed[lane] = arrived.follow(way)
            vector.envs[lane].close()
            vector.envs[lane] = arrived.env
        observations, infos = in_environment("a branch", vector.place_lanes, placed)
        mask = None if None not in points else {"reset_mask": np.array([point is not None for point in points])}
        joined = join_infos(infos, vector.num_envs)
        return Row(Kind.RESET, 0.0, observation=kept(observations), info=joined, options=mask)

    def _branch_whole(self, points: Sequence[BranchPoint | None]) -> Row:
        """Like `_branch`, for an environment that is stepped as a whole."""
        point = points[0]
        if point is None or any(one is None or (one.stream, one.call) != (point.stream, point.call) for one in points):
            raise RecordingError("lanes that are stepped together went on from different calls, which is not replayed")
        way = path_to(self.stream, point)
        for part in way:
            refuse_calls(part.stream, part.last + 1, self._allow_calls)
        in_environment("close", self._host.close)
        if self.stream.kind == "env":
            arrived = LaneWalk(self._maker())
            self._host, result, alive = arrived.host, arrived.follow(way), ()
        else:
            self._host = made(self._maker())
            self._properties = self._host.properties()
            self._ids = {str(agent): agent for agent in self._host.facts.agents}
            row = self._follow(way)
            result, alive = (row.observation, row.info), row.alive
            if self.stream.kind == "agents":
                # Agents that ended in the last step take no part in the branch.
                seen, told = ({agent: part[agent] for agent in alive if agent in part} for part in result)
                result = seen, told
        self._properties = self._host.properties()
        return Row(Kind.RESET, 0.0, observation=kept(result[0]), info=kept(result[1]), alive=alive)

    def _follow(self, way: Sequence[PathPart]) -> Row:
        """Let the whole environment repeat calls; return the outcome of the last one."""
        last: Row | None = None
        for part in way:
            other = part.stream
            if (other.kind, other.lanes, other.agents) != (self.stream.kind, self.stream.lanes, self.stream.agents):
                raise RecordingError("a branch goes on from environments that were stepped in another way")
            for _, row in self._play(part.stream, part.first, part.last + 1):
                last = row
            if part.seed is not None:
                reseeded(self._host.env, part.seed)
        if last is None:
            raise RecordingError("a branch goes on from where nothing was recorded")
        return last

    def _do(self, stream: RecordedStream, call: int, given: Mapping[int, Any]) -> Row:
        """Make a reset or a step, with the actions by lane, or by agent number."""
        reset = stream.resets.get(call)
        try:
            if reset is not None:
                # Copied: Gymnasium's vector environments remove `reset_mask` from the dict, which is compared later.
                observation, info, *alive = in_environment(
                    "reset", self._host.reset, kept(reset.seed), kept(reset.options)
                )
                row = Row(Kind.RESET, 0.0, observation=kept(observation), info=kept(info), options=reset.options)
                row = row._replace(error=dict(self._host.failures))
            else:
                result = in_environment("step", self._host.step, self._action(given))
                *told, info = (kept(part) for part in result[:5])
                row, alive = Row(Kind.STEP, 0.0, "", None, *told)._replace(info=info), list(result[5:])
                row = row._replace(error=dict(self._host.failures))
        except RequestError as error:
            # The recorded call may have raised, too.
            kind = Kind.FAILED_STEP if reset is None else Kind.FAILED_RESET
            row = Row(kind, 0.0, error=error.message, options=None if reset is None else reset.options)
            alive = [()]
        if self.stream.kind != "agents":
            return row
        acted = {self.stream.agents[lane]: action for lane, action in given.items()}
        return row._replace(action=acted, alive=alive[0])

    def _action(self, given: Mapping[int, Any]) -> Any:
        """Return the action of a step; a lane that began anew in it ignores its action and gets any."""
        if self.stream.kind == "agents":
            return {self._ids[self.stream.agents[lane]]: action for lane, action in given.items()}
        space = self.stream.spaces[0][1]
        if not given and self.stream.kind == "env":
            raise RecordingError(f"the recording {self.stream.run} has a step without an action")
        if self.stream.kind == "env":
            return next(iter(given.values()))
        neutral: Any = None if len(given) == self.stream.lanes else neutral_action(space)
        every = [given.get(lane, neutral) for lane in range(self.stream.lanes)]
        empty: Any = create_empty_array(space, self.stream.lanes)
        return concatenate(space, every, empty)

    def frame(self, lane: int = 0) -> Any:
        """Return the present result of `render` for a lane.

        Raises:
            RecordingError: The result is not a picture.
        """
        try:
            (frame,) = in_environment("render", self._host.draw, [lane if self.stream.kind == "lanes" else 0])
        except RequestError as error:
            raise RecordingError(f"{self.stream.title} gives no frames: {error.message.splitlines()[0]}") from error
        if not isinstance(frame, np.ndarray):
            raise RecordingError(f"{self.stream.title} renders {type(frame).__name__}, which is no picture")
        return frame

    def close(self) -> None:
        """Close the environment."""
        in_environment("close", self._host.close)

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()


def kwargs_of(stream: RecordedStream) -> dict[str, Any]:
    """Return the keywords with which the environment was made; raise an error if they were not recorded."""
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


def _maker(stream: RecordedStream, env: Any, kwargs: dict[str, Any]) -> Callable[[], Any]:
    """Return a function that makes the environment of a recording; it calls nothing that only the recording names."""
    header = stream.header
    if env is None and _registered(stream):
        env = header["env_id"]
    if stream.kind == "agents":
        return dataclasses.replace(_parallel(stream, env), kwargs=kwargs).make_env
    if env is None:
        raise _unknown(stream)
    timed = header.get("time_action")
    try:
        time_action = None if timed is None else TimeAction(**timed)
    except TypeError as error:
        raise RecordingError(f"the time_action of {stream.run} cannot be read: {error}") from error
    count = stream.lanes if stream.kind == "lanes" else 1
    mode = str(header.get("vectorization_mode", "sync")) if stream.kind == "lanes" else "sync"
    if callable(env) and stream.kind == "lanes" and mode == "sync" and header.get("num_envs", 1) == 1:
        count = 1  # the callable makes the vector itself
    adapters = () if time_action is None else (time_action,)
    recipe = EnvRecipe.of(env, num_envs=count, vectorization_mode=mode, kwargs=kwargs, adapters=adapters)
    if recipe.patterns:
        recipe = dataclasses.replace(recipe, spec=gymnasium.spec(recipe.env_ids[0]))
    return recipe.make_env


def env_for(stream: RecordedStream, env: Any) -> Any:
    """Return `env` for one of several streams, or None if the stream's own id is registered."""
    # A folder may contain recordings of several environments, while `--env` names one.
    return None if _registered(stream) else env


def _registered(stream: RecordedStream) -> bool:
    """Return True if the environment's id is registered in this process, with the recorded entry point."""
    spec = gymnasium.registry.get(str(stream.header.get("env_id")))
    # The id alone may be registered for another environment. A client's recording has no entry point.
    return spec is not None and stream.header.get("entry_point") in ("", str(spec.entry_point))


def _parallel(stream: RecordedStream, env: Any) -> ParallelRecipe:
    """Return the recipe for an environment of several agents; raise for a Gymnasium environment."""
    if isinstance(env, str) and env in gymnasium.registry:
        env = partial(gymnasium.make, env)
    if env is None and stream.header.get("env_id") and not stream.header.get("entry_point"):
        env = stream.header["env_id"]  # in PettingZoo's own registry
    if env is None:
        raise _unknown(stream)
    try:
        return ParallelSource(env).recipe
    except SettingError as error:
        raise _unknown(stream) from error


def _unknown(stream: RecordedStream) -> SettingError:
    entry_point, env_id = str(stream.header.get("entry_point") or ""), stream.header.get("env_id")
    if stream.header.get("own_loop"):
        return SettingError(
            f"{stream.title!r} is a program with a loop of its own, which cannot be made again to be replayed; to see "
            "its episodes, record frames: record=Recording(FOLDER, frames=True)"
        )
    # Lambdas and nested functions have no importable name.
    module, _, name = (entry_point if entry_point and "<" not in entry_point else "MODULE:NAME").partition(":")
    of_script = module == "__main__"  # here, that is this program
    module = "MODULE" if of_script else module
    example = f"{module.partition('.')[0]}:{env_id}" if env_id else f"{module}:{name}"
    where = ", where MODULE is the name of the script that served it, without .py" if of_script else ""
    return SettingError(
        f"the environment {stream.title!r} of the recording is not registered here as it was there "
        f"(entry point {entry_point!r}); a recording imports nothing by itself: name what makes it, for "
        f"example --env {example}{where}"
    )


def refuse_calls(stream: RecordedStream, stop: int, allow_calls: bool) -> None:
    """Raise RecordingError if methods were called before a call and `allow_calls` is False."""
    count = 0 if allow_calls else sum(len(calls) for call, calls in stream.calls.items() if call < stop)
    if count:
        raise RecordingError(
            f"{stream.run}-{stream.number} cannot be replayed: {count} calls of methods and attributes were recorded, "
            "which would run here; if you trust the recording, allow them: --allow-calls, allow_calls=True"
        )


def verify(episode: RecordedEpisode | str | Path, env: Any = None, *, allow_calls: bool = False) -> Verification:
    """Make the environment of an episode again, replay the episode, and compare the outcome with the recording.

    Args:
        episode: An episode, or `FOLDER/ID`.
        env: As for `Replay`.
        allow_calls: As for `Replay`.

    Returns:
        What was compared, and the first difference.

    Raises:
        RecordingError: The episode has no seeded reset before it, or some of its rows are missing.
        SettingError: Making its environment failed.
    """
    found = episode if isinstance(episode, RecordedEpisode) else open_episode(episode)
    stream, start = found.stream, replayed_from(found)
    done = _judged(found, start, _differences(stream, env, allow_calls, start, found.stop))
    if done.difference and start and 0 in stream.seeded and not any(at <= found.start for at in stream.breaks):
        # An environment may have state that its reset does not clear, such as a count of its episodes.
        again = _judged(found, start, _differences(stream, env, allow_calls, 0, found.stop))
        return again if again.ok else done
    return done


def verify_stream(
    stream: RecordedStream, env: Any = None, *, allow_calls: bool = False
) -> Iterator[Verification | RecordingError]:
    """Verify every episode of a stream in one pass, ordered by their beginnings.

    Args:
        stream: The recorded stream.
        env: As for `Replay`.
        allow_calls: As for `Replay`.

    Yields:
        For each episode the result of the comparison, or why it cannot be verified.

    Raises:
        SettingError: Making the environment failed.
    """
    last = int(stream.column("call")[-1]) + 1
    # Calls before the first method call can be verified without permission for method calls.
    if not allow_calls:
        last = min([last, *stream.calls])
    differences = _differences(stream, env, allow_calls, 0, last)
    for episode in stream.episodes():
        try:
            start = replayed_from(episode)
            refuse_calls(stream, episode.stop, allow_calls)
        except RecordingError as error:
            yield error
        else:
            yield _judged(episode, start, differences)


def _differences(stream: RecordedStream, env: Any, allow_calls: bool, begin: int, last: int) -> list[tuple[int, str]]:
    """Replay a stream; return the first difference after each seeded reset, with its call number, in order.

    Args:
        stream: The recorded stream.
        env: As for `Replay`.
        allow_calls: As for `Replay`.
        begin: The call from which seeded resets count.
        last: The end; this call is not made.
    """
    found: list[tuple[int, str]] = []
    # After missing calls, and after a branch with an unknown origin, the state is unknown until the next seeded reset.
    for start, end in itertools.pairwise([begin, *(at for at in stream.breaks if begin < at < last), last]):
        seeded = [call for call in stream.known if start <= call < end]
        if not seeded:
            continue
        with Replay(stream, env, allow_calls=allow_calls) as replay:
            compare, replayed = ReplayComparison(stream), replay.calls(seeded[0], end)
            # A seed resets the random generator: later episodes may be right although earlier ones differ.
            for first, stop in itertools.pairwise([*seeded, end]):
                try:
                    found.extend(compare.all(itertools.islice(replayed, stop - first)).items())
                except _BranchError as error:  # episodes that do not depend on it can still be verified
                    found.append((first, str(error)))
                    replayed = replay.calls(stop, end)
    return found


def _judged(episode: RecordedEpisode, start: int, differences: Sequence[tuple[int, str]]) -> Verification:
    """Return the result for an episode, which depends on calls from `start` on, given a replay's differences."""
    at = bisect.bisect_left(differences, (start,))
    parent = "" if episode.parent is None else str(episode.parent)
    if at == len(differences) or differences[at][0] >= episode.stop:
        return Verification(episode.id, episode.stop - start, parent=parent)
    call, difference = differences[at]
    step = episode.step_of(call)
    where = "the first observation" if step == 0 else f"{-step} calls before the episode, which it depends on"
    where = f"step {step}" if step > 0 else where
    text, stream = f"{where}: {difference}", episode.stream
    return Verification(episode.id, call + 1 - start, text, step, parent, _versions(stream), _missing(stream))


def replayed_from(episode: RecordedEpisode) -> int:
    """Return the call with which a replay of an episode begins.

    Raises:
        RecordingError: There is no such call, or later calls are missing.
    """
    if episode.stream.misses_frames:
        raise RecordingError(
            f"{episode.id} cannot be verified: a client recorded it in real time, which does not see every frame; have "
            "the server record it"
        )
    if episode.incomplete:
        raise RecordingError(f"{episode.id} is incomplete: rows of it were lost, so it cannot be replayed")
    stream, call = episode.stream, episode.stream.seeded_call(episode.start)
    if call is None:
        newest = bisect.bisect_right(stream.breaks, episode.start)
        if newest and (reason := stream.unknown_branches.get(stream.breaks[newest - 1])):
            what = "it is a branch, and" if stream.breaks[newest - 1] == episode.start else "it follows a branch, and"
            raise RecordingError(f"{episode.id} cannot be verified: {what} {reason}")
        raise RecordingError(
            f"{episode.id} cannot be verified: no reset with a seed was recorded before it (or rows are missing "
            "since), so the state of the random generator at its beginning is not known; reset with a seed"
        )
    if episode.stream.has_unknown_options(call, episode.stop):
        raise RecordingError(f"{episode.id} cannot be replayed: it was reset with options that could not be recorded")
    return call


def _missing(stream: RecordedStream) -> str:
    """Return a message if a stream has lost its beginning, where an environment may have been changed for good."""
    if not stream.first:
        return ""
    return (
        f"its environment may depend on the {stream.first} calls before, which the recording does not have: a "
        "recording with max_bytes deletes its oldest files"
    )


def _versions(stream: RecordedStream) -> str:
    """Return which packages have other versions than at the recording."""
    recorded: dict[str, str] = dict(stream.header.get("versions", {}))
    here = package_versions(str(stream.header.get("entry_point") or ""))
    other = [f"{name} {text} (here {here.get(name)})" for name, text in recorded.items() if here.get(name) != text]
    return f"it was recorded with {', '.join(other)}" if other else ""


def batches_of(replayed: Iterable[tuple[int, Row]], most: int = AT_ONCE) -> Iterator[list[tuple[int, Row]]]:
    """Yield lists of calls to compare at once, limited in number, and in size like the batches that are written."""
    held, size = list[tuple[int, Row]](), 0
    for call in replayed:
        held.append(call)
        size += size_of(call[1].observation)
        if len(held) == most or size >= BATCH_BYTES:
            yield held
            held, size = [], 0
    if held:
        yield held


class ReplayComparison:
    """Compares replayed calls with a recording: encoded like a recording, they must give the same rows.

    Args:
        stream: The recorded stream.
    """

    def __init__(self, stream: RecordedStream) -> None:
        self._stream = stream
        # These columns are not compared, so they are not encoded.
        header = {**stream.header, "infos": False, "frames": False}
        self._encoder = Encoder(header)
        schema = self._encoder.schema.names
        sampled = [name for group in self._encoder.columns.groups for name in group.names("observation")]
        told = ("lane", "kind", "t", "seen", "alive", *sampled, "hash", "reward", "terminated", "truncated")
        self._names = [name for name in told if name in schema]

    def all(self, replayed: Iterator[tuple[int, Row]]) -> dict[int, str]:
        """Compare all calls, also those after a difference; return the same as `difference`."""
        found: dict[int, str] = {}
        for part in batches_of(replayed):
            # The remaining calls are run without comparison: the environment must have made them before the next seeded
            # reset.
            found = found or self.difference(part)
        return found

    def difference(self, calls: list[tuple[int, Row]]) -> dict[int, str]:
        """Return the first call that differs, by its number, and how; empty if none does."""
        try:
            batches = self._encoder.encode(flat_of(calls))
        except (TensorError, TypeError, ValueError) as problem:
            self._encoder.rewind()
            if len(calls) == 1:
                return {calls[0][0]: f"the observation is not of its space now: {problem}"}
            # A batch fails as a whole; encoding the calls one by one finds the faulty one.
            return next(filter(None, (self.difference([one]) for one in calls)), {})
        # One batch, because the calls follow each other without a gap.
        (fresh,) = batches
        stream, first, last = self._stream, calls[0][0], calls[-1][0]
        rows = np.arange(*np.searchsorted(stream.column("call"), [first, last + 1]))
        rows = rows[stream.column("kind")[rows] < Kind.CALL]
        count = min(len(rows), len(fresh))
        same = np.ones(count, np.bool_)
        for name in self._names:
            same &= _same(stream.cells(name, rows[:count]), fresh[name][:count])
        if same.all() and len(rows) == len(fresh):
            return {}
        # If all common rows are equal and one side has more, the last common row is reported.
        at = int(np.argmin(same)) if not same.all() else count - 1
        call = int(stream.column("call")[rows[at]])
        error = next(row.error for number, row in calls if number == call)
        if not isinstance(error, str):  # from lanes that failed separately
            error = error.get(int(stream.column("lane")[rows[at]]), "")
        return {call: self._tell(rows[at], fresh, at, error)}

    def _tell(self, row: int, fresh: pa.RecordBatch, at: int, error: str) -> str:
        """Return a description of the difference in a row."""
        stream = self._stream
        was, now = int(stream.column("kind")[row]), fresh["kind"][at].as_py()
        # The exception is reported first: other differences in a failed row are consequences.
        if now in _FAILED and was not in _FAILED:
            return f"now it raised: {error.partition(chr(10))[0]}"
        if was in _FAILED and now not in _FAILED:
            return "the environment raised when it was recorded, not now"
        lane = int(stream.column("lane")[row])
        whose = f" of {stream.agents[lane]}" if stream.agents else f" of lane {lane}" if stream.lanes > 1 else ""
        for name in self._names:
            recorded = stream.cells(name, np.array([row]))
            if _same(recorded, fresh[name][at : at + 1]).all():
                continue
            one, other = recorded[0].as_py(), fresh[name][at].as_py()
            if name == "hash":
                one, other = (None if cell is None else cell.hex() for cell in (one, other))
                return f"the observation{whose} differs: its hash was {one}, and is {other}"
            what = "the observation" if "observation" in name else name
            return f"{what}{whose} differs: it was {one!s:.200}, and is {other!s:.200}"
        return "now it has other rows"


_FAILED = (Kind.FAILED_STEP, Kind.FAILED_RESET)


def _same(one: pa.Array, other: pa.Array) -> Array:
    """Return which cells are equal bit for bit: 0.0 and -0.0 differ, and NaN equals itself."""
    return np.array([a == b for a, b in zip(_bits(one), _bits(other), strict=True)], np.bool_)


def _bits(cells: pa.Array) -> list[Any]:
    """Return cells in a form in which Python compares their bits."""
    if pa.types.is_list(cells.type):
        return [cell.values.to_numpy(zero_copy_only=False).tobytes() if cell.is_valid else None for cell in cells]
    if pa.types.is_floating(cells.type):
        # In Python, 0.0 equals -0.0, and NaN differs from itself.
        cells = cells.view(f"int{cells.type.bit_width}")
    found: list[Any] = cells.to_pylist()
    return found
