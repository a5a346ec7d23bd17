"""What a client holds of a state: an identifier, and where it was saved."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

from bridge.errors import SettingError

__all__ = ["SavedState"]


@dataclasses.dataclass(frozen=True)
class SavedState:
    """A state of a remote environment, which stays where the environment is.

    It can be pickled, for another process or for later. Whoever has its `identifier` may restore and release the state:
    keep it as you would keep a token. Its `repr` hides it.

    Args:
        identifier: Names the state at its server, as long as that runs.
        url: The server, without a token.
        how: The ways by which it was saved, joined by `+`: `copy`, and an environment's own, `ale` or `mujoco`;
            or `replay`.
        bytes: About how many bytes of memory it takes there.
        environment: A digest of what the environment is: it restores into equal ones.
        moment: Where its episode is in the recording of a `Recorder`; empty: none records it.

    Raises:
        SettingError: A field is of another type.
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
        """Pickle the fields, and nothing of the environment that has saved it."""
        return SavedState, tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def saved_by(self, env: Any, release: Callable[[Any, list[SavedState]], None]) -> SavedState:
        """Note the remote environment that can release it, and the function that does."""
        object.__setattr__(self, "_saver", (weakref.ref(env), release))
        return self

    def release(self) -> None:
        """Forget the state at its server. Again, or where it is gone: nothing.

        Raises:
            SettingError: This is a copy, or its environment is closed: use `release_states` of one at the server.
            RemoteError: The server cannot be asked.
        """
        reference, release = self.__dict__.get("_saver", (lambda: None, None))
        env = reference()
        if env is None:
            raise SettingError("this state does not know its environment any more: call env.release_states([state])")
        release(env, [self])
