"""The process of an isolated environment: makes it, and answers one message after the other until its pipe ends."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection, parent_process
from typing import Any

from bridge.core.encoding import values
from bridge.core.encoding.names import NAMES
from bridge.core.encoding.properties import Property, PropertyTree
from bridge.core.signals import leave_signals
from bridge.core.worlds.base import environment_failure, failures_in
from bridge.core.worlds.environment import Result
from bridge.core.worlds.hosts import Host
from bridge.core.worlds.isolated.codec import Codec, facts_to_values
from bridge.core.worlds.kinds import Known
from bridge.core.worlds.local import host_of
from bridge.core.worlds.messages import SessionMessage
from bridge.errors import Code, RequestError, TensorError
from bridge.pb import bridge_pb2, properties_pb2
from bridge.pb import dm_env_rpc_pb2 as pb

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
        """Wait for a message and return it. Raises EOFError if the server has closed its end."""
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


def main(sock: socket.socket, recipe: bytes, factory: bytes | None, max_bytes: int | None, held: int = -1) -> None:
    """Serve an environment over a pipe until the pipe ends, a message asks to close, or the parent process is gone.

    Args:
        sock: The pipe. Messages are answered one after the other, in this thread.
        recipe: A pickle of the recipe of environments, and of the settings.
        factory: A client's own factory, pickled.
        max_bytes: The memory that may be allocated.
        held: The writing end of a pipe that only the parent reads; -1: `multiprocessing` knows the parent.
    """
    if hasattr(os, "setsid"):
        with contextlib.suppress(PermissionError):
            os.setsid()  # so that `_end_group` ends the programs that the environment has started, and nothing else
    leave_signals()  # the server gets them too, and ends this process in order
    # A thread, because this one may be in a call that never returns, and so never see the end of the pipe.
    threading.Thread(target=_end_with_parent, args=(held,), name="bridge-isolated-watch", daemon=True).start()
    sock.setblocking(True)
    _Child(recipe, factory, max_bytes).serve(Pipe(sock))


def _end_with_parent(held: int) -> None:
    parent = parent_process()
    # A pipe without a reader is ready too, with an error.
    connection.wait([held if parent is None else parent.sentinel])
    _end_group()  # an environment that never returns must not outlive its server


def _end_group() -> None:
    """Kill this process, and the programs that the environment has started, because the server is gone."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():  # the group that `setsid` made, and no other
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


class _Child:
    """The environment, and a handler for each kind of message."""

    def __init__(self, recipe: bytes, factory: bytes | None, max_bytes: int | None) -> None:
        self._load: Callable[[], Callable[[], Known]] = lambda: _load(recipe, factory, max_bytes)
        self._make: Callable[[], Known] | None = None
        self._host: Host[Any] | None = None
        self._codecs: Sequence[Codec] = ()
        """The codec of the environment, and that of a lane that is stepped by itself."""
        self._properties = PropertyTree()
        self._messages: dict[str, SessionMessage] = {}
        self._names: str | None = None
        """The names of attributes that were last sent to the server; None: they are not sent."""

    def serve(self, pipe: Pipe) -> None:
        """Answer messages until one asks to close. Does not return if the pipe ends before."""
        try:
            while self._answer(pipe, pipe.receive()):
                pass
        except (EOFError, OSError):
            _end_group()

    def _answer(self, pipe: Pipe, message: bytes) -> bool:
        kind, payload = message[:1], message[1:]
        try:
            answer = b"+" + self._SERVE[kind](self, payload)
        except RequestError as error:
            answer = _refusal(error)
        # From the contents of a request, such as an action outside its space: no failure of the environment.
        except TensorError as error:
            answer = _refusal(RequestError(Code.INVALID_ARGUMENT, str(error)))
        except (Exception, SystemExit) as error:  # the environment's own; the host reports most of them
            answer = _refusal(environment_failure("its process", error))
        pipe.send(answer)
        # After the answer, because the server waits for the errors of `close`.
        return kind != b"x"

    def _hosted(self, lane: int | None = None) -> Host[Any]:
        if self._host is None:
            raise RequestError(Code.FAILED_PRECONDITION, "the environment was not made")
        return self._host if lane is None else self._host.lanes[lane]

    def _greet(self, payload: bytes) -> bytes:
        # Separate from `_start`, because the server allows time for imports before `call_timeout` counts.
        self._make = self._load()  # imports the modules that it refers to
        return b""

    def _start(self, payload: bytes) -> bytes:
        if self._make is None:
            raise RequestError(Code.FAILED_PRECONDITION, "nothing was loaded to make the environment of")
        env = self._make()
        with failures_in("its construction"):
            self._host = host_of(env, self._make)
        facts = self._host.facts
        self._codecs = Codec(facts), Codec(facts.of_lane)
        self._properties = self._host.properties()
        self._names = self._properties.get(NAMES)
        leaves = [
            [leaf.key, leaf.kind, leaf.description, leaf.in_environment, _value(leaf)]
            for leaf in self._properties.leaves
        ]
        families = [[family.key, family.description] for family in self._properties.families]
        return values.encode([facts_to_values(facts), leaves, families])

    def _reset(self, payload: bytes) -> bytes:
        lane, seed, options = values.decode(payload)
        host = self._hosted(lane)
        with failures_in("reset", host.facts.kind):
            host.result = None
            host.result = result = host.reset(seed, options)
            # The only property that a reset may change although it is read without the environment.
            told, self._names = self._names, self._properties.get(NAMES)
            return self._packed(lane, result, *([] if self._names == told else [self._names]))

    def _step(self, payload: bytes) -> bytes:
        lane, packed = values.decode(payload)
        action = self._codecs[lane is not None].unpack_action(packed)
        host = self._hosted(lane)
        with failures_in("step", host.facts.kind):
            host.result = None
            host.result = result = host.step(action)
            return self._packed(lane, result)

    def _packed(self, lane: int | None, result: Result, *more: object) -> bytes:
        host = self._hosted()
        codec = self._codecs[lane is not None]
        packed = values.encode([codec.pack(result), host.notes, host.failures, host.retried, *more])
        # They were sent with this answer; each is sent once.
        host.notes.clear()
        host.retried.clear()
        return packed

    def _call(self, payload: bytes) -> bytes:
        return self._hosted().call(bridge_pb2.CallRequest.FromString(payload)).SerializeToString()

    def _message(self, payload: bytes) -> bytes:
        name, made, request, moment = values.decode(payload)
        if made:
            # As the recipe: from our own server, in a pickle of its own.
            with failures_in(f"unpickling the message {name!r}"):
                self._messages[name] = pickle.loads(made)
        host, began = self._hosted(), time.thread_time()
        outcome = host.run_message(dataclasses.replace(self._messages[name], moment=moment), request)
        packed = None if outcome.placed is None else self._codecs[0].pack(outcome.placed)
        told, self._names = self._names, self._properties.get(NAMES)
        origins = [None if origin is None else dataclasses.astuple(origin) for origin in outcome.origins]
        answer = [outcome.answer, packed, list(outcome.lanes), origins, time.thread_time() - began]
        return values.encode([*answer, *([] if told == self._names else [self._names])])

    def _property(self, payload: bytes) -> bytes:
        return self._properties.answer(properties_pb2.PropertyRequest.FromString(payload)).SerializeToString()

    def _close(self, payload: bytes) -> bytes:
        if self._host is not None:
            with failures_in("close"):
                self._host.close()
        return b""

    _SERVE: Mapping[bytes, Callable[[_Child, bytes], bytes]] = {
        b"h": _greet,
        b"?": _start,
        b"r": _reset,
        b"s": _step,
        b"c": _call,
        b"p": _property,
        b"m": _message,
        b"x": _close,
    }


def _value(leaf: Property) -> object:
    # A property that runs code of the environment is read when a client asks for it.
    return None if leaf.in_environment or leaf.read is None else leaf.read()


def _load(recipe: bytes, factory: bytes | None, max_bytes: int | None) -> Callable[[], Known]:
    """Unpickle the recipe; return a function that makes the environment."""
    if max_bytes is not None:
        try:
            import resource
        except ImportError:
            text = "max_world_bytes is not possible on this system: leave it out"
            raise RequestError(Code.UNIMPLEMENTED, text) from None
        # Before anything is unpickled, because a client's factory may allocate memory then.
        resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, max_bytes))
    what = "the environment factory" if factory is not None else "what makes the environment"
    with failures_in(f"unpickling {what} on Python {'.'.join(map(str, sys.version_info[:3]))}"):
        how = pickle.loads(recipe)
        if factory is not None:
            # The only place where a client's bytes are unpickled, and never in the server's own process.
            made = pickle.loads(factory)
            if not callable(made):
                text = f"expected env to be a function, got {made!r:.80}; not callable"
                raise RequestError(Code.INVALID_ARGUMENT, text)
            how = dataclasses.replace(how, factory=made)
    make: Callable[[], Known] = how.make_env
    return make


def _refusal(error: RequestError) -> bytes:
    return b"-" + pb.Status(code=int(error.code), message=error.message).SerializeToString()
