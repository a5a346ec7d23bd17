"""The files of a recording: segments of Arrow, sealed into Parquet, and the digests of their bytes.

A segment holds rows of one stream. While it is written it is an Arrow IPC stream, `RUN.STREAM.PART.arrow`, whose
batches can be read up to the last one that is whole: Parquet has no footer yet when a process is killed. When a segment
is full, or its environment is closed, it becomes `RUN.STREAM.PART.parquet`. Beside each file, `FILE.sums` has the
digests of its bytes: of a stream one for each part that was appended, of Parquet one for the rows and one for the
footer, which has a copy there. A reader checks these before it parses anything.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import io
import os
import re
import stat
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridge.core.extras import imported_from
from bridge.errors import RecordingError, UsageError

with imported_from("recordings need pyarrow", "record"):
    import pyarrow as pa
    import pyarrow.ipc
    import pyarrow.parquet as pq

__all__ = ["UNREADABLE", "Damage", "Segment", "SegmentFile", "delete_segment", "find_segments", "load_segment"]

# The name of a recording comes from its files and not from its header. Exports make file names of it, and this pattern
# has no separators of paths.
_NAME = re.compile(r"([0-9A-Za-z]{1,32}-[0-9a-f]{1,16})\.(\d{1,9})\.(\d{1,9})\.(arrow|parquet)")
_SUM = re.compile(r"([0-9]{1,12}) ([0-9]{1,11}) (\S+)\n")
_FOOTER_SUM = re.compile(r"footer (\S+) (\S+)\n")
_SUMS = ".sums"
# Zstandard takes half the bytes, and several times as long: more than a hundred steps of CartPole in each append. What
# is sealed is compressed by it. Threads would cost more to wake than the columns of a batch take.
_COMPRESSED = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
# Bytes of memory of the rows that Parquet takes as a group. Each group adds 1 kB to the file, and memory for a whole
# segment, which the system clears and no cache holds, took as long again as to compress it.
_GROUP_BYTES = 16 << 20
# Arrow's mark of the end of a stream: a continuation, and a length of 0.
_END = b"\xff\xff\xff\xff\0\0\0\0"
# A stranger's file may claim anything. Ours are far below: `Journal` ends a segment at 64 MiB and 2**18 rows.
_LARGEST_FILE = 1 << 30
_LARGEST_SUMS = 64 << 20
_MOST_ROWS = 1 << 22
_LARGEST_TABLE = 1 << 30
UNREADABLE = (pa.ArrowException, LookupError, MemoryError, OSError, OverflowError, RecursionError, TypeError,
              ValueError, UsageError, struct.error)  # fmt: skip
"""The exceptions of parsing what somebody made up."""
# Columns of few different numbers. Texts as dictionaries would let a tiny file claim a huge table.
_DICTIONARIES = ["lane", "kind", "episode", "reward"]


@dataclasses.dataclass(frozen=True)
class Damage:
    """A part of a file that cannot be used, or a file that is none of ours."""

    path: Path
    problem: str
    torn: bool = False
    """True if the file ends in it, as where the process was killed while it wrote."""

    def __str__(self) -> str:
        return f"{self.path.name}: {self.problem}"


@dataclasses.dataclass(frozen=True, order=True)
class SegmentFile:
    """A segment of a folder, by the name of its file."""

    run: str
    stream: int
    part: int
    path: Path = dataclasses.field(compare=False)


def _digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()  # most processors compute it themselves, at twice the speed of BLAKE2b


class Segment:
    """A segment that is being written. No file stays open between calls: a forked child shares nothing.

    Args:
        path: Where the stream goes, `RUN.STREAM.PART.arrow`.
        schema: The columns.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        """That of the stream, or of the Parquet once it is sealed."""
        self.size = 0
        """Bytes of the files."""
        self.rows = self.unpacked = 0
        """Rows, and the bytes of memory that they take."""
        self._schema = schema
        self._written = self._sums_written = 0

    def pack(self, batches: Sequence[pa.RecordBatch]) -> pa.Buffer:
        """Return the bytes of record batches, after those of the schema where the segment begins."""
        # Each call makes a whole stream in memory: the file is written in one piece, and none of Arrow's writers keeps
        # it open.
        with pa.ipc.new_stream(sink := pa.BufferOutputStream(), self._schema, options=_COMPRESSED) as writer:
            for batch in batches:
                writer.write_batch(batch)
        data = sink.getvalue()
        # The end is not marked: there may be more.
        return data[len(self._schema.serialize()) if self._written else 0 : len(data) - len(_END)]

    def append(self, data: pa.Buffer, batches: Sequence[pa.RecordBatch]) -> None:
        """Write what `pack` returned of record batches; as far as the system allows, all of it or nothing.

        Raises:
            OSError: It could not be written.
        """
        size = len(data)
        line = f"{self._written} {size} {_digest(data)}\n".encode()
        sums = _sums_of(self.path)
        try:
            # The data first. If the process is killed in between, the file ends in bytes without a digest, which a
            # reader tells from damage.
            _append(self.path, data, self._written)
            _append(sums, line, self._sums_written)
        except OSError:
            for path, whole in ((self.path, self._written), (sums, self._sums_written)):
                with contextlib.suppress(OSError):
                    os.truncate(path, whole) if whole else path.unlink()  # an empty file is in the way of the next try
            raise
        self._written, self._sums_written = self._written + size, self._sums_written + len(line)
        self.size = self._written + self._sums_written
        self.rows += sum(len(batch) for batch in batches)
        self.unpacked += sum(batch.nbytes for batch in batches)

    def seal(self) -> None:
        """Turn the segment into Parquet. The stream goes last, so no moment lacks a file.

        Raises:
            OSError: It could not be written; the stream is still there.
        """
        target, draft = self.path.with_suffix(".parquet"), self.path.with_suffix(".tmp")
        try:
            data = _parquet_of(self.path)
            sums = _parquet_sums(data)
            draft.write_bytes(data)
            # Before the file has its name: a reader finds it by that, and refuses what has no digests.
            _sums_of(target).write_bytes(sums)
            draft.replace(target)
        except BaseException:
            for path in (draft, _sums_of(target)):
                path.unlink(missing_ok=True)
            raise
        delete_segment(self.path)
        self.path, self.size = target, len(data) + len(sums)


def delete_segment(path: Path) -> None:
    """Delete the files of a segment."""
    for each in (path, _sums_of(path)):
        with contextlib.suppress(OSError):
            each.unlink()


def _parquet_of(path: Path) -> bytes:
    """Return an Arrow stream as Parquet."""
    # What is mapped must be let go of before the file is deleted, which Windows refuses otherwise.
    with pa.memory_map(str(path)) as file:
        batches = pa.ipc.open_stream(file, options=pa.ipc.IpcReadOptions(use_threads=False))
        sink = io.BytesIO()  # a file of Arrow's own stays open for a while where the disk is full
        with pq.ParquetWriter(
            sink, batches.schema, compression="zstd", use_dictionary=_DICTIONARIES, write_statistics=False,
            # `call` and `t` count up from row to row: their differences take almost no bytes.
            column_encoding=dict.fromkeys(("call", "t"), "DELTA_BINARY_PACKED"), store_schema=False,
        ) as writer:  # fmt: skip
            writer.add_key_value_metadata(batches.schema.metadata)
            held, size = list[pa.RecordBatch](), 0
            for batch in batches:
                held.append(batch)
                size += batch.nbytes  # added up here, for a slow world's segment has tens of thousands of batches
                if size > _GROUP_BYTES:
                    writer.write_table(pa.Table.from_batches(held), _MOST_ROWS)
                    held, size = [], 0
            if held:
                writer.write_table(pa.Table.from_batches(held), _MOST_ROWS)
        return sink.getvalue()


def _sums_of(path: Path) -> Path:
    return path.with_name(path.name + _SUMS)


def _append(path: Path, data: Any, size: int) -> None:
    """Write to the end of a file of this size; a new one must not be there yet."""
    with path.open("ab" if size else "xb", buffering=0) as file:
        # One write may take a part only, as where the disk fills; the next one then raises.
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file.fileno(), rest) :]


def _parquet_sums(data: bytes) -> bytes:
    """Return the digests of a Parquet file."""
    # The footer has the places of all columns: without it no row can be read. So a copy replaces one that is damaged.
    cut = len(data) - 8 - int.from_bytes(data[-8:-4], "little")  # the footer ends with its length and a mark
    lines = [f"{at} {len(part)} {_digest(part)}" for at, part in ((0, data[:cut]), (cut, data[cut:]))]
    footer = base64.b64encode(zlib.compress(data[cut:], 9))
    lines.append(f"footer {_digest(footer)} {footer.decode('ascii')}")
    return "".join(f"{line}\n" for line in lines).encode("ascii")


# Reading


def find_segments(folder: Path) -> tuple[list[SegmentFile], list[Damage]]:
    """Return the segments of a folder in order, and the files that look like a recording and are none.

    Args:
        folder: The folder, or one of its files, which is then the only one; a path that is not there has none.
    """
    found: dict[tuple[str, int, int], SegmentFile] = {}
    problems = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else [folder] * folder.exists():
        if (match := _NAME.fullmatch(path.name)) is not None:
            key = match[1], int(match[2]), int(match[3])
            # Both are there for the moment after the Parquet was written; the stream is whole until it goes.
            if key not in found or match[4] == "arrow":
                found[key] = SegmentFile(*key, path)
        elif path.suffix in (".arrow", ".parquet"):
            problems.append(Damage(path, "its name is none of a recording's, RUN.STREAM.PART.parquet"))
    return sorted(found.values()), problems


def _read(path: Path, most: int) -> bytes:
    """Read a regular file of a limited size; raises RecordingError where it is none, OSError where it cannot be."""
    # A FIFO or a device may never end, and opening one may wait for ever.
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise RecordingError("it is no regular file")
    if status.st_size > most:
        raise RecordingError(f"it has more than {most} bytes, which no recording has")
    with path.open("rb") as file:
        # Not to its end: it may grow meanwhile, and read() takes memory for as much as it is asked for.
        return file.read(status.st_size)


def load_segment(path: Path, columns: Sequence[str] | None = None) -> tuple[pa.Schema, pa.Table, list[Damage]]:
    """Read a segment: check the digests, and parse what they fit.

    Args:
        path: The file.
        columns: Which, of those that it has; None: all.

    Returns:
        The schema of all its columns, its rows without those that are damaged, and the damage. The first two are None
        where nothing of it can be read.

    Raises:
        RecordingError: It cannot be opened, or is none of a recording's, whatever its digests say.
    """
    try:
        # The digests first, since they are written last: so all that they are of is there.
        sums, data = _read(_sums_of(path), _LARGEST_SUMS), _read(path, _LARGEST_FILE)
        whole, damage = _check(path, data, sums.decode("ascii", "replace"))
        # The file is being written: the digests of its last bytes have come since they were read.
        if damage and damage[-1].torn and _read(_sums_of(path), _LARGEST_SUMS) != sums:
            damage.pop()
    except OSError as error:
        raise RecordingError(f"it cannot be read: {error.strerror}: {Path(str(error.filename)).name}") from error
    if whole is None:
        return None, None, damage
    try:
        found = _load_arrow(whole, columns) if path.suffix == ".arrow" else _load_parquet(whole, columns)
    except UNREADABLE as error:
        raise RecordingError(f"it cannot be read: {str(error).partition(chr(10))[0]:.200}") from error
    return *found, damage


def _check(path: Path, data: bytes, sums: str) -> tuple[bytes | None, list[Damage]]:
    """Hold the bytes of a file against its digests.

    Returns:
        Those that can be parsed, None: none of them; and the damage.
    """
    parts: list[bytes | None] = []
    damage: list[Damage] = []
    footer, at, newest = b"", 0, ""
    for line in sums.splitlines(keepends=True):
        if copy := _FOOTER_SUM.fullmatch(line):
            # Base64 and Deflate have bits that mean nothing, so the text has a digest of its own.
            with contextlib.suppress(ValueError, zlib.error):
                if _digest(copy[2].encode()) == copy[1]:
                    # With a limit: a few bytes of Deflate may claim gigabytes.
                    footer = zlib.decompressobj().decompress(base64.b64decode(copy[2]), _LARGEST_SUMS)
            continue
        told = _SUM.fullmatch(line)
        if told is None or int(told[1]) != at:
            damage.append(Damage(path, f"the digests from byte {at} on cannot be read"))
            break
        start, at, newest = at, at + int(told[2]), told[3]
        part = data[start:at]
        parts.append(part if len(part) == at - start and _digest(part) == newest else None)
        if parts[-1] is None:
            damage.append(Damage(path, f"bytes {start} to {at} are not those that were written"))
    if len(data) > at or not parts:
        damage.append(Damage(path, f"{len(data) - at} bytes from byte {at} on have no digest", torn=True))
    is_stream = path.suffix == ".arrow"
    if not is_stream and _digest(footer) != newest:
        damage.append(Damage(path, "the copy of the footer beside the digests is damaged"))
    elif not is_stream:
        parts[-1] = footer
    # A stream can be read without some of its batches, but not without its beginning, which says what the columns are.
    if not parts or (parts[0] is None if is_stream else None in parts):
        return None, damage
    # Each append is whole messages of Arrow, and no batch needs another one: one that is damaged can be left out.
    return b"".join(part for part in parts if part is not None), damage


def _load_arrow(data: bytes, columns: Sequence[str] | None) -> tuple[pa.Schema, pa.Table]:
    # Each buffer of a batch says how many bytes it takes once it is decompressed.
    held = sum(map(_unpacked_size, pa.ipc.MessageReader.open_stream(data)))
    if held > _LARGEST_TABLE:
        raise RecordingError(f"its batches take {held} bytes of memory, more than those of any recording")
    table = pa.ipc.open_stream(data).read_all()
    # pyarrow trusts the offsets in a file. A stranger's may point outside of its buffers.
    table.validate(full=True)
    names = table.schema.names
    return table.schema, table if columns is None else table.select([name for name in names if name in columns])


_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3


def _unpacked_size(message: pa.ipc.Message) -> int:
    """Return how many bytes the compressed buffers of an Arrow message will take: pyarrow does not tell.

    It is a table of FlatBuffers, which pyarrow has verified: `Message` of Arrow's format/Message.fbs.
    """
    data = bytes(message.metadata)

    def field(table: int, number: int) -> int:
        """Return where a field of a table is; 0: it is not there."""
        vtable = table - struct.unpack_from("<i", data, table)[0]
        (size,) = struct.unpack_from("<H", data, vtable)
        (offset,) = struct.unpack_from("<H", data, vtable + 4 + 2 * number) if 4 + 2 * number < size else (0,)
        return table + offset if offset else 0

    def pointed(at: int) -> int:
        return int(at + struct.unpack_from("<I", data, at)[0])

    # Numbers of fields: Message has header_type 1 and header 2, RecordBatch buffers 2 and compression 3,
    # DictionaryBatch data 1. A buffer is an offset and a length; its first 8 bytes say how long it is once it is
    # decompressed.
    root = pointed(0)
    kind, header = field(root, 1), field(root, 2)
    if not kind or not header or data[kind] not in (_DICTIONARY_BATCH, _RECORD_BATCH):
        return 0
    batch = pointed(header)
    if data[kind] == _DICTIONARY_BATCH:
        batch = pointed(field(batch, 1))
    buffers, compression = field(batch, 2), field(batch, 3)
    if not buffers or not compression:
        return 0
    first = pointed(buffers)
    (count,) = struct.unpack_from("<I", data, first)
    places = struct.iter_unpack("<qq", data[first + 4 : first + 4 + 16 * count])
    sizes = [struct.unpack_from("<q", message.body, at)[0] for at, length in places if length]
    return sum(size for size in sizes if size > 0)  # -1: it is as it was


def _load_parquet(data: bytes, columns: Sequence[str] | None) -> tuple[pa.Schema, pa.Table]:
    metadata = pq.read_metadata(pa.BufferReader(data))
    if metadata.num_rows > _MOST_ROWS:
        raise RecordingError(f"it claims {metadata.num_rows} rows, more than any recording has in a file")
    _check_pages(data, metadata)
    file = pq.ParquetFile(pa.BufferReader(data), metadata=metadata)
    schema = file.schema_arrow
    columns = None if columns is None else [name for name in schema.names if name in columns]
    return schema, file.read(columns, use_threads=False)


# Pages of Parquet, `PageHeader` and its parts in parquet.thrift: types, and encodings of values
_DATA_PAGE, _DICTIONARY_PAGE = 0, 2
_DICTIONARY_ENCODINGS = (2, 8)
# Plain, runs, and differences of integers. Others repeat the bytes of values, without a bound.
_ENCODINGS = (0, 3, 5)
_BYTES_OF_VALUE = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}


def _check_pages(data: bytes, metadata: Any) -> None:
    """Raise RecordingError where the pages of a file would take more memory than a recording's.

    The footer's sizes are what a stranger says. A reader unpacks as much as the header of each page tells it to, so
    these are added up before it does.
    """
    held = 0  # bytes
    for group in (metadata.row_group(at) for at in range(metadata.num_row_groups)):
        for chunk in (group.column(at) for at in range(group.num_columns)):
            # A dictionary comes before the pages that refer to it.
            at = min(filter(None, (chunk.data_page_offset, chunk.dictionary_page_offset)))
            end, name = at + chunk.total_compressed_size, chunk.path_in_schema
            while at < end:
                header, at = _read_struct(data, at)
                kind, unpacked, packed = header[1], header[2], header[3]
                told = header[5] if kind == _DATA_PAGE else header[7] if kind == _DICTIONARY_PAGE else None
                if told is None or packed < 0 or unpacked < 0 or told[1] < 0:
                    raise RecordingError(f"a page of its column {name!r:.60} is of a kind that ours are not")
                size = _BYTES_OF_VALUE.get(chunk.physical_type)
                texts = chunk.physical_type == "BYTE_ARRAY"
                if size is None or told[2] not in (*_ENCODINGS, *(() if texts else _DICTIONARY_ENCODINGS)):
                    raise RecordingError(f"its column {name!r:.60} is encoded as none of ours is")
                # A run takes a few bytes for any number of values.
                held, at = held + unpacked + size * told[1], at + packed
            if at != end:
                raise RecordingError(f"the pages of its column {name!r:.60} do not fit its footer")
    if held > _LARGEST_TABLE:
        raise RecordingError(f"its pages take {held} bytes of memory, more than those of any recording")


def _read_struct(data: bytes, at: int) -> tuple[dict[int, Any], int]:
    """Read a struct of Thrift's compact protocol, of integers, flags and structs, as those of our pages are.

    Returns:
        Its fields by their numbers, and where it ends.
    """
    # What is nested too deeply, or ends too early, raises RecursionError or IndexError, both of `UNREADABLE`.
    found: dict[int, Any] = {}
    number = 0
    while data[at]:
        kind, step, at = data[at] & 15, data[at] >> 4, at + 1
        # A field number that is not 1 to 15 above the last one has another form, which no header of our pages needs.
        if not step:
            raise RecordingError("a header of its pages is none of a recording's")
        number += step
        if kind in (1, 2):  # true, false
            found[number] = kind == 1
        elif kind in (4, 5, 6):  # integers of 16, 32 and 64 bits
            value = shift = 0
            while True:
                value |= (data[at] & 127) << shift
                shift, at = shift + 7, at + 1
                if data[at - 1] < 128 or shift > 63:
                    break
            found[number] = value >> 1 ^ -(value & 1)
        elif kind == 12:  # a struct
            found[number], at = _read_struct(data, at)
        else:
            raise RecordingError("a header of its pages is none of a recording's")
    return found, at + 1
