"""Batches of observations: nested dicts of stacked arrays, and lists of texts; a row is one observation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bridge.errors import SettingError
from bridge.policies.wire import OBSERVATION, WireError

__all__ = ["as_map", "by_rows", "from_map", "join", "layout", "row_count", "take", "with_rows"]


def take(batch: Any, rows: Any) -> Any:
    """Return some rows of a batch, by a slice or their numbers; a single number gives one observation."""
    if isinstance(batch, dict):
        return {key: take(value, rows) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        chosen = np.arange(len(batch))[rows]
        return batch[chosen] if np.ndim(chosen) == 0 else [batch[at] for at in chosen]
    return np.asarray(batch)[rows]


def join(batches: Sequence[Any]) -> Any:
    """Return batches of one layout as one, one after the other."""
    first = batches[0]
    if isinstance(first, dict):
        return {key: join([batch[key] for batch in batches]) for key in first}
    if isinstance(first, list):
        return [item for batch in batches for item in batch]
    return first if len(batches) == 1 else np.concatenate(batches)


def with_rows(observation: Any) -> Any:
    """Return a batch of one observation."""
    if isinstance(observation, dict):
        return {key: with_rows(value) for key, value in observation.items()}
    return [observation] if isinstance(observation, (str, bytes)) else np.asarray(observation)[None]


def row_count(batch: Any) -> set[int]:
    """Return the lengths of a batch's parts: exactly one where it is a batch."""
    if isinstance(batch, dict):
        return set().union(*(row_count(value) for value in batch.values()))
    if isinstance(batch, np.ndarray):
        return {batch.shape[0] if batch.ndim else -1}
    return {len(batch) if isinstance(batch, (list, tuple)) else -1}


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
    if not isinstance(observation, dict):
        return {OBSERVATION: observation if isinstance(observation, (str, list)) else np.asarray(observation)}
    return dict(observation)


def from_map(message: dict[str, Any]) -> Any:
    """Return the observation that a map of the wire holds."""
    return message[OBSERVATION] if set(message) == {OBSERVATION} else message


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
