"""The names of an environment's attributes and methods, found without running any code of the environment."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from functools import partialmethod
from typing import Any

import gymnasium

from bridge.core.encoding.names import AttributeNames

__all__ = ["AttributeList", "named_values"]

_METHODS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    classmethod,
    staticmethod,
    partialmethod,
)
# What every environment and every wrapper of Gymnasium's has, and `env`: a loop that looks for the innermost
# environment by `hasattr(env, "env")` has to end at the remote one.
_OF_ALL = frozenset((*dir(gymnasium.Env), *dir(gymnasium.Wrapper), "env"))


def named_values(layers: Sequence[object]) -> Iterator[tuple[str, object, bool]]:
    """Give the public names of some layers, the outermost first, with what is found there and whether in a class.

    A name that comes again is hidden by the first of it. What is found in a class may be a descriptor: no property is
    run.
    """
    for layer in layers:
        for owner in (layer, *type(layer).__mro__):
            # A copy of the items: another thread may add some.
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if isinstance(name, str) and not name.startswith("_"):
                    yield name, value, owner is not layer


class AttributeList:
    """The names that clients are told.

    Args:
        layers: The wrappers, the outermost first, and the environment. They are not kept: whoever holds this list does
            not keep the environment alive.
    """

    def __init__(self, layers: Sequence[object]) -> None:
        self._seen: list[frozenset[str]] = []
        self.text = AttributeNames()
        """The names as they travel."""
        self.renew(layers)

    def renew(self, layers: Sequence[object]) -> bool:
        """Look again, which costs some microseconds where no layer has another attribute; return whether one has."""
        # Classes do not change, and most environments have all their attributes from their construction on.
        dicts = [getattr(layer, "__dict__", {}) for layer in layers]
        if len(dicts) == len(self._seen) and all(map(_same, dicts, self._seen)):
            return False
        self._seen = [frozenset(each) for each in dicts]
        names: dict[str, bool] = {}
        for name, value, of_class in named_values(layers):
            if name not in _OF_ALL and name.isidentifier():
                # A function in an instance may be replaced by anything: only what a class has is surely a method.
                names.setdefault(name, of_class and isinstance(value, _METHODS))
        self.text = AttributeNames.of(names)
        return True


def _same(attributes: Any, names: frozenset[str]) -> bool:
    # By the length first: it is nearly always what differs.
    return len(attributes) == len(names) and attributes.keys() == names
