"""`serve`: publish an environment until Ctrl-C, as the whole work of a program."""

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
    """Give a function the signature of another one but for `start`, which a server that is waited for has not."""

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
    """Publish an environment until Ctrl-C or SIGTERM, and print where: `serve_gym` for programs that do only this.

    Environments are made and called by the thread that calls this, so that in a program's main thread those that draw
    with a GUI toolkit work, too. SIGTERM lets clients leave first, as `Server.run` does.

    Args:
        env: As for `serve_gym`.
        keywords: Those of `serve_gym`, without `start`.

    Raises:
        SettingError, StartError: As `serve_gym` and `Server.run`.
        TypeError: There is no such keyword.
    """
    server = serve_gym(env, **keywords, start=False)
    # The process does nothing else: its threads may hand over to each other less often.
    sys.setswitchinterval(SWITCH_INTERVAL)

    def say() -> None:
        page = f", with a page at {server.web_url}" if server.web_url else ""
        print(f"serving at {' '.join(server.urls)}{page} until Ctrl-C", flush=True)

    server.run(started=say)
