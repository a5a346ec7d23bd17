"""A source of worlds that are recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium

from bridge.core.encoding.properties import TEXT, Property
from bridge.core.worlds.base import World
from bridge.core.worlds.environment import Environment
from bridge.core.worlds.scheduling import Runtime
from bridge.core.worlds.world import env_world
from bridge.errors import Code, RequestError, SettingError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.recording.library import MOST_EPISODES, Library
from bridge.recording.replay_world import REPLAY, Replays
from bridge.recording.tape import attach
from bridge.recording.writer import Journal

__all__ = ["RecordedSource"]


def _no_frames(title: str) -> str:
    return (
        f"frames=True records what render() returns, and {title} is made without a render mode, so it returns nothing: "
        "expected one such as rgb_array; give env_kwargs={'render_mode': 'rgb_array'} (--env-kwargs "
        "render_mode=rgb_array), or leave out the frames"
    )


class RecordedSource:
    """Makes the worlds of another source and records them; closing it finishes the recording.

    Args:
        source: An `EnvSource` or a `ParallelSource`.
        journal: Writes the recording.

    Raises:
        SettingError: Frames are to be recorded, but the environment is made without a render mode.
    """

    def __init__(self, source: Any, journal: Journal) -> None:
        self._source = source
        self.journal = journal
        self._library = Library(journal.folder)
        self._replays = Replays(journal.folder, source)
        self.SETTINGS: Sequence[str] = (*source.SETTINGS, REPLAY)
        """The CreateWorld settings that it accepts."""
        text = f"the {MOST_EPISODES} recorded episodes of the server's folder that began last, as JSON"
        self.leaves = [Property("server.recordings", TEXT, text, lambda: json.dumps(self._library.list()))]
        """Its properties below `server`."""
        if journal.options.frames and source.factory is None and len(source.env_ids) == 1:
            made_by, (env_id,) = source.made_by({}), source.env_ids
            kwargs = {**gymnasium.spec(env_id).kwargs, **made_by["kwargs"]}
            if not kwargs.get("render_mode"):
                raise SettingError(_no_frames(env_id))

    def __getattr__(self, name: str) -> Any:
        # Otherwise looking up `_source` before `__init__` has set it, as copy and pickle do, would recurse endlessly.
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._source, name)

    @property
    def traits(self) -> Mapping[str, Any]:
        """Properties of all its worlds for the page: that they are recorded."""
        return {**self._source.traits, "records": True}

    async def prepare(self, runtime: Runtime) -> object:
        """Make the environment of the first world in advance."""
        env = await self._source.prepare(runtime)
        if env is not None:
            self._check_frames(env)
        return env

    def _check_frames(self, env: Environment) -> None:
        """Raise RequestError if frames are to be recorded of an environment that has none."""
        if self.journal.options.frames and not env.properties().get("world.render_mode"):
            raise RequestError(Code.FAILED_PRECONDITION, _no_frames(self._source.title))

    async def make_world(self, name: str, settings: Mapping[str, pb.Tensor], runtime: Runtime) -> World:
        """Make the world for CreateWorld settings and record it; raise like the source's own method.

        With the setting `replay`, make a world that shows a recorded episode, which is not recorded.
        """
        if REPLAY in settings:
            return await self._replays.make_world(name, settings, runtime)
        world: World = await self._source.make_world(name, settings, runtime)
        if (recorded := env_world(world)) is not None:
            try:
                self._check_frames(recorded.env)
            except RequestError:
                await world.close()
                raise
            attach(self.journal, recorded, self._source.made_by(settings))
        return world

    async def close(self) -> None:
        """Close the environment made in advance, and write queued rows."""
        self._library.close()
        try:
            await self._source.close()
        finally:
            self.journal.close()
