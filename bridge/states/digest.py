"""A digest of values, by what they hold: two of the same digest are alike, whatever else has become of their objects.

Objects of classes written in Python are looked at field by field, functions with their defaults, their attributes and
what their closures hold. Of what cannot be looked at, the identity counts: that it is still the same object.
"""

from __future__ import annotations

import contextvars
import functools
import hashlib
import logging
import os
import pickle
import random
import threading
import types
import typing
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import gymnasium
import numpy as np

from bridge.states.fields import dict_of, fields_of, held_by, is_pure, is_trusted, module_of

__all__ = ["digest_of", "objects_in"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_INERT = (
    *(type(threading.Lock()), type(threading.RLock()), logging.Handler, logging.Logger),
    *(typing.TypeVar, typing.ParamSpec),
)
_MOST_DEEP = 100


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
            # Something may hold it, as `vars` gives it away.
            waiting.append(dict_of(value))
    return found


def digest_of(
    values: Iterable[Any],
    *,
    samples: bool = True,
    layers: Mapping[int, int] | None = None,
    unseen: list[Any] | None = None,
) -> str:
    """Return a digest of what values hold now.

    Args:
        values: The values.
        samples: False: what a space would draw next does not count.
        layers: The numbers of environments that are told apart by these, by their ids.
        unseen: Gets what cannot be looked at, and may change.
    """
    made = hashlib.blake2b(digest_size=16)
    seen: dict[int, int] = {}
    alive: list[Any] = []  # whose ids are in `seen`

    def add_by_identity(value: Any) -> None:
        made.update(str(id(value)).encode())
        if unseen is not None and not _is_inert(value):
            unseen.append(value)

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
            add_by_identity(value)
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            made.update(f"{value.dtype.str} {value.shape} ".encode() + value.tobytes())
            for name, item in fields_of(value):
                made.update(name.encode())
                add(item, depth + 1)
        elif isinstance(value, (list, tuple, dict, set, frozenset, deque)):
            items: list[Any] = list(value)
            if isinstance(value, dict):
                items = [part for pair in dict.items(value) for part in pair]
            if isinstance(value, (set, frozenset)):
                # Their order comes of their hashes.
                items = sorted(items, key=repr)
            for item in items:
                add(item, depth + 1)
            if kind not in (list, tuple, dict, set, frozenset, deque):
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
            for item in (value.func, value.args, value.keywords, vars(value)):
                add(item, depth + 1)
        elif isinstance(value, types.SimpleNamespace):
            add(vars(value), depth + 1)
        elif isinstance(value, types.MappingProxyType):
            add(dict(value), depth + 1)
        elif isinstance(value, weakref.ref):
            add(value(), depth + 1)
        elif value is os.environ:
            add(dict(os.environ), depth + 1)
        elif isinstance(value, contextvars.ContextVar):
            add(value.get(None), depth + 1)
        elif isinstance(value, gymnasium.Space) and not samples:
            made.update(repr(value).encode())
        elif isinstance(value, gymnasium.Env):
            # An environment that a class or a module knows is in a state of its own.
            add_by_identity(value)
        elif is_trusted(module_of(kind)) or not is_pure(kind) or isinstance(value, random.Random):
            try:
                made.update(pickle.dumps(value))
            except Exception:  # whatever refuses to be pickled: at least it is the same
                add_by_identity(value)
        else:
            for name, item in fields_of(value):
                made.update(name.encode())
                add(item, depth + 1)
        made.update(b")")

    for value in values:
        add(value, 0)
    # `add` refers to itself: until garbage is collected, it would keep alive what an environment has dropped.
    alive.clear()
    return made.hexdigest()


def _is_inert(value: Any) -> bool:
    """True if an object can be told by its identity alone: it holds nothing that decides what comes next."""
    kind = type(value)
    if isinstance(value, _INERT) or module_of(kind).partition(".")[0] == "pygame":
        return True
    # Such as a function that was compiled; those that belong to an object of C may change that.
    return callable(value) and getattr(value, "__self__", None) is None and not isinstance(value, functools.partial)
