"""How a user installs what an extra of this package brings: one wording for every error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec

__all__ = ["feature", "has_feature", "imported_from", "install_command", "is_installed", "needed"]


def install_command(extra: str) -> str:
    """Return the command that installs an extra: from the package index, and from a clone of the repository."""
    return f"pip install 'gymnasium-bridge[{extra}]' (in a clone of the repository: pip install -e '.[{extra}]')"


@contextlib.contextmanager
def needed(problem: str, extra: str) -> Iterator[None]:
    """Say which extra to install where a package that is imported within is missing.

    Args:
        problem: What is missing, and for what: "films need PyAV".
        extra: The extra that brings it.

    Raises:
        SettingError: An import failed.
    """
    try:
        yield
    except ImportError as error:
        from bridge.errors import SettingError  # here: it imports Gymnasium, and packages are to be imported quickly

        raise SettingError(f"{problem}: {install_command(extra)}") from error


@contextlib.contextmanager
def imported_from(problem: str, extra: str) -> Iterator[None]:
    """Say which extra to install where a module of ours imports a package that is missing.

    Args:
        problem: What is missing, and for what: "recordings need pyarrow".
        extra: The extra that brings it.

    Raises:
        ImportError: An import failed.
    """
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{problem}: {install_command(extra)}") from error


@contextlib.contextmanager
def feature(name: str, purpose: str) -> Iterator[None]:
    """Say which feature of this package is missing where a module of it is imported within.

    The features are folders of `bridge` that an installation may lack, such as `bridge.perlert`.

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

        raise SettingError(f"this installation lacks bridge.{name}, which {purpose} needs") from error


def has_feature(name: str) -> bool:
    """True if this installation has a feature, such as `perlert`; imports nothing of it."""
    return is_installed(f"bridge.{name}")


def is_installed(package: str) -> bool:
    """True if a package can be imported, without importing it."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # an import hook hides it
        return False
