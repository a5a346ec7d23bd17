"""Rows of what went through an environment, as columns of a record."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bridge.encoding import values
from bridge.encoding.spaces import Layout
from bridge.encoding.tensors import Array, Spec
from bridge.errors import TensorError

__all__ = ["HASH_BYTES", "Kind", "Row", "hash_of", "hashes_of", "is_fixed", "pack_samples", "unpack_sample"]

HASH_BYTES = 8
"""The length of the hash of an observation."""


class Kind:
    """What a row tells; the numbers stand in the column `kind`, those from 16 on are none of a row."""

    STEP = 0
    """The environment was stepped."""
    RESET = 1
    """It was reset."""
    FAILED_STEP = 2
    """It raised when it was stepped."""
    FAILED_RESET = 3
    """It raised when it was reset."""
    LOST = 16
    """So many rows were lost here."""
    CALL = 17
    """A method was called, or an attribute set."""
    END = 18
    """The environment was closed."""


class Row(NamedTuple):
    """One call of an environment, as it goes to the writer's thread."""

    kind: int
    time: float
    """Seconds of the epoch."""
    by: Any = ""
    """Who acted: a text, or one for each agent by name; a list of one for each lane where they differ."""
    action: Any = None
    """Of the environment's action space; for `LOST` a number, for `CALL` a pair, else None."""
    observation: Any = None
    reward: Any = 0.0
    terminated: Any = False
    truncated: Any = False
    alive: Any = ()
    """With several agents: those that go on."""
    seed: Any = None
    options: Any = None
    error: str = ""
    moment: Any = None
    """In real time: the world's seconds, the number of the frame, and when the action came."""
    frame: Any = None
    """What `render` gave, a list with an entry a lane; None: it is not recorded."""


def is_fixed(spec: Spec) -> bool:
    """Whether a tensor is of numbers and always of one shape."""
    return spec.dtype.kind in "biufc" and all(size >= 0 for size in spec.shape)


def _bytes_of(array: Array, spec: Spec) -> bytes:
    if is_fixed(spec):
        plain = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        return plain.tobytes()
    return values.encode(array)


def hash_of(layout: Layout, sample: Any) -> bytes:
    """Return the hash of an observation: BLAKE2b of the bytes of its tensors in order.

    Raises:
        TensorError: It is not of the space.
    """
    spec = layout.specs[0]
    if (
        layout.single
        and type(sample) is np.ndarray
        and sample.dtype == spec.dtype
        and sample.shape == spec.shape
        and is_fixed(spec)
        and sample.flags.c_contiguous
    ):
        return hashlib.blake2b(sample.data, digest_size=HASH_BYTES).digest()
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    for array, spec in zip(layout.pack(sample, rounding=True), layout.specs, strict=True):
        digest.update(_bytes_of(array, spec))
    return digest.digest()


def hashes_of(layout: Layout, samples: Sequence[Any]) -> Array:
    """Return the hash of each observation, uint8 `(samples, 8)`; zeros where there is None. Raises as `hash_of`."""
    none = bytes(HASH_BYTES)
    digests = [none if sample is None else hash_of(layout, sample) for sample in samples]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(samples), HASH_BYTES)


def _stack(samples: Sequence[Any], spec: Spec) -> Array | None:
    """Return samples that are arrays, or scalars, of a spec as one array; None: they are something else."""
    try:
        column: Array = np.array(samples)
    except ValueError:
        return None
    kind = column.dtype == spec.dtype and column.shape == (len(samples), *spec.shape)
    return column if kind else None


def pack_samples(layout: Layout, samples: Sequence[Any], prefix: str = "") -> dict[str, Array]:
    """Return the columns of samples, one for each tensor; None where there is no sample.

    Tensors of numbers and of one shape are a column `NAME` of arrays, zeros where there is no sample. Any other tensor
    is two columns: `NAME.bytes`, the encoded values one after the other, and `NAME.lengths`, the bytes of each.

    Raises:
        TensorError: One is not of the space.
    """
    if layout.single and is_fixed(layout.specs[0]):
        spec = layout.specs[0]
        zero = np.zeros(spec.shape, spec.dtype)[()]
        stacked = _stack([zero if sample is None else sample for sample in samples], spec) if samples else None
        if stacked is not None:
            return {f"{prefix}{layout.leaves[0].name}": stacked}
    there = np.array([sample is not None for sample in samples], np.bool_)
    packed = [layout.pack(sample, rounding=True) for sample in samples if sample is not None]
    columns: dict[str, Array] = {}
    for number, (leaf, spec) in enumerate(zip(layout.leaves, layout.specs, strict=True)):
        arrays = [sample[number] for sample in packed]
        name = f"{prefix}{leaf.name}"
        if is_fixed(spec):
            column: Array = np.zeros((len(samples), *spec.shape), spec.dtype)
            if arrays:
                column[there] = np.stack(arrays)
            columns[name] = column
            continue
        texts = [values.encode(array) for array in arrays]
        lengths = np.zeros(len(samples), np.uint32)
        lengths[there] = [len(text) for text in texts]
        columns[f"{name}.lengths"] = lengths
        columns[f"{name}.bytes"] = np.frombuffer(b"".join(texts), np.uint8)
    return columns


def unpack_sample(layout: Layout, columns: dict[str, Array], row: int, prefix: str = "") -> Any:
    """Return the sample of a row, as the environment takes it or gave it.

    Raises:
        TensorError: The columns do not fit the space.
    """
    arrays = []
    for leaf, spec in zip(layout.leaves, layout.specs, strict=True):
        name = f"{prefix}{leaf.name}"
        if is_fixed(spec):
            arrays.append(np.array(columns[name][row]).astype(spec.dtype, copy=False))
            continue
        lengths = columns[f"{name}.lengths"]
        start = int(lengths[:row].sum(dtype=np.int64))
        data = columns[f"{name}.bytes"][start : start + int(lengths[row])].tobytes()
        array = values.decode(data)
        if not isinstance(array, (np.ndarray, np.generic)):
            raise TensorError(f"{name}: expected an array in row {row}, got {array!r:.80}")
        arrays.append(np.asarray(array))
    return layout.unpack(arrays)
