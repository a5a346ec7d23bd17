"""Encode long lists of similar items, such as the infos of a batch, as columns.

A separate value takes a reader some microseconds, and memory many times its bytes. An item of a column takes a
fraction of that: numbers, arrays of one shape and strings are read in one call, and so are the parts of dicts, lists
and tuples with the same keys or the same length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from bridge.errors import TensorError
from bridge.pb import bridge_pb2 as pb

__all__ = ["PLAIN_KINDS", "fill_column", "read_column"]

PLAIN_KINDS = "biufcUSMm"
"""Dtype kinds with plain bytes as elements: bools, integers, floats, complex, fixed text and bytes, dates, spans."""

# Shorter lists are sent item by item: a column takes some ten bytes, and the time of about ten values.
_FEWEST = 16
# A row refers to its form by one byte.
_MOST_FORMS = 255
# For fewer rows a column costs more than separate values.
_ROWS_A_COLUMN = 4
_DICT, _LIST, _TUPLE = pb.Value.Form.DICT, pb.Value.Form.LIST, pb.Value.Form.TUPLE
_ROWS = {dict: _DICT, list: _LIST, tuple: _TUPLE}

Fill: TypeAlias = Callable[[pb.Value, list[Any]], None]
"""Fills in the message of a list."""


def fill_column(column: pb.Value.Column, items: Sequence[Any], fill_array: Callable[..., None], fill: Fill) -> bool:
    """Fill in a column, except `is_tuple`. Return False, and change nothing, if the items are not similar.

    Args:
        column: The message.
        items: The items of the column.
        fill_array: Fills in the message of an array.
        fill: Fills in the lists of the parts of dicts, lists and tuples.

    Raises:
        TensorError: A part of a dict, a list or a tuple cannot be sent.
    """
    if len(items) < _FEWEST:
        return False
    # By exact type: an instance of a subclass, such as an IntEnum or np.float64, would be read as the base class.
    kinds = set(map(type, items))
    if kinds <= _ROWS.keys():
        if _fill_rows(column, items, fill):
            column.objects = len(items)
            return True
        return False
    elif len(kinds) > 1:
        return False
    elif kinds <= {float, int, bool}:
        if (numbers := _numbers(items)) is None:
            return False
        fill_array(column.numbers, numbers)
    elif kinds == {str}:
        joined = "".join(items)
        if not _is_text(joined):
            return False
        column.texts.joined = joined
        fill_array(column.texts.lengths, _narrow(np.fromiter(map(len, items), np.int64, len(items))))
    elif kinds == {type(None)}:
        column.nones = bytes(len(items))
    elif issubclass(type(items[0]), np.generic) or kinds == {np.ndarray}:
        if len({(item.dtype, item.shape) for item in items}) > 1:
            return False
        # An item without bytes could not be counted by its bytes.
        if items[0].dtype.kind not in PLAIN_KINDS or not items[0].nbytes:
            return False
        fill_array(column.arrays, np.stack(items))
        column.arrays.is_scalar = kinds != {np.ndarray}
        if not column.arrays.is_scalar:
            column.objects = len(items)
            return True
    else:
        return False
    column.count = len(items)
    return True


def _is_text(text: str) -> bool:
    """True if UTF-8 can encode a text: it has no lone surrogates. Sent as a separate value, such a text is an error."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _fill_rows(column: pb.Value.Column, rows: Sequence[Any], fill: Fill) -> bool:
    # For each form, its index and its rows.
    forms: dict[Any, list[Any]] = {}
    form_of = []
    for row in rows:
        key = (type(row), tuple(row) if type(row) is dict else len(row))
        form_of.append(forms.setdefault(key, [len(forms)])[0])
        forms[key].append(row)
        if len(forms) > _MOST_FORMS:
            return False
    sizes = [len(key) if kind is dict else key for kind, key in forms]
    if sum(sizes) * _ROWS_A_COLUMN > len(rows):
        return False
    names = [name for kind, key in forms if kind is dict for name in key]
    if not all(type(name) is str and _is_text(name) for name in names):
        return False
    column.rows.form_of = bytes(form_of)
    for (kind, key), (_, *alike) in forms.items():
        form = column.rows.forms.add(kind=_ROWS[kind])
        form.keys.extend(key if kind is dict else ())
        for name in key if kind is dict else range(key):
            fill(form.columns.add(), [row[name] for row in alike])
    return True


def _numbers(items: Sequence[Any]) -> Any:
    """Return an array of floats, ints or bools; None for ints that do not fit 64 bits."""
    kind = type(items[0])
    if kind is not int:
        return np.array(items, np.bool_ if kind is bool else np.float64)
    try:
        return _narrow(np.array(items, np.int64))
    except OverflowError:
        return None


def _narrow(numbers: Any) -> Any:
    """Return integers in the smallest dtype that holds them."""
    return numbers.astype(np.result_type(*map(_smallest, (numbers.min(), numbers.max()))))


def _smallest(number: Any) -> Any:
    kinds = np.int8, np.int16, np.int32, np.int64
    return next(kind for kind in kinds if np.iinfo(kind).min <= number <= np.iinfo(kind).max)


def read_column(column: pb.Value.Column, read_array: Callable[..., Any], read: Callable[[pb.Value], Any]) -> list[Any]:
    """Return the items of a column.

    Args:
        column: The message, which is not trusted.
        read_array: Returns the array of a message.
        read: Returns the value of a message.

    Raises:
        TensorError: The column has another number of items than it declares, or an invalid item.
    """
    kind = column.WhichOneof("items")
    if kind == "numbers":
        numbers = _counted(read_array(column.numbers), column.count)
        if numbers.ndim != 1 or numbers.dtype.kind not in "bif":
            raise TensorError(f"expected a column of numbers, got {numbers.dtype} of shape {numbers.shape}")
        return list(numbers.tolist())
    if kind == "arrays":
        is_scalar = column.arrays.is_scalar
        array = _counted(read_array(column.arrays), column.count if is_scalar else column.objects)
        if array.dtype == object or (is_scalar and array.ndim != 1):
            raise TensorError(f"expected a column of arrays, got {array.dtype} of shape {array.shape}")
        # Copied: a view that a reader keeps would keep the memory of all items.
        return list(array) if is_scalar else [array[index, ...].copy() for index in range(len(array))]
    if kind == "texts":
        return _read_texts(column, read_array)
    if kind == "rows":
        return _read_rows(column, read)
    if kind == "nones":
        return [None] * _same(len(column.nones), column.count)
    raise TensorError("expected the items of a column, got none")


def _same(found: int, count: int) -> int:
    """Return the number of items found, which must equal the number that was declared and checked before reading."""
    if found != count:
        raise TensorError(f"a column came with {found} items, and says that there are {count}")
    return found


def _counted(array: Any, count: int) -> Any:
    """Return an array whose first axis has the declared number of items, each of at least one byte."""
    _same(len(array) if np.ndim(array) else -1, count)
    if array.nbytes < count:
        raise TensorError(f"a column of {count} items came with {array.nbytes} bytes")
    return array


def _read_texts(column: pb.Value.Column, read_array: Callable[..., Any]) -> list[Any]:
    joined, lengths = column.texts.joined, _counted(read_array(column.texts.lengths), column.count)
    if lengths.ndim != 1 or lengths.dtype.kind != "i" or (lengths < 0).any() or (lengths > len(joined)).any():
        raise TensorError(f"expected the lengths of {len(joined)} characters, got {lengths!r:.80}")
    ends = lengths.astype(np.int64).cumsum().tolist()
    if (ends[-1] if ends else 0) != len(joined):
        raise TensorError(f"expected strings of {len(joined)} characters, got lengths of another sum")
    return [joined[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def _read_rows(column: pb.Value.Column, read: Callable[[pb.Value], Any]) -> list[Any]:
    forms, form_of = column.rows.forms, column.rows.form_of
    _same(len(form_of), column.objects)
    if form_of and max(form_of) >= len(forms):
        raise TensorError(f"expected rows of {len(forms)} forms, got one of number {max(form_of)}")
    found = [_rows_of(form, form_of.count(index), read) for index, form in enumerate(forms)]
    if len(found) == 1:
        return found[0]
    following = [iter(rows) for rows in found]
    return [next(following[index]) for index in form_of]


def _rows_of(form: pb.Value.Form, count: int, read: Callable[[pb.Value], Any]) -> list[Any]:
    """Return the rows of one form."""
    columns = [read(part) for part in form.columns]
    if any(type(part) is not list or len(part) != count for part in columns):
        raise TensorError(f"expected columns of {count} items, one for each row")
    # Rows without parts have no columns to combine.
    rows = zip(*columns, strict=True) if columns else [()] * count
    if form.kind == _LIST:
        return list(map(list, rows))
    if form.kind == _TUPLE:
        return list(rows)
    keys = list(form.keys)
    if form.kind != _DICT or len(keys) != len(columns):
        raise TensorError(f"dicts came with {len(keys)} keys and {len(columns)} columns")
    return [dict(zip(keys, row, strict=True)) for row in rows]
