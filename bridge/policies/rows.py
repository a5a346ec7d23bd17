"""Batches of observations: nested dicts of stacked arrays, and lists of texts; a row is one observation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from bridge.errors import SettingError
from bridge.policies.wire import OBSERVATION, WireError

__all__ = ["as_map", "by_rows", "join", "layout", "row_count", "take", "with_rows"]


def _over_parts(function: Callable[..., Any], *batches: Any) -> Any:
    """Return a batch of what a function makes of the parts that batches of the same keys have in the same place."""
    if isinstance(batches[0], dict):
        return {key: _over_parts(function, *(batch[key] for batch in batches)) for key in batches[0]}
    return function(*batches)


def take(batch: Any, rows: Any) -> Any:
    """Return some rows of a batch, by a slice or their numbers; a single number gives one observation."""

    def chosen(part: Any) -> Any:
        if not isinstance(part, (list, tuple)):
            return np.asarray(part)[rows]
        numbers = np.arange(len(part))[rows]
        return [part[at] for at in numbers] if np.ndim(numbers) else part[numbers]

    return _over_parts(chosen, batch)


def join(batches: Sequence[Any]) -> Any:
    """Return batches of one layout as one, one after the other."""

    def joined(*parts: Any) -> Any:
        return list(chain(*parts)) if isinstance(parts[0], list) else np.concatenate(parts)

    return batches[0] if len(batches) == 1 else _over_parts(joined, *batches)


def with_rows(observation: Any) -> Any:
    """Return a batch of one observation."""
    return _over_parts(lambda part: [part] if isinstance(part, (str, bytes)) else np.asarray(part)[None], observation)


def row_count(batch: Any) -> set[int]:
    """Return the lengths of a batch's parts: exactly one where it is a batch."""
    if isinstance(batch, dict):
        return set().union(*(row_count(value) for value in batch.values()))
    return {len(batch) if isinstance(batch, (list, tuple)) or np.ndim(batch) else -1}


def layout(batch: Any) -> Any:
    """Return what two batches must have alike to be joined: the names, and each array's dtype and shape of a row."""
    if isinstance(batch, dict):
        return tuple((key, layout(batch[key])) for key in batch)
    if isinstance(batch, np.ndarray) and batch.dtype.kind != "O":
        return batch.dtype.str, batch.shape[1:]
    if isinstance(batch, list) and all(isinstance(item, (str, bytes)) for item in batch):
        return "text"
    raise WireError(f"expected observations of arrays, numbers and text, got a {type(batch).__name__}")


def as_map(observation: Any) -> dict[str, Any]:
    """Return an observation as the map that the wire carries: a dict is one, anything else its only entry."""
    return observation if isinstance(observation, dict) else {OBSERVATION: observation}


def by_rows(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a policy of batches that calls one of single observations for each row.

    Examples:
        >>> import numpy as np
        >>> from bridge.policies import by_rows
        >>> by_rows(lambda observation: int(observation.sum() > 0))(np.array([[1.0, 1.0], [-1.0, 0.0]]))
        array([1, 0])
    """

    def of_batch(batch: Any) -> Any:
        (count,) = row_count(batch)
        return np.stack([np.asarray(function(take(batch, row))) for row in range(count)])

    if not callable(function):
        raise SettingError(f"expected a policy that takes an observation, got a {type(function).__name__}")
    return of_batch
