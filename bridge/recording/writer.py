"""The thread that writes recordings: a bounded queue before it, files that rotate behind it.

Whoever records calls `Journal.offer`, which never waits: what does not fit is counted. A disk that is full costs the
recording rows, and nobody a step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Protocol

from bridge.errors import SettingError
from bridge.forks import forget_in_child, leak
from bridge.logs import SafeLog
from bridge.recording.files import HEAD, SUFFIX

__all__ = ["Journal", "RecordOptions", "Source"]

_log = SafeLog(__name__)
_GATHER = 0.1
"""Seconds that the writer lets rows come together."""
_PAUSE = 5.0
"""Seconds without a try after files could not be written."""
_CLOSE = 10.0
"""Seconds that `close` waits for what is queued to be written."""
_ENOUGH = 64
"""So many rows are written at once, fewer only when they cannot wait."""
_PATIENCE = 0.5
"""Seconds that rows wait for others to come."""
_BATCH = 4096
"""The most rows of a record."""
_BATCH_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class RecordOptions:
    """What is recorded, and how much."""

    observations: bool = False
    """Whether observations are recorded; otherwise their hashes are."""
    frames: bool = False
    """Whether what `render` gives is recorded after each step."""
    max_bytes: int | None = None
    """The most bytes of all files of a recording, after which the oldest file is deleted; None: no limit."""
    file_bytes: int = 64 << 20
    """Bytes after which another file is begun."""
    queue_bytes: int = 256 << 20
    """The most bytes that wait to be written."""

    def __post_init__(self) -> None:
        for name in ("max_bytes", "file_bytes", "queue_bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                keyword = "record_limit" if name == "max_bytes" else name
                raise SettingError(f"expected {keyword} to be a positive number of bytes, or None, got {value!r}")
        if self.max_bytes is not None:
            object.__setattr__(self, "file_bytes", max(1, min(self.file_bytes, self.max_bytes // 4)))


class Source(Protocol):
    """What rows are of: it makes records of them, in the writer's thread."""

    def describe(self) -> bytes:
        """Return the record that says what the source is; each file begins with it."""

    def is_urgent(self, rows: list[Any]) -> bool:
        """Whether rows are to be written soon: an episode ended in one of them."""

    def encode(self, rows: list[Any]) -> bytes:
        """Return records of rows."""

    def give_up(self, rows: list[Any]) -> None:
        """Count these rows, with which `encode` was called last, as lost."""


class Journal:
    """A recording that is being written: files of one folder, in a thread of its own.

    Args:
        folder: Where the files go; made where there is none.
        options: What is recorded.

    Raises:
        SettingError: The folder cannot be made or written.
    """

    def __init__(self, folder: str | os.PathLike[str], options: RecordOptions | None = None) -> None:
        self.folder = Path(folder).absolute()
        self.options = options or RecordOptions()
        self.run = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
        """The name of this recording, with which its files begin."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            writable = os.access(self.folder, os.W_OK | os.X_OK)
        except OSError as error:
            raise SettingError(f"cannot record into {self.folder}: {error.strerror or error}") from error
        if not writable:
            raise SettingError(f"cannot record into {self.folder}: it is not writable; give another folder to record=")
        self._files = _Files(self.folder, self.run, self.options)
        self._rows: deque[tuple[Source, Any, int]] = deque()
        self._held: dict[Source, _Held] = {}
        self._offered = self._taken = 0  # bytes; each is changed by one side alone
        self._streams = 0
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        forget_in_child(self)

    def number(self) -> int:
        """Return the number of a new stream of this recording, from 1."""
        with self._starting:
            self._streams += 1
            return self._streams

    def offer(self, source: Source, row: Any, size: int) -> bool:
        """Have a row written; return whether it fits into the queue. Never waits.

        Args:
            source: What the row is of.
            row: What its `encode` takes.
            size: About how many bytes of memory it holds.
        """
        if self.queued_bytes + size > self.options.queue_bytes or self._closing.is_set():
            return False
        self._offered += size
        self._rows.append((source, row, size))
        if not self._wake.is_set():
            self._wake.set()
            if self._thread is None:
                self._start()
        return True

    @property
    def queued(self) -> int:
        """The rows that the thread has not taken yet."""
        return len(self._rows)

    @property
    def queued_bytes(self) -> int:
        """About how many bytes of memory the rows hold that are not written yet: at most `queue_bytes`."""
        return self._offered - self._taken

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._run, name="bridge-journal", daemon=True)
                self._thread.start()

    def after_fork(self) -> None:
        """In a forked process: record nothing; the files are the parent's."""
        self._closing, self._starting = threading.Event(), threading.Lock()
        self._closing.set()
        self._thread = None
        leak(self._files)

    def close(self) -> None:
        """Write what is queued, and end the thread; waits 10 seconds at most. May be called twice."""
        with self._starting:
            self._closing.set()
            self._wake.set()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE)
            if thread.is_alive():
                _log.error("the recording %s in %s is not written to its end: the disk is slow", self.run, self.folder)

    def _run(self) -> None:
        try:
            while True:
                if not self._held:
                    self._wake.wait()
                self._closing.wait(_GATHER)
                self._wake.clear()
                closing = self._closing.is_set()  # read after the clear: else close() may set both in between, unseen
                while self._rows:
                    self._take()
                    self._write(everything=False)
                self._write(everything=closing)
                if closing and not self._rows:
                    return
        finally:
            self._files.close()

    def _take(self) -> None:
        """Take what waits, up to the size of a record, by source; the order of each source's rows is kept."""
        total, now = 0, time.monotonic()
        for _ in range(_BATCH):
            if not self._rows or total > _BATCH_BYTES:
                break
            source, row, size = self._rows.popleft()
            held = self._held.get(source)
            if held is None:
                held = self._held[source] = _Held(now)
            held.rows.append(row)
            held.size += size
            total += size

    def _write(self, everything: bool) -> None:
        """Write the rows of the sources that have enough for a record, or cannot wait; or all of them."""
        now = time.monotonic()
        for source, held in list(self._held.items()):
            few = len(held.rows) < _ENOUGH and held.size < _BATCH_BYTES and now - held.since < _PATIENCE
            if few and not everything and not source.is_urgent(held.rows):
                continue
            del self._held[source]
            try:
                data = source.encode(held.rows)
            except Exception as error:  # whatever an environment returned
                source.give_up(held.rows)
                _log.error("rows of a recording cannot be encoded: %r", error, exc_info=error)
            else:
                if not self._files.write(source, data):
                    source.give_up(held.rows)
            finally:
                self._taken += held.size


class _Held:
    """Rows of a source that are not written yet."""

    def __init__(self, since: float) -> None:
        self.rows: list[Any] = []
        self.size = 0
        self.since = since
        """When the first of them was taken."""


class _Files:
    """The files of a recording, one after the other; used by the writer's thread alone."""

    def __init__(self, folder: Path, run: str, options: RecordOptions) -> None:
        self._folder, self._run, self._options = folder, run, options
        self._part = 0
        self._file: int | None = None
        self._path = folder
        self._size = 0
        self._described: set[Source] = set()
        self._written: deque[tuple[Path, int]] = deque()
        self._retry_at = 0.0

    def write(self, source: Source, data: bytes) -> bool:
        """Append records of a source, after its description where the file has none; return whether that worked."""
        if time.monotonic() < self._retry_at:
            return False
        if self._file is not None and self._size + len(data) > self._options.file_bytes:
            self._end_file()
        had_file = self._file is not None
        try:
            try:
                self._append(source, data)
            except OSError:
                if not had_file:
                    raise
                self._end_file()  # it may be the file alone that may not grow
                self._append(source, data)
            return True
        except OSError as error:
            self._end_file()
            self._retry_at = time.monotonic() + _PAUSE
            _log.error(
                "the recording in %s cannot be written, and lacks what comes now: %s; the next try is in %g s",
                self._folder,
                error.strerror or error,
                _PAUSE,
            )
            return False

    def _append(self, source: Source, data: bytes) -> None:
        if self._file is None:
            self._begin_file()
        if source not in self._described:
            data = source.describe() + data
        self._put(data)
        self._described.add(source)

    def _begin_file(self) -> None:
        self._delete_oldest()
        self._part += 1
        self._path = self._folder / f"{self._run}.{self._part:04}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        # Windows would write a carriage return before each byte 10, and has O_NOINHERIT for O_CLOEXEC.
        for name in ("O_BINARY", "O_NOINHERIT", "O_CLOEXEC"):
            flags |= getattr(os, name, 0)
        self._file = os.open(self._path, flags, 0o644)
        self._size = 0
        self._put(HEAD)

    def _put(self, data: bytes) -> None:
        """Write all of it or, as far as the system allows, nothing.

        Raises:
            OSError: It could not be written.
        """
        assert self._file is not None
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
                os.lseek(self._file, self._size, os.SEEK_SET)
            raise
        self._size += len(data)

    def _end_file(self) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            os.close(self._file)
        self._file = None
        self._described.clear()
        if self._size <= len(HEAD):
            with contextlib.suppress(OSError):
                self._path.unlink()
        else:
            self._written.append((self._path, self._size))

    def _delete_oldest(self) -> None:
        """Make room for another file within the limit."""
        most = self._options.max_bytes
        while most is not None and self._written and self._total() + self._options.file_bytes > most:
            path, _ = self._written.popleft()
            with contextlib.suppress(OSError):
                path.unlink()
            _log.warning("the recording reached its limit of %d bytes: its oldest file %s is deleted", most, path.name)

    def _total(self) -> int:
        return sum(size for _, size in self._written)

    def close(self) -> None:
        """Close the file."""
        self._end_file()
