"""The files of a recording: segments in Arrow format, later converted to Parquet, and the digests of their bytes.

A segment contains rows of one stream. While it is written it is an Arrow IPC stream, `RUN.STREAM.PART.arrow`. If the
process is killed, its batches can be read up to the last complete one, while a Parquet file would have no footer yet.
When a segment is full, or its environment is closed, it becomes `RUN.STREAM.PART.parquet`. Beside each file,
`FILE.sums` contains digests: for a stream one per appended part; for Parquet one for the rows, and one for the footer
together with a copy of it. A reader checks the digests before it parses anything.
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

# The name of a recording is taken from its files, not from its header. Exports use it in file names, and this pattern
# excludes path separators.
_NAME = re.compile(r"([0-9A-Za-z]{1,32}-[0-9a-f]{1,16})\.(\d{1,9})\.(\d{1,9})\.(arrow|parquet)")
_SUM = re.compile(r"([0-9]{1,12}) ([0-9]{1,11}) (\S+)\n")
_FOOTER_SUM = re.compile(r"footer (\S+) (\S+)\n")
_SUMS = ".sums"
# Zstandard needs half the bytes, but several times the time: more than a hundred steps of CartPole per append. So only
# sealed segments are compressed with it. Waking threads would cost more than compressing a batch's columns.
_COMPRESSED = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
# Bytes of memory for the rows of a Parquet row group. Each group adds 1 kB to the file. But memory for a whole segment,
# which the system must clear and which fits into no cache, cost as much time as the compression.
_GROUP_BYTES = 16 << 20
# Arrow's end-of-stream marker: a continuation, and a length of 0.
_END = b"\xff\xff\xff\xff\0\0\0\0"
# An untrusted file may claim any size. Ours are far smaller: `Journal` ends a segment at 64 MiB and 2**18 rows.
_LARGEST_FILE = 1 << 30
_LARGEST_SUMS = 64 << 20
_MOST_ROWS = 1 << 22
_LARGEST_TABLE = 1 << 30
UNREADABLE = (pa.ArrowException, LookupError, MemoryError, OSError, OverflowError, RecursionError, TypeError,
              ValueError, UsageError, struct.error)  # fmt: skip
"""The exceptions that parsing of malformed data may raise."""
# Columns with few different numbers. Dictionary-encoded texts would let a tiny file claim a huge table.
_DICTIONARIES = ["lane", "kind", "episode", "reward"]


@dataclasses.dataclass(frozen=True)
class Damage:
    """A part of a file that cannot be used, or a file that is not of a recording."""

    path: Path
    problem: str
    torn: bool = False
    """True if the file ends in this part, as when the process was killed while it wrote."""

    def __str__(self) -> str:
        return f"{self.path.name}: {self.problem}"


@dataclasses.dataclass(frozen=True, order=True)
class SegmentFile:
    """A segment in a folder, with the parts of its file name."""

    run: str
    stream: int
    part: int
    path: Path = dataclasses.field(compare=False)


def _digest(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()  # with processor instructions, twice as fast as BLAKE2b


class Segment:
    """A segment that is being written. No file stays open between calls, so a forked child shares nothing.

    Args:
        path: The path of the stream, `RUN.STREAM.PART.arrow`.
        schema: The columns.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        """The path of the stream, or of the Parquet file after sealing."""
        self.size = 0
        """The total size of the files."""
        self.rows = self.unpacked = 0
        """The number of rows, and the bytes of memory that they take."""
        self._schema = schema
        self._written = self._sums_written = 0

    def pack(self, batches: Sequence[pa.RecordBatch]) -> pa.Buffer:
        """Return the serialized record batches, after the schema if they begin the segment."""
        # Each call serializes a whole stream in memory: the file is written in one piece, and no Arrow writer keeps it
        # open.
        with pa.ipc.new_stream(sink := pa.BufferOutputStream(), self._schema, options=_COMPRESSED) as writer:
            for batch in batches:
                writer.write_batch(batch)
        data = sink.getvalue()
        # Without an end marker, because more may follow.
        return data[len(self._schema.serialize()) if self._written else 0 : len(data) - len(_END)]

    def append(self, data: pa.Buffer, batches: Sequence[pa.RecordBatch]) -> None:
        """Write the data that `pack` returned for record batches; as far as possible, all of it or nothing.

        Raises:
            OSError: Writing failed.
        """
        size = len(data)
        line = f"{self._written} {size} {_digest(data)}\n".encode()
        sums = _sums_of(self.path)
        try:
            # The data comes first. If the process is killed in between, the file ends in bytes without a digest, which
            # a reader can tell from damage.
            _append(self.path, data, self._written)
            _append(sums, line, self._sums_written)
        except OSError:
            for path, whole in ((self.path, self._written), (sums, self._sums_written)):
                with contextlib.suppress(OSError):
                    os.truncate(path, whole) if whole else path.unlink()  # an empty file would block the next attempt
            raise
        self._written, self._sums_written = self._written + size, self._sums_written + len(line)
        self.size = self._written + self._sums_written
        self.rows += sum(len(batch) for batch in batches)
        self.unpacked += sum(batch.nbytes for batch in batches)

    def seal(self) -> None:
        """Convert the segment to Parquet. The stream is deleted last, so that one of the files always exists.

        Raises:
            OSError: Writing failed; the stream still exists.
        """
        target, draft = self.path.with_suffix(".parquet"), self.path.with_suffix(".tmp")
        try:
            data = _parquet_of(self.path)
            sums = _parquet_sums(data)
            draft.write_bytes(data)
            # Written before the file is renamed: a reader finds it by its name, and refuses it without digests.
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
    """Return an Arrow stream converted to Parquet."""
    # The memory map must be closed before the file is deleted, which Windows refuses otherwise.
    with pa.memory_map(str(path)) as file:
        batches = pa.ipc.open_stream(file, options=pa.ipc.IpcReadOptions(use_threads=False))
        sink = io.BytesIO()  # Arrow's own file object may stay open if the disk is full
        with pq.ParquetWriter(
            sink, batches.schema, compression="zstd", use_dictionary=_DICTIONARIES, write_statistics=False,
            # `call` and `t` count up from row to row: their differences take almost no space.
            column_encoding=dict.fromkeys(("call", "t"), "DELTA_BINARY_PACKED"), store_schema=False,
        ) as writer:  # fmt: skip
            writer.add_key_value_metadata(batches.schema.metadata)
            held, size = list[pa.RecordBatch](), 0
            for batch in batches:
                held.append(batch)
                size += batch.nbytes  # summed here, because a slow world's segment has tens of thousands of batches
                if size > _GROUP_BYTES:
                    writer.write_table(pa.Table.from_batches(held), _MOST_ROWS)
                    held, size = [], 0
            if held:
                writer.write_table(pa.Table.from_batches(held), _MOST_ROWS)
        return sink.getvalue()


def _sums_of(path: Path) -> Path:
    return path.with_name(path.name + _SUMS)


def _append(path: Path, data: Any, size: int) -> None:
    """Append to a file of this size; a new file must not exist yet."""
    with path.open("ab" if size else "xb", buffering=0) as file:
        # A write may be partial, as when the disk fills; the next one then raises.
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file.fileno(), rest) :]


def _parquet_sums(data: bytes) -> bytes:
    """Return the digests of a Parquet file."""
    # The footer contains the places of all columns: without it no row can be read. So a copy replaces a damaged one.
    cut = len(data) - 8 - int.from_bytes(data[-8:-4], "little")  # the footer ends with its length and a magic number
    lines = [f"{at} {len(part)} {_digest(part)}" for at, part in ((0, data[:cut]), (cut, data[cut:]))]
    footer = base64.b64encode(zlib.compress(data[cut:], 9))
    lines.append(f"footer {_digest(footer)} {footer.decode('ascii')}")
    return "".join(f"{line}\n" for line in lines).encode("ascii")


# Reading


def find_segments(folder: Path) -> tuple[list[SegmentFile], list[Damage]]:
    """Return the segments of a folder in order, and the files that have names of a recording but are invalid.

    Args:
        folder: The folder, or a single file in it; empty if the path does not exist.
    """
    found: dict[tuple[str, int, int], SegmentFile] = {}
    problems = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else [folder] * folder.exists():
        if (match := _NAME.fullmatch(path.name)) is not None:
            key = match[1], int(match[2]), int(match[3])
            # Both exist for a moment after the Parquet file was written; the stream is complete until it is deleted.
            if key not in found or match[4] == "arrow":
                found[key] = SegmentFile(*key, path)
        elif path.suffix in (".arrow", ".parquet"):
            problems.append(Damage(path, "its name is not that of a recording's file, RUN.STREAM.PART.parquet"))
    return sorted(found.values()), problems


def _read(path: Path, most: int) -> bytes:
    """Read a regular file up to a size; raise RecordingError for other files, OSError if reading fails."""
    # A FIFO or a device may never end, and opening it may block forever.
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise RecordingError("it is no regular file")
    if status.st_size > most:
        raise RecordingError(f"it has more than {most} bytes, which no recording has")
    with path.open("rb") as file:
        # Not until its end: it may grow meanwhile, and read() allocates the requested size.
        return file.read(status.st_size)


def load_segment(path: Path, columns: Sequence[str] | None = None) -> tuple[pa.Schema, pa.Table, list[Damage]]:
    """Read a segment: check its digests, and parse the parts that match.

    Args:
        path: The file.
        columns: The columns to read, if the file has them; None: all.

    Returns:
        The schema of all its columns, its rows except damaged ones, and the damage. The first two are None if nothing
            can be read.

    Raises:
        RecordingError: The file cannot be opened, or is not of a recording although its digests match.
    """
    try:
        # Digests are read first, because they are written last: all data that they cover exists by then.
        sums, data = _read(_sums_of(path), _LARGEST_SUMS), _read(path, _LARGEST_FILE)
        whole, damage = _check(path, data, sums.decode("ascii", "replace"))
        # The file is being written: further data and digests were added since the digests were read.
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
    """Compare the bytes of a file with its digests.

    Returns:
        The bytes that can be parsed, or None; and the damage.
    """
    parts: list[bytes | None] = []
    damage: list[Damage] = []
    footer, at, newest = b"", 0, ""
    for line in sums.splitlines(keepends=True):
        if copy := _FOOTER_SUM.fullmatch(line):
            # Base64 and Deflate have bits without meaning, so the text has its own digest.
            with contextlib.suppress(ValueError, zlib.error):
                if _digest(copy[2].encode()) == copy[1]:
                    # Limited: a few bytes of Deflate may claim gigabytes.
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
    # A stream can be read without some of its batches, but not without its beginning, which defines the columns.
    if not parts or (parts[0] is None if is_stream else None in parts):
        return None, damage
    # Each append is made of complete Arrow messages, and batches are independent: a damaged one can be left out.
    return b"".join(part for part in parts if part is not None), damage


def _load_arrow(data: bytes, columns: Sequence[str] | None) -> tuple[pa.Schema, pa.Table]:
    # Each buffer of a batch contains its decompressed size.
    held = sum(map(_unpacked_size, pa.ipc.MessageReader.open_stream(data)))
    if held > _LARGEST_TABLE:
        raise RecordingError(f"its batches take {held} bytes of memory, more than those of any recording")
    table = pa.ipc.open_stream(data).read_all()
    # pyarrow trusts the offsets in a file. Those of an untrusted file may point outside its buffers.
    table.validate(full=True)
    names = table.schema.names
    return table.schema, table if columns is None else table.select([name for name in names if name in columns])


_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3


def _unpacked_size(message: pa.ipc.Message) -> int:
    """Return the decompressed size of the buffers of an Arrow message, which pyarrow does not report.

    The message is a FlatBuffers table, verified by pyarrow: `Message` in Arrow's format/Message.fbs.
    """
    data = bytes(message.metadata)

    def field(table: int, number: int) -> int:
        """Return the position of a field in a table; 0 if it is absent."""
        vtable = table - struct.unpack_from("<i", data, table)[0]
        (size,) = struct.unpack_from("<H", data, vtable)
        (offset,) = struct.unpack_from("<H", data, vtable + 4 + 2 * number) if 4 + 2 * number < size else (0,)
        return table + offset if offset else 0

    def pointed(at: int) -> int:
        return int(at + struct.unpack_from("<I", data, at)[0])

    # Field numbers: Message has header_type 1 and header 2, RecordBatch buffers 2 and compression 3, DictionaryBatch
    # data 1. A buffer is an offset and a length; its first 8 bytes are its decompressed length.
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
    return sum(size for size in sizes if size > 0)  # -1: not compressed


def _load_parquet(data: bytes, columns: Sequence[str] | None) -> tuple[pa.Schema, pa.Table]:
    metadata = pq.read_metadata(pa.BufferReader(data))
    if metadata.num_rows > _MOST_ROWS:
        raise RecordingError(f"it claims {metadata.num_rows} rows, more than any recording has in a file")
    _check_pages(data, metadata)
    file = pq.ParquetFile(pa.BufferReader(data), metadata=metadata)
    schema = file.schema_arrow
    columns = None if columns is None else [name for name in schema.names if name in columns]
    return schema, file.read(columns, use_threads=False)


# Parquet pages, `PageHeader` and its parts in parquet.thrift: page types, and encodings of values
_DATA_PAGE, _DICTIONARY_PAGE = 0, 2
_DICTIONARY_ENCODINGS = (2, 8)
# Plain, run-length, and integer differences. Other encodings repeat values without a limit.
_ENCODINGS = (0, 3, 5)
_BYTES_OF_VALUE = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "FLOAT": 4, "DOUBLE": 8, "BYTE_ARRAY": 4}


def _check_pages(data: bytes, metadata: Any) -> None:
    """Raise RecordingError if the pages of a file would take more memory than those of a recording.

    The sizes in the footer are untrusted. A reader decompresses as much as the header of each page says, so these sizes
    are added up first.
    """
    held = 0  # bytes
    for group in (metadata.row_group(at) for at in range(metadata.num_row_groups)):
        for chunk in (group.column(at) for at in range(group.num_columns)):
            # A dictionary precedes the pages that refer to it.
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
    """Parse a struct in Thrift's compact protocol that contains only integers, bools and structs, as page headers do.

    Returns:
        The fields by their numbers, and the position after the struct.
    """
    # Too deep nesting or an early end raises RecursionError or IndexError, both in `UNREADABLE`.
    found: dict[int, Any] = {}
    number = 0
    while data[at]:
        kind, step, at = data[at] & 15, data[at] >> 4, at + 1
        # A field number that is not 1 to 15 above the previous one has another encoding, which our page headers never
        # need.
        if not step:
            raise RecordingError("a page header is not one of a recording's")
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
            raise RecordingError("a page header is not one of a recording's")
    return found, at + 1
