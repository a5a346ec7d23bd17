"""`make_remote` and `make_vec_remote`: which class a URL's environment is of, and the keywords that users give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from bridge.core.client.endpoints import Directory, as_directory
from bridge.core.client.envs.env import RemoteEnv
from bridge.core.client.envs.vector_env import RemoteVectorEnv
from bridge.core.client.options import (
    BlockingKeywords,
    EnvKeywords,
    EnvOptions,
    OtherKeywords,
    VectorKeywords,
    VectorOptions,
    checked_urls,
    given_options,
    is_openenv,
    is_perlert,
)
from bridge.core.encoding.tensors import Array
from bridge.core.keywords import grouped
from bridge.core.transport.credentials import TLS
from bridge.errors import SettingError

if TYPE_CHECKING:
    from gymnasium.vector import VectorEnv
    from typing_extensions import Unpack

__all__ = ["make_remote", "make_vec_remote"]


# Those of `BlockingReset`, by the names that they have here.
_OF_BLOCKING = BlockingKeywords.__annotations__.keys() - VectorKeywords.__annotations__.keys()


@grouped(EnvOptions, OtherKeywords.__annotations__, tls=TLS)
def make_remote(url: str, **keywords: Unpack[EnvKeywords]) -> RemoteEnv:
    """Connect to one remote environment, as the example of `RemoteEnv` shows.

    With a URL of `perlert://` it also takes the keywords of `bridge.perlert.make_perlert_env`, with one of `openenv://`
    `action_space` and `observation_space`.

    Args:
        url: `grpc://HOST:PORT`; its path may name the environment, its query further CreateWorld settings. With
            `perlert://HOST:PORT/NAME:NUMBER` the result is a `bridge.perlert.PerlertEnv`, with `openenv://HOST:PORT` a
            `bridge.openenv.env.OpenEnvEnv`.
        keywords: The fields of `bridge.core.client.options.EnvOptions`.

    Raises:
        AddressError, ConnectError, RefusedError, RemoteTimeoutError: As `RemoteEnv`.
        TypeError: There is no such keyword.
    """
    # Imported only here: users of gRPC need not load the datagram protocol.
    if is_perlert(url):
        from bridge.perlert import make_perlert_env

        # The declared type is that of every other URL; make_perlert_env declares this one's.
        return make_perlert_env(url, **given_options(EnvOptions, keywords))  # type: ignore[return-value]
    if is_openenv(url):
        from bridge.openenv.env import OpenEnvEnv

        return OpenEnvEnv(url, **given_options(EnvOptions, keywords))  # type: ignore[return-value]
    return RemoteEnv(url, **keywords)


@overload
def make_vec_remote(
    urls: str | Sequence[str] | Directory, *, blocking: Literal[True], **keywords: Unpack[BlockingKeywords]
) -> VectorEnv[Any, Any, Array]: ...


@overload
def make_vec_remote(
    urls: str | Sequence[str] | Directory, *, blocking: Literal[False] = False, **keywords: Unpack[VectorKeywords]
) -> RemoteVectorEnv: ...


@grouped(VectorOptions, BlockingKeywords.__annotations__, tls=TLS)
def make_vec_remote(
    urls: str | Sequence[str] | Directory, *, blocking: bool = False, **keywords: Any
) -> VectorEnv[Any, Any, Array]:
    """Connect to many remote environments as one vector environment, as the example of `RemoteVectorEnv` shows.

    With `blocking=True` it also takes the keywords of `bridge.wrappers.BlockingReset`, whose `timeout` is named
    `blocking_timeout` here; with `perlert://` URLs those of `bridge.perlert.PerlertVectorEnv`.

    Args:
        urls: A server's URL for each world; or one URL, of which `num_envs` slots are made. A world of N lanes fills N
            slots. Or a directory of servers that come and go, over which the worlds are spread: `file:///PATH`, a file
            with a URL a line; `grpc+dns://HOST:PORT` and `grpcs+dns://HOST:PORT`, every address of a name;
            `listen://HOST:PORT`, where servers dial in, with the token and the `TLS(certificate=…, key=…)` of this
            end; or an object with a method `endpoints`, as `bridge.Directory`. `perlert://` URLs
            give a `bridge.perlert.PerlertVectorEnv`, `openenv://` URLs a `bridge.openenv.env.OpenEnvVectorEnv`.
        blocking: True: `reset` and `step` wait until every slot has an observation, and return batched arrays, as
            trainers and Gymnasium's vector wrappers expect: what is returned is a `bridge.wrappers.BlockingReset`.
            Since the slots wait for each other, one world of `num_envs` lanes may fill them, as `lanes` says. Then a
            slow environment delays the others within each step, and a crash of the world ends all episodes; one that
            raises ends its own.
        keywords: The fields of `bridge.core.client.options.VectorOptions`.

    Raises:
        AddressError, ConnectError, RefusedError, RemoteTimeoutError, SettingError: As `RemoteVectorEnv`.
        TypeError: There is no such keyword.
    """
    given = [] if as_directory(urls) is not None else checked_urls(urls)
    of_perlert, of_openenv = [is_perlert(url) for url in given], [is_openenv(url) for url in given]
    # Each protocol has a vector environment of its own, and one object cannot be several.
    if any(of_perlert + of_openenv) and not (all(of_perlert) or all(of_openenv)):
        raise SettingError(f"expected perlert:// URLs alone, or openenv://, or neither, got a mixture: {given!r:.200}")
    if any(of_perlert) and blocking:
        raise SettingError(f"blocking=True is for servers of dm_env_rpc, got perlert:// URLs: {given!r:.200}")
    of_blocking = {name: keywords.pop(name) for name in _OF_BLOCKING & keywords.keys()}
    if of_blocking and not blocking:
        raise TypeError(f"make_vec_remote() takes {', '.join(sorted(of_blocking))} only with blocking=True")
    # With `continue` a lost slot is not waited for, and with a `step_timeout` neither is a slow one.
    waits_for_all = blocking and of_blocking.get("on_lost") != "continue"
    make: Callable[[], RemoteVectorEnv] = partial(RemoteVectorEnv, urls, waits_for_all=waits_for_all, **keywords)
    fewer = given_options(VectorOptions, keywords)
    if (any(of_perlert) or any(of_openenv)) and fewer.pop("lanes", None):
        scheme = "perlert" if any(of_perlert) else "openenv"
        raise SettingError(
            f"lanes=True is for servers of dm_env_rpc, {scheme}:// has no worlds of lanes: leave lanes out"
        )
    if any(of_perlert):
        from bridge.perlert import PerlertVectorEnv

        # The declared type is that of every other URL; PerlertVectorEnv is this one's.
        return PerlertVectorEnv(urls, **fewer)  # type: ignore[arg-type]
    if isinstance(urls, str) and urls.strip().startswith("listen://"):
        from bridge.dial.listener import ListeningVectorEnv

        make = partial(ListeningVectorEnv, urls, **fewer)
    if any(of_openenv):
        from bridge.openenv.env import OpenEnvVectorEnv

        make = partial(OpenEnvVectorEnv, given, **fewer)
    if not blocking:
        return make()
    # Not at the top: wrappers are built on the client, and import it.
    from bridge.wrappers.blocking_reset import block

    blocked: VectorEnv[Any, Any, Array] = block(make, **of_blocking)
    return blocked
