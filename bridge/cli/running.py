"""The common part of commands that serve until they are stopped: options, logging, signals."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from bridge.cli.program import OK
from bridge.core.server.core_server import SWITCH_INTERVAL, CoreServer
from bridge.core.signals import sigterm_as_interrupt
from bridge.core.transport.credentials import file_error, shown_file

__all__ = ["add_running_options", "read_key", "run_server", "server_logging", "stop_on_eof"]

_DRAINING = ("bridge.core.server.shutdown", "bridge.facade.process_group")
"""The loggers that report how a server drains."""
_S = TypeVar("_S", bound=CoreServer)


def add_running_options(parser: argparse.ArgumentParser) -> None:
    """Add `--exit-on-eof` and `--verbose`."""
    parser.add_argument(
        "--exit-on-eof",
        action="store_true",
        help="stop when standard input ends, so that no server outlives the program that started it",
    )
    parser.add_argument(
        "-v", "--verbose", action="count", default=0, help="log connections and refusals too; twice: everything"
    )


def run_server(make: Callable[[], _S], announce: Callable[[_S], None], *, exit_on_eof: bool) -> None:
    """Serve in this thread until a signal, in a process that does nothing else.

    Args:
        make: Makes the server without starting it.
        announce: Called once the first environment has been made.
        exit_on_eof: True: stop when standard input ends.
    """
    sys.setswitchinterval(SWITCH_INTERVAL)
    with sigterm_as_interrupt():
        server = make()

        def started() -> None:
            announce(server)
            if exit_on_eof:
                stop_on_eof(server.stop)

        try:
            server.run(started=started)
        except KeyboardInterrupt:  # a signal before `run` took over
            server.stop()


@contextmanager
def server_logging(verbose: int, quiet: bool) -> Iterator[None]:
    """Write the package's log to standard error: failures, and how a server drains.

    Args:
        verbose: 1: log more; 2: log everything.
        quiet: True: log nothing.
    """
    log, handler = logging.getLogger("bridge"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before, propagate = log.level, log.propagate
    levels = (logging.WARNING, logging.INFO, logging.DEBUG)
    log.setLevel(logging.CRITICAL if quiet else levels[min(verbose, 2)])
    # Always log a drain: a user who stops a server wants to know how many clients it waits for, and until when.
    draining = [logging.getLogger(name) for name in _DRAINING]
    for one in draining:
        one.setLevel(logging.NOTSET if quiet or verbose else logging.INFO)
    log.addHandler(handler)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
        for one in draining:
            one.setLevel(logging.NOTSET)
        log.propagate = propagate


def read_key(path: Path | None) -> bytes | None:
    """Return the pre-shared key in a file, stripped of white space; None: no file was given.

    Raises:
        SettingError: The file cannot be read.
    """
    if path is None:
        return None
    try:
        return path.read_bytes().strip()
    except (OSError, ValueError) as error:
        raise file_error(f"the key file {shown_file(path)}", error) from None


def stop_on_eof(stop: Callable[[float], None]) -> None:
    """Stop a server once standard input ends: the parent has ended, or has closed its end of the pipe."""
    threading.Thread(target=_stop_on_eof, args=(stop,), daemon=True).start()


def _stop_on_eof(stop: Callable[[float], None]) -> None:
    # Use os.read: a thread that waits in sys.stdin holds a lock that the interpreter needs at its end.
    while os.read(0, 4096):
        pass
    try:
        stop(2.0)
        threading.main_thread().join(5.0)
    finally:
        os._exit(OK)  # a call of an environment may not return
