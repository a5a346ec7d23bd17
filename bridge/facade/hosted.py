"""A vector of environments of another protocol: a server in this process hosts them, and the slots are its clients."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import gymnasium

from bridge.core.back_off import ServerWait, checked_wait, until_up
from bridge.core.client.envs.vector_env import OwningVectorEnv
from bridge.core.client.options import TIMEOUT
from bridge.errors import SettingError, shown_url
from bridge.facade.serve import serve_gym
from bridge.facade.server import Limits

__all__ = ["HostedVectorEnv"]

_MOST = 4096
"""The most slots: each has a world and a connection."""


class HostedVectorEnv(OwningVectorEnv):
    """Environments of another protocol as slots of a `RemoteVectorEnv`.

    A server in this process translates between that protocol and dm_env_rpc. Each slot has its own environment.

    Args:
        make_env: Makes an environment, given its URL.
        urls: A URL for each slot, or one for all.
        of_env: Further keywords of `make_env`.
        timeout: Seconds that an environment waits for any answer. Slots wait twice as long, so that they get its error.
        wait_for_server: Seconds to wait for all servers that are not up yet.
        keywords: The keywords of `make_vec_remote` that concern slots, such as `num_envs`.

    Raises:
        SettingError: Two URLs differ only in their tokens.
    """

    def __init__(
        self,
        make_env: Callable[..., gymnasium.Env[Any, Any]],
        urls: Sequence[str],
        of_env: Mapping[str, Any],
        *,
        timeout: float = TIMEOUT,
        wait_for_server: float = 0.0,
        **keywords: Any,
    ) -> None:
        # Check the URLs before the server starts: after an error nobody would stop it.
        quoted = [quote(shown_url(url), safe="") for url in urls]
        # The server in between gets URLs without tokens, because its errors contain them.
        whole = {shown_url(url): url for url in urls}
        if len(whole) < len(set(urls)):
            raise SettingError(f"expected URLs that differ in more than their tokens, got {urls!r:.200}; use one token")

        def make(url: str) -> gymnasium.Env[Any, Any]:
            return make_env(whole[url], **of_env)

        # Wait here and not in the server in between, whose answers have a deadline. Each slot keeps its URL, so each
        # server must be up.
        wait = ServerWait(checked_wait(wait_for_server))
        for url in whole if wait.lasts else ():
            until_up(lambda url=url: make(url).close(), wait)  # type: ignore[misc]
        secret = secrets.token_urlsafe()
        limits = Limits(max_worlds=_MOST, max_connections=_MOST)
        between = serve_gym(make, thread_safe=True, limits=limits, token=secret)
        places = [f"{between.url}?kwargs.url={url}" for url in quoted]
        end = functools.partial(between.stop, 0.0)
        super().__init__(end, places, token=secret, timeout=2 * timeout, **keywords)
