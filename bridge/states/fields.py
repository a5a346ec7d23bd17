"""The fields of objects, including `__slots__`, and whether an object holds more than its fields."""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict, defaultdict
from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv

__all__ = [
    "dict_of",
    "fields_of",
    "held_by",
    "impure",
    "is_env",
    "is_env_class",
    "is_pure",
    "is_sentinel",
    "is_trusted",
    "module_of",
    "new_object",
    "set_dict",
    "slots_of",
]

_TRUSTED = frozenset(("numpy", "gymnasium", "ale_py", "mujoco", "Box2D", "pygame", "builtins", "google", "bridge"))
"""Packages whose environments and objects draw random numbers only from their own generators."""


def module_of(kind: type) -> str:
    """Return the name of a class's module; "" if it has none, as some C classes."""
    module = getattr(kind, "__module__", None)
    return module if isinstance(module, str) else ""


def is_trusted(module: Any) -> bool:
    """True if the code of a module shares no state between environments."""
    top = str(module).partition(".")[0]
    return top in _TRUSTED or (top in sys.stdlib_module_names and top != "__main__")


def is_env(value: Any) -> bool:
    """True for an environment of Gymnasium or PettingZoo, a vector environment, or a wrapper of one."""
    kind: Any = type(value)
    return is_env_class(kind)


@functools.lru_cache(4096)
def is_env_class(kind: type) -> bool:
    """True for the classes of the values for which `is_env` is true."""
    if issubclass(kind, (gymnasium.Env, VectorEnv)):
        return True
    # By name, because PettingZoo may not be installed.
    return any(module_of(each) == "pettingzoo.utils.env" for each in kind.__mro__)


def dict_of(value: Any) -> Any:
    """Return an object's real `__dict__`, even if its class overrides attribute access; None: it has none."""
    kind: Any = type(value)
    getter = _dict_getter(kind)
    return None if getter is None else getter.__get__(value)


def set_dict(value: Any, fields: dict[str, Any]) -> None:
    """Replace an object's `__dict__`, even if its class overrides attribute access."""
    kind: Any = type(value)
    _dict_getter(kind).__set__(value, fields)


@functools.lru_cache(4096)
def _dict_getter(kind: type) -> Any:
    for owner in kind.__mro__:
        found = vars(owner).get("__dict__")
        if isinstance(found, (types.GetSetDescriptorType, types.MemberDescriptorType)):
            return found
    return None


def fields_of(value: Any) -> list[tuple[str, Any]]:
    """Return an object's attributes, including those of `__slots__`."""
    found = list((dict_of(value) or {}).items())
    for name in slots_of(type(value)):
        try:
            found.append((name, object.__getattribute__(value, name)))
        except AttributeError:  # not assigned yet
            continue
    return found


def is_sentinel(value: Any) -> bool:
    """True if an object is compared by identity, such as `object()`, `dataclasses.MISSING` or `numpy.tanh`."""
    kind = type(value)
    name = module_of(kind)
    of_numpy = name == "numpy"
    if not of_numpy and (fields_of(value) or not is_pure(kind)):
        return False
    if not of_numpy and dict_of(value) is None and not slots_of(kind):
        return True  # it can never have an attribute
    module = sys.modules.get(name)
    return module is not None and any(item is value for item in vars(module).values())


def slots_of(kind: Any) -> tuple[str, ...]:
    """Return the attribute names of a class's `__slots__`."""
    return _slots_of(kind)


@functools.lru_cache(4096)
def _slots_of(kind: type) -> tuple[str, ...]:
    found = []
    for owner in kind.__mro__:
        slots = owner.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            if name not in ("__dict__", "__weakref__"):
                # Python mangles private slot names like other private names.
                mangled = name.startswith("__") and not name.endswith("__")
                found.append(f"_{owner.__name__.lstrip('_')}{name}" if mangled else name)
    return tuple(found)


def held_by(function: types.FunctionType) -> list[Any]:
    """Return the values in a function's closure, defaults and attributes."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # an empty cell
            continue
    return [*found, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *vars(function).values()]


_CONTAINERS = (object, list, dict, tuple, OrderedDict, defaultdict, types.SimpleNamespace)


def is_pure(kind: type) -> bool:
    """True if the objects of a class can be copied by their fields."""
    return impure(kind) is None


def new_object(kind: type) -> Any:
    """Return an object of a class without fields."""
    base: Any = types.SimpleNamespace if issubclass(kind, types.SimpleNamespace) else object
    return base.__new__(kind)


@functools.lru_cache(4096)
def impure(kind: type) -> str | None:
    """Return why objects of a class cannot be copied by their fields; None: they can."""
    title = f"a {getattr(kind, '__module__', '')}.{kind.__qualname__}"
    for owner in kind.__mro__:
        if owner in _CONTAINERS or getattr(owner, "__module__", "") in ("typing", "abc", "collections.abc"):
            continue
        if not owner.__flags__ & (1 << 9):  # not a heap type, so not defined in Python
            return f"{title}, which is of no class written in Python, and is not copied"
        slots = set(slots_of(owner))
        for name, value in vars(owner).items():
            # A class defined in C has methods and members of these descriptor types.
            made_in_c = isinstance(value, (types.MethodDescriptorType, types.ClassMethodDescriptorType))
            getter = isinstance(value, types.GetSetDescriptorType) and name not in ("__dict__", "__weakref__")
            member = isinstance(value, types.MemberDescriptorType) and name not in slots
            if made_in_c or getter or member:
                return f"{title}, whose class {owner.__qualname__} is not written in Python, and is not copied"
        if "__del__" in vars(owner) and not issubclass(kind, gymnasium.Env):
            return f"{title}, which ends something when it is dropped (__del__), and is not copied"
    if issubclass(kind, BaseException):
        return f"{title}, an exception, which is not copied"
    try:
        if not issubclass(kind, (list, dict, tuple)):
            new_object(kind)
    except TypeError:
        # Abstract classes end here too, but have no objects to copy.
        return f"{title}, which is not made by Python alone, and is not copied"
    return None
