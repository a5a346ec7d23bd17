"""Keywords that belong together, in one small dataclass each, such as `limits=Limits(max_worlds=8)`."""

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
"""Errors whose message has all that a user needs; the frames of this package that they went through add nothing."""


def flat_names(keyword: str, group: type) -> dict[str, dataclasses.Field[Any]]:
    """Return what each field of a group is called where keywords cannot be grouped, such as on a command line.

    Args:
        keyword: The keyword that takes the group.
        group: A dataclass.

    Returns:
        The fields by their flat names. Those of `tls` and `record` have a prefix: `tls_ca`, but the folder of `record`
        is `record` itself. A field whose name would not say enough has another one as `flat` in its metadata.
    """
    prefix = f"{keyword}_" if keyword in ("tls", "record") else ""
    fields = {field.metadata.get("flat", f"{prefix}{field.name}"): field for field in dataclasses.fields(group)}
    return {{"record_folder": "record"}.get(name, name): field for name, field in fields.items()}


def unknown_keyword(function: str, name: str, known: Iterable[str]) -> TypeError:
    """Return the error that Python raises for a keyword that a function does not have, with the nearest that it has.

    Args:
        function: The function's name.
        name: The keyword that was given.
        known: The keywords that there are.
    """
    near = difflib.get_close_matches(name, known, 1, 0.7)
    hint = f": did you mean {near[0]}=?" if near else ""
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def group_classes(groups: Mapping[str, type | str]) -> dict[str, type]:
    """Return the dataclasses that keywords take, without those of features that this installation lacks.

    Args:
        groups: By keyword a class, or `MODULE:CLASS`, which is imported now.
    """
    found: dict[str, type] = {}
    for keyword, group in groups.items():
        if isinstance(group, str):
            module, _, name = group.partition(":")
            try:
                group = getattr(importlib.import_module(module), name)
            except ModuleNotFoundError as error:
                # The module or a folder that it is in, and not what it imports.
                if not f"{module}.".startswith(f"{error.name}."):
                    raise
                continue
        found[keyword] = group
    return found


def grouped(
    options: type | None = None, others: Iterable[str] | None = (), /, **groups: type | str
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a function so that it says where the keyword is that somebody looks for.

    It also shortens tracebacks: of an error that explains itself, such as a refused connection, the caller sees their
    own frames and one of this package. Its cause stays.

    Args:
        options: The dataclass that the function makes of its `**keywords`; signature and docstring show the fields in
            their place. None: it has none of these.
        others: Further keywords that are handed on to what has them; None: any, of which the function checks its own.
        groups: The dataclasses that its keywords take, by keyword, as of `group_classes`.
    """

    def find_place(name: str) -> str | None:
        """Return how a field is given that somebody gave as a keyword; None: it is none."""
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
    """Decorate a class whose `__init__` makes a dataclass of its `**keywords`, as `grouped` does a function.

    The class's docstring is the one that has its keywords.

    Args:
        options: The dataclass.
        groups: As of `grouped`.
    """

    def decorate(made: type[_T]) -> type[_T]:
        made.__init__ = grouped(options, **groups)(made.__init__)  # type: ignore[method-assign]
        made.__doc__ = with_texts(inspect.getdoc(made) or "", options)
        return made

    return decorate


def _with_fields(signature: inspect.Signature, options: type) -> inspect.Signature:
    """Return a signature that has a dataclass's fields in the place of `**keywords`."""
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    fields = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=str(field.type))
        for field in dataclasses.fields(options)
        if field.init
    ]
    return signature.replace(parameters=[*own, *fields])


def with_texts(doc: str, options: type) -> str:
    """Return a docstring that says of a dataclass's fields what its own does, in the place of `keywords: …`."""
    classes = [kind for kind in reversed(options.__mro__) if dataclasses.is_dataclass(kind)]
    sections = [re.search(r"^Args:\n((?: .*\n|\n)*)", f"{inspect.getdoc(kind)}\n", re.MULTILINE) for kind in classes]
    texts = "\n".join(section.group(1).rstrip() for section in sections if section)
    return re.sub(r"^    keywords: .*(?:\n        .*)*", lambda _: texts, doc, count=1, flags=re.MULTILINE)


def check_counts(**numbers: Any) -> None:
    """Raise SettingError where the value of a keyword is no positive integer."""
    for name, value in numbers.items():
        if type(value) is not int or value < 1:
            raise SettingError(f"expected {name} to be a positive integer, got {shown_number(value)}")


def shown_number(value: Any) -> str:
    """Return a value that is no int as messages show it: one of NumPy is not to look like the int that was expected."""
    made = f"; give int({value})" if hasattr(value, "__index__") and not isinstance(value, (int, bool)) else ""
    kind = type(value)
    return f"{value} of the type {kind.__module__}.{kind.__qualname__}{made}" if made else repr(value)


def by_name(what: str, given: object, names: Sequence[str], of: str) -> dict[str, object]:
    """Return what is given for each name, or once for all of them, by name.

    Args:
        what: The keyword that it is given by, for the message.
        given: A mapping by name, or one thing for all; None: nothing.
        names: Those that there are.
        of: What these are, for the message.

    Raises:
        SettingError: It is given for a name that does not exist.
    """
    if not isinstance(given, Mapping):
        return {} if given is None else dict.fromkeys(names, given)
    if unknown := set(given) - set(names):
        raise SettingError(f"expected {what} for {of} of {', '.join(names)}, got {sorted(map(str, unknown))}")
    return dict(given)
