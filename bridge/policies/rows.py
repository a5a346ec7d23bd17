"""Batches of observations: arrays with one row per observation, or nested dicts of them; text is an array, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bridge.errors import SettingError
from bridge.policies.wire import WireError

__all__ = ["by_rows", "check_policy", "join", "layout", "put", "row_count", "take"]


def _over_parts(function: Callable[..., Any], *batches: Any) -> Any:
    """Apply a function to corresponding parts of batches with the same keys, and return the batch of results."""
    if isinstance(batches[0], dict):
        return {key: _over_parts(function, *(batch[key] for batch in batches)) for key in batches[0]}
    return function(*batches)


def take(batch: Any, rows: Any) -> Any:
    """Return rows of a batch, selected by a slice or by numbers as in NumPy; a single number gives one observation.

    None turns one observation into a batch.
    """
    return _over_parts(lambda part: np.asarray(part)[rows], batch)


def put(batch: Any, rows: Sequence[int], part: Any) -> Any:
    """Write observations into some rows of a batch, in place, and return it."""

    def replaced(old: Any, new: Any) -> Any:
        if isinstance(old, np.ndarray):
            old[rows] = new
            return old
        # Gymnasium batches text as a tuple.
        found = list(old)
        for row, one in zip(rows, new, strict=True):
            found[row] = one
        return tuple(found)

    return _over_parts(replaced, batch, part)


def join(batches: Sequence[Any]) -> Any:
    """Concatenate batches of the same layout."""
    return batches[0] if len(batches) == 1 else _over_parts(lambda *parts: np.concatenate(parts), *batches)


def row_count(batch: Any) -> set[int]:
    """Return the set of lengths of a batch's parts; it has exactly one element if the batch is valid."""
    if isinstance(batch, dict):
        return set().union(*(row_count(part) for part in batch.values()))
    return {len(batch) if np.ndim(batch) else -1}


def layout(batch: Any) -> Any:
    """Return what must be equal in two batches to join them: the names, and each array's dtype and row shape."""

    def of_part(part: Any) -> Any:
        if part.dtype.kind not in "biufU":  # an array of bytes would lose trailing zeros
            raise WireError(f"expected observations of arrays, numbers and text, got an array of {part.dtype}")
        return part.dtype.type, part.shape[1:]

    return _over_parts(of_part, batch)


def check_policy(policy: Any) -> None:
    """Raise SettingError if a policy is not callable."""
    if not callable(policy):
        raise SettingError(f"expected a policy that takes observations, got {policy!r:.80}")


def by_rows(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a policy for batches that calls a policy for single observations once for each row.

    Examples:
        >>> import numpy as np
        >>> from bridge.policies import by_rows
        >>> by_rows(lambda observation: int(observation.sum() > 0))(np.array([[1.0, 1.0], [-1.0, 0.0]]))
        array([1, 0])
    """

    check_policy(function)

    def of_batch(batch: Any) -> Any:
        (count,) = row_count(batch)
        return np.stack([np.asarray(function(take(batch, row))) for row in range(count)])

    return of_batch
