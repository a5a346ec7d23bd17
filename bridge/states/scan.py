"""What an environment shares with others of its process: looked for in the code that it steps by, and in its classes.

A generator that belongs to a class or to a module is moved by every environment that draws from it. A state that holds
all fields of one environment is then no state. Comparing runs does not always show it: an environment may draw but once
in a thousand steps, such as for the place of its next goal.
"""

from __future__ import annotations

import dis
import functools
import gc
import os
import random
import secrets
import sys
import types
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from bridge.states.digest import digest_of, held_by, is_trusted

__all__ = ["Shared", "shared_by"]

_GENERATORS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)
# The names of instructions are those of Python 3.10 to 3.14: each version has some of them.
_GLOBALS = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "LOAD_BUILD_CLASS"))
_CELLS = frozenset(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"))
_ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD"))
_NOTHING = frozenset(("PRECALL", "CACHE", "PUSH_NULL", "EXTENDED_ARG", "NOP", "RESUME", "KW_NAMES"))
_CALLS = frozenset(("CALL", "CALL_FUNCTION", "CALL_METHOD", "PRECALL"))
_STORES = frozenset(("STORE_GLOBAL", "DELETE_GLOBAL"))
_IMPORTS = (("IMPORT_NAME", "random"), ("IMPORT_NAME", "numpy.random"), ("IMPORT_FROM", "random"))
_READS = frozenset(
    (
        *("BINARY_SUBSCR", "BINARY_SLICE", "BINARY_OP", "COPY", "SWAP", "DUP_TOP", "DUP_TOP_TWO", "ROT_TWO"),
        *("ROT_THREE", "LOAD_CONST", "LOAD_SMALL_INT", "LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"),
        *("LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW", "LOAD_DEREF", "INPLACE_ADD", "INPLACE_SUBTRACT"),
        *("INPLACE_MULTIPLY", "INPLACE_OR", "INPLACE_AND", "INPLACE_TRUE_DIVIDE"),
    )
)
"""Steps between a value and the change of what it holds."""
_CHANGES = (
    *("append", "appendleft", "extend", "extendleft", "insert", "remove", "pop", "popleft", "popitem", "clear"),
    *("update", "setdefault", "add", "discard", "sort", "reverse", "fill", "put", "itemset", "resize", "rotate"),
    *("difference_update", "intersection_update"),
)
"""Methods that change what they are called of."""
_OF_SYSTEM = {
    name: getattr(module, name)
    for module, names in (
        (os, ("urandom", "getrandom", "read", "write", "pipe", "open", "lseek")),
        (uuid, ("uuid1", "uuid4")),
        (random, ("SystemRandom",)),
    )
    for name in names
    if hasattr(module, name)
}
_SEEDED = (np.random.default_rng, np.random.SeedSequence, *_GENERATORS[1:], np.random.PCG64, np.random.MT19937)
"""What draws its seed from the system where it gets none."""
_BUILTINS = ("globals", "exec", "eval", "id")


class Shared:
    """What classes and the code of their methods share.

    Args:
        reason: Why their objects have no state of their own; "": they may have one.
        places: Modules, each with the name of a value there.
        owners: Classes, all of whose values count, but for those of some names.
        functions: Functions, whose defaults, attributes and closures count.
        drawn: Those names: of caches of pictures.
        samples: True if they draw from spaces, whose generators count then.
    """

    def __init__(
        self,
        reason: str,
        places: tuple[tuple[Any, str], ...] = (),
        owners: tuple[type, ...] = (),
        functions: tuple[types.FunctionType, ...] = (),
        drawn: frozenset[str] = frozenset(),
        samples: bool = False,
    ) -> None:
        self.samples = samples
        self.reason, self._places, self._owners, self._functions = reason, places, owners, functions
        self._drawn = drawn

    def values(self) -> Iterator[Any]:
        """Give the values that are shared now, in a fixed order."""
        for owner, name in self._places:
            yield vars(owner).get(name)
        for kind in self._owners:
            for name, value in sorted(vars(kind).items()):
                # What Python keeps in each class, such as a cache of abstract ones, decides nothing.
                if not name.startswith(("__", "_abc_")) and name not in self._drawn and _is_data(value):
                    yield value
        for function in self._functions:
            yield from held_by(function)

    def digest(self) -> str:
        """Return a digest of the values that are shared now: as long as it is the same, nobody has changed them."""
        return digest_of(self.values(), samples=self.samples)


_known: dict[frozenset[type], Shared] = {}


def shared_by(classes: Iterable[type]) -> Shared:
    """Look at classes; those that were looked at before are remembered."""
    key = frozenset(classes)
    if key not in _known:
        if len(_known) > 1000:
            _known.clear()
        _known[key] = _Scan(key).look()
    return _known[key]


class _Scan:
    """Follows what the methods of classes use.

    Args:
        classes: The classes of an environment, of its wrappers, and of what they hold.
    """

    def __init__(self, classes: Iterable[type]) -> None:
        self._own: dict[type, None] = {}
        self._methods: dict[str, list[types.FunctionType]] = {}
        self._waiting: deque[types.FunctionType] = deque()
        self._functions: dict[types.FunctionType, None] = {}
        self._places: dict[tuple[int, str], tuple[Any, str]] = {}
        self._names: set[str] = set()
        """Of what classes hold that may change."""
        self._used: set[str] = {"step", "reset", "__init__"}
        self._drawn: set[str] = set()
        for kind in sorted(classes, key=lambda kind: kind.__qualname__):
            self._add(kind)

    def _add(self, kind: type) -> None:
        """Look at a class and its bases, and at its metaclass."""
        metaclass: Any = type(kind)
        for owner in (*kind.__mro__, *metaclass.__mro__):
            if owner in self._own or is_trusted(owner.__module__):
                continue
            self._own[owner] = None
            for name, value in vars(owner).items():
                functions = list(_functions_of(value))
                self._methods.setdefault(name, []).extend(functions)
                if name in self._used:
                    self._waiting.extend(functions)
                if not functions and not name.startswith("__") and _is_data(value) and not _is_fixed(value):
                    self._names.add(name)

    def look(self) -> Shared:
        """Follow all, and return what is shared."""
        reason = self._of_classes()
        while not reason and self._waiting:
            function = self._waiting.popleft()
            if function in self._functions or is_trusted(function.__module__):
                continue
            self._functions[function] = None
            reason = self._of_function(function) or self._of_classes()
        if reason:
            return Shared(reason)
        places = tuple(place for place in self._places.values() if place[1] not in self._drawn)
        return Shared(
            "", places, tuple(self._own), tuple(self._functions), frozenset(self._drawn), "sample" in self._used
        )

    def _of_classes(self) -> str:
        for owner in self._own:
            for name, value in vars(owner).items():
                if isinstance(value, _GENERATORS):
                    return f"{owner.__qualname__}.{name} is a generator that all objects of the class share"
                if isinstance(value, functools._lru_cache_wrapper):  # noqa: SLF001
                    return f"{owner.__qualname__}.{name} remembers results for all objects of the class (lru_cache)"
        return ""

    def _of_function(self, function: types.FunctionType) -> str:
        """Look at what a function uses; return why its environment has no state, "": it may have one."""
        where = function.__qualname__
        names = function.__globals__
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        closure = {name: cell.cell_contents for name, cell in cells if _has_contents(cell)}
        for value in held_by(function):
            if isinstance(value, _GENERATORS) or (isinstance(value, types.ModuleType) and value is random):
                return f"{where} holds a generator that all environments share"
            if isinstance(value, types.FunctionType):
                self._waiting.append(value)
        for code in _codes(function.__code__):
            for what, value in _uses(code, names, closure, frozenset(self._names)):
                if what == "refused":
                    return f"{where} uses {value}"
                if what == "stores":
                    return f"{where} writes {value!r} of its module or of what surrounds its class: all share it"
                if what == "changes":
                    if "render" in where.lower():
                        # A cache of pictures, such as MiniGrid's: it decides nothing that comes next.
                        self._drawn.add(value)
                        continue
                    return f"{where} changes {value!r}, which its class or its module holds: all environments share it"
                if what == "method":
                    if value not in self._used:
                        self._used.add(value)
                        self._waiting.extend(self._methods.get(value, ()))
                    continue
                if what == "data":
                    module = sys.modules.get(function.__module__)
                    if module is not None and vars(module).get(value) is function.__globals__.get(value):
                        self._places[id(module), value] = module, value
                    value = function.__globals__.get(value)
                    if not isinstance(value, type) and not is_trusted(type(value).__module__):
                        self._add(type(value))
                if what == "attribute":
                    owner, name = value
                    value = getattr(owner, name, None)
                    if _is_data(value) and (not is_trusted(owner.__name__) or value is os.environ):
                        self._places[id(owner), name] = owner, name
                reason = _reason(value, where)
                if reason:
                    return reason
                if isinstance(value, type):
                    if not is_trusted(value.__module__):
                        self._add(value)
                else:
                    self._waiting.extend(_functions_of(value))
        return ""


def _reason(value: Any, where: str) -> str:
    if isinstance(value, _GENERATORS):
        return f"{where} uses a generator of its module, which all environments share"
    if isinstance(value, types.ModuleType) and value in (random, secrets, gc):
        return f"{where} uses the module {value.__name__}, which is the same for all environments"
    if isinstance(value, functools._lru_cache_wrapper) and not is_trusted(value.__module__):  # noqa: SLF001
        return f"{where} uses {value.__qualname__}, which remembers results of all environments (lru_cache)"
    for name, function in _OF_SYSTEM.items():
        if value is function:
            return f"{where} uses {function.__module__}.{name}, which is of the system, and cannot be set back"
    owner = getattr(value, "__self__", None)
    if owner is gc or (getattr(value, "__module__", None) == "secrets" and callable(value)):
        return f"{where} uses {value.__name__}, which no copy can set back"
    if owner is not None and not isinstance(owner, (types.ModuleType, type)) and isinstance(owner, _GENERATORS):
        return f"{where} draws from a generator that all environments share ({getattr(value, '__name__', value)})"
    return ""


def _has_contents(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _is_data(value: Any) -> bool:
    kinds = types.FunctionType, types.ModuleType, type, types.BuiltinFunctionType, property, classmethod, staticmethod
    if isinstance(value, kinds):
        return False
    # Descriptors of one's own may hold something.
    return not hasattr(value, "__get__") or not is_trusted(type(value).__module__)


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    parts = [value]
    if isinstance(value, property):
        parts = [value.fget, value.fset]
    elif isinstance(value, functools.cached_property):
        parts = [value.func]
    elif isinstance(value, (classmethod, staticmethod, types.MethodType)):
        parts = [value.__func__]
    elif isinstance(value, functools.partial):
        parts = [value.func]
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


def _is_fixed(value: Any) -> bool:
    return isinstance(
        value, (int, float, complex, str, bytes, bool, type(None), tuple, frozenset, np.generic, np.dtype)
    )


def _uses(
    code: types.CodeType, names: Mapping[str, Any], closure: Mapping[str, Any], of_class: frozenset[str]
) -> Iterator[tuple[str, Any]]:
    """Give what code uses.

    Args:
        code: The code.
        names: The globals of its module.
        closure: What its function got of the functions around it, by name.
        of_class: The names of what classes hold that may change.

    Returns:
        Pairs: `value` and what a global name, or one of the closure, leads to; `attribute` and a module with the name
        of what is read there; `data` and a global's name; `method` and the name of an attribute of something; `stores`
        and the name of a global that it writes; `changes` and the name of what it changes in a class or in its module;
        `refused` and what no environment with states may use.
    """
    module: Any = None
    called: Any = None  # what was loaded last, where it is a function or a class
    after = ""  # the instruction before
    held = ""  # the name of a shared value that was loaded, until something else is done
    for step in dis.get_instructions(code):
        if step.opname in _ATTRIBUTES:
            name = step.argval if isinstance(step.argval, str) else ""
            if held and name in _CHANGES:
                yield "changes", held
            if isinstance(module, types.ModuleType):
                owner, module = module, getattr(module, name, None)
                called = module
                if not isinstance(module, types.ModuleType):
                    yield "attribute", (owner, name)
            else:
                module = None
                yield "method", name
            # An attribute of a variable is another value: what was held before lies below it.
            held = name if name in of_class else ("" if after.startswith("LOAD_FAST") else held)
            after = step.opname
            continue
        if step.opname in _CALLS and step.argval == 0 and called is not None and called in _SEEDED:
            yield "refused", f"{called.__name__}() without a seed, which draws one from the system"
        if step.opname in _NOTHING:
            continue
        after = step.opname
        # A module that is used as a value: what becomes of it is not followed.
        if isinstance(module, types.ModuleType) and module in (random, np.random):
            yield "value", random
        if step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE") and held:
            yield "changes", held
        if step.opname not in _READS and step.opname not in _GLOBALS and step.opname not in _CELLS:
            held = ""
        module = called = None
        if step.opname in _GLOBALS or (step.opname in _CELLS and step.argval in closure):
            known = names if step.opname in _GLOBALS else closure
            module = called = known.get(step.argval)
            if step.argval not in known:
                if step.argval in _BUILTINS:
                    yield "refused", f"{step.argval}(), by which it reaches what no copy has"
            elif not isinstance(module, types.ModuleType):
                held = step.argval if _is_data(module) and not _is_fixed(module) else ""
                yield ("data", step.argval) if _is_data(module) and known is names else ("value", module)
        elif step.opname in _STORES or (step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in closure):
            yield "stores", step.argval
        elif (step.opname, step.argval) in _IMPORTS:
            yield "value", random
