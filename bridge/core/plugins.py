"""What other packages add, found by their entry points: one look-up, one import, one wording of errors.

Another package names what it has in its `pyproject.toml`, in the group of the kind:

    [project.entry-points."gymnasium_bridge.commands"]
    greet = "my_package.greet"

`found` imports nothing of it. `load` imports one, and only where somebody named it.
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
    """Within it, `load` imports nothing: a server makes an environment with arguments that a client sent."""
    before = _for_a_client.set(True)
    try:
        yield
    finally:
        _for_a_client.reset(before)


def found(group: str) -> dict[str, list[EntryPoint]]:
    """Return what other packages have in a group, by name, in alphabetical order; imports nothing of it.

    A name has several entry points where several packages have it.
    """
    by_name: dict[str, list[EntryPoint]] = {}
    for entry in sorted(entry_points(group=group), key=lambda entry: (entry.name, package_of([entry]))):
        same = by_name.setdefault(entry.name, [])
        # A package is found twice where two folders of `sys.path` have it.
        if (package_of([entry]), entry.value) not in [(package_of([other]), other.value) for other in same]:
            same.append(entry)
    return by_name


def package_of(entries: Sequence[EntryPoint]) -> str:
    """Return the names of the packages that have some entry points, as they were installed."""
    return " and ".join(entry.dist.name if entry.dist is not None else entry.module for entry in entries)


def load(group: str, name: str, what: str) -> Any:
    """Import what another package has by a name, and return it.

    Args:
        group: The group of entry points: `gymnasium_bridge.commands`.
        name: The name that somebody gave.
        what: What it is, for errors, in a word or two: `command`.

    Raises:
        SettingError: No package has it, several have, it cannot be imported, or a client of a server named it.
    """
    from bridge.errors import SettingError  # here: it imports Gymnasium, and the command line is to start quickly

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
    """Say what is broken, and in which package, where the code of another package raises within while it is loaded.

    Args:
        title: What is loaded: "the command greet".
        package: The package that has it.

    Raises:
        SettingError: Anything was raised within; that is its cause.
    """
    from bridge.errors import SettingError  # as above

    try:
        yield
    # Whatever the code of another package raises; SystemExit, too, would end the process without a word.
    except (Exception, SystemExit) as error:
        text = f"{title} of the package {package} cannot be loaded: {type(error).__name__}: {error}"
        raise SettingError(f"{text}; update or uninstall {package}") from error
