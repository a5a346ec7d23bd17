"""`Server`, as users get it: that of the core, with what a feature adds to it."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

from bridge.core.extras import feature
from bridge.core.keywords import grouped, with_texts
from bridge.core.server import limits as core
from bridge.core.server.limits import CoreLimits
from bridge.core.server.server import CoreServer
from bridge.core.transport.credentials import TLS, AccessKeywords, ClientAccess
from bridge.errors import SettingError

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Limits", "Server", "checked_limits"]


class Server(CoreServer):
    """Serves worlds until it is stopped.

    It listens from its construction on. `start` serves in a background thread, `run` in the calling one. Works as a
    context manager, which stops it. `serve_gym` and `serve_parallel` return one.
    """

    @grouped(ClientAccess, tls=TLS)
    def dial(self, url: str, *, name: str | None = None, **keywords: Unpack[AccessKeywords]) -> None:
        """Dial a trainer that waits for servers with `listen://`, again and again, from `start` to `stop`.

        The trainer expects the token, which may also be in the URL, `?token=…`. It needs none of this server: the
        connection that was made to it is enough.

        Args:
            url: The trainer's: `grpc://HOST:PORT` or, with TLS, `grpcs://HOST:PORT`; where nothing but HTTPS gets out,
                `wss://HOST:PORT`, or `ws://` without TLS.
            name: The name by which the trainer knows this server, the same each time; None: of machine and process.
            keywords: Those of `ClientAccess`, which the signature lists.

        Raises:
            AddressError: The URL cannot be read.
            SettingError: The server speaks by grpcio, which cannot dial.
        """
        with feature("dial", "dial="):
            from bridge.dial.dialing import Dialing
        if not self.takes_sockets:
            raise SettingError("expected transport='http2' with dial, got 'grpcio', which cannot dial")
        self.attach(Dialing(self, url, ClientAccess(**keywords).credentials, name))


@dataclasses.dataclass(frozen=True)
class Limits(CoreLimits):
    """The limits of a server: `limits=` of `serve_gym` and `serve_parallel`.

    A request beyond a limit is refused with an error that names the limit; nothing else is changed by it.

    Examples:
        >>> from bridge import Limits, serve_gym
        >>> with serve_gym("CartPole-v1", limits=Limits(max_worlds=8, idle_timeout=600.0)) as server:
        ...     print(server.worlds)
        []

    Args:
        keywords: Those of `bridge.core.server.limits.CoreLimits`, which the docstring lists.
        takeover_timeout: Seconds that a person who has taken over from an agent, and slows it down, may do nothing.
        seat_timeout: Seconds that a seat with a `seat_key` waits for a client that lost its connection.

    Raises:
        SettingError: A value is out of its range.
    """

    takeover_timeout: float = 60.0
    seat_timeout: float = 30.0


Limits.__doc__ = with_texts(inspect.getdoc(Limits) or "", CoreLimits)


def checked_limits(limits: Any) -> Limits:
    """Return the keyword `limits`, or raise SettingError where it is something else."""
    found = core.checked_limits(limits)
    if isinstance(found, Limits):
        return found
    # Those of a part of this package that knows the core alone.
    return Limits(**{field.name: getattr(found, field.name) for field in dataclasses.fields(CoreLimits)})
