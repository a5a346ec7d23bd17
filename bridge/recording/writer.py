"""The thread that writes recordings: a bounded queue before it, files that rotate behind it.

Whoever records calls `Journal.offer`, which never waits: what does not fit is counted. A disk that is full costs the
recording rows, and nobody a step.
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
"""Seconds that the writer lets rows come together."""
_PAUSE = 5.0
"""Seconds without a try after files could not be written."""
_CLOSE = 10.0
"""Seconds that `close` waits for what is queued to be written."""
_BATCH = 4096
"""The most calls that are encoded at once."""
BATCH_BYTES = 8 << 20
"""The most bytes of it, about. To encode a batch costs as much as hundreds of small rows, whatever its size, so it has
to hold many pictures. But memory for 16 MiB comes from the system each time, which clears it: that took more time than
to compress them."""
_SEGMENT_BYTES = 64 << 20
"""Bytes of memory that a segment's rows take, after which it is sealed and another one is begun."""
_SEGMENT_ROWS = 1 << 18
"""Rows after which another segment is begun: where a byte of a sealed one is damaged, it is lost."""


class Journal:
    """A recording that is being written: files of one folder, in a thread of its own.

    Args:
        record: Where to, and what is recorded.
        queue_bytes: The most bytes that wait to be written.

    Raises:
        SettingError: The folder cannot be made or written.
    """

    def __init__(self, record: str | os.PathLike[str] | Recording, *, queue_bytes: int = 256 << 20) -> None:
        self.options = Recording.of(record)
        self.folder = Path(self.options.folder).absolute()
        self._queue_bytes = queue_bytes
        self.epoch = time.time() - time.monotonic()
        """The date at which `time.monotonic()` was 0, seconds since 1970. Their sum is the time of a row: where the
        date is set during a recording, durations and the order of episodes stay as they were."""
        self.run = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
        """The name of this recording, with which its files begin."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            writable = os.access(self.folder, os.W_OK | os.X_OK)
        except OSError as error:
            raise SettingError(f"cannot record into {self.folder}: {error.strerror or error}") from error
        if not writable:
            raise SettingError(f"cannot record into {self.folder}: it is not writable; give another folder to record=")
        # With its first array pyarrow imports pandas, where that is installed: half a second that no step should wait.
        pa.array([0])
        self._files = _Files(self.folder, self.run, self.options.max_bytes)
        # A flat list for each source. Both sides change it only by `extend` and `del`, which nothing interrupts.
        self._waiting: dict[Encoder, list[Any]] = {}
        self._ended: deque[Encoder] = deque()
        self._lacks_note: set[Encoder] = set()
        """Sources of which the newest row was a call of a method, and is lost."""
        self._offered = self._taken = 0  # bytes; each is changed by one side alone
        self.number = itertools.count(1).__next__
        """Returns the number of a new stream of this recording."""
        self._wake = threading.Event()
        self._closing = threading.Event()
        # As the events are set; to ask these would be a call in each step.
        self._woken = self._closed = False
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        # A program may end without close(), as where its training raises.
        atexit.register(self.close)
        forget_in_child(self)

    def offer(self, source: Encoder, row: Sequence[Any] | None, size: int, number: int = 0) -> bool:
        """Have a row written; return whether it fits into the queue. Never waits.

        Args:
            source: What the row is of.
            row: A `Row`, or a tuple of its fields; None: there will be no more, and its segment is sealed.
            size: About how many bytes of memory it holds.
            number: The number of the call.
        """
        # Without a lock: `_taken` may be behind, so that the queue seems fuller for a moment, and never emptier.
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
            # Before the event is set. In the other order, the writer could wake and clear the flag before it is set
            # here, and no row would wake it again.
            self._woken = True
            self._wake.set()
            if self._thread is None:
                self._start()
        return True

    @property
    def queued(self) -> int:
        """The rows that the thread has not taken yet."""
        return sum(map(len, list(self._waiting.values()))) // FLAT

    @property
    def queued_bytes(self) -> int:
        """About how many bytes of memory the rows hold that are not written yet: at most `queue_bytes`."""
        return self._offered - self._taken

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._closing.is_set():
                thread = threading.Thread(target=self._run, name="bridge-journal", daemon=True)
                try:
                    thread.start()
                except RuntimeError:  # the system has no thread left now: the next row tries again
                    self._woken = False
                else:
                    self._thread = thread

    def after_fork(self) -> None:
        """In a forked process: record nothing; the files are the parent's."""
        # Another thread may have held their locks at the moment of the fork, and does not exist here.
        self._wake, self._closing, self._starting = threading.Event(), threading.Event(), threading.Lock()
        self._closing.set()
        self._closed, self._thread = True, None

    def close(self) -> None:
        """Write what is queued, and end the thread; waits 10 seconds at most. May be called twice."""
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
                # A server that is killed loses what was not written: at most these rows.
                self._closing.wait(_GATHER)
                self._wake.clear()
                self._woken = False  # whose row came before this, it is written now; later ones wake the thread again
                closing = self._closing.is_set()  # read after the clear: else close() may set both in between, unseen
                # What comes while this is written waits for the next turn, or each turn would write a row or two: a
                # batch costs as much as fifty rows, whatever its size.
                self._write()
                # Nothing more is taken from here on; what came during the last turn is still to be written.
                while closing and (self.queued or self._ended):
                    self._write()
                if closing:
                    return
        finally:
            self._files.close()

    def _write(self) -> None:
        """Write what waits now, and seal the segments of sources that ended before that."""
        # Before the rows are looked at: a source says that it ended after its last row, so all of them are there by
        # then.
        ended = {self._ended.popleft() for _ in range(len(self._ended))}
        for source, waiting in list(self._waiting.items()):
            left = len(waiting)
            while left > 0:
                rows = waiting[: min(left, _BATCH * FLAT)]
                sizes = np.cumsum(rows[::FLAT])
                # At least one call, however large: else a call above the limit would stay here for ever.
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
        """Encode and write a flat list of rows; of those that do not fit on the disk, the first.

        A row that cannot be encoded is left out.
        """
        if self._files.is_paused:
            self._lose(source, rows)
            return
        if source in self._lacks_note:
            # A call of a method takes no number. Without the reset or step after it, a gap tells that it is missing.
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
        except Exception as error:  # whatever an environment returned
            problem = error
        source.rewind()
        # After rewind() the encoder expects these calls again: those that are never written show as a gap in the
        # numbers.
        if len(rows) == FLAT:
            self._lose(source, rows)
            if problem is None:
                self._files.pause()
            else:
                _log.error("a row of a recording cannot be encoded: %r", problem, exc_info=problem)
            return
        # How many rows come at once depends on the processor's speed, and what is recorded of them must not.
        half = len(rows) // FLAT // 2 * FLAT
        self._store(source, rows[:half])
        self._store(source, rows[half:])

    def _lose(self, source: Encoder, rows: list[Any]) -> None:
        """Leave a flat list of rows out."""
        if rows[2 - FLAT] >= Kind.CALL:
            self._lacks_note.add(source)


class _Files:
    """The segments of a recording; used by the writer's thread alone."""

    def __init__(self, folder: Path, run: str, most: int | None) -> None:
        self._folder, self._run, self._most = folder, run, most
        # Whole files are deleted at the limit: as each has about a quarter of it at most, most of the recording stays.
        self._segment_bytes = _SEGMENT_BYTES if most is None else max(1, min(_SEGMENT_BYTES, most // 4))
        self._open: dict[Encoder, Segment] = {}
        self._parts: dict[int, int] = {}
        # With a limit there may be as many as there were worlds: no more than this is kept of each, and their sum.
        self._ended: deque[tuple[str, int]] = deque()
        self._ended_bytes = 0
        self._retry_at = 0.0
        self._fails_since: float | None = None
        self._problem = ""
        self._told = False

    @property
    def is_paused(self) -> bool:
        """True if files could not be written a moment ago, and are not tried again yet."""
        return time.monotonic() < self._retry_at

    def pause(self) -> None:
        """Try no more for a while, because files cannot be written; say so once until they can."""
        now = time.monotonic()
        self._retry_at = now + _PAUSE
        if self._fails_since is None:
            self._fails_since = now
            told = "the recording in %s cannot be written, and lacks what comes until it can: %s; tried every %g s"
            _log.error(told, self._folder, self._problem, _PAUSE)

    def _resume(self) -> None:
        """Say that files can be written again."""
        if self._fails_since is not None:
            passed, self._fails_since = time.monotonic() - self._fails_since, None
            _log.warning("the recording in %s is written again, after %.0f s", self._folder, passed)

    def write(self, source: Encoder, batches: list[pa.RecordBatch]) -> bool:
        """Append record batches of a source, all or nothing; return whether they are written."""
        segment = self._open.get(source)
        if segment is not None:
            is_full = segment.unpacked > self._segment_bytes or segment.rows > _SEGMENT_ROWS
            if not is_full and self._append(segment, batches):
                return True
            # It is full, or alone may not grow: others may, and Parquet takes less of a disk that is full.
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
        """Seal the segment of a source, where it has one."""
        segment = self._open.pop(source, None)
        if segment is None:
            return
        if self._make_room(2 * segment.size):  # for a moment both files are there
            try:
                segment.seal()
            except (OSError, pa.ArrowException) as error:
                _log.error("a segment of the recording in %s cannot be sealed, and stays %s: %s", self._folder,
                           segment.path.name, error)  # fmt: skip
        if self._most is not None:  # else none is ever deleted, and there may be one for each of very many streams
            self._ended.append((segment.path.name, segment.size))
            self._ended_bytes += segment.size
            self._make_room(0)  # the Parquet of a few rows is larger than their stream

    def _make_room(self, size: int, written: Segment | None = None) -> bool:
        """Delete the oldest segments until so many bytes fit within the limit; return whether they do.

        Args:
            size: The bytes.
            written: The segment that they are for, which is not deleted.
        """
        if self._most is None:
            return True
        if size > self._most:
            return False  # whatever is deleted
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
            # Once is enough: at the limit, each further segment deletes one.
            level = _log.warning if not self._told else _log.debug
            self._told = True
            level("the recording reached its limit of %d bytes: its oldest file %s is deleted", self._most, oldest)
        return True

    def close(self) -> None:
        """Seal all segments."""
        for source in list(self._open):
            self.end(source)
