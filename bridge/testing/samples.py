"""Valid and invalid tensors for specs. The library's codec is not used here, so that both test each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = [
    "NUMPY",
    "PAYLOAD",
    "at_bound",
    "beyond",
    "bound",
    "common",
    "concrete",
    "count",
    "elements",
    "lawful",
    "pack",
    "shape_fits",
]

Array = NDArray[Any]

NUMPY: dict[int, np.dtype[Any]] = {
    pb.FLOAT: np.dtype(np.float32),
    pb.DOUBLE: np.dtype(np.float64),
    pb.INT8: np.dtype(np.int8),
    pb.INT32: np.dtype(np.int32),
    pb.INT64: np.dtype(np.int64),
    pb.UINT8: np.dtype(np.uint8),
    pb.UINT32: np.dtype(np.uint32),
    pb.UINT64: np.dtype(np.uint64),
}
"""The numeric types of the protocol."""

PAYLOAD: dict[int, str] = {
    pb.FLOAT: "floats",
    pb.DOUBLE: "doubles",
    pb.INT8: "int8s",
    pb.INT32: "int32s",
    pb.INT64: "int64s",
    pb.UINT8: "uint8s",
    pb.UINT32: "uint32s",
    pb.UINT64: "uint64s",
    pb.BOOL: "bools",
    pb.STRING: "strings",
    pb.PROTO: "protos",
}
"""The member of Tensor's payload for each type."""


def count(tensor: pb.Tensor | pb.TensorSpec.Value) -> int:
    """Return the number of elements in a tensor or a bound; 0 if its payload is not set."""
    kind = tensor.WhichOneof("payload")
    return 0 if kind is None else len(getattr(tensor, kind).array)


def elements(tensor: pb.Tensor | pb.TensorSpec.Value) -> Array | None:
    """Return the elements as a flat array with the payload's dtype; None if they are not numeric, or not set."""
    kind = tensor.WhichOneof("payload")
    for dtype, name in PAYLOAD.items():
        if name == kind and dtype in NUMPY:
            array = getattr(tensor, name).array
            return np.frombuffer(array, NUMPY[dtype]) if isinstance(array, bytes) else np.array(array, NUMPY[dtype])
    return None


def pack(dtype: int, values: Any, shape: Sequence[int] | None = None) -> pb.Tensor:
    """Return a tensor with a dtype; `shape`, if given, replaces the shape of the values."""
    tensor = pb.Tensor()
    array = np.asarray(values, dtype=NUMPY.get(dtype, np.dtype(bool) if dtype == pb.BOOL else np.dtype(object)))
    payload = getattr(tensor, PAYLOAD[dtype])
    if dtype in (pb.INT8, pb.UINT8):
        payload.array = array.tobytes()
    else:
        payload.array.extend(array.ravel().tolist())
    payload.SetInParent()
    tensor.shape.extend(array.shape if shape is None else shape)
    return tensor


def concrete(spec: pb.TensorSpec) -> tuple[int, ...]:
    """Return a spec's shape with a variable dimension taken as 1."""
    return tuple(1 if size < 0 else size for size in spec.shape)


def shape_fits(spec: pb.TensorSpec, tensor: pb.Tensor) -> str | None:
    """Return what is wrong with a tensor's shape or number of elements; None if they are valid.

    A single element fills any shape, and one negative dimension is computed from the number of elements.
    """
    shape, size = list(tensor.shape), count(tensor)
    if len(shape) != len(spec.shape):
        return f"expected {len(spec.shape)} dimensions {list(spec.shape)}, got the shape {shape}"
    variable = [axis for axis, length in enumerate(shape) if length < 0]
    if len(variable) > 1:
        return f"expected at most one variable dimension, got the shape {shape}"
    if variable:
        rest = math.prod(length for length in shape if length >= 0)
        if rest and size % rest:
            return f"expected {size} elements to fill the shape {shape}, got a remainder"
        shape[variable[0]] = size // rest if rest else 0
    for wanted, length in zip(spec.shape, shape, strict=True):
        if wanted >= 0 and length != wanted:
            return f"expected the shape {list(spec.shape)}, got {list(tensor.shape)}"
    needed = math.prod(shape)
    if size != needed and not (size == 1 and shape):
        return f"expected {needed} element{'s' if needed != 1 else ''} for the shape {shape}, got {size}"
    return None


def bound(spec: pb.TensorSpec, which: str) -> Array | None:
    """Return a spec's `min` or `max` in the spec's dtype, of shape () or the spec's shape; None if it has none."""
    if spec.dtype not in NUMPY:
        return None
    values = elements(getattr(spec, which))
    if values is None or values.size == 0:
        return None
    shape = concrete(spec)
    values = values.astype(NUMPY[spec.dtype])
    if values.size == 1:
        return values.reshape(())
    return values.reshape(shape) if values.size == math.prod(shape) else None


def _limits(spec: pb.TensorSpec) -> tuple[Array, Array]:
    """Return the lowest and the highest value of each element, both finite, with the spec's shape."""
    dtype, shape = NUMPY[spec.dtype], concrete(spec)
    info: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    low, high = bound(spec, "min"), bound(spec, "max")
    least = np.broadcast_to(np.asarray(info.min if low is None else low, dtype), shape)
    greatest = np.broadcast_to(np.asarray(info.max if high is None else high, dtype), shape)
    return np.clip(least, info.min, info.max), np.clip(greatest, info.min, info.max)


def lawful(spec: pb.TensorSpec, generator: np.random.Generator, text: str = "") -> pb.Tensor | None:
    """Return a random tensor that a spec allows; None if the spec does not say enough (protos).

    Args:
        spec: The spec.
        generator: The source of random values.
        text: The value for texts: specs do not say which texts are allowed.
    """
    shape = concrete(spec)
    if spec.dtype == pb.STRING:
        return pack(spec.dtype, np.full(shape, text, dtype=object))
    if spec.dtype == pb.BOOL:
        return pack(spec.dtype, generator.random(shape) < 0.5)
    if spec.dtype not in NUMPY:
        return None
    dtype = NUMPY[spec.dtype]
    least, greatest = _limits(spec)
    # Within 1 of zero, or of the bound nearest to zero, if the range allows.
    nearest = np.clip(np.zeros(shape, dtype), least, greatest)
    if dtype.kind == "f":
        reach = generator.uniform(-1, 1, shape).astype(dtype)
        with np.errstate(over="ignore"):
            return pack(spec.dtype, np.clip(nearest + reach, least, greatest).astype(dtype))
    drawn = []
    for low, middle, high in zip(least.ravel(), nearest.ravel(), greatest.ravel(), strict=True):
        start, stop = max(int(low), int(middle) - 1000), min(int(high), int(middle) + 1000)
        drawn.append(
            start + int(generator.integers(stop - start, endpoint=True))
        )  # NumPy cannot draw integers from 2**63
    return pack(spec.dtype, np.array(drawn, dtype).reshape(shape))


def common(spec: pb.TensorSpec, text: str = "") -> Any:
    """Return one value that every element of a spec may have; None if there is none."""
    if spec.dtype == pb.STRING:
        return text
    if spec.dtype == pb.BOOL:
        return False
    if spec.dtype not in NUMPY:
        return None
    least, greatest = _limits(spec)
    if not least.size or least.max() > greatest.min():
        return None
    return np.clip(NUMPY[spec.dtype].type(0), least.max(), greatest.min())


def at_bound(spec: pb.TensorSpec, which: str) -> pb.Tensor | None:
    """Return a tensor whose elements are all exactly at `min` or `max`; None if there is no finite bound."""
    edge = bound(spec, which)
    if edge is None or not np.all(np.isfinite(edge.astype(np.float64))):
        return None
    return pack(spec.dtype, np.broadcast_to(edge, concrete(spec)))


def beyond(spec: pb.TensorSpec, which: str, generator: np.random.Generator) -> list[pb.Tensor]:
    """Return tensors that are valid except that their first or last element is below `min` or above `max`."""
    edge = bound(spec, which)
    made = lawful(spec, generator)
    if edge is None or made is None:
        return []
    dtype, shape = NUMPY[spec.dtype], concrete(spec)
    edges = np.broadcast_to(edge, shape).ravel()
    inside = elements(made)
    out = []
    for index in sorted({0, edges.size - 1}) if edges.size and inside is not None else ():
        value = edges[index]
        direction = -1 if which == "min" else 1
        if dtype.kind == "f":
            if not np.isfinite(value):
                continue
            outside = value + dtype.type(direction) * max(dtype.type(1), abs(value))
            if not np.isfinite(outside):
                continue
        else:
            outside = int(value) + direction
            if not np.iinfo(dtype).min <= outside <= np.iinfo(dtype).max:
                continue
        assert inside is not None
        values = inside.copy()
        values[index] = outside
        out.append(pack(spec.dtype, values.reshape(shape)))
    return out
