"""The processes of environments. They ignore signals, because their server decides when they end.

A server has threads, so its processes are forked by another process, the forkserver of `multiprocessing`, which imports
this module at its start. If a signal ended the forkserver, its processes would end, too: their exit codes go through
it.
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
        modules: The modules that they import, imported once by the forkserver and not again in each forked process.
    """
    context: Any = multiprocessing.get_context(start_method())
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload([__name__, *modules])
    return context


def async_options() -> dict[str, Any]:
    """Return the keywords with which `AsyncVectorEnv` starts such processes."""
    return {"context": process_context().get_start_method(), "worker": _worker}


def ended_by_kill(vector: AsyncVectorEnv) -> AsyncVectorEnv:
    """Make unresponsive processes of lanes be killed, because they ignore SIGTERM; return the lanes."""
    for process in vector.processes:
        # A method of the Popen object, which `multiprocessing` itself calls when this process exits, before it waits.
        popen = getattr(process, "_popen", None)
        if popen is not None:
            popen.terminate = popen.kill
    return vector


class _Commands:
    """A worker's pipe. It makes the worker ignore signals after the lanes are made.

    Before that, `AsyncVectorEnv` ends its processes by SIGTERM if one of them fails.
    """

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipe, name)

    def recv(self) -> Any:
        command = self._pipe.recv()
        if command[0] != "_check_spaces":  # which it sends during construction
            leave_signals()
            self.recv = self._pipe.recv  # type: ignore[method-assign]
        return command


def _worker(index: int, make_env: Any, pipe: Any, *more: Any) -> None:
    commands: Any = _Commands(pipe)
    _async_worker(index, make_env, commands, *more)


# Only in the forkserver: other processes that import this module keep their signals. The processes that it forks import
# nothing again, and have the default handlers.
if any(argument.startswith("from multiprocessing.forkserver") for argument in sys.orig_argv):
    leave_signals()
