"""`make_remote` and `make_vec_remote`: which class a URL's environment is of, and the keywords that users give."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from bridge.client.endpoints import Directory, as_directory
from bridge.client.env import RemoteEnv
from bridge.client.options import (
    CONNECT_TIMEOUT,
    MAX_MESSAGE_BYTES,
    TIMEOUT,
    BlockingKeywords,
    OtherKeywords,
    Role,
    VectorKeywords,
    Wait,
    given_options,
    is_openenv,
    is_perlert,
    refuse_unknown_keywords,
)
from bridge.client.vector_env import RemoteVectorEnv, checked_urls
from bridge.client.wire.connect import Transport
from bridge.encoding.tensors import Array
from bridge.errors import SettingError
from bridge.keywords import grouped
from bridge.transport.address import secret_url
from bridge.transport.compression import Compression
from bridge.transport.credentials import TLS, TokenLike

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv
    from typing_extensions import Unpack

__all__ = ["make_remote", "make_vec_remote"]


@grouped(tls=TLS)
def make_remote(
    url: str,
    *,
    env_id: str | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    render_mode: str | None = None,
    agent: str | None = None,
    timeout: float = TIMEOUT,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    transport: Transport = "http2",
    token: TokenLike | None = None,
    token_file: str | os.PathLike[str] | None = None,
    tls: TLS | None = None,
    compression: Compression | None = None,
    env: Callable[..., Any] | None = None,
    role: Role | None = None,
    wait: Wait | None = None,
    player: str | None = None,
    diagnostics: bool = True,
    **others: Unpack[OtherKeywords],
) -> RemoteEnv:
    """Connect to one remote environment, as the example of `RemoteEnv` shows.

    Args:
        url: `grpc://HOST:PORT`; its path may name the environment, its query further CreateWorld settings. With
            `perlert://HOST:PORT/NAME:NUMBER` the result is a `bridge.perlert.PerlertEnv`, with `openenv://HOST:PORT` a
            `bridge.openenv.env.OpenEnvEnv`.
        env_id: The environment, where the server has several.
        env_kwargs: Arguments of the environment's constructor.
        render_mode: The render mode to make it with; frames come by `render()`.
        agent: The agent to join as, in a world of several; None: the first that is free.
        timeout: Seconds to wait for any answer.
        max_message_bytes: The largest request or answer, in bytes.
        transport: `http2`, our own, which is faster; or `grpcio`, for proxies and servers that ours does not suit.
        token: The token that the server expects; None: that of `token_file`, or else of the variable `BRIDGE_TOKEN`.
        token_file: A file that holds the token.
        tls: Of `grpcs://` and `wss://`: the server's CA, `TLS(ca="ca.pem")`, and a certificate where it asks for one.
        compression: `zstd` (extra `zstd`, at both ends) or `gzip`: the server compresses its answers, without any loss.
        env: A function that makes the environment, with `env_kwargs`: sent to a server with `allow_env_factories=True`.
        role: In a real-time world: `player`, or `spectator`, whose actions and resets change nothing.
        wait: In a real-time world: `now`, or `next_frame`, for one decision a frame.
        player: Who acts, as the server's recordings say: `agent` or `person`, with a name as in `person:Ann`.
        diagnostics: In a real-time world: whether infos carry `latency`.
        others: The keywords of `bridge.perlert.make_perlert_env`; of `openenv://` `action_space`, `observation_space`.

    Raises:
        AddressError, ConnectError, RefusedError, RemoteTimeoutError: As `RemoteEnv`.
        TypeError: There is no such keyword.
    """
    return _make_one(url, {key: value for key, value in locals().items() if key not in ("url", "others")}, others)


def _make_one(url: str, options: dict[str, Any], others: Mapping[str, Any]) -> RemoteEnv:
    if is_perlert(url):
        from bridge.perlert import make_perlert_env

        # The declared type is that of every other URL; make_perlert_env declares this one's.
        return make_perlert_env(url, **given_options(make_remote, options), **others)  # type: ignore[return-value]
    if is_openenv(url):
        from bridge.openenv.env import OpenEnvEnv

        return OpenEnvEnv(url, **given_options(make_remote, options), **others)  # type: ignore[return-value]
    refuse_unknown_keywords(make_remote, others)
    return RemoteEnv(url, **options)


@overload
def make_vec_remote(
    urls: str | Sequence[str] | Directory, *, blocking: Literal[True], **keywords: Unpack[BlockingKeywords]
) -> VectorEnv[Any, Any, Array]: ...


@overload
def make_vec_remote(
    urls: str | Sequence[str] | Directory, *, blocking: Literal[False] = False, **keywords: Unpack[VectorKeywords]
) -> RemoteVectorEnv: ...


@grouped(tls=TLS)
def make_vec_remote(
    urls: str | Sequence[str] | Directory,
    *,
    num_envs: int | None = None,
    blocking: bool = False,
    env_id: str | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    render_mode: str | None = None,
    agent: str | Sequence[str] | None = None,
    timeout: float = TIMEOUT,
    connect_timeout: float = CONNECT_TIMEOUT,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    transport: Transport = "http2",
    token: TokenLike | None = None,
    token_file: str | os.PathLike[str] | None = None,
    tls: TLS | None = None,
    compression: Compression | None = None,
    env: Callable[..., Any] | None = None,
    spares: str | Sequence[str] = (),
    role: Role | None = None,
    wait: Wait | None = None,
    player: str | None = None,
    diagnostics: bool = True,
    **more: Any,
) -> VectorEnv[Any, Any, Array]:
    """Connect to many remote environments as one vector environment, as the example of `RemoteVectorEnv` shows.

    Args:
        urls: A server's URL for each world; or one URL, of which `num_envs` slots are made. A world of N lanes fills N
            slots. Or a directory of servers that come and go, over which the worlds are spread: `file:///PATH`, a file
            with a URL a line; `grpc+dns://HOST:PORT` and `grpcs+dns://HOST:PORT`, every address of a name;
            `listen://HOST:PORT`, where servers dial in, with the token and the `TLS(certificate=…, key=…)` of this
            end; or an object with a method `endpoints`, as `bridge.client.endpoints.Directory`. `perlert://` URLs give
            a `bridge.perlert.PerlertVectorEnv`, `openenv://` URLs a `bridge.openenv.env.OpenEnvVectorEnv`.
        num_envs: The number of slots; None: what the URLs give, a world each.
        blocking: True: `reset` and `step` wait until every slot has an observation, and return batched arrays, as
            trainers and Gymnasium's vector wrappers expect: what is returned is a `bridge.wrappers.BlockingReset`.
        agent: In a world of several agents, which of them each URL is joined as; with one URL and a list, a slot for
            each agent of that list. The URLs name a world that exists, `?world=NAME`. None: the first that is free.
        connect_timeout: Seconds within which a server has to say anything when it is connected to. One that is silent
            for longer is passed over where others can take its slots: those of a directory, or of a list of URLs those
            with the same path and query. With nobody to take them, it is waited for until `timeout`.
        spares: URLs of further servers, whose worlds stand ready and take over the slots of remotes that are lost.
            Where there are more `urls` than `num_envs`, those beyond are spares too.
        env_id: The environment, where a server has several.
        env_kwargs: Arguments of the environment's constructor.
        render_mode: The render mode to make it with.
        timeout: Seconds to wait for any answer.
        max_message_bytes: The largest request or answer, in bytes.
        transport: What to speak gRPC with, as for `make_remote`.
        token: The token that the servers expect, as for `make_remote`.
        token_file: A file that holds the token.
        tls: For `grpcs://` and `wss://`: the CA of the servers' certificates, as for `make_remote`.
        compression: `zstd` or `gzip`, for slow networks, as for `make_remote`.
        env: A function that makes the environment, sent to the servers, as for `make_remote`.
        role: In a real-time world: `player`, or `spectator`, whose actions and resets change nothing.
        wait: In a real-time world: `now`, or `next_frame`, for one decision a frame.
        player: Who acts, as the server's recordings say: `agent` or `person`, with a name as in `person:Ann`.
        diagnostics: In a real-time world: True: infos carry `latency`.
        more: With `blocking=True`: the keywords of `bridge.wrappers.BlockingReset`, whose `timeout` is named
            `blocking_timeout` here. With `perlert://` URLs: those of `bridge.perlert.PerlertVectorEnv`.

    Raises:
        AddressError, ConnectError, RefusedError, RemoteTimeoutError, SettingError: As `RemoteVectorEnv`.
        TypeError: There is no such keyword.
    """
    options = {key: value for key, value in locals().items() if key not in ("urls", "blocking", "more")}
    return _make_vector(urls, blocking, options, more)


def _make_vector(
    urls: str | Sequence[str] | Directory, blocking: bool, options: dict[str, Any], more: dict[str, Any]
) -> VectorEnv[Any, Any, Array]:
    given = [] if as_directory(urls) is not None else checked_urls(urls)
    of_perlert, of_openenv = [is_perlert(url) for url in given], [is_openenv(url) for url in given]
    if any(of_perlert + of_openenv) and not (all(of_perlert) or all(of_openenv)):
        mixture = [secret_url(url) for url in given]
        raise SettingError(
            f"expected perlert:// URLs alone, or openenv://, or neither, got a mixture: {mixture!r:.200}"
        )
    if any(of_perlert) and blocking:
        raise SettingError(f"blocking=True is for servers of dm_env_rpc, got perlert:// URLs: {urls!r:.200}")
    if any(of_perlert):
        from bridge.perlert import PerlertVectorEnv

        # The declared type is that of every other URL; PerlertVectorEnv is this one's.
        return PerlertVectorEnv(urls, **given_options(make_vec_remote, options), **more)  # type: ignore[arg-type]
    make: Callable[[], RemoteVectorEnv] = partial(RemoteVectorEnv, urls, **options)
    if isinstance(urls, str) and urls.strip().startswith("listen://"):
        from bridge.dial.listener import ListeningVectorEnv

        make = partial(ListeningVectorEnv, urls, **given_options(make_vec_remote, options))
    if any(of_openenv):
        from bridge.openenv.env import OpenEnvVectorEnv

        spaces = {name: more.pop(name) for name in ("action_space", "observation_space") if name in more}
        make = partial(OpenEnvVectorEnv, given, **given_options(make_vec_remote, options), **spaces)
    if not blocking:
        refuse_unknown_keywords(make_vec_remote, more)
        return make()
    from bridge.wrappers.blocking_reset import block

    blocked: VectorEnv[Any, Any, Array] = block(make, **more)
    return blocked
