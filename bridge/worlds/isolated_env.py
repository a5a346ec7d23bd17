"""Environments in processes of their own, as worlds see them: each stands for one of Gymnasium's or PettingZoo's.

The world itself, with its agents, its clock and its rules, stays in the server, and is the same as for an environment
that lives there. Observations and actions travel as the arrays of their spaces' layouts, the rest in the values codec.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from bridge import values
from bridge.errors import Code, RequestError, TensorError
from bridge.pb import bridge_pb2
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.properties import ENCODED, Family, Property, PropertyTree, read_encoded
from bridge.space_json import space_from_json
from bridge.spaces import Layout
from bridge.tensors import pack_tensor, unpack_tensor
from bridge.worlds.isolated import Isolation, WorldProcess

__all__ = ["Isolated", "IsolatedEnv", "IsolatedParallelEnv", "IsolatedVectorEnv", "start_isolated"]


class RemoteAccess:
    """The access to an environment in a process: what `EnvAccess` gives there."""

    def __init__(self, process: WorldProcess) -> None:
        self._process = process
        leaves, families = values.decode(process.ask(b"d", b"", "its properties"))
        found = [
            Property(
                key,
                kind,
                text,
                partial(self._read, key, kind) if readable else None,
                partial(self._write, key, kind) if writable else None,
            )
            for key, kind, text, readable, writable in leaves
        ]
        self._tree = PropertyTree(found, [self._family(key, text) for key, text in families])

    def _family(self, key: str, text: str) -> Family:
        return Family(
            key,
            text,
            lambda name: self._read(f"{key}.{name}", ENCODED),
            lambda name, value: self._write(f"{key}.{name}", ENCODED, value),
            lambda: [found.rpartition(".")[2] for found in self._list(key)],
            lambda name: self._find(f"{key}.{name}"),
        )

    def _list(self, key: str) -> list[str]:
        keys: list[str] = values.decode(self._process.ask(b"L", key.encode(), f"listing {key}"))
        return keys

    def _find(self, key: str) -> None:
        self._list(key)  # of a leaf it is refused, by NOT_FOUND where there is none

    def _read(self, key: str, kind: str) -> Any:
        tensor = pb.Tensor.FromString(self._process.ask(b"R", key.encode(), f"reading {key}"))
        return read_encoded(tensor) if kind == ENCODED else unpack_tensor(tensor, key)[()]

    def _write(self, key: str, kind: str, value: Any) -> None:
        try:
            tensor = pack_tensor(np.frombuffer(values.encode(value), np.uint8) if kind == ENCODED else value)
        except TensorError as error:
            raise RequestError(Code.INVALID_ARGUMENT, str(error)) from error
        name = key.encode()
        self._process.ask(b"W", len(name).to_bytes(4, "big") + name + tensor.SerializeToString(), f"setting {key}")

    def properties(self) -> PropertyTree:
        """Return what the environment adds to the tree below `world`."""
        return self._tree

    def frame(self) -> Any:
        """Return what `render()` gives now, a list with an entry a lane."""
        return self._read("world.frame", ENCODED)

    def call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Call a public method, or read a public attribute, on the lanes that the request names."""
        answer = self._process.ask(b"c", request.SerializeToString(), f"call of {request.name}")
        return bridge_pb2.CallResponse.FromString(answer)


class Isolated:
    """What stands for an environment in a process of its own, whatever its kind."""

    def __init__(self, process: WorldProcess) -> None:
        self.process = process
        self.access = RemoteAccess(process)

    def close(self) -> None:
        """Close the environment and end its process; raises what the environment raised."""
        self.process.close()


class IsolatedLane:
    """Stands for one environment, or for all lanes of a vector at once: their reset and step."""

    def __init__(
        self, process: WorldProcess, spaces: tuple[Space[Any], Space[Any]], lanes: int | None, lane: int | None = None
    ) -> None:
        self.observation_space, self.action_space = spaces
        self._process = process
        self._lane = lane
        self._channel = (lane or 0) % process.channels
        self._observations = Layout(spaces[0], "observation", lanes)
        self._actions = Layout(spaces[1], "action", lanes)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, Any]:
        """Reset the environment; the infos of lanes are joined already."""
        observation, info = self._ask(b"r", [self._lane, seed, options], "reset")
        return self._observations.unpack(observation), values.decode(info)

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Step the environment; the infos of lanes are joined already."""
        arrays = self._actions.pack(action, rounding=True)
        observation, reward, terminated, truncated, info = self._ask(b"s", [self._lane, arrays], "step")
        return self._observations.unpack(observation), reward, terminated, truncated, values.decode(info)

    def _ask(self, kind: bytes, payload: Any, where: str) -> Any:
        return values.decode(self._process.ask(kind, values.encode(payload), where, channel=self._channel))


class IsolatedEnv(Isolated, IsolatedLane):
    """Stands for a Gymnasium environment."""

    def __init__(self, process: WorldProcess) -> None:
        Isolated.__init__(self, process)
        IsolatedLane.__init__(self, process, _spaces(process.facts["spaces"][0]), None)


class IsolatedVectorEnv(Isolated, IsolatedLane, VectorEnv[Any, Any, Any]):
    """Stands for a vector environment."""

    def __init__(self, process: WorldProcess) -> None:
        facts = process.facts
        spaces = _spaces(facts["spaces"][0])
        self.num_envs = facts["num_envs"]
        Isolated.__init__(self, process)
        IsolatedLane.__init__(self, process, spaces, self.num_envs)
        self.single_observation_space, self.single_action_space = spaces
        self.observation_space, self.action_space = (batch_space(space, self.num_envs) for space in spaces)
        mode = facts["autoreset_mode"]
        self.metadata = {"autoreset_mode": None if mode is None else AutoresetMode[mode]}
        self.kind: str = facts["type"]
        self.resets_lanes: bool = facts["resets_lanes"]
        self._text: str = facts["text"]
        lanes = range(self.num_envs) if facts["steps_lanes"] else ()
        self.envs = [IsolatedLane(process, spaces, None, lane) for lane in lanes]

    def close(self, **kwargs: Any) -> None:
        """Close the environments and end their process; raises what they raised."""
        self.closed = True
        self.process.close()

    def __repr__(self) -> str:
        return self._text


class IsolatedParallelEnv(Isolated):
    """Stands for a PettingZoo ParallelEnv."""

    def __init__(self, process: WorldProcess) -> None:
        super().__init__(process)
        self.possible_agents: list[Any] = process.facts["agents"]
        self.agents: list[Any] = []
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

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[Any, Any], dict[Any, Any]]:
        """Reset the environment; return observations and infos by agent."""
        parts = self._read(self.process.ask(b"r", values.encode([seed, options]), "reset"))
        return parts[0], parts[4]

    def step(self, actions: Mapping[Any, Any]) -> tuple[dict[Any, Any], ...]:
        """Step the environment; return observations, rewards, both flags and infos by agent."""
        packed = [
            [self._numbers[agent], self._layouts[agent][1].pack(action, rounding=True)]
            for agent, action in actions.items()
        ]
        return self._read(self.process.ask(b"s", values.encode(packed), "step"))

    def _read(self, answer: bytes) -> tuple[dict[Any, Any], ...]:
        alive, rows = values.decode(answer)
        self.agents = [self.possible_agents[number] for number in alive]
        parts: tuple[dict[Any, Any], ...] = ({}, {}, {}, {}, {})
        for number, observation, *rest in rows:
            agent = self.possible_agents[number]
            if observation is not None:
                parts[0][agent] = self._layouts[agent][0].unpack(observation)
            for part, value in zip(parts[1:], rest, strict=True):
                if value is not None:
                    part[agent] = values.decode(value) if part is parts[4] else value
        return parts


def _spaces(pair: list[str]) -> tuple[Space[Any], Space[Any]]:
    return space_from_json(pair[0]), space_from_json(pair[1])


_KINDS: Mapping[str, type[Isolated]] = {
    "env": IsolatedEnv,
    "vector": IsolatedVectorEnv,
    "parallel": IsolatedParallelEnv,
}


def start_isolated(
    name: str, recipe: bytes, factory: bytes | None, isolation: Isolation, channels: int = 1
) -> Isolated:
    """Start a process, have it make its environment, and return what stands for that; arguments as `WorldProcess`.

    Raises:
        RequestError: The environment could not be made, or not within `call_timeout`.
    """
    process = WorldProcess(name, recipe, factory, isolation, channels)
    try:
        return _KINDS[process.facts["kind"]](process)
    except BaseException:
        process.close()
        raise
