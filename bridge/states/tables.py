"""Tables of pandas, which many environments hold and none of their steps changes: they stay, and are compared.

A table's memory is not copied: it may be large, and arrays that an environment has made of it are parts of it. As long
as it holds the same values, a living environment has the right one.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import numpy as np

from bridge.states.fields import dict_of, module_of

__all__ = ["array_digest", "is_table", "memory_of", "table_digest"]

_FIELDS = frozenset(
    (
        *("_is_copy", "_mgr", "_item_cache", "_attrs", "_flags", "_name", "_cacher"),
        *("_typ", "_metadata", "attrs"),  # after it was unpickled
    )
)
"""What each table has; an attribute of a user's is another one."""
_CELLS = frozenset((str, bytes, bool, int, float, type(None)))


def is_table(value: Any) -> bool:
    """True if a value is a `DataFrame`, a `Series` or an `Index` of pandas."""
    kind: Any = type(value)
    if module_of(kind).partition(".")[0] != "pandas":
        return False
    pandas = sys.modules["pandas"]
    return kind is pandas.DataFrame or kind is pandas.Series or issubclass(kind, pandas.Index)


def table_digest(value: Any) -> str:
    """Return a digest of what a table holds.

    Raises:
        ValueError: It holds what cannot be compared.
    """
    pandas = sys.modules["pandas"]
    made = hashlib.blake2b(digest_size=16)
    if isinstance(value, pandas.Index):
        parts, labels = [value], repr(value.names)
    elif not _FIELDS.issuperset(dict_of(value) or {}) or value.attrs:
        raise ValueError("it is a table with attributes of its own")
    elif isinstance(value, pandas.Series):
        parts, labels = [value, value.index], repr(value.name)
    else:
        parts = [*(value.iloc[:, place] for place in range(value.shape[1])), value.index, value.columns]
        labels = ""
    made.update(f"{type(value).__name__} {labels}".encode())
    for part in parts:
        for level in part.levels if isinstance(part, pandas.MultiIndex) else ():
            _refuse_objects(level)
        if not isinstance(part, pandas.MultiIndex):
            _refuse_objects(part)
        try:
            hashed = pandas.util.hash_pandas_object(part, index=False).to_numpy()
        except TypeError as error:
            raise ValueError(f"it is a table that cannot be compared: {error}") from error
        made.update(f"{part.dtype} {len(part)} {getattr(part, 'freq', '')}".encode() + hashed.tobytes())
    return made.hexdigest()


def _refuse_objects(part: Any) -> None:
    if part.dtype == object and not _CELLS.issuperset(map(type, part)):
        raise ValueError("it is a table of objects")


def memory_of(value: Any) -> list[np.ndarray[Any, Any]]:
    """Return the arrays that a table's values lie in."""
    pandas = sys.modules["pandas"]
    if isinstance(value, pandas.DataFrame):
        parts = [value.iloc[:, place].array for place in range(value.shape[1])]
        parts += [value.index.array, value.columns.array]
    else:
        parts = [value.array, *([value.index.array] if isinstance(value, pandas.Series) else ())]
    found: dict[int, Any] = {}
    for part in parts:
        array = np.asarray(part)
        while isinstance(array.base, np.ndarray):
            array = array.base
        found[id(array)] = array
    return list(found.values())


def array_digest(value: np.ndarray[Any, Any]) -> str:
    """Return a digest of an array that is a part of a table."""
    made = hashlib.blake2b(f"{value.dtype.str} {value.shape} {value.strides}".encode(), digest_size=16)
    made.update(repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes())
    return made.hexdigest()
