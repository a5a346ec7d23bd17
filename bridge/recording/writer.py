"""The thread that writes recordings: reads a bounded queue, and writes files that rotate.

Recorders call `Journal.offer`, which never blocks: rows that do not fit are counted. If the disk is full, rows are
lost, but no step is delayed.
"""

from __future__ import annotations

import atexit
import itertools
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.extras import imported_from
from bridge.core.logs import SafeLog
from bridge.core.ownership import forget_in_child
from bridge.errors import SettingError
from bridge.recording.files import Segment, delete_segment
from bridge.recording.record import Recording
from bridge.recording.rows import FLAT, Encoder, Kind

with imported_from("recordings need pyarrow", "record"):
    import pyarrow as pa

__all__ = ["BATCH_BYTES", "Journal"]

_log = SafeLog(__name__)
_GATHER = 0.1
"""Seconds for which the writer lets rows accumulate."""
_PAUSE = 5.0
"""Seconds until the next attempt after writing failed."""
_CLOSE = 10.0
"""Seconds for which `close` waits until queued rows are written."""
_BATCH = 4096
"""The most calls to encode at once."""
BATCH_BYTES = 8 << 20
"""The approximate maximum size of such a batch in bytes. Encoding a batch costs as much as hundreds of small rows,
whatever its size, so a batch should hold many pictures. But 16 MiB would be allocated from the system each time, which
clears the memory: that took more time than compressing the pictures."""
_SEGMENT_BYTES = 64 << 20
"""Bytes of memory of a segment's rows at which it is sealed and the next one begins."""
_SEGMENT_ROWS = 1 << 18
"""Rows at which the next segment begins: a damaged byte in a sealed segment loses all of it."""


class Journal:
    """A recording that is being written: files of one folder, in a separate thread.

    Args:
        record: The folder, and what to record.
        queue_bytes: The most bytes that may wait to be written.

    Raises:
        SettingError: The folder cannot be created or written.
    """

    def __init__(self, record: str | os.PathLike[str] | Recording, *, queue_bytes: int = 256 << 20) -> None:
        self.options = Recording.of(record)
        self.folder = Path(self.options.folder).absolute()
        self._queue_bytes = queue_bytes
        self.epoch = time.time() - time.monotonic()
        """The date at which `time.monotonic()` was 0, in seconds since 1970. Their sum is the time of a row: if the
        system's date is changed during a recording, durations and the order of episodes stay right."""
        self.run = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
        """The name of this recording, which is the prefix of its file names."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            writable = os.access(self.folder, os.W_OK | os.X_OK)
        except OSError as error:
            raise SettingError(f"cannot record into {self.folder}: {error.strerror or error}") from error
        if not writable:
            raise SettingError(f"cannot record into {self.folder}: it is not writable; give another folder to record=")
        # With its first array pyarrow imports pandas if installed: half a second for which no step should wait.
        pa.array([0])
        self._files = _Files(self.folder, self.run, self.options.max_bytes)
        # One flat list per source. Both threads change it only with `extend` and `del`, which are atomic.
        self._waiting: dict[Encoder, list[Any]] = {}
        self._ended: deque[Encoder] = deque()
        self._lacks_note: set[Encoder] = set()
        """Sources whose newest row was a method call and was lost."""
        self._offered = self._taken = 0  # in bytes; each is changed by one thread only
        self.number = itertools.count(1).__next__
        """Returns the number for a new stream of this recording."""
        self._wake = threading.Event()
        self._closing = threading.Event()
        # Copies of the events' states: asking the events would add a call to each step.
        self._woken = self._closed = False
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        # A program may end without close(), for example when its training raises.
        atexit.register(self.close)
        forget_in_child(self)

    def offer(self, source: Encoder, row: Sequence[Any] | None, size: int, number: int = 0) -> bool:
        """Queue a row; return True if the queue has room for it. Never blocks.

        Args:
            source: The encoder for the row.
            row: A `Row`, or a tuple of its fields; None: the source has ended, and its segment is sealed.
            size: Its approximate size in memory, in bytes.
            number: The number of the call.
        """
        # Without a lock: `_taken` may be outdated, so the queue may seem fuller for a moment, but never emptier.
        if self._offered - self._taken + size > self._queue_bytes or self._closed:
            return False
        self._offered += size
        if row is None:
            self._ended.append(source)
        else:
            if source not in self._waiting:
                self._waiting[source] = []
            self._waiting[source].extend((size, number, *row))
        if not self._woken:
            # Set before the event. In the other order, the writer could wake and clear the flag before it is set here,
            # and no row would wake it again.
            self._woken = True
            self._wake.set()
            if self._thread is None:
                self._start()
        return True

    @property
    def queued(self) -> int:
        """The number of rows that the thread has not taken yet."""
        return sum(map(len, list(self._waiting.values()))) // FLAT

    @property
    def queued_bytes(self) -> int:
        """The approximate bytes of rows that are not written yet: at most `queue_bytes`."""
        return self._offered - self._taken

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._closing.is_set():
                thread = threading.Thread(target=self._run, name="bridge-journal", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system cannot start a thread now: the next row tries again
                    self._woken = False
                else:
                    self._thread = thread

    def after_fork(self) -> None:
        """Stop recording, after a fork: the files belong to the parent process."""
        # Another thread may have held the locks during the fork, and does not exist here.
        self._wake, self._closing, self._starting = threading.Event(), threading.Event(), threading.Lock()
        self._closing.set()
        self._closed, self._thread = True, None

    def close(self) -> None:
        """Write queued rows, and end the thread; wait at most 10 seconds. May be called twice."""
        atexit.unregister(self.close)
        with self._starting:
            thread, was_closed, self._closed = self._thread, self._closed, True
            self._closing.set()
            self._wake.set()
        if thread is None and not was_closed:  # no thread could be started
            self._run()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE)
            if thread.is_alive():
                _log.error("the recording %s in %s is not written to its end: the disk is slow", self.run, self.folder)

    def _run(self) -> None:
        try:
            while True:
                self._wake.wait()
                # A killed server loses the rows that were not written: at most those of this pause.
                self._closing.wait(_GATHER)
                self._wake.clear()
                self._woken = False  # rows queued before this are written now; later ones wake the thread again
                closing = self._closing.is_set()  # after the clearing: otherwise close() could set both in between
                # Rows that arrive during writing wait for the next turn. Otherwise each turn would write a row or two,
                # and a batch costs as much as fifty rows, whatever its size.
                self._write()
                # No row is accepted from here on; those that arrived during the last turn are still written.
                while closing and (self.queued or self._ended):
                    self._write()
                if closing:
                    return
        finally:
            self._files.close()

    def _write(self) -> None:
        """Write the queued rows, and seal the segments of sources that had ended before."""
        # Read before the rows: a source reports its end after its last row, so all of its rows are queued by then.
        ended = {self._ended.popleft() for _ in range(len(self._ended))}
        for source, waiting in list(self._waiting.items()):
            left = len(waiting)
            while left > 0:
                rows = waiting[: min(left, _BATCH * FLAT)]
                sizes = np.cumsum(rows[::FLAT])
                # At least one call, however large: a call above the limit would never be written otherwise.
                count = min(len(sizes), int(np.searchsorted(sizes, BATCH_BYTES)) + 1)
                del rows[count * FLAT :], waiting[: count * FLAT]
                left -= count * FLAT
                self._store(source, rows)
                self._taken += int(sizes[count - 1])
            if source in ended:
                del self._waiting[source]
                self._lacks_note.discard(source)
                self._files.end(source)

    def _store(self, source: Encoder, rows: list[Any]) -> None:
        """Encode and write a flat list of rows; if the disk is full, only the first ones.

        Rows that cannot be encoded are left out.
        """
        if self._files.is_paused:
            self._lose(source, rows)
            return
        if source in self._lacks_note:
            # A method call has no number. Leaving out the next reset or step creates a gap, which shows that it is
            # missing.
            after = next((at for at, kind in enumerate(rows[2::FLAT], 1) if kind < Kind.CALL), None)
            if after is None:
                return
            self._lacks_note.discard(source)
            if not (rows := rows[after * FLAT :]):
                return
        problem: Exception | None = None
        try:
            if not (batches := source.encode(rows)) or self._files.write(source, batches):
                return
        except Exception as error:  # an environment may return anything
            problem = error
        source.rewind()
        # After rewind() the encoder expects these calls again; calls that are never written appear as a gap in the
        # numbers.
        if len(rows) == FLAT:
            self._lose(source, rows)
            if problem is None:
                self._files.pause()
            else:
                _log.error("a row of a recording cannot be encoded: %r", problem, exc_info=problem)
            return
        # The number of rows per turn depends on the processor's speed, but the recorded values must not.
        half = len(rows) // FLAT // 2 * FLAT
        self._store(source, rows[:half])
        self._store(source, rows[half:])

    def _lose(self, source: Encoder, rows: list[Any]) -> None:
        """Count a flat list of rows as lost."""
        if rows[2 - FLAT] >= Kind.CALL:
            self._lacks_note.add(source)


class _Files:
    """The segments of a recording; used only by the writer's thread."""

    def __init__(self, folder: Path, run: str, most: int | None) -> None:
        self._folder, self._run, self._most = folder, run, most
        # At the limit whole files are deleted: each has at most about a quarter of it, so most of the recording stays.
        self._segment_bytes = _SEGMENT_BYTES if most is None else max(1, min(_SEGMENT_BYTES, most // 4))
        self._open: dict[Encoder, Segment] = {}
        self._parts: dict[int, int] = {}
        # With a limit there may be as many streams as there were worlds: only the sum of their segments is kept of
        # each.
        self._ended: deque[tuple[str, int]] = deque()
        self._ended_bytes = 0
        self._retry_at = 0.0
        self._fails_since: float | None = None
        self._problem = ""
        self._told = False

    @property
    def is_paused(self) -> bool:
        """True if writing failed recently, and is not tried again yet."""
        return time.monotonic() < self._retry_at

    def pause(self) -> None:
        """Stop writing for a while because it failed; log this once until it works again."""
        now = time.monotonic()
        self._retry_at = now + _PAUSE
        if self._fails_since is None:
            self._fails_since = now
            told = "the recording in %s cannot be written, and its rows are lost until it can: %s; tried every %g s"
            _log.error(told, self._folder, self._problem, _PAUSE)

    def _resume(self) -> None:
        """Log that writing works again."""
        if self._fails_since is not None:
            passed, self._fails_since = time.monotonic() - self._fails_since, None
            _log.warning("the recording in %s is written again, after %.0f s", self._folder, passed)

    def write(self, source: Encoder, batches: list[pa.RecordBatch]) -> bool:
        """Append record batches of a source, all or nothing; return True if they were written."""
        segment = self._open.get(source)
        if segment is not None:
            is_full = segment.unpacked > self._segment_bytes or segment.rows > _SEGMENT_ROWS
            if not is_full and self._append(segment, batches):
                return True
            # It is full, or cannot grow; others may. Parquet needs less space on a full disk.
            self.end(source)
        part = self._parts.get(source.stream, 0) + 1
        segment = Segment(self._folder / f"{self._run}.{source.stream}.{part:06}.arrow", source.schema)
        if not self._append(segment, batches):
            return False
        self._open[source], self._parts[source.stream] = segment, part
        return True

    def _append(self, segment: Segment, batches: list[pa.RecordBatch]) -> bool:
        data = segment.pack(batches)
        # A line of digests takes less than 100 bytes.
        if not self._make_room(len(data) + 100, segment):
            self._problem = f"{len(data)} bytes do not fit into the limit of {self._most}"
            return False
        try:
            segment.append(data, batches)
        except OSError as error:
            self._problem = error.strerror or str(error)
            return False
        self._resume()
        return True

    def end(self, source: Encoder) -> None:
        """Seal the segment of a source, if it has one."""
        segment = self._open.pop(source, None)
        if segment is None:
            return
        if self._make_room(2 * segment.size):  # for a moment both files exist
            try:
                segment.seal()
            except (OSError, pa.ArrowException) as error:
                _log.error("a segment of the recording in %s cannot be sealed, and stays %s: %s", self._folder,
                           segment.path.name, error)  # fmt: skip
        if self._most is not None:  # without a limit none is ever deleted, and there may be very many streams
            self._ended.append((segment.path.name, segment.size))
            self._ended_bytes += segment.size
            self._make_room(0)  # the Parquet file of a few rows is larger than their stream

    def _make_room(self, size: int, written: Segment | None = None) -> bool:
        """Delete the oldest segments until this many bytes fit into the limit; return True if they fit.

        Args:
            size: The bytes.
            written: The segment that is being written, which is not deleted.
        """
        if self._most is None:
            return True
        if size > self._most:
            return False  # even if all were deleted
        while size + self._ended_bytes + sum(segment.size for segment in self._open.values()) > self._most:
            others = [source for source, segment in self._open.items() if segment is not written]
            if self._ended:
                oldest, freed = self._ended.popleft()
                self._ended_bytes -= freed
            elif others:
                oldest = self._open.pop(others[0]).path.name
            else:
                return False
            delete_segment(self._folder / oldest)
            # Logged once: at the limit, each further segment deletes one.
            level = _log.warning if not self._told else _log.debug
            self._told = True
            level("the recording reached its limit of %d bytes: its oldest file %s is deleted", self._most, oldest)
        return True

    def close(self) -> None:
        """Seal all segments."""
        for source in list(self._open):
            self.end(source)
