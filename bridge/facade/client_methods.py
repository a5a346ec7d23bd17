"""The methods that features of this package add to remote environments."""

from __future__ import annotations

__all__ = ["CLIENT_METHODS"]

_OF_STATES = ("save_state", "restore_state", "release_states")
CLIENT_METHODS = {name: f"bridge.states.client:{name}" for name in _OF_STATES}
"""`MODULE:FUNCTION` of each method, by the method's name."""
