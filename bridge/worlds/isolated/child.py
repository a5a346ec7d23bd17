"""The process of an isolated environment: makes it, and answers one message after the other until its pipe ends."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing import connection, parent_process
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from bridge.encoding import values
from bridge.encoding.properties import Property, PropertyTree
from bridge.encoding.space_json import plain_space_from_json, space_to_json
from bridge.encoding.spaces import Layout
from bridge.errors import Code, RequestError, TensorError
from bridge.pb import bridge_pb2, properties_pb2
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.worlds.access import EnvAccess, ParallelAccess
from bridge.worlds.base import environment_failure, failures_in
from bridge.worlds.broken_lanes import refusal_of_broken_lanes, without_reset_mask
from bridge.worlds.lane_infos import collect_infos, join_infos
from bridge.worlds.rewards import Rewards, prepare_lanes, reward_space_of

__all__ = ["LENGTH", "main"]


LENGTH = struct.Struct(">Q")
"""The length before each message on the pipe."""


class Pipe:
    """This process's end of the pipe to the server.

    Args:
        sock: A connected socket.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("rb")

    def receive(self) -> bytes:
        """Wait for a message and return it. Raises EOFError where the server has closed its end."""
        (size,) = LENGTH.unpack(self._read(LENGTH.size))
        return self._read(size)

    def _read(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) < size:
            raise EOFError
        return data

    def send(self, message: bytes) -> None:
        """Send a message."""
        self._sock.sendall(LENGTH.pack(len(message)) + message)


def main(sock: socket.socket, recipe: bytes, factory: bytes | None, max_bytes: int | None) -> None:
    """Serve an environment over a pipe until it ends, a message says so, or this process's parent is gone.

    Args:
        sock: The pipe. One message after the other is answered, all of them in this thread.
        recipe: A pickle of how to make environments, and of what is asked for.
        factory: A client's own factory, pickled.
        max_bytes: The memory that may be allocated.
    """
    if hasattr(os, "setsid"):
        with contextlib.suppress(PermissionError):
            os.setsid()  # Ctrl-C goes to the server, which ends this process in order
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="bridge-isolated-watch", daemon=True).start()
    sock.setblocking(True)
    _Child(recipe, factory, max_bytes).serve(Pipe(sock))


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)  # an environment that never returns must not outlive its server


class _Player:
    """Resets and steps one environment, or all lanes of a vector."""

    def __init__(self, env: Any, spaces: tuple[Any, Any], lanes: int | None, reward_space: Any) -> None:
        self._env = env
        self._rewards = Rewards(reward_space, lanes)
        self._lanes = lanes
        self._collects = lanes is not None and collect_infos(env)
        self._observations = Layout(spaces[0], "observation", lanes)
        self._actions = Layout(spaces[1], "action", lanes)
        self._notes = values.Notes()

    def reset(self, seed: Any, options: Any) -> list[Any]:
        with failures_in("reset"):
            given = {} if seed is None else {"seed": seed}
            observation, info = self._env.reset(**given, **({} if options is None else {"options": options}))
        return [self._pack(observation), self._info(info, observation)]

    def step(self, arrays: list[Any]) -> list[Any]:
        action = self._actions.unpack(arrays)
        with failures_in("step"):
            observation, reward, terminated, truncated, info = self._env.step(action)
            told: list[Any]
            if self._lanes is None:
                told = [self._rewards.read(reward, self._notes), bool(terminated), bool(truncated)]
            else:
                flags = [np.asarray(terminated, np.bool_), np.asarray(truncated, np.bool_)]
                told = [self._rewards.read_lanes(reward, self._notes), *flags]
        return [self._pack(observation), *told, self._info(info, observation)]

    def _pack(self, observation: Any) -> list[Any]:
        packed = _pack(self._observations, observation)
        for index in range(len(packed)):
            self._observations.note_type(index, observation, self._notes)
        return packed

    def _info(self, info: Any, observation: Any) -> bytes:
        plain = join_infos(info, self._lanes or 1) if self._collects else info
        form = self._observations.form(observation)
        return values.encode_info(plain, self._notes, values.UNCHANGED if form is None else form)


class _EnvHost:
    """A Gymnasium environment."""

    access: EnvAccess

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env = env
        self.access = EnvAccess(env)
        self.facts: dict[str, Any] = {"kind": "env", "spaces": [_texts(env.observation_space, env.action_space)]}
        reward_space = reward_space_of(env)
        self.facts["reward_space"] = None if reward_space is None else space_to_json(reward_space)
        self._player = _Player(env, _published(self.facts["spaces"][0]), None, reward_space)

    def reset(self, payload: Any) -> Any:
        return self._player.reset(*payload[1:])

    def step(self, payload: Any) -> Any:
        return self._player.step(payload[1])

    def call(self, request: bridge_pb2.CallRequest) -> Any:
        return self.access.call(request)


class _VectorHost:
    """A vector environment; the lanes of a SyncVectorEnv can also be called one by one.

    Args:
        env: The environment.
        make: Makes another one in its place, where a failure leaves it of no use.
    """

    access: EnvAccess

    def __init__(self, env: VectorEnv[Any, Any, Any], make: Callable[[], Any]) -> None:
        self._make = make
        self.access = EnvAccess(env)
        mode = (env.metadata or {}).get("autoreset_mode")
        texts = _texts(env.single_observation_space, env.single_action_space)
        self._reward_space = reward_space_of(env)
        self.facts: dict[str, Any] = {
            "kind": "vector",
            "spaces": [texts],
            "num_envs": env.num_envs,
            "autoreset_mode": getattr(mode, "name", None),
            "type": type(env.unwrapped).__name__,
            "text": str(env),
            "resets_lanes": isinstance(env.unwrapped, (SyncVectorEnv, AsyncVectorEnv)),
            "steps_lanes": isinstance(env, SyncVectorEnv),
            "reward_space": None if self._reward_space is None else space_to_json(self._reward_space),
        }
        self._spaces = _published(texts)
        self._adopt(env)

    def _adopt(self, env: VectorEnv[Any, Any, Any]) -> None:
        self.env = env
        self._broken: RequestError | None = None
        prepare_lanes(env, self._reward_space)
        self._player = _Player(env, self._spaces, env.num_envs, self._reward_space)
        lanes = env.envs if isinstance(env, SyncVectorEnv) else ()
        self._lanes = [_Player(lane, self._spaces, None, self._reward_space) for lane in lanes]

    def reset(self, payload: Any) -> Any:
        lane, seed, options = payload
        if self._broken is not None:
            with failures_in("its construction"):
                self.env.close(terminate=True)
                self._adopt(self._make())
            self.access.replace(self.env)
            options = without_reset_mask(options)
        return self._run(self._of(lane).reset, seed, options)

    def step(self, payload: Any) -> Any:
        lane, arrays = payload
        return self._run(self._of(lane).step, arrays)

    def call(self, request: bridge_pb2.CallRequest) -> Any:
        return self._run(self.access.call, request)

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._broken is not None:
            raise self._broken
        try:
            return function(*args)
        except RequestError as error:
            self._broken = refusal_of_broken_lanes(self.env, error)
            raise

    def _of(self, lane: int | None) -> _Player:
        return self._player if lane is None else self._lanes[lane]


class _ParallelHost:
    """A PettingZoo ParallelEnv; agents are sent as indices into `possible_agents`."""

    access: EnvAccess

    def __init__(self, env: Any) -> None:
        self.env = env
        self.access = ParallelAccess(env)
        self._agents = list(env.possible_agents)
        self._numbers = {agent: number for number, agent in enumerate(self._agents)}
        texts = [_texts(env.observation_space(agent), env.action_space(agent)) for agent in self._agents]
        self.facts: dict[str, Any] = {
            "kind": "parallel",
            "spaces": texts,
            "agents": [agent if isinstance(agent, (str, int)) else str(agent) for agent in self._agents],
        }
        pairs = [_published(pair) for pair in texts]
        self._layouts = [(Layout(pair[0], "observation"), Layout(pair[1], "action")) for pair in pairs]
        self._notes = values.Notes()

    def reset(self, payload: Any) -> Any:
        seed, options = payload
        with failures_in("reset"):
            observations, infos = self.env.reset(seed=seed, options=options)
        return self._told(observations, {}, {}, {}, infos)

    def step(self, payload: Any) -> Any:
        actions = {self._agents[number]: self._layouts[number][1].unpack(arrays) for number, arrays in payload}
        with failures_in("step"):
            observations, rewards, terminations, truncations, infos = self.env.step(actions)
        return self._told(observations, rewards, terminations, truncations, infos)

    def call(self, request: bridge_pb2.CallRequest) -> Any:
        return self.access.call(request)

    def _told(self, observations: Any, rewards: Any, terminations: Any, truncations: Any, infos: Any) -> list[Any]:
        rows = []
        for number, agent in enumerate(self._agents):
            seen = _pack(self._layouts[number][0], observations[agent]) if agent in observations else None
            rows.append(
                [
                    number,
                    seen,
                    float(rewards[agent]) if agent in rewards else None,
                    bool(terminations[agent]) if agent in terminations else None,
                    bool(truncations[agent]) if agent in truncations else None,
                    values.encode_info(infos[agent], self._notes) if agent in infos else None,
                ]
            )
        return [[self._numbers[agent] for agent in self.env.agents], rows]


def _texts(*spaces: Any) -> list[str]:
    return [space_to_json(space) for space in spaces]


def _published(texts: list[str]) -> tuple[Any, Any]:
    return plain_space_from_json(texts[0]), plain_space_from_json(texts[1])


def _pack(layout: Layout, observation: Any) -> list[Any]:
    try:
        return layout.pack(observation, rounding=True)
    except TensorError as error:
        raise RequestError(
            Code.INTERNAL, f"the environment's observation is not of its observation_space: {error}"
        ) from error


class _Child:
    """The environment, and a handler for each kind of message."""

    def __init__(self, recipe: bytes, factory: bytes | None, max_bytes: int | None) -> None:
        self._load: Callable[[], Callable[[], Any]] = lambda: _load(recipe, factory, max_bytes)
        self._make: Callable[[], Any] | None = None
        self._host: _EnvHost | _VectorHost | _ParallelHost | None = None
        self._properties = PropertyTree()

    def serve(self, pipe: Pipe) -> None:
        """Answer messages until the pipe ends."""
        with contextlib.suppress(EOFError, OSError):
            while self._answer(pipe, pipe.receive()):
                pass

    def _answer(self, pipe: Pipe, message: bytes) -> bool:
        kind, payload = message[:1], message[1:]
        try:
            answer = b"+" + self._SERVE[kind](self, payload)
        except RequestError as error:
            answer = _refusal(error)
        except TensorError as error:
            answer = _refusal(RequestError(Code.INVALID_ARGUMENT, str(error)))
        except (Exception, SystemExit) as error:  # the environment's own; the host says where it can
            answer = _refusal(environment_failure("its process", error))
        pipe.send(answer)
        return kind != b"x"

    def _hosted(self) -> _EnvHost | _VectorHost | _ParallelHost:
        if self._host is None:
            raise RequestError(Code.FAILED_PRECONDITION, "the environment was not made")
        return self._host

    def _greet(self, payload: bytes) -> bytes:
        self._make = self._load()  # imports what it refers to
        return b""

    def _start(self, payload: bytes) -> bytes:
        if self._make is None:
            raise RequestError(Code.FAILED_PRECONDITION, "nothing was loaded to make the environment of")
        env = self._make()
        with failures_in("its construction"):
            if isinstance(env, VectorEnv):
                self._host = _VectorHost(env, self._make)
            else:
                self._host = _EnvHost(env) if isinstance(env, gymnasium.Env) else _ParallelHost(env)
        self._properties = self._host.access.properties()
        return values.encode(self._host.facts)

    def _describe(self, payload: bytes) -> bytes:
        leaves = [
            [leaf.key, leaf.kind, leaf.description, leaf.in_environment, None if leaf.in_environment else _value(leaf)]
            for leaf in self._properties.leaves
        ]
        return values.encode([leaves, [[family.key, family.description] for family in self._properties.families]])

    def _reset(self, payload: bytes) -> bytes:
        return values.encode(self._hosted().reset(values.decode(payload)))

    def _step(self, payload: bytes) -> bytes:
        return values.encode(self._hosted().step(values.decode(payload)))

    def _call(self, payload: bytes) -> bytes:
        response: bytes = self._hosted().call(bridge_pb2.CallRequest.FromString(payload)).SerializeToString()
        return response

    def _property(self, payload: bytes) -> bytes:
        return self._properties.answer(properties_pb2.PropertyRequest.FromString(payload)).SerializeToString()

    def _close(self, payload: bytes) -> bytes:
        if self._host is not None:
            with failures_in("close"):
                self._host.env.close()
        return b""

    _SERVE: Mapping[bytes, Callable[[_Child, bytes], bytes]] = {
        b"h": _greet,
        b"?": _start,
        b"d": _describe,
        b"r": _reset,
        b"s": _step,
        b"c": _call,
        b"p": _property,
        b"x": _close,
    }


def _value(leaf: Property) -> Any:
    return None if leaf.read is None else leaf.read()


def _load(recipe: bytes, factory: bytes | None, max_bytes: int | None) -> Callable[[], Any]:
    """Unpickle the recipe; return a function that makes the environment."""
    if max_bytes is not None:
        try:
            import resource
        except ImportError:
            raise RequestError(
                Code.UNIMPLEMENTED, "max_world_bytes is not possible on this system: leave it out"
            ) from None
        resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, max_bytes))
    try:
        source, request = pickle.loads(recipe)
        if factory is not None:
            made = pickle.loads(factory)
            if not callable(made):
                raise RequestError(
                    Code.INVALID_ARGUMENT, f"expected env to be a function, got {made!r:.80}; not callable"
                )
            source = source.of_factory(made)
    except RequestError:
        raise
    except (Exception, SystemExit) as error:
        version = ".".join(map(str, sys.version_info[:3]))
        what = "the environment factory" if factory is not None else "what makes the environment"
        problem = environment_failure(f"unpickling {what} on Python {version}", error)
        raise problem from error
    return lambda: source.make_env(request)


def _refusal(error: RequestError) -> bytes:
    return b"-" + pb.Status(code=int(error.code), message=error.message).SerializeToString()
