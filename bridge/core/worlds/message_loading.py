"""Messages of other packages that an operator names: finding them, making them with their keywords, and checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bridge.core.plugins import found, load, loading, package_of
from bridge.core.worlds.messages import GROUP, SessionMessage
from bridge.errors import SettingError

__all__ = ["load_messages"]


def load_messages(
    named: Sequence[str | SessionMessage], options: Mapping[str, Mapping[str, Any]]
) -> list[SessionMessage]:
    """Return the messages that an operator has named.

    Args:
        named: Names of entry points, or messages that were made already.
        options: The keywords for the named messages, by name.

    Raises:
        SettingError: There is no such message, it cannot be made, or keywords are for a message that is not named.
    """
    if isinstance(named, (str, SessionMessage)):
        raise SettingError(f"expected messages to be a list of names, got {named!r:.80}")
    names = [name for name in named if isinstance(name, str)]
    if unnamed := [name for name in options if name not in names]:
        text = f"expected message_options for messages that are named, got some for {', '.join(unnamed)}"
        raise SettingError(f"{text}; name them in messages=")
    return [one if isinstance(one, SessionMessage) else _load(one, options.get(one, {})) for one in named]


def _load(name: object, keywords: Mapping[str, Any]) -> SessionMessage:
    if not isinstance(name, str):
        raise SettingError(
            f"expected a message by name, or a SessionMessage, got {name!r:.80} of type {type(name).__name__}"
        )
    make = load(GROUP, name, "message")
    package = package_of(found(GROUP)[name])
    with loading(f"the message {name}", package):
        made = make(**keywords)
        if not isinstance(made, SessionMessage):
            raise TypeError(f"expected its entry point to return a SessionMessage, got {made!r:.80}")
    return made
