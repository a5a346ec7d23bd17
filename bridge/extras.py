"""How a user installs what an extra of this package brings: one wording for every error."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["install_command", "is_installed"]


def install_command(extra: str) -> str:
    """Return the command that installs an extra: from the package index, and from a clone of the repository."""
    return f"pip install 'gymnasium-bridge[{extra}]' (in a clone of the repository: pip install -e '.[{extra}]')"


def is_installed(package: str) -> bool:
    """True if a package can be imported, without importing it."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # an import hook hides it
        return False
