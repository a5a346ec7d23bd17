"""The names on the wire that both ends must agree on, and the names of an environment's attributes.

A client knows the names of the environment's public attributes and methods without asking for each. They travel as one
text: the names in the order in which they are looked up, separated by spaces; the name of a method ends in `()`. The
property `world.names` holds this text, and an info sends it again if a reset has changed it.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "ANNOUNCED",
    "CALL_REQUEST_URL",
    "CALL_RESPONSE_URL",
    "CLIENT_KEY",
    "GYMNASIUM",
    "MOST_BYTES",
    "NAMES",
    "NO_SEED",
    "PROPERTY_REQUEST_URL",
    "PROPERTY_RESPONSE_URL",
    "REALTIME_SIGNALS",
    "TIMING",
    "TIMING_INDEX",
    "WATCH",
    "AttributeNames",
    "KnownNames",
]

PROPERTY_REQUEST_URL = "type.googleapis.com/dm_env_rpc.v1.extensions.properties.PropertyRequest"
"""The type of a property request in `EnvironmentRequest.extension`."""

PROPERTY_RESPONSE_URL = "type.googleapis.com/dm_env_rpc.v1.extensions.properties.PropertyResponse"
"""The type of the answer to a property request."""

CALL_REQUEST_URL = "type.googleapis.com/gymnasium_bridge.CallRequest"
"""The type of a method call, an extension of this package."""

CALL_RESPONSE_URL = "type.googleapis.com/gymnasium_bridge.CallResponse"
"""The type of the answer to a method call."""

ANNOUNCED = "messages"
"""The JoinWorld setting with the names of the messages that a client will send, separated by spaces."""
GYMNASIUM = "gymnasium"
"""The JoinWorld setting, a bool: whether a client gets the observations that Gymnasium has and dm_env has not: `info`
and, of a single environment, `discount`, `terminated` and `truncated`. By default true for clients of this package."""

NAMES = "world.names"
"""The property with the names of the environment's public attributes and methods, separated by spaces; the names of
methods end in `()`. At most 64 KiB; an info sends it again if a reset has changed it."""

CLIENT_KEY = "connection.client"
"""The property to which a client writes a secret, the same on all its connections. It tells a server that several
agents of a world belong to one client."""

NO_SEED = -1
"""In the Reset setting `seed` of a world of lanes: no seed for this lane."""

REALTIME_SIGNALS = ("frames", "episodes", "timing", "resetting")
"""The signals of a real-time world, which are sent beside the observations of the environment."""

TIMING = (
    "received_at",
    "answered_at",
    "observed_at",
    "step_time",
    "action_delay",
    "episode",
    "frame",
    "actions_applied",
    "actions_replaced",
    "actions_dropped",
    "overruns",
    "frames_dropped",
    "frames_skipped",
)
"""The elements of the observation `timing` of a real-time world, float64: seconds of the server's clock, or counts.

`frames_dropped` were never run, because the clock was late; `frames_skipped` were run, but not sent to this agent.
"""
TIMING_INDEX = {name: index for index, name in enumerate(TIMING)}
"""The index of each element of `timing`."""

WATCH = (
    "picture",
    "steps",
    "age",
    "render_time",
    "viewers",
    "episodes",
    "last_return",
    "mean_return",
)
"""The elements of the observation `watch` of an agent that gets pictures, float64: the number of the picture, the step
of the world in which it was drawn (counted since the world is watched; in real time, the `frame` of `timing`), the
seconds since then, the seconds that drawing took, the number of viewers, the number of episodes that ended since the
world is watched, the return of the last one and the mean of the last 200; NaN if there is none."""


MOST_BYTES = 1 << 16
"""The longest text in bytes; names beyond it are left out."""


class AttributeNames(str):
    """The text of the names; a separate type, because it travels among the notes of an info."""

    __slots__ = ()

    @classmethod
    def of(cls, names: Mapping[str, bool]) -> AttributeNames:
        """Make the text from names; each value says whether the name is a method's."""
        text = " ".join(f"{name}()" if is_method else name for name, is_method in names.items())
        # An identifier may have letters of several bytes.
        data = text.encode()
        if len(data) > MOST_BYTES:
            # Cut at a space: a part of a name would be another name.
            text = data[: data.rindex(b" ", 0, MOST_BYTES + 1)].decode() if b" " in data[: MOST_BYTES + 1] else ""
        return cls(text)


class KnownNames:
    """The names as a client stores them.

    Args:
        text: The server's text, of any length. Names beyond the limit, and names that are not public, are left out.
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
