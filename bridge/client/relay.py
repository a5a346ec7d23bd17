"""A connection that another process keeps: for processes that were forked from one that used gRPC.

`main` is what that other process runs. It reads frames from its standard input and writes frames to its
standard output, each a kind of one byte, a length of eight bytes, and the content; it ends when its input ends, so it
never outlives the process that started it.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import spawn
from typing import IO, Any

from bridge.errors import ConnectError, ConnectionLostError, RemoteError, SettingError

__all__ = ["RelayConnection"]

_HEAD = struct.Struct("<cQ")
_OPEN, _DATA, _VERSION, _ERROR = b"o", b"d", b"v", b"e"


def write_frame(stream: IO[bytes], kind: bytes, content: bytes) -> None:
    """Write a frame and flush it."""
    stream.write(_HEAD.pack(kind, len(content)) + content)
    stream.flush()


def read_frame(stream: IO[bytes]) -> tuple[bytes, bytes] | None:
    """Read a frame; None at the end of the stream, also where it ends within a frame."""
    head = stream.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    kind, size = _HEAD.unpack(head)
    content = stream.read(size)
    return (kind, content) if len(content) == size else None


class RelayConnection:
    """What a connection of this process would be, kept by a process of its own.

    Args:
        open_connection: Makes the connection there; a function of a module, called with `arguments`, and with the
            keyword `deliver`.
        arguments: For it; they are pickled, and read by nobody but that process.
        url: For messages.
        deliver: Called with each answer's bytes, from another thread, and at the end once with the RemoteError that
            says why.
        max_message_bytes: The largest request.
    """

    def __init__(
        self,
        open_connection: Callable[..., Any],
        arguments: tuple[Any, ...],
        url: str,
        deliver: Callable[[bytes | RemoteError], None],
        max_message_bytes: int,
    ) -> None:
        self._url, self._deliver, self._max_message_bytes = url, deliver, max_message_bytes
        self._closing = False
        self.server_version: str | None = None
        paths = [path for path in sys.path if path]
        try:
            self._process = subprocess.Popen(
                [os.fsdecode(spawn.get_executable()), "-c", "from bridge.client.relay import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        except OSError as error:
            raise ConnectError(
                url, f"no process could be started for a connection of a forked process: {error}"
            ) from error
        if self._process.stdin is None or self._process.stdout is None:
            raise ConnectError(url, "the process that keeps the connection has no pipes")
        self._input: IO[bytes] = self._process.stdin
        self._output: IO[bytes] = self._process.stdout
        self._write(_OPEN, pickle.dumps((open_connection, arguments)))
        self._reader = threading.Thread(target=self._read, name=f"bridge-relay {url}", daemon=True)
        self._reader.start()

    def _write(self, kind: bytes, content: bytes) -> None:
        # A pipe that broke shows in the reader, which says so once.
        with contextlib.suppress(BrokenPipeError, ValueError):
            write_frame(self._input, kind, content)

    def send(self, request: bytes) -> None:
        """Send a request.

        Raises:
            SettingError: It is larger than `max_message_bytes`.
        """
        if len(request) > self._max_message_bytes:
            raise SettingError(
                f"a request of {len(request)} bytes is larger than max_message_bytes={self._max_message_bytes}"
            )
        self._write(_DATA, request)

    def _read(self) -> None:
        ending: RemoteError = ConnectionLostError(self._url, "the process that keeps the connection ended")
        while (frame := read_frame(self._output)) is not None:
            kind, content = frame
            if kind == _DATA:
                self._deliver(content)
            elif kind == _VERSION:
                self.server_version = content.decode()
            else:
                ending = pickle.loads(content)
        if not self._closing:
            self._deliver(ending)

    def finish(self) -> None:
        """Say that no request follows; those sent before are served."""
        self._closing = True
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._input.close()

    def close(self, timeout: float) -> None:
        """End the connection and its process. Waits at most `timeout` seconds, then cuts it."""
        self.finish()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5.0)
        self._reader.join(5.0)
        self._output.close()


def main() -> None:
    """Keep one connection for the process at the other end of the pipes."""
    source, sink = sys.stdin.buffer, io.BufferedWriter(io.FileIO(os.dup(1), "wb"))
    os.dup2(2, 1)  # whatever prints does not print between frames
    guard = threading.Lock()
    told: list[str] = []
    opened: list[Any] = []

    def put(kind: bytes, content: bytes) -> None:
        with guard, contextlib.suppress(BrokenPipeError, ValueError):
            write_frame(sink, kind, content)

    def deliver(what: bytes | RemoteError) -> None:
        if isinstance(what, RemoteError):
            put(_ERROR, pickle.dumps(what))
            os._exit(0)  # the main thread waits for a request that nobody could answer
        if not told and opened:
            version = opened[0].server_version
            told.append("")
            if version is not None:
                put(_VERSION, version.encode())
        put(_DATA, what)

    frame = read_frame(source)
    if frame is None or frame[0] != _OPEN:
        return
    open_connection, arguments = pickle.loads(frame[1])
    try:
        connection = open_connection(*arguments, deliver=deliver)
    except RemoteError as error:
        put(_ERROR, pickle.dumps(error))
        return
    opened.append(connection)
    while (frame := read_frame(source)) is not None:
        connection.send(frame[1])
    connection.close(2.0)
