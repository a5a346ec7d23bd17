"""Attributes that users read and set by a dot on a remote environment: which are here, and which are where it runs."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from bridge.core.encoding.names import KnownNames
from bridge.core.extras import feature, provided
from bridge.errors import Code, MissingAttributeError, RefusedError

__all__ = ["OwnAttributes", "RemoteAttributes", "missing_attributes"]

_BY_A_DOT = "a vector environment has none of its environments' attributes: get_attr, set_attr and call reach them"


class OwnAttributes:
    """Refuses attributes by a dot that the object does not have: set here, they would act on no environment.

    What a class of the object defines, or sets in its own code, is the object's own; so are private names.
    """

    _remedy = _BY_A_DOT

    # A type checker that saw these would take any name for one that there is.
    if not TYPE_CHECKING:

        def __getattr__(self, name):
            method = None if name[:1] == "_" else added_method(self, name)
            if method is not None:
                return method
            self._raise_missing(name)

        def __setattr__(self, name, value):
            if name[:1] == "_" or name in self.__dict__ or _defined(type(self), name):
                object.__setattr__(self, name, value)
            else:
                self._set_new(name, value, inspect.currentframe())

    def _set_new(self, name: str, value: Any, frame: Any) -> None:
        """Set an attribute that is not here; `frame` is that of `__setattr__`."""
        if _definer(type(self), frame) is None:
            text = f"{type(self).__name__!r} object has no attribute {name!r} to set; {self._remedy}"
            raise AttributeError(text, name=name, obj=self)
        object.__setattr__(self, name, value)

    def _raise_missing(self, name: str) -> NoReturn:
        if _defined(type(self), name):
            object.__getattribute__(self, name)  # a property of ours, whose own AttributeError says more
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(text if name[:1] == "_" else f"{text}; {self._remedy}", name=name, obj=self)


class RemoteAttributes(OwnAttributes):
    """Reads, calls and sets by a dot what the environment has, where it runs; its names are known from the join."""

    _remedy = "the remote environment has none of that name, as far as it is known here"
    _makes_new = False
    """True if a new name is made where the environment runs."""

    if TYPE_CHECKING:  # any name may be the environment's

        def __setattr__(self, name: str, value: Any) -> None: ...

    def _attribute_names(self) -> KnownNames | None:
        """Return the names of the environment's attributes and methods; None: nobody has told them."""
        raise NotImplementedError

    def _look(self, name: str) -> Any:
        """Return an attribute of the environment; a method as a function that calls it there."""
        raise NotImplementedError

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a public method of the environment, or read a public attribute."""
        raise NotImplementedError

    def set_attr(self, name: str, value: Any) -> None:
        """Set a public attribute of the environment."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        # As what this class defines, what is added to it hides the environment's.
        if name[:1] != "_" and (method := added_method(self, name)) is not None:
            return method
        # Copying, pickling and other tools ask for special names, some of them before there is anything to ask.
        if name[:1] != "_" and "_remotes" in self.__dict__ and not _defined(type(self), name):
            names = self._attribute_names() or KnownNames()
            # Of a method nothing has to be asked: so `hasattr` asks nobody for it, either.
            if name in names.methods:
                return functools.partial(self.call, name)
            if name in names.attributes:
                return self._look(name)
        self._raise_missing(name)

    def _set_new(self, name: str, value: Any, frame: Any) -> None:
        known = "_remotes" in self.__dict__ and name in (self._attribute_names() or ())
        definer = _definer(type(self), frame)
        # Our own classes say by themselves what is here, such as the agents of a parallel environment.
        ours = definer is not None and definer.__module__.startswith("bridge.")
        if (known and not ours) or (self._makes_new and definer is None):
            self.set_attr(name, value)
        else:
            super()._set_new(name, value, frame)


def added_method(env: object, name: str) -> Callable[..., Any] | None:
    """Return a method that a feature adds, bound to an environment; None: there is none of this name.

    The composition root says which there are: functions by their names, whose first argument is the environment. One is
    imported when it is called first.
    """
    try:
        methods: Mapping[str, str] = provided("client_methods")
    except LookupError:  # the package is used without its composition root
        return None
    place = methods.get(name)
    if place is None:
        return None
    module, _, function = place.partition(":")

    def call(*args: Any, **kwargs: Any) -> Any:
        with feature(module.split(".")[1], f"{name}()"):
            found = getattr(importlib.import_module(module), function)
        return found(env, *args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return call


def _defined(kind: type, name: str) -> bool:
    """True if a class, or a base class of it, defines a name."""
    return any(name in vars(each) for each in kind.__mro__)


def _definer(kind: type, frame: Any) -> type | None:
    """Return the class, or base class of it, in whose code `__setattr__` was called; None: other code called it."""
    code = None if frame is None or frame.f_back is None else frame.f_back.f_code
    if code is not None:
        for each in kind.__mro__:
            if any(
                _contains(function.__code__, code) for value in vars(each).values() for function in _functions(value)
            ):
                return each
    return None


def _functions(value: object) -> Iterator[types.FunctionType]:
    """Give the functions of which a class has made an attribute: a method, the getter and setter of a property."""
    parts = [value]
    if isinstance(value, property):
        parts = [value.fget, value.fset, value.fdel]
    elif isinstance(value, functools.cached_property):
        parts = [value.func]
    elif isinstance(value, (classmethod, staticmethod)):
        parts = [value.__func__]
    for part in parts:
        function = inspect.unwrap(part) if callable(part) else None
        if isinstance(function, types.FunctionType):
            yield function


def _contains(outer: types.CodeType, code: types.CodeType) -> bool:
    """True if code is that of a function, or of a function or comprehension within it."""
    # The file first: this is asked of each method that a class has.
    return outer.co_filename == code.co_filename and (
        outer is code or any(_contains(part, code) for part in outer.co_consts if isinstance(part, types.CodeType))
    )


@contextlib.contextmanager
def missing_attributes(*codes: int) -> Iterator[None]:
    """Make an AttributeError of the refusal of a name that the environment does not have.

    Args:
        codes: Of further refusals that mean that there is none.
    """
    try:
        yield
    except RefusedError as error:
        if error.code in (Code.NOT_FOUND, *codes) and not isinstance(error, MissingAttributeError):
            raise MissingAttributeError.of(error) from error
        raise
