"""A client's handle of a saved state: its identifier and its server."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

from bridge.errors import SettingError

__all__ = ["SavedState"]


@dataclasses.dataclass(frozen=True)
class SavedState:
    """A saved state of a remote environment. The state itself stays where the environment is.

    It can be pickled, for another process or for later. Anyone with its `identifier` can restore and release the state,
    so keep the identifier as secret as a token. The `repr` hides it.

    Args:
        identifier: Identifies the state at its server, as long as the server runs.
        url: The URL of the server, without a token.
        how: How it was saved: `replay`, or `copy`, with `+ale` or `+mujoco` for parts that the library itself saves.
        bytes: The approximate memory that it takes at the server, in bytes.
        environment: A digest of the environment's description: the state restores into environments with the same one.
        moment: The place of its episode in the recording of a `Recorder`; empty: it is not recorded.

    Raises:
        SettingError: A field has the wrong type.
    """

    identifier: str = dataclasses.field(repr=False)
    url: str
    how: str
    bytes: int
    environment: str
    moment: str = dataclasses.field(default="", repr=False)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), int if field.name == "bytes" else str
            if type(value) is not kind:
                raise SettingError(f"expected {field.name} of a SavedState to be {kind.__name__}, got {value!r:.80}")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the fields only, without the environment that saved it."""
        return SavedState, tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def saved_by(self, env: Any, release: Callable[[Any, list[SavedState]], None]) -> SavedState:
        """Remember the remote environment that can release it, and the function for that."""
        object.__setattr__(self, "_saver", (weakref.ref(env), release))
        return self

    def release(self) -> None:
        """Delete the state at its server. Does nothing if the state no longer exists.

        Raises:
            SettingError: This object was unpickled, or its environment no longer exists: call `release_states` of
                another environment at the server.
            RemoteError: The server cannot be reached.
        """
        reference, release = self.__dict__.get("_saver", (lambda: None, None))
        env = reference()
        if env is None:
            raise SettingError("this state does not know its environment any more: call env.release_states([state])")
        release(env, [self])
