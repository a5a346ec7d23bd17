"""A vector of environments of another protocol: a server in this process has them, and the slots are its clients."""

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
"""Slots, each of which has a world and a connection."""


class HostedVectorEnv(OwningVectorEnv):
    """Environments of another protocol as slots, as `RemoteVectorEnv` gives them.

    A server in this process speaks that protocol on one side and dm_env_rpc on the other; each slot has an environment
    of its own.

    Args:
        make_env: Makes an environment, given its URL.
        urls: A URL for each slot, or one for all.
        of_env: Further keywords of `make_env`.
        timeout: Seconds that an environment waits for any answer. Slots wait twice as long, so that its error is told.
        wait_for_server: Seconds to wait for servers that are not up yet, all of them.
        keywords: Those of `make_vec_remote` that are of slots, such as `num_envs`.

    Raises:
        SettingError: URLs differ in their tokens alone.
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
        # Before the server starts, which nobody would stop where one is no URL.
        quoted = [quote(shown_url(url), safe="") for url in urls]
        # Errors of the server in between tell the URLs that it gets: these have no tokens.
        whole = {shown_url(url): url for url in urls}
        if len(whole) < len(set(urls)):
            raise SettingError(f"expected URLs that differ in more than their tokens, got {urls!r:.200}; use one token")

        def make(url: str) -> gymnasium.Env[Any, Any]:
            return make_env(whole[url], **of_env)

        # Here, and not in the server between, whose answers have a deadline. Each slot keeps its URL, so each has to be
        # up.
        wait = ServerWait(checked_wait(wait_for_server))
        for url in whole if wait.lasts else ():
            until_up(lambda url=url: make(url).close(), wait)  # type: ignore[misc]
        secret = secrets.token_urlsafe()
        limits = Limits(max_worlds=_MOST, max_connections=_MOST)
        between = serve_gym(make, thread_safe=True, limits=limits, token=secret)
        places = [f"{between.url}?kwargs.url={url}" for url in quoted]
        end = functools.partial(between.stop, 0.0)
        super().__init__(end, places, token=secret, timeout=2 * timeout, **keywords)
