"""Hands the steps of an environment to the writer: the environment as a world sees it, with a recorder around.

The world's own code is the same with and without a recording: `attach` puts a `RecordedEnv` in the place of its
environment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from bridge.encoding import values
from bridge.encoding.properties import TEXT, Property, PropertyTree, encoded, read_encoded
from bridge.errors import Code, RequestError
from bridge.logs import SafeLog
from bridge.pb import bridge_pb2, properties_pb2
from bridge.recording.facts import describe_world
from bridge.recording.rows import Encoder, Kind, Row
from bridge.recording.writer import Journal
from bridge.worlds.environment import Environment, EnvironmentProxy, Lane, Result
from bridge.worlds.realtime.clocked_world import ClockedWorld, kept
from bridge.worlds.realtime.world import RealtimeWorld
from bridge.worlds.single import EnvWorld

__all__ = ["RecordedEnv", "Tape", "attach", "size_of"]

_log = SafeLog(__name__)
_OVERHEAD = 400
"""Bytes of a row beside its observation and frame, about."""
_IMMUTABLE = frozenset((int, float, str, bytes, np.int64, np.int32, np.uint8, np.float32, np.float64))
"""Types of actions that need no copy."""
_new_row: Any = tuple.__new__
"""Makes a `Row` of a tuple with all its fields, without a call of Python."""


class Tape:
    """Hands rows to the writer. It numbers the calls: of what is left out, or does not fit, a gap in the numbers tells.

    Args:
        journal: The writer.
        encoder: Makes records of the rows.
    """

    def __init__(self, journal: Journal, encoder: Encoder) -> None:
        self._journal = journal
        self._encoder = encoder
        self._next = 0
        """The number of the next reset or step."""
        self._fits = True
        self._ended = False
        self.infos, self.unattended = journal.options.infos, journal.options.unattended
        """True if infos are recorded, and episodes of a real-time world that nobody plays."""
        self.on = True
        """True if resets and steps are recorded; calls are in any case, for what follows depends on them."""

    def add(self, row: Row, size: int = 0) -> None:
        """Hand over a row of about so many bytes."""
        number, is_note = self._next, row.kind >= Kind.CALL
        if not is_note:
            self._next += 1
            if not self.on:
                return
        before, self._fits = self._fits, self._journal.offer(self._encoder, (number, row), size + _OVERHEAD)
        if not self._fits:
            self._next += is_note  # a gap tells of this one, too
            if before:
                _log.warning("a recording lacks rows, for they come faster than they are written")

    def skip(self) -> None:
        """Leave a reset or a step out."""
        self._next += 1

    def end(self) -> None:
        """The environment was closed. Again: nothing."""
        if not self._ended:
            self._ended = True
            self.add(Row(Kind.END, time.time()))
            self._journal.offer(self._encoder, None, 0)


class _RecordedLane:
    """A lane, or an environment, whose resets and steps are recorded.

    Args:
        env: What is recorded.
        tape: Takes the rows.
        world: Says who the action at hand is of.
        read_frames: Returns what `render` gives; None: frames are not recorded.
        lane: Its number among those that are stepped one by one.
    """

    def __init__(
        self,
        env: Lane,
        tape: Tape,
        world: EnvWorld,
        read_frames: Callable[[], Any] | None = None,
        lane: int = 0,
    ) -> None:
        self.facts = env.facts
        self._env = env
        self._lane = lane
        self._tape = tape
        self._world = world
        self._applied_by = world.applied_by
        self._moment = _moment_of(world, lane)
        self._read_frames = read_frames
        # Elsewhere each episode is there because somebody asked for it.
        self._may_skip = isinstance(world, ClockedWorld) and world.options.autoreset and not tape.unattended
        self._nobodys = False
        """True if nobody played since the episode began, which is not recorded then."""
        # Lanes that begin anew in the step that ends them have their last observations in the infos.
        self._keeps_infos = tape.infos or (env.facts.autoreset is AutoresetMode.SAME_STEP)

    def _skips(self, begins: bool) -> bool:
        """Leave a call out, and return True, if its episode began while nobody played and nobody has come since."""
        if not self._may_skip:
            return False
        self._nobodys = (begins or self._nobodys) and not (self._world.has_players or self._world.taken_over)
        if self._nobodys:
            self._tape.skip()
        return self._nobodys

    async def _frame(self) -> Any:
        """Return what `render` gives now, where that is recorded."""
        return await self._read_frames() if self._read_frames is not None and self._tape.on else None

    async def reset(self, *, seed: object = None, options: object = None) -> Result:
        """Reset the environment."""
        if self._skips(begins=True):
            return await self._env.reset(seed=seed, options=options)
        given = kept(seed), kept(options)  # Gymnasium's vector environments take `reset_mask` out of the dict
        try:
            result = await self._env.reset(seed=seed, options=options)
        except RequestError as error:
            moment = None if self._moment is None else self._moment()
            failed = Row(Kind.FAILED_RESET, time.time(), seed=given[0], options=given[1], error=error.message)
            self._tape.add(failed._replace(moment=moment))
            raise
        moment = None if self._moment is None else self._moment()
        frame = None if self._read_frames is None else await self._frame()
        self._record(Kind.RESET, result, None, "", moment, frame, *given)
        return result

    async def step(self, action: object) -> Result:
        """Step the environment."""
        if self._may_skip and self._skips(begins=False):
            return await self._env.step(action)
        by = self._applied_by(self._lane)
        if self._world.taken_over:
            by = self._acting(by)
        given = action
        if type(action) not in _IMMUTABLE:
            given = kept(dict(action) if self.facts.agents else action)  # type: ignore[call-overload]
        moment = None if self._moment is None else self._moment()
        try:
            result = await self._env.step(action)
        except RequestError as error:
            self._tape.add(Row(Kind.FAILED_STEP, time.time(), by, given, error=error.message, moment=moment))
            raise
        frame = None if self._read_frames is None else await self._frame()
        self._record(Kind.STEP, result, given, by, moment, frame)
        return result

    def _acting(self, by: Any) -> Any:
        """Return who acts in a step of which people took over a part.

        Args:
            by: Who acts otherwise. Of lanes that are stepped together, who acts for all of them.

        Returns:
            As `applied_by` of the world; of lanes that are stepped together a list with an entry for each.
        """
        taken = self._world.take_takeovers()
        people = {str(key): f"person:{name}" if name else "person" for key, name in taken.items()}
        lanes = self.facts.num_envs
        if lanes is not None:
            return [people.get(str(lane), by) for lane in range(lanes)]
        return {**by, **people} if isinstance(by, Mapping) else next(iter(people.values()))

    def _record(
        self,
        kind: int,
        result: Any,
        action: Any,
        by: Any,
        moment: Any,
        frame: Any,
        seed: Any = None,
        options: Any = None,
    ) -> None:
        """Hand over what came of a call; nothing of this concerns the world."""
        reward, terminated, truncated, alive = 0.0, False, False, ()
        try:
            if self.facts.agents:
                *result, alive = result
            if kind == Kind.STEP:
                observation, reward, terminated, truncated, info = result
            else:
                observation, info = result
        except (TypeError, ValueError):  # it did not return what it must, which the world says
            self._tape.skip()
            return
        seen, told = kept(observation), kept(info) if self._keeps_infos else None
        flags = kept(terminated), kept(truncated)
        # A call of `Row` with its fields by name takes longer than all of this.
        row = _new_row(Row, (kind, time.time(), by, action, seen, kept(reward), *flags, alive, seed, options, "",
                             moment, frame, told))  # fmt: skip
        self._tape.add(row, size_of(seen) + size_of(frame))


class _Recorded(EnvironmentProxy):
    """An environment that is recorded, with the switch of its recording.

    Args:
        env: The environment.
        tapes: Take its rows.
    """

    def __init__(self, env: Environment, tapes: Sequence[Tape]) -> None:
        EnvironmentProxy.__init__(self, env)
        self._tapes = tapes

    @property
    def recording(self) -> bool:
        """True if its episodes are recorded: from the next row on, where it is set."""
        return self._tapes[0].on

    @recording.setter
    def recording(self, on: bool) -> None:
        for tape in self._tapes:
            tape.on = on

    def properties(self) -> PropertyTree:
        """Return what the environment adds to the tree below `world`, and the switch of its recording."""
        text = "whether its episodes are recorded: on or off"
        switch = Property("world.recording", TEXT, text, lambda: "on" if self.recording else "off", self._switch)
        return self.inner.properties().merged(PropertyTree([switch]))

    def _switch(self, text: str) -> None:
        if text not in ("on", "off"):
            raise RequestError(
                Code.INVALID_ARGUMENT, f"expected world.recording to be written as on or off, got {text!r:.80}"
            )
        self.recording = text == "on"

    async def close(self, reason: RequestError | None = None) -> None:
        """Close the environment."""
        try:
            await self.inner.close(reason)
        finally:
            for tape in self._tapes:
                tape.end()


class RecordedEnv(_RecordedLane, _Recorded):
    """An environment that is recorded as a whole; arguments as of a lane."""

    def __init__(
        self, env: Environment, tape: Tape, world: EnvWorld, read_frames: Callable[[], Any] | None = None
    ) -> None:
        _Recorded.__init__(self, env, [tape])
        _RecordedLane.__init__(self, env, tape, world, read_frames)

    async def call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Call a public method, or read a public attribute; calls are recorded, for they may change its state."""
        response = await self.inner.call(request)
        if not request.look:
            self._tape.add(Row(Kind.CALL, time.time(), action=("call", request.SerializeToString())))
        return response

    async def answer_property(self, request: properties_pb2.PropertyRequest) -> properties_pb2.PropertyResponse:
        """Answer a request for a property; what is written is recorded."""
        response = await self.inner.answer_property(request)
        if request.WhichOneof("payload") == "write_property":
            self._tape.add(Row(Kind.CALL, time.time(), action=("write", request.SerializeToString())))
        return response


class RecordedLanes(_Recorded):
    """Lanes that are stepped one by one, each of which is recorded.

    Args:
        env: What has the lanes.
        lanes: The lanes, recorded.
        tapes: Those of the lanes.
    """

    def __init__(self, env: Environment, lanes: Sequence[Lane], tapes: Sequence[Tape]) -> None:
        super().__init__(env, tapes)
        self._lanes = lanes

    @property
    def lanes(self) -> Sequence[Lane]:
        """The parts that a world can step separately."""
        return self._lanes

    async def call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Call a public method, or read a public attribute, on the lanes that the request names."""
        response = await self.inner.call(request)
        part = bridge_pb2.CallRequest()
        part.CopyFrom(request)
        del part.lanes[:]
        for lane in () if request.look else request.lanes or range(len(self._tapes)):
            self._tapes[lane].add(Row(Kind.CALL, time.time(), action=("call", part.SerializeToString())))
        return response

    async def answer_property(self, request: properties_pb2.PropertyRequest) -> properties_pb2.PropertyResponse:
        """Answer a request for a property; what is written is recorded, for each lane its own value."""
        response = await self.inner.answer_property(request)
        if request.WhichOneof("payload") == "write_property":
            written = read_encoded(request.write_property.value)
            for tape, value in zip(self._tapes, written, strict=True):
                part = properties_pb2.PropertyRequest()
                part.write_property.key = request.write_property.key
                part.write_property.value.CopyFrom(encoded([value]))
                tape.add(Row(Kind.CALL, time.time(), action=("write", part.SerializeToString())))
        return response


def attach(journal: Journal, world: EnvWorld, made_by: Mapping[str, Any]) -> None:
    """Record what goes through the environment of a world from now on.

    Args:
        journal: Where to.
        world: One of `serve_gym`, `serve_parallel` or `serve_perlert`, of which nothing was asked yet.
        made_by: What the environment was made of, for the record `world`.
    """
    env, facts = world.env, world.env.facts
    if isinstance(world, RealtimeWorld):
        made = [_record_lane(journal, world, lane, made_by) for lane in range(len(env.lanes))]
        world.env = RecordedLanes(env, [recorded for recorded, _ in made], [tape for _, tape in made])
        return
    frames = _Frames(env, None) if journal.options.frames else None
    kind = "agents" if facts.agents else "env" if facts.num_envs is None else "lanes"
    header = describe_world(journal, world, kind, made_by)
    tape = Tape(journal, Encoder(header, same_step=facts.autoreset is AutoresetMode.SAME_STEP))
    world.env = RecordedEnv(env, tape, world, frames)


def _moment_of(world: EnvWorld, lane: int) -> Callable[[], Any] | None:
    """Return what says when a frame of a real-time world takes place; None: the world is in lock-step."""
    return partial(world.moment, lane) if isinstance(world, ClockedWorld) else None


def _record_lane(
    journal: Journal, world: RealtimeWorld, lane: int, made_by: Mapping[str, Any]
) -> tuple[_RecordedLane, Tape]:
    """Return one lane of a real-time world, recorded."""
    env = world.env
    facts = describe_world(journal, world, "env", made_by, lane)
    tape = Tape(journal, Encoder(facts))
    frames = _Frames(env, None if world.single else lane) if journal.options.frames else None
    return _RecordedLane(env.lanes[lane], tape, world, frames, lane), tape


class _Frames:
    """Renders an environment; once it cannot, no more.

    Args:
        env: What answers for the property `world.frame`.
        lane: Which of its frames is wanted; None: all of them.
    """

    def __init__(self, env: Environment, lane: int | None) -> None:
        self._env = env
        self._lane = lane
        self._over = False

    async def __call__(self) -> Sequence[Any] | None:
        if self._over:
            return None
        try:
            frames = await (self._render() if self._lane is None else self._render_lane(self._lane))
        except RequestError as error:
            self._stop(error.message.partition("\n")[0])
            return None
        if not all(isinstance(frame, np.ndarray) for frame in frames):
            self._stop("render() gives no arrays; make the environment with render_mode='rgb_array'")
            return None
        return frames

    async def _render(self) -> list[Any]:
        request = properties_pb2.PropertyRequest()
        request.read_property.key = "world.frame"
        response = await self._env.answer_property(request)
        frames: list[Any] = read_encoded(response.read_property.value)
        return frames

    async def _render_lane(self, lane: int) -> list[Any]:
        """Render one lane: the others may not have been reset yet."""
        response = await self._env.call(bridge_pb2.CallRequest(name="render", lanes=[lane]))
        return [values.from_value(result) for result in response.results]

    def _stop(self, why: str) -> None:
        self._over = True
        _log.warning("no frames are recorded: %s", why)


def size_of(value: Any) -> int:
    """Return about how many bytes of memory a value holds."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(size_of(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return sum(size_of(item) for item in value)
    return 0 if value is None else 50
