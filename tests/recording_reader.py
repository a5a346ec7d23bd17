"""A reader of recordings written from `docs/recordings.md` alone: it imports nothing of the package."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

MARK = bytes.fromhex("A9524543")


def read_file(path: Path) -> list[tuple[dict[str, Any], dict[str, np.ndarray]]]:
    """All whole records of a file: the JSON object of each, and its columns by name."""
    data = path.read_bytes()
    assert data[:8] == b"BRIDGREC"
    assert struct.unpack("<II", data[8:16]) == (1, 0)
    found, at = [], 16
    while (at := data.find(MARK, at)) >= 0:
        if at + 12 > len(data):
            break
        length, checksum = struct.unpack_from("<II", data, at + 4)
        payload = data[at + 12 : at + 12 + length]
        if len(payload) < length or zlib.crc32(payload) != checksum:
            at += 1
            continue
        found.append(read_payload(payload))
        at += 12 + length
    return found


def read_payload(payload: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    (size,) = struct.unpack_from("<I", payload)
    header = json.loads(payload[4 : 4 + size].decode("utf-8"))
    columns, at = {}, 4 + size
    for column in header.get("columns", []):
        data = payload[at : at + column["bytes"]]
        if column.get("compression") == "zlib":
            data = zlib.decompress(data)
        columns[column["name"]] = np.frombuffer(data, column["dtype"]).reshape(column["shape"])
        at += column["bytes"]
    assert at == len(payload)
    return header, columns


def read_run(folder: Path) -> dict[int, tuple[dict[str, Any], list[tuple[dict[str, Any], dict[str, np.ndarray]]]]]:
    """The streams of the one recording of a folder by number: what `world` says, and the records of rows."""
    worlds: dict[int, dict[str, Any]] = {}
    rows: dict[int, list[Any]] = {}
    for path in sorted(folder.glob("*.rec")):
        for header, columns in read_file(path):
            if header["type"] == "world":
                worlds.setdefault(header["stream"], header)
            elif header["type"] == "rows":
                rows.setdefault(header["stream"], []).append((header, columns))
    return {number: (world, rows.get(number, [])) for number, world in worlds.items()}


def episodes_of(records: list[tuple[dict[str, Any], dict[str, np.ndarray]]]) -> list[dict[str, np.ndarray]]:
    """The episodes of one environment (`kind` is `env`): its columns, cut where it was reset."""
    names = set.intersection(*(set(columns) for _, columns in records))
    whole = {name: np.concatenate([columns[name] for _, columns in records]) for name in names}
    starts = [*np.flatnonzero(whole["kind"] == 1).tolist(), len(whole["kind"])]
    return [{name: column[start:stop] for name, column in whole.items()} for start, stop in itertools.pairwise(starts)]


def hash_of(*tensors: np.ndarray) -> bytes:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<")).tobytes())
    return digest.digest()
