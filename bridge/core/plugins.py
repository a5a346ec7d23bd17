"""Entry points of other packages: finding them, importing them, and the wording of errors.

Another package lists its additions in its `pyproject.toml`, in the group of their kind:

    [project.entry-points."gymnasium_bridge.commands"]
    greet = "my_package.greet"

`found` imports nothing. `load` imports one entry, and only if the user or the operator named it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from importlib.metadata import EntryPoint, entry_points
from typing import Any

__all__ = ["for_a_client", "found", "load", "loading", "package_of"]

_for_a_client: ContextVar[bool] = ContextVar("for_a_client", default=False)


@contextlib.contextmanager
def for_a_client() -> Iterator[None]:
    """While it is entered, `load` imports nothing, because a client chose the arguments of an environment."""
    before = _for_a_client.set(True)
    try:
        yield
    finally:
        _for_a_client.reset(before)


def found(group: str) -> dict[str, list[EntryPoint]]:
    """Return the entry points of a group by name, in alphabetical order, without importing them.

    A name has several entry points if several packages define it.
    """
    by_name: dict[str, list[EntryPoint]] = {}
    for entry in sorted(entry_points(group=group), key=lambda entry: (entry.name, package_of([entry]))):
        same = by_name.setdefault(entry.name, [])
        # A package is found twice if two folders of `sys.path` have it.
        if (package_of([entry]), entry.value) not in [(package_of([other]), other.value) for other in same]:
            same.append(entry)
    return by_name


def package_of(entries: Sequence[EntryPoint]) -> str:
    """Return the names of the installed packages that have some entry points."""
    return " and ".join(entry.dist.name if entry.dist is not None else entry.module for entry in entries)


def load(group: str, name: str, what: str) -> Any:
    """Import the object that another package registered under a name, and return it.

    Args:
        group: The group of entry points: `gymnasium_bridge.commands`.
        name: The name that the user gave.
        what: The kind of the object, for errors: `command`.

    Raises:
        SettingError: No package has it, several have it, it cannot be imported, or a client of a server named it.
    """
    from bridge.errors import SettingError  # here: it imports Gymnasium, and the command line should start quickly

    by_name = found(group)
    if name not in by_name:
        known = ", ".join(by_name) or "none"
        article = "an" if what[0] in "aeiou" else "a"
        raise SettingError(f"no installed package has {article} {what} {name!r} (installed: {known})")
    entries = by_name[name]
    package = package_of(entries)
    if _for_a_client.get():
        raise SettingError(f"the {what} {name} of the package {package} is not imported because a client names it")
    if len(entries) > 1:
        raise SettingError(f"the packages {package} have a {what} {name} each: uninstall all but one")
    with loading(f"the {what} {name}", package):
        return entries[0].load()


@contextlib.contextmanager
def loading(title: str, package: str) -> Iterator[None]:
    """Convert an exception within, while another package's code is loaded, to an error that names the package.

    Args:
        title: The object that is loaded: "the command greet".
        package: The package that has it.

    Raises:
        SettingError: An exception was raised within; it is the cause.
    """
    from bridge.errors import SettingError  # as above

    try:
        yield
    # Anything that another package's code raises. SystemExit would end the process without a message.
    except (Exception, SystemExit) as error:
        text = f"{title} of the package {package} cannot be loaded: {type(error).__name__}: {error}"
        raise SettingError(f"{text}; update or uninstall {package}") from error
