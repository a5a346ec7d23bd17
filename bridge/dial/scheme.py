"""The URL scheme `listen://`: servers that dial in."""

from __future__ import annotations

from typing import Any

from bridge.core.client.endpoints import Scheme
from bridge.dial.listener import ListeningVectorEnv
from bridge.errors import SettingError

__all__ = ["SCHEME"]


def _listen(urls: list[str], **keywords: Any) -> ListeningVectorEnv:
    if len(urls) > 1:
        raise SettingError(f"expected one listen:// URL, at which all servers dial in, got {urls!r:.200}")
    return ListeningVectorEnv(urls[0], **keywords)


SCHEME = Scheme(
    names=("listen",), description="where servers of dm_env_rpc dial in", make_vector_env=_listen, lanes=True
)
"""`listen://HOST:PORT`, with the token and the certificate of the listening end."""
