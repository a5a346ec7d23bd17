"""`make_parallel_remote`: a remote world of several agents (extra `pettingzoo`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge.core.client.envs.parallel_env import RemoteParallelEnv
from bridge.core.client.options import RemoteKeywords, RemoteOptions
from bridge.core.keywords import grouped
from bridge.core.transport.credentials import TLS
from bridge.facade.make import announce

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["make_parallel_remote"]


@grouped(RemoteOptions, tls=TLS)
def make_parallel_remote(url: str, *, states: bool = False, **keywords: Unpack[RemoteKeywords]) -> RemoteParallelEnv:
    """Connect to a remote world of several agents, and play all of them.

    Args:
        url: `grpc://HOST:PORT`, with `?world=NAME` for an existing world.
        states: See `make_remote`.
        keywords: The fields of `bridge.core.client.options.RemoteOptions`, which the signature lists.

    Raises:
        AddressError, ConnectError, RefusedError, RemoteTimeoutError: As `RemoteParallelEnv`.
    """
    announce(keywords, states)
    return RemoteParallelEnv(url, **keywords)
