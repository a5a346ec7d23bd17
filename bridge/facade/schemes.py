"""The URL schemes that `make_remote` and `make_vec_remote` take: the core's, the features', and other packages'."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from bridge.core.client.endpoints import DNS_SCHEMES, open_dns, open_file
from bridge.core.client.envs.env import RemoteEnv
from bridge.core.client.envs.vector_env import RemoteVectorEnv
from bridge.core.client.schemes import Scheme
from bridge.core.extras import feature, has_feature
from bridge.core.transport.address import SERVER_SCHEMES, parse_address, scheme_of
from bridge.errors import AddressError, SettingError

__all__ = ["CORE_SCHEMES", "FEATURES", "GROUP", "SERVERS", "find_scheme", "other_schemes"]

SERVERS = Scheme(
    names=SERVER_SCHEMES,
    description="a server of dm_env_rpc",
    make_env=RemoteEnv,
    make_vector_env=RemoteVectorEnv,
    lanes=True,
)
"""A world at a server, or many."""
_FILE = Scheme(names=("file",), description="a file with a URL a line", make_directory=open_file, lanes=True)
_DNS = Scheme(names=DNS_SCHEMES, description="every address of a host name", make_directory=open_dns, lanes=True)
CORE_SCHEMES = {name: scheme for scheme in (SERVERS, _FILE, _DNS) for name in scheme.names}
"""The schemes of the core, by name."""
GROUP = "gymnasium_bridge.schemes"
"""The group of entry points of other packages."""
_OF_BOTH = {"perlert": "perlert", "openenv": "openenv", "openenvs": "openenv"}
_OF_VECTORS = {"listen": "dial"}
FEATURES: Mapping[str, str] = {**_OF_BOTH, **_OF_VECTORS}
"""The schemes of features, by name: the folder of `bridge` whose module `scheme` has it as `SCHEME`."""


def find_scheme(urls: Sequence[str]) -> tuple[str, Scheme]:
    """Return the scheme of URLs that a user's call names, and what stands before `://` in the first of them.

    A feature, or another package, is imported here.

    Raises:
        AddressError: There is no such scheme.
        SettingError: The URLs are of several, the installation lacks the feature, or the package cannot be used.
    """
    names = {scheme_of(url): url for url in reversed(urls)}
    for name, url in names.items():
        if name not in CORE_SCHEMES and name not in FEATURES and name not in _of_packages():
            parse_address(url)  # which says what there is
            raise AddressError(url, f"there is no scheme {name!r}{other_schemes()}")
    # Before anything is imported. What stands for one feature has one scheme, such as `openenv` and `openenvs`.
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
    """Return the schemes of other packages, by name, with the packages that have them; imports nothing of them."""
    from bridge.core.plugins import found, package_of  # it imports `importlib.metadata`, which few calls need

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
    """Return for an error, in brackets, what there is beside the schemes of servers; imports nothing of it."""
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
    """Return names as a sentence has them."""
    return " and ".join([", ".join(names[:-1]), *names[-1:]]) if len(names) > 1 else "".join(names)
