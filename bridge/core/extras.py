"""Lazy imports, and parts that an installation may lack: extras and features.

All errors take the command that installs an extra from here.

A feature such as `bridge.recording` has functions for users, but must also serve an environment with a page, about
which it knows nothing; and an environment's properties include those of features. So the composition root,
`bridge/__init__.py`, registers where these objects are with `provide`, and code that needs them calls `provided`.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

__all__ = [
    "feature",
    "has_feature",
    "imported_from",
    "install_command",
    "is_installed",
    "lazy_names",
    "needed",
    "provide",
    "provided",
    "says_what_to_install",
]


_OURS = "gymnasium-bridge["
"""The prefix of `name` in errors of `imported_from`; in Python's own errors it is the name of a module."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra, in a clone of the repository: no package index has the package yet."""
    return f"pip install -e '.[{extra}]' (in the folder of your clone of the repository)"


@contextlib.contextmanager
def needed(problem: str, extra: str) -> Iterator[None]:
    """Raise an error that names the extra to install if an import within fails.

    The error has no cause, unless the package is installed but broken: the failed import would add nothing.

    Args:
        problem: What needs which package: "films need PyAV".
        extra: The extra with the package.

    Raises:
        SettingError: An import failed.
    """
    try:
        yield
    except ImportError as error:
        from bridge.errors import SettingError  # here: it imports Gymnasium, and packages should import quickly

        raise SettingError(_remedy(error, problem, extra)) from _cause(error)


@contextlib.contextmanager
def imported_from(problem: str, extra: str) -> Iterator[None]:
    """Raise an error that names the extra to install if an import of this package's module fails within.

    Args:
        problem: What needs which package: "recordings need pyarrow".
        extra: The extra with the package.

    Raises:
        ImportError: An import failed.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(_remedy(error, problem, extra), name=f"{_OURS}{extra}]") from _cause(error)


def says_what_to_install(error: ImportError) -> bool:
    """True for an error of `imported_from`, whose text is a complete remedy."""
    return (error.name or "").startswith(_OURS)


def _remedy(error: ImportError, problem: str, extra: str) -> str:
    """Return the remedy for an import that failed."""
    if says_what_to_install(error):  # raised by another module of this package
        return str(error)
    remedy = f"{problem}: {install_command(extra)}"
    return remedy if _is_absent(error) else f"{remedy}; what is installed cannot be imported: {error}"


def _cause(error: ImportError) -> ImportError | None:
    """Return the cause to show beside the remedy; None: there is none, because the package is just not installed."""
    return None if says_what_to_install(error) or _is_absent(error) else error


def _is_absent(error: ImportError) -> bool:
    """True if a module was not found; a package that is installed but broken raises other errors."""
    return isinstance(error, ModuleNotFoundError)


@contextlib.contextmanager
def feature(name: str, purpose: str) -> Iterator[None]:
    """Raise an error that names the missing feature of this package if the import of its module fails within.

    Features are folders of `bridge` that an installation may lack, such as `bridge.perlert`.

    Args:
        name: The folder: `perlert`.
        purpose: What needs it: "a URL of perlert://".

    Raises:
        SettingError: The installation lacks it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if not f"{error.name}.".startswith(f"bridge.{name}."):
            raise
        from bridge.errors import SettingError  # as above

        raise SettingError(f"this installation lacks bridge.{name}, which {purpose} needs") from None


def has_feature(name: str) -> bool:
    """True if this installation has a feature, such as `perlert`, without importing it."""
    return is_installed(f"bridge.{name}")


def is_installed(package: str) -> bool:
    """True if a package can be imported, without importing it."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # an import hook hides it
        return False


def lazy_names(
    package: str,
    places: Mapping[str, str],
    modules: Mapping[str, str] = MappingProxyType({}),
    absent: Iterable[str] = (),
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`.

    Args:
        package: The name of the package, such as `bridge.testing`.
        places: The module of each public name.
        modules: Its public modules, each with the module to import on first use: itself or a module in it.
        absent: Names that cannot be imported here; `dir` omits them.
    """

    def get(name: str) -> Any:
        if name not in places and name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        place = places.get(name) or modules[name]
        with feature(place.split(".")[1], f"{package}.{name}" if name in places else "this program"):
            module = importlib.import_module(place)
        return getattr(module, name) if name in places else sys.modules[f"{package}.{name}"]

    return get, lambda: sorted({*places, *modules}.difference(absent))


_places: dict[str, str] = {}


def provide(**places: str) -> None:
    """Register the places of objects for `provided`.

    Args:
        places: `MODULE:NAME` of each object, by the name that features use.
    """
    _places.update(places)


def provided(name: str) -> Any:
    """Return the object that the composition root registered under a name.

    `serve_gym` and `make_vec_remote` are the functions of these names; `server` is the class of servers;
    `other_schemes` returns for errors the URL schemes besides those of servers; `client_methods` is a dict for
    `added_method` of the client; `groups` has the dataclasses that keywords take, by keyword; `gateway_schemes` the
    `bridge.web.gateway.schemes.GatewayScheme` objects of this package; `environment_properties` the
    `bridge.core.worlds.environment.EnvironmentProperty` objects of its features; `reseed` is the function that seeds
    the random generators of an environment in the middle of an episode, by `reseed(env, seed)`; `as_policy` the
    function that returns the policy that a user gives as a function, `"random"` or a URL.

    Raises:
        LookupError: No object is registered under this name.
    """
    if name not in _places:
        raise LookupError(f"expected one of {', '.join(_places)}, which the package provides, got {name!r}")
    module, _, attribute = _places[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
