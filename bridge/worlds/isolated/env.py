"""Proxies for environments that run in processes of their own.

The world itself, with its agents and its clock, stays in the server and works as with a local environment. Observations
and actions are sent as the arrays of their spaces' layouts, everything else in the values codec.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gymnasium import Space
from gymnasium.vector import AutoresetMode

from bridge.encoding import values
from bridge.encoding.properties import Family, Property, PropertyTree, read_encoded
from bridge.encoding.space_json import plain_space_from_json
from bridge.encoding.spaces import Layout
from bridge.errors import Code, RequestError
from bridge.pb import bridge_pb2, properties_pb2
from bridge.worlds.environment import StepTimes
from bridge.worlds.isolated.world import Isolation, WorldProcess
from bridge.worlds.scheduling import Runtime

__all__ = ["Isolated", "IsolatedEnv", "IsolatedParallelEnv", "IsolatedVectorEnv", "start_isolated"]


class Isolated:
    """The base of proxies for environments in processes of their own.

    Args:
        process: Its process.
        leaves: The properties that the environment adds, as the process describes them.
        families: The families of properties, likewise.
    """

    def __init__(self, process: WorldProcess, leaves: list[Any], families: list[Any]) -> None:
        self.process = process
        self.times = StepTimes()
        self.notes: list[str] = []
        text = process.facts.get("reward_space")
        self.reward_space: Any = None if text is None else plain_space_from_json(text)
        self._tree = PropertyTree(
            [_leaf(key, kind, text, live, value) for key, kind, text, live, value in leaves],
            [_family(key, text) for key, text in families],
        )

    @property
    def ended(self) -> RequestError | None:
        """The error to answer with if its process ended unexpectedly; None: it did not."""
        return self.process.ended

    async def close(self, reason: RequestError | None = None) -> None:
        """Close the environment and end its process; raises what the environment raised."""
        await self.process.close()

    def properties(self) -> PropertyTree:
        """Return what the environment adds to the tree below `world`."""
        return self._tree

    async def answer_property(self, request: properties_pb2.PropertyRequest) -> properties_pb2.PropertyResponse:
        """Read, write or list a property for which code of the environment runs."""
        kind = str(request.WhichOneof("payload"))
        where = {"read_property": "render" if request.read_property.key == "world.frame" else "reading a property"}
        data = await self.process.ask(b"p", request.SerializeToString(), where.get(kind, "its properties"))
        return properties_pb2.PropertyResponse.FromString(data)

    async def render(self, lanes: Sequence[int]) -> list[Any]:
        """Return what `render()` gives now for some lanes."""
        request = properties_pb2.PropertyRequest()
        request.read_property.key = "world.frame"
        frames = read_encoded((await self.answer_property(request)).read_property.value)
        return [frames[lane] for lane in lanes]

    async def call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Call a public method, or read a public attribute, on the lanes that the request names."""
        answer = await self.process.ask(b"c", request.SerializeToString(), f"call of {request.name}")
        return bridge_pb2.CallResponse.FromString(answer)

    async def ask(self, kind: bytes, payload: Any, where: str) -> Any:
        """Have the environment reset or stepped, and time it."""
        began = time.perf_counter()
        try:
            return values.decode(await self.process.ask(kind, values.encode(payload), where))
        finally:
            getattr(self.times, where).add(time.perf_counter() - began)


def _leaf(key: str, kind: str, text: str, live: bool, value: Any) -> Property:
    return Property(key, kind, text, lambda: value, in_environment=live)


def _family(key: str, text: str) -> Family:
    def elsewhere(*arguments: Any) -> Any:
        raise RequestError(Code.INTERNAL, f"{key} is answered by the environment's process")

    return Family(key, text, elsewhere, elsewhere, elsewhere, elsewhere, in_environment=True)


class IsolatedLane:
    """Resets and steps one environment, or all lanes of a vector environment, in the process.

    Args:
        owner: Asks the process.
        spaces: Observation and action space of one environment.
        lanes: How many there are at once; None: one, without lanes.
        lane: The number of this one, where it is one of several.
    """

    def __init__(self, owner: Isolated, spaces: tuple[Any, Any], lanes: int | None, lane: int | None = None) -> None:
        self._owner = owner
        self._lane = lane
        self._observations = Layout(spaces[0], "observation", lanes)
        self._actions = Layout(spaces[1], "action", lanes)

    async def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, Any]:
        """Reset the environment; the infos of lanes are joined already."""
        observation, info = await self._owner.ask(b"r", [self._lane, seed, options], "reset")
        return self._read(observation, info)

    async def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Step the environment; the infos of lanes are joined already."""
        arrays = self._actions.pack(action, rounding=True)
        observation, reward, terminated, truncated, info = await self._owner.ask(b"s", [self._lane, arrays], "step")
        observation, info = self._read(observation, info)
        return observation, reward, terminated, truncated, info

    def _read(self, observation: Any, info: bytes) -> tuple[Any, Any]:
        read, notes, form = values.decode_info(info)
        self._owner.notes.extend(notes)
        return self._observations.unpack(observation, form=None if form is values.UNCHANGED else form), read


class IsolatedEnv(Isolated, IsolatedLane):
    """Stands for a Gymnasium environment."""

    def __init__(self, process: WorldProcess, leaves: list[Any], families: list[Any]) -> None:
        Isolated.__init__(self, process, leaves, families)
        self.observation_space, self.action_space = _spaces(process.facts["spaces"][0])
        IsolatedLane.__init__(self, self, (self.observation_space, self.action_space), None)

    @property
    def lanes(self) -> list[Any]:
        """The environments that a world steps separately: this one."""
        return [self]


class IsolatedVectorEnv(Isolated, IsolatedLane):
    """Stands for a vector environment."""

    def __init__(self, process: WorldProcess, leaves: list[Any], families: list[Any]) -> None:
        Isolated.__init__(self, process, leaves, families)
        facts = process.facts
        spaces = self.observation_space, self.action_space = _spaces(facts["spaces"][0])
        self.num_envs: int = facts["num_envs"]
        IsolatedLane.__init__(self, self, spaces, self.num_envs)
        mode = facts["autoreset_mode"]
        self.autoreset_mode = None if mode is None else AutoresetMode[mode]
        self.kind: str = facts["type"]
        self.resets_lanes: bool = facts["resets_lanes"]
        self._text: str = facts["text"]
        lanes = range(self.num_envs) if facts["steps_lanes"] else ()
        self.lanes = [IsolatedLane(self, spaces, None, lane) for lane in lanes]

    def __str__(self) -> str:
        return self._text


class IsolatedParallelEnv(Isolated):
    """Stands for a PettingZoo ParallelEnv."""

    def __init__(self, process: WorldProcess, leaves: list[Any], families: list[Any]) -> None:
        super().__init__(process, leaves, families)
        self.possible_agents: list[Any] = process.facts["agents"]
        self._spaces = dict(zip(self.possible_agents, map(_spaces, process.facts["spaces"]), strict=True))
        self._numbers = {agent: number for number, agent in enumerate(self.possible_agents)}
        self._layouts = {
            agent: (Layout(observation, "observation"), Layout(action, "action"))
            for agent, (observation, action) in self._spaces.items()
        }

    def observation_space(self, agent: Any) -> Space[Any]:
        """Return an agent's observation space."""
        space: Space[Any] = self._spaces[agent][0]
        return space

    def action_space(self, agent: Any) -> Space[Any]:
        """Return an agent's action space."""
        space: Space[Any] = self._spaces[agent][1]
        return space

    async def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any, list[Any]]:
        """Reset the environment; return observations and infos by agent, and the agents that are alive."""
        parts = self._read(await self.ask(b"r", [seed, options], "reset"))
        return parts[0], parts[4], parts[5]

    async def step(self, actions: Mapping[Any, Any]) -> tuple[Any, ...]:
        """Step the environment; return its five results by agent, and the agents that are alive."""
        packed = [
            [self._numbers[agent], self._layouts[agent][1].pack(action, rounding=True)]
            for agent, action in actions.items()
        ]
        return self._read(await self.ask(b"s", packed, "step"))

    def _read(self, answer: Any) -> tuple[Any, ...]:
        alive, rows = answer
        parts: tuple[dict[Any, Any], ...] = ({}, {}, {}, {}, {})
        for number, observation, *rest in rows:
            agent = self.possible_agents[number]
            if observation is not None:
                parts[0][agent] = self._layouts[agent][0].unpack(observation)
            for part, value in zip(parts[1:], rest, strict=True):
                if value is not None:
                    part[agent] = self._read_info(value) if part is parts[4] else value
        return *parts, [self.possible_agents[number] for number in alive]

    def _read_info(self, data: bytes) -> Any:
        info, notes, _ = values.decode_info(data)
        self.notes.extend(notes)
        return info


def _spaces(pair: list[str]) -> tuple[Space[Any], Space[Any]]:
    return plain_space_from_json(pair[0]), plain_space_from_json(pair[1])


_KINDS: Mapping[str, type[Any]] = {
    "env": IsolatedEnv,
    "vector": IsolatedVectorEnv,
    "parallel": IsolatedParallelEnv,
}


async def start_isolated(
    name: str, recipe: bytes, factory: bytes | None, isolation: Isolation, runtime: Runtime
) -> Any:
    """Start a process, have it make its environment, and return what stands for that; as `WorldProcess.start`.

    Raises:
        RequestError: The environment could not be made, or not within `call_timeout`.
    """
    process = await WorldProcess.start(name, recipe, factory, isolation, runtime)
    try:
        leaves, families = values.decode(await process.ask(b"d", b"", "its properties"))
        return _KINDS[process.facts["kind"]](process, leaves, families)
    except BaseException:
        await process.close()
        raise
