"""`Server`, as users get it: that of the core, with what a feature adds to it."""

from __future__ import annotations

from bridge.core.extras import feature
from bridge.core.server.server import CoreServer
from bridge.core.transport.credentials import TLS, ClientCredentials, TokenLike
from bridge.errors import SettingError

__all__ = ["Server"]


class Server(CoreServer):
    """Serves worlds until it is stopped.

    It listens from its construction on. `start` serves in a background thread, `run` in the calling one. Works as a
    context manager, which stops it. `serve_gym` and `serve_parallel` return one.
    """

    def dial(
        self, url: str, *, token: TokenLike | None = None, tls: TLS | None = None, name: str | None = None
    ) -> None:
        """Dial a trainer that waits for servers with `listen://`, again and again, from `start` to `stop`.

        The trainer needs no other token of this server than the connection that was made to it.

        Args:
            url: The trainer's: `grpc://HOST:PORT` or, with TLS, `grpcs://HOST:PORT`; where nothing but HTTPS gets out,
                `wss://HOST:PORT`, or `ws://` without TLS.
            token: What the trainer expects; None: that of the URL, or of the environment variable `BRIDGE_TOKEN`.
            tls: What the trainer's certificate is known by, as for `make_remote`.
            name: The name by which the trainer knows this server, the same each time; None: of machine and process.

        Raises:
            AddressError: The URL cannot be read.
            SettingError: The server speaks by grpcio, which cannot dial.
        """
        with feature("dial", "dial="):
            from bridge.dial.dialing import Dialing
        if not self.takes_sockets:
            raise SettingError("expected transport='http2' with dial, got 'grpcio', which cannot dial")
        self.attach(Dialing(self, url, ClientCredentials.of(token=token, tls=tls), name))
