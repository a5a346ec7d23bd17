"""A server's source of worlds, each of which is recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bridge.encoding.properties import TEXT, Property
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.recording.library import MOST_EPISODES, Library
from bridge.recording.replay_world import REPLAY, Replays
from bridge.recording.tape import attach
from bridge.recording.writer import Journal
from bridge.worlds.base import World
from bridge.worlds.scheduling import Runtime

__all__ = ["RecordedSource"]


class RecordedSource:
    """Makes the worlds of another source, and records them; ends the recording with the server.

    Args:
        source: An `EnvSource` or a `ParallelSource`.
        journal: Where the recording goes.
    """

    def __init__(self, source: Any, journal: Journal) -> None:
        self._source = source
        self.journal = journal
        self._library = Library(journal.folder)
        self._replays = Replays(journal.folder, source)

    @property
    def SETTINGS(self) -> Sequence[str]:  # noqa: N802 - a constant of its class
        """The CreateWorld settings that it takes."""
        return (*self._source.SETTINGS, REPLAY)

    @property
    def leaves(self) -> list[Property]:
        """What it adds to the properties below `server`."""
        text = f"the {MOST_EPISODES} recorded episodes of the server's folder that began last, as JSON"
        return [Property("server.recordings", TEXT, text, lambda: json.dumps(self._library.list()))]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._source, name)

    async def prepare(self, runtime: Runtime) -> None:
        """Make the environment of the first world ahead."""
        await self._source.prepare(runtime)

    async def make_world(self, name: str, settings: Mapping[str, pb.Tensor], runtime: Runtime) -> World:
        """Build the world that CreateWorld settings ask for, and record it; raises as the source's own.

        The setting `replay` asks for a world that shows a recorded episode, which is not recorded.
        """
        if REPLAY in settings:
            return await self._replays.make_world(name, settings, runtime)
        world: World = await self._source.make_world(name, settings, runtime)
        attach(self.journal, world, self._source.made_by(settings))
        return world

    async def close(self) -> None:
        """Close what was made ahead, and write what is queued."""
        self._library.close()
        try:
            await self._source.close()
        finally:
            self.journal.close()
