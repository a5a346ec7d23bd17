"""The copyable fields of an environment that cannot be copied whole; a replay puts them back or compares them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bridge.states.copier import Copier, Kept, only_draws
from bridge.states.digest import digest_of, objects_in
from bridge.states.fields import dict_of, fields_of, is_trusted, module_of, slots_of
from bridge.states.graph import common_to
from bridge.states.layers import layers_of, titles
from bridge.states.refusal import CannotCopyError
from bridge.states.restorer import Restorer
from bridge.states.scan import Shared, code_in

__all__ = ["Fields", "put_fields", "take_fields"]


@dataclasses.dataclass(frozen=True)
class Fields:
    """The copyable fields of an environment."""

    kinds: list[type]
    """The classes of the layers."""
    fields: list[dict[str, Any]]
    """The copies, for each layer."""
    digests: list[dict[str, str]]
    """Digests of the fields' values, for each layer."""
    names: list[frozenset[str]]
    """The names of all fields, also of those that cannot be copied, for each layer."""
    apart: frozenset[int]
    """The layers that were copied whole and share no object with other layers."""
    size: int
    """The approximate memory use, in bytes."""
    common: Shared
    """What the environment's code shares with other environments."""
    digest: str
    """A digest of the shared values."""
    shared: Mapping[int, Any]


def take_fields(env: Any) -> Fields:
    """Copy the copyable fields of an environment.

    Raises:
        CannotCopyError: Its steps may change something that it shares with other environments.
    """
    layers = layers_of(env)
    index = {id(layer): number for number, layer in enumerate(layers)}
    found = _copied_fields(layers, {})
    kinds = [type(layer) for layer in layers]
    # Include the code of objects that cannot be copied, and of what they refer to.
    common, objects, digest = common_to(layers, code_in(layers), found[1].by_address)
    if found[1].met(objects):
        found = _copied_fields(layers, objects)
    fields, copier = found
    if common.unseeded:
        raise CannotCopyError(common.unseeded)
    if common.pixels and copier.draws:
        raise CannotCopyError("its code reads the pixels of what it draws, which are not replayed")
    copier.refuse_shared_closures(samples=common.samples)
    digests = [
        {
            name: digest_of([item], layers=index)
            for name, item in fields_of(layer)
            if name in own and not isinstance(own[name], Kept)
        }
        for layer, own in zip(layers, fields, strict=True)
    ]
    held = [_changeable(layer) for layer in layers]
    apart = {
        number
        for number, (layer, own) in enumerate(zip(layers, fields, strict=True))
        if len(own) == len(fields_of(layer))
        and not any(held[number] & other for place, other in enumerate(held) if place != number)
    }
    names = [frozenset(name for name, _ in fields_of(layer)) for layer in layers]
    return Fields(kinds, fields, digests, names, frozenset(apart), copier.size, common, digest, objects)


def _copied_fields(layers: Sequence[Any], shared: Mapping[int, Any]) -> tuple[list[dict[str, Any]], Copier]:
    copier = Copier(layers, shared)
    found: list[dict[str, Any]] = []
    for number, layer in enumerate(layers):
        found.append({})
        for name, value in fields_of(layer):
            with contextlib.suppress(CannotCopyError):
                found[-1][name] = copier.field(value, (str(number), name))
    return found, copier


def _changeable(layer: Any) -> set[int]:
    """Return the ids of a layer's mutable objects, except its spaces."""
    kept = list, dict, set, deque, bytearray, np.ndarray
    objects = objects_in(value for _, value in fields_of(layer))
    return {key for key, value in objects.items() if isinstance(value, kept) or not is_trusted(module_of(type(value)))}


def put_fields(saved: Fields, env: Any, *, whole: bool = False) -> None:
    """Put fields back into an environment.

    Args:
        saved: The result of `take_fields`.
        env: An environment with the same layers.
        whole: True: put back all fields of the layers in `apart`, and nothing else. False: put back fields that differ.

    Raises:
        CannotCopyError: The layers differ, or a field cannot be put back.
    """
    layers = layers_of(env)
    if [type(layer) for layer in layers] != saved.kinds:
        mine, theirs = titles(map(type, layers)), titles(saved.kinds)
        raise CannotCopyError(f"the state is of {theirs}, this environment is {mine}")
    index = {id(layer): number for number, layer in enumerate(layers)}
    copier = Restorer(layers, None, saved.shared)
    for number, (layer, own) in enumerate(zip(layers, saved.fields, strict=True)):
        living = dict(fields_of(layer))
        digests = saved.digests[number]
        if whole:
            names = [name for name in own if number in saved.apart and name in digests]
        else:
            names = [
                name
                for name in digests
                if name not in living or digest_of([living[name]], layers=index) != digests[name]
            ]
        for name in names:
            _set_field(layer, name, copier.field(own[name], (str(number), name)))
        for name, value in living.items():
            # Such as one that the first step of an episode has made; what draws stays with its environment.
            if not whole and name not in saved.names[number] and not only_draws(value):
                _drop_field(layer, name)


def _set_field(layer: Any, name: str, value: Any) -> None:
    if name not in slots_of(type(layer)) and dict_of(layer) is not None:
        dict_of(layer)[name] = value
    else:
        object.__setattr__(layer, name, value)


def _drop_field(layer: Any, name: str) -> None:
    if name not in slots_of(type(layer)) and dict_of(layer) is not None:
        del dict_of(layer)[name]
    else:
        object.__delattr__(layer, name)
