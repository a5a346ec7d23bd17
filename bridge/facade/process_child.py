"""The main function of a server process of a group: it serves what its parent sends, until the parent ends it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import sys
import threading
from typing import Any, NoReturn

import cloudpickle
import gymnasium

from bridge.core.server.core_server import SWITCH_INTERVAL
from bridge.errors import ListenError, SettingError, StartError
from bridge.facade.serve import serve_gym

__all__ = ["run_child"]


def run_child() -> None:
    """Serve what standard input describes, until standard input ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # an environment's output must not mix with our lines
    # The parent handles Ctrl-C and stops its servers in order. Windows has no sessions that would shield this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stdin = sys.stdin.buffer
    size = int.from_bytes(stdin.read(8), "big")
    payload = stdin.read(size)
    if len(payload) < size or not size:
        return  # the parent has ended

    def say(**what: Any) -> None:
        with contextlib.suppress(OSError):
            print(json.dumps(what), file=out, flush=True)

    try:
        env, arguments, specs = cloudpickle.loads(payload)  # from our own parent, through a pipe
        for spec in specs:
            gymnasium.registry.setdefault(spec.id, spec)
        sys.setswitchinterval(SWITCH_INTERVAL)
        server = serve_gym(env, start=False, **arguments)
    except BaseException as error:
        say(error=str(error) or repr(error), listen=isinstance(error, ListenError))
        if not isinstance(error, SettingError):
            raise
        return

    orders: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in stdin:
            command = line.decode().split()
            if command[:1] == ["count"]:
                count = int(command[1])
                say(count=count, connections=server.connections, worlds=server.worlds, status=server.status())
            elif command[:1] == ["drain"]:
                server.drain(float(command[1]))
            else:
                orders.put(command[0])
        server.stop()
        _end_process()  # even if a call of an environment does not return

    threading.Thread(target=listen, name="bridge-parent", daemon=True).start()
    say(urls=server.urls, env_ids=server.env_ids, metrics_port=server.metrics_port, web_url=server.web_url)
    try:
        ahead = orders.get() == "prepare"  # the other order is "serve"
        server.run(started=(lambda: say(prepared=True)) if ahead else None)
    except SettingError as error:
        say(error=str(error), usage=True)
    except StartError as error:
        say(error=str(error), usage=False, traceback=error.traceback)
    finally:
        _end_process()


def _end_process() -> NoReturn:
    """End this process without waiting for the listening thread, which may block in a read."""
    sys.stderr.flush()
    os._exit(0)
