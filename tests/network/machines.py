"""Machines to test on, and the programs that run on them."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

from tests.network import agent

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60.0
"""Seconds that a test waits for a program, unless it says otherwise."""


class ProgramError(AssertionError):
    """A program raised an exception, ended before its time, or said nothing. Holds what it wrote, too."""


class Nursery:
    """The process that machines are forked from; one serves all tests of a session."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            descriptor = theirs.fileno()
            # Libraries with threads of their own could not be forked safely: the allocator of pyarrow has one, too.
            alone = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
            environment = {**os.environ, **alone, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
            command = [sys.executable, "-c", "from tests.network.agent import main; main()", str(descriptor)]
            self._process = subprocess.Popen(command, pass_fds=[descriptor], env=environment, cwd=ROOT)
        self._socket.settimeout(120.0)
        assert self._socket.recv(agent.MOST) == b"ready", "the process that machines are forked from did not begin"

    def fork(self, machine: agent.Machine) -> tuple[socket.socket, int]:
        """Make a machine; return the socket over which it is asked, and the process id of its process 1."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._socket, [pickle.dumps(machine)], [theirs.fileno()])
        ours.settimeout(PATIENCE)
        answer = pickle.loads(ours.recv(agent.MOST))
        if isinstance(answer, BaseException):
            ours.close()
            raise answer
        return ours, answer

    def close(self) -> None:
        """End the process."""
        self._socket.close()
        self._process.wait(30)


class Program:
    """A function or a command that runs on a machine.

    A generator function runs until its next `yield` and stands there until the test asks for more, as a local
    generator does: what the test changes in between has happened before the program goes on.

    Attributes:
        pid: Its process id, as its machine calls it.
    """

    def __init__(self, machine: Machine, name: str, pid: int, channel: Connection, log: Path) -> None:
        self.machine, self.name, self.pid = machine, name, pid
        self.exit_status: int | None = None
        self._channel, self._log = channel, log
        self._result: list[Any] = []
        self._stands = False
        self._unnoticed: ProgramError | None = None

    @property
    def output(self) -> str:
        """Its standard output and error so far."""
        return self._log.read_text(errors="replace")

    def next(self, timeout: float = PATIENCE) -> Any:
        """Let it go on, and wait for the next value that it yields."""
        self.go_on()
        kind, *what = self._receive(timeout)
        if kind != "yielded":
            raise self._failed(f"returned {what[0]!r} where a value was expected")
        self._stands = True
        return what[0]

    def go_on(self) -> None:
        """Let it go on to its next value without waiting for it."""
        if self._stands:
            self._stands = False
            self._channel.send(None)

    def result(self, timeout: float = PATIENCE) -> Any:
        """Wait for its end; return what the function returned, or the command's exit status."""
        self.go_on()
        end = time.monotonic() + timeout
        while not self._result and self.exit_status is None:
            kind, *_ = self._receive(end - time.monotonic())
            if kind == "yielded":
                self._channel.send(None)
        return self._result[0] if self._result else self.exit_status

    def ended(self, timeout: float = PATIENCE) -> int:
        """Wait until its process has ended; return its exit status, negative for a signal."""
        end = time.monotonic() + timeout
        while self.exit_status is None:
            self._receive(end - time.monotonic(), failing=False)
        return self.exit_status

    def prints(self, text: str, timeout: float = PATIENCE) -> str:
        """Wait until it has written a text; return its output."""
        end = time.monotonic() + timeout
        while text not in self.output:
            if self._channel.poll(0.02):
                self._receive(0.0)
            if time.monotonic() > end or (self.exit_status is not None and text not in self.output):
                raise self._failed(f"did not print {text!r}")
        return self.output

    def signal(self, number: int) -> None:
        """Send it a signal: SIGSTOP for a process that hangs, SIGCONT for one that comes back."""
        self.machine.ask(agent.Signal(self.pid, number))

    def kill(self) -> None:
        """Kill it, and wait until it is gone."""
        self.signal(SIGKILL)
        self.ended()

    def stop(self, timeout: float = PATIENCE) -> int:
        """Ask it to end by SIGTERM; return its exit status."""
        self.signal(SIGTERM)
        self.go_on()
        return self.ended(timeout)

    def request(self, request: Any) -> Any:
        """Send the program's channel a request, for programs that take them, and return the answer."""
        self._channel.send(request)
        return self._receive(PATIENCE)[1]

    def unnoticed(self) -> ProgramError | None:
        """Return the exception that it raised meanwhile, if any, and hang up."""
        failure = self._unnoticed
        with contextlib.suppress(OSError, EOFError):  # gone with its machine, which the test has switched off
            while failure is None and self._channel.poll(0.0):
                kind, *what = self._channel.recv()
                failure = self._failed(f"raised {what[0]}\n{what[1]}") if kind == "raised" else None
        self._channel.close()
        return failure

    def _receive(self, timeout: float, failing: bool = True) -> tuple[Any, ...]:
        if not self._channel.poll(max(0.0, timeout)):
            raise self._failed("said nothing in time")
        try:
            message = self._channel.recv()
        except (EOFError, ConnectionError):
            raise self._failed("is gone with its machine") from None
        if message[0] == "ended":
            self.exit_status = message[1]
        elif message[0] == "returned":
            self._result.append(message[1])
        elif message[0] == "raised":
            failure = self._failed(f"raised {message[1]}\n{message[2]}")
            if failing:
                raise failure
            self._unnoticed = failure
        return message

    def _failed(self, how: str) -> ProgramError:
        return ProgramError(f"{self.name} on {self.machine.name} {how}\n--- its output ---\n{self.output}")


class Machine:
    """A machine of a network; `Network.machine` makes it.

    Attributes:
        name: By which all machines find it.
        ipv4: Its address.
        ipv6: Its other address.
        pid: The process id of its process 1, as this computer calls it: `nsenter -a -t PID` is a shell on the machine.
        hosts: The file that is its `/etc/hosts`.
        resolver: The file that is its `/etc/resolv.conf`.
        programs: Those that were started on it.
    """

    def __init__(self, nursery: Nursery, folder: Path, name: str, ipv4: str, ipv6: str) -> None:
        self.name, self.ipv4, self.ipv6 = name, ipv4, ipv6
        self.folder = folder / name
        self.folder.mkdir()
        self.hosts, self.resolver = self.folder / "hosts", self.folder / "resolv.conf"
        for file in (self.hosts, self.resolver):
            file.write_text("")
        self._control, self.pid = nursery.fork(agent.Machine(name, str(self.hosts), str(self.resolver)))
        self.programs: list[Program] = []

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = PATIENCE) -> Any:
        """Call a function on this machine, in a process of its own, and return what it returns.

        The function is one of a module's, and its arguments and its result can be pickled. Warnings are errors in it.
        """
        program = self.start(function, *arguments)
        result = program.result(timeout)
        program.ended(timeout)
        return result

    def start(self, function: Callable[..., Any], *arguments: Any) -> Program:
        """Start a function on this machine, in a process of its own, and do not wait for it."""
        return self._start(function.__name__, agent.Start((function.__module__, function.__qualname__), arguments))

    def start_with(self, descriptors: Sequence[int], function: Callable[..., Any], *arguments: Any) -> Program:
        """Start a function that gets its channel and some file descriptors after its arguments."""
        start = agent.Start((function.__module__, function.__qualname__), arguments)
        return self._start(function.__name__, start, descriptors)

    def command(self, *command: str, folder: Path | str | None = None, **environment: str) -> Program:
        """Start a command on this machine; `bridge` and `python` are those of the tests' environment.

        Args:
            command: The command and its arguments.
            folder: Where it runs; None: in a folder of the machine's own.
            environment: Further environment variables.
        """
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        more = tuple({"PATH": path, **environment}.items())
        start = agent.Start(None, (), command, str(folder or self.folder), more)
        return self._start(" ".join(command), start)

    def firewall(self, *rules: str) -> None:
        """Have this machine's firewall obey rules for what comes in, such as "tcp dport 50051 drop", and no others."""
        self.nft(
            "add table inet firewall",
            "flush table inet firewall",
            "add chain inet firewall input { type filter hook input priority 0; }",
            *(f"add rule inet firewall input {rule}" for rule in rules),
        )

    def nft(self, *lines: str) -> None:
        """Have `nft` obey some lines on this machine, all at once."""
        self.ask(agent.Configure(((("nft", "-f", "-"), "\n".join(lines)),)))

    def ip(self, *lines: str) -> None:
        """Have `ip` obey some lines on this machine."""
        self.ask(agent.Configure(((("ip", "-batch", "-"), "\n".join(lines)),)))

    def configure(self, *command: str) -> None:
        """Run a command on this machine, and wait for its end."""
        self.ask(agent.Configure(((command, ""),)))

    def failures(self) -> list[ProgramError]:
        """Return the exceptions of programs that no test has noticed."""
        return [failure for program in self.programs if (failure := program.unnoticed()) is not None]

    def ask(self, request: Any) -> Any:
        """Send a request to the machine's process 1, and return its answer."""
        return self._ask(request)[0]

    def close(self) -> None:
        """Switch the machine off: its processes are killed, and its kernel closes its connections."""
        if self._control.fileno() == -1:
            return
        died = os.pidfd_open(self.pid)
        try:
            self._control.close()
            assert select.select([died], [], [], PATIENCE)[0], f"the machine {self.name} did not end"
        finally:
            os.close(died)

    def open_tun(self, name: str) -> int:
        """Make a TUN device on this machine, and return its descriptor."""
        return self._ask(agent.OpenTun(name))[1][0]

    def _ask(self, request: Any) -> tuple[Any, list[int]]:
        self._control.send(pickle.dumps(request))
        data, descriptors, _, _ = socket.recv_fds(self._control, agent.MOST, 1)
        assert data, f"the machine {self.name} is gone"
        answer = pickle.loads(data)
        if isinstance(answer, BaseException):
            raise answer
        return answer, descriptors

    def _start(self, name: str, start: agent.Start, descriptors: Sequence[int] = ()) -> Program:
        ours, theirs = Pipe()
        log = self.folder / f"program-{len(self.programs)}.log"
        with theirs, log.open("wb") as output:
            handed = [theirs.fileno(), output.fileno(), *descriptors]
            socket.send_fds(self._control, [pickle.dumps(start)], handed)
            pid = pickle.loads(self._control.recv(agent.MOST))
        self.programs.append(Program(self, name, pid, ours, log))
        return self.programs[-1]
