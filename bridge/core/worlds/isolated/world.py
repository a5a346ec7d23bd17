"""The server's end of the process that runs a world's environment.

If the environment crashes, exits, runs out of memory or does not return, only its world ends: waiting requests get an
error that says what happened, and the process is reaped. The process sends protocol messages as bytes; nothing that it
sends is unpickled here. `bridge.core.worlds.isolated.env` is the interface for worlds,
`bridge.core.worlds.isolated.child` the other end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Awaitable
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from bridge.core.encoding import values
from bridge.core.worlds.environment import Isolation
from bridge.core.worlds.forkserver import process_context
from bridge.core.worlds.isolated.child import LENGTH, main
from bridge.core.worlds.isolated.program import Program
from bridge.core.worlds.scheduling import PendingResult, Runtime, Timer
from bridge.errors import Code, RequestError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["WorldProcess"]

T = TypeVar("T")
_GRACE = 2.0
"""Seconds that a world's process has for closing its environment, once it is idle."""
_START = 120.0
"""Seconds that a process has for its start and its imports, before the environment is made."""
_ITS_START = (
    "its start: what it printed says why (a script that serves has to do so below `if __name__ == '__main__':`)"
)
"""What a process is said to have ended in that did not get as far as making its environment."""
_CHUNK = 1 << 18
"""Bytes that are read from the pipe at a time: the memory for as many is allocated for each read, however few come."""
_LOOK = 0.01
"""Seconds between two looks at a process that is ending, where the event loop cannot wait for it."""
_WAITS_FOR_PROCESSES = os.name == "posix"
"""True if the event loop can wait for a process: on Windows `select` takes sockets alone, and a sentinel is none."""
# `Process.start` polls all processes that this program has started. With the forkserver each poll reads the exit status
# from a pipe: read beside another thread's `join`, it is lost, and the exit code becomes 255.
_starting = threading.Lock()


class _Ask:
    """A message to the process, and its pending answer."""

    def __init__(self, message: bytes, where: str, limit: float | None) -> None:
        self.message = message
        self.where = where
        """The call that the environment is in, for messages; empty: none."""
        self.limit = limit
        """Seconds that the answer may take; None: for ever."""
        self.answer: PendingResult[bytes] = PendingResult()


# Whatever ends the process, `_on_exit` takes note of it: called for its sentinel, by the look for its exit code on
# Windows, or by `abandon`. Whoever wants it to end only kills it, or asks it to close, and waits for `_gone`. `_killed`
# keeps our reason for a kill, which the exit status does not tell. `_closing` tells an end that was asked for from one
# that was not: then `ended` stays None. `_end` is set once, when the process is reaped, and refuses all later requests.
class WorldProcess:
    """A process that holds an environment, and answers one message after the other.

    Its pipe is one of the files that the event loop watches: no thread waits for it.

    Args:
        name: The world's name.
        isolation: What the process may use.
        runtime: Watches the pipe.
    """

    def __init__(self, name: str, isolation: Isolation, runtime: Runtime) -> None:
        self.name = name
        self._isolation = isolation
        self._runtime = runtime
        self._process: Any = None
        self._sock: socket.socket
        self._received = bytearray()
        self._unsent = memoryview(b"")
        self._queue: deque[_Ask] = deque()
        self._current: _Ask | None = None
        self._timer: Timer | None = None
        self._end: tuple[Code, str] | None = None
        self._killed: tuple[Code, str] | None = None
        """Why we killed it, until it is gone."""
        self._closing = False
        self._gone: PendingResult[None] = PendingResult()

    async def start(self, recipe: bytes, factory: bytes | None) -> list[Any]:
        """Start the process, and have it make its environment.

        Args:
            recipe: What the process makes the environment of: a pickle of ours.
            factory: A client's own factory, which nobody unpickles but that process; None: there is none.

        Returns:
            The environment as the process describes it: facts, and the leaves and families of its properties.

        Raises:
            RequestError: The environment could not be made, or not within `call_timeout`.
        """
        runtime = self._runtime
        await runtime.executor.run(self._launch, recipe, factory)  # the first start imports much
        runtime.add_reader(self._sock, self._on_readable)
        if _WAITS_FOR_PROCESSES:
            # The end of the pipe is not enough: what the environment has started itself may hold its other end open.
            runtime.add_reader(self._process.sentinel, self._on_exit)
        await self.ask(b"h", b"", _ITS_START, limit=_START)  # imports are not its time
        description: list[Any] = values.decode(await self.ask(b"?", b"", "its construction"))
        return description

    def _launch(self, recipe: bytes, factory: bytes | None) -> None:
        self._sock, theirs = socket.socketpair()
        self._sock.setblocking(False)
        try:
            with _starting:
                self._process = self._make_process(theirs, recipe, factory)
        except BaseException:
            self._sock.close()
            raise
        finally:
            # The process has its own copy. While ours is open, the pipe does not end with the process.
            theirs.close()
        # The server ends those that are left when its event loop has ended (`abandon`).
        self._runtime.processes.add(self)

    def _make_process(self, theirs: socket.socket, recipe: bytes, factory: bytes | None) -> Any:
        if self._isolation.own_program:
            return Program(theirs, recipe)
        context = process_context("bridge.core.worlds.isolated.child", "bridge.core.worlds.sources.source")
        arguments = (theirs, recipe, factory, self._isolation.max_world_bytes)
        process = context.Process(target=main, args=arguments, name=f"bridge-{self.name or 'default'}")
        process.start()
        return process

    @property
    def pid(self) -> int | None:
        """The number of its process; None once that is gone."""
        return None if self._end is not None else self._process.pid

    @property
    def ended(self) -> RequestError | None:
        """The error to answer with if the process ended unexpectedly; None: it did not."""
        if self._end is None or self._closing:
            return None
        code, how = self._end
        world = f"world {self.name!r}" if self.name else "default world"
        text = f"the process of the {world} {how}; connect again to have another world made"
        return RequestError(code, text)

    async def ask(self, kind: bytes, payload: bytes, where: str, *, limit: float | None = None) -> bytes:
        """Send one message to the process and wait for the answer.

        Args:
            kind: One byte: the kind of request.
            payload: The request's data.
            where: What the environment is doing, for messages.
            limit: Seconds to wait; None: `call_timeout`.

        Raises:
            RequestError: What the environment answered; DEADLINE_EXCEEDED after `call_timeout`, and UNAVAILABLE where
                the process is gone: the world has ended then.
        """
        if self._closing or self._end is not None:
            raise self._over()
        answer = await self._send(_Ask(kind + payload, where, limit or self._isolation.call_timeout))
        if answer[:1] == b"-":
            raise _read_refusal(answer[1:])
        return answer[1:]

    async def _send(self, ask: _Ask) -> bytes:
        self._queue.append(ask)
        self._send_next()
        return await ask.answer

    def _over(self) -> RequestError:
        text = f"the world {self.name!r} was destroyed; leave, and create or join another"
        return self.ended or RequestError(Code.FAILED_PRECONDITION, text)

    # The pipe

    def _send_next(self) -> None:
        # One at a time: the process answers in order, and the time limit of a call must not run while others are
        # served.
        if self._current is not None or not self._queue or self._end is not None:
            return
        ask = self._current = self._queue.popleft()
        if ask.limit is not None:
            self._timer = self._runtime.scheduler.call_later(ask.limit, self._on_timeout)
        self._unsent = memoryview(LENGTH.pack(len(ask.message)) + ask.message)
        self._on_writable()

    def _on_writable(self) -> None:
        waited = bool(self._unsent)
        try:
            # The process may read slowly: the rest is sent when the event loop says that the socket can be written.
            while self._unsent:
                self._unsent = self._unsent[self._sock.send(self._unsent) :]
        except BlockingIOError:
            self._runtime.add_writer(self._sock, self._on_writable)
            return
        except OSError:
            self._unsent = memoryview(b"")  # it is gone, which its sentinel says
        if waited and self._end is None:
            self._runtime.remove_writer(self._sock)

    def _on_readable(self) -> None:
        if self._end is not None:
            return
        closed = True
        try:
            while data := self._sock.recv(_CHUNK):
                self._received += data
        except BlockingIOError:
            closed = False
        except OSError:
            pass
        # There is one request at a time, so no second answer can follow the first in this buffer.
        received, start = self._received, LENGTH.size
        if len(received) >= start and len(received) >= start + LENGTH.unpack_from(received)[0]:
            answer, self._received = bytes(memoryview(received)[start:]), bytearray()
            self._answered(answer)
        if closed:  # the process ends, which its sentinel says; one that does not is killed
            self._runtime.remove_reader(self._sock)
            if not _WAITS_FOR_PROCESSES:
                self._runtime.scheduler.call_later(_LOOK, self._look_for_end)
            # In place of a call's limit, and of itself where `_on_exit` reads the end of the pipe once more.
            self._stop_timer()
            self._timer = self._runtime.scheduler.call_later(_GRACE, self._kill)

    def _answered(self, answer: bytes) -> None:
        ask, self._current = self._current, None
        self._stop_timer()
        if ask is not None:
            ask.answer.set_result(answer)
        self._send_next()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # The end

    def _on_timeout(self) -> None:
        """End a process whose environment does not return."""
        ask = self._current
        if ask is None or self._end is not None:
            return
        # Noted first: the exit alone would read as "by SIGKILL (perhaps out of memory)".
        self._killed = (
            Code.DEADLINE_EXCEEDED,
            f"was ended, because the environment did not return from {ask.where} within call_timeout={ask.limit:g} s",
        )
        self._kill()

    def _kill(self) -> None:
        if self._end is not None:  # it was reaped: its number may be another program's by now
            return
        # The whole group, with what the environment has started itself. There is none yet where the process has not
        # reached `setsid`, and none on Windows: then the process alone is killed.
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError, ValueError):
            self._process.kill()

    def abandon(self) -> None:
        """End the process at once: the event loop has ended, so nobody would hear of its end."""
        self._kill()
        self._on_exit(abandoned=True)

    def _look_for_end(self) -> None:
        """Reap the process as soon as it has ended. Its pipe, which nobody else holds there, has ended already."""
        if self._end is None:
            if self._process.exitcode is None:
                self._runtime.scheduler.call_later(_LOOK, self._look_for_end)
            else:
                self._on_exit()

    def _on_exit(self, *, abandoned: bool = False) -> None:
        """Reap the process, and tell everybody who waits for it."""
        if self._end is not None:
            return
        self._on_readable()  # a last answer
        where = self._current.where if self._current is not None else ""
        if _WAITS_FOR_PROCESSES:
            self._runtime.remove_reader(self._process.sentinel)
        self._runtime.remove_reader(self._sock)
        with _starting:  # where other threads look at processes too
            # With a limit, because the event loop stands still meanwhile: after `abandon` the process was killed, but
            # may not be gone.
            self._process.join(_GRACE)
            code = self._process.exitcode
        self._kill()  # what it started itself, in its group
        self._runtime.processes.discard(self)
        # Before anybody is answered: `_over` and whoever asks next read it.
        self._end = self._killed or (Code.UNAVAILABLE, f"ended{_cause(code)}" + (f" in {where}" if where else ""))
        # Here, and not with the request that it fails: an idle environment may crash too, one in real time is asked by
        # nobody, and where several requests wait each is refused.
        if not (self._closing or abandoned):
            self._runtime.note_failure(self.name, f"the environment's process {self._end[1]}")
        self._stop_timer()
        # After `remove_reader`: the event loop cannot stop watching a file that is closed.
        self._sock.close()
        asks, self._queue = [self._current, *self._queue], deque()
        self._current = None
        for ask in asks:
            if ask is not None:
                ask.answer.set_error(self._over())
        self._gone.set_result(None)

    async def close(self) -> None:
        """Close the environment and end the process; one that is in a call that does not return is killed.

        Raises:
            RequestError: What the environment raised in its `close`; the process is gone all the same.
        """
        if self._process is None or self._end is not None or self._closing:
            if self._process is not None:
                await self._gone
            return
        # From here on the end is expected: `ended` is None, and the world is told to be destroyed, not lost.
        self._closing = True
        waiting, self._queue = self._queue, deque()
        # Not served any more: a world must not take minutes to close because of what is queued.
        for ask in waiting:
            ask.answer.set_error(self._over())
        failure: RequestError | None = None
        with contextlib.suppress(RequestError):  # it is gone without an answer
            if self._current is not None:
                await self._within_grace(self._current.answer)
            if self._end is None:
                answer = await self._within_grace(self._send(_Ask(b"x", "close", None)))
                failure = _read_refusal(answer[1:]) if answer[:1] == b"-" else None
        # A thread of the environment may keep the process from ending.
        await self._within_grace(self._gone)
        if failure is not None:
            raise failure

    async def _within_grace(self, result: Awaitable[T]) -> T:
        """Wait for a result; the process is killed where that takes too long."""
        timer = self._runtime.scheduler.call_later(_GRACE, self._kill)
        try:
            return await result
        finally:
            timer.cancel()


def _cause(code: int | None) -> str:
    """Describe an exit code: the signal, or the code."""
    if code is None:
        return ""
    if code >= 0:
        return f" with exit code {code}"
    # Real-time signals have numbers without names.
    name = signal.Signals(-code).name if -code in signal.Signals._value2member_map_ else f"signal {-code}"
    return f" by {name}" + (" (perhaps out of memory)" if name == "SIGKILL" else "")


def _read_refusal(data: bytes) -> RequestError:
    try:
        status = pb.Status.FromString(data)
        return RequestError(Code(status.code), status.message)
    except (DecodeError, ValueError) as error:
        return RequestError(Code.INTERNAL, f"the world's process sent no answer that can be read: {error}")
