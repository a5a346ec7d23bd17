"""All that an environment is, copied field by field, and put back into an environment of the same kind.

`copy.deepcopy` asks each object how it is to be copied. Every environment of MuJoCo, Box2D and ALE, and many of users'
own, answer that by `gymnasium.utils.EzPickle`: with a new environment. It takes functions as they are, with what their
closures hold, and an array that is a part of another one becomes an array of its own. So here the fields are copied, by
rules for each type, and what has no rule is refused with the place where it was found: a state is right, or there is
none.

The environment and its wrappers, the *layers*, are not copied: their fields are, and are put back into the layers of a
living environment. So references to them stay right, and whatever draws stays with whom it draws for.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import logging
import pathlib
import random
import re
import sys
import types
import uuid
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from bridge.states.digest import digest_of, objects_in
from bridge.states.fields import dict_of, fields_of, held_by, impure, is_pure, is_trusted, module_of, slots_of
from bridge.states.generators import bits_of_reset, seed_sequence
from bridge.states.kinds import OwnWay, draws, own_way
from bridge.states.scan import Shared, code_in, shared_by
from bridge.states.sets import copied_set

__all__ = [
    "CannotCopyError",
    "EnvSnapshot",
    "Fields",
    "copied",
    "has_cells",
    "layers_of",
    "make_generators",
    "put_fields",
    "restore",
    "take",
    "take_fields",
]

_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range, slice,
    np.dtype, np.generic, enum.Enum, decimal.Decimal, fractions.Fraction, datetime.date, datetime.time,
    datetime.timedelta, datetime.tzinfo, pathlib.PurePath, uuid.UUID, re.Pattern, EnvSpec, property,
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.CodeType, logging.Logger,
)  # fmt: skip
"""Types whose objects nothing changes, or that all share; those of functions are looked at before."""
_BUILT_IN = frozenset((list, dict, tuple, set, frozenset, deque, OrderedDict, defaultdict))
"""Containers that are what they are."""
_MOST_DEEP = 200
"""How deep objects may lie in each other: deeper, Python's own stack would end."""


class CannotCopyError(Exception):
    """What an environment holds cannot be copied, or not put back: the message says what, and where it is."""


class _Layer:
    """Stands for a layer in a snapshot."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Kept:
    """Stands for what stays with the living environment, at the same place there.

    Args:
        path: The names of the attributes that lead there, from a layer.
        kind: Its type, which is compared; None: anything may be there, also nothing.
        digest: What it holds, which is compared; "" : what it holds decides nothing.
        own: What the object has saved of itself, to be put into the living one.
    """

    def __init__(
        self,
        path: tuple[str, ...],
        kind: type | None = None,
        digest: str = "",
        own: OwnWay | None = None,
    ) -> None:
        self.path, self.kind, self.digest, self.own = path, kind, digest, own


class EnvSnapshot:
    """The fields of all layers of an environment.

    Args:
        kinds: The classes of the layers.
        fields: The fields of each.
        size: About how many bytes of memory it takes.
        how: The ways by which its parts were saved: `copy`, and the environment's own.
        common: What the code that they run shares with other environments.
        shared: What classes and modules hold too, by its id: it is in the state as it is.
        digest: Of all that they hold.
    """

    def __init__(
        self,
        kinds: list[type],
        fields: list[dict[str, Any]],
        size: int,
        how: tuple[str, ...],
        common: Shared,
        shared: Mapping[int, Any],
        digest: str,
    ) -> None:
        self.kinds, self.fields, self.size, self.how = kinds, fields, size, how
        self.common, self.shared, self.digest = common, shared, digest


def layers_of(env: Any) -> list[Any]:
    """Return an environment's wrappers, the outermost first, the environment, and those that it holds as attributes."""
    found: list[Any] = []
    waiting: deque[Any] = deque([env])
    while waiting:
        layer = waiting.popleft()
        if any(layer is other for other in found):
            continue
        found.append(layer)
        waiting.extend(value for _, value in fields_of(layer) if isinstance(value, gymnasium.Env))
    return found


def make_generators(layers: Iterable[Any]) -> None:
    """Have environments make their generators, which they do at the first use, by chance: so the chance is known."""
    for layer in layers:
        if getattr(layer, "_np_random", layer) is None and not isinstance(layer, gymnasium.Wrapper):
            _ = layer.np_random


def take(env: Any, *more: Any) -> tuple[EnvSnapshot, tuple[Any, ...]]:
    """Copy all that an environment is.

    Args:
        env: The environment, with its wrappers.
        more: What is copied with it, such as its last observation, in which the same objects may be.

    Raises:
        CannotCopyError: It holds something that cannot be copied.
    """
    layers = layers_of(env)
    make_generators(layers)
    fields, copied, copier = _copies(layers, more, {})
    common, objects, digest = _common(layers, copier.code, copier.by_address)
    unseeded = copier.unseeded if common.samples else []
    for space in unseeded:
        _ = space.np_random
    if unseeded or copier.met(objects):
        # What a class or a module holds too stays what it is: a copy would no longer be the object that they hold.
        fields, copied, copier = _copies(layers, more, objects)
    kinds = [type(layer) for layer in layers]
    how = ("copy", *sorted(copier.ways))
    return EnvSnapshot(kinds, fields, copier.size, how, common, objects, digest), copied


def _common(layers: Sequence[Any], code: Iterable[Any], by_address: str) -> tuple[Shared, dict[int, Any], str]:
    """Return what code shares with other environments, the objects of it, and a digest of what they hold now.

    Args:
        layers: The layers of the environment.
        code: The classes of what it holds, and its functions and modules.
        by_address: Names the class of an object that a copy has at another address, which is its hash; "": none.

    Raises:
        CannotCopyError: An environment of this code has no state of its own.
    """
    common = shared_by((*map(type, layers), *code))
    if common.reason:
        raise CannotCopyError(common.reason)
    if common.hashes and by_address:
        raise CannotCopyError(f"its code uses hash(), which is the address of a {by_address}, and no copy has that")
    digest, unseen = common.look()
    if unseen:
        raise CannotCopyError(unseen)
    return common, objects_in(common.values()), digest


def _copies(
    layers: Sequence[Any], more: Sequence[Any], shared: Mapping[int, Any]
) -> tuple[list[dict[str, Any]], tuple[Any, ...], _Copier]:
    copier = _Copier(layers, shared)
    fields: list[dict[str, Any]] = []
    for index, layer in enumerate(layers):
        _refuse_impure(type(layer), (f"{type(layer).__name__}",))
        own: dict[str, Any] = {}
        for name, value in fields_of(layer):
            own[name] = copier.field(value, (str(index), name))
        fields.append(own)
    return fields, tuple(copier.copy(value, ("result",)) for value in more), copier


def restore(
    snapshot: EnvSnapshot, env: Any, *more: Any, seed: int | None = None, compared: bool = False
) -> tuple[Any, ...]:
    """Put a snapshot into a living environment; all is looked at before anything is changed.

    Args:
        snapshot: What `take` returned.
        env: An environment of the same layers.
        more: What `take` has copied with it.
        seed: Seeds the generators; None: they go on.
        compared: True: what all environments share was compared just now, as for the lane before.

    Returns:
        Copies of `more`.

    Raises:
        CannotCopyError: The layers differ, or what stays with the living environment is not what it was.
    """
    layers = layers_of(env)
    if [type(layer) for layer in layers] != snapshot.kinds:
        mine, theirs = _titles(map(type, layers)), _titles(snapshot.kinds)
        raise CannotCopyError(f"the state is of {theirs}, this environment is {mine}")
    if not compared and snapshot.common.digest() != snapshot.digest:
        raise CannotCopyError("what its class or its module holds has changed since, which all environments share")
    copier = _Restorer(layers, seed, snapshot.shared, bits_of_reset(layers, snapshot.fields))
    fields = [copier.layer(index, own) for index, own in enumerate(snapshot.fields)]
    copied = tuple(copier.copy(value, ("result",)) for value in more)
    # From here on nothing fails, but for a library that does: and then the environment says so in its next step.
    for put, living in copier.puts:
        put(living, seed)
    for layer, own in zip(layers, fields, strict=True):
        _set_fields(layer, own)
    if seed is not None:
        for layer in layers:
            if "_np_random_seed" in getattr(layer, "__dict__", {}):
                layer.__dict__["_np_random_seed"] = seed
    return copied


@dataclasses.dataclass(frozen=True)
class Fields:
    """Those fields of an environment that can be copied."""

    kinds: list[type]
    """The classes of the layers."""
    fields: list[dict[str, Any]]
    """The copies, for each layer."""
    digests: list[dict[str, str]]
    """Digests of what the fields held, for each layer."""
    apart: frozenset[int]
    """The layers that were copied whole, and share no object with other ones."""
    size: int
    """About how many bytes of memory it takes."""
    common: Shared
    """What the code of the environment shares with other ones."""
    digest: str
    """Of what that held."""
    shared: Mapping[int, Any]


def take_fields(env: Any) -> Fields:
    """Copy those fields of an environment that can be copied.

    Raises:
        CannotCopyError: It shares with other environments what its steps may change.
    """
    layers = layers_of(env)
    index = {id(layer): number for number, layer in enumerate(layers)}
    found = _copied_fields(layers, {})
    kinds = [type(layer) for layer in layers]
    # Also of what lies beside and behind what cannot be copied.
    common, objects, digest = _common(layers, code_in(layers), found[1].by_address)
    if found[1].met(objects):
        found = _copied_fields(layers, objects)
    fields, copier = found
    digests = [
        {
            name: digest_of([item], layers=index)
            for name, item in fields_of(layer)
            if name in own and not isinstance(own[name], _Kept)
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
    return Fields(kinds, fields, digests, frozenset(apart), copier.size, common, digest, objects)


def _copied_fields(layers: Sequence[Any], shared: Mapping[int, Any]) -> tuple[list[dict[str, Any]], _Copier]:
    copier = _Copier(layers, shared)
    found: list[dict[str, Any]] = []
    for number, layer in enumerate(layers):
        found.append({})
        for name, value in fields_of(layer):
            with contextlib.suppress(CannotCopyError):
                found[-1][name] = copier.field(value, (str(number), name))
    return found, copier


def _changeable(layer: Any) -> set[int]:
    """Return the ids of what a layer holds that may change, but for its spaces."""
    kept = list, dict, set, deque, bytearray, np.ndarray
    objects = objects_in(value for _, value in fields_of(layer))
    return {key for key, value in objects.items() if isinstance(value, kept) or not is_trusted(module_of(type(value)))}


def put_fields(saved: Fields, env: Any, *, whole: bool = False) -> None:
    """Put fields back into an environment.

    Args:
        saved: What `take_fields` returned.
        env: An environment of the same layers.
        whole: True: all fields of the layers that are `apart`, and no others; False: those that differ.

    Raises:
        CannotCopyError: The layers differ, or a field cannot be put back.
    """
    layers = layers_of(env)
    if [type(layer) for layer in layers] != saved.kinds:
        mine, theirs = _titles(map(type, layers)), _titles(saved.kinds)
        raise CannotCopyError(f"the state is of {theirs}, this environment is {mine}")
    index = {id(layer): number for number, layer in enumerate(layers)}
    copier = _Restorer(layers, None, saved.shared)
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


def copied(env: Any, values: Sequence[Any], *, back: bool = False) -> tuple[Any, ...]:
    """Return copies of values that are told with a state, such as an observation; with `back` of those copies.

    Raises:
        CannotCopyError: One cannot be copied.
    """
    layers = layers_of(env)
    copier = _Restorer(layers, None, {}) if back else _Copier(layers, {})
    return tuple(copier.copy(value, ("result",)) for value in values)


def _set_field(layer: Any, name: str, value: Any) -> None:
    if name not in slots_of(type(layer)) and dict_of(layer) is not None:
        dict_of(layer)[name] = value
    else:
        object.__setattr__(layer, name, value)


def _titles(kinds: Any) -> str:
    return " of ".join(kind.__name__ for kind in kinds)


def _set_fields(value: Any, fields: Mapping[str, Any]) -> None:
    slots = set(slots_of(type(value)))
    own = dict_of(value)
    if own is not None:
        own.clear()
    for name in slots - fields.keys():
        if hasattr(value, name):
            object.__delattr__(value, name)
    for name, item in fields.items():
        if name in slots or own is None:
            object.__setattr__(value, name, item)
        else:
            own[name] = item


def _place(path: Sequence[str]) -> str:
    return ".".join(path[1:]) if path and path[0].isdigit() else ".".join(path)


class _Copier:
    """Copies values for a snapshot.

    Args:
        layers: The layers of the environment.
        shared: What is not copied, by its id.
    """

    def __init__(self, layers: Sequence[Any], shared: Mapping[int, Any]) -> None:
        self._layers = layers
        self._shared = shared
        self._index = {id(layer): index for index, layer in enumerate(layers)}
        self._memo: dict[int, Any] = {}
        self._alive: list[Any] = []  # whose ids are in the memo
        self._deep: dict[int, Any] = {}
        self._owners: set[int] = set()  # bytes that are the memory of an array
        self._depth = 0
        self.size = 0
        self.ways: set[str] = set()
        self.code: set[Any] = set()
        """The classes of what was copied, and the functions and modules in it."""
        self.unseeded: list[gymnasium.Space[Any]] = []
        """Spaces that have no generator yet."""
        self.by_address = ""
        """The title of a class, an object of which was copied, whose hash is its address."""

    def met(self, objects: Mapping[int, Any]) -> bool:
        """True if one of some objects was copied."""
        return any(made is not objects[key] for key, made in self._memo.items() if key in objects)

    def field(self, value: Any, path: tuple[str, ...]) -> Any:
        """Copy the value of an attribute of a layer."""
        # What draws may be in a list or dict of its own, as the pictures of a grid are.
        if type(value) not in _DRAW_NOTHING and _only_draws(value):
            return _Kept(path)
        return self.copy(value, path)

    def copy(self, value: Any, path: tuple[str, ...]) -> Any:
        """Return a copy of a value; of what is found a second time the same copy."""
        kind = type(value)
        if kind in _IMMUTABLE:
            return value
        known = self._memo.get(id(value), self)
        if known is not self:
            return known
        self._depth += 1
        if self._depth > _MOST_DEEP:
            raise CannotCopyError(f"{_place(path)}: objects lie deeper than {_MOST_DEEP} in each other")
        try:
            made = self._make(value, kind, path)
        finally:
            self._depth -= 1
        return made

    def _keep(self, value: Any, made: Any) -> Any:
        self._memo[id(value)] = made
        self._alive.append(value)
        return made

    def _make(self, value: Any, kind: type, path: tuple[str, ...]) -> Any:
        if id(value) in self._shared:
            return self._keep(value, value)
        if kind is np.ndarray:
            return self._array(value, path)
        if kind not in _BUILT_IN:
            special = self._special(value, path)
            if special is not None:
                return self._keep(value, special)
            if not is_trusted(module_of(kind)):
                self.code.add(kind)
        if kind is list or (isinstance(value, list) and is_pure(kind)):
            made: Any = self._keep(value, _new(kind))
            self.size += sys.getsizeof(value)
            for index, item in enumerate(list.__iter__(value)):
                list.append(made, self.copy(item, (*path, str(index))))
            return self._with_fields(value, made, path)
        if kind is OrderedDict or kind is defaultdict or kind is dict or (isinstance(value, dict) and is_pure(kind)):
            made = self._keep(value, _new(kind))
            self.size += sys.getsizeof(value)
            if isinstance(value, defaultdict):
                made.default_factory = self.copy(value.default_factory, (*path, "default_factory"))
            # An OrderedDict has an order of its own, which `dict.items` does not know.
            pairs = OrderedDict.items(value) if isinstance(value, OrderedDict) else dict.items(value)
            for key, item in list(pairs):
                own = self.copy(key, (*path, repr(key)[:40]))
                setitem = OrderedDict.__setitem__ if isinstance(value, OrderedDict) else dict.__setitem__
                setitem(made, own, self.copy(item, (*path, repr(key)[:40])))
            return self._with_fields(value, made, path)
        if kind is tuple or (isinstance(value, tuple) and is_pure(kind)):
            items = [self.copy(item, (*path, str(index))) for index, item in enumerate(tuple.__iter__(value))]
            known = self._memo.get(id(value))  # it may be within itself, by way of a list
            if known is not None:
                return known
            if all(mine is theirs for mine, theirs in zip(items, value, strict=True)) and kind is tuple:
                return self._keep(value, value)
            self.size += sys.getsizeof(value)
            return self._keep(value, tuple.__new__(kind, items))
        if kind is set or kind is frozenset:
            return self._set(value, path)
        if kind is deque:
            made = self._keep(value, deque(maxlen=value.maxlen))
            made.extend(self.copy(item, (*path, str(index))) for index, item in enumerate(value))
            self.size += sys.getsizeof(value)
            return made
        if kind is bytearray:
            if id(value) in self._owners:
                raise CannotCopyError(f"{_place(path)} is the memory of an array too, and is not copied")
            self.size += len(value)
            return self._keep(value, bytearray(value))
        if isinstance(value, types.MethodType):
            own = self.copy(value.__self__, (*path, "__self__"))
            function: Any = value.__func__
            self.code.add(function)
            if not isinstance(function, types.FunctionType) or self._function(function, path) is not function:
                raise CannotCopyError(f"{_place(path)} is a method that holds more than its object")
            bound = _Bound(function, own) if isinstance(own, _Layer) else types.MethodType(function, own)
            return self._keep(value, bound)
        if kind is functools.partial:
            func, args, keywords, fields = value.func, value.args, value.keywords, vars(value)
            return self._keep(value, _Partial(*(self.copy(part, path) for part in (func, args, keywords, fields))))
        if isinstance(value, (np.random.Generator, np.random.RandomState, random.Random, np.random.BitGenerator)):
            return self._generator(value, path)
        if isinstance(value, np.random.SeedSequence):
            return self._keep(value, copy.deepcopy(value, self._deep))
        if _is_jax(value):
            return value
        why = impure(kind)
        if why is not None:
            raise CannotCopyError(f"{_place(path)} is {why}")
        made = self._keep(value, object.__new__(kind))
        if isinstance(value, gymnasium.Space) and dict_of(value).get("_np_random", value) is None:
            self.unseeded.append(value)
        if getattr(kind, "__hash__", None) is object.__hash__ and not is_trusted(module_of(kind)):
            self.by_address = kind.__qualname__
        self.size += sys.getsizeof(value)
        return self._with_fields(value, made, path)

    def _with_fields(self, value: Any, made: Any, path: tuple[str, ...]) -> Any:
        fields = fields_of(value)
        if fields:
            _set_fields(made, {name: self.copy(item, (*path, name)) for name, item in fields})
        return made

    def _set(self, value: Any, path: tuple[str, ...]) -> Any:
        self.size += sys.getsizeof(value)
        items = [self.copy(item, (*path, "item")) for item in value]
        if any(mine is not theirs for mine, theirs in zip(items, value, strict=True)):
            # Their order comes of their hashes, which are those of other objects then.
            raise CannotCopyError(f"{_place(path)} is a {type(value).__name__} of objects that have no fixed order")
        made = value if isinstance(value, frozenset) else copied_set(value)
        if made is None:
            raise CannotCopyError(f"{_place(path)} is a set from which was removed, so that no copy has its order")
        return self._keep(value, made)

    def _special(self, value: Any, path: tuple[str, ...]) -> Any:
        """Return what stands for a value in a snapshot, where it is no copy; None: it is to be copied."""
        index = self._index.get(id(value))
        if index is not None:
            return _Layer(index)
        if isinstance(value, types.ModuleType):
            if value in (random, np.random):
                raise CannotCopyError(f"{_place(path)} is the module {value.__name__}, whose generator all share")
            self.code.add(value)
            return value
        if isinstance(value, type):
            self.code.add(value)
            return value
        if isinstance(value, types.FunctionType):
            return self._function(value, path)
        if isinstance(value, types.BuiltinMethodType) and not isinstance(
            value.__self__, (types.ModuleType, type, type(None))
        ):
            raise CannotCopyError(
                f"{_place(path)} is a method of a {type(value.__self__).__name__}, which is not copied"
            )
        if isinstance(value, _ATOMS):
            return self._atom(value, path)
        if draws(value):
            self._refuse_container(path, value)
            return _Kept(path)
        try:
            own = own_way(value)
        except ValueError as error:
            raise CannotCopyError(f"{_place(path)} cannot be saved: {error}") from error
        if own is not None:
            self._refuse_container(path, value)
            self.ways.add(own.name)
            self.size += own.size
            return _Kept(path, type(value), own=own)
        return None

    def _atom(self, value: Any, path: tuple[str, ...]) -> Any:
        """Return a value that nothing changes; where something may, a copy."""
        kind = type(value)
        if kind is EnvSpec:
            kept = value.kwargs
            if not kept or not all(type(item) in (list, dict) or _is_constant(item) for item in kept.values()):
                return value
            made = copy.copy(value)
            made.kwargs = self.copy(kept, (*path, "kwargs"))
            return made
        if isinstance(value, enum.Enum):
            # What its members hold belongs to the class, and so to all.
            self.code.add(kind)
        elif isinstance(value, np.void) or (
            isinstance(value, slice) and not all(map(_is_constant, (value.start, value.stop, value.step)))
        ):
            raise CannotCopyError(f"{_place(path)} is a {kind.__name__} of what may change, which is not copied")
        elif not is_trusted(module_of(kind)):
            if fields_of(value):
                raise CannotCopyError(f"{_place(path)} is a {kind.__qualname__} with attributes, which is not copied")
            self.code.add(kind)
        return value

    def _refuse_container(self, path: tuple[str, ...], value: Any) -> None:
        if not path[0].isdigit() or any(not name.isidentifier() for name in path[1:]):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise CannotCopyError(f"{_place(path)} is a {kind} within a list or dict, which is not copied")

    def _function(self, value: types.FunctionType, path: tuple[str, ...]) -> Any:
        """Return a function, or what stands for one that holds what may change, or differ elsewhere."""
        self.code.add(value)
        # What a closure holds may be written by another function that shares it, also a number.
        if not has_cells(value) and all(map(_is_constant, held_by(value))):
            return value
        self._refuse_container(path, value)
        # It stays with the living environment, whose own closure holds its own layers; what else it holds is compared.
        return _Kept(path, types.FunctionType, _digest_function(value, self._index, path))

    def _array(self, value: Any, path: tuple[str, ...]) -> Any:
        if value.dtype.hasobject:
            if value.dtype != object or value.base is not None:
                raise CannotCopyError(f"{_place(path)} is an array of objects within other memory")
            made = self._keep(value, np.empty(value.shape, object))
            for place in np.ndindex(value.shape):
                made[place] = self.copy(value[place], (*path, str(place)))
            return made
        root = value
        while isinstance(root.base, np.ndarray):
            root = root.base
        if id(root) in self._shared:
            return self._keep(value, value)
        foreign = root.base is not None and not isinstance(root.base, bytes)
        if foreign and (path[0] == "result" or self._owns_pictures(root.base)):
            # Of a result its values count: they were told.
            made = value.copy()
            self.size += value.nbytes
            return self._keep(value, made)
        if foreign and self._owns_alone(root, path):
            foreign = False
            root = value
        if foreign:
            kind = f"{type(root.base).__module__}.{type(root.base).__qualname__}"
            raise CannotCopyError(f"{_place(path)} is an array in the memory of a {kind}, which is not copied")
        if root is value or isinstance(root.base, bytes):
            made = value.copy(order="K")
            made.flags.writeable = value.flags.writeable
            self.size += value.nbytes
            return self._keep(value, made)
        if type(root) is not np.ndarray:
            raise CannotCopyError(f"{_place(path)} is a part of a {type(root).__name__}, which is not copied")
        # A part of another array: it is a part of that one's copy, so that both go on sharing what they hold.
        whole = self._memo.get(id(root))
        if whole is None:
            whole = root.copy(order="K")
            whole.flags.writeable = True
            self.size += root.nbytes
            self._keep(root, whole)
        offset = value.__array_interface__["data"][0] - root.__array_interface__["data"][0]
        if whole.strides != root.strides:
            raise CannotCopyError(f"{_place(path)} is a part of an array whose memory has gaps")
        # Its memory has no gaps, in whatever order of its axes.
        plain = whole.transpose(np.argsort([-step for step in whole.strides], kind="stable"))
        if not plain.flags.c_contiguous:
            raise CannotCopyError(f"{_place(path)} is a part of an array whose memory has gaps")
        flat = np.ndarray((whole.nbytes,), np.uint8, buffer=plain.data)
        made = np.ndarray(value.shape, value.dtype, flat, offset, value.strides)
        made.flags.writeable = value.flags.writeable
        return self._keep(value, made)

    def _owns_alone(self, root: Any, path: tuple[str, ...]) -> bool:
        """True if an array's memory is that of bytes which nothing else here refers to, as after it was unpickled."""
        owner = root.base.obj if isinstance(root.base, memoryview) else None
        if type(owner) not in (bytes, bytearray) or id(owner) in self._memo or id(owner) in self._owners:
            return False
        self._owners.add(id(owner))
        self._alive.append(owner)
        return True

    def _owns_pictures(self, base: Any) -> bool:
        """True if memory is a picture that an emulator has given away, and does not write into any more."""
        gave = isinstance(base, memoryview) and type(base.obj).__module__ == "nanobind"
        return gave and any(type(layer).__module__.startswith("ale_py.") for layer in self._layers)

    def _generator(self, value: Any, path: tuple[str, ...]) -> Any:
        if value is np.random.mtrand._rand or value is getattr(random, "_inst", None):  # noqa: SLF001
            raise CannotCopyError(f"{_place(path)} is the generator of random or numpy.random, which all share")
        if isinstance(value, random.SystemRandom):
            raise CannotCopyError(f"{_place(path)} draws from the system, which cannot be set back")
        if type(value).__module__.partition(".")[0] not in ("numpy", "random"):
            raise CannotCopyError(f"{_place(path)} is a generator of a class of its own, {type(value).__qualname__}")
        self.size += 3000 if isinstance(value, (np.random.RandomState, random.Random)) else 300
        return self._keep(value, copy.deepcopy(value, self._deep))


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


class _Bound:
    """Stands for a method of a layer."""

    def __init__(self, function: Any, layer: _Layer) -> None:
        self.function, self.layer = function, layer


class _Partial:
    """Stands for a `functools.partial`."""

    def __init__(self, function: Any, args: Any, keywords: Any, fields: Any) -> None:
        self.parts = function, args, keywords, fields


class _Restorer(_Copier):
    """Copies the values of a snapshot for a living environment, whose layers take the places of those that it was of.

    Args:
        layers: The living layers.
        seed: Seeds the generators; None: they go on.
        shared: As of `_Copier`.
        own: The bits, in the snapshot, of the generator that a reset seeds; None: there is none.
    """

    def __init__(self, layers: Sequence[Any], seed: int | None, shared: Mapping[int, Any], own: Any = None) -> None:
        super().__init__(layers, shared)
        self._seed = seed
        self._own = own
        self._living_fields: dict[int, dict[str, Any]] = {}
        self.puts: list[tuple[Callable[[Any, int | None], None], Any]] = []

    def field(self, value: Any, path: tuple[str, ...]) -> Any:
        """Copy the value of an attribute of a layer; what draws stays where it is."""
        living = self._living(path)
        if type(living) not in _DRAW_NOTHING and _only_draws(living):
            return living
        return self.copy(value, path)

    def layer(self, index: int, own: Mapping[str, Any]) -> dict[str, Any]:
        """Copy all fields of a layer."""
        living, place = self._fields(index), str(index)
        return {
            # Most are numbers and names.
            name: value
            if type(value) in _IMMUTABLE and type(living.get(name)) in _DRAW_NOTHING
            else self.field(value, (place, name))
            for name, value in own.items()
        }

    def _fields(self, index: int) -> dict[str, Any]:
        # Of each field of a layer it is asked, so they are listed once.
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
        if isinstance(value, _Layer):
            return self._layers[value.index]
        if isinstance(value, _Bound):
            return types.MethodType(value.function, self._layers[value.layer.index])
        if isinstance(value, _Partial):
            function, args, keywords, fields = (self.copy(part, path) for part in value.parts)
            made = functools.partial(function, *args, **keywords)
            vars(made).update(fields)
            return made
        if isinstance(value, _Kept):
            return self._kept(value)
        if isinstance(value, (types.FunctionType, types.ModuleType, type)):
            return value
        return self._atom(value, path) if isinstance(value, _ATOMS) else None

    def _kept(self, kept: _Kept) -> Any:
        living = self._living(kept.path)
        if kept.kind is None:
            # Where nothing was drawn yet there is nothing. Within another object that would be missed.
            if living is None and len(kept.path) > 2:
                text = f"{_place(kept.path)} draws, and was saved of an environment that had drawn"
                raise CannotCopyError(f"{text}; draw with this one first")
            return _Nothing if living is None else living
        if type(living) is not kept.kind:
            raise CannotCopyError(f"{_place(kept.path)} is no {kept.kind.__name__} in this environment")
        if kept.digest and kept.digest != _digest_function(living, self._index, kept.path):
            raise CannotCopyError(f"{_place(kept.path)} is a function that holds other values in this environment")
        if kept.own is not None:
            if why := kept.own.fits(living):
                raise CannotCopyError(f"{_place(kept.path)} cannot be restored here: {why}")
            self.puts.append((kept.own.put, living))
        return living

    def _keep(self, value: Any, made: Any) -> Any:
        made = None if made is _Nothing else made
        return super()._keep(value, made)

    def _generator(self, value: Any, path: tuple[str, ...]) -> Any:
        if self._seed is None:
            return self._keep(value, copy.deepcopy(value, self._deep))
        if isinstance(value, np.random.Generator):
            # Those that share their bits go on sharing them.
            return self._keep(value, np.random.Generator(self.copy(value.bit_generator, path)))
        sequence = seed_sequence(self._seed, None if value is self._own else path)
        if isinstance(value, np.random.BitGenerator):
            return self._keep(value, type(value)(sequence))
        if isinstance(value, np.random.RandomState):
            return self._keep(value, np.random.RandomState(np.random.MT19937(sequence)))
        made = copy.deepcopy(value, self._deep)
        made.seed(int(sequence.generate_state(2, np.uint64)[0]))
        return self._keep(value, made)


class _Nothing:
    """In the place of None, which says that a value is to be copied."""


_IMMUTABLE = frozenset((type(None), bool, int, float, complex, str, bytes, np.float64, np.float32, np.int64, np.bool_))
_DRAW_NOTHING = _IMMUTABLE | {np.ndarray}


def _only_draws(value: Any, depth: int = 0) -> bool:
    """True if a value draws, or is a list or dict of what draws and of nothing else that may change."""
    if draws(value):
        return True
    if depth < 4 and type(value) in (list, tuple, dict):
        items = list(value.values() if isinstance(value, dict) else value)
        drawing = [_only_draws(item, depth + 1) for item in items]
        rest = [item for item, found in zip(items, drawing, strict=True) if not found]
        return any(drawing) and all(_is_constant(item) for item in rest)
    return False


def has_cells(function: types.FunctionType) -> bool:
    """True if the closure of a function holds more than functions without one, classes and modules."""
    for cell in function.__closure__ or ():
        try:
            value = cell.cell_contents
        except ValueError:  # it is empty yet
            return True
        if isinstance(value, types.FunctionType):
            if has_cells(value):
                return True
        elif not isinstance(value, (type, types.ModuleType)):
            return True
    return False


def _is_constant(value: Any) -> bool:
    """True if nothing can change a value, nor what it holds."""
    if isinstance(value, types.FunctionType):
        if has_cells(value):
            return False
        return all(not isinstance(item, types.FunctionType) and _is_constant(item) for item in held_by(value))
    if isinstance(value, types.ModuleType):
        return value not in (random, np.random)
    if isinstance(value, types.BuiltinMethodType):
        return isinstance(value.__self__, (types.ModuleType, type, type(None)))
    if type(value) in (tuple, frozenset):
        return all(map(_is_constant, value))
    return isinstance(value, (type, *_ATOMS)) and not isinstance(value, types.MethodType)


def _digest_function(function: Any, layers: Mapping[int, int], path: tuple[str, ...]) -> str:
    """Return a digest of what a function does and holds: two of the same digest do the same."""
    parts: list[bytes] = []
    seen: set[int] = set()

    def add(value: Any, depth: int = 0) -> None:
        if id(value) in layers:
            parts.append(f"layer {layers[id(value)]}".encode())
        elif isinstance(value, types.FunctionType) and depth < 5:
            parts.append(f"function {value.__module__}.{value.__qualname__}".encode())
            parts.append(value.__code__.co_code)
            for item in held_by(value):
                add(item, depth + 1)
        elif type(value) is np.ndarray and not value.dtype.hasobject:
            parts.append(f"array {value.dtype.str} {value.shape}".encode() + value.tobytes())
        elif _is_constant(value):
            parts.append(f"{type(value).__qualname__} {value!r}".encode())
        elif type(value) in (list, tuple) and depth < 5:
            parts.append(type(value).__name__.encode())
            for item in value:
                add(item, depth + 1)
        elif isinstance(value, gymnasium.Space):
            # Spaces sample by a generator, which a function that only looks at them does not use.
            parts.append(repr(value).encode())
        elif id(value) in seen:
            return
        else:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise CannotCopyError(f"{_place(path)} is a function whose closure holds a {kind}, which is not copied")

    add(function)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _is_jax(value: Any) -> bool:
    return module_of(type(value)).startswith("jaxlib") and type(value).__name__ == "ArrayImpl"


def _refuse_impure(kind: type, path: tuple[str, ...]) -> None:
    why = impure(kind)
    if why is not None:
        raise CannotCopyError(f"{_place(path)} is {why}")
