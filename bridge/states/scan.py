"""What an environment shares with others of its process: looked for in the code that it steps by, and in its classes.

A generator that belongs to a class or to a module is moved by every environment that draws from it. A state that holds
all fields of one environment is then no state. Comparing runs does not always show it: an environment may draw but once
in a thousand steps, such as for the place of its next goal.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import gymnasium
import numpy as np

__all__ = ["Shared", "shared_by"]

_TRUSTED = frozenset(("numpy", "gymnasium", "ale_py", "mujoco", "pygame", "builtins", "google", "bridge"))
"""Packages whose environments and objects draw from their own generators alone."""
_GENERATORS = (np.random.Generator, np.random.RandomState, np.random.BitGenerator, random.Random)
_GLOBALS = frozenset(("LOAD_GLOBAL", "LOAD_NAME"))
_ATTRIBUTES = frozenset(("LOAD_ATTR", "LOAD_METHOD"))
_IMPORTS = (("IMPORT_NAME", "random"), ("IMPORT_NAME", "numpy.random"), ("IMPORT_FROM", "random"))
_READS = ("BINARY_SUBSCR", "LOAD_CONST", "LOAD_FAST", "LOAD_DEREF", "BINARY_OP", "BINARY_SLICE", "COPY", "SWAP")
"""Steps between a value and the change of what it holds."""
_CHANGES = (
    *("append", "appendleft", "extend", "extendleft", "insert", "remove", "pop", "popleft", "popitem", "clear"),
    *("update", "setdefault", "add", "discard", "sort", "reverse", "fill", "put", "itemset", "resize", "rotate"),
    *("difference_update", "intersection_update"),
)
"""Methods that change what they are called of."""


class Shared:
    """What classes and the code of their methods share.

    Args:
        reason: Why their objects have no state of their own; "": they may have one.
        places: Modules and classes, each with the name of a value there.
    """

    def __init__(self, reason: str, places: tuple[tuple[Any, str], ...]) -> None:
        self.reason, self.places = reason, places

    def digest(self) -> str:
        """Return a digest of the values that are shared now: as long as it is the same, nobody has changed them."""
        made = hashlib.sha256()
        for owner, name in self.places:
            value = vars(owner).get(name)
            _make_generators(value)
            try:
                made.update(pickle.dumps(value))
            except Exception:  # whatever refuses to be pickled is no plain value
                made.update(str(id(value)).encode())
        return made.hexdigest()


def _make_generators(value: Any) -> None:
    """Have a space make its generators, and those of its parts.

    A space makes one when somebody asks for it, as each vector environment does: that moves none.
    """
    if isinstance(value, gymnasium.Space):
        _ = value.np_random
        parts = getattr(value, "spaces", ())
        for part in parts.values() if isinstance(parts, dict) else parts:
            _make_generators(part)


_known: dict[frozenset[type], Shared] = {}


def shared_by(classes: Iterable[type]) -> Shared:
    """Look at classes; those that were looked at before are remembered."""
    key = frozenset(classes)
    if key not in _known:
        if len(_known) > 1000:
            _known.clear()
        _known[key] = _look(key)
    return _known[key]


def _is_trusted(module: Any) -> bool:
    top = str(module).partition(".")[0]
    return top in _TRUSTED or (top in sys.stdlib_module_names and top != "__main__")


def _look(classes: Iterable[type]) -> Shared:
    owners = [owner for kind in sorted(classes, key=lambda kind: kind.__qualname__) for owner in kind.__mro__]
    own = list(dict.fromkeys(owner for owner in owners if not _is_trusted(owner.__module__)))
    places: dict[tuple[int, str], tuple[Any, str]] = {}
    methods: dict[str, list[types.FunctionType]] = {}
    waiting: deque[types.FunctionType] = deque()
    for owner in own:
        for name, value in vars(owner).items():
            functions = list(_functions_of(value))
            methods.setdefault(name, []).extend(functions)
            if isinstance(value, _GENERATORS):
                return Shared(f"{owner.__qualname__}.{name} is a generator that all objects of the class share", ())
            if not functions and not name.startswith("__") and _is_data(value):
                places[id(owner), name] = owner, name
    for name in ("step", "reset", "__init__"):
        waiting.extend(methods.get(name, ()))
    data = frozenset(name for owner, name in places.values() if not _is_fixed(vars(owner)[name]))
    seen: set[types.CodeType] = set()
    drawn: set[str] = set()
    while waiting:
        function = waiting.popleft()
        for code in _codes(function.__code__):
            if code in seen:
                continue
            seen.add(code)
            for what, value in _uses(code, function.__globals__, data):
                if what == "stores":
                    text = f"{function.__qualname__} writes the global {value!r} of its module"
                    return Shared(f"{text}, which all environments share", ())
                if what == "changes" and "render" in function.__qualname__.lower():
                    # A cache of pictures, such as MiniGrid's: it decides nothing that comes next.
                    drawn.add(value)
                    continue
                if what == "changes":
                    text = f"{function.__qualname__} changes {value!r}, which its class or its module holds"
                    return Shared(f"{text}: all environments share it", ())
                if what == "method":
                    waiting.extend(methods.get(value, ()))
                    continue
                if what == "data":
                    module = sys.modules.get(function.__module__)
                    if module is not None and vars(module).get(value) is function.__globals__.get(value):
                        places[id(module), value] = module, value
                    value = function.__globals__.get(value)
                reason = _reason(value, function.__qualname__)
                if reason:
                    return Shared(reason, ())
                if isinstance(value, type) and not _is_trusted(value.__module__) and value not in own:
                    waiting.extend(found for item in vars(value).values() for found in _functions_of(item))
                elif not isinstance(value, type):
                    waiting.extend(found for found in _functions_of(value) if not _is_trusted(found.__module__))
    return Shared("", tuple(place for place in places.values() if place[1] not in drawn))


def _reason(value: Any, where: str) -> str:
    if isinstance(value, _GENERATORS):
        return f"{where} uses a generator of its module, which all environments share"
    if isinstance(value, types.ModuleType):
        return f"{where} uses the module {value.__name__}, whose generator all share" if value in (random,) else ""
    owner = getattr(value, "__self__", None)
    if owner is not None and not isinstance(owner, (types.ModuleType, type)) and isinstance(owner, _GENERATORS):
        return f"{where} draws from a generator that all environments share ({getattr(value, '__name__', value)})"
    return ""


def _is_data(value: Any) -> bool:
    kinds = types.FunctionType, types.ModuleType, type, types.BuiltinFunctionType, property, classmethod, staticmethod
    return not isinstance(value, kinds) and not hasattr(value, "__get__")


def _functions_of(value: Any) -> Iterator[types.FunctionType]:
    parts = [value]
    if isinstance(value, property):
        parts = [value.fget, value.fset]
    elif isinstance(value, functools.cached_property):
        parts = [value.func]
    elif isinstance(value, (classmethod, staticmethod)):
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


def _uses(code: types.CodeType, names: dict[str, Any], of_class: frozenset[str]) -> Iterator[tuple[str, Any]]:
    """Give what code uses.

    Args:
        code: The code.
        names: The globals of its module.
        of_class: The names of what classes hold that may change.

    Returns:
        Pairs: `value` and what a global name and attributes of modules lead to; `data` and a global's name; `method`
        and the name of an attribute of something; `stores` and the name of a global that it writes; `changes` and the
        name of what it changes in a class or in its module.
    """
    module: Any = None
    held = ""  # the name of a shared value that was loaded, until something else is done
    for step in dis.get_instructions(code):
        if step.opname in _ATTRIBUTES:
            name = step.argval if isinstance(step.argval, str) else ""
            if held and name in _CHANGES:
                yield "changes", held
            if isinstance(module, types.ModuleType):
                module = getattr(module, name, None)
                if not isinstance(module, types.ModuleType):
                    yield "value", module
            else:
                module = None
                yield "method", name
            held = name if name in of_class else held
            continue
        if step.opname in ("PRECALL", "CACHE", "PUSH_NULL"):
            continue
        # A module that is used as a value: what becomes of it is not followed.
        if isinstance(module, types.ModuleType) and module in (random, np.random):
            yield "value", random
        if step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR") and held:
            yield "changes", held
        if step.opname not in _READS and step.opname not in _GLOBALS:
            held = ""
        module = None
        if step.opname in _GLOBALS:
            module = names.get(step.argval)
            if not isinstance(module, types.ModuleType) and step.argval in names:
                held = step.argval if _is_data(module) and not _is_fixed(module) else ""
                yield ("data", step.argval) if _is_data(module) else ("value", module)
        elif step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            yield "stores", step.argval
        elif (step.opname, step.argval) in _IMPORTS:
            yield "value", random
