"""A world in a process of its own, seen from the server.

What an environment does there (crash, exit, eat memory, never return) ends that world alone: whoever waits for it is
told what happened, and nothing of the process stays. Messages are bytes of the protocol's own kinds, each way, so that
nothing which comes out of that process is unpickled here. `bridge.worlds.isolated_child` is the other end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing import connection
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from bridge import values
from bridge.errors import Code, RequestError, SettingError, TensorError
from bridge.pb import bridge_pb2
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.properties import ENCODED, Family, Property, PropertyTree, read_encoded
from bridge.tensors import Array, Spec, fill_tensor, pack_tensor, unpack_tensor
from bridge.worlds.base import Agent, World

__all__ = ["CALL_TIMEOUT", "IsolatedWorld", "Isolation"]

CALL_TIMEOUT = 300.0
"""Seconds that one call of an environment may take unless told otherwise."""
_GRACE = 2.0
"""Seconds that a world's process has for closing its environment, once it is idle."""
_START = 120.0
"""Seconds that a process has for its start and its imports, before the environment is made."""
_starting = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Isolation:
    """What a world's process may use."""

    call_timeout: float | None = CALL_TIMEOUT
    """Seconds that one call of its environment may take, its construction too; None: for ever."""
    max_world_bytes: int | None = None
    """Bytes of memory that it may allocate (where the system can limit that: Linux); None: no limit of ours."""

    def __post_init__(self) -> None:
        if self.call_timeout is not None and (
            not isinstance(self.call_timeout, (int, float))
            or isinstance(self.call_timeout, bool)
            or not self.call_timeout > 0
        ):
            raise SettingError(
                f"expected call_timeout to be a positive number of seconds, or None, got {self.call_timeout!r}"
            )
        size = self.max_world_bytes
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise SettingError(f"expected max_world_bytes to be a positive integer, or None, got {size!r}")


class IsolatedAgent(Agent):
    """The agent of a world in another process."""

    def __init__(self, world: IsolatedWorld, specs: pb.ActionObservationSpecs) -> None:
        self._world = world
        self.actions = {uid: Spec.from_proto(spec) for uid, spec in specs.actions.items()}
        self.observations = {uid: Spec.from_proto(spec) for uid, spec in specs.observations.items()}
        self._wanted: list[int] = []
        self._seen: Mapping[int, Array] | None = None

    def reset(self, settings: Mapping[str, pb.Tensor], running: bool) -> None:
        """Take the settings of the next sequence, and end the running one."""
        request = pb.ResetRequest(settings=settings).SerializeToString()
        self._world.ask(b"r" if running else b"q", request, "reset")

    def begin(self) -> int:
        """Start a sequence."""
        return self._move(b"b", {}, "reset")

    def step(self, actions: Mapping[int, Array]) -> int:
        """Apply actions; return the state that follows."""
        return self._move(b"s", actions, "step")

    def interrupt(self) -> None:
        """Take note that the sequence was cut off from outside."""
        self._seen = None
        self._world.ask(b"i", b"", "step")

    def _move(self, kind: bytes, actions: Mapping[int, Array], where: str) -> int:
        # What the last Step asked for comes along: one message each way in place of two.
        request = pb.StepRequest(requested_observations=self._wanted)
        for uid, array in actions.items():
            fill_tensor(request.actions[uid], array)
        self._seen = None
        response = pb.StepResponse.FromString(self._world.ask(kind, request.SerializeToString(), where))
        if self._wanted and len(response.observations) == len(self._wanted):
            self._seen = self._read(response)
        return response.state

    def ended(self, state: int) -> tuple[int, int]:
        """Return the number of lanes, and how many ended their episode, as far as observations that came say so."""
        flags = [uid for uid, spec in self.observations.items() if spec.name in ("terminated", "truncated")]
        lanes = [self.observations[uid].shape for uid in flags][:1]
        if not lanes or lanes == [()]:
            return super().ended(state)
        seen = [self._seen[uid] for uid in flags if self._seen is not None and uid in self._seen]
        return lanes[0][0], int(np.count_nonzero(np.any(seen, axis=0))) if seen else 0

    def _read(self, response: pb.StepResponse) -> dict[int, Array]:
        return {uid: self.observations[uid].read(tensor) for uid, tensor in response.observations.items()}

    def observe(self, uids: Sequence[int]) -> Mapping[int, Array]:
        """Return these observations of the last `begin` or `step`."""
        if self._seen is None or list(uids) != self._wanted:
            request = pb.StepRequest(requested_observations=uids).SerializeToString()
            self._seen = self._read(pb.StepResponse.FromString(self._world.ask(b"o", request, "step")))
            self._wanted = list(uids)
        return {uid: self._seen[uid] for uid in uids}

    def properties(self) -> PropertyTree:
        """Return the properties of the world."""
        return self._world.properties()

    def call(self, request: bridge_pb2.CallRequest) -> bridge_pb2.CallResponse:
        """Call a method of the environment, or read an attribute."""
        answer = self._world.ask(b"c", request.SerializeToString(), f"call of {request.name}")
        return bridge_pb2.CallResponse.FromString(answer)

    def leave(self) -> None:
        """Give up the seat."""
        self._world.vacate(self)


class IsolatedWorld(World):
    """A world whose environment lives in a process of its own.

    Args:
        name: The world's name.
        recipe: What the process builds it of: a pickle of ours.
        factory: A client's own factory, which nobody unpickles but that process; None: there is none.
        isolation: What the process may use.

    Raises:
        RequestError: The environment could not be made, or not within `call_timeout`.
    """

    def __init__(self, name: str, recipe: bytes, factory: bytes | None, isolation: Isolation) -> None:
        super().__init__(name)
        self._isolation = isolation
        self._busy = threading.Lock()
        self._seat = threading.Lock()
        self._agent: IsolatedAgent | None = None
        self._end: str | None = None
        self._closing = False
        context: Any = multiprocessing.get_context(_method())
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, name, recipe, factory, isolation.max_world_bytes)
        from bridge.worlds.isolated_child import main  # not at the top: it needs what makes worlds, which needs us

        self._process = context.Process(target=main, args=arguments, name=f"bridge-{name or 'default'}")
        with _starting:
            if _method() == "forkserver":
                context.set_forkserver_preload(["bridge.worlds.isolated_child"])
            self._process.start()
        theirs.close()
        try:
            self.ask(b"h", b"", "its start", _START)  # imports are not the environment's time
            self.ask(b"?", b"", "its construction")
            self._properties = self._learn_properties()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int | None:
        """The number of its process; None once that is gone."""
        return None if self._end is not None else self._process.pid

    @property
    def alive(self) -> bool:
        """Whether its process is there."""
        return self._end is None

    @property
    def agents(self) -> int:
        """1 while an agent is in, else 0."""
        return int(self._agent is not None)

    def ask(self, kind: bytes, payload: bytes, where: str, limit: float | None = None) -> bytes:
        """Send one message to the process and wait for the answer.

        Args:
            kind: One byte that says what is asked.
            payload: What goes with it.
            where: What the environment does meanwhile, for messages.
            limit: Seconds to wait; None: `call_timeout`.

        Raises:
            RequestError: What the environment answered; DEADLINE_EXCEEDED after `call_timeout`, and UNAVAILABLE where
                the process is gone: the world has ended then.
        """
        with self._busy:
            if self._closing:
                raise RequestError(
                    Code.FAILED_PRECONDITION,
                    f"the world {self.name!r} was destroyed; leave, and create or join another",
                )
            if self._end is not None:
                raise self._ended()
            try:
                self._pipe.send_bytes(kind + payload)
                answer = self._receive(where, limit or self._isolation.call_timeout)
            except (EOFError, OSError):
                self._bury(f"ended in {where}")
                raise self._ended() from None
        if answer[:1] == b"-":
            try:
                status = pb.Status.FromString(answer[1:])
                raise RequestError(Code(status.code), status.message)
            except (DecodeError, ValueError) as error:
                raise RequestError(
                    Code.INTERNAL, f"the world's process sent no answer that can be read: {error}"
                ) from error
        return answer[1:]

    def _receive(self, where: str, limit: float | None) -> bytes:
        # The sentinel too: what the environment started itself may hold the pipe's other end open.
        ready = connection.wait([self._pipe, self._process.sentinel], limit)
        if not ready:
            self._kill()
            self._bury(
                f"was ended, because the environment did not return from {where} within call_timeout={limit:g} s"
            )
            raise RequestError(Code.DEADLINE_EXCEEDED, self._ended().message)
        if self._pipe not in ready and not self._pipe.poll(0):
            raise EOFError
        answer: bytes = self._pipe.recv_bytes()
        return answer

    def _ended(self) -> RequestError:
        return RequestError(
            Code.UNAVAILABLE,
            f"the process of the world {self.name!r} {self._end}; connect again to have another world made",
        )

    def _bury(self, how: str) -> None:
        """Take note that the process is gone, and see to it that it is."""
        self._process.join(_GRACE)
        if self._process.is_alive():
            self._kill()
            self._process.join(_GRACE)
        with _starting:  # where other threads look at processes too
            code = self._process.exitcode
        self._kill()  # what it started itself, in its group
        cause = ""
        if code is not None and code < 0 and "was ended" not in how:
            name = signal.Signals(-code).name if -code in signal.Signals._value2member_map_ else f"signal {-code}"
            cause = f" by {name}" + (" (perhaps out of memory)" if -code == signal.SIGKILL else "")
        elif code is not None and "was ended" not in how:
            cause = f" with exit code {code}"
        self._end = how.replace("ended in", f"ended{cause} in") if cause else how
        self._pipe.close()

    def _kill(self) -> None:
        pid = self._process.pid
        if pid is not None and hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        if self._end is None:
            with contextlib.suppress(OSError, ValueError):
                self._process.kill()

    def join(self, settings: Mapping[str, pb.Tensor]) -> Agent:
        """Seat an agent."""
        with self._seat:
            request = pb.JoinWorldRequest(settings=settings).SerializeToString()
            specs = pb.ActionObservationSpecs.FromString(self.ask(b"j", request, "join"))
            self._agent = IsolatedAgent(self, specs)
            return self._agent

    def vacate(self, agent: IsolatedAgent) -> None:
        """Free the seat of an agent that leaves."""
        with self._seat:
            if self._agent is agent:
                self._agent = None
                if self._end is None and not self._closing:
                    with contextlib.suppress(RequestError):  # it ended; whoever asks next is told
                        self.ask(b"l", b"", "leave")

    def _learn_properties(self) -> PropertyTree:
        leaves, families = values.decode(self.ask(b"d", b"", "its properties"))
        found = [
            Property(
                key,
                kind,
                text,
                partial(self._read_property, key, kind) if readable else None,
                partial(self._write_property, key, kind) if writable else None,
            )
            for key, kind, text, readable, writable in leaves
        ]
        return PropertyTree(found, [self._family(key, text) for key, text in families])

    def _family(self, key: str, text: str) -> Family:
        return Family(
            key,
            text,
            lambda name: self._read_property(f"{key}.{name}", ENCODED),
            lambda name, value: self._write_property(f"{key}.{name}", ENCODED, value),
            lambda: [found.rpartition(".")[2] for found in self._list_properties(key)],
            lambda name: self._find_property(f"{key}.{name}"),
        )

    def _list_properties(self, key: str) -> list[str]:
        keys: list[str] = values.decode(self.ask(b"L", key.encode(), f"listing {key}"))
        return keys

    def _find_property(self, key: str) -> None:
        self._list_properties(key)  # of a leaf it is refused, by NOT_FOUND where there is none

    def _read_property(self, key: str, kind: str) -> Any:
        tensor = pb.Tensor.FromString(self.ask(b"R", key.encode(), f"reading {key}"))
        return read_encoded(tensor) if kind == ENCODED else unpack_tensor(tensor, key)[()]

    def _write_property(self, key: str, kind: str, value: Any) -> None:
        try:
            tensor = pack_tensor(np.frombuffer(values.encode(value), np.uint8) if kind == ENCODED else value)
        except TensorError as error:
            raise RequestError(Code.INVALID_ARGUMENT, str(error)) from error
        name = key.encode()
        self.ask(b"W", len(name).to_bytes(4, "big") + name + tensor.SerializeToString(), f"setting {key}")

    def properties(self) -> PropertyTree:
        """Return the tree below `world`."""
        return self._properties

    def close(self) -> None:
        """Close the environment and end the process; where it is in a call that does not return, without asking."""
        failure: RequestError | None = None
        asked = False
        if self._busy.acquire(timeout=_GRACE):
            try:
                if self._closing:
                    return
                self._closing = True
                if self._end is None:
                    with contextlib.suppress(EOFError, OSError):
                        self._pipe.send_bytes(b"x")
                        deadline = time.monotonic() + _GRACE
                        asked = self._pipe.poll(max(0.0, deadline - time.monotonic()))
                        answer = self._pipe.recv_bytes() if asked else b""
                        if answer[:1] == b"-":
                            status = pb.Status.FromString(answer[1:])
                            failure = RequestError(Code(status.code), status.message)
                    if not asked:
                        self._kill()
                    self._bury("was ended: the world was destroyed")
            finally:
                self._busy.release()
        else:
            self._kill()  # whoever waits in `ask` sees it, and buries it
            if self._busy.acquire(timeout=2 * _GRACE):
                self._closing = True
                self._busy.release()
        if failure is not None:
            raise failure


def _method() -> str:
    from bridge.worlds.source import start_method

    return start_method()
