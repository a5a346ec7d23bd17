"""The thread that writes recordings: a bounded queue before it, files that rotate behind it.

Whoever records calls `Journal.offer`, which never waits: what does not fit is counted. A disk that is full costs the
recording rows, and nobody a step.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from bridge.errors import SettingError
from bridge.facade.record import Recording
from bridge.forks import forget_in_child
from bridge.logs import SafeLog
from bridge.recording.files import Segment

__all__ = ["Journal", "Source"]

_log = SafeLog(__name__)
_GATHER = 0.1
"""Seconds that the writer lets rows come together."""
_PAUSE = 5.0
"""Seconds without a try after files could not be written."""
_CLOSE = 10.0
"""Seconds that `close` waits for what is queued to be written."""
_BATCH = 4096
"""The most calls that are encoded at once."""
_BATCH_BYTES = 16 << 20
_SEGMENT_ROWS = 1 << 20
"""Rows after which another segment is begun."""


class Source(Protocol):
    """Makes record batches of rows, in the writer's thread."""

    @property
    def schema(self) -> pa.Schema:
        """The columns, and in their metadata what the rows are of."""

    @property
    def stream(self) -> int:
        """The number of the stream."""

    def encode(self, rows: list[Any]) -> list[pa.RecordBatch]:
        """Return the rows as record batches."""

    def give_up(self, rows: list[Any]) -> None:
        """Count these rows, with which `encode` was called last, as lost."""


class Journal:
    """A recording that is being written: files of one folder, in a thread of its own.

    Args:
        record: Where to, and what is recorded.
        queue_bytes: The most bytes that wait to be written.
        segment_bytes: Bytes after which a segment is sealed and another one is begun.

    Raises:
        SettingError: The folder cannot be made or written.
    """

    def __init__(
        self,
        record: str | os.PathLike[str] | Recording,
        *,
        queue_bytes: int = 256 << 20,
        segment_bytes: int = 64 << 20,
    ) -> None:
        self.options = Recording.of(record)
        self.folder = Path(self.options.folder).absolute()
        self._queue_bytes = queue_bytes
        self.run = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
        """The name of this recording, with which its files begin."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            writable = os.access(self.folder, os.W_OK | os.X_OK)
        except OSError as error:
            raise SettingError(f"cannot record into {self.folder}: {error.strerror or error}") from error
        if not writable:
            raise SettingError(f"cannot record into {self.folder}: it is not writable; give another folder to record=")
        self._files = _Files(self.folder, self.run, self.options.max_bytes, segment_bytes)
        self._rows: deque[tuple[Source, Any, int]] = deque()
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
            row: What its `encode` takes; None: there will be no more, and its segment is sealed.
            size: About how many bytes of memory it holds.
        """
        if self.queued_bytes + size > self._queue_bytes or self._closing.is_set():
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
                self._wake.wait()
                # A server that is killed loses what was not written: at most these rows.
                self._closing.wait(_GATHER)
                self._wake.clear()
                closing = self._closing.is_set()  # read after the clear: else close() may set both in between, unseen
                # What comes while this is written waits for the next turn, or each turn would write a row or two: a
                # batch costs as much as fifty rows, whatever its size.
                waiting = len(self._rows)
                while waiting > 0 or (closing and self._rows):
                    waiting -= self._write()
                if closing:
                    return
        finally:
            self._files.close()

    def _write(self) -> int:
        """Write some of what waits; return how many rows. The order of each source's rows is kept."""
        count, total, held = 0, 0, dict[Source, list[Any]]()
        ended = []
        while self._rows and count < _BATCH and total <= _BATCH_BYTES:
            count += 1
            source, row, size = self._rows.popleft()
            total += size
            if row is None:
                ended.append(source)
            else:
                held.setdefault(source, []).append(row)
        for source, rows in held.items():
            try:
                batches = source.encode(rows)
            except Exception as error:  # whatever an environment returned
                source.give_up(rows)
                _log.error("rows of a recording cannot be encoded: %r", error, exc_info=error)
            else:
                if batches and not self._files.write(source, batches):
                    source.give_up(rows)
        for source in ended:
            self._files.end(source)
        self._taken += total
        return count


class _Files:
    """The segments of a recording; used by the writer's thread alone."""

    def __init__(self, folder: Path, run: str, most: int | None, segment_bytes: int) -> None:
        self._folder, self._run, self._most = folder, run, most
        self._segment_bytes = segment_bytes if most is None else max(1, min(segment_bytes, most // 4))
        self._open: dict[Source, Segment] = {}
        self._parts: dict[int, int] = {}
        self._sealed: deque[tuple[Path, int]] = deque()
        self._sealed_bytes = 0
        self._retry_at = 0.0
        self._told = False

    def write(self, source: Source, batches: list[pa.RecordBatch]) -> bool:
        """Append record batches of a source; return whether that worked."""
        if time.monotonic() < self._retry_at:
            return False
        rows = sum(len(batch) for batch in batches)
        try:
            had_file = source in self._open
            try:
                self._append(source, batches, rows)
            except OSError:
                if not had_file:
                    raise
                self.end(source)  # it may be the file alone that may not grow
                self._append(source, batches, rows)
            return True
        except OSError as error:
            self._retry_at = time.monotonic() + _PAUSE
            _log.error(
                "the recording in %s cannot be written, and lacks what comes now: %s; the next try is in %g s",
                self._folder,
                error.strerror or error,
                _PAUSE,
            )
            return False

    def _append(self, source: Source, batches: list[pa.RecordBatch], rows: int) -> None:
        segment = self._open.get(source)
        if segment is not None and (segment.size > self._segment_bytes or segment.rows > _SEGMENT_ROWS):
            self.end(source)
            segment = None
        begins = segment is None
        if segment is None:
            part = self._parts.get(source.stream, 0) + 1
            segment = Segment(self._folder / f"{self._run}.{source.stream}.{part:06}", source.schema)
        data = segment.pack(batches)
        if not self._make_room(len(data) + 100):
            raise OSError(0, f"{len(data)} bytes do not fit into the limit of {self._most}")
        try:
            segment.append(data, rows)
        except OSError:
            if not begins:  # what was packed is lost, and with it the place in the stream
                self.end(source)
            raise
        if begins:
            self._open[source] = segment
            self._parts[source.stream] = self._parts.get(source.stream, 0) + 1

    def end(self, source: Source) -> None:
        """Seal the segment of a source, where it has one."""
        segment = self._open.pop(source, None)
        if segment is None:
            return
        path, size = segment.path, segment.size
        if self._make_room(2 * size):  # for a moment both files are there
            try:
                path, size = segment.seal(), segment.size
            except (OSError, pa.ArrowException) as error:
                _log.error("a segment of the recording in %s cannot be sealed, and stays %s: %s", self._folder,
                           path.name, error)  # fmt: skip
        self._sealed.append((path, size))
        self._sealed_bytes += size
        self._make_room(0)  # the Parquet of a few rows is larger than their stream

    def _make_room(self, size: int) -> bool:
        """Delete the oldest segments until so many bytes fit within the limit; return whether they do."""
        most = self._most
        while most is not None and size + self._total() > most:
            if not self._sealed:
                oldest = next(iter(self._open), None)
                if oldest is None or len(self._open) == 1:
                    return False
                segment = self._open.pop(oldest)
                self._sealed.append((segment.path, segment.size))
                self._sealed_bytes += segment.size
            path, gone = self._sealed.popleft()
            self._sealed_bytes -= gone
            for each in (path, path.with_name(path.name + ".sums")):
                with contextlib.suppress(OSError):
                    each.unlink()
            level = _log.warning if not self._told else _log.debug
            self._told = True
            level("the recording reached its limit of %d bytes: its oldest file %s is deleted", most, path.name)
        return True

    def _total(self) -> int:
        return self._sealed_bytes + sum(segment.size for segment in self._open.values())

    def close(self) -> None:
        """Seal all segments."""
        for source in list(self._open):
            self.end(source)
