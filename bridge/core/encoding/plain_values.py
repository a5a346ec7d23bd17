"""Encode samples of spaces that no plain tensor holds (Graph, OneOf, a Sequence of composites) as values of the codec.

A sample's form travels with it: what the space does not say, which is the order of a Dict's keys and which Discrete is
a plain int. So a remote environment returns both as the local one does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from gymnasium.spaces import GraphInstance

from bridge.core.encoding.tensors import cast
from bridge.errors import TensorError

__all__ = ["apply_form", "form_of", "from_plain", "is_text", "to_plain"]

_ARRAYS = (spaces.Box, spaces.MultiBinary, spaces.MultiDiscrete)


def is_text(space: Space[Any]) -> bool:
    """True if samples are strings: a Text, or a registered custom space."""
    return space.dtype is not None and space.dtype.kind == "U"


def to_plain(space: Space[Any], sample: Any) -> Any:
    """Return a sample as a value that the values codec can encode."""
    if isinstance(space, spaces.Dict):
        # Leave out the keys: both ends know them from the space, and the codec may not carry their types.
        return [to_plain(item, sample[key]) for key, item in space.spaces.items()]
    if isinstance(space, spaces.Tuple):
        return [to_plain(item, part) for item, part in zip(space.spaces, sample, strict=True)]
    if isinstance(space, spaces.OneOf):
        index, part = sample
        return [int(index), to_plain(space.spaces[int(index)], part)]
    if isinstance(space, spaces.Graph):
        edges = None if sample.edges is None else to_plain_batch(_required(space.edge_space), sample.edges)
        links = None if sample.edge_links is None else np.asarray(sample.edge_links)
        return [to_plain_batch(space.node_space, sample.nodes), edges, links]
    if isinstance(space, spaces.Sequence):
        if space.stack:
            return to_plain_batch(space.feature_space, sample)
        return [to_plain(space.feature_space, part) for part in sample]
    if is_text(space):
        return sample
    if isinstance(space, spaces.Discrete):
        return cast(sample, space.dtype)[()]
    return cast(sample, space.dtype, rounding=True)


def from_plain(space: Space[Any], plain: Any) -> Any:
    """Return the sample of a value that `to_plain` returned."""
    if isinstance(space, spaces.Dict):
        return {key: from_plain(item, part) for (key, item), part in zip(space.spaces.items(), plain, strict=True)}
    if isinstance(space, spaces.Tuple):
        return tuple(from_plain(item, part) for item, part in zip(space.spaces, plain, strict=True))
    if isinstance(space, spaces.OneOf):
        # The index is a NumPy integer, as in Gymnasium's samples.
        return np.int64(plain[0]), from_plain(space.spaces[plain[0]], plain[1])
    if isinstance(space, spaces.Graph):
        nodes, edges, links = plain
        return GraphInstance(
            from_plain_batch(space.node_space, nodes),
            None if edges is None else from_plain_batch(_required(space.edge_space), edges),
            links,
        )
    if isinstance(space, spaces.Sequence):
        if space.stack:
            return from_plain_batch(space.feature_space, plain)
        return tuple(from_plain(space.feature_space, part) for part in plain)
    return plain


def _required(space: Space[Any] | None) -> Space[Any]:
    if space is None:
        raise TypeError("expected no edges, for there is no edge space")
    return space


def to_plain_batch(space: Space[Any], batch: Any) -> Any:
    """Return a batch, as `gymnasium.vector.utils.batch_space` defines it, as a value for the codec."""
    if isinstance(space, spaces.Dict):
        return [to_plain_batch(item, batch[key]) for key, item in space.spaces.items()]
    if isinstance(space, spaces.Tuple):
        return [to_plain_batch(item, part) for item, part in zip(space.spaces, batch, strict=True)]
    if isinstance(space, (*_ARRAYS, spaces.Discrete)):
        return np.asarray(batch)
    return [to_plain(space, part) for part in batch]


def from_plain_batch(space: Space[Any], plain: Any) -> Any:
    if isinstance(space, spaces.Dict):
        batch = {
            key: from_plain_batch(item, part) for (key, item), part in zip(space.spaces.items(), plain, strict=True)
        }
        return {key: batch[key] for key in batch_keys(space)}
    if isinstance(space, spaces.Tuple):
        return tuple(from_plain_batch(item, part) for item, part in zip(space.spaces, plain, strict=True))
    if isinstance(space, (*_ARRAYS, spaces.Discrete)):
        return plain
    return tuple(from_plain(space, part) for part in plain)


def batch_keys(space: spaces.Dict) -> list[Any]:
    """The keys in the order of `gymnasium.vector.utils.batch_space`."""
    try:
        return sorted(space.spaces) if getattr(space, "sort_keys", True) else list(space.spaces)
    except TypeError:  # keys that cannot be compared
        return list(space.spaces)


_PLAIN_TYPES: Mapping[Any, str] = {int: "int", bool: "bool"}


def form_of(space: Space[Any], sample: Any) -> Any:
    """Return what a space does not say about a sample, as a value for the codec; None if nothing differs.

    For a Dict it is the order of the sample's keys, for a Discrete whether the sample is Python's own int or bool.
    """
    if isinstance(space, spaces.Discrete):
        return _PLAIN_TYPES.get(type(sample))
    if isinstance(space, spaces.Dict) and isinstance(sample, Mapping):
        keys = list(space.spaces)
        order = [keys.index(key) for key in sample if key in space.spaces]
        parts = [form_of(item, sample.get(key)) for key, item in space.spaces.items()]
        if order == sorted(order) and not any(parts):
            return None
        return [order, parts]
    if isinstance(space, spaces.Tuple) and isinstance(sample, (tuple, list)):
        parts = [form_of(item, part) for item, part in zip(space.spaces, sample, strict=False)]
        return [None, parts] if any(parts) else None
    return None


def apply_form(space: Space[Any], sample: Any, form: Any) -> Any:
    """Return a sample in the form that `form_of` returned for the original.

    Raises:
        TensorError: The form does not fit the space.
    """
    if form is None:
        return sample
    try:
        if isinstance(space, spaces.Discrete):
            return {"int": int, "bool": bool}[form](sample)
        order, parts = form
        if isinstance(space, spaces.Tuple):
            return tuple(apply_form(*each) for each in zip(space.spaces, sample, parts, strict=True))
        keys = list(space.spaces)  # type: ignore[attr-defined]
        # The form comes from the network, and may repeat or omit keys.
        if sorted(order) != list(range(len(keys))) or len(parts) != len(keys):
            raise ValueError("it is of other keys")
        return {keys[i]: apply_form(space[keys[i]], sample[keys[i]], parts[i]) for i in order}  # type: ignore[index]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise TensorError(f"the form {form!r:.80} is not one of {space}: {error!r}") from error
