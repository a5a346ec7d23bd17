"""A simulated Windows: this package runs without what CPython does not have there.

With this folder on PYTHONPATH, `sitecustomize` installs it in a process and in all that it starts. Modules of `bridge`
then import views of the standard library, from which the names below are missing and in which `os.name` is `nt`. The
standard library itself keeps what it needs on this system. What sockets, selectors and signals refuse on Windows they
refuse in the whole process.

The lists follow the notes on availability in CPython's documentation of each module. What is not simulated: paths with
drive letters and backslashes, the resolution of Windows' clock, and everything below Python.
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import multiprocessing
import os
import platform
import select
import selectors
import signal
import socket
import stat
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import reduction
from typing import Any

NO_MODULES = [
    "crypt",
    "curses",
    "fcntl",
    "grp",
    "nis",
    "ossaudiodev",
    "posix",
    "pty",
    "pwd",
    "readline",
    "resource",
    "spwd",
    "syslog",
    "termios",
    "tty",
]
"""Modules that Windows does not have."""
MISSING = {
    "os": """
        O_ASYNC O_CLOEXEC O_DIRECT O_DIRECTORY O_DSYNC O_NOATIME O_NOCTTY O_NOFOLLOW O_NONBLOCK O_PATH O_RSYNC O_SYNC
        O_TMPFILE P_PGID P_PID WCONTINUED WEXITED WEXITSTATUS WIFEXITED WIFSIGNALED WIFSTOPPED WNOHANG WNOWAIT
        WSTOPSIG WTERMSIG WUNTRACED chown chroot confstr copy_file_range ctermid eventfd fchdir fchmod fchown
        fdatasync fork forkpty fpathconf fstatvfs get_blocking getegid geteuid getgid getgrouplist getgroups
        getloadavg getpgid getpgrp getpriority getresgid getresuid getsid getuid getxattr initgroups killpg lchown
        listxattr lockf login_tty major makedev memfd_create minor mkfifo mknod nice openpty pathconf pidfd_open pipe2
        posix_fadvise posix_fallocate posix_openpt posix_spawn posix_spawnp pread preadv pwrite pwritev readv
        register_at_fork removexattr sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getparam
        sched_getscheduler sched_rr_get_interval sched_setaffinity sched_setparam sched_setscheduler sched_yield
        sendfile set_blocking setegid seteuid setgid setgroups setns setpgid setpriority setregid setresgid setresuid
        setreuid setsid setuid setxattr splice statvfs sync sysconf tcgetpgrp tcsetpgrp ttyname uname unshare wait
        wait3 wait4 waitid writev
    """,
    "select": "EPOLLIN EPOLLOUT PIPE_BUF POLLIN POLLOUT epoll kqueue poll",
    "selectors": "DevpollSelector EpollSelector KqueueSelector PollSelector",
    "signal": """
        ITIMER_PROF ITIMER_REAL ITIMER_VIRTUAL SIGALRM SIGBUS SIGCHLD SIGCLD SIGCONT SIGHUP SIGIO SIGKILL SIGPIPE
        SIGPOLL SIGPROF SIGPWR SIGQUIT SIGSTOP SIGSYS SIGTRAP SIGTSTP SIGTTIN SIGTTOU SIGURG SIGUSR1 SIGUSR2 SIGVTALRM
        SIGWINCH SIGXCPU SIGXFSZ SIG_BLOCK SIG_SETMASK SIG_UNBLOCK alarm getitimer pause pidfd_send_signal
        pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigtimedwait sigwait sigwaitinfo
    """,
    "socket": """
        AF_NETLINK AF_PACKET AF_UNIX AF_VSOCK CMSG_LEN CMSG_SPACE IPV6_RECVPKTINFO IP_TRANSPARENT MSG_CMSG_CLOEXEC
        MSG_DONTWAIT MSG_EOR MSG_ERRQUEUE MSG_NOSIGNAL SCM_CREDENTIALS SCM_RIGHTS SOCK_CLOEXEC SOCK_NONBLOCK
        SO_BINDTODEVICE SO_INCOMING_CPU SO_MARK SO_PEERCRED SO_REUSEPORT SO_TIMESTAMPNS TCP_CORK TCP_DEFER_ACCEPT
        TCP_INFO TCP_QUICKACK TCP_USER_TIMEOUT recv_fds send_fds sethostname
    """,
    "sys": "abiflags getdlopenflags setdlopenflags",
    "time": "clock_getres clock_gettime clock_gettime_ns clock_settime pthread_getcpuclockid tzset",
}
"""Names that the modules of Windows do not have."""
NO_METHODS = ("recvmsg", "recvmsg_into", "sendmsg", "sendmsg_afalg")
"""Methods that sockets do not have there."""
SIGNALS = ("SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM")
"""Signals that `signal.signal` takes there, beside SIGBREAK; others are a ValueError."""
MOST_SELECTED = 512
"""Sockets that `select` takes there."""
ENCODING = "cp1252"
"""The default encoding of text files, pipes and redirected output on Windows."""
PIPE_FLAGS = {"PYTHONIOENCODING": ENCODING, "PYTHONWARNDEFAULTENCODING": "1"}
"""Environment variables that a process needs from its start."""


def install() -> None:
    """Make this process, and what it starts, one on Windows as far as `bridge` can see."""
    warnings.filterwarnings("ignore", category=EncodingWarning)  # of other packages
    warnings.filterwarnings("error", category=EncodingWarning, module=r"bridge\b")
    socket.socket = socket.SocketType = _Socket  # type: ignore[misc, assignment]
    socket.socketpair = _socketpair  # type: ignore[assignment]
    selectors.DefaultSelector = _Selector  # type: ignore[misc, assignment]
    multiprocessing.set_start_method("spawn")
    reduction.register(_Socket, _reduce_socket)
    sys.meta_path.insert(0, _Finder())


# What refuses on Windows


def _is_socket(file: Any) -> bool:
    number = file if isinstance(file, int) else file.fileno()
    return stat.S_ISSOCK(os.fstat(number).st_mode)


class _Socket(socket.socket):
    """A socket without methods that Windows does not have; it reaches nobody at the address of all interfaces."""

    def __getattribute__(self, name: str) -> Any:
        if name in NO_METHODS:
            raise AttributeError(f"'socket' object has no attribute {name!r}")
        return super().__getattribute__(name)

    def connect(self, address: Any) -> None:
        _refuse_any(address)
        super().connect(address)

    def connect_ex(self, address: Any) -> int:
        _refuse_any(address)
        return super().connect_ex(address)


def _reduce_socket(sock: socket.socket) -> Any:
    """Hand a socket to a process that is started, as `multiprocessing` does for those of the class `socket.socket`."""
    return _rebuilt_socket, (reduction.DupFd(sock.fileno()), sock.family, sock.type, sock.proto)


def _rebuilt_socket(number: Any, family: int, kind: int, protocol: int) -> socket.socket:
    return socket.socket(family, kind, protocol, fileno=number.detach())


def _refuse_any(address: Any) -> None:
    if isinstance(address, tuple) and address[0] in ("0.0.0.0", "::"):
        raise OSError(10049, "The requested address is not valid in its context")


def _socketpair(*arguments: Any) -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets of loopback, as Python makes them there."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


class _Selector(selectors.SelectSelector):
    """Waits for sockets alone, for so many at most, and not for none: `select` there raises WSAEINVAL then."""

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        if not _is_socket(fileobj):
            raise OSError(10038, "An operation was attempted on something that is not a socket")
        if len(self.get_map()) >= MOST_SELECTED:
            raise ValueError("too many file descriptors in select()")
        return super().register(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self.get_map():
            raise OSError(10022, "An invalid argument was supplied")
        return super().select(timeout)


def _select(rlist: Sequence[Any], wlist: Sequence[Any], xlist: Sequence[Any], timeout: float | None = None) -> Any:
    files = [*rlist, *wlist, *xlist]
    if not files:
        raise OSError(10022, "An invalid argument was supplied")
    if not all(map(_is_socket, files)):
        raise OSError(10038, "An operation was attempted on something that is not a socket")
    return select.select(rlist, wlist, xlist, timeout)


def _set_wakeup_fd(number: int, *, warn_on_full_buffer: bool = True) -> int:
    if number != -1 and not _is_socket(number):
        raise ValueError(f"{number} is not a socket; on Windows only sockets can be woken")
    return signal.set_wakeup_fd(number, warn_on_full_buffer=warn_on_full_buffer)


def _signal(number: int, handler: Any) -> Any:
    if number not in [getattr(signal, name) for name in SIGNALS]:
        raise ValueError("signal number out of range")
    if number == signal.SIGTERM:
        # Python takes the handler, but no other process can send this signal there: ending a process runs no handler.
        before, _term[0] = _term[0], handler
        return before
    return signal.signal(number, handler)


_term: list[Any] = [signal.SIG_DFL]


def _kill(pid: int, number: int) -> None:
    """End a process at once with the signal's number as its exit code, as TerminateProcess does."""
    if pid == os.getpid():
        os._exit(number)
    os.kill(pid, signal.SIGKILL)


def _symlink(*arguments: Any, **keywords: Any) -> None:
    raise OSError(1314, "A required privilege is not held by the client")


class _Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Starts processes without what Windows cannot hand over; ending one gives it no time."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        if keywords.pop("pass_fds", ()):
            raise AssertionError("pass_fds not supported on Windows.")
        for name in ("preexec_fn", "process_group", "user", "group", "umask"):
            if keywords.pop(name, None) is not None:
                raise ValueError(f"{name} is not supported on Windows platforms")
        keywords.pop("start_new_session", None)  # is ignored there: Ctrl-C reaches every process of the console
        super().__init__(*arguments, **keywords)

    def send_signal(self, number: int) -> None:
        if number != signal.SIGTERM:
            raise ValueError(f"Unsupported signal: {number}")
        self.kill()

    def terminate(self) -> None:
        self.kill()

    def kill(self) -> None:
        super().send_signal(signal.SIGKILL)


def _start_methods() -> list[str]:
    return ["spawn"]


def _get_context(method: str | None = None) -> Any:
    if method not in (None, "spawn"):
        raise ValueError(f"cannot find context for {method!r}")
    return multiprocessing.get_context("spawn")


# What is missing


class _View(types.ModuleType):
    """A module as it is on Windows: some names are missing, some mean something else."""

    def __init__(self, module: types.ModuleType, missing: str, other: Mapping[str, Any]) -> None:
        super().__init__(module.__name__, module.__doc__)
        self._module, self._missing = module, frozenset(missing.split())
        self.__dict__.update(other)

    def __getattr__(self, name: str) -> Any:
        if name in self._missing:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} on Windows")
        return getattr(self._module, name)

    def __dir__(self) -> list[str]:
        return sorted((set(dir(self._module)) | set(self.__dict__)) - self._missing)


_OTHER: dict[str, dict[str, Any]] = {
    "multiprocessing": {"get_all_start_methods": _start_methods, "get_context": _get_context},
    "os": {"name": "nt", "kill": _kill, "symlink": _symlink, "O_BINARY": 0},
    "platform": {"system": lambda: "Windows"},
    "select": {"select": _select},
    "selectors": {"DefaultSelector": _Selector, "SelectSelector": _Selector},
    "signal": {"SIGBREAK": 21, "CTRL_C_EVENT": 0, "set_wakeup_fd": _set_wakeup_fd, "signal": _signal},
    "subprocess": {"Popen": _Popen, "CREATE_NEW_PROCESS_GROUP": 0x200},
    "sys": {"platform": "win32"},
}
_VIEWS = {
    module.__name__: _View(module, MISSING.get(module.__name__, ""), _OTHER.get(module.__name__, {}))
    for module in (multiprocessing, os, platform, select, selectors, signal, socket, subprocess, sys, time)
}


def _import(
    name: str,
    globals: Mapping[str, Any] | None = None,
    locals: Mapping[str, Any] | None = None,
    fromlist: Sequence[str] = (),
    level: int = 0,
) -> Any:
    """Import for a module of `bridge`."""
    if level == 0 and name.partition(".")[0] in NO_MODULES:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    module = builtins.__import__(name, globals, locals, fromlist, level)
    return _VIEWS.get(module.__name__, module)


_BUILTINS = {**vars(builtins), "__import__": _import}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of `bridge` where the others do, and has them import views."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "bridge":
            return None
        for finder in sys.meta_path:
            find: Callable[..., Any] | None = getattr(finder, "find_spec", None)
            if finder is not self and find is not None and (spec := find(name, path, target)) is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__builtins__"] = _BUILTINS
        self._loader.exec_module(module)
