"""`Server`, as users get it: that of the core, with what a feature adds to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.core.extras import feature
from bridge.core.keywords import grouped
from bridge.core.server.server import CoreServer
from bridge.core.transport.credentials import TLS, AccessKeywords, ClientAccess
from bridge.errors import SettingError

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Server"]


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
