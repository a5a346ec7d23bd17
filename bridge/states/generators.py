"""The random generators of an environment, wherever it holds them, and their seeds in a branch.

The environment's own generator is seeded as by a reset with the seed. The seeds of the others depend on their places,
not on how many there are: a space may get its generator late, such as when a vector environment asks for it.
"""

from __future__ import annotations

import functools
import gc
import random
import types
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import VectorWrapper

from bridge.states.fields import fields_of, held_by, is_trusted, module_of
from bridge.states.refusal import CannotCopyError, place_name

__all__ = ["bits_of_reset", "seed_generators", "seed_sequence"]

Place = tuple[str, ...]
"""The number of a layer, the name of its field, and the names from there to the value."""
_HOLDERS = ("collections", "functools", "gymnasium", "numpy", "pettingzoo", "types")
"""Trusted modules whose objects may hold a user's objects: spaces, environments, containers."""
_GENERATORS = (np.random.BitGenerator, np.random.RandomState, random.Random, np.random.SeedSequence)


def bits_of_reset(layers: Sequence[Any], fields: Sequence[Mapping[str, Any]]) -> Any:
    """Return the bit generator that a reset seeds; None: it does not exist yet.

    Args:
        layers: The environment and its wrappers.
        fields: The attributes of each of them.
    """
    wrappers = gymnasium.Wrapper, VectorWrapper
    base = next((at for at, layer in enumerate(layers) if not isinstance(layer, wrappers)), 0)
    own = fields[base].get("_np_random")
    return own.bit_generator if isinstance(own, np.random.Generator) else None


def seed_sequence(seed: int, place: Place | None) -> np.random.SeedSequence:
    """Return the seed sequence of a generator in a branch.

    Args:
        seed: The seed of the branch.
        place: The place of the generator; None: the generator that a reset seeds.
    """
    return np.random.SeedSequence(seed if place is None else [seed, zlib.crc32("\0".join(place).encode())])


def seed_generators(layers: Sequence[Any], seed: int) -> None:
    """Reseed the generators of an environment in place.

    Args:
        layers: The environment and its wrappers.
        seed: The seed of the branch.

    Raises:
        CannotCopyError: It holds a `SeedSequence`, which cannot be changed in place.
    """
    fields = [dict(fields_of(layer)) for layer in layers]
    own = bits_of_reset(layers, fields)
    found = list(_generators_of(layers, fields))
    for place, generator in found:
        if isinstance(generator, np.random.SeedSequence):
            text = f"{place_name(place)} is a SeedSequence, which cannot be seeded anew where it is"
            raise CannotCopyError(f"{text}: restore without a seed")
    for place, generator in found:
        sequence = seed_sequence(seed, None if generator is own else place)
        if isinstance(generator, random.Random):
            generator.seed(int(sequence.generate_state(2, np.uint64)[0]))
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(np.random.RandomState(np.random.MT19937(sequence)).get_state())
        else:
            # Through the pickle interface, which also sets the seed sequence that `spawn` uses.
            bits: Any = generator
            bits.__setstate__(type(bits)(sequence).__reduce__()[2])
    for layer in layers:
        if "_np_random_seed" in getattr(layer, "__dict__", {}):
            layer.__dict__["_np_random_seed"] = seed


def _generators_of(layers: Sequence[Any], fields: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Place, Any]]:
    """Yield each generator once, with its first place; for a NumPy generator, its bit generator.

    Places and order are the same as in `graph`, so that a branch is the same by copy and by replay.
    """
    waiting: list[tuple[Place, Any]] = [
        ((str(index), name), item) for index, own in enumerate(fields) for name, item in own.items()
    ]
    waiting.reverse()
    seen = {id(layer): layer for layer in layers}
    while waiting:
        place, value = waiting.pop()
        value = value.bit_generator if isinstance(value, np.random.Generator) else value
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, _GENERATORS):
            yield place, value
        else:
            waiting.extend(((*place, *name), part) for name, part in reversed(_parts_of(value)))


def _parts_of(value: Any) -> list[tuple[Place, Any]]:
    """Return the parts of a value that may hold a generator, by names that are equal in every environment."""
    kind = type(value)
    found: list[tuple[Place, Any]] = []
    if isinstance(value, (type, types.ModuleType)):
        return found
    if isinstance(value, dict):
        found = [((repr(key)[:40],), part) for key, part in dict.items(value)]
    elif isinstance(value, (list, tuple, deque)):
        found = [((str(number),), part) for number, part in enumerate(value)]
    elif isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            found = [((str(place),), value[place]) for place in np.ndindex(value.shape)]
    elif isinstance(value, types.FunctionType):
        found = [((str(number),), part) for number, part in enumerate(held_by(value))]
    elif isinstance(value, (types.MethodType, types.BuiltinMethodType)):
        found = [(("__self__",), value.__self__)]
    elif isinstance(value, types.GeneratorType):
        found = [] if value.gi_frame is None else [((name,), item) for name, item in value.gi_frame.f_locals.items()]
    elif isinstance(value, Iterator) and is_trusted(module_of(kind)):
        # Such as a `map`, or the result of `iter(function, sentinel)`.
        found = [((str(number),), part) for number, part in enumerate(gc.get_referents(value))]
    elif isinstance(value, functools.partial):
        found = [((), value.func), ((), value.args), ((), value.keywords)]
    elif isinstance(value, types.MappingProxyType):
        found = [((), dict(value))]
    if not is_trusted(module_of(kind)) or module_of(kind).partition(".")[0] in _HOLDERS:
        found += [((name,), item) for name, item in fields_of(value)]
    return found
