"""Copy the values of a snapshot into a living environment."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bridge.states.constants import ATOMS, IMMUTABLE, digest_function
from bridge.states.copier import DRAW_NOTHING, Bound, Copier, Kept, Layer, Nothing, Partial, only_draws
from bridge.states.fields import fields_of
from bridge.states.generators import seed_sequence
from bridge.states.refusal import CannotCopyError, place_name

__all__ = ["Restorer"]


class Restorer(Copier):
    """Copies the values of a snapshot for a living environment, whose layers replace the saved ones.

    Args:
        layers: The living layers.
        seed: Reseeds the generators; None: they go on.
        shared: Objects that are not copied, by id.
        pixels: True if pixels are part of the state: then objects that draw are restored too.
        own: The bit generator, in the snapshot, that a reset seeds; None: there is none.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        seed: int | None,
        shared: Mapping[int, Any],
        own: Any = None,
        *,
        pixels: bool = False,
    ) -> None:
        super().__init__(layers, shared, pixels=pixels)
        self._seed = seed
        self._own = own
        self._living_fields: dict[int, dict[str, Any]] = {}
        self.puts: list[tuple[Callable[[Any, int | None], None], Any]] = []

    def field(self, value: Any, path: tuple[str, ...]) -> Any:
        """Copy the value of an attribute of a layer. A living value that draws is kept."""
        living = self._living(path)
        if not self._pixels and type(living) not in DRAW_NOTHING and only_draws(living):
            return living
        made = self.copy(value, path)
        return None if made is Nothing else made

    def layer(self, index: int, own: Mapping[str, Any]) -> dict[str, Any]:
        """Copy all fields of a layer."""
        living, place = self._fields(index), str(index)
        found = {
            # A fast path: most fields are numbers and strings.
            name: value
            if type(value) in IMMUTABLE and type(living.get(name)) in DRAW_NOTHING
            else self.field(value, (place, name))
            for name, value in own.items()
        }
        # An environment that has not drawn yet gets no attribute for it: its code may use `hasattr`.
        return {
            name: item
            for name, item in found.items()
            if item is not None or name in living or not isinstance(own[name], Kept)
        }

    def _fields(self, index: int) -> dict[str, Any]:
        # Called for each field of a layer, so list the fields once.
        if index not in self._living_fields:
            self._living_fields[index] = dict(fields_of(self._layers[index]))
        return self._living_fields[index]

    def _living(self, path: tuple[str, ...]) -> Any:
        index, name, *more = path
        value = self._fields(int(index)).get(name)
        for each in more:
            value = dict(fields_of(value)).get(each)
        return value

    def _special(self, value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, Layer):
            return self._layers[value.index]
        if isinstance(value, Bound):
            return types.MethodType(value.function, self._layers[value.layer.index])
        if isinstance(value, Partial):
            function, args, keywords, fields = (self.copy(part, path) for part in value.parts)
            made = functools.partial(function, *args, **keywords)
            vars(made).update(fields)
            return made
        if isinstance(value, Kept):
            return self._kept(value)
        kind = type(value)
        if issubclass(kind, (types.FunctionType, types.ModuleType, type)):
            return value
        return self._atom(value, path) if issubclass(kind, ATOMS) else None

    def _kept(self, kept: Kept) -> Any:
        living = self._living(kept.path)
        if kept.kind is None and kept.own is None:
            # An environment that has not drawn yet has no such value. Inside another object it would be missing.
            if living is None and len(kept.path) > 2:
                text = f"{place_name(kept.path)} draws, and was saved of an environment that had drawn"
                raise CannotCopyError(f"{text}; draw with this one first")
            return Nothing if living is None else living
        if kept.kind is not None and type(living) is not kept.kind:
            raise CannotCopyError(f"{place_name(kept.path)} is no {kept.kind.__name__} in this environment")
        if kept.digest and kept.digest != digest_function(living, self._index, kept.path):
            raise CannotCopyError(f"{place_name(kept.path)} is a function that holds other values in this environment")
        if kept.own is not None:
            if why := kept.own.fits(living):
                raise CannotCopyError(f"{place_name(kept.path)} cannot be restored here: {why}")
            self.puts.append((kept.own.put, living))
        return living

    def _keep(self, value: Any, made: Any) -> Any:
        made = None if made is Nothing else made
        return super()._keep(value, made)

    def _sequence(self, value: Any, path: tuple[str, ...]) -> Any:
        if self._seed is None:
            return super()._sequence(value, path)
        return self._keep(value, seed_sequence(self._seed, path))

    def _same_generator(self, value: Any, path: tuple[str, ...]) -> Any:
        if self._seed is None or isinstance(value, np.random.Generator):
            return super()._same_generator(value, path)
        sequence = seed_sequence(self._seed, None if value is self._own else path)
        if isinstance(value, np.random.BitGenerator):
            return type(value)(sequence)
        if isinstance(value, np.random.RandomState):
            return np.random.RandomState(np.random.MT19937(sequence))
        made = super()._same_generator(value, path)
        made.seed(int(sequence.generate_state(2, np.uint64)[0]))
        return made
