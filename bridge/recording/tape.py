"""Pass the calls of an environment to the writer, with a recorder around the environment.

The world's own code is the same with and without a recording: `attach` replaces its environment by a `RecordedEnv`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from google.protobuf.message import Message
from gymnasium.vector import AutoresetMode

from bridge.core.encoding import values
from bridge.core.encoding.message_form import Origin
from bridge.core.encoding.properties import TEXT, Property, PropertyTree, encoded, read_encoded
from bridge.core.logs import SafeLog
from bridge.core.worlds.environment import IMMUTABLE, Call, Environment, EnvironmentProxy, Result, kept
from bridge.core.worlds.hosts import checked_lanes, checked_values
from bridge.core.worlds.messages import PartOutcome, SessionMessage
from bridge.core.worlds.world import EnvWorld
from bridge.errors import Code, RequestError
from bridge.pb import bridge_pb2, properties_pb2
from bridge.recording.facts import describe_world
from bridge.recording.rows import BranchPoint, Encoder, Kind, Row
from bridge.recording.writer import Journal

__all__ = ["RecordedEnv", "Tape", "attach", "branch_points", "size_of"]

_log = SafeLog(__name__)
_OVERHEAD = 400
"""The approximate bytes of a row besides its observation and frame."""


class Tape:
    """Passes rows to the writer and numbers the calls; a gap in the numbers shows that calls are missing.

    Args:
        journal: The writer.
        encoder: Converts the rows.
    """

    def __init__(self, journal: Journal, encoder: Encoder) -> None:
        self._offer = journal.offer
        self._encoder = encoder
        self._name = f"{journal.run}-{encoder.stream}"
        self._next = 0
        """The number of the next reset or step."""
        self._fits = True
        self._ended = False
        self.epoch = journal.epoch
        """The recording's epoch: added to `time.monotonic()` it gives the time of a row."""
        self.options = journal.options
        """The options of the recording: whether it contains observations, infos and frames."""
        self.on = True
        """True if resets and steps are recorded. Method calls always are, because later outcomes depend on them."""

    @property
    def moment(self) -> str:
        """A name for the newest reset or step, from which `branch_points` makes the point that an episode continues."""
        return f"{self._name}.{self._next - 1}"

    def add(self, row: Sequence[Any], size: int = 0) -> None:
        """Pass on a `Row`, or its fields in order, of approximately this size in bytes."""
        # A method call has the number of the next reset or step: a replay makes it before that.
        number, is_note = self._next, row[0] >= Kind.CALL
        if not is_note:
            self._next += 1
            if not self.on:
                return
        if self._offer(self._encoder, row, size + _OVERHEAD, number):
            self._fits = True
            return
        self._next += is_note  # a gap shows that this one is missing, too
        if self._fits:
            self._fits = False
            _log.warning("a recording lacks rows, for they come faster than they are written")

    def skip(self) -> None:
        """Leave out a reset or a step."""
        self._next += 1

    def note(self, what: str, request: Message) -> None:
        """Pass on a method call (`call`), or a change of an attribute (`write`)."""
        self.add(Row(Kind.CALL, time.monotonic() + self.epoch, action=(what, request.SerializeToString())))

    def end(self) -> None:
        """Record that the environment was closed. May be called twice."""
        if not self._ended:
            self._ended = True
            self.add(Row(Kind.END, time.monotonic() + self.epoch))
            self._offer(self._encoder, None, 0)


class _RecordedLane:
    """A lane, or an environment, whose resets and steps are recorded.

    Args:
        world: Its world, which knows the player of the current action.
        tape: Takes the rows.
        lane: The lane's number if lanes are stepped one by one; None: the whole environment.
    """

    def __init__(self, world: EnvWorld, tape: Tape, lane: int | None = None) -> None:
        self._inner = world.env
        self.facts = self._inner.facts
        self._reset: Callable[..., Call[Result]] = self._inner.reset
        self._step: Callable[[object], Call[Result]] = self._inner.step
        if lane is not None and self.facts.num_envs is not None:
            self.facts = self.facts.of_lane
            self._reset = partial(self._inner.reset, lane=lane)
            self._step = lambda action: self._inner.step(action, lane)
        self.tape = tape
        self._epoch = tape.epoch
        self._world = world
        self._lane = lane
        self._applied_by = partial(world.applied_by, lane or 0)
        # None: the world is in lock-step
        self._moment = None if world.fps is None else partial(world.pacer.moment, lane or 0)
        self._renders = tape.options.frames
        self._several = bool(self.facts.agents)
        # In other worlds, an episode exists only because a client requested it.
        self._may_skip = world.pacer.begins_by_itself and not tape.options.unattended
        self._nobodys = False
        """True if the current episode began without a player, so it is not recorded."""
        # Lanes that begin anew in the step that ends their episodes have their last observations in the infos.
        self._keeps_infos = tape.options.infos or (self.facts.autoreset is AutoresetMode.SAME_STEP)

    def _skips(self, begins: bool) -> bool:
        """Leave a call out, and return True, if its episode began without a player and still has none."""
        # If a player joins in the middle of an episode, rows are recorded from there on. They belong to no episode,
        # because its beginning is missing.
        self._nobodys = (begins or self._nobodys) and not (self._world.has_players or self._world.substitutes)
        if self._nobodys:
            self.tape.skip()
        return self._nobodys

    async def reset(self, *, seed: object = None, options: object = None, lane: int | None = None) -> Result:
        """Reset the environment."""
        if self._may_skip and self._skips(begins=True):
            return await self._reset(seed=seed, options=options)
        given = kept(seed), kept(options)  # Gymnasium's vector environments remove `reset_mask` from the dict
        try:
            result = await self._reset(seed=seed, options=options)
        except RequestError as error:
            now = time.monotonic() + self._epoch
            failed = Row(Kind.FAILED_RESET, now, seed=given[0], options=given[1], error=error.message)
            self.tape.add(failed._replace(moment=self._numbered(self._now())))
            raise
        moment = self._numbered(self._now())
        # Read before the next call of the environment, such as rendering.
        failed = self._failed()
        self._record(Kind.RESET, result, None, "", moment, await self._frames(), *given, failed=failed)
        return result

    def _now(self) -> tuple[float, float] | None:
        """Return the time on the world's clock; None if it has none."""
        return None if self._moment is None else self._moment()

    def _numbered(self, moment: tuple[float, float] | None) -> Any:
        """Add the number of a row's last frame, which is known after the call; None if there is no clock."""
        return moment and (*moment, self._world.clock_frames)

    async def place(self, outcome: PartOutcome) -> None:
        """Record that a message has put environments into another situation: their episodes are branches of others."""
        points = branch_points(zip(outcome.lanes, outcome.origins, strict=True), self.facts.num_envs or 1)
        mask = None if None not in points else {"reset_mask": np.array([point is not None for point in points])}
        frames = await self._frames()
        self._record(Kind.RESET, outcome.placed, None, "", None, frames, options=mask, branch=points)

    def _failed(self) -> Any:
        """Return why lanes failed separately in the last call; "" if none did."""
        failures = self._inner.failures
        return dict(failures) if failures and self._lane is None else ""

    async def step(self, action: object, lane: int | None = None) -> Result:
        """Step the environment."""
        if self._may_skip and self._skips(begins=False):
            return await self._step(action)
        by = self._applied_by()
        # Set by the watch around this environment, which has replaced the action already.
        if self._world.substitutes:
            by = self._acting(by)
        given: Any = action
        if type(given) not in IMMUTABLE:
            # Another thread encodes the row about a tenth of a second later. Until then the environment, or its caller,
            # may write into the same arrays.
            given = kept(dict(given) if self._several else given)
        moment = self._now()
        try:
            result = await self._step(action)
        except RequestError as error:
            now = time.monotonic() + self._epoch
            self.tape.add(Row(Kind.FAILED_STEP, now, by, given, error=error.message, moment=self._numbered(moment)))
            raise
        failed = self._failed() if self._inner.failures else ""
        frames = await self._frames() if self._renders else None
        self._record(Kind.STEP, result, given, by, self._numbered(moment), frames, failed=failed)
        return result

    def _acting(self, by: Any) -> Any:
        """Return the players of a step in which people may have taken over.

        Args:
            by: The player otherwise; for lanes that are stepped together, the player of all of them.

        Returns:
            As for `applied_by` of the world; for lanes that are stepped together, a list with one entry per lane.
        """
        taken, self._world.substitutes = self._world.substitutes, {}
        people = {str(key): f"person:{name}" if name else "person" for key, name in taken.items()}
        lanes = self.facts.num_envs
        if lanes is not None:
            return [people.get(str(lane), by) for lane in range(lanes)]
        return {**by, **people} if isinstance(by, Mapping) else next(iter(people.values()))

    async def _frames(self) -> Sequence[Any] | None:
        """Return the present result of `render` if frames are recorded; stop recording them if it has no picture."""
        if not self._renders or not self.tape.on:
            return None
        try:
            frames = await self._render()
        except RequestError as error:
            why = error.message.partition("\n")[0]
        else:
            # An array of objects cannot be written without pickling.
            if all(isinstance(frame, np.ndarray) and not frame.dtype.hasobject for frame in frames):
                return frames
            why = "render() gives no arrays; make the environment with render_mode='rgb_array'"
        # An environment that cannot draw would fail, and take time, in each step from here on.
        self._renders = False
        _log.warning("no frames are recorded: %s", why)
        return None

    async def _render(self) -> Sequence[Any]:
        lanes = self._inner.facts.num_envs
        if self._lane is None or lanes is None:
            return await self._inner.render(range(lanes or 1))
        # In a separate process, `render` draws all lanes, some of which may not have been reset yet.
        response = await self._inner.call(bridge_pb2.CallRequest(name="render", lanes=[self._lane]))
        return [values.from_value(result) for result in response.results]

    def _record(
        self,
        kind: int,
        result: Any,
        action: Any,
        by: Any,
        moment: Any,
        frames: Any,
        seed: Any = None,
        options: Any = None,
        *,
        failed: Any = "",
        branch: Any = None,
    ) -> None:
        """Pass on the outcome of a call; never raise for the world."""
        reward, terminated, truncated, alive = 0.0, False, False, ()
        try:
            if self._several:
                # An environment of several agents also returns the agents that continue.
                *result, alive = result
            if kind == Kind.STEP:
                observation, reward, terminated, truncated, info = result
            else:
                observation, info = result
        except (TypeError, ValueError):  # an invalid result, which the world reports
            self.tape.skip()
            return
        # Function calls are most of the cost of recording a step, so none is made here, not even for a `Row`.
        if type(observation) is np.ndarray:
            seen, size = observation.copy(), observation.nbytes
        else:
            seen = kept(observation)
            size = size_of(seen)
        if frames:
            size += size_of(frames)
        if type(reward) not in IMMUTABLE:
            reward = kept(reward)
        if type(terminated) not in IMMUTABLE or type(truncated) not in IMMUTABLE:
            terminated, truncated = kept(terminated), kept(truncated)
        try:
            told = kept(info) if self._keeps_infos else None
        except RecursionError:  # it contains itself: use what is sent of it
            told = values.decode(values.encode_info(info, values.Notes()))
        now = time.monotonic() + self._epoch
        self.tape.add((kind, now, by, action, seen, reward, terminated, truncated, alive, seed, options, failed, moment,
                       frames, told, branch), size)  # fmt: skip


class RecordedEnv(EnvironmentProxy):
    """An environment that is recorded, with a property that switches the recording.

    Args:
        env: The environment.
        parts: The whole environment, recorded; or each of its lanes.
        by_lane: True if the world steps these lanes one by one.
    """

    def __init__(self, env: Environment, parts: Sequence[_RecordedLane], *, by_lane: bool) -> None:
        super().__init__(env)
        self._parts = parts
        self._tapes = [part.tape for part in parts]
        self._by_lane = by_lane
        if len(parts) == 1:  # methods would add a call to each step
            self.reset, self.step = parts[0].reset, parts[0].step  # type: ignore[method-assign]

    def reset(self, *, seed: object = None, options: object = None, lane: int | None = None) -> Call[Result]:
        """Reset the environment, or one lane."""
        return self._parts[lane or 0].reset(seed=seed, options=options)

    def step(self, action: object, lane: int | None = None) -> Call[Result]:
        """Step the environment, or one lane."""
        return self._parts[lane or 0].step(action)

    def properties(self) -> PropertyTree:
        """Return the environment's properties below `world`, and the switch of the recording."""
        text = "whether its episodes are recorded: on or off"
        switch = Property("world.recording", TEXT, text, lambda: "on" if self._tapes[0].on else "off", self._switch)
        return self.inner.properties().merged(PropertyTree([switch]))

    def _switch(self, text: str) -> None:
        if text not in ("on", "off"):
            raise RequestError(
                Code.INVALID_ARGUMENT, f"expected world.recording to be written as on or off, got {text!r:.80}"
            )
        for tape in self._tapes:
            tape.on = text == "on"

    async def call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Call a public method, or read a public attribute; calls are recorded, because they may change the state."""
        # Reading an attribute does not affect a replay.
        if request.look:
            return await self.inner.call(request)
        part, tapes = bridge_pb2.CallRequest(), self._tapes
        part.CopyFrom(request)
        if self._by_lane:  # a stream of the recording has one lane
            tapes = [tapes[lane] for lane in checked_lanes(request.lanes, len(tapes))]
            del part.lanes[:]
        try:
            return await self.inner.call(request)
        finally:  # a call that raised may have changed the environment before
            for tape in tapes:
                tape.note("call", part)

    async def run_message(self, message: SessionMessage, request: bytes) -> PartOutcome:
        """Let a message's part beside the environment answer a request, and record where that puts the environment."""
        # Worlds that step lanes one by one are in real time, where no message puts lanes elsewhere.
        moment = "" if self._by_lane else self._tapes[0].moment
        outcome = await self.inner.run_message(dataclasses.replace(message, moment=moment), request)
        if outcome.placed is not None:
            await self._parts[0].place(outcome)
        return outcome

    async def answer_property(self, request: properties_pb2.PropertyRequest) -> properties_pb2.PropertyResponse:
        """Answer a request for a property; writes are recorded, for each lane with its own value."""
        if request.WhichOneof("payload") != "write_property":
            return await self.inner.answer_property(request)
        written, parts = request.write_property, [request]
        if self._by_lane:
            # The message has one value per lane, and a stream is replayed as an environment with one lane.
            write = partial(properties_pb2.WritePropertyRequest, key=written.key)
            each = checked_values(read_encoded(written.value), len(self._tapes))
            parts = [properties_pb2.PropertyRequest(write_property=write(value=encoded([value]))) for value in each]
        try:
            return await self.inner.answer_property(request)
        finally:  # as for a call
            for tape, part in zip(self._tapes, parts, strict=True):
                tape.note("write", part)

    async def close(self, reason: RequestError | None = None) -> None:
        """Close the environment."""
        try:
            await self.inner.close(reason)
        finally:
            for tape in self._tapes:
                tape.end()


def attach(journal: Journal, world: EnvWorld, made_by: Mapping[str, Any]) -> None:
    """Record all calls of a world's environment from now on.

    Args:
        journal: Writes the recording.
        world: A world of `serve_gym`, `serve_parallel` or `serve_perlert` that has not been used yet.
        made_by: What the environment was made of, for the header entry `world`.
    """
    env, facts = world.env, world.env.facts
    # In real time each lane is stepped and reset by itself; in lock-step one call is for all lanes.
    by_lane = world.pacer.by_lane
    kind = "agents" if facts.agents else "env" if by_lane or facts.num_envs is None else "lanes"
    lanes: Sequence[int | None] = range(facts.num_envs or 1) if by_lane else [None]
    headers = [describe_world(journal, world, kind, made_by, lane) for lane in lanes]
    tapes = [Tape(journal, Encoder(header)) for header in headers]
    parts = [_RecordedLane(world, tape, lane) for tape, lane in zip(tapes, lanes, strict=True)]
    world.env = RecordedEnv(env, parts, by_lane=by_lane)
    world.shown["recording"] = lambda: tapes[0].on


def branch_points(placed: Iterable[tuple[int, Origin | None]], lanes: int) -> list[BranchPoint | None]:
    """Return the points that lanes continue, None for lanes that are not affected.

    Args:
        placed: The lanes that continue elsewhere, and the point at which an environment was there before.
        lanes: The number of lanes.
    """
    found: list[BranchPoint | None] = [None] * lanes
    for lane, origin in placed:
        if origin is None or not origin.moment:  # it was not recorded at that time
            found[lane] = BranchPoint(seed=None if origin is None else origin.seed)
        else:
            stream, _, call = origin.moment.rpartition(".")
            found[lane] = BranchPoint(stream, origin.lane, int(call), origin.seed)
    return found


def size_of(value: Any) -> int:
    """Return the approximate bytes of memory of a value."""
    if value is None:
        return 0
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(size_of(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(size_of(item) for item in value)
    return 50
