"""The files of a recording, as `docs/recordings.md` describes them: records of a JSON header and columns of numbers.

A record is a mark, the length and the checksum of its payload, and the payload. The payload is the length of a JSON
object, the object, and the bytes of the columns that it lists, one after the other.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bridge.encoding.tensors import Array
from bridge.errors import RecordingError

__all__ = ["HEAD", "SUFFIX", "Damage", "Record", "pack_record", "read_records"]

HEAD = b"BRIDGREC" + struct.pack("<II", 1, 0)
"""How a file begins: a name, the version of the format, and four bytes that are 0."""
SUFFIX = ".rec"
"""How the names of files end."""
_MARK = b"\xa9REC"
_FRAME = struct.Struct("<4sII")
_LENGTH = struct.Struct("<I")
_LARGEST = 1 << 31
# Types of columns, as NumPy writes them.
_DTYPE = re.compile(r"[<|][biufc][0-9]{1,2}")
# Columns of so many bytes or more are compressed where they are of bytes, such as frames.
_COMPRESSED = 4096


@dataclasses.dataclass(frozen=True)
class Damage:
    """A part of a file that holds no whole record."""

    path: Path
    offset: int
    """Where it begins, bytes."""
    size: int
    """Its bytes."""
    torn: bool
    """Whether the file ends in it, as where the process was killed while it wrote."""
    problem: str = ""
    """What is wrong with a record that is whole; empty: it is none."""

    def __str__(self) -> str:
        what = self.problem or ("a torn record at the end" if self.torn else "bytes that are no record")
        return f"{self.path.name}: {what}, {self.size} bytes from byte {self.offset} on, skipped"


@dataclasses.dataclass(frozen=True)
class Record:
    """One record of a file; its columns are read from there when they are asked for."""

    path: Path
    offset: int
    """Where its columns begin, bytes."""
    header: Mapping[str, Any]
    """The JSON object."""
    damaged: bool = False
    """Whether the checksum does not fit, so that some of its bytes are not those that were written."""

    @property
    def type(self) -> str:
        """What kind of record it is."""
        return str(self.header["type"])

    @property
    def listed(self) -> Sequence[Mapping[str, Any]]:
        """What the JSON object says of its columns."""
        columns: Sequence[Mapping[str, Any]] = self.header.get("columns", ())
        return columns

    @property
    def columns(self) -> list[str]:
        """The names of its columns."""
        return [column["name"] for column in self.listed]

    def column(self, name: str) -> Array:
        """Read a column.

        Raises:
            RecordingError: There is none of this name, or it cannot be read.
        """
        offset = self.offset
        for column in self.header.get("columns", ()):
            if column["name"] == name:
                return self._read(column, offset)
            offset += column["bytes"]
        raise RecordingError(f"{self.path.name}: a record has no column {name!r}; it has {', '.join(self.columns)}")

    def _read(self, column: Mapping[str, Any], offset: int) -> Array:
        with self.path.open("rb") as file:
            file.seek(offset)
            data = file.read(column["bytes"])
        try:
            dtype = np.dtype(column["dtype"])
            if column.get("compression") == "zlib":  # never more than the shape says
                data = zlib.decompressobj().decompress(data, math.prod(column["shape"]) * dtype.itemsize + 1)
            found: Array = np.frombuffer(data, dtype).reshape(column["shape"])
            return found
        except (TypeError, ValueError, zlib.error) as error:
            raise RecordingError(f"{self.path.name}: the column {column['name']!r} cannot be read: {error}") from error


def pack_record(header: Mapping[str, Any], columns: Mapping[str, Array] | None = None) -> bytes:
    """Return the bytes of a record.

    Args:
        header: What its JSON object holds besides `columns`.
        columns: Arrays of numbers by name, each with an entry a row.
    """
    listed, parts = [], []
    for name, array in (columns or {}).items():
        plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        data: bytes = plain.tobytes()
        column = {"name": name, "dtype": plain.dtype.str, "shape": list(plain.shape)}
        if plain.dtype.itemsize == 1 and plain.nbytes >= _COMPRESSED:
            small = zlib.compress(data, 1)
            if len(small) < 0.9 * len(data):
                column["compression"], data = "zlib", small
        listed.append({**column, "bytes": len(data)})
        parts.append(data)
    text = json.dumps({**header, "columns": listed} if listed else dict(header), separators=(",", ":")).encode()
    payload = b"".join([_LENGTH.pack(len(text)), text, *parts])
    return _FRAME.pack(_MARK, len(payload), zlib.crc32(payload)) + payload


def read_records(path: Path) -> Iterator[Record | Damage]:
    """Read the records of a file in order, and what is in it that is none.

    A record whose checksum does not fit is given as `damaged` where it can be read all the same.

    Raises:
        RecordingError: The file is no recording.
    """
    data = path.read_bytes()
    if data[: len(HEAD)] != HEAD:
        if HEAD.startswith(data):  # killed while it began
            return
        raise RecordingError(f"expected {path} to be a recording of format version 1, which begins with {HEAD!r}")
    at = len(HEAD)
    while at < len(data):
        record, end = _read_record(path, data, at)
        if record is None:
            following = data.find(_MARK, at + 1)
            end = len(data) if following < 0 else following
            yield Damage(path, at, end - at, following < 0)
        else:
            yield record
        at = end


def _read_record(path: Path, data: bytes, at: int) -> tuple[Record | None, int]:
    """Return the record that begins here and where it ends; None: there is none."""
    if len(data) - at < _FRAME.size:
        return None, at
    mark, length, checksum = _FRAME.unpack_from(data, at)
    start = at + _FRAME.size
    if mark != _MARK or not _LENGTH.size <= length <= min(_LARGEST, len(data) - start):
        return None, at
    payload = memoryview(data)[start : start + length]
    (size,) = _LENGTH.unpack_from(payload)
    try:
        header = json.loads(bytes(payload[_LENGTH.size : _LENGTH.size + size]))
        listed = sum(column["bytes"] for column in header.get("columns", ()))
        fields = [(column["name"], column["dtype"], [*column["shape"]]) for column in header.get("columns", ())]
        # NumPy knows more names of types than are written, and warns of some.
        whole = all(isinstance(name, str) and _DTYPE.fullmatch(dtype) for name, dtype, _ in fields)
        whole &= isinstance(header["type"], str) and _LENGTH.size + size + listed == length
        whole &= all(isinstance(side, int) and side >= 0 for _, _, shape in fields for side in shape)
        whole &= all(isinstance(column["bytes"], int) and column["bytes"] >= 0 for column in header.get("columns", ()))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, at
    if not whole:
        return None, at
    return Record(path, start + _LENGTH.size + size, header, zlib.crc32(payload) != checksum), start + length
