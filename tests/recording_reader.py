"""A reader of recordings written from `proto/recording-format.md` alone: it imports nothing of the package."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

STEP, RESET = 0, 1


def read_file(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Check a segment's digests, and return its header and its rows."""
    data, at = path.read_bytes(), 0
    for line in path.with_name(path.name + ".sums").read_text("ascii").splitlines():
        if not line.startswith("footer "):
            start, size, digest = line.split()
            assert int(start) == at
            at += int(size)
            assert hashlib.sha256(data[int(start) : at]).hexdigest() == digest
    assert at == len(data)
    table = pq.read_table(path) if path.suffix == ".parquet" else pa.ipc.open_stream(data).read_all()
    return json.loads(table.schema.metadata[b"bridge"]), table.to_pylist()


def read_run(folder: Path) -> dict[int, tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The streams of the one recording of a folder by number: header and rows."""
    found: dict[int, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
    paths = [path for path in folder.iterdir() if path.suffix in (".parquet", ".arrow")]
    for path in sorted(paths, key=lambda path: [int(part) for part in path.name.split(".")[1:3]]):
        header, rows = read_file(path)
        found.setdefault(header["stream"], (header, []))[1].extend(rows)
    return found


def episodes_of(rows: list[dict[str, Any]], lane: int = 0) -> list[list[dict[str, Any]]]:
    """The rows of each episode of a lane: its reset, and its steps."""
    own = [row for row in rows if row["lane"] == lane and row["kind"] in (STEP, RESET)]
    return [[row for row in own if row["episode"] == number] for number in sorted({row["episode"] for row in own})]


def hash_of(*tensors: np.ndarray) -> bytes:
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<")).tobytes())
    return digest.digest()
