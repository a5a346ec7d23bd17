"""The processes of environments, which leave it to their server when they end.

A server has threads, so its processes are forked by another one, the forkserver of `multiprocessing`. That imports this
module as it starts. A signal that ends the forkserver would end its processes, too: their exit codes go through it.
"""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

from gymnasium.vector import AsyncVectorEnv
from gymnasium.vector.async_vector_env import _async_worker

from bridge.core.signals import leave_signals
from bridge.core.worlds.environment import start_method

__all__ = ["async_options", "ended_by_kill", "process_context"]


def process_context(*modules: str) -> Any:
    """Return the context of `multiprocessing` that starts the processes of environments.

    Args:
        modules: What they import, imported once by the forkserver and not again in each process that it forks.
    """
    context: Any = multiprocessing.get_context(start_method())
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload([__name__, *modules])
    return context


def async_options() -> dict[str, Any]:
    """Return the keywords with which `AsyncVectorEnv` starts such processes."""
    return {"context": process_context().get_start_method(), "worker": _worker}


def ended_by_kill(vector: AsyncVectorEnv) -> AsyncVectorEnv:
    """Have processes of lanes that do not answer be killed, as they do not end by SIGTERM; return the lanes."""
    for process in vector.processes:
        # Of its Popen, which `multiprocessing` itself calls as this process exits, and then waits for the end.
        popen = getattr(process, "_popen", None)
        if popen is not None:
            popen.terminate = popen.kill
    return vector


class _Commands:
    """A worker's pipe, which leaves signals to the server once the lanes are made.

    Before, `AsyncVectorEnv` ends its processes by SIGTERM where one of them fails.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    def recv(self) -> Any:
        command = self._pipe.recv()
        if command[0] != "_check_spaces":  # which it asks as it is made
            leave_signals()
            self.recv = self._pipe.recv  # type: ignore[method-assign]
        return command


def _worker(index: int, make_env: Any, pipe: Any, *more: Any) -> None:
    commands: Any = _Commands(pipe)
    _async_worker(index, make_env, commands, *more)


# Only there: who else imports this module keeps its signals. What it forks imports nothing anew, and has the default
# handlers back.
if any(argument.startswith("from multiprocessing.forkserver") for argument in sys.orig_argv):
    leave_signals()
