"""How the message of states travels, and the bounds that an operator sets."""

from __future__ import annotations

import dataclasses
import math

from bridge.core.encoding.message_form import MessageForm
from bridge.errors import SettingError

__all__ = ["FORM", "START_KEY", "States"]

FORM = MessageForm(
    "states",
    "type.googleapis.com/gymnasium_bridge.StatesRequest",
    "type.googleapis.com/gymnasium_bridge.StatesResponse",
    max_bytes=4 * 1024 * 1024,
    places=True,
)
START_KEY = "server.messages.states.start"
"""The property that tells one start of a server from another."""


@dataclasses.dataclass(frozen=True)
class States:
    """The limits of saved states: `states=` of `serve_gym`.

    A save beyond a limit is refused with an error that names the limit: no state is dropped for another one.

    Examples:
        >>> from bridge import States, serve_gym
        >>> with serve_gym("CartPole-v1", states=States(max_states=64)) as server:
        ...     print(server.url.startswith("grpc://"))
        True

    Args:
        max_states: The most states of one client at a time; all clients together have twice as many at most.
        max_state_bytes: The most bytes of memory that they take, about; those of all clients together twice as many.
        max_replay_steps: The most steps that are replayed to restore a state, where an environment cannot be copied.
        state_timeout: Seconds after which a state goes that nobody has used.
        state_abandoned_timeout: Seconds after which a state goes once all clients have left that used it.

    Raises:
        SettingError: A value is out of its range.
    """

    max_states: int = 1024
    max_state_bytes: int = 1024 * 1024 * 1024
    max_replay_steps: int = 10_000
    state_timeout: float = 3600.0
    state_abandoned_timeout: float = 60.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, whole = getattr(self, field.name), field.type == "int"
            fits = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
            if not fits or not 0 < value < math.inf:
                wanted = "integer" if whole else "number of seconds"
                raise SettingError(f"expected {field.name} to be a positive {wanted}, got {value!r}")
