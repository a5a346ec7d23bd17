"""A digest of values, by what they hold: two of the same digest are alike, whatever else has become of their objects.

Objects of classes written in Python are looked at field by field, functions with their defaults, their attributes and
what their closures hold. Of what cannot be looked at, the identity counts: that it is still the same object.
"""

from __future__ import annotations

import contextvars
import functools
import hashlib
import os
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import gymnasium
import numpy as np

__all__ = ["digest_of", "fields_of", "held_by", "is_trusted", "module_of", "objects_in", "slots_of"]

_TRUSTED = frozenset(("numpy", "gymnasium", "ale_py", "mujoco", "pygame", "builtins", "google", "bridge"))
"""Packages whose environments and objects draw from their own generators alone."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_MOST_DEEP = 100


def module_of(kind: type) -> str:
    """Return the name of the module of a class; "": a class of C may have none."""
    module = getattr(kind, "__module__", None)
    return module if isinstance(module, str) else ""


def is_trusted(module: Any) -> bool:
    """True if the code of a module shares no state between environments."""
    top = str(module).partition(".")[0]
    return top in _TRUSTED or (top in sys.stdlib_module_names and top != "__main__")


def fields_of(value: Any) -> list[tuple[str, Any]]:
    """Return the attributes of an object, those of `__slots__` too."""
    found = list(getattr(value, "__dict__", {}).items())
    for name in slots_of(type(value)):
        try:
            found.append((name, object.__getattribute__(value, name)))
        except AttributeError:  # it has none yet
            continue
    return found


def slots_of(kind: type) -> list[str]:
    """Return the names of the `__slots__` of a class, as attributes have them."""
    found = []
    for owner in kind.__mro__:
        slots = owner.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name not in ("__dict__", "__weakref__"):
                # Private names of slots are mangled, as those of attributes are in code.
                mangled = name.startswith("__") and not name.endswith("__")
                found.append(f"_{owner.__name__.lstrip('_')}{name}" if mangled else name)
    return found


def held_by(function: types.FunctionType) -> list[Any]:
    """Return what a function holds beside its code: closure, defaults and attributes."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # it is empty yet
            continue
    return [*found, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *vars(function).values()]


def objects_in(values: Iterable[Any]) -> dict[int, Any]:
    """Return the objects among values, and in them, that can be told from a copy, by their ids."""
    found: dict[int, Any] = {}
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        kind = type(value)
        fixed = kind in _PLAIN or isinstance(value, (type, types.ModuleType, gymnasium.Env, types.FunctionType))
        if fixed or id(value) in found:
            continue
        found[id(value)] = value
        if isinstance(value, dict):
            waiting += [part for pair in dict.items(value) for part in pair]
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            waiting += value
        elif not is_trusted(module_of(kind)) or kind is types.SimpleNamespace:
            waiting += [item for _, item in fields_of(value)]
    return found


def digest_of(values: Iterable[Any], *, samples: bool = True, layers: Mapping[int, int] | None = None) -> str:
    """Return a digest of what values hold now.

    Args:
        values: The values.
        samples: False: what a space would draw next does not count.
        layers: The numbers of environments that are told apart by these, by their ids.
    """
    made = hashlib.blake2b(digest_size=16)
    seen: dict[int, int] = {}
    alive: list[Any] = []  # whose ids are in `seen`

    def add(value: Any, depth: int) -> None:
        kind = type(value)
        if kind in _PLAIN:
            made.update(f"{kind.__name__} {value!r};".encode())
            return
        if layers is not None and id(value) in layers:
            made.update(f"layer {layers[id(value)]};".encode())
            return
        if id(value) in seen:
            made.update(f"again {seen[id(value)]};".encode())
            return
        seen[id(value)] = len(seen)
        alive.append(value)
        title = f"{module_of(kind)}.{kind.__qualname__}"
        made.update(f"{title}(".encode())
        if depth > _MOST_DEEP:
            made.update(str(id(value)).encode())
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            made.update(f"{value.dtype.str} {value.shape} ".encode() + value.tobytes())
        elif isinstance(value, (list, tuple, dict)) or kind in (set, frozenset):
            is_dict = isinstance(value, dict)
            items = [part for pair in dict.items(value) for part in pair] if is_dict else list(value)
            if kind in (set, frozenset):
                # Their order comes of their hashes.
                items = sorted(items, key=repr)
            for item in items:
                add(item, depth + 1)
            if kind not in (list, tuple, dict, set, frozenset):
                for name, item in fields_of(value):
                    made.update(name.encode())
                    add(item, depth + 1)
        elif isinstance(value, types.FunctionType):
            made.update(f"{value.__module__}.{value.__qualname__} ".encode() + value.__code__.co_code)
            for item in held_by(value):
                add(item, depth + 1)
        elif isinstance(value, (type, types.ModuleType)):
            made.update(f"{getattr(value, '__module__', '')}.{value.__name__}".encode())
        elif isinstance(value, types.MethodType):
            add(value.__func__, depth + 1)
            add(value.__self__, depth + 1)
        elif isinstance(value, functools.partial):
            for item in (value.func, value.args, value.keywords):
                add(item, depth + 1)
        elif value is os.environ:
            add(dict(os.environ), depth + 1)
        elif isinstance(value, contextvars.ContextVar):
            add(value.get(None), depth + 1)
        elif isinstance(value, gymnasium.Space) and not samples:
            made.update(repr(value).encode())
        elif isinstance(value, gymnasium.Env):
            # An environment that a class or a module knows is in a state of its own.
            made.update(str(id(value)).encode())
        elif is_trusted(module_of(kind)) or not (kind.__flags__ & (1 << 9)) or isinstance(value, random.Random):
            try:
                made.update(pickle.dumps(value))
            except Exception:  # whatever refuses to be pickled: at least it is the same
                made.update(str(id(value)).encode())
        else:
            for name, item in fields_of(value):
                made.update(name.encode())
                add(item, depth + 1)
        made.update(b")")

    for value in values:
        add(value, 0)
    return made.hexdigest()
