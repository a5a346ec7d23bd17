"""Samples of a Gymnasium space as tensors, one leaf a tensor, and back.

A `Layout` cuts a space into leaves. Box, Discrete, MultiBinary, MultiDiscrete and Text are a leaf each; Dict and Tuple
nest, a level a `.` in the name; a Sequence of plain numbers or texts is a leaf whose first dimension varies.
Everything that no plain tensor holds (Graph, OneOf, a Sequence of composites) is one uint8 leaf in the values codec.

A batch of samples is handled as columns, one a leaf: an array with a leading dimension for the slots, or a list where
slots differ in shape.

Dict keys in names: `%` is written `%25`, `.` is `%2E`, the empty key `%_`, and the i-th key where it is no string
`%[i]`.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from gymnasium import Space, spaces
from gymnasium.spaces import GraphInstance

from bridge.encoding import values
from bridge.encoding.tensor_space import TensorSpace
from bridge.encoding.tensors import Array, Spec, cast, to_array
from bridge.errors import InvalidActionError, TensorError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["Column", "Layout", "Leaf", "space_from_specs"]

Column: TypeAlias = "Array | list[Any]"
"""The values of one leaf over many slots: `(num_envs, *shape)`, or a list of `num_envs`."""

_ARRAYS = (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete)
_BYTES = np.dtype(np.uint8)
# Bounds within which a foreign integer becomes a Discrete rather than a Box.
_MAX_DISCRETE = 1 << 32
# What comes of taking something of another structure apart.
_MISFITS = (AttributeError, IndexError, KeyError, TypeError, ValueError)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One tensor of a sample."""

    name: str
    """The tensor's name on the wire."""
    space: Space[Any]
    """The part of the space that it holds."""
    path: tuple[Any, ...]
    """The keys from the whole sample to this part."""
    kind: str
    """`array`, `scalar`, `text`, `sequence`, `tensor` (as a foreign spec says), or `encoded` (the values codec)."""
    spec: Spec
    """Of a single sample."""
    lane_spec: Spec | None
    """Of the samples of `lanes` lanes; None where the layout has none."""

    def pack(self, part: Any, rounding: bool) -> Array:
        """Return the tensor's array for this part of a sample.

        Raises:
            TensorError: It has another shape or type, or does not fit the dtype.
        """
        try:
            return self._pack(part, rounding)
        except TensorError:
            raise
        except _MISFITS as error:
            raise self._misfit(part, error) from error

    def _misfit(self, part: Any, error: Exception) -> TensorError:
        return TensorError(f"{self.name!r}: expected an element of {self.space}, got {part!r:.80}: {error!r}")

    def _cast(self, part: Any, dtype: Any, rounding: bool) -> Array:
        try:
            return cast(part, dtype, rounding=rounding)
        except TensorError as error:
            raise TensorError(f"{self.name!r}: {error}") from error

    def _pack(self, part: Any, rounding: bool) -> Array:
        if self.kind == "array":
            array = self._cast(part, self.space.dtype, rounding)
            if array.shape != self.space.shape:
                raise TensorError(f"{self.name!r}: expected the shape {self.space.shape}, got {array.shape}")
            return _widen(array, self.spec)
        if self.kind == "scalar":
            array = self._cast(part, self.space.dtype, False)
            if array.shape != ():
                raise TensorError(f"{self.name!r}: expected a single integer, got the shape {array.shape}")
            return _widen(array, self.spec)
        if self.kind == "text":
            return _texts(part, (), self.name)
        if self.kind == "sequence":
            return self._pack_sequence(part, rounding)
        if isinstance(self.space, TensorSpace):
            return self.space.to_array(part, rounding=rounding)
        return np.frombuffer(values.encode(_to_plain(self.space, part)), _BYTES)

    def _pack_sequence(self, part: Any, rounding: bool) -> Array:
        feature = self.space.feature_space  # type: ignore[attr-defined]
        if isinstance(feature, spaces.Text):
            return _texts(list(part), (len(part),), self.name)
        array = to_array(part)
        if not array.size:
            array = np.empty((len(part), *feature.shape), feature.dtype)
        array = self._cast(array, feature.dtype, rounding)
        if array.shape[1:] != feature.shape:
            raise TensorError(f"{self.name!r}: expected items of the shape {feature.shape}, got {array.shape[1:]}")
        return _widen(array, self.spec)

    def unpack(self, array: Array) -> Any:
        """Return the part of a sample that a tensor's array holds.

        Raises:
            TensorError: It does not fit the dtype, or holds an encoded value of another structure.
        """
        if self.kind == "array":
            return _narrow(array, self.space.dtype)
        if self.kind == "scalar":
            return self.space.dtype.type(_narrow(array, self.space.dtype)[()])  # type: ignore[union-attr]
        if self.kind == "text":
            return array[()]
        if self.kind == "sequence":
            return self._unpack_sequence(array)
        if isinstance(self.space, TensorSpace):
            return self.space.element(array)
        return self._decode(values.decode(array.tobytes()))

    def _decode(self, plain: Any) -> Any:
        try:
            return _from_plain(self.space, plain)
        except _MISFITS as error:
            raise self._misfit(plain, error) from error

    def check(self, part: Any) -> None:
        """Raise TensorError where a part is not in the space."""
        try:
            inside = self.space.contains(part)
        except _MISFITS:
            inside = False
        if not inside:
            raise TensorError(f"{self.name!r}: expected an element of {self.space}, got {part!r:.80}")

    def _unpack_sequence(self, array: Array) -> Any:
        feature, stack = self.space.feature_space, self.space.stack  # type: ignore[attr-defined]
        if isinstance(feature, spaces.Text):
            return tuple(array.tolist())
        array = _narrow(array, feature.dtype)
        if stack:
            return array
        if isinstance(feature, spaces.Discrete):
            return tuple(feature.dtype.type(item) for item in array)
        return tuple(
            item.copy() if item.ndim else np.asarray(item) for item in (array[i, ...] for i in range(len(array)))
        )

    def pack_lanes(self, part: Any, lanes: int, rounding: bool) -> Array:
        """Return the tensor's array for this part of a batch of `lanes` samples; raises as `pack`."""
        if self.kind in ("array", "scalar"):
            array = self._cast(part, self.space.dtype, rounding)
            if array.shape != (lanes, *self.spec.shape):
                raise TensorError(f"{self.name!r}: expected the shape {(lanes, *self.spec.shape)}, got {array.shape}")
            return _widen(array, self.spec)
        items = self.items(part, lanes)
        try:
            if self.kind == "text":
                return _texts(items, (lanes,), self.name)
            return np.frombuffer(values.encode([_to_plain(self.space, item) for item in items]), _BYTES)
        except TensorError:
            raise
        except _MISFITS as error:
            raise self._misfit(part, error) from error

    def items(self, part: Any, count: int) -> list[Any]:
        """Return this part of a batch as a list of `count` items; raises as `pack`."""
        if not isinstance(part, (tuple, list, np.ndarray)) or not np.iterable(part):
            raise TensorError(f"{self.name!r}: expected a tuple of {count} items, got {part!r:.80}")
        if len(part) != count:
            raise TensorError(f"{self.name!r}: expected {count} items, got {len(part)}")
        return list(part)

    def unpack_lanes(self, array: Array, lanes: int) -> Column:
        """Return the column of `lanes` values that a tensor's array holds."""
        if self.kind in ("array", "scalar"):
            return array
        if self.kind == "text":
            items: list[Any] = array.tolist()
            return items
        items = values.decode(array.tobytes())
        if not isinstance(items, list) or len(items) != lanes:
            raise TensorError(f"{self.name!r}: expected a list of {lanes} values, got {items!r:.80}")
        return [self._decode(item) for item in items]


class Layout:
    """How samples of a space are cut into tensors.

    Args:
        space: A space of Gymnasium's own kinds.
        name: The name of the root: `observation` or `action`.
        lanes: The number of lanes where a world steps several at once; None for a single environment.
        foreign: The names are another server's: no root before them, and nothing written in another way.

    Raises:
        TensorError: A dtype has no form on the wire.
    """

    def __init__(self, space: Space[Any], name: str, lanes: int | None = None, *, foreign: bool = False) -> None:
        self.space = space
        self.name = name
        self.lanes = lanes
        leaves = _leaves(space, name, (), lanes)
        if foreign:
            leaves = (_renamed(leaf, ".".join(leaf.path) or name) for leaf in leaves)
        self.leaves = tuple(leaves)
        self.specs = tuple(leaf.lane_spec or leaf.spec for leaf in self.leaves)
        self.single = len(self.leaves) == 1 and not self.leaves[0].path
        first = self.leaves[0] if self.single else None
        self.is_array = first is not None and first.kind == "array" and first.spec.dtype == first.space.dtype
        """Whether a sample is the very array of its tensor: `unpack` changes nothing."""

    def pack(self, sample: Any, *, rounding: bool = False) -> list[Array]:
        """Cut a sample, or a batch of `lanes` samples, into the arrays of its tensors.

        Args:
            sample: A sample of the space; for a layout with lanes the batch of them, as Gymnasium batches.
            rounding: Let floats be rounded to a narrower float.

        Raises:
            TensorError: It is not of the space's structure, shapes or types.
        """
        if self.lanes is None:
            return [leaf.pack(_part(sample, leaf), rounding) for leaf in self.leaves]
        return [leaf.pack_lanes(_part(sample, leaf), self.lanes, rounding) for leaf in self.leaves]

    def split(self, batch: Any, num_envs: int) -> list[Column]:
        """Cut a batch of actions for `num_envs` slots into columns, casting where nothing but a float's digits are
        lost.

        Raises:
            InvalidActionError: It is not of the space's structure, shapes or types, or out of its range.
        """
        columns: list[Column] = []
        try:
            _check_structure(self.space, batch, self.name)
            for leaf in self.leaves:
                part = _part(batch, leaf)
                if leaf.kind in ("array", "scalar"):
                    _refuse_fractions(part, leaf)
                    array = leaf.pack_lanes(part, num_envs, rounding=True)
                    leaf.spec.check_range(array)
                    columns.append(array)
                    continue
                items = leaf.items(part, num_envs)
                for item in items:
                    leaf.check(item)
                columns.append(items)
        except TensorError as error:
            raise InvalidActionError(f"the actions are not {num_envs} of {self.space}: {error}") from error
        return columns

    def pack_action(self, action: Any) -> list[Array]:
        """Cut one action into the arrays of its tensors; casts and raises as `split`."""
        try:
            arrays = []
            _check_structure(self.space, action, self.name)
            for leaf in self.leaves:
                part = _part(action, leaf)
                if leaf.kind in ("array", "scalar"):
                    _refuse_fractions(part, leaf)
                else:
                    leaf.check(part)
                array = leaf.pack(part, rounding=True)
                leaf.spec.check_range(array)
                arrays.append(array)
        except TensorError as error:
            raise InvalidActionError(f"the action {action!r:.80} is not in {self.space}: {error}") from error
        return arrays

    def pack_columns(self, columns: Sequence[Column], slot: int) -> list[Array]:
        """Return the arrays of the tensors for the slot, or for the `lanes` slots, from `slot` on."""
        if self.lanes is None:
            return [
                np.asarray(column[slot]) if isinstance(column, np.ndarray) else leaf.pack(column[slot], rounding=True)
                for leaf, column in zip(self.leaves, columns, strict=True)
            ]
        stop = slot + self.lanes
        return [
            column[slot:stop]
            if isinstance(column, np.ndarray)
            else leaf.pack_lanes(column[slot:stop], self.lanes, True)
            for leaf, column in zip(self.leaves, columns, strict=True)
        ]

    def pack_leaf(self, index: int, sample: Any) -> Array:
        """Return the array of one tensor of `pack`, with rounding; raises as `pack`."""
        leaf = self.leaves[index]
        part = _part(sample, leaf)
        return leaf.pack(part, True) if self.lanes is None else leaf.pack_lanes(part, self.lanes, True)

    def unpack(self, arrays: Sequence[Array], *, check: bool = False) -> Any:
        """Return the sample, or the batch of `lanes` samples, that the arrays of its tensors make up.

        Args:
            arrays: Of each spec's shape and dtype.
            check: Look whether texts, sequences and encoded values are in their space, which no spec says.

        Raises:
            TensorError: A part does not fit its dtype, is of another structure, or not in its space.
        """
        if self.lanes is None:
            parts = [leaf.unpack(array) for leaf, array in zip(self.leaves, arrays, strict=True)]
            for leaf, part in zip(self.leaves, parts, strict=True):
                if check and leaf.kind not in ("array", "scalar"):
                    leaf.check(part)
            return parts[0] if self.single else _assemble(self.space, iter(parts))
        columns = self.columns(self.lanes)
        for index, array in enumerate(arrays):
            self.write(columns, index, 0, array)
        for leaf, column in zip(self.leaves, columns, strict=True):
            if check and isinstance(column, list):
                for item in column:
                    leaf.check(item)
        return self.batch(columns)

    def columns(self, num_envs: int) -> list[Column]:
        """Make room for the samples of `num_envs` slots; numbers are not initialized."""
        return [
            np.empty((num_envs, *leaf.spec.shape), leaf.space.dtype)
            if leaf.kind in ("array", "scalar")
            else [None] * num_envs
            for leaf in self.leaves
        ]

    def write(self, columns: list[Column], index: int, slot: int, array: Array) -> None:
        """Put what the tensor of leaf `index` holds into its column, from `slot` on; numbers by one copy.

        An array that fills the whole column, and that nobody else may write to, takes the column's place.
        """
        leaf, column = self.leaves[index], columns[index]
        if isinstance(column, np.ndarray):
            array = _narrow(array, column.dtype)
            if self.lanes == len(column) and leaf.kind == "array":
                flags = array.flags
                if flags.writeable and flags.aligned:  # the memory of a large message, which is read but once
                    columns[index] = array
                    return
        if self.lanes is None:
            column[slot] = array if isinstance(column, np.ndarray) else leaf.unpack(array)
        else:
            column[slot : slot + self.lanes] = leaf.unpack_lanes(array, self.lanes)

    def write_rows(self, columns: list[Column], index: int, slots: Any, arrays: Array) -> None:
        """Put the stacked tensors of leaf `index` of single environments into its column, which is an array."""
        column = columns[index]
        column[slots] = _narrow(arrays, column.dtype)  # type: ignore[union-attr]

    def batch(self, columns: Sequence[Column]) -> Any:
        """Return the columns as Gymnasium batches a space: arrays, dicts and tuples of arrays, tuples of the rest."""
        if self.single:
            column = columns[0]
            return column if isinstance(column, np.ndarray) else tuple(column)
        return _assemble(self.space, iter([c if isinstance(c, np.ndarray) else tuple(c) for c in columns]))

    def row(self, columns: Sequence[Column], slot: int) -> Any:
        """Return the sample of one slot; it shares no memory with the columns."""
        parts = [_row(leaf, column, slot) for leaf, column in zip(self.leaves, columns, strict=True)]
        return parts[0] if self.single else _assemble(self.space, iter(parts))


def _renamed(leaf: Leaf, name: str) -> Leaf:
    return dataclasses.replace(leaf, name=name, spec=dataclasses.replace(leaf.spec, name=name))


def _refuse_fractions(part: Any, leaf: Leaf) -> None:
    """Gymnasium's integer spaces hold no floats, also none without a fraction."""
    if leaf.spec.dtype.kind in "iu" and to_array(part).dtype.kind == "f":
        raise TensorError(f"{leaf.name!r}: expected integers ({leaf.space.dtype}), got {part!r:.80}")


def _row(leaf: Leaf, column: Column, slot: int) -> Any:
    if not isinstance(column, np.ndarray):
        return column[slot]
    return column[slot] if leaf.kind == "scalar" else np.array(column[slot])


def _widen(array: Array, spec: Spec) -> Array:
    return array if array.dtype == spec.dtype else array.astype(spec.dtype)


def _narrow(array: Array, dtype: Any) -> Array:
    """Undo `_widen`: what a peer sends may be too large for the narrow dtype (D-19)."""
    return array if array.dtype == dtype else cast(array, dtype, rounding=True)


def _check_structure(space: Space[Any], sample: Any, name: str) -> None:
    """Raise TensorError where a sample, or a batch of them, has other keys or another length than a Dict or Tuple."""
    if isinstance(space, spaces.Dict):
        if not isinstance(sample, Mapping) or set(sample) != set(space.spaces):
            got = f"the keys {list(sample)}" if isinstance(sample, Mapping) else f"{sample!r:.80}"
            raise TensorError(f"{name!r}: expected a dict with the keys {list(space.spaces)}, got {got}")
        for index, (key, item) in enumerate(space.spaces.items()):
            _check_structure(item, sample[key], f"{name}.{_key_name(key, index)}")
    elif isinstance(space, spaces.Tuple):
        if not isinstance(sample, (tuple, list, np.ndarray)) or len(sample) != len(space.spaces):
            raise TensorError(f"{name!r}: expected a tuple of {len(space.spaces)} parts, got {sample!r:.80}")
        for index, item in enumerate(space.spaces):
            _check_structure(item, sample[index], f"{name}.{index}")


def _texts(value: Any, shape: tuple[int, ...], name: str) -> Array:
    array = np.empty(shape, dtype=object)
    array[...] = value
    for item in array.ravel():
        if not isinstance(item, str):
            raise TensorError(f"{name!r}: expected text, got {item!r:.80} of type {type(item).__name__}")
    return array


def _part(sample: Any, leaf: Leaf) -> Any:
    for key in leaf.path:
        try:
            sample = sample[key]
        except (KeyError, IndexError, TypeError) as error:
            got = f"keys {sorted(map(str, sample))}" if isinstance(sample, Mapping) else f"{sample!r:.80}"
            raise TensorError(f"{leaf.name!r}: expected something with the key {key!r}, got {got}") from error
    return sample


def _assemble(space: Space[Any], parts: Iterator[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _assemble(item, parts) for key, item in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_assemble(item, parts) for item in space.spaces)
    return next(parts)


def _leaves(space: Space[Any], name: str, path: tuple[Any, ...], lanes: int | None) -> Iterator[Leaf]:
    if isinstance(space, spaces.Dict):
        for index, (key, item) in enumerate(space.spaces.items()):
            yield from _leaves(item, f"{name}.{_key_name(key, index)}", (*path, key), lanes)
        return
    if isinstance(space, spaces.Tuple):
        for index, item in enumerate(space.spaces):
            yield from _leaves(item, f"{name}.{index}", (*path, index), lanes)
        return
    kind, spec = _leaf_spec(space, name)
    if lanes is None:
        yield Leaf(name, space, path, kind, spec, None)
    elif kind in ("array", "scalar", "text"):
        yield Leaf(name, space, path, kind, spec, spec.batched(lanes))
    else:
        encoded = Spec.number(name, (-1,), _BYTES)
        yield Leaf(name, space, path, "encoded", encoded, encoded)


def _leaf_spec(space: Space[Any], name: str) -> tuple[str, Spec]:
    if isinstance(space, TensorSpace):
        return "tensor", dataclasses.replace(space.spec, name=name)
    if isinstance(space, spaces.Discrete):
        low, high = int(space.start), int(space.start) + int(space.n) - 1
        return "scalar", Spec.number(name, (), space.dtype, np.asarray(low), np.asarray(high))
    if isinstance(space, _ARRAYS):
        return "array", Spec.number(name, space.shape, space.dtype, *_bounds(space))
    if isinstance(space, spaces.Text):
        return "text", Spec.text(name, ())
    if isinstance(space, spaces.Sequence):
        feature = space.feature_space
        if isinstance(feature, spaces.Text) and not space.stack:
            return "sequence", Spec.text(name, (-1,))
        if isinstance(feature, (*_ARRAYS, spaces.Discrete)) and 0 not in (feature.shape or ()):
            # Only scalar ranges are allowed beside a variable dimension (D-20).
            bounds = [b if (b == b.flat[0]).all() else None for b in map(np.asarray, _bounds(feature))]
            return "sequence", Spec.number(name, (-1, *(feature.shape or ())), feature.dtype, *bounds)
    return "encoded", Spec.number(name, (-1,), _BYTES)


def _bounds(space: Space[Any]) -> tuple[Array, Array]:
    """The inclusive bounds of a space of numbers."""
    if isinstance(space, spaces.Box):
        return space.low, space.high
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + (space.nvec - 1)
    if isinstance(space, spaces.Discrete):
        return np.asarray(int(space.start)), np.asarray(int(space.start) + int(space.n) - 1)
    return np.zeros(space.shape or (), np.int8), np.ones(space.shape or (), np.int8)


def _key_name(key: Any, index: int) -> str:
    if not isinstance(key, str):
        return f"%[{index}]"
    return key.replace("%", "%25").replace(".", "%2E") or "%_"


def _to_plain(space: Space[Any], sample: Any) -> Any:
    """A sample as something that the values codec carries."""
    if isinstance(space, spaces.Dict):
        return [_to_plain(item, sample[key]) for key, item in space.spaces.items()]
    if isinstance(space, spaces.Tuple):
        return [_to_plain(item, part) for item, part in zip(space.spaces, sample, strict=True)]
    if isinstance(space, spaces.OneOf):
        index, part = sample
        return [int(index), _to_plain(space.spaces[int(index)], part)]
    if isinstance(space, spaces.Graph):
        return [None if part is None else np.asarray(part) for part in (sample.nodes, sample.edges, sample.edge_links)]
    if isinstance(space, spaces.Sequence):
        if space.stack:
            return _to_plain_batch(space.feature_space, sample)
        return [_to_plain(space.feature_space, part) for part in sample]
    if isinstance(space, spaces.Text):
        return sample
    if isinstance(space, spaces.Discrete):
        return cast(sample, space.dtype)[()]
    return cast(sample, space.dtype, rounding=True)


def _from_plain(space: Space[Any], plain: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _from_plain(item, part) for (key, item), part in zip(space.spaces.items(), plain, strict=True)}
    if isinstance(space, spaces.Tuple):
        return tuple(_from_plain(item, part) for item, part in zip(space.spaces, plain, strict=True))
    if isinstance(space, spaces.OneOf):
        return np.int64(plain[0]), _from_plain(space.spaces[plain[0]], plain[1])
    if isinstance(space, spaces.Graph):
        return GraphInstance(*plain)
    if isinstance(space, spaces.Sequence):
        if space.stack:
            return _from_plain_batch(space.feature_space, plain)
        return tuple(_from_plain(space.feature_space, part) for part in plain)
    return plain


def _to_plain_batch(space: Space[Any], batch: Any) -> Any:
    """A batch as `gymnasium.vector.utils.batch_space` describes it."""
    if isinstance(space, spaces.Dict):
        return [_to_plain_batch(item, batch[key]) for key, item in space.spaces.items()]
    if isinstance(space, spaces.Tuple):
        return [_to_plain_batch(item, part) for item, part in zip(space.spaces, batch, strict=True)]
    if isinstance(space, (*_ARRAYS, spaces.Discrete)):
        return np.asarray(batch)
    return [_to_plain(space, part) for part in batch]


def _from_plain_batch(space: Space[Any], plain: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {
            key: _from_plain_batch(item, part) for (key, item), part in zip(space.spaces.items(), plain, strict=True)
        }
    if isinstance(space, spaces.Tuple):
        return tuple(_from_plain_batch(item, part) for item, part in zip(space.spaces, plain, strict=True))
    if isinstance(space, (*_ARRAYS, spaces.Discrete)):
        return plain
    return tuple(_from_plain(space, part) for part in plain)


def space_from_specs(specs: Iterable[Spec], root: str) -> Space[Any]:
    """Make a space of the specs of a server that does not tell its own (D-24).

    Nested names become Dict spaces, a bounded integer a Discrete, other numbers a Box, text a Text, a variable leading
    dimension a Sequence, and what none of these holds a `TensorSpace`. A single spec named `root` is the space itself.

    Raises:
        TensorError: A name is both a leaf and a level (`a` and `a.b`), or a spec has no space.
    """
    tree: dict[str, Any] = {}
    for spec in specs:
        *levels, last = spec.name.split(".")
        node = tree
        for level in levels:
            node = node.setdefault(level, {})
            if not isinstance(node, dict):
                raise TensorError(f"the spec name {spec.name!r} nests below {level!r}, which is a tensor itself")
        if last in node:
            raise TensorError(f"the spec name {spec.name!r} is given twice, or is a level of nesting too")
        node[last] = spec
    return _space_of(tree[root] if list(tree) == [root] and isinstance(tree[root], Spec) else tree)


def _space_of(node: Any) -> Space[Any]:
    if isinstance(node, dict):
        return spaces.Dict([(key, _space_of(item)) for key, item in node.items()])
    spec: Spec = node
    try:
        return _space_of_spec(spec)
    except (AssertionError, OverflowError, ValueError) as error:
        if isinstance(error, TensorError):
            raise
        raise TensorError(f"the spec {spec.name!r} ({spec.describe()}) has no space: {error}") from error


def _space_of_spec(spec: Spec) -> Space[Any]:
    if spec.data_type == pb.PROTO or -1 in spec.shape[1:] or (spec.data_type == pb.STRING and len(spec.shape) > 1):
        return TensorSpace(spec)
    if spec.shape[:1] == (-1,):
        feature = _space_of(dataclasses.replace(spec, shape=spec.shape[1:]))
        if isinstance(feature, spaces.Box) and not feature.shape:
            return TensorSpace(spec)  # Gymnasium warns at every look at a stacked Sequence of such
        return spaces.Sequence(feature, stack=spec.data_type != pb.STRING)
    if spec.data_type == pb.STRING:
        text = spaces.Text(4096, min_length=0, charset=string.printable)
        return spaces.Sequence(text) if spec.shape else text
    if spec.dtype.kind == "b":
        return spaces.Box(0, 1, spec.shape, np.bool_)
    if spec.dtype.kind in "iu":
        limits = np.iinfo(spec.dtype)
        low = np.asarray(limits.min if spec.minimum is None else spec.minimum)
        high = np.asarray(limits.max if spec.maximum is None else spec.maximum)
        if not spec.shape and int(high) - int(low) < min(_MAX_DISCRETE, limits.max):
            return spaces.Discrete(int(high) - int(low) + 1, start=int(low), dtype=spec.dtype.type)
    else:
        low = np.asarray(-np.inf if spec.minimum is None else spec.minimum)
        high = np.asarray(np.inf if spec.maximum is None else spec.maximum)
    full = [np.broadcast_to(bound, spec.shape).astype(spec.dtype) for bound in (low, high)]
    return spaces.Box(full[0], full[1], spec.shape, spec.dtype.type)
