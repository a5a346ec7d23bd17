"""The process of a world's environment, seen from the server.

What an environment does there (crash, exit, eat memory, never return) ends its world alone: whoever waits for it is
told what happened, and nothing of the process stays. Messages each way are bytes of the protocol's own kinds, so that
nothing which comes out of that process is unpickled here. `bridge.worlds.isolated_env` is what worlds see of it,
`bridge.worlds.isolated_child` the other end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

from google.protobuf.message import DecodeError

from bridge import values
from bridge.errors import Code, RequestError, SettingError
from bridge.pb import dm_env_rpc_pb2 as pb
from bridge.worlds.isolated_child import main

__all__ = ["CALL_TIMEOUT", "Isolation", "WorldProcess", "start_method"]

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

    @classmethod
    def of(
        cls,
        isolation: str | None,
        call_timeout: float | None,
        max_world_bytes: int | None,
        *,
        always: bool = False,
    ) -> Isolation | None:
        """Read the keywords of a server; None: its worlds live in its own process.

        Args:
            isolation: `process` or None.
            call_timeout: As above.
            max_world_bytes: As above.
            always: Worlds have processes of their own whatever `isolation` says.

        Raises:
            SettingError: A keyword is out of its range, or stands without `isolation`.
        """
        if isolation not in (None, "process"):
            raise SettingError(f"expected isolation to be 'process' or None, got {isolation!r}")
        if isolation is not None or always:
            return cls(call_timeout, max_world_bytes)
        if call_timeout != CALL_TIMEOUT or max_world_bytes is not None:
            raise SettingError(
                "call_timeout and max_world_bytes are for worlds in processes: give isolation='process' too"
            )
        return None

    @staticmethod
    def check(title: str, recipe: Callable[[], bytes]) -> None:
        """Raise SettingError where what is served cannot be sent to another process."""
        try:
            recipe()
        except Exception as error:  # whatever the pickling of a user's objects raises
            raise SettingError(
                f'isolation="process" sends {title} to other processes, and it cannot be pickled: {error!r}. '
                "Serve a function that makes everything the environment needs"
            ) from error


class WorldProcess:
    """A process that holds an environment, and answers one message after the other.

    Args:
        name: The world's name.
        recipe: What the process makes the environment of: a pickle of ours.
        factory: A client's own factory, which nobody unpickles but that process; None: there is none.
        isolation: What the process may use.
        channels: How many messages it answers at the same time, each channel one after the other.

    Raises:
        RequestError: The environment could not be made, or not within `call_timeout`.
    """

    def __init__(
        self, name: str, recipe: bytes, factory: bytes | None, isolation: Isolation, channels: int = 1
    ) -> None:
        self.name = name
        self._isolation = isolation
        self._ending = threading.Lock()
        self._end: tuple[Code, str] | None = None
        self._closing = False
        method = start_method()
        context: Any = multiprocessing.get_context(method)
        pipes = [context.Pipe() for _ in range(channels)]
        self._channels = [(mine, threading.Lock()) for mine, _ in pipes]
        arguments = ([theirs for _, theirs in pipes], recipe, factory, isolation.max_world_bytes)
        self._process = context.Process(target=main, args=arguments, name=f"bridge-{name or 'default'}")
        with _starting:
            if method == "forkserver":
                context.set_forkserver_preload(["bridge.worlds.isolated_child", "bridge.worlds.source"])
            self._process.start()
        for _, theirs in pipes:
            theirs.close()
        try:
            self.ask(b"h", b"", "its start", limit=_START)  # imports are not the environment's time
            self.facts: dict[str, Any] = values.decode(self.ask(b"?", b"", "its construction"))
        except BaseException:
            self.close()
            raise

    @property
    def channels(self) -> int:
        """How many messages it answers at the same time."""
        return len(self._channels)

    @property
    def pid(self) -> int | None:
        """The number of its process; None once that is gone."""
        return None if self._end is not None else self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it is there and takes messages."""
        if self._end is None and not self._closing and connection.wait([self._process.sentinel], 0):
            self._bury("")
        return self._end is None and not self._closing

    @property
    def end(self) -> RequestError | None:
        """What ended it, as an answer; None where nothing did but the end of its world."""
        if self._end is None or self._closing:
            return None
        code, how = self._end
        return RequestError(
            code, f"the process of the world {self.name!r} {how}; connect again to have another world made"
        )

    def ask(self, kind: bytes, payload: bytes, where: str, *, limit: float | None = None, channel: int = 0) -> bytes:
        """Send one message to the process and wait for the answer.

        Args:
            kind: One byte that says what is asked.
            payload: What goes with it.
            where: What the environment does meanwhile, for messages.
            limit: Seconds to wait; None: `call_timeout`.
            channel: By which channel.

        Raises:
            RequestError: What the environment answered; DEADLINE_EXCEEDED after `call_timeout`, and UNAVAILABLE where
                the process is gone: the world has ended then.
        """
        pipe, busy = self._channels[channel]
        with busy:
            if self._closing or self._end is not None:
                raise self._gone()
            try:
                pipe.send_bytes(kind + payload)
                answer = self._receive(pipe, where, limit or self._isolation.call_timeout)
            except (EOFError, OSError):
                self._bury(where)
                raise self._gone() from None
        if answer[:1] == b"-":
            raise _read_refusal(answer[1:])
        return answer[1:]

    def _receive(self, pipe: Any, where: str, limit: float | None) -> bytes:
        # The sentinel too: what the environment started itself may hold the pipe's other end open.
        ready = connection.wait([pipe, self._process.sentinel], limit)
        if not ready:
            self._kill()
            self._bury(
                where,
                f"was ended, because the environment did not return from {where} within call_timeout={limit:g} s",
            )
            raise self._gone()
        if pipe not in ready and not pipe.poll(0):
            raise EOFError
        answer: bytes = pipe.recv_bytes()
        return answer

    def _gone(self) -> RequestError:
        return self.end or RequestError(
            Code.FAILED_PRECONDITION, f"the world {self.name!r} was destroyed; leave, and create or join another"
        )

    def _bury(self, where: str, how: str | None = None) -> None:
        """Take note that the process is gone, and see to it that it is.

        Args:
            where: What it was asked for then; empty: nothing.
            how: What we ended it for; None: it ended by itself.
        """
        with self._ending:
            if self._end is not None:
                return
            self._process.join(_GRACE)
            if self._process.is_alive():
                self._kill()
                self._process.join(_GRACE)
            with _starting:  # where other threads look at processes too
                code = self._process.exitcode
            self._kill()  # what it started itself, in its group
            if how is not None:
                self._end = (Code.UNAVAILABLE if not where else Code.DEADLINE_EXCEEDED), how
                return
            cause = "" if code is None else f" with exit code {code}"
            if code is not None and code < 0:
                name = signal.Signals(-code).name if -code in signal.Signals._value2member_map_ else f"signal {-code}"
                cause = f" by {name}" + (" (perhaps out of memory)" if -code == signal.SIGKILL else "")
            self._end = Code.UNAVAILABLE, f"ended{cause}" + (f" in {where}" if where else "")

    def _kill(self) -> None:
        pid = self._process.pid
        if pid is not None and hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        if self._end is None:
            with contextlib.suppress(OSError, ValueError):
                self._process.kill()

    def close(self) -> None:
        """Close the environment and end the process; where it is in a call that does not return, without asking.

        Raises:
            RequestError: What the environment raised in its `close`; the process is gone all the same.
        """
        pipe, busy = self._channels[0]
        failure: RequestError | None = None
        free = busy.acquire(timeout=_GRACE)
        again = self._closing or self._end is not None
        self._closing = self._closing or not again  # a process that had ended by itself is told of as such
        try:
            if free and not again:
                asked = False
                with contextlib.suppress(EOFError, OSError):
                    pipe.send_bytes(b"x")
                    asked = pipe.poll(_GRACE)
                    answer = pipe.recv_bytes() if asked else b""
                    failure = _read_refusal(answer[1:]) if answer[:1] == b"-" else None
                if not asked:
                    self._kill()
            elif not free:
                self._kill()  # whoever waits in `ask` sees it
            self._bury("", "was ended: the world was destroyed")
        finally:
            if free:
                busy.release()
        for pipe, busy in self._channels:
            if busy.acquire(timeout=2 * _GRACE):
                pipe.close()
                busy.release()
        if failure is not None:
            raise failure


def _read_refusal(data: bytes) -> RequestError:
    try:
        status = pb.Status.FromString(data)
        return RequestError(Code(status.code), status.message)
    except (DecodeError, ValueError) as error:
        return RequestError(Code.INTERNAL, f"the world's process sent no answer that can be read: {error}")


def start_method() -> str:
    """How to start the processes of lanes and of worlds: never by a fork of this one, which runs gRPC's threads."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SettingError(
            "the main module starts a server while a process of its environments imports it; guard it by "
            "if __name__ == '__main__':"
        )
    return "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
