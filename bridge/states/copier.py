"""Copies of values for a snapshot, by rules for each type; and what stands there for what is not copied."""

from __future__ import annotations

import copy
import enum
import functools
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
    is_pure,
    is_sentinel,
    is_trusted,
    module_of,
    set_dict,
    slots_of,
)
from bridge.states.kinds import OwnWay, draws, is_value, own_way, pixels_of
from bridge.states.refusal import CannotCopyError, place_name
from bridge.states.sets import copied_set

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
"""Containers that are what they are."""

_MOST_DEEP = 200
"""How deep objects may lie in each other: deeper, Python's own stack would end."""

DRAW_NOTHING = IMMUTABLE | {np.ndarray}
"""Types of which need not be asked whether they draw."""


class Layer:
    """Stands for a layer in a snapshot."""

    def __init__(self, index: int) -> None:
        self.index = index


class Kept:
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


class Bound:
    """Stands for a method of a layer."""

    def __init__(self, function: Any, layer: Layer) -> None:
        self.function, self.layer = function, layer


class Partial:
    """Stands for a `functools.partial`."""

    def __init__(self, function: Any, args: Any, keywords: Any, fields: Any) -> None:
        self.parts = function, args, keywords, fields


class Nothing:
    """In the place of None, which says that a value is to be copied."""


class Copier:
    """Copies values for a snapshot.

    Args:
        layers: The layers of the environment.
        shared: What is not copied, by its id.
        pixels: True if the code reads pixels, which are a part of the state then.
    """

    def __init__(self, layers: Sequence[Any], shared: Mapping[int, Any], *, pixels: bool = False) -> None:
        self._layers = layers
        self._pixels = pixels
        self.draws = False
        """True if something was met that draws."""
        self._shared = shared
        self._index = {id(layer): index for index, layer in enumerate(layers)}
        self._dicts = {id(dict_of(layer)) for layer in layers}
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
        self.in_closures: list[Any] = []
        """What functions that were not copied hold and may change: arrays, lists and spaces."""
        self.by_address = ""
        """The title of a class, an object of which was copied, whose hash is its address."""

    def met(self, objects: Mapping[int, Any]) -> bool:
        """True if one of some objects was copied."""
        return any(made is not objects[key] for key, made in self._memo.items() if key in objects)

    def refuse_shared_closures(self, *, samples: bool) -> None:
        """Raise if what a function holds, which stays as it is, was copied too, or is drawn from.

        Args:
            samples: True if the code draws from spaces.
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
        # What draws may be in a list or dict of its own, as the pictures of a grid are.
        if type(value) not in DRAW_NOTHING and only_draws(value):
            return self._drawing(value, path)
        return self.copy(value, path)

    def _drawing(self, value: Any, path: tuple[str, ...]) -> Kept:
        """Return what stands for what draws, with its pixels, where those decide what comes next."""
        try:
            own = pixels_of(value) if self._pixels else None
        except Exception as error:  # such as of a part of a surface, whose memory has gaps
            raise CannotCopyError(f"{place_name(path)} has pixels that cannot be read: {error}") from error
        self.size += own.size if own is not None else 0
        self.draws = True
        return Kept(path, own=own)

    def copy(self, value: Any, path: tuple[str, ...]) -> Any:
        """Return a copy of a value; of what is found a second time the same copy."""
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
        """Return a copy of a list, a dict or the like; None: the value is none."""
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
            # An OrderedDict has an order of its own, which `dict.items` does not know.
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
        made = self._keep(value, object.__new__(kind))
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
            # Such as of a dict whose items are its attributes, or of two objects that have all attributes in common.
            set_dict(made, self.copy(own, path))
            slots = slots_of(type(value))
            for name, item in fields:
                if name in slots:
                    object.__setattr__(made, name, self.copy(item, (*path, name)))
            return made
        if own is not None:
            # Something else may hold it too, as `vars` gives it away.
            self._keep(own, dict_of(made))
        if fields:
            # Most are numbers and names.
            copies = {
                name: item if type(item) in IMMUTABLE else self.copy(item, (*path, name)) for name, item in fields
            }
            set_fields(made, copies)
        return made

    def _set(self, value: Any, path: tuple[str, ...]) -> Any:
        self.size += sys.getsizeof(value)
        items = [self.copy(item, (*path, "item")) for item in value]
        if any(mine is not theirs for mine, theirs in zip(items, value, strict=True)):
            # Their order comes of their hashes, which are those of other objects then.
            raise CannotCopyError(f"{place_name(path)} is a {type(value).__name__} of objects that have no fixed order")
        made = value if isinstance(value, frozenset) else copied_set(value)
        if made is None:
            raise CannotCopyError(f"{place_name(path)} is a set from which was removed, so that no copy has its order")
        return self._keep(value, made)

    def _special(self, value: Any, path: tuple[str, ...]) -> Any:
        """Return what stands for a value in a snapshot, where it is no copy; None: it is to be copied."""
        index = self._index.get(id(value))
        if index is not None:
            return Layer(index)
        # By its type: an object may say that its class is another one, as proxies do.
        kind = type(value)
        if issubclass(kind, types.ModuleType):
            if value in (random, np.random):
                raise CannotCopyError(f"{place_name(path)} is the module {value.__name__}, whose generator all share")
            self.code.add(value)
            return value
        if issubclass(kind, type):
            self.code.add(value)
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
            return Kept(path, type(value), own=own)
        return None

    def _atom(self, value: Any, path: tuple[str, ...]) -> Any:
        """Return a value that nothing changes; where something may, a copy."""
        kind = type(value)
        if kind is EnvSpec:
            kept = value.kwargs
            if not kept or not all(type(item) in (list, dict) or is_constant(item) for item in kept.values()):
                return value
            made = copy.copy(value)
            made.kwargs = self.copy(kept, (*path, "kwargs"))
            return made
        if isinstance(value, enum.Enum):
            # What its members hold belongs to the class, and so to all.
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
        """Return a function, or what stands for one that holds what may change, or differ elsewhere."""
        self.code.add(value)
        # What a closure holds may be written by another function that shares it, also a number.
        if not has_cells(value) and all(map(is_constant, held_by(value))):
            return value
        self._refuse_container(path, value)
        # It stays with the living environment, whose own closure holds its own layers; what else it holds is compared.
        return Kept(path, types.FunctionType, digest_function(value, self._index, path, self.in_closures))

    def _array(self, value: Any, path: tuple[str, ...]) -> Any:
        if value.dtype.hasobject:
            if value.dtype != object or value.base is not None:
                raise CannotCopyError(f"{place_name(path)} is an array of objects within other memory")
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
            raise CannotCopyError(f"{place_name(path)} is an array in the memory of a {kind}, which is not copied")
        if root is value or isinstance(root.base, bytes):
            made = value.copy(order="K")
            made.flags.writeable = value.flags.writeable
            self.size += value.nbytes
            return self._keep(value, made)
        if type(root) is not np.ndarray:
            raise CannotCopyError(f"{place_name(path)} is a part of a {type(root).__name__}, which is not copied")
        # A part of another array: it is a part of that one's copy, so that both go on sharing what they hold.
        whole = self._memo.get(id(root))
        if whole is None:
            whole = root.copy(order="K")
            self.size += root.nbytes
            self._keep(root, whole)
        offset = value.__array_interface__["data"][0] - root.__array_interface__["data"][0]
        if whole.strides != root.strides:
            raise CannotCopyError(f"{place_name(path)} is a part of an array whose memory has gaps")
        whole.flags.writeable = True  # a part of it may be, where the whole is not
        # Its memory has no gaps, in whatever order of its axes.
        plain = whole.transpose(np.argsort([-step for step in whole.strides], kind="stable"))
        if not plain.flags.c_contiguous:
            raise CannotCopyError(f"{place_name(path)} is a part of an array whose memory has gaps")
        flat = np.ndarray((whole.nbytes,), np.uint8, buffer=plain.data)
        made = np.ndarray(value.shape, value.dtype, flat, offset, value.strides)
        made.flags.writeable, whole.flags.writeable = value.flags.writeable, root.flags.writeable
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

    def _sequence(self, value: Any, path: tuple[str, ...]) -> Any:
        if type(value) is not np.random.SeedSequence:
            raise CannotCopyError(
                f"{place_name(path)} is a SeedSequence of a class of its own, {type(value).__qualname__}"
            )
        # By what its constructor takes: a tenth of the time of `deepcopy`.
        state: Any = value.state
        made = np.random.SeedSequence(**{**state, "entropy": self.copy(value.entropy, (*path, "entropy"))})
        made.pool[...] = value.pool  # made of its entropy, which may be a list that has changed since
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
        """Return a generator in the same state; those that share their bits, or their seeds, go on sharing them.

        `copy.deepcopy` takes five times as long: it makes each by a seed of the system first.
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
            return copy.deepcopy(value, self._deep)  # such as the bits of `RandomState(3)`, which have none
        made = type(value)(self.copy(sequence, path))
        made.state = value.state
        return made


def _new(kind: Any) -> Any:
    return kind.__new__(kind)


def set_fields(value: Any, fields: Mapping[str, Any]) -> None:
    """Give an object some fields, and no others."""
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
    """True if a value draws, or is a list or dict of what draws and of nothing else that may change."""
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
    """Raise CannotCopyError for objects of a class that their fields do not make."""
    why = impure(kind)
    if why is not None:
        raise CannotCopyError(f"{place_name(path)} is {why}")
