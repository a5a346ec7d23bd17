"""Details of samples that their space does not have: the order of a Dict's keys, and which Discrete is a plain int.

A remote environment gives both as the local one does, so they travel beside the observations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gymnasium import Space, spaces

from bridge.errors import TensorError

__all__ = ["apply_form", "form_of"]

_PLAIN_TYPES: Mapping[Any, str] = {int: "int", bool: "bool"}


def form_of(space: Space[Any], sample: Any) -> Any:
    """Return what a space does not say of a sample, as the values codec carries it; None where nothing differs.

    Of a Dict it is the order of the sample's keys, of a Discrete whether the sample is Python's own int or bool.
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
    """Return a sample of a space as `form_of` said that it was.

    Raises:
        TensorError: The form is not one of the space.
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
        # The form comes from the network, and may name keys twice or not at all.
        if sorted(order) != list(range(len(keys))) or len(parts) != len(keys):
            raise ValueError("it is of other keys")
        return {keys[i]: apply_form(space[keys[i]], sample[keys[i]], parts[i]) for i in order}  # type: ignore[index]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise TensorError(f"the form {form!r:.80} is not one of {space}: {error!r}") from error
