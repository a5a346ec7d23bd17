"""Protocols and observers by name: those of other packages, and WebSocket without a page."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from bridge.core.extras import needed
from bridge.core.plugins import found, load, loading, package_of
from bridge.core.server.port import PortProtocol
from bridge.core.worlds.observers import Observer
from bridge.errors import SettingError

__all__ = ["OBSERVERS", "PROTOCOLS", "find_observers", "find_protocols"]

T = TypeVar("T")

PROTOCOLS = "gymnasium_bridge.protocols"
"""The group of entry points for protocols; each is a `PortProtocol`."""
OBSERVERS = "gymnasium_bridge.observers"
"""The group of entry points for observers; each is a callable that returns an `Observer`, such as its class."""


def find_protocols(wanted: object) -> list[PortProtocol]:
    """Return the protocols of `protocols=`: each is an object, the name of a package's protocol, or `websocket`.

    Raises:
        SettingError: `wanted` is malformed, no package has a name, or a package cannot be imported.
    """
    return [_find_protocol(each) for each in _listed("protocols", wanted, "bridge.PortProtocol objects")]


def _find_protocol(wanted: object) -> PortProtocol:
    if wanted == "websocket":
        with needed("the protocol 'websocket' needs the package websockets", "web"):
            from bridge.core.server.http_protocol import websocket_protocol
        return websocket_protocol()
    if not isinstance(wanted, str):
        return _checked(wanted, PortProtocol)
    protocol = load(PROTOCOLS, wanted, "protocol")
    with loading(f"the protocol {wanted}", package_of(found(PROTOCOLS)[wanted])):
        return _checked(protocol, PortProtocol)


def find_observers(wanted: object) -> list[Observer]:
    """Return the observers of `observers=`: each is an object, or the name of a package's observer.

    Raises:
        SettingError: `wanted` is malformed, no package has a name, or making an observer fails.
    """
    return [_find_observer(each) for each in _listed("observers", wanted, "bridge.Observer objects")]


def _find_observer(wanted: Any) -> Observer:
    if not isinstance(wanted, str):
        return wanted  # type: ignore[no-any-return] # any object with the methods of an Observer
    make = load(OBSERVERS, wanted, "observer")
    with loading(f"the observer {wanted}", package_of(found(OBSERVERS)[wanted])):
        return _checked(make(), Observer)


def _checked(given: object, kind: type[T]) -> T:
    if not isinstance(given, kind):
        raise SettingError(f"expected a bridge.{kind.__name__}, got {given!r:.80}")
    return given


def _listed(keyword: str, wanted: object, of: str) -> list[Any]:
    # A string is iterable too.
    if isinstance(wanted, (str, bytes)) or not isinstance(wanted, Iterable):
        raise SettingError(f"expected {keyword} to be a list of names and {of}, got {wanted!r:.80}")
    return list(wanted)
