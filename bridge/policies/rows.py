"""Batches of observations: arrays with a row for each observation, or nested dicts of such; text is an array, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bridge.errors import SettingError
from bridge.policies.wire import WireError

__all__ = ["by_rows", "check_policy", "join", "layout", "put", "row_count", "take"]


def _over_parts(function: Callable[..., Any], *batches: Any) -> Any:
    """Return a batch of what a function makes of the parts that batches of the same keys have in the same place."""
    if isinstance(batches[0], dict):
        return {key: _over_parts(function, *(batch[key] for batch in batches)) for key in batches[0]}
    return function(*batches)


def take(batch: Any, rows: Any) -> Any:
    """Return some rows of a batch, as NumPy's index: by a slice or numbers; a single number gives one observation.

    None makes a batch of one observation.
    """
    return _over_parts(lambda part: np.asarray(part)[rows], batch)


def put(batch: Any, rows: Sequence[int], part: Any) -> Any:
    """Return a batch with other observations in some rows; its arrays are written into."""

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
    """Return batches of one layout as one, one after the other."""
    return batches[0] if len(batches) == 1 else _over_parts(lambda *parts: np.concatenate(parts), *batches)


def row_count(batch: Any) -> set[int]:
    """Return the lengths of a batch's parts: exactly one where it is a batch."""
    if isinstance(batch, dict):
        return set().union(*(row_count(part) for part in batch.values()))
    return {len(batch) if np.ndim(batch) else -1}


def layout(batch: Any) -> Any:
    """Return what two batches must have alike to be joined: the names, and each array's type and shape of a row."""

    def of_part(part: Any) -> Any:
        if part.dtype.kind not in "biufU":  # an array of bytes would lose the zeros at their ends
            raise WireError(f"expected observations of arrays, numbers and text, got an array of {part.dtype}")
        return part.dtype.type, part.shape[1:]

    return _over_parts(of_part, batch)


def check_policy(policy: Any) -> None:
    """Raise SettingError where a policy cannot be called."""
    if not callable(policy):
        raise SettingError(f"expected a policy that takes observations, got {policy!r:.80}")


def by_rows(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a policy of batches that calls one of single observations for each row.

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
