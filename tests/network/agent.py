"""The processes behind `tests.network.machines`: a machine is process 1 of namespaces of its own.

`main` is the *nursery*, which `tests.network.machines.Nursery` starts: it imports what most programs need, once, and
then forks a machine for each request. A machine forks its programs. So a program begins within milliseconds, in a
process with one thread, as far from the test's process as one on another computer: it has another network, other
processes, another host name, another hosts file.

Nothing is left behind. The kernel kills all processes of a process namespace when its process 1 ends; and a machine's
ends when its socket to the test's process closes, however that process ended.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MOST = 65536
"""Bytes of the largest request to a machine."""

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000

PRELOAD = (
    "numpy",
    "gymnasium",
    "gymnasium.envs.classic_control",
    "pytest",
    "bridge",
    "bridge.errors",
    "bridge.testing",
    "bridge.wrappers",
    "tests.network.programs",
)

_libc = ctypes.CDLL(None, use_errno=True)

Job = Callable[[], None]
"""The function that a forked process runs at the bottom of the stack in place of its parent's."""


def checked(status: int, what: str) -> None:
    """Raise the error of a C function that returned one."""
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str = "", flags: int = 0) -> None:
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None)
    checked(_libc.mount(*arguments), f"mount {source} on {target}")


def sysctl(name: str, value: str) -> None:
    with open(f"/proc/sys/{name}", "w") as file:
        file.write(value)


def open_tun(name: str) -> int:
    """Make a TUN device in this network namespace; it exists until its descriptor is closed everywhere."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


# Requests to a machine, each answered by `None`, a value or an exception.


@dataclass(frozen=True)
class Start:
    """Run a function, or a command, as a process. Descriptors: its channel, its output, and those it is given."""

    function: tuple[str, str] | None
    """Module and name."""
    arguments: tuple[Any, ...] = ()
    command: tuple[str, ...] = ()
    folder: str = "/"
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Signal:
    """Send a signal to a process of the machine."""

    pid: int
    number: int


@dataclass(frozen=True)
class Configure:
    """Run commands to their end: each a line of arguments and its standard input."""

    commands: tuple[tuple[tuple[str, ...], str], ...]


@dataclass(frozen=True)
class OpenTun:
    """Make a TUN device, and answer with its descriptor."""

    name: str


@dataclass(frozen=True)
class Machine:
    """To the nursery: make a machine. Descriptor: the socket over which it is asked."""

    name: str
    hosts: str
    """The file that is its `/etc/hosts`."""
    resolver: str
    """The file that is its `/etc/resolv.conf`."""


def nursery(control: socket.socket) -> Job | None:
    """Fork a machine for each request, until the test's process hangs up."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the machines
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, MOST, 1)
        if not data:
            return None
        if os.fork() == 0:
            control.close()
            return lambda: machine(pickle.loads(data), socket.socket(fileno=descriptors[0]))
        os.close(descriptors[0])


def machine(asked: Machine, control: socket.socket) -> None:
    """Become process 1 of new namespaces."""
    flags = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
    checked(_libc.unshare(flags), "unshare")
    if os.fork() != 0:  # a new process namespace begins with the first child
        os._exit(0)
    try:
        pid = int(os.readlink("/proc/self"))  # as it is called outside
        mount("none", "/", flags=MS_REC | MS_PRIVATE)
        mount("proc", "/proc", "proc")
        mount(asked.hosts, "/etc/hosts", flags=MS_BIND)
        mount(asked.resolver, "/etc/resolv.conf", flags=MS_BIND)
        socket.sethostname(asked.name)
        sysctl("net/ipv6/conf/all/disable_ipv6", "0")
        sysctl("net/ipv6/conf/default/disable_ipv6", "0")
    except OSError as error:
        control.send(pickle.dumps(error))
        raise
    control.send(pickle.dumps(pid))
    program = Keeper(control).run()
    if program is not None:
        program()


class Keeper:
    """Process 1 of a machine: starts programs, and tells their channels when they have ended.

    Args:
        control: The socket over which it is asked.
    """

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.channels: dict[int, Connection] = {}
        self.wake, ring = os.pipe()
        os.set_blocking(ring, False)
        signal.set_wakeup_fd(ring, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)

    def run(self) -> Job | None:
        """Serve until the test's process hangs up; in a program's process, return what it does."""
        while True:
            ready, _, _ = select.select([self.control, self.wake], [], [])
            if self.wake in ready:
                os.read(self.wake, 4096)
                self.reap()
            if self.control not in ready:
                continue
            data, descriptors, _, _ = socket.recv_fds(self.control, MOST, 8)
            if not data:
                os._exit(0)  # and the kernel kills what runs here
            request = pickle.loads(data)
            if isinstance(request, Start):
                program = self.start(request, descriptors)
                if program is not None:
                    return program
                continue
            try:
                answer, given = self.answer(request)
            except Exception as error:
                answer, given = error, []
            socket.send_fds(self.control, [pickle.dumps(answer)], given)
            for descriptor in given:
                os.close(descriptor)

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                channel = self.channels.pop(ended[0], None)
                if channel is not None:
                    with contextlib.suppress(OSError):
                        channel.send(("ended", os.waitstatus_to_exitcode(ended[1])))
                    channel.close()

    def start(self, request: Start, descriptors: list[int]) -> Job | None:
        channel_descriptor, output, *given = descriptors
        channel = Connection(channel_descriptor)
        pid = os.fork()
        if pid == 0:
            return lambda: self.program(request, channel, output, given)
        for descriptor in (output, *given):
            os.close(descriptor)
        self.channels[pid] = channel
        self.control.send(pickle.dumps(pid))
        return None

    def program(self, request: Start, channel: Connection, output: int, given: list[int]) -> None:
        """Become a program."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for other in self.channels.values():
            other.close()
        self.control.close()
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(request.folder)
        os.environ.update(request.environment)
        if request.function is None:
            os.execvp(request.command[0], request.command)
        status = run_function(request.function, request.arguments, channel, given)
        # Threads are joined and exit functions called, as at any program's end. But the interpreter is not taken to
        # pieces: to forget a thousand preloaded modules, each on a page to be copied, takes a second.
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def answer(self, request: Any) -> tuple[Any, list[int]]:
        if isinstance(request, Signal):
            os.kill(request.pid, request.number)
            return None, []
        if isinstance(request, OpenTun):
            return None, [open_tun(request.name)]
        assert isinstance(request, Configure)
        for command, text in request.commands:
            done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=30, check=False)
            if done.returncode != 0:
                raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}\n{text}")
        return None, []


def run_function(function: tuple[str, str], arguments: tuple[Any, ...], channel: Connection, given: list[int]) -> int:
    """Call a function and send what it returns or raises; return the exit status.

    What a generator yields is sent, too, and it waits for leave to go on.
    """
    warnings.simplefilter("error")
    try:
        found = getattr(importlib.import_module(function[0]), function[1])
        result = found(*arguments, *([channel, *given] if given else []))
        if inspect.isgenerator(result):
            result = carry(result, channel)
        channel.send(("returned", result))
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return 0
        with contextlib.suppress(OSError):
            channel.send(("raised", f"{type(error).__name__}: {error}", traceback.format_exc()))
        return 1
    return 0


def carry(generator: Any, channel: Connection) -> Any:
    """Send what a generator yields, and let it go on when it is told to; return what it returns."""
    try:
        while True:
            channel.send(("yielded", next(generator)))
            channel.recv()
    except StopIteration as end:
        return end.value


def main() -> None:
    """Import much, then fork."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOAD:
        module = importlib.import_module(name)
        if name.startswith("bridge"):
            for lazy in module.__all__:
                with contextlib.suppress(ImportError):  # an extra that is not installed
                    getattr(module, lazy)
    threads = [comm.read_text().strip() for comm in Path("/proc/self/task").glob("*/comm")]
    assert len(threads) == 1, f"a process with threads cannot be forked safely: {threads}"
    gc.freeze()  # a collection would touch, and so copy, each page in each process
    control.send(b"ready")
    job = nursery(control)
    if job is not None:
        job()
