"""Recorded episodes as worlds of a running server, which spectators watch and control.

A replay and its recording's files are used in a separate process: a seek that takes long does not delay other worlds.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium

from bridge.core.encoding import values
from bridge.core.encoding.properties import TEXT, Property, PropertyTree
from bridge.core.logs import SafeLog
from bridge.core.worlds.base import Agent
from bridge.core.worlds.environment import Environment, EnvironmentProxy, Isolation, Result
from bridge.core.worlds.isolated.env import start_isolated
from bridge.core.worlds.realtime.clock_pacer import ClockPacer
from bridge.core.worlds.realtime_options import RealtimeOptions
from bridge.core.worlds.recipe import EnvRecipe
from bridge.core.worlds.scheduling import PendingResult, Runtime, Scheduler
from bridge.core.worlds.settings import ROLES, read_choice, read_text, refuse_unknown
from bridge.core.worlds.world import EnvWorld
from bridge.errors import Code, RecordingError, RequestError, SettingError
from bridge.pb import bridge_pb2, properties_pb2
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.recording.player import LARGEST_SPEED, EpisodeEnv, begun
from bridge.recording.reader import open_episode

__all__ = ["MOST_REPLAYS", "REPLAY", "ReplayPacer", "Replays", "SteeredEnv", "replay_world"]

_log = SafeLog(__name__)
REPLAY = "replay"
"""The CreateWorld setting that names an episode."""
MOST_REPLAYS = 4
"""The most worlds of a server that show recorded episodes at a time."""
LINGER = 10.0
"""Seconds after which such a world ends if nobody watches it."""
CALL_TIMEOUT = 60.0
"""Seconds that its process may take to read the recording, or to reach a step."""
_ID = re.compile(r"[0-9A-Za-z]+-[0-9a-f]+-\d+\.\d+\.\d+")
_EXPECTED_ID = "the id of an episode as server.recordings lists it, such as 20261122T140501-3fa9c1-1.0.17"
_CONTROLS: Mapping[str, tuple[type, ...]] = {"paused": (bool,), "position": (int,), "speed": (int, float)}


class Replays:
    """Makes the worlds that show recorded episodes, up to a limit.

    Args:
        folder: The folder of the recordings.
        source: Makes the server's own worlds; environments of replays are made in the same way.
    """

    def __init__(self, folder: Path, source: Any) -> None:
        self._folder = folder
        self._source = source
        self._open: set[object] = set()

    async def make_world(self, name: str, settings: Mapping[str, pb.Tensor], runtime: Runtime) -> EnvWorld:
        """Make a world that shows the episode in the setting `replay`.

        Raises:
            RequestError: INVALID_ARGUMENT: the setting is not the id of an episode; RESOURCE_EXHAUSTED: there are
                already `MOST_REPLAYS` worlds; FAILED_PRECONDITION: the episode does not exist or cannot be shown; the
                message says why.
        """
        refuse_unknown(settings, (REPLAY,), "CreateWorld")
        if os.name == "nt":
            raise RequestError(
                Code.UNIMPLEMENTED,
                "a server on Windows shows no recorded episodes beside its worlds; "
                "use gymnasium-bridge replay EPISODE --serve",
            )
        episode = read_text(settings, REPLAY, "CreateWorld", _ID, _EXPECTED_ID)
        if len(self._open) >= MOST_REPLAYS:
            raise RequestError(
                Code.RESOURCE_EXHAUSTED,
                f"this server shows {MOST_REPLAYS} recorded episodes already, each of which goes {LINGER:g} s after "
                "the last who looked at it; try again later",
            )
        # Counted before the first wait, during which others may request a replay.
        place = object()
        self._open.add(place)
        try:
            env = await self._start(name, episode, runtime)
            return replay_world(name, env, runtime.scheduler, lambda: self._open.discard(place))
        except BaseException:
            self._open.discard(place)
            raise

    async def _start(self, name: str, episode: str, runtime: Runtime) -> SteeredEnv:
        made_by = self._source.made_by({}) if self._source.factory is not None else {}
        specs = [gymnasium.spec(env_id) for env_id in self._source.env_ids]
        show = functools.partial(
            _show, self._folder / episode, self._source.factory, str(made_by.get("entry_point", "")), specs
        )
        try:
            recipe = cloudpickle.dumps(EnvRecipe(show, None))
        except Exception as error:  # pickling a user's objects may raise anything
            raise RequestError(
                Code.FAILED_PRECONDITION,
                f"a replay runs in a process of its own, to which {self._source.title} cannot be sent: {error!r}; "
                "serve a function that makes everything the environment needs",
            ) from error
        # A separate program, so that the server's script is not run again.
        env = await start_isolated(name, recipe, None, Isolation(CALL_TIMEOUT, own_program=True), runtime)
        try:
            return SteeredEnv(env, await _steer(env, {}), runtime.scheduler)
        except BaseException:
            # Otherwise its process would continue, without a world to end it.
            await env.close()
            raise


def _show(path: Path, factory: Callable[..., Any] | None, entry_point: str, specs: Sequence[Any]) -> EpisodeEnv:
    """Return an episode as an environment; called in the process of its world.

    Args:
        path: `FOLDER/ID`.
        factory: Makes the environments of the server; None: they are made by id.
        entry_point: The name of the factory in recordings.
        specs: The environment specs that are registered in the server.
    """
    # The server's script does not run in this process, so its registrations are repeated.
    for spec in specs:
        gymnasium.registry.setdefault(spec.id, spec)
    try:
        episode = open_episode(path)
        recorded = episode.stream.header.get("entry_point")
        # A folder may contain episodes of other environments than the server's. It is the server's own folder, and this
        # process has no other purpose, so method calls are allowed.
        return begun(episode, factory if recorded == entry_point else None, "rgb_array", loop=False, allow_calls=True)
    except (RecordingError, SettingError) as error:
        raise RequestError(Code.FAILED_PRECONDITION, f"this episode cannot be shown: {error}") from error


async def _steer(env: Environment, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Call `EpisodeEnv.steer` and return its result."""
    kwargs = bridge_pb2.Value.Dict(keys=list(wanted), values=[values.to_value(value) for value in wanted.values()])
    response = await env.call(bridge_pb2.CallRequest(name="steer", kwargs=kwargs))
    state: dict[str, Any] = values.from_value(response.results[0])
    return state


class SteeredEnv(EnvironmentProxy):
    """The environment of a replay, controlled by the property `world.replay`; while paused, its `step` waits.

    Args:
        env: The `EpisodeEnv` in its process.
        state: The result of `EpisodeEnv.steer`.
        scheduler: Runs the changes that are written to the property.
    """

    def __init__(self, env: Environment, state: dict[str, Any], scheduler: Scheduler) -> None:
        super().__init__(env)
        self.state = state
        """The state of the replay."""
        self._scheduler = scheduler
        self._wanted: dict[str, Any] = {}
        self._aim = 0
        """The requested step, or the one that is shown."""
        self._steering = False
        self._moved = True
        """True if there may be something new to show, although it is paused."""
        self._closed = False
        self._changed: PendingResult[None] = PendingResult()

    async def reset(self, *, seed: object = None, options: object = None, lane: int | None = None) -> Result:
        """Return the current observation; a reset does not change the position."""
        return await self.inner.reset(options={"position": self._aim})

    async def step(self, action: object, lane: int | None = None) -> Result:
        """Continue; while the replay is paused and nothing has changed, wait."""
        # Otherwise a paused world would draw and send the same picture in each frame.
        while self.state["paused"] and not self._moved and not self._closed:
            await self._changed
        self._moved = False
        result = await self.inner.step(action)
        info = result[4]
        self.state.update(position=int(info["position"]), paused=bool(info["paused"]))
        # During a seek, a frame may still show the previous position, which must not replace the requested one.
        if not self._steering:
            self._aim = self.state["position"]
        return result

    def _wake(self) -> None:
        self._moved = True
        # The new result is set up first: a resumed coroutine may wait again at once, and a result can be set only once.
        pending, self._changed = self._changed, PendingResult()
        pending.set_result(None)

    async def call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Call a method of the `EpisodeEnv`, such as `seek`."""
        response = await self.inner.call(request)
        self._wake()
        return response

    async def answer_property(self, request: properties_pb2.PropertyRequest) -> properties_pb2.PropertyResponse:
        """Answer a request for a property."""
        response = await self.inner.answer_property(request)
        if request.WhichOneof("payload") == "write_property":
            self._wake()
        return response

    def properties(self) -> PropertyTree:
        """Return its properties below `world`."""
        tree = self.inner.properties()
        text = "the episode that is shown, as JSON; written as JSON it takes paused, position and speed"
        return tree.merged(PropertyTree([Property("world.replay", TEXT, text, self._read, self._write)]))

    def _read(self) -> str:
        return json.dumps({**self.state, "seeking": self._steering})

    def _write(self, text: str) -> None:
        """Accept a change; during a long seek, later changes replace earlier ones."""
        self._wanted.update(_read_controls(text))
        self._aim = self._wanted.get("position", self._aim)
        if not self._steering:
            self._steering = True
            self._scheduler.start(self._steer(), _log_failure)

    async def _steer(self) -> None:
        try:
            # A slider may request many positions during one seek: only the newest is used.
            while self._wanted and not self._closed:
                wanted, self._wanted = self._wanted, {}
                self.state = await _steer(self.inner, wanted)
                self._wake()
        finally:
            self._steering = False

    async def close(self, reason: RequestError | None = None) -> None:
        """Close the environment, and end its process."""
        self._closed = True
        self._wake()
        await self.inner.close(reason)


def _read_controls(text: str) -> dict[str, Any]:
    """Parse a value that is written to `world.replay`."""
    given: dict[str, Any]
    try:
        given = json.loads(text)
        # The exact type: `isinstance` accepts True as an int.
        right = all(type(value) in _CONTROLS[name] for name, value in given.items())
    except (ValueError, AttributeError, KeyError):
        right = False
    if not right or not 0 < given.get("speed", 1) <= LARGEST_SPEED:
        raise RequestError(
            Code.INVALID_ARGUMENT,
            "expected world.replay to be written as a JSON object with some of paused (true or false), position (an "
            f"integer) and speed (above 0, at most {LARGEST_SPEED:g}), got {text!r:.100}",
        )
    return given


def _log_failure(result: None, error: BaseException | None) -> None:
    if error is not None:
        _log.warning("a replay could not be steered: %s", error)


class ReplayPacer(ClockPacer):
    """Plays a recorded episode by its clock. It has no seats: any number of spectators watch and control it.

    Args:
        fps: Frames per second.
        closed: Called when the world is closed.
    """

    lingers = LINGER
    steered_by_all = True

    def __init__(self, fps: float, closed: Callable[[], None]) -> None:
        super().__init__(RealtimeOptions(fps))
        self._when_closed = closed

    def join(self, settings: Mapping[str, pb.Tensor]) -> Agent:
        """Add a spectator: setting `role=spectator`."""
        if read_choice(settings, "role", ROLES) != "spectator":
            raise RequestError(
                Code.FAILED_PRECONDITION,
                f"the world {self.world.name!r} shows a recorded episode, which nobody plays: join it with the setting "
                "role=spectator",
            )
        return super().join(settings)

    @property
    def has_players(self) -> bool:
        """True if somebody watches, which keeps the world alive."""
        return self.agents > 0

    @property
    def played(self) -> Mapping[str, bool]:
        """Always empty: there are no players."""
        return {}

    def stop(self) -> None:
        """Stop the replay."""
        self._when_closed()
        super().stop()


def replay_world(name: str, env: SteeredEnv, scheduler: Scheduler, closed: Callable[[], None]) -> EnvWorld:
    """Return a world that shows a recorded episode.

    Args:
        name: The world's name.
        env: The episode; the world owns it from here on.
        scheduler: Runs the frames.
        closed: Called when the world is closed.
    """
    world = EnvWorld(name, env, scheduler, ReplayPacer(env.state["fps"], closed))
    world.title = str(env.state["title"])
    shows = {key: env.state[key] for key in ("episode", "players", "began", "return", "length", "parent")}
    world.shown["replay"] = lambda: shows
    return world
