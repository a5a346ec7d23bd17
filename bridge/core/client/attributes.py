"""Attributes of a remote environment by a dot: those of the local object, and those of the remote environment."""

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

__all__ = ["OwnAttributes", "RemoteAttributes", "added_method", "missing_attributes"]

_BY_A_DOT = "a vector environment has none of its environments' attributes: get_attr, set_attr and call reach them"


class OwnAttributes:
    """Refuses unknown attributes by a dot: set on the local object, they would affect no environment.

    Names that a class of the object defines, or sets in its own code, belong to the object; so do private names.
    """

    _remedy = _BY_A_DOT

    # With these methods, a type checker would accept any name.
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
        """Set an attribute that the object does not have; `frame` is that of `__setattr__`."""
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
    """Reads, calls and sets attributes of the remote environment by a dot; their names are known from the join."""

    _remedy = "the remote environment has none of that name, as far as it is known here"
    _makes_new = False
    """True if a new name creates an attribute of the remote environment."""

    if TYPE_CHECKING:  # any name may be the environment's

        def __setattr__(self, name: str, value: Any) -> None: ...

    def _attribute_names(self) -> KnownNames | None:
        """Return the names of the environment's attributes and methods; None: they are not known."""
        raise NotImplementedError

    def _look(self, name: str) -> Any:
        """Return an attribute of the environment; a method as a function that calls it remotely."""
        raise NotImplementedError

    def call(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a public method of the environment, or read a public attribute."""
        raise NotImplementedError

    def set_attr(self, name: str, value: Any) -> None:
        """Set a public attribute of the environment."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        # A method that a feature adds hides the environment's, like those that this class defines.
        if name[:1] != "_" and (method := added_method(self, name)) is not None:
            return method
        # Copying, pickling and other tools ask for special names, some of them before the object is initialized.
        if name[:1] != "_" and "_remotes" in self.__dict__ and not _defined(type(self), name):
            names = self._attribute_names() or KnownNames()
            # A method needs no request, so that `hasattr` sends none for it either.
            if name in names.methods:
                return functools.partial(self.call, name)
            if name in names.attributes:
                return self._look(name)
        self._raise_missing(name)

    def _set_new(self, name: str, value: Any, frame: Any) -> None:
        known = "_remotes" in self.__dict__ and name in (self._attribute_names() or ())
        definer = _definer(type(self), frame)
        # The package's own classes set their attributes locally, such as the agents of a parallel environment.
        ours = definer is not None and definer.__module__.startswith("bridge.")
        if (known and not ours) or (self._makes_new and definer is None):
            self.set_attr(name, value)
        else:
            super()._set_new(name, value, frame)


def added_method(env: object, name: str) -> Callable[..., Any] | None:
    """Return a method that a feature adds, bound to an environment; None: there is none of this name.

    The composition root provides a table of names and functions, whose first argument is the environment. A function is
    imported when it is first called.
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
    """Return the class, or base class of it, whose code called `__setattr__`; None: other code called it."""
    code = None if frame is None or frame.f_back is None else frame.f_back.f_code
    if code is not None:
        for each in kind.__mro__:
            if any(
                _contains(function.__code__, code) for value in vars(each).values() for function in _functions(value)
            ):
                return each
    return None


def _functions(value: object) -> Iterator[types.FunctionType]:
    """Yield the functions of a class attribute: a method, or the getter and setter of a property."""
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
    """True if code belongs to a function, or to a function or comprehension within it."""
    # The file is compared first, because this is called for each method of a class.
    return outer.co_filename == code.co_filename and (
        outer is code or any(_contains(part, code) for part in outer.co_consts if isinstance(part, types.CodeType))
    )


@contextlib.contextmanager
def missing_attributes(*codes: int) -> Iterator[None]:
    """Convert the refusal of a name that the environment does not have to an AttributeError.

    Args:
        codes: Further codes of refusals that mean the same.
    """
    try:
        yield
    except RefusedError as error:
        if error.code in (Code.NOT_FOUND, *codes) and not isinstance(error, MissingAttributeError):
            raise MissingAttributeError.of(error) from error
        raise
