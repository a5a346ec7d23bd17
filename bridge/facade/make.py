"""`make_remote` and `make_vec_remote`: they find the scheme of a URL, and check all keywords."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import gymnasium
from gymnasium.vector import VectorEnv

from bridge.core.client.endpoints import DNS_SCHEMES, Directory, Scheme, open_dns, open_file
from bridge.core.client.envs.env import RemoteEnv
from bridge.core.client.envs.vector_env import OwningVectorEnv, RemoteVectorEnv
from bridge.core.client.options import (
    EnvOptions,
    RemoteKeywords,
    Role,
    VectorOptions,
    checked_urls,
    given_options,
)
from bridge.core.encoding.tensors import Array
from bridge.core.extras import feature, has_feature
from bridge.core.keywords import grouped
from bridge.core.transport.address import SERVER_SCHEMES, parse_address, scheme_of, secret_url
from bridge.core.transport.credentials import TLS
from bridge.errors import AddressError, SettingError

if TYPE_CHECKING:
    from gymnasium import Space
    from gymnasium.vector import AutoresetMode
    from typing_extensions import Unpack

    from bridge.core.client.slots.stepper import OnLost

__all__ = [
    "CORE_SCHEMES",
    "FEATURES",
    "GROUP",
    "SERVERS",
    "FeatureKeywords",
    "announce",
    "find_scheme",
    "make_remote",
    "make_vec_remote",
    "other_schemes",
]

SERVERS = Scheme(
    names=SERVER_SCHEMES,
    description="a server of dm_env_rpc",
    make_env=RemoteEnv,
    make_vector_env=RemoteVectorEnv,
    lanes=True,
)
"""The scheme of servers of dm_env_rpc."""
_FILE = Scheme(names=("file",), description="a file with a URL a line", make_directory=open_file, lanes=True)
_DNS = Scheme(names=DNS_SCHEMES, description="every address of a host name", make_directory=open_dns, lanes=True)
CORE_SCHEMES = {name: scheme for scheme in (SERVERS, _FILE, _DNS) for name in scheme.names}
"""The schemes of the core, by name."""
GROUP = "gymnasium_bridge.schemes"
"""The group of entry points for schemes of other packages."""
_OF_BOTH = {"perlert": "perlert", "openenv": "openenv", "openenvs": "openenv"}
_OF_VECTORS = {"listen": "dial"}
FEATURES: Mapping[str, str] = {**_OF_BOTH, **_OF_VECTORS}
"""The schemes of features by name, with the folder of `bridge` whose module `scheme` defines `SCHEME`."""


def find_scheme(urls: Sequence[str]) -> tuple[str, Scheme]:
    """Return the name before `://` of the first URL, and the scheme of all URLs.

    This imports the feature or package of the scheme.

    Raises:
        AddressError: There is no such scheme.
        SettingError: The URLs have several schemes, the feature is not installed, or the package cannot be used.
    """
    names = {scheme_of(url): url for url in reversed(urls)}
    for name, url in names.items():
        if name not in CORE_SCHEMES and name not in FEATURES and name not in _of_packages():
            parse_address(url)  # raises a more specific error if it can
            raise AddressError(url, f"there is no scheme {name!r}{other_schemes()}")
    # Check this before importing anything. Several names of one feature count as one, such as `openenv` and `openenvs`.
    kinds = {id(CORE_SCHEMES[name]) if name in CORE_SCHEMES else FEATURES.get(name, f"{name}://") for name in names}
    first = scheme_of(urls[0])
    if len(kinds) > 1:
        special = next((name for name in map(scheme_of, urls) if name not in CORE_SCHEMES), first)
        raise SettingError(f"expected {special}:// URLs alone, got a mixture of schemes: {list(urls)!r:.200}")
    if first in CORE_SCHEMES:
        return first, CORE_SCHEMES[first]
    if first in FEATURES:
        with feature(FEATURES[first], f"a URL of {first}://"):
            module = importlib.import_module(f"bridge.{FEATURES[first]}.scheme")
        return first, module.SCHEME
    return first, _of_package(first)


def _of_packages() -> dict[str, str]:
    """Return the schemes of other packages by name, with the names of these packages, without importing them."""
    from bridge.core.plugins import found, package_of  # imports `importlib.metadata`, which few calls need

    return {name: package_of(entries) for name, entries in found(GROUP).items()}


def _of_package(name: str) -> Scheme:
    """Import the scheme of another package."""
    from bridge.core.plugins import load, loading

    scheme = load(GROUP, name, "URL scheme")
    with loading(f"the URL scheme {name}", _of_packages()[name]):
        if not isinstance(scheme, Scheme) or name not in scheme.names:
            raise SettingError(
                f"expected the entry point to name a bridge.Scheme with {name!r} among its names, got {scheme!r:.200}"
            )
    return scheme


def other_schemes() -> str:
    """Return a text in brackets for an error that lists the other available schemes, without importing them."""
    both = [name for name, folder in _OF_BOTH.items() if has_feature(folder)]
    vector = [name for name, scheme in CORE_SCHEMES.items() if scheme.make_directory is not None]
    vector += [name for name, folder in _OF_VECTORS.items() if has_feature(folder)]
    of_both = f"make_remote and make_vec_remote also take {_listed(both)}, " if both else ""
    text = f"{of_both}make_vec_remote{'' if both else ' also takes'} {_listed(vector)}"
    others = {name: package for name, package in _of_packages().items() if name not in (*CORE_SCHEMES, *FEATURES)}
    packages = [f"{name} of the package {package}" for name, package in others.items()]
    installed = f"; installed are also {', '.join(packages)}" if packages else ""
    return f" ({text}{installed})"


def _listed(names: Sequence[str]) -> str:
    """Join names with commas and "and"."""
    return " and ".join([", ".join(names[:-1]), *names[-1:]]) if len(names) > 1 else "".join(names)


class FeatureKeywords(TypedDict, total=False):
    """The keywords of features' schemes; each `SCHEME` documents its own."""

    tag: str | None
    key: bytes | str | None
    use_profile: bool
    start_timeout: float
    config: Any
    action_space: Space[Any] | None
    observation_space: Space[Any] | None


class _WorldKeywords(RemoteKeywords, FeatureKeywords, total=False):
    env_id: str | None
    env: Callable[..., Any] | None
    role: Role | None


class EnvKeywords(_WorldKeywords, total=False):
    """The keywords of `make_remote`, for type checkers."""

    agent: str | None


class VectorKeywords(_WorldKeywords, total=False):
    """The keywords of `make_vec_remote` without `blocking`, for type checkers."""

    agent: str | Sequence[str] | None
    num_envs: int | None
    lanes: bool | None
    spares: str | Sequence[str]
    connect_timeout: float


class BlockingKeywords(VectorKeywords, total=False):
    """The keywords of `make_vec_remote(…, blocking=True)`, which include those of `BlockingReset`."""

    blocking_timeout: float | None
    autoreset_mode: AutoresetMode | Literal["NextStep", "SameStep", "Disabled"]
    on_lost: OnLost
    max_failures: int | None
    step_timeout: float | None


_WAITING = ("timeout", "wait_for_server")
# The keywords of `BlockingReset`, by their names here.
_OF_BLOCKING = BlockingKeywords.__annotations__.keys() - VectorKeywords.__annotations__.keys()


@grouped(EnvOptions, FeatureKeywords.__annotations__, tls=TLS)
def make_remote(
    url: str,
    *,
    states: bool = False,
    scheme_options: Mapping[str, Any] | None = None,
    **keywords: Unpack[EnvKeywords],
) -> RemoteEnv:
    """Connect to one remote environment; `RemoteEnv` has an example.

    With a `perlert://` URL it also takes the keywords of `bridge.perlert.make_perlert_env`, with an `openenv://` URL
    also `action_space` and `observation_space`.

    Args:
        url: `grpc://HOST:PORT`. The path may name the environment; the query may contain CreateWorld settings. With
            `perlert://HOST:PORT/NAME:NUMBER` the result is a `bridge.perlert.PerlertEnv`, with `openenv://HOST:PORT` a
            `bridge.openenv.env.OpenEnvEnv`. Other packages may add schemes (docs/plugins.md).
        states: True if `save_state` will be called: the server then keeps the actions of environments that it cannot
            copy, to replay them (docs/states.md).
        scheme_options: The keywords of another package's scheme, by name.
        keywords: The fields of `bridge.core.client.options.EnvOptions`.

    Raises:
        AddressError, ConnectError, RefusedError, RemoteTimeoutError: See `RemoteEnv`.
        SettingError: The package of the URL's scheme cannot be used, or the scheme is only for `make_vec_remote`.
        TypeError: There is no such keyword, or this scheme does not take it.
    """
    announce(keywords, states)
    name, scheme = find_scheme([url])
    if scheme is SERVERS:
        _check_own("make_remote", name, scheme, keywords, scheme_options)
        return RemoteEnv(url, **keywords)
    if scheme.make_env is None:
        raise SettingError(
            f"{name}:// URLs ({scheme.description}) are for make_vec_remote alone, got make_remote({_plain(url)!r})"
        )
    own = _check_own("make_remote", name, scheme, keywords, scheme_options)
    given = {**given_options(EnvOptions, keywords), **own}
    _check_taken("make_remote", name, scheme.make_env, given)
    # The declared return type is for URLs of servers; other schemes document theirs.
    env: Any = scheme.make_env(_plain(url), **given)
    if not isinstance(env, gymnasium.Env):
        raise SettingError(f"expected make_env of the scheme {name}:// to return a gymnasium.Env, got {env!r:.80}")
    return env  # type: ignore[return-value]


@overload
def make_vec_remote(
    urls: str | Sequence[str] | Directory,
    *,
    blocking: Literal[True],
    states: bool = False,
    scheme_options: Mapping[str, Any] | None = None,
    **keywords: Unpack[BlockingKeywords],
) -> VectorEnv[Any, Any, Array]: ...


@overload
def make_vec_remote(
    urls: str | Sequence[str] | Directory,
    *,
    blocking: Literal[False] = False,
    states: bool = False,
    scheme_options: Mapping[str, Any] | None = None,
    **keywords: Unpack[VectorKeywords],
) -> RemoteVectorEnv: ...


@grouped(VectorOptions, BlockingKeywords.__annotations__, tls=TLS)
def make_vec_remote(
    urls: str | Sequence[str] | Directory,
    *,
    blocking: bool = False,
    states: bool = False,
    scheme_options: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> VectorEnv[Any, Any, Array]:
    """Connect to many remote environments as one vector environment; `RemoteVectorEnv` has an example.

    With `blocking=True` it also takes the keywords of `bridge.wrappers.BlockingReset`; its `timeout` is called
    `blocking_timeout` here. With `perlert://` URLs it also takes the keywords of `bridge.perlert.PerlertVectorEnv`.

    Args:
        urls: A server's URL for each world; or one URL for all `num_envs` slots. A world of N lanes fills N slots. Or a
            directory of servers that come and go, over which the worlds are spread: `file:///PATH`, a file with one URL
            in each line; `grpc+dns://HOST:PORT` and `grpcs+dns://HOST:PORT`, every address of a host name;
            `listen://HOST:PORT`, where servers dial in, with the token and the `TLS(certificate=…, key=…)` of this
            end; or an object with a method `endpoints`, such as a `bridge.Directory`. `perlert://` URLs give a
            `bridge.perlert.PerlertVectorEnv`; with `openenv://` URLs each slot has a `bridge.openenv.env.OpenEnvEnv`.
            Other packages may add schemes (docs/plugins.md). All URLs of a list must have the same scheme.
        blocking: True: `reset` and `step` wait until every slot has an observation, and return batched arrays, as
            trainers and Gymnasium's vector wrappers expect. The result is a `bridge.wrappers.BlockingReset`. Because
            the slots wait for each other, one world of `num_envs` lanes may fill them; see `lanes`. Then a slow
            environment delays the others within each step, and a crash of the world ends all episodes; an environment
            that raises ends only its own episode.
        states: See `make_remote`.
        scheme_options: The keywords of another package's scheme, by name.
        keywords: The fields of `bridge.core.client.options.VectorOptions`.

    Raises:
        AddressError, ConnectError, RefusedError, RemoteTimeoutError, SettingError: See `RemoteVectorEnv`.
        SettingError: The package of the URLs' scheme cannot be used, or the scheme is only for `make_remote`.
        TypeError: There is no such keyword, or this scheme does not take it.
    """
    announce(keywords, states)
    of_blocking = {name: keywords.pop(name) for name in _OF_BLOCKING & keywords.keys()}
    if of_blocking and not blocking:
        raise TypeError(f"make_vec_remote() takes {', '.join(sorted(of_blocking))} only with blocking=True")
    # With `continue` a step does not wait for lost slots.
    waits_for_all = blocking and of_blocking.get("on_lost") != "continue"
    make = _vector_maker(urls, blocking, waits_for_all, scheme_options, keywords)
    if not blocking:
        return make()  # type: ignore[no-any-return]
    # Imported here, because training loops without a wrapper do not need it.
    from bridge.wrappers.blocking_reset import block

    blocked: VectorEnv[Any, Any, Array] = block(make, **of_blocking)
    return blocked


def announce(keywords: Any, states: bool) -> None:
    """If `states`, add the message of states to the messages that the client announces."""
    if states:
        given = keywords.get("messages", ())
        keywords["messages"] = (*((given,) if isinstance(given, str) else given), "states")


def _vector_maker(
    urls: str | Sequence[str] | Directory,
    blocking: bool,
    waits_for_all: bool,
    scheme_options: Mapping[str, Any] | None,
    keywords: dict[str, Any],
) -> Callable[[], Any]:
    """Return a function that makes the vector environment, after all checks that need only the scheme."""
    title = "make_vec_remote"
    if not isinstance(urls, str) and isinstance(urls, Directory):
        _check_own(title, SERVERS.names[0], SERVERS, keywords, scheme_options)
        return partial(RemoteVectorEnv, urls, waits_for_all=waits_for_all, **keywords)
    given = checked_urls(urls)
    name, scheme = find_scheme(given)
    if scheme.make_directory is not None and not isinstance(urls, str):
        raise SettingError(
            f"expected a {name}:// URL ({scheme.description}) alone, as a string, got it in a list: {given!r:.200}"
        )
    if blocking and not scheme.blocking:
        raise SettingError(f"blocking=True is for servers of dm_env_rpc, got {name}:// URLs: {given!r:.200}")
    own = _check_own(title, name, scheme, keywords, scheme_options)
    if name in CORE_SCHEMES:
        return partial(RemoteVectorEnv, urls, waits_for_all=waits_for_all, **keywords)
    fewer, plain = given_options(VectorOptions, keywords), [_plain(url) for url in given]
    if scheme.make_directory is not None:
        open_directory = partial(scheme.make_directory, plain[0], **own)
        _check_taken(title, name, scheme.make_directory, own)
        return partial(_watching, open_directory, waits_for_all=waits_for_all, **fewer)
    if not scheme.lanes and fewer.pop("lanes", None):
        raise SettingError(
            f"lanes=True is for servers of dm_env_rpc, {name}:// has no worlds of lanes: leave lanes out"
        )
    if scheme.make_vector_env is None:
        return _hosted(name, scheme, plain, fewer, own)
    _check_taken(title, name, scheme.make_vector_env, {**fewer, **own})
    if scheme.lanes and waits_for_all:
        fewer["waits_for_all"] = True
    return partial(_checked_vector, name, partial(scheme.make_vector_env, plain, **fewer, **own))


def _checked_vector(name: str, make: Callable[[], Any]) -> VectorEnv[Any, Any, Any]:
    """Make the vector environment of a scheme, and check its type."""
    envs = make()
    if not isinstance(envs, VectorEnv):
        text = f"expected make_vector_env of the scheme {name}:// to return a gymnasium.vector.VectorEnv"
        raise SettingError(f"{text}, got {envs!r:.80}")
    return envs


def _hosted(
    name: str, scheme: Scheme, urls: list[str], keywords: dict[str, Any], own: Mapping[str, Any]
) -> Callable[[], RemoteVectorEnv]:
    """Return a function that makes slots of a scheme with single environments only, behind a server in this process."""
    assert scheme.make_env is not None, "`Scheme` requires at least one maker"
    # This imports the server, which other clients do not need.
    from bridge.facade.hosted import HostedVectorEnv

    of_remote = {field.name for field in dataclasses.fields(EnvOptions)} | FeatureKeywords.__annotations__.keys()
    of_env = {key: value for key, value in keywords.items() if key in of_remote} | dict(own)
    # The keywords for waiting concern both: environments wait for their server, and slots for their environments.
    of_slots = {key: value for key, value in keywords.items() if key not in of_remote or key in _WAITING}
    of_env.pop("wait_for_server", None)
    if not _takes(scheme.make_env, "timeout"):
        of_env.pop("timeout", None)
    _check_taken("make_vec_remote", name, scheme.make_env, of_env)
    return partial(HostedVectorEnv, scheme.make_env, urls, of_env, **of_slots)


def _watching(open_directory: Callable[[], Directory], **keywords: Any) -> RemoteVectorEnv:
    """Return slots on the servers of a scheme's directory, which is closed with the slots."""
    directory = open_directory()
    if not isinstance(directory, Directory):
        raise SettingError(
            f"expected make_directory to return an object with a method endpoints, got {directory!r:.80}"
        )
    close = getattr(directory, "close", None)
    if close is None:
        return RemoteVectorEnv(directory, **keywords)
    return OwningVectorEnv(close, directory, **keywords)


def _plain(url: str) -> str:
    """Return a URL stripped of spaces, with its scheme in lower case, and with a `repr` that hides the token."""
    text = url.strip()
    return secret_url(f"{scheme_of(text)}://{text.partition('://')[2]}")


def _check_own(
    function: str,
    name: str,
    scheme: Scheme,
    keywords: Mapping[str, Any],
    scheme_options: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return a copy of `scheme_options`; raise TypeError if the scheme does not take a keyword.

    Args:
        function: The user's call, for errors.
        name: The name before `://`.
        scheme: The scheme.
        keywords: The other given keywords, including those of features.
        scheme_options: See `make_remote`.
    """
    if scheme_options is not None and not isinstance(scheme_options, Mapping):
        raise TypeError(f"expected scheme_options to be a mapping or None, got {scheme_options!r:.80}")
    own = dict(scheme_options or {})
    for keyword in own:
        if keyword not in scheme.keywords and not scheme.keywords:
            raise TypeError(f"{function}() takes no scheme_options with {name}:// URLs, got {keyword!r}")
        if keyword not in scheme.keywords:
            known = ", ".join(scheme.keywords)
            raise TypeError(f"{function}() takes scheme_options of {known} with {name}:// URLs, got {keyword!r}")
        if keyword in keywords:
            raise TypeError(f"{function}() got {keyword!r} twice: leave it out of scheme_options")
    for keyword in FeatureKeywords.__annotations__.keys() & keywords.keys():
        if keyword not in scheme.keywords:
            raise TypeError(f"{function}() takes no {keyword}= with {name}:// URLs")
    return own


def _check_taken(function: str, name: str, make: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raise TypeError if a scheme's function does not take a given keyword."""
    for keyword in given:
        if not _takes(make, keyword):
            raise TypeError(f"{function}() takes no {keyword}= with {name}:// URLs")


def _takes(make: Callable[..., Any], keyword: str) -> bool:
    parameters = inspect.signature(make).parameters
    return keyword in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
