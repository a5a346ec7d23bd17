"""Convert samples of Gymnasium spaces to tensors and back.

A `Layout` splits a space into leaves, each of which is one tensor. Box, Discrete, MultiBinary, MultiDiscrete and Text
are one leaf each. Dict and Tuple nest, with a `.` in the name for each level. A Sequence of numbers or texts is a leaf
whose first dimension varies. Spaces that no plain tensor holds (Graph, OneOf, a Sequence of composites) are one leaf of
uint8 bytes of the values codec.

A batch of samples is stored as columns, one for each leaf: an array with a leading dimension for the slots, or a list
if slots differ in shape.

Dict keys in names: `%` is written `%25`, `.` is `%2E`, the empty key `%_`, and the i-th key `%[i]` if it is no
string.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from gymnasium import Space, spaces
from gymnasium.error import CustomSpaceError

from bridge.core.encoding import values
from bridge.core.encoding.plain_values import apply_form, form_of, from_plain, is_text, to_plain
from bridge.core.encoding.tensors import Array, Spec, TensorSpace, cast, to_array
from bridge.errors import InvalidActionError, TensorError

__all__ = ["Column", "Layout", "Leaf", "bounds_of", "check_structure", "is_picture"]

Column: TypeAlias = "Array | list[Any]"
"""The values of one leaf over many slots: `(num_envs, *shape)`, or a list of `num_envs`."""

_ARRAYS = (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete)
_BYTES = np.dtype(np.uint8)
# The most bytes of an observation that is returned as a view of the array of all slots.
_SMALL_ROW = 1024
# The errors that splitting a sample of another structure can raise.
_MISFITS = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError, CustomSpaceError)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One tensor of a sample."""

    name: str
    """The tensor's name on the wire."""
    space: Space[Any]
    """The part of the space that the tensor holds."""
    path: tuple[Any, ...]
    """The keys from the whole sample to this part."""
    kind: str
    """`array`, `scalar`, `text`, `sequence`, `tensor` (as a foreign spec says), or `encoded` (the values codec)."""
    spec: Spec
    """The spec of a single sample's tensor."""
    lane_spec: Spec | None
    """The spec of a batch of `lanes` samples; None if the layout has no lanes."""

    def pack(self, part: Any, rounding: bool) -> Array:
        """Return the tensor's array for this part of a sample.

        Raises:
            TensorError: The part has another shape or type, or does not fit the dtype.
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
            # Integers are never rounded, even if the caller allows rounding.
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
        return np.frombuffer(values.encode(to_plain(self.space, part)), _BYTES)

    def _pack_sequence(self, part: Any, rounding: bool) -> Array:
        feature = self.space.feature_space  # type: ignore[attr-defined]
        if is_text(feature):
            return _texts(list(part), (len(part),), self.name)
        array = to_array(part)
        # NumPy makes an empty list float64 of shape (0,), whatever the items' type.
        if not array.size:
            array = np.empty((len(part), *feature.shape), feature.dtype)
        array = self._cast(array, feature.dtype, rounding)
        if array.shape[1:] != feature.shape:
            raise TensorError(f"{self.name!r}: expected items of the shape {feature.shape}, got {array.shape[1:]}")
        return _widen(array, self.spec)

    def unpack(self, array: Array) -> Any:
        """Return the part of a sample that a tensor's array holds.

        Raises:
            TensorError: The array does not fit the dtype, or holds an encoded value of another structure.
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
            return from_plain(self.space, plain)
        except _MISFITS as error:
            raise self._misfit(plain, error) from error

    def check(self, part: Any) -> None:
        """Raise TensorError if a part is not in the space."""
        try:
            inside = self.space.contains(part)
        except _MISFITS:
            inside = False
        if not inside:
            raise TensorError(f"{self.name!r}: expected an element of {self.space}, got {part!r:.80}")

    def _unpack_sequence(self, array: Array) -> Any:
        feature, stack = self.space.feature_space, self.space.stack  # type: ignore[attr-defined]
        if is_text(feature):
            return tuple(array.tolist())
        array = _narrow(array, feature.dtype)
        if stack:
            return array
        if isinstance(feature, spaces.Discrete):
            return tuple(feature.dtype.type(item) for item in array)
        # Copy each part, so that a part that is kept does not keep the whole array. `[i, ...]` gives an array where
        # `[i]` gives a scalar.
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
            return np.frombuffer(values.encode([to_plain(self.space, item) for item in items]), _BYTES)
        except TensorError:
            raise
        except _MISFITS as error:
            raise self._misfit(part, error) from error

    def items(self, part: Any, count: int) -> list[Any]:
        """Return this part of a batch as a list of `count` items; raises as `pack`."""
        # A str would count as a list of characters, and an array of shape () has no length.
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

    def read_item(self, item: Any) -> Any:
        """Return the sample of a lane from an item of an encoded list; raises TensorError if the item is no sample."""
        if self.kind != "text":
            return self._decode(item)
        if not isinstance(item, str):
            raise TensorError(f"{self.name!r}: expected text, got {item!r:.80}")
        return item

    def pick_lanes(self, arrays: Sequence[Array]) -> Array:
        """Return the tensor's array of a batch whose lane i is lane i of the batch in `arrays[i]`."""
        if self.kind in ("array", "scalar", "text"):
            return np.stack([array[lane] for lane, array in enumerate(arrays)])
        # Many lanes share one batch: decode each batch once.
        decoded = {id(array): values.decode(array.tobytes()) for array in arrays}
        items = [decoded[id(array)][lane] for lane, array in enumerate(arrays)]
        return np.frombuffer(values.encode(items), _BYTES)


class Layout:
    """How samples of a space are split into tensors.

    Args:
        space: A space of Gymnasium's own kinds.
        name: The name of the root: `observation` or `action`.
        lanes: The number of lanes where a world steps several at once; None for a single environment.
        foreign: True if the space was made from a third-party server's specs: names have no root and no escapes.

    Raises:
        TensorError: A dtype cannot be sent.
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
        # Batches have no forms: Gymnasium's vector environments also use the space's order of keys and its dtypes.
        self.has_forms = lanes is None and any(leaf.kind == "scalar" or leaf.path for leaf in self.leaves)
        self._encoded = [index for index, leaf in enumerate(self.leaves) if leaf.kind == "encoded"]
        first = self.leaves[0] if self.single else None
        holds_numbers = first is not None and first.kind in ("array", "scalar")
        self._batch_dtype: Any = first.space.dtype if first is not None and lanes and holds_numbers else None
        """The dtype of a batch of lanes that is one array; None: the batch is not one array."""
        self.is_array = first is not None and first.kind == "array" and first.spec.dtype == first.space.dtype
        """True if a sample is the array of its tensor, so that `unpack` changes nothing."""

    def pack(self, sample: Any, *, rounding: bool = False) -> list[Array]:
        """Split a sample, or a batch of `lanes` samples, into the arrays of its tensors.

        Args:
            sample: A sample of the space; for a layout with lanes a batch of them, as Gymnasium batches.
            rounding: Whether floats may be rounded to a narrower float.

        Raises:
            TensorError: The sample does not have the space's structure, shapes or types.
        """
        if self.lanes is None:
            return [leaf.pack(_part(sample, leaf), rounding) for leaf in self.leaves]
        return [leaf.pack_lanes(_part(sample, leaf), self.lanes, rounding) for leaf in self.leaves]

    def split(self, batch: Any, num_envs: int) -> list[Column]:
        """Split a batch of actions for `num_envs` slots into columns. Casts may lose only digits of floats.

        Raises:
            InvalidActionError: The batch does not have the space's structure, shapes or types, or is out of its range.
        """
        columns: list[Column] = []
        try:
            # Missing keys are found below, but extra keys are not.
            if not self.single:
                check_structure(self.space, batch, self.name)
            for leaf in self.leaves:
                part = _part(batch, leaf) if leaf.path else batch
                if leaf.kind in ("array", "scalar"):
                    spec = leaf.spec
                    # Instances of subclasses, such as masked arrays, take the slower path.
                    exact = type(part) is np.ndarray and part.dtype == leaf.space.dtype == spec.dtype
                    if exact and part.shape == (num_envs, *spec.shape):  # the usual case: nothing to cast
                        array = part
                    else:
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
            raise InvalidActionError(f"the actions are not {num_envs} of {self.space}: {error}") from None
        return columns

    def pack_action(self, action: Any) -> list[Array]:
        """Split one action into the arrays of its tensors; casts and raises as `split`."""
        try:
            arrays = []
            check_structure(self.space, action, self.name)
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
            raise InvalidActionError(f"the action {action!r:.80} is not in {self.space}: {error}") from None
        return arrays

    def pack_columns(self, columns: Sequence[Column], slot: int) -> list[Array]:
        """Return the arrays of the tensors for the slot, or for the `lanes` slots, that begin at `slot`."""
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
        """Return the array of one tensor, with rounding; raises as `pack`."""
        leaf = self.leaves[index]
        part = _part(sample, leaf)
        return leaf.pack(part, True) if self.lanes is None else leaf.pack_lanes(part, self.lanes, True)

    def pack_rows(self, index: int, sample: Any, lanes: list[int]) -> bytes:
        """Return the rows of some lanes of one tensor of a batch, as `Value.Begun` holds them; raises as `pack`."""
        leaf = self.leaves[index]
        if leaf.kind in ("array", "scalar"):
            return self.pack_leaf(index, sample)[lanes].tobytes()
        items = leaf.items(_part(sample, leaf), self.lanes or 0)
        chosen = [items[lane] for lane in lanes]
        if leaf.kind == "text":
            return values.encode(leaf.pack_lanes(chosen, len(chosen), True).tolist())
        return leaf.pack_lanes(chosen, len(chosen), True).tobytes()

    def write_lanes(self, columns: list[Column], index: int, slots: list[int], rows: bytes) -> None:
        """Write the rows that `pack_rows` returned into some slots of the column of leaf `index`.

        Raises:
            TensorError: The bytes are not the rows of that many lanes, or not in the space.
        """
        leaf, column = self.leaves[index], columns[index]
        if isinstance(column, np.ndarray):
            shape, dtype = (len(slots), *leaf.spec.shape), leaf.spec.dtype
            if len(rows) != math.prod(shape) * dtype.itemsize:
                raise TensorError(f"{leaf.name!r}: expected {dtype} of the shape {shape}, got {len(rows)} bytes")
            array: Array = np.ndarray(shape, dtype, rows)
            if dtype.kind == "b" and (array.view(_BYTES) > 1).any():
                raise TensorError(f"{leaf.name!r}: expected bytes that are true or false")
            # One by one: for a few rows, such as the lanes that end in a step, indexing with a list takes five times as
            # long in NumPy.
            for slot, row in zip(slots, _narrow(array, column.dtype), strict=True):
                column[slot] = row
            return
        items = values.decode(rows)
        if not isinstance(items, list) or len(items) != len(slots):
            raise TensorError(f"{leaf.name!r}: expected a list of {len(slots)} values, got {items!r:.80}")
        for slot, item in zip(slots, items, strict=True):
            column[slot] = leaf.read_item(item)

    def form(self, sample: Any) -> Any:
        """Return what the space does not say about a sample: a Dict's order of keys, and which Discrete is an int.

        Returns:
            None if the sample is as the space says, otherwise a value for the codec.
        """
        return form_of(self.space, sample) if self.has_forms else None

    def note_type(self, index: int, sample: Any, notes: values.Notes) -> None:
        """Add a note if a single sample is no array of its space's dtype, although it arrives as one.

        Raises:
            TensorError: The sample has no such part.
        """
        leaf = self.leaves[index]
        if leaf.kind == "array" and self.lanes is None:
            part = _part(sample, leaf)
            got = part.dtype if type(part) is np.ndarray else type(part).__name__
            if type(part) is not np.ndarray or got != leaf.space.dtype:
                text = f"the environment's {leaf.name!r} is of type {got}, and comes as an array of {leaf.space.dtype}"
                notes.add(leaf.name, f"{text}, as its space says")

    def unpack(self, arrays: Sequence[Array], *, check: bool = False, form: Any = None) -> Any:
        """Return the sample, or the batch of `lanes` samples, from the arrays of its tensors.

        Args:
            arrays: The arrays, each of its spec's shape and dtype.
            check: Also check that texts, sequences and encoded values are in their space, which specs do not express,
                and that a client did not send more values than can be read quickly.
            form: The result of `form` for a single sample.

        Raises:
            TensorError: A part does not fit its dtype, has another structure, or is not in its space.
        """
        for index in self._encoded if check else ():
            values.check_count(arrays[index].tobytes(), most=values.MAX_VALUES_IN_ACTION * (self.lanes or 1))
        if self.lanes is None:
            parts = [leaf.unpack(array) for leaf, array in zip(self.leaves, arrays, strict=True)]
            for leaf, part in zip(self.leaves, parts, strict=True):
                if check and leaf.kind not in ("array", "scalar"):
                    leaf.check(part)
            sample = parts[0] if self.single else _assemble(self.space, iter(parts))
            return sample if form is None else apply_form(self.space, sample, form)
        if self._batch_dtype is not None:  # the usual case: the batch is the tensor itself
            array = arrays[0]
            if array.dtype == self._batch_dtype and (flags := array.flags).writeable and flags.aligned:
                return array
        columns = self.columns(self.lanes)
        for index, array in enumerate(arrays):
            self.write(columns, index, 0, array)
        for leaf, column in zip(self.leaves, columns, strict=True):
            if check and isinstance(column, list):
                for item in column:
                    leaf.check(item)
        return self.batch(columns)

    def columns(self, num_envs: int) -> list[Column]:
        """Allocate columns for the samples of `num_envs` slots; numbers are not initialized."""
        columns: list[Column] = []
        for leaf in self.leaves:
            is_array = leaf.kind in ("array", "scalar")
            columns.append(np.empty((num_envs, *leaf.spec.shape), leaf.space.dtype) if is_array else [None] * num_envs)
        return columns

    def write(self, columns: list[Column], index: int, slot: int, array: Array) -> None:
        """Write the tensor of leaf `index` into its column, starting at `slot`.

        An array that fills the whole column, and that no other code may write to, replaces the column without a copy.
        """
        leaf, column = self.leaves[index], columns[index]
        if isinstance(column, np.ndarray):
            array = _narrow(array, column.dtype)
            if self.lanes == len(column):
                flags = array.flags
                # An unaligned array, which can begin at any byte of a message, would be slower to read each time.
                if flags.writeable and flags.aligned:  # memory of a large message that nothing else uses
                    columns[index] = array
                    return
        if self.lanes is None:
            column[slot] = array if isinstance(column, np.ndarray) else leaf.unpack(array)
        else:
            column[slot : slot + self.lanes] = leaf.unpack_lanes(array, self.lanes)

    def write_rows(self, columns: list[Column], index: int, slots: Any, arrays: Array) -> None:
        """Write the stacked tensors of leaf `index` of single environments into its column, which is an array."""
        column = columns[index]
        column[slots] = _narrow(arrays, column.dtype)  # type: ignore[union-attr]

    def batch(self, columns: Sequence[Column]) -> Any:
        """Return the columns as Gymnasium batches the space: arrays, dicts and tuples of arrays, otherwise tuples."""
        if self.single:
            column = columns[0]
            return column if isinstance(column, np.ndarray) else tuple(column)
        return _assemble(self.space, iter([c if isinstance(c, np.ndarray) else tuple(c) for c in columns]))

    def row(self, columns: Sequence[Column], slot: int) -> Any:
        """Return the sample of one slot; it shares no memory with the columns."""
        if self.single:
            return _row(self.leaves[0], columns[0], slot)
        parts = [_row(leaf, column, slot) for leaf, column in zip(self.leaves, columns, strict=True)]
        return _assemble(self.space, iter(parts))

    def rows_of(self, columns: Sequence[Column], slots: list[int]) -> list[Any]:
        """Return the samples of some slots; they share no memory with the columns."""
        column = columns[0] if self.single else None
        if isinstance(column, np.ndarray) and column.ndim > 1:  # the same as `row`, in fewer calls
            return [column[slot].copy() for slot in slots]
        return [self.row(columns, slot) for slot in slots]

    def rows(self, columns: Sequence[Column], count: int) -> tuple[Any, ...]:
        """Return the samples of `count` slots.

        Small arrays are views of the column: copying each took ten times as long, and a view keeps little memory.
        """
        if self.single:
            column = columns[0]
            # Rows of a column of one dimension would be scalars, but samples are arrays of shape ().
            small = isinstance(column, np.ndarray) and column.ndim > 1 and column[0].nbytes <= _SMALL_ROW
            if small or self.leaves[0].kind == "scalar":
                return tuple(column)
        return tuple(self.row(columns, slot) for slot in range(count))


def _renamed(leaf: Leaf, name: str) -> Leaf:
    return dataclasses.replace(leaf, name=name, spec=dataclasses.replace(leaf.spec, name=name))


def _refuse_fractions(part: Any, leaf: Leaf) -> None:
    """Refuse floats, which Gymnasium's integer spaces do not contain, even whole ones such as 1.0."""
    if leaf.spec.dtype.kind in "iu" and to_array(part).dtype.kind == "f":
        raise TensorError(f"{leaf.name!r}: expected integers ({leaf.space.dtype}), got {part!r:.80}")


def _row(leaf: Leaf, column: Column, slot: int) -> Any:
    if not isinstance(column, np.ndarray):
        return column[slot]
    # A scalar is a copy already. An array would change with the next step.
    return column[slot] if leaf.kind == "scalar" else np.array(column[slot])


def _widen(array: Array, spec: Spec) -> Array:
    return array if array.dtype == spec.dtype else array.astype(spec.dtype)


def _narrow(array: Array, dtype: Any) -> Array:
    """Undo `_widen`: a value from a peer may be too large for the narrow dtype (D-19)."""
    return array if array.dtype == dtype else cast(array, dtype, rounding=True)


def check_structure(space: Space[Any], sample: Any, name: str) -> None:
    """Raise TensorError if a sample, or a batch, has other keys or another length than its Dict or Tuple."""
    if isinstance(space, spaces.Dict):
        if not isinstance(sample, Mapping) or set(sample) != set(space.spaces):
            got = f"the keys {list(sample)}" if isinstance(sample, Mapping) else f"{sample!r:.80}"
            raise TensorError(f"{name!r}: expected a dict with the keys {list(space.spaces)}, got {got}")
        for index, (key, item) in enumerate(space.spaces.items()):
            check_structure(item, sample[key], f"{name}.{_key_name(key, index)}")
    elif isinstance(space, spaces.Tuple):
        # An array of shape () has no length.
        size = len(sample) if isinstance(sample, (tuple, list, np.ndarray)) and np.iterable(sample) else -1
        if size != len(space.spaces):
            raise TensorError(f"{name!r}: expected a tuple of {len(space.spaces)} parts, got {sample!r:.80}")
        for index, item in enumerate(space.spaces):
            check_structure(item, sample[index], f"{name}.{index}")


def _texts(value: Any, shape: tuple[int, ...], name: str) -> Array:
    # dtype=object, because NumPy's own text dtype would cut off trailing NULs.
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
        # The parts are in the order of `_leaves`.
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
        # All lanes are one encoded list: no fixed shape would hold them.
        encoded = Spec.number(name, (-1,), _BYTES)
        yield Leaf(name, space, path, "encoded", encoded, encoded)


def _leaf_spec(space: Space[Any], name: str) -> tuple[str, Spec]:
    if isinstance(space, TensorSpace):
        return "tensor", dataclasses.replace(space.spec, name=name)
    if isinstance(space, spaces.Discrete):
        return "scalar", Spec.number(name, (), space.dtype, *bounds_of(space))
    if isinstance(space, _ARRAYS):
        return "array", Spec.number(name, space.shape, space.dtype, *bounds_of(space))
    if is_text(space):
        return "text", Spec.text(name, ())
    if isinstance(space, spaces.Sequence):
        feature = space.feature_space
        if is_text(feature) and not space.stack:
            return "sequence", Spec.text(name, (-1,))
        # The number of items is inferred from the number of elements, so each item needs at least one.
        if isinstance(feature, (*_ARRAYS, spaces.Discrete)) and 0 not in (feature.shape or ()):
            # Only scalar ranges are allowed with a variable dimension (D-20).
            bounds = [b if (b == b.flat[0]).all() else None for b in map(np.asarray, bounds_of(feature))]
            return "sequence", Spec.number(name, (-1, *(feature.shape or ())), feature.dtype, *bounds)
    return "encoded", Spec.number(name, (-1,), _BYTES)


def bounds_of(space: Space[Any]) -> tuple[Array, Array]:
    """Return the inclusive bounds of a space of numbers."""
    if isinstance(space, spaces.Box):
        return space.low, space.high
    if isinstance(space, spaces.MultiDiscrete):
        # The parentheses matter: `start + nvec` may be one more than the dtype holds.
        return space.start, space.start + (space.nvec - 1)
    if isinstance(space, spaces.Discrete):
        # Python's integers do not overflow.
        return np.asarray(int(space.start)), np.asarray(int(space.start) + int(space.n) - 1)
    return np.zeros(space.shape or (), np.int8), np.ones(space.shape or (), np.int8)


def is_picture(space: Space[Any]) -> bool:
    """True if samples are colour pictures: bytes of shape (height, width, 3)."""
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3 and space.shape[2] == 3


def _key_name(key: Any, index: int) -> str:
    # Named by position, because keys such as 1 and "1" need different names.
    if not isinstance(key, str):
        return f"%[{index}]"
    return key.replace("%", "%25").replace(".", "%2E") or "%_"
