"""Related keywords, grouped in one small dataclass each, such as `limits=Limits(max_worlds=8)`."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from bridge.errors import ConnectError, RefusedError, RemoteTimeoutError, SettingError, UsageError

__all__ = ["by_name", "check_counts", "flat_names", "group_classes", "grouped", "grouped_class", "unknown_keyword"]
__all__ += ["shown_number", "with_texts"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")
_SELF_EXPLANATORY = (UsageError, ConnectError, RefusedError, RemoteTimeoutError)
"""Errors whose message tells users all they need: their tracebacks are shortened to one frame of this package."""


def flat_names(keyword: str, group: type) -> dict[str, dataclasses.Field[Any]]:
    """Return the names of a group's fields where keywords cannot be grouped, such as on a command line.

    Args:
        keyword: The keyword that takes the group.
        group: A dataclass.

    Returns:
        The fields by their flat names. Those of `tls` and `record` have a prefix, such as `tls_ca`, except that the
        folder of `record` is `record`. A field can have another flat name as `flat` in its metadata.
    """
    prefix = f"{keyword}_" if keyword in ("tls", "record") else ""
    fields = {field.metadata.get("flat", f"{prefix}{field.name}"): field for field in dataclasses.fields(group)}
    return {{"record_folder": "record"}.get(name, name): field for name, field in fields.items()}


def unknown_keyword(function: str, name: str, known: Iterable[str]) -> TypeError:
    """Return the TypeError for an unknown keyword, as Python words it, with the most similar known keyword.

    Args:
        function: The function's name.
        name: The unknown keyword.
        known: The known keywords.
    """
    near = difflib.get_close_matches(name, known, 1, 0.7)
    hint = f": did you mean {near[0]}=?" if near else ""
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def group_classes(groups: Mapping[str, type | str]) -> dict[str, type]:
    """Return the dataclasses that keywords take, without those of features that are not installed.

    Args:
        groups: The class for each keyword, or `MODULE:CLASS`, which is imported now.
    """
    found: dict[str, type] = {}
    for keyword, group in groups.items():
        if isinstance(group, str):
            module, _, name = group.partition(":")
            try:
                group = getattr(importlib.import_module(module), name)
            except ModuleNotFoundError as error:
                # The error is about the module or its parent package, not about a module that it imports.
                if not f"{module}.".startswith(f"{error.name}."):
                    raise
                continue
        found[keyword] = group
    return found


def grouped(
    options: type | None = None, others: Iterable[str] | None = (), /, **groups: type | str
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a function so that its errors for unknown keywords name the group that has the keyword.

    It also shortens tracebacks: for an error that explains itself, such as a refused connection, the caller sees only
    their own frames and one of this package. The error's cause is kept.

    Args:
        options: The dataclass that the function makes from its `**keywords`; signature and docstring show the fields
            instead. None: there is none.
        others: Further keywords that the function passes on; None: any, which the function checks itself.
        groups: The dataclasses of its keywords, by keyword, see `group_classes`.
    """

    def find_place(name: str) -> str | None:
        """Return how to give a field that was given as a keyword; None: it is no field."""
        for keyword, group in group_classes(groups).items():
            if field := flat_names(keyword, group).get(name):
                return f"{keyword}={group.__name__}({field.name}=…)"
        return None

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = inspect.signature(function)
        if options is not None:
            signature = _with_fields(signature, options)
            function.__doc__ = with_texts(inspect.getdoc(function) or "", options)
        known = signature.parameters
        further = {*known, *(others or ())}
        takes_more = others is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
        title = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in kwargs:
                if name not in known and (place := find_place(name)):
                    raise TypeError(f"{title}() got an unexpected keyword argument {name!r}: give {place}")
                if name not in further and not takes_more:
                    raise unknown_keyword(title, name, further)
            try:
                return function(*args, **kwargs)
            except _SELF_EXPLANATORY as error:
                raise error.with_traceback(None)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


def grouped_class(options: type, /, **groups: type | str) -> Callable[[type[_T]], type[_T]]:
    """Decorate a class whose `__init__` makes a dataclass from its `**keywords`, as `grouped` does for a function.

    The class's docstring must have the entry `keywords: …`.

    Args:
        options: The dataclass.
        groups: See `grouped`.
    """

    def decorate(made: type[_T]) -> type[_T]:
        made.__init__ = grouped(options, **groups)(made.__init__)  # type: ignore[method-assign]
        made.__doc__ = with_texts(inspect.getdoc(made) or "", options)
        return made

    return decorate


def _with_fields(signature: inspect.Signature, options: type) -> inspect.Signature:
    """Return a signature with a dataclass's fields in place of `**keywords`."""
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    fields = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=str(field.type))
        for field in dataclasses.fields(options)
        if field.init
    ]
    return signature.replace(parameters=[*own, *fields])


def with_texts(doc: str, options: type) -> str:
    """Return a docstring with the texts of a dataclass's fields in place of `keywords: …`."""
    classes = [kind for kind in reversed(options.__mro__) if dataclasses.is_dataclass(kind)]
    sections = [re.search(r"^Args:\n((?: .*\n|\n)*)", f"{inspect.getdoc(kind)}\n", re.MULTILINE) for kind in classes]
    texts = "\n".join(section.group(1).rstrip() for section in sections if section)
    return re.sub(r"^    keywords: .*(?:\n        .*)*", lambda _: texts, doc, count=1, flags=re.MULTILINE)


def check_counts(**numbers: Any) -> None:
    """Raise SettingError if the value of a keyword is no positive integer."""
    for name, value in numbers.items():
        if type(value) is not int or value < 1:
            raise SettingError(f"expected {name} to be a positive integer, got {shown_number(value)}")


def shown_number(value: Any) -> str:
    """Return a number for a message. A number that is no int, such as NumPy's, is shown with its type."""
    made = f"; give int({value})" if hasattr(value, "__index__") and not isinstance(value, (int, bool)) else ""
    kind = type(value)
    return f"{value} of the type {kind.__module__}.{kind.__qualname__}{made}" if made else repr(value)


def by_name(what: str, given: object, names: Sequence[str], of: str) -> dict[str, object]:
    """Return one value for each name, given a mapping by name or one value for all.

    Args:
        what: The keyword with the value, for the message.
        given: A mapping by name, or one value for all; None: no values.
        names: The names.
        of: What the names are, for the message.

    Raises:
        SettingError: A value is given for a name that does not exist.
    """
    if not isinstance(given, Mapping):
        return {} if given is None else dict.fromkeys(names, given)
    if unknown := set(given) - set(names):
        raise SettingError(f"expected {what} for {of} of {', '.join(names)}, got {sorted(map(str, unknown))}")
    return dict(given)
