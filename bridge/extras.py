"""How a user installs what an extra of this package brings: one wording for every error."""

from __future__ import annotations

__all__ = ["install_command"]


def install_command(extra: str) -> str:
    """Return the command that installs an extra: from the package index, and from a clone of the repository."""
    return f"pip install 'gymnasium-bridge[{extra}]' (in a clone of the repository: pip install -e '.[{extra}]')"
