"""Find what an environment shares with others in its process, in its classes and in the code of its steps.

A generator that belongs to a class or a module is advanced by every environment that draws from it. Then the fields of
one environment are not its whole state. Comparing runs does not always show this: an environment may draw only once in
a thousand steps, such as for the place of its next goal.
"""

from __future__ import annotations

import decimal
import email.utils
import functools
import gc
import importlib.util
import inspect
import logging
import operator
import os
import random
import secrets
import ssl
import statistics
import sys
import tempfile
import threading
import types
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.registration import EnvSpec

from bridge.states.digest import digest_of
from bridge.states.fields import fields_of, held_by, is_env_class, is_trusted, module_of
from bridge.states.uses import CodeUses, is_data, is_fixed

__all__ = ["Shared", "shared_by"]

_GENERATORS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)
_OF_SYSTEM = {
    name: getattr(module, name)
    for module, names in (
        (os, ("urandom", "getrandom", "read", "write", "pipe", "open", "lseek", "chdir", "umask", "fork")),
        (uuid, ("uuid1", "uuid4")),
        (random, ("SystemRandom",)),
        (ssl, ("RAND_bytes",)),
        (tempfile, ("mkdtemp", "mkstemp", "mktemp", "NamedTemporaryFile", "TemporaryDirectory", "TemporaryFile")),
        (email.utils, ("make_msgid",)),
        (statistics, ("NormalDist",)),  # its samples are of a generator of its own, or of that of `random`
        (threading, ("Thread", "Timer")),
        (importlib, ("import_module", "__import__", "reload")),
        (sys, ("_getframe",)),
        (inspect, ("currentframe", "stack")),
    )
    for name in names
    if hasattr(module, name)
}
_BY_TEXT = (eval, exec, __import__, globals, id)
"""Built-in functions through which code can reach anything."""
_BY_NAME = (operator.methodcaller, operator.attrgetter)
"""Functions that look up a method by a computed name."""
_READINGS = ((decimal.getcontext, lambda: repr(decimal.getcontext())), (decimal.setcontext, lambda: ""))
"""Functions that access state of the whole process, each with a function that reads that state."""
_NOT_FOLLOWED = frozenset(
    (
        *("__del__", "__repr__", "__str__", "__dir__", "__sizeof__", "__copy__", "__deepcopy__", "__reduce__"),
        *("__reduce_ex__", "__getstate__", "__setstate__", "__getnewargs__", "__init_subclass__", "__class_getitem__"),
        *("render", "close"),
    )
)
"""Methods that steps and resets do not call implicitly."""


_PIXELS = ("get_at", "get_at_mapped", "get_view", "get_buffer", "get_bounding_rect")
"""Methods of surfaces that read pixels."""
_PIXEL_MODULES = ("pygame.surfarray", "pygame.pixelcopy", "pygame.mask")
"""Modules whose functions read pixels."""
_PIXEL_FUNCTIONS = (("pygame.image", "tobytes"), ("pygame.image", "tostring"), ("pygame.transform", "average_color"))
"""Further functions that read pixels, by module."""
_REMAKES = frozenset(("__class__", "__init__", "deepcopy", "loads", "make", "type"))
"""Names by which code may make another environment, or call a constructor again."""
_SPACES = ("observation_space", "action_space")
"""Methods of PettingZoo environments that must return the same space each time, so caching them is fine."""


_LIBRARIES = frozenset(("matplotlib", "networkx", "pandas", "PIL", "scipy", "shapely"))
"""Packages that compute: what they remember of earlier calls decides no result, and what is random there, they draw
from a generator that they are given, else from that of `random` or `numpy.random`."""
_GIVEN = frozenset(("seed", "random_state", "rng", "generator", "random"))
"""The names of the parameters by which they are given one, or its seed."""
_DRAW = ("sample", "rvs", "resample")
"""The methods of their objects that draw, whatever their signatures say."""


def _is_library(module: Any) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES


def _is_clean(module: Any) -> bool:
    """True if the code of a module need not be followed: it shares nothing that influences steps."""
    # PettingZoo is not in the trusted packages, because its objects hold objects of other packages.
    return is_trusted(module) or _is_library(module) or str(module).partition(".")[0] == "pettingzoo"


def _draws_by_itself(value: Any) -> bool:
    """True if a function or a class of a library draws from a generator that all share where it is given none."""
    if not callable(value) or not _is_library(getattr(value, "__module__", None)):
        return False
    try:
        return not _GIVEN.isdisjoint(inspect.signature(value).parameters)
    except (TypeError, ValueError):  # C tells no signature
        return getattr(value, "__name__", "") in ("random", *_DRAW)


class Shared:
    """What classes and the code of their methods share between environments.

    Args:
        reason: Why the environments have no separate state; "": they may have one.
        places: Pairs of a module and the name of a shared value in it.
        owners: Classes whose attributes are shared values, except the names in `drawn`.
        functions: Functions, whose defaults, attributes and closures count.
        drawn: The names of picture caches, which do not count.
        samples: True if the code samples from spaces, so that their generators count.
        hashes: True if the code uses `hash`.
        readings: Functions that read state of the whole process.
        pixels: True if the code reads pixels of surfaces other than for rendering.
        unseeded: How a constructor of the environment draws from the system, which a new environment would do again.
    """

    def __init__(
        self,
        reason: str,
        places: tuple[tuple[Any, str], ...] = (),
        owners: tuple[type, ...] = (),
        functions: tuple[types.FunctionType, ...] = (),
        drawn: frozenset[str] = frozenset(),
        *,
        samples: bool = False,
        hashes: bool = False,
        readings: tuple[Callable[[], str], ...] = (),
        pixels: bool = False,
        unseeded: str = "",
    ) -> None:
        self.samples, self.hashes, self.pixels, self.unseeded = samples, hashes, pixels, unseeded
        self.reason, self._places, self._owners, self._functions = reason, places, owners, functions
        self._drawn, self._readings = drawn, readings

    def values(self) -> Iterator[Any]:
        """Yield the shared values in a fixed order."""
        for owner, name in self._places:
            yield vars(owner).get(name)
        for kind in self._owners:
            for name, value in sorted(vars(kind).items()):
                # Python's own attributes do not count: the cache of abstract base classes, and in an enumeration the
                # combinations of flags used so far.
                if (
                    not name.startswith(("__", "_abc_", "_value2member_map_"))
                    and name not in self._drawn
                    and is_data(value)
                ):
                    yield value
        for function in self._functions:
            yield from held_by(function)
        for read in self._readings:
            yield read()

    def digest(self) -> str:
        """Return a digest of the shared values, which changes when they change."""
        return digest_of(self.values(), samples=self.samples)

    def look(self) -> tuple[str, str]:
        """Return the digest, and why it may miss a change; "": it shows every change."""
        unseen: list[Any] = []
        digest = digest_of(self.values(), samples=self.samples, unseen=unseen)
        if not unseen:
            return digest, ""
        kind = type(unseen[0])
        title = f"{module_of(kind)}.{kind.__qualname__}"
        return digest, f"its class or its module holds a {title}, which all environments share, and nothing can compare"


_known: dict[frozenset[Any], Shared] = {}


def shared_by(code: Iterable[Any]) -> Shared:
    """Return what classes, functions and modules share. Results are cached.

    The cache key of a function is its code, because each environment may have its own function object. So the result
    does not include the values in closures.
    """
    found = list(code)
    key = frozenset(_key_of(item) for item in found)
    if key not in _known:
        if len(_known) > 1000:
            _known.clear()
        _known[key] = _Scan(found).look()
    return _known[key]


def _key_of(item: Any) -> Any:
    # A function with attributes counts as itself.
    return item.__code__ if isinstance(item, types.FunctionType) and not vars(item) else item


def code_in(values: Iterable[Any]) -> set[Any]:
    """Return the classes, functions and modules of objects in values, at any depth, also behind C objects."""
    found: set[Any] = set()
    seen: dict[int, Any] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        kind = type(value)
        if kind in _PLAIN or id(value) in seen or isinstance(value, (EnvSpec, logging.Logger)):
            continue
        seen[id(value)] = value
        if isinstance(value, (type, types.ModuleType)):
            found.add(value)
            continue
        if not is_trusted(module_of(kind)):
            found.add(kind)
        if isinstance(value, types.FunctionType):
            found.add(value)
        waiting += _parts_of(value)
    return found


_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))


def _parts_of(value: Any) -> list[Any]:
    """Return the parts of a value that may be or hold code."""
    found = [item for _, item in fields_of(value)]
    if isinstance(value, dict):
        return [*found, *(part for pair in dict.items(value) for part in pair)]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [*found, *value]
    if isinstance(value, np.ndarray):
        return list(value.flat) if value.dtype.hasobject else []
    if isinstance(value, types.FunctionType):
        return held_by(value)
    if isinstance(value, types.MethodType):
        # `__func__` may be a callable object, such as a `numpy.vectorize`.
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [*found, value.func, value.args, value.keywords]
    if not is_trusted(module_of(type(value))) or not type(value).__flags__ & (1 << 9):
        # Such as the function of a `map`. Modules and dicts are left out: they are reachable from everywhere.
        kinds = types.FunctionType, types.MethodType, functools.partial, tuple, list
        found += [item for item in gc.get_referents(value) if isinstance(item, kinds)]
    return found


class _Scan:
    """Follows what functions and the methods of classes use.

    Args:
        code: The classes of an environment, its wrappers and the objects in them, and its functions and modules.
    """

    def __init__(self, code: Iterable[Any]) -> None:
        self._own: dict[type, None] = {}
        self._methods: dict[str, list[types.FunctionType]] = {}
        self._waiting: deque[types.FunctionType] = deque()
        self._functions: dict[types.FunctionType, None] = {}
        self._held: dict[types.FunctionType, None] = {}
        """Functions whose closures belong to one environment; the closures are checked with the environment."""
        self._modules: dict[types.ModuleType, None] = {}
        self._places: dict[tuple[int, str], tuple[Any, str]] = {}
        self._names: set[str] = set()
        """The names of mutable class attributes."""
        self._used: set[str] = {"step", "reset", "__init__"}
        self._by_name = False
        """True if methods are called by computed names, so that any method may be called."""
        self._drawn: set[str] = set()
        self._chains: set[tuple[Any, str]] = set()
        """Pairs of names, for an attribute of an attribute."""
        self._library: dict[type, None] = {}
        """Classes of libraries."""
        self._trusted: dict[types.ModuleType, None] = {}
        """Trusted modules that are used as values; they are not scanned."""
        self._hashes = False
        self._readings: dict[Callable[[], str], None] = {}
        self._pixels = False
        self._looked: dict[int, Any] = {}
        self._reason = ""
        self._constructors: set[Any] = set()
        """The `__init__` of the environment's classes, which no step calls."""
        self._unseeded = ""
        """How one of them draws from the system."""
        self._remakes = False
        """True if a step may make another environment."""
        for item in sorted(code, key=_title_of):
            if isinstance(item, type):
                if is_env_class(item):
                    self._constructors.update(vars(owner).get("__init__") for owner in item.__mro__)
                self._add(item)
            elif isinstance(item, types.ModuleType):
                self._add_module(item)
            else:
                if item.__closure__:
                    self._held[item] = None
                self._waiting.append(item)

    def _add(self, kind: type) -> None:
        """Scan a class, its bases and its metaclass."""
        metaclass: Any = type(kind)
        for owner in (*kind.__mro__, *metaclass.__mro__):
            if _is_library(module_of(owner)):
                self._library[owner] = None
            if owner in self._own or _is_clean(module_of(owner)):
                continue
            self._own[owner] = None
            if issubclass(owner, threading.Thread):
                self._reason = self._reason or f"{owner.__qualname__} is a thread, which goes on by itself"
            for name, value in vars(owner).items():
                functions = list(_functions_of(value))
                self._methods.setdefault(name, []).extend(functions)
                if name in self._used or (self._by_name and name not in _NOT_FOLLOWED) or _is_implicit(name):
                    self._waiting.extend(functions)
                if isinstance(value, type):
                    # A nested class: a step may create objects of it.
                    self._add(value)
                elif not functions and not name.startswith("__"):
                    self._look_into(value, f"{owner.__qualname__}.{name}")
                    if is_data(value) and not is_fixed(value) and not _only_sets(value):
                        self._names.add(name)

    def _add_module(self, module: types.ModuleType) -> None:
        """Scan everything in a module that is used as a value."""
        if _is_clean(module.__name__):
            self._trusted[module] = None
            return
        if module in self._modules:
            return
        self._modules[module] = None
        for name, value in vars(module).items():
            if isinstance(value, types.FunctionType):
                self._methods.setdefault(name, []).append(value)
                if name in self._used or self._by_name:
                    self._waiting.append(value)
            elif isinstance(value, type):
                self._add(value)
            elif not name.startswith("__") and is_data(value):
                self._places[id(module), name] = module, name
                self._look_into(value, f"{module.__name__}.{name}")

    def _look_into(self, value: Any, where: str) -> None:
        """Look at a value that is shared, and at all that it holds."""
        waiting = [value]
        while waiting:
            item = waiting.pop()
            kind = type(item)
            if kind in _PLAIN or id(item) in self._looked or isinstance(item, np.ndarray):
                continue
            self._looked[id(item)] = item
            self._reason = self._reason or _reason(_unwrapped(item), where)
            functions = list(_functions_of(item))
            self._waiting.extend(functions)
            if isinstance(item, type):
                self._add(item)
            elif not functions and not isinstance(item, (types.ModuleType, gymnasium.Env)):
                if not _is_clean(module_of(kind)) or _is_library(module_of(kind)):
                    self._add(kind)
                if not _is_clean(module_of(kind)) or isinstance(item, _HOLDERS):
                    waiting += _parts_of(item)

    def _use(self, name: str) -> None:
        if name not in self._used:
            self._used.add(name)
            self._waiting.extend(self._methods.get(name, ()))

    def _use_all(self) -> None:
        if not self._by_name:
            self._by_name = True
            for name in list(self._methods):
                if name not in _NOT_FOLLOWED:
                    self._use(name)

    def look(self) -> Shared:
        """Follow all code, and return what is shared."""
        reason = self._of_classes()
        while not reason and self._waiting:
            function = self._waiting.popleft()
            if function in self._functions or _is_clean(function.__module__):
                continue
            self._functions[function] = None
            reason = self._of_function(function) or self._of_classes()
        reason = reason or self._of_trusted() or self._of_libraries() or (self._unseeded if self._remakes else "")
        if reason:
            return Shared(reason)
        return Shared(
            "",
            tuple(place for place in self._places.values() if place[1] not in self._drawn),
            tuple(self._own),
            tuple(function for function in self._functions if function not in self._held),
            frozenset(self._drawn),
            samples="sample" in self._used,
            hashes=self._hashes,
            readings=tuple(self._readings),
            pixels=self._pixels,
            unseeded=self._unseeded,
        )

    def _of_trusted(self) -> str:
        """Check the attributes used of trusted modules; return why the environment has no state, or ""."""
        for module in self._trusted:
            where = f"code that holds the module {module.__name__}"
            if module is np and self._by_name:
                return f"{where} reads attributes by names that it makes, which may be numpy.random"
            for name in sorted(self._used):
                if reason := _reason(getattr(module, name, None), where):
                    return reason
            for outer, inner in self._chains:
                part = getattr(module, str(outer), None)
                if isinstance(part, types.ModuleType) and (reason := _reason(getattr(part, inner, None), where)):
                    return reason
        return ""

    def _of_libraries(self) -> str:
        """Return which method of a library's objects is used that draws from what all share; "": none."""
        for kind in self._library:
            for name in sorted(self._used - {"__init__"}):
                if name in _DRAW or _draws_by_itself(getattr(kind, name, None)):
                    title = module_of(kind).partition(".")[0]
                    return f"its code uses {title} and calls a {name}(), which draws from what all share if it is let"
        return ""

    def _of_classes(self) -> str:
        for owner in self._own:
            for name, value in vars(owner).items():
                if isinstance(value, _GENERATORS):
                    return f"{owner.__qualname__}.{name} is a generator that all objects of the class share"
                if not isinstance(value, functools._lru_cache_wrapper):  # noqa: SLF001
                    continue
                # A cached space does no harm unless code samples from it.
                if name not in _SPACES or "sample" in self._used:
                    return f"{owner.__qualname__}.{name} remembers results for all objects of the class (lru_cache)"
        return self._reason

    def _of_function(self, function: types.FunctionType) -> str:
        """Scan what a function uses; return why its environment has no state, or ""."""
        where = function.__qualname__
        names = function.__globals__
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        closure = {name: cell.cell_contents for name, cell in cells if _has_contents(cell)}
        if function in self._held:
            # The other values of its closure belong to one environment, and are compared with it.
            followed = types.FunctionType, types.ModuleType, type
            closure = {name: value for name, value in closure.items() if isinstance(value, followed)}
        for value in held_by(function):
            if value is random or (isinstance(value, _GENERATORS) and function not in self._held):
                return f"{where} holds a generator that all environments share"
            if function not in self._held:
                self._look_into(value, where)
            for part in _functions_of(value):
                if function in self._held and part.__closure__:
                    self._held[part] = None
                self._waiting.append(part)
        modules: dict[str, Any] = {}
        for code in _codes(function.__code__):
            # The functions that a constructor makes may be called later.
            constructs = function in self._constructors and code is function.__code__
            if function.__name__ != "__init__" and not _REMAKES.isdisjoint(code.co_names):
                self._remakes = True
            for what, value in CodeUses(code, names, closure, frozenset(self._names), modules).found():
                if what == "unseeded":
                    text = f"{where} uses {value}() without a seed, which draws one from the system"
                    if not constructs:
                        return text
                    self._unseeded = text
                    continue
                if what == "refused":
                    return f"{where} uses {value}"
                if what == "stores":
                    return f"{where} writes {value!r} of its module or of what surrounds its class: all share it"
                if what == "changes":
                    if constructs:
                        # Such as its description (`metadata`). The digest shows changes by other environments.
                        continue
                    if "render" in where.lower():
                        # A cache of pictures, such as MiniGrid's: it does not influence steps.
                        self._drawn.add(value)
                        continue
                    return f"{where} changes {value!r}, which its class or its module holds: all environments share it"
                if what == "missing":
                    if "render" not in where.lower():
                        return f"{where} imports {value} later, which cannot be looked at before"
                    continue
                if what == "module":
                    self._add_module(value)
                    continue
                if what == "hash":
                    # What `__hash__` returns goes to a dict or set, or to other code that uses `hash`.
                    self._hashes = self._hashes or function.__name__ != "__hash__"
                    continue
                if what == "chain":
                    self._chains.add(value)
                    continue
                if what == "by name":
                    self._use_all()
                    continue
                if what == "method":
                    self._hashes = self._hashes or value == "__hash__"
                    self._pixels = self._pixels or (value in _PIXELS and "render" not in where.lower())
                    self._use(value)
                    continue
                if what == "data":
                    module = sys.modules.get(function.__module__)
                    if module is not None and vars(module).get(value) is function.__globals__.get(value):
                        self._places[id(module), value] = module, value
                    value = function.__globals__.get(value)
                    self._look_into(value, where)
                if what == "attribute":
                    owner, name = value
                    reads = owner.__name__ in _PIXEL_MODULES or (owner.__name__, name) in _PIXEL_FUNCTIONS
                    if reads and "render" not in where.lower():
                        self._pixels = True
                    value = getattr(owner, name, None)
                    if owner is sys and name == "modules":
                        return f"{where} uses sys.modules, by which it reaches what no copy has"
                    if is_data(value) and (not _is_clean(owner.__name__) or value is os.environ):
                        self._places[id(owner), name] = owner, name
                        self._look_into(value, where)
                reason = self._reason or _reason(value, where)
                if reason:
                    return reason
                if any(value is one for one in _BY_NAME):
                    self._use_all()
                for one, read in _READINGS:
                    if value is one:
                        self._readings[read] = None
                if isinstance(value, type):
                    self._remakes = self._remakes or (is_env_class(value) and not constructs)
                    self._add(value)
                else:
                    if _is_library(module_of(type(value))):
                        self._add(type(value))
                    self._waiting.extend(_functions_of(value))
        return ""


def _reason(value: Any, where: str) -> str:
    if isinstance(value, _GENERATORS):
        return f"{where} uses a generator of its module, which all environments share"
    if value is random or value is secrets or value is gc:
        return f"{where} uses the module {value.__name__}, which is the same for all environments"
    if isinstance(value, functools._lru_cache_wrapper) and not is_trusted(value.__module__):  # noqa: SLF001
        return f"{where} uses {value.__qualname__}, which remembers results of all environments (lru_cache)"
    if any(value is one for one in _BY_TEXT) or getattr(value, "__module__", None) in ("pkgutil", "pydoc", "runpy"):
        return f"{where} uses {value.__name__}(), by which it reaches what no copy has"
    if _draws_by_itself(value):
        return f"{where} uses {value.__module__}.{value.__qualname__}, which draws from what all share if it is let"
    for name, function in _OF_SYSTEM.items():
        if value is function:
            return f"{where} uses {function.__module__}.{name}, which is of the system, and cannot be set back"
    owner = getattr(value, "__self__", None)
    if owner is gc or (getattr(value, "__module__", None) == "secrets" and callable(value)):
        return f"{where} uses {value.__name__}, which no copy can set back"
    if owner is not None and not isinstance(owner, (types.ModuleType, type)) and isinstance(owner, _GENERATORS):
        title = getattr(value, "__name__", str(value))
        if owner is np.random.mtrand._rand:  # noqa: SLF001 - the one behind the functions of `numpy.random`
            title = f"numpy.random.{title}"
        return f"{where} draws from a generator that all environments share ({title})"
    return ""


_HOLDERS = (dict, list, tuple, set, frozenset, deque, types.SimpleNamespace, types.MappingProxyType, functools.partial)


def _title_of(item: Any) -> str:
    return str(getattr(item, "__qualname__", item))


def _is_implicit(name: str) -> bool:
    """True if Python calls methods with this name implicitly, such as `__call__`."""
    return name.startswith("__") and name.endswith("__") and name not in _NOT_FOLLOWED


def _unwrapped(value: Any) -> Any:
    return value.__func__ if isinstance(value, (classmethod, staticmethod)) else value


def _only_sets(value: Any) -> bool:
    """True if a value of a class is a descriptor that others set by it, and read of their own fields."""
    kind = type(value)
    return hasattr(kind, "__set__") and not hasattr(kind, "__get__") and not hasattr(kind, "__setitem__")


def _has_contents(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    parts = [value]
    if isinstance(value, property):
        parts = [value.fget, value.fset]
    elif isinstance(value, functools.cached_property):
        parts = [value.func]
    elif isinstance(value, (classmethod, staticmethod, types.MethodType)):
        parts = [value.__func__]
    elif isinstance(value, (functools.partial, functools.partialmethod)):
        parts = [value.func]
    elif isinstance(value, functools.singledispatchmethod):
        parts = [value.func, *value.dispatcher.registry.values()]
    for part in parts:
        while isinstance(getattr(part, "__wrapped__", None), types.FunctionType):
            if isinstance(part, types.FunctionType):
                yield part
            part = part.__wrapped__
        if isinstance(part, types.FunctionType):
            yield part


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
