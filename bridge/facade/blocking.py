"""`serve`: publish an environment until Ctrl-C, for programs that do nothing else."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any, ParamSpec

from bridge.core.server.core_server import SWITCH_INTERVAL
from bridge.core.worlds.recipe import EnvLike
from bridge.facade.serve import serve_gym
from bridge.facade.server import Server

__all__ = ["serve"]

_P = ParamSpec("_P")


def _with_keywords_of(function: Callable[_P, Server]) -> Callable[[Callable[..., None]], Callable[_P, None]]:
    """Give a function the signature of another one, without `start`."""

    def decorate(decorated: Callable[..., None]) -> Callable[_P, None]:
        signature = inspect.signature(function)
        kept = [parameter for name, parameter in signature.parameters.items() if name != "start"]
        decorated.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=kept, return_annotation=None
        )
        return decorated

    return decorate


@_with_keywords_of(serve_gym)
def serve(env: EnvLike, **keywords: Any) -> None:
    """Publish an environment until Ctrl-C or SIGTERM, and print its URL: `serve_gym` for programs that do only this.

    The calling thread makes and calls the environments. So environments that draw with a GUI toolkit work if this is
    called in the main thread. SIGTERM lets clients leave first, as in `Server.run`.

    Args:
        env: See `serve_gym`.
        keywords: The keywords of `serve_gym`, without `start`.

    Raises:
        SettingError, StartError: As `serve_gym` and `Server.run`.
        TypeError: There is no such keyword.
    """
    server = serve_gym(env, **keywords, start=False)
    # The process does nothing else, so its threads may switch less often.
    sys.setswitchinterval(SWITCH_INTERVAL)

    def say() -> None:
        page = f", with a page at {server.web_url}" if server.web_url else ""
        print(f"serving at {' '.join(server.urls)}{page} until Ctrl-C", flush=True)

    server.run(started=say)
