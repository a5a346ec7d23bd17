"""The server's side of the process that runs a world's environment.

If the environment crashes, exits, runs out of memory or does not return, only its world ends: waiting requests get an
error that says what happened, and the process is reaped. The process sends protocol messages as bytes; the server
unpickles nothing that it receives. `bridge.core.worlds.isolated.env` is the interface for worlds,
`bridge.core.worlds.isolated.child` the process's side.
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
"""Seconds that an idle process may take to close its environment."""
_START = 120.0
"""Seconds that a process may take to start and to import, before it makes the environment."""
_ITS_START = (
    "its start: what it printed says why (a script that serves has to do so below `if __name__ == '__main__':`)"
)
"""The call that an error names if the process ended before it made its environment."""
_CHUNK = 1 << 18
"""Most bytes of one read from the pipe. Each read allocates memory for all of them, however few are received."""
_LOOK = 0.01
"""Seconds between two polls of a process that is ending, where the event loop cannot wait for it."""
_WAITS_FOR_PROCESSES = os.name == "posix"
"""True if the event loop can wait for a process: on Windows `select` takes only sockets, and a sentinel is none."""
# `Process.start` polls all processes that this program has started. With the forkserver each poll reads the exit status
# from a pipe: if another thread's `join` reads it too, the status is lost, and the exit code becomes 255.
_starting = threading.Lock()


class _Ask:
    """A request to the process, and its pending response."""

    def __init__(self, message: bytes, where: str, limit: float | None) -> None:
        self.message = message
        self.where = where
        """What the environment does meanwhile, for error messages; empty: nothing to name."""
        self.limit = limit
        """Seconds that the response may take; None: no limit."""
        self.answer: PendingResult[bytes] = PendingResult()


# However the process ends, `_on_exit` handles it: called for the process's sentinel, by the poll of the exit code on
# Windows, or by `abandon`. Code that ends the process only kills it, or asks it to close, and waits for `_gone`.
# `_killed` keeps the server's reason for a kill, which the exit status does not say. `_closing` marks an end that was
# requested: then `ended` stays None. `_end` is set once, when the process is reaped; all later requests are refused.
class WorldProcess:
    """A process that owns an environment, and answers one request after the other.

    The event loop watches the pipe to the process: no thread waits for it.

    Args:
        name: The world's name.
        isolation: The limits of the process.
        runtime: Provides the event loop that watches the pipe.
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
        """Why the server killed the process; used when the process has ended."""
        self._closing = False
        self._gone: PendingResult[None] = PendingResult()

    async def start(self, recipe: bytes, factory: bytes | None) -> list[Any]:
        """Start the process, and have it make its environment.

        Args:
            recipe: The server's pickle of the recipe from which the process makes the environment.
            factory: A client's pickled factory, which only the process unpickles; None: there is none.

        Returns:
            The description of the environment: its facts, and the leaves and families of its properties.

        Raises:
            RequestError: The environment could not be made, or took longer than `call_timeout`.
        """
        runtime = self._runtime
        await runtime.executor.run(self._launch, recipe, factory)  # the first start imports many modules
        runtime.add_reader(self._sock, self._on_readable)
        if _WAITS_FOR_PROCESSES:
            # The pipe's end is not enough: processes that the environment has started may hold the other end open.
            runtime.add_reader(self._process.sentinel, self._on_exit)
        await self.ask(b"h", b"", _ITS_START, limit=_START)  # `call_timeout` does not include the imports
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
            # The process has its own copy. While this copy is open, the pipe does not end with the process.
            theirs.close()
        # When its event loop has ended, the server ends the processes that are left, by `abandon`.
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
        """The process id; None if the process has ended."""
        return None if self._end is not None else self._process.pid

    @property
    def ended(self) -> RequestError | None:
        """The error for later requests if the process ended unexpectedly; None: it did not."""
        if self._end is None or self._closing:
            return None
        code, how = self._end
        world = f"world {self.name!r}" if self.name else "default world"
        text = f"the process of the {world} {how}; connect again to have another world made"
        return RequestError(code, text)

    async def ask(self, kind: bytes, payload: bytes, where: str, *, limit: float | None = None) -> bytes:
        """Send one request to the process and wait for the response.

        Args:
            kind: One byte: the kind of request.
            payload: The request's data.
            where: What the environment does meanwhile, for error messages.
            limit: Seconds to wait; None: `call_timeout`.

        Raises:
            RequestError: The error that the environment's process returned. DEADLINE_EXCEEDED after `call_timeout`,
                and UNAVAILABLE if the process has ended: then the world has ended too.
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
            # The process may read slowly: the rest is sent when the socket is writable again.
            while self._unsent:
                self._unsent = self._unsent[self._sock.send(self._unsent) :]
        except BlockingIOError:
            self._runtime.add_writer(self._sock, self._on_writable)
            return
        except OSError:
            self._unsent = memoryview(b"")  # the process has ended: its sentinel calls `_on_exit`
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
        if closed:  # the process is ending, and its sentinel calls `_on_exit`; if it does not end, it is killed
            self._runtime.remove_reader(self._sock)
            if not _WAITS_FOR_PROCESSES:
                self._runtime.scheduler.call_later(_LOOK, self._look_for_end)
            # Replaces the timer of a call, or this timer where `_on_exit` reads the end of the pipe again.
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
        # Set first: from the exit status alone, the reason would be "by SIGKILL (perhaps out of memory)".
        self._killed = (
            Code.DEADLINE_EXCEEDED,
            f"was ended, because the environment did not return from {ask.where} within call_timeout={ask.limit:g} s",
        )
        self._kill()

    def _kill(self) -> None:
        if self._end is not None:  # the process was reaped: another process may have its id now
            return
        # The process group, which includes the processes that the environment has started. Before the process calls
        # `setsid`, and on Windows, there is no group: then only the process is killed.
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError, ValueError):
            self._process.kill()

    def abandon(self) -> None:
        """End the process at once, and reap it here: the event loop has ended, so nothing else would."""
        self._kill()
        self._on_exit(abandoned=True)

    def _look_for_end(self) -> None:
        """Poll until the process has ended, then reap it. The pipe, which no other process has open, has ended."""
        if self._end is None:
            if self._process.exitcode is None:
                self._runtime.scheduler.call_later(_LOOK, self._look_for_end)
            else:
                self._on_exit()

    def _on_exit(self, *, abandoned: bool = False) -> None:
        """Reap the process, and answer all waiting requests."""
        if self._end is not None:
            return
        self._on_readable()  # perhaps a last response
        where = self._current.where if self._current is not None else ""
        if _WAITS_FOR_PROCESSES:
            self._runtime.remove_reader(self._process.sentinel)
        self._runtime.remove_reader(self._sock)
        with _starting:  # other threads poll processes too
            # With a limit, because it blocks the event loop: `abandon` has killed the process, which may take a moment
            # to end.
            self._process.join(_GRACE)
            code = self._process.exitcode
        self._kill()  # the processes that it started, in its group
        self._runtime.processes.discard(self)
        # Set before any request is answered: `_over` and the next request read it.
        self._end = self._killed or (Code.UNAVAILABLE, f"ended{_cause(code)}" + (f" in {where}" if where else ""))
        # Reported here, not with a failed request: an idle environment, or one in real time, may crash without any
        # request, and several requests may wait at once.
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
            RequestError: What the environment raised in its `close`; the process has ended nevertheless.
        """
        if self._process is None or self._end is not None or self._closing:
            if self._process is not None:
                await self._gone
            return
        # From now on the end is expected: `ended` stays None, and errors say that the world was destroyed.
        self._closing = True
        waiting, self._queue = self._queue, deque()
        # Queued requests are refused: closing a world must not wait minutes for them.
        for ask in waiting:
            ask.answer.set_error(self._over())
        failure: RequestError | None = None
        with contextlib.suppress(RequestError):  # the process ended without a response
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
        """Wait for a result; kill the process if it takes too long."""
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
