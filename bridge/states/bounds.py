"""The form of the message of states, and the limits that an operator sets."""

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
"""The property that identifies a start of the server."""


@dataclasses.dataclass(frozen=True)
class States:
    """The limits of saved states: `states=` of `serve_gym`.

    A save beyond a limit is refused with an error that names the limit. No state is dropped to make room for another.

    Examples:
        >>> from bridge import States, serve_gym
        >>> with serve_gym("CartPole-v1", states=States(max_states=64)) as server:
        ...     print(server.url.startswith("grpc://"))
        True

    Args:
        max_states: The most states of one client. All clients together have at most twice as many.
        max_state_bytes: The approximate memory limit for the states of one client, in bytes. All clients together have
            at most twice as much.
        max_replay_steps: The most steps that are replayed to restore a state of an environment that cannot be copied.
        state_timeout: Seconds after which an unused state is deleted.
        state_abandoned_timeout: Seconds after which a state is deleted once all clients that used it have left.

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
