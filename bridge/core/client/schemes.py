"""What a URL scheme is: what `make_remote` and `make_vec_remote` do with URLs of it, whoever has it.

The core has those of its own servers and directories; features and other packages add theirs by the same `Scheme`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from bridge.errors import SettingError

if TYPE_CHECKING:
    import gymnasium
    from gymnasium.vector import VectorEnv

    from bridge.core.client.endpoints import Directory

__all__ = ["Scheme"]

_NAME = re.compile(r"[a-z][a-z0-9+.-]*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """A URL scheme: what `make_remote` and `make_vec_remote` do with its URLs.

    Another package adds one by an entry point for each of its names, in the group `gymnasium_bridge.schemes`:

        [project.entry-points."gymnasium_bridge.schemes"]
        named = "bridge_named:SCHEME"

    Its functions get URLs with the scheme in lower case and no spaces around, and the keywords of the user's call that
    differ from their defaults: those of `make_remote` and `make_vec_remote`, and its own ones. A keyword that a
    function does not take is a TypeError of the user's call, which names it. They may raise errors of `bridge.errors`:
    AddressError for a URL that cannot be read, SettingError for a keyword, ConnectError where nobody answers. A URL may
    hold a token, `?token=…`, which errors and logs must not repeat: AddressError leaves it out.

    A scheme is used for URLs that a user's call names, and never for one that a directory, a server, a page or a file
    gives: nobody else can have a package imported.

    Args:
        names: What stands before `://`, each in lower case.
        description: What its URLs are, in a few words, for errors and lists: "a slot in a lobby".
        make_env: `make_env(url, **keywords)` returns what `make_remote` does, a `gymnasium.Env`; None: its URLs are not
            for `make_remote`.
        make_vector_env: `make_vector_env(urls, **keywords)` returns what `make_vec_remote` does, a
            `gymnasium.vector.VectorEnv`. `urls` is a list of one URL or more, all of this scheme: one that is mixed
            with URLs of other schemes is refused before. None: `make_directory`, if there is one; else each slot has an
            environment of `make_env`, all of them behind a server in this process. Then `make_env` is called by several
            threads, and gets the keywords that it does for `make_remote`, but for `wait_for_server`.
        make_directory: `make_directory(url, **own_keywords)` returns a `bridge.Directory` of servers of dm_env_rpc,
            which `make_vec_remote` watches while they come and go; such a URL is given alone, not in a list. The
            keywords of `make_vec_remote` are for its servers, and it gets its own ones. If it has a method `close`,
            that is called once the environment is closed. Its endpoints have URLs of the core's schemes alone.
        keywords: The keywords beyond those of `make_remote` and `make_vec_remote` that its functions take, each with
            what it means. Users give those of another package as `scheme_options={…}`.
        blocking: Whether `make_vec_remote(…, blocking=True)` takes its URLs. For that, `make_vector_env` has to return
            a `bridge.RemoteVectorEnv`, around which there is a `bridge.wrappers.BlockingReset` then.
        lanes: Whether it can have worlds of many lanes. True: `make_vector_env` gets the keyword `lanes`, and
            `waits_for_all=True` where each step waits for every slot, so that lanes are as good as worlds;
            `RemoteVectorEnv` takes both. False: `lanes=True` is refused, and neither is handed on.

    Raises:
        SettingError: A name is none, or it makes nothing.
    """

    names: tuple[str, ...]
    description: str
    make_env: Callable[..., gymnasium.Env[Any, Any]] | None = None
    make_vector_env: Callable[..., VectorEnv[Any, Any, Any]] | None = None
    make_directory: Callable[..., Directory] | None = None
    keywords: Mapping[str, str] = dataclasses.field(default_factory=dict)
    blocking: bool = True
    lanes: bool = False

    def __post_init__(self) -> None:
        wrong = [name for name in self.names if not _NAME.fullmatch(name)]
        if isinstance(self.names, str) or not self.names or wrong:
            raise SettingError(
                "expected names=(…,) with what stands before ://, lower-case letters, digits, +, - and ., got "
                f"{self.names!r:.80}"
            )
        if self.make_vector_env is not None and self.make_directory is not None:
            raise SettingError(f"expected make_vector_env or make_directory for {self.names[0]}://, got both")
        if [self.make_env, self.make_vector_env, self.make_directory] == [None] * 3:
            raise SettingError(f"expected make_env, make_vector_env or make_directory for {self.names[0]}://, got none")
