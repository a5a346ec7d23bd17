"""The names of an environment's public attributes and methods, which a client knows without asking for each.

They travel as one text: names in the order in which they are looked up, separated by spaces; that of a method ends in
`()`. The property `world.names` has it, and an info says it anew where a reset has changed it.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["MOST_BYTES", "AttributeNames", "KnownNames"]

MOST_BYTES = 1 << 16
"""The longest text; names that are beyond it are left out."""


class AttributeNames(str):
    """The text of the names, a type of its own: it travels among the notes of an info."""

    __slots__ = ()

    @classmethod
    def of(cls, names: Mapping[str, bool]) -> AttributeNames:
        """Make the text of names, each with whether it is a method's."""
        text = " ".join(f"{name}()" if is_method else name for name, is_method in names.items())
        # An identifier may have letters of several bytes.
        data = text.encode()
        if len(data) > MOST_BYTES:
            # Up to a space: a part of a name would be another name.
            text = data[: data.rindex(b" ", 0, MOST_BYTES + 1)].decode() if b" " in data[: MOST_BYTES + 1] else ""
        return cls(text)


class KnownNames:
    """The names as a client keeps them.

    Args:
        text: What the server said, of any length: what is too long, or no public name, is left out.
    """

    def __init__(self, text: str = "") -> None:
        names = [name for name in text[:MOST_BYTES].split() if not name.startswith("_")]
        self.methods = {name[:-2] for name in names if name.endswith("()")}
        self.attributes = {name for name in names if name.isidentifier()}

    def __contains__(self, name: object) -> bool:
        return name in self.attributes or name in self.methods

    def add_attribute(self, name: str) -> None:
        """Add the name of an attribute that was set."""
        self.methods.discard(name)
        self.attributes.add(name)
