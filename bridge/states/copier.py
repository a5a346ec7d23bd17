"""Copies of values for a snapshot, by rules for each type, and placeholders for values that are not copied."""

from __future__ import annotations

import array
import copy
import enum
import functools
import mmap
import random
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from bridge.states.constants import ATOMS, IMMUTABLE, digest_function, has_cells, is_constant
from bridge.states.fields import (
    dict_of,
    fields_of,
    held_by,
    impure,
    is_env_class,
    is_pure,
    is_sentinel,
    is_trusted,
    module_of,
    new_object,
    set_dict,
    slots_of,
)
from bridge.states.kinds import OwnWay, draws, is_value, own_way, part_of_table, pixels_of
from bridge.states.refusal import CannotCopyError, place_name
from bridge.states.sets import copied_set
from bridge.states.tables import is_table, memory_of

__all__ = [
    "DRAW_NOTHING",
    "Bound",
    "Copier",
    "Kept",
    "Layer",
    "Nothing",
    "Partial",
    "only_draws",
    "refuse_impure",
    "set_fields",
]


_BUILT_IN = frozenset((list, dict, tuple, set, frozenset, deque, OrderedDict, defaultdict))
"""Built-in containers, which need no further checks."""

_OF_MEMMAP = frozenset(("_mmap", "filename", "offset", "mode"))
"""The attributes of each `numpy.memmap`."""

_MOST_DEEP = 200
"""The deepest nesting of objects: deeper recursion would overflow Python's stack."""

DRAW_NOTHING = IMMUTABLE | {np.ndarray}
"""Types that certainly do not draw."""


class Layer:
    """The placeholder of a layer in a snapshot."""

    def __init__(self, index: int) -> None:
        self.index = index


class Kept:
    """The placeholder of a value that is not copied: a restore leaves the living environment's own value there.

    Args:
        path: The attribute names that lead to the value, from a layer.
        kind: The type that the living value must have; None: any, or no value at all.
        digest: The digest that the living value must have; "": its content does not matter.
        own: State that the object has saved of itself, to be put into the living object.
    """

    def __init__(
        self,
        path: tuple[str, ...],
        kind: type | None = None,
        digest: str = "",
        own: OwnWay | None = None,
    ) -> None:
        self.path, self.kind, self.digest, self.own = path, kind, digest, own


class Bound:
    """The placeholder of a layer's method."""

    def __init__(self, function: Any, layer: Layer) -> None:
        self.function, self.layer = function, layer


class Partial:
    """The placeholder of a `functools.partial`."""

    def __init__(self, function: Any, args: Any, keywords: Any, fields: Any) -> None:
        self.parts = function, args, keywords, fields


class Nothing:
    """Stands for the value None, where None itself means that a value has to be copied."""


class Copier:
    """Copies values for a snapshot.

    Args:
        layers: The layers of the environment.
        shared: Objects that are not copied, by id.
        pixels: True if the code reads pixels, so that they are part of the state.
    """

    def __init__(self, layers: Sequence[Any], shared: Mapping[int, Any], *, pixels: bool = False) -> None:
        self._layers = layers
        self._pixels = pixels
        self.draws = False
        """True if a value that draws was found."""
        self._shared = shared
        self._index = {id(layer): index for index, layer in enumerate(layers)}
        self._dicts = {id(dict_of(layer)) for layer in layers}
        self._memo: dict[int, Any] = {}
        self._alive: list[Any] = []  # keeps the objects alive whose ids are in the memo
        self._deep: dict[int, Any] = {}
        # The memory of tables; without pandas, there are none to look for.
        self._tables = {
            id(array): array
            for layer in (layers if "pandas" in sys.modules else ())
            for _, value in fields_of(layer)
            if is_table(value)
            for array in memory_of(value)
        }
        self._owners: set[int] = set()  # ids of bytes objects that are the memory of an array
        self._depth = 0
        self.size = 0
        self.ways: set[str] = set()
        self.code: set[Any] = set()
        """The classes of copied objects, and the functions and modules in them."""
        self.unseeded: list[gymnasium.Space[Any]] = []
        """Spaces without a generator so far."""
        self.in_closures: list[Any] = []
        """Arrays, lists and spaces in the closures of functions that were not copied."""
        self.makes_envs = False
        """True if it holds a class of environments, of which a step may make one."""
        self.by_address = ""
        """The name of a class of copied objects whose hash is their address; "": none."""

    def met(self, objects: Mapping[int, Any]) -> bool:
        """True if one of these objects was copied."""
        return any(made is not objects[key] for key, made in self._memo.items() if key in objects)

    def refuse_shared_closures(self, *, samples: bool) -> None:
        """Raise if a value in the closure of a function that is not copied was copied elsewhere, or is sampled.

        Args:
            samples: True if the code samples from spaces.
        """
        for value in self.in_closures:
            if samples and isinstance(value, gymnasium.Space):
                raise CannotCopyError("a function's closure holds a space, and its code draws from spaces")
            while isinstance(value, np.ndarray) and id(value) not in self._memo and isinstance(value.base, np.ndarray):
                value = value.base
            if self._memo.get(id(value), value) is not value:
                raise CannotCopyError(f"a function's closure holds a {type(value).__name__} that it has elsewhere too")

    def field(self, value: Any, path: tuple[str, ...]) -> Any:
        """Copy the value of an attribute of a layer."""
        # Objects that draw may be in a list or dict of their own, such as the pictures of a grid.
        if type(value) not in DRAW_NOTHING and only_draws(value):
            return self._drawing(value, path)
        return self.copy(value, path)

    def _drawing(self, value: Any, path: tuple[str, ...]) -> Kept:
        """Return a placeholder for a value that draws, with its pixels if the code reads pixels."""
        try:
            own = pixels_of(value) if self._pixels else None
        except Exception as error:  # such as for a subsurface, whose memory has gaps
            raise CannotCopyError(f"{place_name(path)} has pixels that cannot be read: {error}") from error
        self.size += own.size if own is not None else 0
        self.draws = True
        return Kept(path, own=own)

    def copy(self, value: Any, path: tuple[str, ...]) -> Any:
        """Return a copy of a value; the same copy if it was copied before."""
        kind = type(value)
        if kind in IMMUTABLE:
            return value
        known = self._memo.get(id(value), self)
        if known is not self:
            return known
        self._depth += 1
        if self._depth > _MOST_DEEP:
            raise CannotCopyError(f"{place_name(path)}: objects lie deeper than {_MOST_DEEP} in each other")
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
        if id(value) in self._dicts:
            raise CannotCopyError(f"{place_name(path)} is the __dict__ of an environment, which is not copied")
        if _is_read_only_file(value):
            return self._keep(value, value)
        if kind is np.ndarray:
            return self._array(value, path)
        if kind not in _BUILT_IN:
            special = self._special(value, path)
            if special is not None:
                return self._keep(value, special)
            if not is_trusted(module_of(kind)):
                self.code.add(kind)
        made = self._container(value, kind, path)
        if made is not None:
            return made
        if kind is types.MethodType:
            return self._method(value, path)
        if kind is functools.partial:
            func, args, keywords, fields = value.func, value.args, value.keywords, vars(value)
            return self._keep(value, Partial(*(self.copy(part, path) for part in (func, args, keywords, fields))))
        if isinstance(value, (np.random.Generator, np.random.RandomState, random.Random, np.random.BitGenerator)):
            return self._generator(value, path)
        if isinstance(value, np.random.SeedSequence):
            return self._sequence(value, path)
        if _is_jax(value):
            return value
        if is_value(kind):
            self.size += sys.getsizeof(value)
            return self._keep(value, copy.copy(value))
        return self._object(value, kind, path)

    def _container(self, value: Any, kind: type, path: tuple[str, ...]) -> Any:
        """Return a copy of a list, dict or another container; None: the value is not a container."""
        if kind is list or (isinstance(value, list) and is_pure(kind)):
            made: Any = self._keep(value, _new(kind))
            self.size += sys.getsizeof(value)
            for index, item in enumerate(list.__iter__(value)):
                own = item if type(item) in IMMUTABLE else self.copy(item, (*path, str(index)))
                list.append(made, own)
            return self._with_fields(value, made, path)
        if kind is OrderedDict or kind is defaultdict or kind is dict or (isinstance(value, dict) and is_pure(kind)):
            made = self._keep(value, _new(kind))
            self.size += sys.getsizeof(value)
            if isinstance(value, defaultdict):
                made.default_factory = self.copy(value.default_factory, (*path, "default_factory"))
            # An OrderedDict keeps its own order, which `dict.items` does not follow.
            ordered = isinstance(value, OrderedDict)
            pairs = OrderedDict.items(value) if ordered else dict.items(value)
            setitem = OrderedDict.__setitem__ if ordered else dict.__setitem__
            for key, item in list(pairs):
                if type(key) not in IMMUTABLE or type(item) not in IMMUTABLE:
                    place = *path, repr(key)[:40]
                    key, item = self.copy(key, place), self.copy(item, place)
                setitem(made, key, item)
            return self._with_fields(value, made, path)
        if kind is tuple or (isinstance(value, tuple) and is_pure(kind)):
            items = [self.copy(item, (*path, str(index))) for index, item in enumerate(tuple.__iter__(value))]
            known = self._memo.get(id(value))  # it may be within itself, by way of a list
            if known is not None:
                return known
            if all(mine is theirs for mine, theirs in zip(items, value, strict=True)) and kind is tuple:
                return self._keep(value, value)
            self.size += sys.getsizeof(value)
            return self._with_fields(value, self._keep(value, tuple.__new__(kind, items)), path)
        if kind is set or kind is frozenset:
            return self._set(value, path)
        if kind is deque:
            made = self._keep(value, deque(maxlen=value.maxlen))
            made.extend(self.copy(item, (*path, str(index))) for index, item in enumerate(value))
            self.size += sys.getsizeof(value)
            return made
        if kind is bytearray:
            if id(value) in self._owners:
                raise CannotCopyError(f"{place_name(path)} is the memory of an array too, and is not copied")
            self.size += len(value)
            return self._keep(value, bytearray(value))
        if kind is array.array:
            self.size += sys.getsizeof(value)
            return self._keep(value, value[:])
        return None

    def _method(self, value: types.MethodType, path: tuple[str, ...]) -> Any:
        own = self.copy(value.__self__, (*path, "__self__"))
        function: Any = value.__func__
        self.code.add(function)
        if not isinstance(function, types.FunctionType) or self._function(function, path) is not function:
            raise CannotCopyError(f"{place_name(path)} is a method that holds more than its object")
        bound = Bound(function, own) if isinstance(own, Layer) else types.MethodType(function, own)
        return self._keep(value, bound)

    def _object(self, value: Any, kind: type, path: tuple[str, ...]) -> Any:
        """Return an object of the same class with copies of its fields."""
        if is_sentinel(value):
            return self._keep(value, value)
        why = impure(kind)
        if why is not None:
            raise CannotCopyError(f"{place_name(path)} is {why}")
        made = self._keep(value, new_object(kind))
        if isinstance(value, gymnasium.Space) and dict_of(value).get("_np_random", value) is None:
            self.unseeded.append(value)
        if getattr(kind, "__hash__", None) is object.__hash__ and not is_trusted(module_of(kind)):
            self.by_address = kind.__qualname__
        self.size += sys.getsizeof(value)
        return self._with_fields(value, made, path)

    def _with_fields(self, value: Any, made: Any, path: tuple[str, ...]) -> Any:
        fields, own = fields_of(value), dict_of(value)
        if own is not None and (
            own is value or type(own) is not dict or id(own) in self._memo or id(own) in self._shared
        ):
            # For example, a dict whose items are its attributes, or two objects that share one `__dict__`.
            set_dict(made, self.copy(own, path))
            slots = slots_of(type(value))
            for name, item in fields:
                if name in slots:
                    object.__setattr__(made, name, self.copy(item, (*path, name)))
            return made
        if own is not None:
            # Another object may refer to this `__dict__`: `vars` returns it.
            self._keep(own, dict_of(made))
        if fields:
            # A fast path: most fields are numbers and strings.
            copies = {
                name: item if type(item) in IMMUTABLE else self.copy(item, (*path, name)) for name, item in fields
            }
            set_fields(made, copies)
        return made

    def _set(self, value: Any, path: tuple[str, ...]) -> Any:
        self.size += sys.getsizeof(value)
        items = [self.copy(item, (*path, "item")) for item in value]
        if any(mine is not theirs for mine, theirs in zip(items, value, strict=True)):
            # Their order depends on their hashes, and copies have other hashes.
            raise CannotCopyError(f"{place_name(path)} is a {type(value).__name__} of objects that have no fixed order")
        made = value if isinstance(value, frozenset) else copied_set(value)
        if made is None:
            raise CannotCopyError(f"{place_name(path)} is a set from which was removed, so that no copy has its order")
        return self._keep(value, made)

    def _special(self, value: Any, path: tuple[str, ...]) -> Any:
        """Return what a snapshot holds for a value that is not copied field by field; None: copy the value."""
        index = self._index.get(id(value))
        if index is not None:
            return Layer(index)
        # Use `type`, because a proxy may fake its `__class__`.
        kind = type(value)
        if issubclass(kind, types.ModuleType):
            if value in (random, np.random):
                raise CannotCopyError(f"{place_name(path)} is the module {value.__name__}, whose generator all share")
            self.code.add(value)
            return value
        if issubclass(kind, type):
            self.code.add(value)
            self.makes_envs = self.makes_envs or is_env_class(value)
            return value
        if kind is types.FunctionType:
            return self._function(value, path)
        if kind is types.BuiltinMethodType and not isinstance(value.__self__, (types.ModuleType, type, type(None))):
            raise CannotCopyError(
                f"{place_name(path)} is a method of a {type(value.__self__).__name__}, which is not copied"
            )
        if issubclass(kind, ATOMS):
            return self._atom(value, path)
        if draws(value):
            self._refuse_container(path, value)
            return self._drawing(value, path)
        try:
            own = own_way(value)
        except ValueError as error:
            raise CannotCopyError(f"{place_name(path)} cannot be saved: {error}") from error
        if own is not None:
            self._refuse_container(path, value)
            self.ways.add(own.name)
            self.size += own.size
            if is_table(value):
                self.code.add(kind)
                # Of a table within another object, its parts would have been copied.
                self.in_closures += [array for array in memory_of(value) if id(array) not in self._tables]
            return Kept(path, type(value), own=own)
        return None

    def _atom(self, value: Any, path: tuple[str, ...]) -> Any:
        """Return an immutable value itself, or a copy if it contains something mutable."""
        kind = type(value)
        if kind is EnvSpec:
            kept = value.kwargs
            if not kept or not all(type(item) in (list, dict) or is_constant(item) for item in kept.values()):
                return value
            made = copy.copy(value)
            made.kwargs = self.copy(kept, (*path, "kwargs"))
            return made
        if isinstance(value, enum.Enum):
            # The values of its members belong to the class, which all environments share.
            self.code.add(kind)
        elif isinstance(value, np.void) or (
            isinstance(value, slice) and not all(map(is_constant, (value.start, value.stop, value.step)))
        ):
            raise CannotCopyError(f"{place_name(path)} is a {kind.__name__} of what may change, which is not copied")
        elif not is_trusted(module_of(kind)):
            if fields_of(value):
                raise CannotCopyError(
                    f"{place_name(path)} is a {kind.__qualname__} with attributes, which is not copied"
                )
            self.code.add(kind)
        return value

    def _refuse_container(self, path: tuple[str, ...], value: Any) -> None:
        if not path[0].isdigit() or any(not name.isidentifier() for name in path[1:]):
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise CannotCopyError(f"{place_name(path)} is a {kind} within a list or dict, which is not copied")

    def _function(self, value: types.FunctionType, path: tuple[str, ...]) -> Any:
        """Return a function, or a placeholder if its closure may change or differ in another environment."""
        self.code.add(value)
        # Another function may share the closure and assign to its variables, even if they hold numbers.
        if not has_cells(value) and all(map(is_constant, held_by(value))):
            return value
        self._refuse_container(path, value)
        # The living environment keeps its own function, whose closure refers to its own layers. Other values in the
        # closure are compared.
        return Kept(path, types.FunctionType, digest_function(value, self._index, path, self.in_closures))

    def _array(self, value: Any, path: tuple[str, ...]) -> Any:
        if self._tables and id(_root_of(value)) in self._tables:
            self._refuse_container(path, value)
            return self._keep(value, Kept(path, np.ndarray, own=part_of_table(value)))
        if value.dtype.hasobject:
            if value.dtype != object or value.base is not None:
                raise CannotCopyError(f"{place_name(path)} is an array of objects within other memory")
            made = self._keep(value, np.empty(value.shape, object))
            for place in np.ndindex(value.shape):
                made[place] = self.copy(value[place], (*path, str(place)))
            return made
        root = _root_of(value)
        if id(root) in self._shared:
            return self._keep(value, value)
        foreign = root.base is not None and not isinstance(root.base, bytes)
        if foreign and (path[0] == "result" or self._owns_pictures(root.base)):
            # Copy the values only: nothing writes to this memory any more.
            made = value.copy()
            self.size += value.nbytes
            return self._keep(value, made)
        if foreign and self._owns_alone(root, path):
            foreign = False
            root = value
        if foreign:
            kind = f"{type(root.base).__module__}.{type(root.base).__qualname__}"
            raise CannotCopyError(f"{place_name(path)} is an array in the memory of a {kind}, which is not copied")
        if root is value or isinstance(root.base, bytes):
            made = value.copy(order="K")
            made.flags.writeable = value.flags.writeable
            self.size += value.nbytes
            return self._keep(value, made)
        if type(root) is not np.ndarray:
            raise CannotCopyError(f"{place_name(path)} is a part of a {type(root).__name__}, which is not copied")
        # A view of another array becomes a view of that array's copy, so that both go on sharing memory.
        whole = self._memo.get(id(root))
        if whole is None:
            whole = root.copy(order="K")
            self.size += root.nbytes
            self._keep(root, whole)
        offset = value.__array_interface__["data"][0] - root.__array_interface__["data"][0]
        if whole.strides != root.strides:
            raise CannotCopyError(f"{place_name(path)} is a part of an array whose memory has gaps")
        whole.flags.writeable = True  # for the new view: it may be writeable even if the whole array is not
        # With its axes in the order of memory, an array without gaps is C-contiguous.
        plain = whole.transpose(np.argsort([-step for step in whole.strides], kind="stable"))
        if not plain.flags.c_contiguous:
            raise CannotCopyError(f"{place_name(path)} is a part of an array whose memory has gaps")
        flat = np.ndarray((whole.nbytes,), np.uint8, buffer=plain.data)
        made = np.ndarray(value.shape, value.dtype, flat, offset, value.strides)
        made.flags.writeable, whole.flags.writeable = value.flags.writeable, root.flags.writeable
        return self._keep(value, made)

    def _owns_alone(self, root: Any, path: tuple[str, ...]) -> bool:
        """True if an array's memory is a bytes object that nothing else here refers to, such as after unpickling."""
        owner = root.base.obj if isinstance(root.base, memoryview) else None
        if type(owner) not in (bytes, bytearray) or id(owner) in self._memo or id(owner) in self._owners:
            return False
        self._owners.add(id(owner))
        self._alive.append(owner)
        return True

    def _owns_pictures(self, base: Any) -> bool:
        """True if memory is a picture that an emulator has returned and no longer writes to."""
        gave = isinstance(base, memoryview) and type(base.obj).__module__ == "nanobind"
        return gave and any(type(layer).__module__.startswith("ale_py.") for layer in self._layers)

    def _sequence(self, value: Any, path: tuple[str, ...]) -> Any:
        if type(value) is not np.random.SeedSequence:
            raise CannotCopyError(
                f"{place_name(path)} is a SeedSequence of a class of its own, {type(value).__qualname__}"
            )
        # Through its constructor: ten times faster than `deepcopy`.
        state: Any = value.state
        made = np.random.SeedSequence(**{**state, "entropy": self.copy(value.entropy, (*path, "entropy"))})
        made.pool[...] = value.pool  # not from its entropy, which may be a list that has changed since
        return self._keep(value, made)

    def _generator(self, value: Any, path: tuple[str, ...]) -> Any:
        of_numpy = np.random.mtrand._rand  # noqa: SLF001
        if value is of_numpy or value is of_numpy._bit_generator or value is getattr(random, "_inst", None):  # noqa: SLF001
            raise CannotCopyError(f"{place_name(path)} is the generator of random or numpy.random, which all share")
        if isinstance(value, random.SystemRandom):
            raise CannotCopyError(f"{place_name(path)} draws from the system, which cannot be set back")
        if type(value).__module__.partition(".")[0] not in ("numpy", "random"):
            raise CannotCopyError(
                f"{place_name(path)} is a generator of a class of its own, {type(value).__qualname__}"
            )
        self.size += 3000 if isinstance(value, (np.random.RandomState, random.Random)) else 300
        return self._keep(value, self._same_generator(value, path))

    def _same_generator(self, value: Any, path: tuple[str, ...]) -> Any:
        """Return a generator in the same state. Generators that share a bit generator or a seed sequence still do.

        `copy.deepcopy` takes five times as long, because it first seeds each new generator from the system.
        """
        made: Any
        if isinstance(value, np.random.Generator):
            return np.random.Generator(self.copy(value.bit_generator, path))
        if isinstance(value, np.random.RandomState):
            made = np.random.RandomState(self.copy(value._bit_generator, path))  # noqa: SLF001
            made.set_state(value.get_state(legacy=False))
            return made
        if isinstance(value, random.Random):
            made = random.Random(0)
            made.setstate(value.getstate())
            return self._with_fields(value, made, path)
        # NumPy before 1.25 has no public name for it.
        sequence = getattr(value, "seed_seq", None) or getattr(value, "_seed_seq", None)
        if not isinstance(sequence, np.random.SeedSequence):
            if not is_trusted(module_of(type(sequence))):
                title = type(sequence).__qualname__
                raise CannotCopyError(f"{place_name(path)} got its seeds from a {title}, which is not copied")
            return copy.deepcopy(value, self._deep)  # such as for `RandomState(3)`, which has no seed sequence
        made = type(value)(self.copy(sequence, path))
        made.state = value.state
        return made


def _root_of(array: Any) -> Any:
    """Return the array that an array is a part of, or itself."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _is_read_only_file(value: Any) -> bool:
    """True if an array's memory is a file mapped for reading, such as a data set, so that nothing here changes it."""
    if type(value) not in (np.ndarray, np.memmap) or not _OF_MEMMAP.issuperset(dict_of(value) or ()):
        return False
    memory = _root_of(value).base
    return isinstance(memory, mmap.mmap) and memoryview(memory).readonly


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


def set_fields(value: Any, fields: Mapping[str, Any]) -> None:
    """Replace all fields of an object."""
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


def only_draws(value: Any, depth: int = 0) -> bool:
    """True if a value draws, or is a container of values that draw and of constants."""
    if draws(value):
        return True
    if depth < 4 and type(value) in (list, tuple, dict):
        items = list(value.values() if isinstance(value, dict) else value)
        drawing = [only_draws(item, depth + 1) for item in items]
        rest = [item for item, found in zip(items, drawing, strict=True) if not found]
        return any(drawing) and all(is_constant(item) for item in rest)
    return False


def _is_jax(value: Any) -> bool:
    return module_of(type(value)).startswith("jaxlib") and type(value).__name__ == "ArrayImpl"


def refuse_impure(kind: type, path: tuple[str, ...]) -> None:
    """Raise CannotCopyError if objects of a class cannot be copied by their fields."""
    why = impure(kind)
    if why is not None:
        raise CannotCopyError(f"{place_name(path)} is {why}")
