"""The process of an isolated world: builds it, and answers one message after the other until its pipe ends."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from multiprocessing import connection, parent_process
from typing import Any

from bridge import values
from bridge.errors import Code, RequestError, TensorError
from bridge.pb import bridge_pb2
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.tensors import Array
from bridge.worlds.base import Agent, environment_failure, fill_observations
from bridge.worlds.gym import EnvWorld
from bridge.worlds.source import EnvSource

__all__ = ["main"]


def main(pipe: Any, name: str, recipe: bytes, factory: bytes | None, max_bytes: int | None) -> None:
    """Serve a world over a pipe until it ends, is told to, or this process's parent is gone."""
    if hasattr(os, "setsid"):
        with contextlib.suppress(PermissionError):
            os.setsid()  # Ctrl-C goes to the server, which ends this process in order
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, name="bridge-isolated-watch", daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        child = _Child(pipe, name, recipe, factory, max_bytes)
        while child.serve(pipe.recv_bytes()):
            pass


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)  # an environment that never returns must not outlive its server


class _Child:
    """The world, its agent, and what is done for each kind of message."""

    def __init__(self, pipe: Any, name: str, recipe: bytes, factory: bytes | None, max_bytes: int | None) -> None:
        self._pipe = pipe
        self._load: Callable[[], Callable[[], EnvWorld]] = lambda: _load(name, recipe, factory, max_bytes)
        self._build: Callable[[], EnvWorld] | None = None
        self._world: EnvWorld | None = None
        self._agent: Agent | None = None

    def serve(self, message: bytes) -> bool:
        """Answer a message; return whether another may follow."""
        kind, payload = message[:1], message[1:]
        try:
            answer = b"+" + self._SERVE[kind](self, payload)
        except RequestError as error:
            answer = _refusal(error)
        except TensorError as error:
            answer = _refusal(RequestError(Code.INVALID_ARGUMENT, str(error)))
        except (Exception, SystemExit) as error:  # the environment's own; the world says where it can
            answer = _refusal(environment_failure("its process", error))
        self._pipe.send_bytes(answer)
        return kind != b"x"

    def _world_of(self) -> EnvWorld:
        if self._world is None:
            raise RequestError(Code.FAILED_PRECONDITION, "the world was not built")
        return self._world

    def _seated(self) -> Agent:
        if self._agent is None:
            raise RequestError(Code.FAILED_PRECONDITION, "no agent is in the world")
        return self._agent

    def _greet(self, payload: bytes) -> bytes:
        self._build = self._load()  # imports what it refers to
        return b""

    def _start(self, payload: bytes) -> bytes:
        if self._build is None:
            raise RequestError(Code.FAILED_PRECONDITION, "nothing was loaded to build the world of")
        self._world = self._build()
        return b""

    def _describe(self, payload: bytes) -> bytes:
        tree = self._world_of().properties()
        leaves = [
            [leaf.key, leaf.kind, leaf.description, leaf.read is not None, leaf.write is not None]
            for leaf in tree.leaves
        ]
        return values.encode([leaves, [[family.key, family.description] for family in tree.families]])

    def _join(self, payload: bytes) -> bytes:
        agent = self._world_of().join(pb.JoinWorldRequest.FromString(payload).settings)
        self._agent = agent
        return agent.specs().SerializeToString()

    def _leave(self, payload: bytes) -> bytes:
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.leave()
        return b""

    def _reset_running(self, payload: bytes) -> bytes:
        self._seated().reset(pb.ResetRequest.FromString(payload).settings, True)
        return b""

    def _reset(self, payload: bytes) -> bytes:
        self._seated().reset(pb.ResetRequest.FromString(payload).settings, False)
        return b""

    def _begin(self, payload: bytes) -> bytes:
        return self._moved(pb.StepRequest.FromString(payload), self._seated().begin())

    def _step(self, payload: bytes) -> bytes:
        agent, request = self._seated(), pb.StepRequest.FromString(payload)
        actions: Mapping[int, Array] = {uid: agent.actions[uid].read(item) for uid, item in request.actions.items()}
        return self._moved(request, agent.step(actions))

    def _moved(self, request: pb.StepRequest, state: int) -> bytes:
        response = pb.StepResponse(state=state)  # type: ignore[arg-type]
        # The Step was done: what is wrong with its observations is said when they are asked for.
        with contextlib.suppress(RequestError):
            fill_observations(response, self._seated().observe(list(request.requested_observations)))
        return response.SerializeToString()

    def _observe(self, payload: bytes) -> bytes:
        response = pb.StepResponse()
        wanted = list(pb.StepRequest.FromString(payload).requested_observations)
        fill_observations(response, self._seated().observe(wanted))
        return response.SerializeToString()

    def _interrupt(self, payload: bytes) -> bytes:
        interrupt: Callable[[], None] | None = getattr(self._seated(), "interrupt", None)
        if interrupt is not None:
            interrupt()
        return b""

    def _call(self, payload: bytes) -> bytes:
        return self._seated().call(bridge_pb2.CallRequest.FromString(payload)).SerializeToString()

    def _list(self, payload: bytes) -> bytes:
        return values.encode([item.spec.name for item in self._world_of().properties().list(payload.decode())])

    def _read(self, payload: bytes) -> bytes:
        return self._world_of().properties().read(payload.decode()).SerializeToString()

    def _write(self, payload: bytes) -> bytes:
        size = 4 + int.from_bytes(payload[:4], "big")
        tensor = pb.Tensor.FromString(payload[size:])
        self._world_of().properties().write(payload[4:size].decode(), tensor)
        return b""

    def _close(self, payload: bytes) -> bytes:
        if self._world is not None:
            self._world.close()
        return b""

    _SERVE: Mapping[bytes, Callable[[_Child, bytes], bytes]] = {
        b"h": _greet,
        b"?": _start,
        b"d": _describe,
        b"j": _join,
        b"l": _leave,
        b"r": _reset_running,
        b"q": _reset,
        b"b": _begin,
        b"s": _step,
        b"o": _observe,
        b"i": _interrupt,
        b"c": _call,
        b"L": _list,
        b"R": _read,
        b"W": _write,
        b"x": _close,
    }


def _load(name: str, recipe: bytes, factory: bytes | None, max_bytes: int | None) -> Callable[[], EnvWorld]:
    """Read what the world is built of; return what builds it."""
    if max_bytes is not None:
        try:
            import resource
        except ImportError:
            raise RequestError(Code.UNIMPLEMENTED, "max_world_bytes is not possible on this system") from None
        resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, max_bytes))
    source: EnvSource
    try:
        source, order = pickle.loads(recipe)
        if factory is not None:
            made = pickle.loads(factory)
            if not callable(made):
                raise RequestError(
                    Code.INVALID_ARGUMENT, f"expected env to be a function, got {made!r:.80}; not callable"
                )
            source._callable = made
    except RequestError:
        raise
    except (Exception, SystemExit) as error:
        version = ".".join(map(str, sys.version_info[:3]))
        what = "the environment factory" if factory is not None else "what makes the environment"
        problem = environment_failure(f"unpickling {what} on Python {version}", error)
        raise problem from error
    return lambda: _build(source, name, order)


def _build(source: EnvSource, name: str, order: Any) -> EnvWorld:
    world = source.build(name, order, threading.RLock())
    if not isinstance(world, EnvWorld):
        raise RequestError(Code.UNIMPLEMENTED, f"a {type(world).__name__} cannot live in a process of its own")
    return world


def _refusal(error: RequestError) -> bytes:
    return b"-" + pb.Status(code=int(error.code), message=error.message).SerializeToString()
