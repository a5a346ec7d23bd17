"""Several complete servers, each in its own process, which start and stop together.

A child is a fresh interpreter: it inherits no threads or locks, and does not import the main module again. It reads
from its standard input what to serve, and ends when its standard input ends. So it never outlives this process.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import cloudpickle

from bridge.core.logs import SafeLog
from bridge.core.ownership import forget_in_child, leak
from bridge.core.server.limits import check_drain_timeout
from bridge.core.server.shutdown import PLAYED_BY_NOBODY, SLICE, Stopping, draining_line
from bridge.core.signals import handled_signals
from bridge.core.transport.address import parse_address
from bridge.core.worlds.recipe import EnvLike
from bridge.core.worlds.registered import registered_specs
from bridge.errors import ListenError, SettingError, StartError
from bridge.facade.server import Limits, Server

__all__ = ["ServerGroup"]

_log = SafeLog(__name__)
START_TIMEOUT = 120.0
"""The timeout for starting all servers, in seconds."""
_ASK_TIMEOUT = 10.0
# Seconds that a process has to end after it was told to stop.
_END_TIMEOUT = 15.0
_CHILD = "import sys; sys.path[:] = {path!r}; from bridge.facade.process_child import run_child; run_child()"


class ServerGroup(Server):
    """Servers in separate processes. `urls` lists them all, and `stop` ends them all.

    Args:
        env: See `serve_gym`. A callable is pickled by value, and sent through a pipe.
        processes: The number of processes.
        arguments: The other keyword arguments of `serve_gym`. Process i gets `port + i` if `port` is not 0, and the
            same for other ports; `.i` is appended to `unix_path`.
        start: True: serve at once. False: serve once `start`, `run` or `wait` is called.

    Raises:
        SettingError: A server cannot start; the message is that server's own.
    """

    def __init__(self, env: EnvLike, processes: int, arguments: Mapping[str, Any], *, start: bool = True) -> None:
        self._running = self._ending = self._waited = False
        self._stopping = Stopping()
        self._stopped = threading.Event()
        self._asking = threading.RLock()
        """Reentrant: a signal handler may ask while the interrupted thread waits for answers."""
        self._asked = 0
        self._draining = False
        self._waits_since: float | None = None
        """When they began to wait for clients to leave, in monotonic seconds; None: they do not wait."""
        self._drain_timeout = (arguments.get("limits") or Limits()).drain_timeout
        self._title = getattr(env, "__name__", str(env))
        self._children: list[_ServerProcess] = []
        forget_in_child(self)
        deadline = time.monotonic() + START_TIMEOUT
        try:
            of_each = [_shifted(arguments, index) for index in range(processes)]
            for own in of_each:
                # Start all processes before waiting for the first one.
                self._children.append(_ServerProcess(_payload(env, own)))
            for child in self._children:
                said = child.read(deadline)
                if said is None:
                    raise SettingError(
                        f"a server process ended, or did not start within {START_TIMEOUT:g} s; its output is above"
                    )
                if "error" in said:
                    kind = ListenError if said.get("listen") else SettingError
                    raise kind(f"a server process could not start: {said['error']}")
                child.urls = said["urls"]
                child.web_url = said["web_url"]
                child.env_ids = said["env_ids"]
                child.metrics_port = said["metrics_port"]
        except BaseException:
            self._end_children()
            raise
        atexit.register(self._end_with_program)
        if start:
            self.start()

    def after_fork(self) -> None:
        """Detach in a forked process: the servers belong to the parent process."""
        atexit.unregister(self._end_with_program)
        self._stopping = Stopping()
        self._asking = threading.RLock()
        self._stopped = threading.Event()
        self._stopped.set()
        for child in self._children:
            child.after_fork()

    @property
    def url(self) -> str:
        """The first server's URL."""
        return self._children[0].urls[0]

    @property
    def urls(self) -> list[str]:
        """The gRPC URL of each server, for `make_vec_remote`."""
        return [child.urls[0] for child in self._children]

    @property
    def all_urls(self) -> list[list[str]]:
        """All URLs of each server."""
        return [list(child.urls) for child in self._children]

    @property
    def web_url(self) -> str | None:
        """The URL of the first server's page; None: there is no page. Other servers have pages at their own ports."""
        return self._children[0].web_url

    @property
    def port(self) -> int:
        """The first server's port."""
        return parse_address(self.url).port

    @property
    def metrics_port(self) -> int | None:
        """The port of the first server's metrics; None: there are no metrics."""
        return self._children[0].metrics_port

    @property
    def metrics_ports(self) -> list[int]:
        """The port of each server's metrics; empty if there are no metrics."""
        return [child.metrics_port for child in self._children if child.metrics_port is not None]

    def start(self) -> None:
        """Begin to serve. Each process makes and calls its environments in its main thread.

        Raises:
            SettingError: The servers were started already, or stopped.
        """
        self._begin("start()")
        for child in self._children:
            child.write("serve")

    def run(self, grace: float | None = None, *, started: Callable[[], None] | None = None) -> None:
        """Serve and block until Ctrl-C, SIGTERM, or `drain` or `stop` from another thread: `start` and `wait`.

        Args:
            grace: Seconds that clients have to disconnect after SIGTERM.
            started: Called once the first process has made its first environment. The other processes, and without
                `started` all processes, make environments when a client asks for them.

        Raises:
            SettingError: The servers were started already, or stopped; with `started`, the environment cannot be
                served.
            StartError: With `started`, the environment failed while it was made.
        """
        if started is None:
            self.start()
        elif self._make_first():
            started()
        self.wait(grace)

    def _make_first(self) -> bool:
        """Make the first process's first environment, then let all processes serve; return False if stopped meanwhile.

        There is no deadline: making the environment may take any time.
        """
        self._begin("run()")
        first, *others = self._children
        # Hold the lock: a concurrent `status` would read and drop this answer.
        with self._asking:
            first.write("prepare")
            said = first.read(None)
        # Another thread has called `stop`, which ended the process.
        if self._ending:
            return False
        if said is None or "error" in said:
            self.stop()
        if said is None:
            raise StartError("a server process ended while it made the environment; its output is above")
        if "error" in said:
            raise SettingError(said["error"]) if said["usage"] else StartError(said["error"], said["traceback"])
        for child in others:
            child.write("serve")
        return True

    def wait(self, grace: float | None = None) -> None:
        """Block until Ctrl-C, SIGTERM, or `drain` or `stop` from another thread has ended all servers.

        SIGTERM and SIGHUP drain the servers. Ctrl-C and any second signal stop them.

        Args:
            grace: Seconds that clients have to disconnect after SIGTERM; None: `drain_timeout`.

        Raises:
            StartError: All processes have failed.
        """
        self._waited = True
        if not self._running and not self._stopped.is_set():
            self.start()
        signals: list[int] = []

        def on_signal(number: int, frame: FrameType | None) -> None:
            signals.append(number)  # not an Event: the interrupted thread may hold its lock

        handled = handled_signals() if threading.current_thread() is threading.main_thread() else ()
        before = {number: signal.signal(number, on_signal) for number in handled}
        try:
            # On some platforms Python runs no signal handlers during a wait without a timeout.
            while not self._stopped.wait(0.2) and self._look():
                if signal.SIGINT in signals or len(signals) > 1:
                    break
                if signals and not self._draining:
                    self.drain(grace)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self._waits_since is not None:
                _log.info("drained: all servers have ended after %.1f s", time.monotonic() - self._waits_since)
                self._waits_since = None
            self.stop()
        if all(child.failed for child in self._children):
            raise StartError("all server processes ended by themselves; what they said is above")

    def _look(self) -> bool:
        """Return True if a process runs; log processes that have failed, such as those killed for their memory use."""
        for child in self._children:
            code = child.process.poll()
            if code and not child.failed and not self._ending:
                child.failed = True
                _log.error(
                    "the server process %d of %s ended by itself with %d", child.process.pid, child.urls[0], code
                )
        return any(child.process.returncode is None for child in self._children)

    @property
    def draining(self) -> bool:
        """True if the servers take no further worlds, and end once their clients have left."""
        return self._draining

    def dial(self, url: str, **keywords: Any) -> None:
        """Raise SettingError: the processes dial by themselves, from their start on."""
        raise SettingError(f"with processes= each server dials by itself: give dial={url!r} to serve_gym")

    def drain(self, timeout: float | None = None) -> None:
        """Drain all servers; see `Server.drain`."""
        seconds = self._drain_timeout if timeout is None else timeout
        check_drain_timeout(seconds, "timeout")
        clients = 0 if self._draining else self.connections
        if clients and seconds:
            self._waits_since = time.monotonic()
            _log.info(draining_line(clients, seconds))
        self._draining = True
        for child in self._children:
            child.write(f"drain {seconds}")

    @property
    def pids(self) -> list[int]:
        """The process ids."""
        return [child.process.pid for child in self._children]

    @property
    def connections(self) -> int:
        """The number of open connections of all servers."""
        return sum(int(said["connections"]) for said in self._ask())

    @property
    def worlds(self) -> list[str]:
        """The names of the worlds of all servers."""
        return [name for said in self._ask() for name in said["worlds"]]

    @property
    def env_ids(self) -> list[str]:
        """The environment ids that a client may name."""
        return list(self._children[0].env_ids)

    def status(self) -> dict[str, Any]:
        """Return the sum of all servers' status, with the longest `uptime`; `draining` is True if any server drains."""
        found = [said["status"] for said in self._ask()]
        together: dict[str, Callable[..., Any]] = {"uptime": max, "draining": any}
        names = found[0] if found else ()
        return {name: together.get(name, sum)([status[name] for status in found]) for name in names}

    def _ask(self) -> list[dict[str, Any]]:
        """Ask every running server for its status. Empty once they are stopped, or belong to a parent process."""
        with self._asking:
            while not self._stopped.is_set():
                number = self._asked = self._asked + 1
                asked = [child for child in self._children if child.write(f"count {number}")]
                deadline = time.monotonic() + _ASK_TIMEOUT
                answers = [said for child in asked if (said := child.read(deadline, number)) is not None]
                if number == self._asked:  # otherwise a signal handler has asked meanwhile, and has read these answers
                    return answers
            return []

    def stop(self, grace: float = 0.0) -> None:
        """Stop all servers, at the same time, and wait for their processes. May be called twice; see `Server.stop`.

        Args:
            grace: Seconds that clients have to disconnect.
        """
        check_drain_timeout(grace, "grace")
        with self._stopping.begin(grace) as begun:
            if not begun or self._stopped.is_set():
                return
            self._ending = True
            self._end_children()
            # Set this last: if Ctrl-C interrupts the wait, the next call continues it, as in `Server.stop`.
            self._stopped.set()
            atexit.unregister(self._end_with_program)

    def _end_with_program(self) -> None:
        """Stop at the end of a program without `stop`; warn a script that ends before any client has played."""
        told = self._waited or hasattr(sys, "last_value")  # after an exception no warning is needed
        if self._running and not told:
            found = self._ask()
            if found and not any(said["connections"] or said["status"]["steps"] for said in found):
                _log.warning(PLAYED_BY_NOBODY)
        self.stop()

    def _end_children(self) -> None:
        for child in self._children:
            # Tell all processes before waiting for the first one.
            child.write(f"drain {self._stopping.grace}")
        for child in self._children:
            while (left := self._stopping.seconds_left) and not child.wait(min(left, SLICE)):
                pass
        for child in self._children:
            child.tell_to_stop()
        deadline = time.monotonic() + _END_TIMEOUT
        for child in self._children:
            child.end(deadline)

    def __repr__(self) -> str:
        state = "stopped" if self._stopped.is_set() else ", ".join(self.urls)
        return f"ServerGroup({self._title}, {len(self._children)} processes, {state})"


class _ServerProcess:
    """One server process, from this side."""

    def __init__(self, payload: bytes) -> None:
        self.urls: list[str] = []
        self.web_url: str | None = None
        self.env_ids: list[str] = []
        self.metrics_port: int | None = None
        self.failed = False
        """True once it was seen that the process failed by itself."""
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C in the terminal goes to this process, which then stops its servers in order.
            start_new_session=os.name == "posix",
        )
        self._reader = threading.Thread(target=self._read, name="bridge-processes", daemon=True)
        self._reader.start()
        with contextlib.suppress(OSError):  # if it died at once, `read` returns None
            if self.process.stdin is not None:
                # Send the length too, because orders follow in the same pipe.
                self.process.stdin.write(len(payload).to_bytes(8, "big") + payload)
                self.process.stdin.flush()

    def _read(self) -> None:
        if self.process.stdout is not None:
            for line in self.process.stdout:
                self._lines.put(line)
        self._lines.put(None)

    def after_fork(self) -> None:
        """Detach in a forked process: replace the pipes without closing the parent's."""
        leak(self.process)  # a thread that exists only in the parent holds the lock of its stdout
        # The server ends when its standard input ends, so this copy must not keep the pipe open after the parent's
        # death. Data in the file's buffer belongs to the parent: here it goes to /dev/null.
        null = os.open(os.devnull, os.O_RDWR)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                os.dup2(null, pipe.fileno(), inheritable=False)
        os.close(null)

    def read(self, deadline: float | None, count: int = 0) -> dict[str, Any] | None:
        """Return the next line of the process; None: it has ended, or there was no line by the deadline.

        Args:
            deadline: The deadline in monotonic seconds; None: no deadline.
            count: The number of the `count` order whose answer is expected. Late answers to earlier orders are skipped.
        """
        while True:
            # On some platforms Python runs no signal handlers during a wait without a timeout.
            wait = 0.2 if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                line = self._lines.get(timeout=wait)
            except queue.Empty:
                if deadline is not None:
                    return None
                continue
            if line is None:
                # Put it back, so that the next reader sees the end too.
                self._lines.put(None)
                return None
            said: dict[str, Any] = json.loads(line)
            if said.get("count", 0) == count:
                return said

    def write(self, command: str) -> bool:
        """Send an order; return False if the process has ended."""
        try:
            if self.process.stdin is not None:
                # Without the file's buffer, which refuses what a signal handler writes during another write.
                os.write(self.process.stdin.fileno(), f"{command}\n".encode())
        except (OSError, ValueError):
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the process; return False if it still runs after `seconds`."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def tell_to_stop(self) -> None:
        """Close its standard input, which is the order to stop."""
        if self.process.stdin is not None:
            with contextlib.suppress(OSError):
                self.process.stdin.close()

    def end(self, deadline: float) -> None:
        """Wait for the end of the process until a deadline, then kill it."""
        if not self.wait(max(0.0, deadline - time.monotonic())):
            _log.warning(
                "the server process %d did not stop within %g s, and is killed", self.process.pid, _END_TIMEOUT
            )
            self.process.kill()
            self.process.wait()
        self._reader.join(5.0)
        if self.process.stdout is not None:
            self.process.stdout.close()


def _shifted(arguments: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the arguments of process `index`."""
    mine = dict(arguments)
    for name, value in arguments.items():
        if (name == "port" or name.endswith("_port")) and isinstance(value, int) and value:
            if value + index > 65535:
                text = f"{name}={value} leaves no port for process {index + 1}: each takes the next one, up to 65535"
                raise SettingError(f"{text}. Begin lower")
            mine[name] = value + index
        elif name in ("unix_path", "dial_name") and value is not None:
            mine[name] = f"{value}.{index}"
    return mine


def _payload(env: EnvLike, arguments: Mapping[str, Any]) -> bytes:
    """Pickle the environment, its arguments and the specs that this process has registered, for a child."""
    try:
        payload: bytes = cloudpickle.dumps((env, dict(arguments), registered_specs(env)))
    except Exception as error:
        raise SettingError(
            f"the environment {env!r:.80} cannot be sent to another process: {error!r}; serve it by its id, or by a "
            "callable that makes it there"
        ) from error
    return payload
