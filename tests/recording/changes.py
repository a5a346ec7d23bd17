"""Recordings that are changed after they were written."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def change(file: Path, column: str, row: int) -> None:
    """Change a cell of a file, and its digests with it, as somebody does who wants to deceive."""
    segment = pa.ipc.new_stream(stream := io.BytesIO(), (table := pq.read_table(file)).schema)
    cells = table[column].to_pylist()
    cell = cells[row]
    if isinstance(cell, list):
        cells[row] = [float(np.nextafter(np.float32(cell[0]), np.float32(9))), *cell[1:]]
    elif isinstance(cell, bytes):
        cells[row] = bytes([cell[0] ^ 1, *cell[1:]])
    else:
        cells[row] = not cell if isinstance(cell, bool) else 1 - cell
    segment.write_table(table.set_column(table.schema.get_field_index(column), table.schema.field(column),
                                         pa.array(cells, table.schema.field(column).type)))  # fmt: skip
    segment.close()
    forge(file, stream.getvalue())


def forge(file: Path, data: bytes) -> None:
    """Put a stream in the place of a file, with digests that fit."""
    forged = file.with_suffix(".arrow")
    forged.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    forged.with_name(forged.name + ".sums").write_text(f"0 {len(data)} {digest}\n")
    file.unlink()
